"""Message transport over Ray: each device is a Ray actor, and messages are calls of its methods.

The Ray cluster is either started for the run or joined. No other module imports ray. This module
does not import torch, so that the environment of a device's process is set before torch reads it.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from weft.errors import ConfigError, DevicesLost, RunError
from weft.observe.memory import build_heap_variables, prepare_heaps
from weft.runtime.machines import (
    AddressWatch,
    RayNode,
    ScratchFolder,
    can_connect,
    check_listens,
    count_threads,
    order_bundles,
    remove_leftovers,
    silence_library,
    sort_nodes,
)
from weft.runtime.processes import ProcessId, SupervisorPipe, find_descendants, kill_processes

if TYPE_CHECKING:
    from weft.runtime.device_process import (
        CommandReport,
        DeviceActivity,
        DeviceCommand,
        ProcessAddress,
    )
    from weft.runtime.dispatch import CommandTensors, DeviceLoss
    from weft.runtime.store import TensorRequest

START_SECONDS = 300.0  # for all device processes to start, including imports
PLACE_SECONDS = 600.0  # for the cluster to have enough free devices
POLL_SECONDS = 1.0  # a device without reports answers after this time
# A silent device counts as dead after this time, or the shortest call deadline if that is less.
SILENT_SECONDS = 300.0
MIN_SILENT_SECONDS = 30.0
EXPORT_SECONDS = 600.0
ACTIVITY_SECONDS = 5.0  # for a device to report its activity; a frozen process does not
LOCAL_RAYLET = "Ray's raylet on this machine"
# Ray's head or raylet is lost if its port refuses connections so long; Ray exits after 60 s.
OWN_GONE_SECONDS = 2.0
GONE_SECONDS = 20.0
# Threads of an actor: one receives commands; the others serve tensors and reports while the device
# computes.
THREADS = {"control": 1, "io": 4, "poll": 1}


class _RayPeers:
    """`PeerTransport` that reads tensors from the other Ray actors."""

    def __init__(self) -> None:
        self.actors: Sequence[Any] = ()

    def request(self, request: TensorRequest) -> Any:
        return self.actors[request.rank].export.remote(request.ids, request.keys)

    def take(self, promises: Sequence[Any], seconds: float) -> list[bytes]:
        return _take(promises, seconds)


def _take(promises: Sequence[Any], seconds: float) -> list[bytes]:
    try:
        answers: list[bytes] = ray.get(list(promises), timeout=seconds)
        return answers
    except GetTimeoutError:
        raise _build_late_error(seconds) from None
    except RayTaskError as error:
        raise RunError(f"tensors of another device cannot be read: {error.cause}") from error
    except RayError as error:
        raise DevicesLost(
            f"tensors of another device are lost ({_describe_error(error)})"
        ) from error


def _build_late_error(seconds: float) -> DevicesLost:
    return DevicesLost(f"tensors of another device did not arrive within {seconds:g} s")


class _DeviceActor:
    """Ray actor that contains the process of one device; `prepare` must be called first."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    @ray.method(concurrency_group="control")
    def prepare(
        self, environment: Mapping[str, str], folder: str, paths: Sequence[str]
    ) -> ProcessAddress:
        """Set up this process for a device, and return its address.

        Sets the environment variables, the working directory `folder` and the import `paths`.
        Raises `ConfigError` if the folder does not exist on this machine.
        """
        os.environ.update(environment)
        if not os.path.isdir(folder):
            raise ConfigError(
                f"there is no directory {folder} on {ray.util.get_node_ip_address()}; all "
                f"machines of a run must share one file system"
            )
        os.chdir(folder)
        sys.path[:0] = [path for path in paths if path not in sys.path]
        from weft.runtime.device_process import DeviceProcess

        self._peers = _RayPeers()
        self._process = DeviceProcess(self._rank, self._peers)
        return self._process.describe_address(ray.util.get_node_ip_address())

    @ray.method(concurrency_group="control")
    def open_store(self, address: str, world: int) -> int:
        return self._process.open_store(address, world)

    @ray.method(concurrency_group="control")
    def join(self, actors: Sequence[Any], address: str, port: int, device: str) -> None:
        self._peers.actors = actors
        self._process.join(address, port, len(actors), device)

    @ray.method(concurrency_group="control")
    def receive(
        self,
        place: int,
        number: int,
        command: DeviceCommand,
        ranks: Sequence[int],
        requests: Sequence[TensorRequest],
        shared: Sequence[Any],
    ) -> None:
        self._process.receive(place, number, command, ranks, requests, shared)

    @ray.method(concurrency_group="poll")
    def next_reports(self, seconds: float) -> list[CommandReport]:
        return self._process.next_reports(seconds)

    @ray.method(concurrency_group="io")
    def export(self, ids: Sequence[str], keys: Sequence[str]) -> bytes:
        return self._process.export(ids, keys)

    @ray.method(concurrency_group="io")
    def peak_memory_gb(self) -> float:
        return self._process.peak_memory_gb()

    @ray.method(concurrency_group="io")
    def activity(self) -> DeviceActivity:
        return self._process.activity()


class RayDevices:
    """`DeviceTransport` that sends messages to Ray actors, in the placement group `group`.

    `close` kills the actors, and also stops the Ray cluster if it was started for them.
    """

    shared_store = None

    def __init__(
        self,
        actors: Sequence[Any],
        where: Sequence[ProcessAddress],
        nodes: Sequence[str],
        cluster: RayCluster,
        group: Any,
    ) -> None:
        """Create the transport; `where` has each rank's process, and `nodes` its machine id."""
        self._actors = list(actors)
        self.addresses = list(where)
        self._nodes = list(nodes)
        self._cluster = cluster
        self._group = group
        self._pipe = SupervisorPipe.from_environment(os.environ)
        self._pipe.report_released()
        # pending request for reports -> (rank, start time)
        self._polls: dict[Any, tuple[int, float]] = {}
        for rank in range(len(actors)):
            self._request_reports(rank)

    def send(
        self,
        rank: int,
        place: int,
        number: int,
        command: DeviceCommand,
        ranks: Sequence[int],
        tensors: CommandTensors,
    ) -> None:
        from weft.runtime.commands import RunCall

        if isinstance(command, RunCall):
            self._pipe.report_call(
                number,
                command.mfc,
                command.step,
                ranks,
                [str(self.addresses[target]) for target in ranks],
            )
        self._actors[rank].receive.remote(
            place, number, command, tuple(ranks), list(tensors.requests), list(tensors.shared)
        )

    def receive(self) -> list[tuple[int, Sequence[CommandReport] | DeviceLoss]]:
        from weft.runtime.dispatch import DeviceLoss

        self._cluster.check_not_lost()
        if not self._polls:
            time.sleep(POLL_SECONDS)
            return []
        ready, _ = ray.wait(list(self._polls), num_returns=1, timeout=POLL_SECONDS)
        responses: list[tuple[int, Sequence[CommandReport] | DeviceLoss]] = []
        for request in ready:
            rank, _ = self._polls.pop(request)
            try:
                reports: Sequence[CommandReport] = ray.get(request)
                responses.append((rank, reports))
                self._request_reports(rank)
                self._pipe.report_finished(rank, reports)
            except RayError as error:
                self._cluster.is_alive()
                # the loss of Ray explains more than the loss of a device
                self._cluster.check_not_lost()
                node = self._cluster.find_lost_node(self._nodes[rank])
                if node is not None:
                    reason = f"its node {node.address} is lost"
                else:
                    reason = _describe_error(error)
                responses.append((rank, DeviceLoss(reason)))
        for request, (rank, since) in list(self._polls.items()):
            if time.monotonic() - since > self._cluster.silent_s:
                del self._polls[request]
                responses.append(
                    (rank, DeviceLoss(f"it has not responded for {self._cluster.silent_s:g} s"))
                )
        return responses

    def share(self, raw: bytes) -> Any:
        self._cluster.check_local_raylet()
        return ray.put(raw)

    def export(self, requests: Sequence[TensorRequest]) -> list[bytes]:
        actors = self._actors
        promises = [actors[r.rank].export.remote(r.ids, r.keys) for r in requests]
        if self._cluster.wait(promises, EXPORT_SECONDS):
            raise _build_late_error(EXPORT_SECONDS)
        self._cluster.check_local_raylet()
        return _take(promises, EXPORT_SECONDS)

    def peak_memory_gb(self) -> float:
        peaks = [actor.peak_memory_gb.remote() for actor in self._actors]
        return max(
            _collect_answers(self._cluster, peaks, "its peak memory", EXPORT_SECONDS, self._nodes)
        )

    def describe_activities(self, ranks: Sequence[int]) -> dict[int, DeviceActivity]:
        if not self._cluster.is_alive():
            return {}
        rank_of = {self._actors[rank].activity.remote(): rank for rank in ranks}
        ready, _ = ray.wait(list(rank_of), num_returns=len(rank_of), timeout=ACTIVITY_SECONDS)
        activities: dict[int, DeviceActivity] = {}
        for answer in ready:
            with suppress(RayError):
                activities[rank_of[answer]] = ray.get(answer)
        return activities

    def close(self, deadline_s: float) -> None:
        if self._cluster.is_alive():
            with suppress(RayError):
                for actor in self._actors:
                    ray.kill(actor)
                remove_placement_group(self._group)
        self._cluster.close()

    def _request_reports(self, rank: int) -> None:
        self._polls[self._actors[rank].next_reports.remote(POLL_SECONDS)] = (rank, time.monotonic())


class RayCluster:
    """Ray cluster that this process has joined.

    If this process also started the cluster, `scratch` is the cluster's temporary folder, and
    `processes` are its processes. A device that does not answer for `silent_s` seconds counts as
    dead.
    """

    def __init__(
        self, scratch: ScratchFolder | None = None, processes: Iterable[ProcessId] = ()
    ) -> None:
        self._scratch = scratch
        # Processes of a private cluster have these variables from their node.
        self.runtime_env = {} if scratch else {"env_vars": build_heap_variables(os.environ)}
        self._processes = set(processes)
        self.silent_s = SILENT_SECONDS
        context = ray.get_runtime_context()
        this_node = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
        host, _, port = context.gcs_address.rpartition(":")
        places = {
            "Ray's head": (host, int(port)),
            LOCAL_RAYLET: (this_node["NodeManagerAddress"], this_node["NodeManagerPort"]),
        }
        self._watch = AddressWatch(
            places, OWN_GONE_SECONDS if scratch is not None else GONE_SECONDS
        )

    def is_alive(self) -> bool:
        """Return whether Ray accepts connections.

        Check this before other requests, because a request to a dead Ray blocks for a minute.
        """
        self._watch.check()
        return self._watch.lost_part is None

    def check_local_raylet(self) -> None:
        """Raise `DevicesLost` if this machine's raylet (Ray's local daemon) is dead.

        Check this before using the raylet, because Ray ends any process that uses a dead one.
        """
        self._watch.check(LOCAL_RAYLET)
        self.check_not_lost()

    def check_not_lost(self) -> None:
        """Raise `DevicesLost` if part of Ray is lost, after reporting this to the supervisor."""
        lost_part = self._watch.lost_part
        if lost_part is not None:
            SupervisorPipe.from_environment(os.environ).report_lost_part(lost_part)
            raise DevicesLost(lost_part)

    @classmethod
    def start(cls, cpus: int, gpus: int) -> RayCluster:
        """Start a private Ray cluster on this machine, which ends with this process.

        Must be called from the main thread, since the cluster's processes end with the thread that
        started them. Raises `RunError` if Ray does not start.
        """
        remove_leftovers()
        scratch = ScratchFolder()
        before = frozenset(find_descendants())
        # The token is only in this environment, which the cluster's processes inherit.
        variables = {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_gcs_rpc_server_reconnect_timeout_s": "20",  # then they end without head
        }
        for name, value in variables.items():
            os.environ.setdefault(name, value)
        try:
            with silence_library("ray"), prepare_heaps():
                ray.init(
                    address="local",
                    num_cpus=cpus,
                    num_gpus=gpus,
                    include_dashboard=False,
                    _node_ip_address="127.0.0.1",
                    _temp_dir=str(scratch.path),
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    configure_logging=False,
                )
        except Exception as error:  # Ray raises no specific class
            kill_processes(find_descendants() - before)
            scratch.remove()
            raise RunError(
                f"Ray did not start on this machine: {_describe_error(error)}"
            ) from error
        return cls(scratch, find_descendants() - before)

    @classmethod
    def join(cls, address: str) -> RayCluster:
        """Join the Ray cluster at `address`. Raises `ConfigError` if no cluster answers there."""
        try:
            check_listens(address)  # fail at once; Ray itself would retry for minutes
            with silence_library("ray"):
                if ray.is_initialized():
                    ray.shutdown()  # left over from a failed attempt
                ray.init(
                    address=address,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    configure_logging=False,
                )
            return cls()
        except (
            Exception
        ) as error:  # a head that has just restarted fails in many ways, including Ray's assertions
            with silence_library("ray"), suppress(Exception):
                # a partial connection, to a head that has no node yet, would make the next
                # attempt fail
                ray.shutdown()
            raise ConfigError(
                f"ray_address={address!r}: no Ray cluster answers there ({_describe_error(error)}); start "
                f"one with "
                "`ray start --head` and give its address, or write mode=local"
            ) from error

    def list_nodes(self) -> list[RayNode]:
        """Return the machines that are up: this one first, for device 0, then others by address."""
        up = [RayNode.from_listing(node) for node in ray.nodes() if node["Alive"]]
        return sort_nodes(up, ray.get_runtime_context().get_node_id())

    def find_lost_node(self, id: str) -> RayNode | None:
        """Return the machine `id` if it is dead or its raylet is unreachable, otherwise None."""
        for listed in ray.nodes():
            if listed["NodeID"] == id:
                raylet = (listed["NodeManagerAddress"], listed["NodeManagerPort"])
                is_up = listed["Alive"] and can_connect(raylet)
                return None if is_up else RayNode.from_listing(listed)
        return None

    def launch(self, count: int, device: str, environment: Mapping[str, str]) -> DeviceLaunch:
        """Start the processes of `count` devices in the background.

        They are packed onto as few machines as possible. `device` is the type of the devices
        ("cuda" or "cpu").
        """
        return DeviceLaunch(self, count, device, environment)

    def add_processes(self, pids: Collection[int]) -> None:
        """Remember device processes on this machine, so that `close` can kill them."""
        self._processes |= {process for process in find_descendants() if process.pid in pids}

    def wait(self, promises: Sequence[Any], seconds: float) -> list[Any]:
        """Wait for Ray object references; return those pending after `seconds` seconds.

        Raises `DevicesLost` if Ray is lost.
        """
        late = list(promises)
        end = time.monotonic() + seconds
        while late and time.monotonic() < end:
            self.check_not_lost()
            _, late = ray.wait(late, num_returns=len(late), timeout=POLL_SECONDS)
        return late

    def close(self) -> None:
        """Disconnect; if this process started the cluster, also stop it and remove its files."""
        self._watch.close()
        with silence_library("ray"):
            ray.shutdown()
        if self._scratch is not None:
            kill_processes(self._processes)  # helper processes survive if part of Ray was lost
            self._scratch.remove()


class DeviceLaunch:
    """Handle of device processes that are being started in the background.

    Unless `OMP_NUM_THREADS` is set, a machine's CPUs are divided equally among its device
    processes, and each process uses as many threads as it has CPUs. To cancel the launch, close the
    `cluster`.
    """

    def __init__(
        self, cluster: RayCluster, count: int, device: str, environment: Mapping[str, str]
    ) -> None:
        self.cluster = cluster
        self._device = device
        self._environment = environment
        self._actors: list[Any] = []
        self._nodes: list[str] = []  # ids of the actors' machines, by rank
        self._descriptions: list[Any] = []  # pending descriptions of the processes
        bundle = {"CPU": 1, "GPU": 1} if device == "cuda" else {"CPU": 1}
        self._group = placement_group([bundle] * count, strategy="PACK")
        if self._wait_for_placement(POLL_SECONDS):
            self._start_actors()

    def wait_for_devices(self) -> RayDevices:
        """Wait until all processes have joined the process group, and return the devices.

        Raises `RunError` if this takes too long.
        """
        if not self._actors:
            if not self._wait_for_placement(PLACE_SECONDS):
                remove_placement_group(self._group)
                count = self._group.bundle_count
                raise RunError(
                    f"the cluster did not have {count} free devices within {PLACE_SECONDS:g} s; "
                    f"other programs use them"
                )
            self._start_actors()
        cluster = self.cluster
        actors = self._actors
        where = _collect_answers(
            cluster, self._descriptions, "its process", START_SECONDS, self._nodes
        )
        address = where[0].address
        (port,) = _collect_answers(
            cluster,
            [actors[0].open_store.remote(address, len(actors))],
            "its process",
            START_SECONDS,
            self._nodes,
        )
        promises = [actor.join.remote(actors, address, port, self._device) for actor in actors]
        _collect_answers(cluster, promises, "the other ranks", START_SECONDS, self._nodes)
        cluster.add_processes([process.pid for process in where])
        return RayDevices(actors, where, self._nodes, cluster, self._group)

    def _wait_for_placement(self, seconds: float) -> bool:
        """Wait up to `seconds` seconds for Ray to reserve all devices; return whether it has.

        `PlacementGroup.ready` is not used because it would start a process.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.cluster.check_not_lost()
            try:
                if self._group.wait(POLL_SECONDS) and self._find_placement():
                    return True
            except RayError:
                self.cluster.is_alive()
                self.cluster.check_not_lost()  # the loss of Ray explains more
                raise
        return False

    def _find_placement(self) -> bool:
        """Find the machine of each device; return whether all of these machines are up."""
        nodes = self.cluster.list_nodes()
        self._node_of_bundle: dict[int, str] = placement_group_table(self._group)[
            "bundles_to_node_id"
        ]
        self._live_nodes = [node for node in nodes if node.id in self._node_of_bundle.values()]
        return {node.id for node in self._live_nodes} == set(self._node_of_bundle.values())

    def _start_actors(self) -> None:
        """Start one actor per device. Each sets up its process, and then reports its address."""
        threads = count_threads(self._node_of_bundle, self._live_nodes)
        actor_class = cast(Any, ray.remote)(concurrency_groups=THREADS, max_restarts=0)(
            _DeviceActor
        )
        for rank, index in enumerate(order_bundles(self._node_of_bundle, self._live_nodes)):
            actor = actor_class.options(
                num_cpus=1,
                num_gpus=int(self._device == "cuda"),
                runtime_env=self.cluster.runtime_env,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=index
                ),
            ).remote(rank)
            node = self._node_of_bundle[index]
            own_threads = os.environ.get("OMP_NUM_THREADS") or str(threads[node])
            environment = {**self._environment, "OMP_NUM_THREADS": own_threads}
            self._actors.append(actor)
            self._nodes.append(node)
            self._descriptions.append(
                actor.prepare.remote(environment, os.getcwd(), [path for path in sys.path if path])
            )


def _collect_answers(
    cluster: RayCluster, promises: Sequence[Any], awaited: str, seconds: float, nodes: Sequence[str]
) -> list[Any]:
    """Return the answers of all ranks to a request, waiting up to `seconds` seconds.

    `awaited` completes "device 0 waited for ..." in the error message, and `nodes` has the machine
    id of each rank. Raises `DevicesLost` naming the ranks that did not answer or the lost machine,
    and `RunError` or `ConfigError` if a device raised an error.
    """
    late = cluster.wait(promises, seconds)
    if late:
        ranks = ", ".join(str(rank) for rank, promise in enumerate(promises) if promise in late)
        raise DevicesLost(f"device {ranks} waited for {awaited} longer than {seconds:g} s")
    answers = []
    for rank, promise in enumerate(promises):
        try:
            answers.append(ray.get(promise))
        except RayTaskError as error:
            if isinstance(error.cause, ConfigError):
                raise ConfigError(f"device {rank}: {error.cause}") from error
            raise RunError(
                f"device {rank} failed: {type(error.cause).__name__}: {error.cause}"
            ) from error
        except RayActorError as error:
            cluster.is_alive()
            cluster.check_not_lost()  # the loss of Ray explains more
            node = cluster.find_lost_node(nodes[rank])
            if node is not None:
                reason = f"its node {node.address} is lost"
            else:
                reason = _describe_error(error)
            raise DevicesLost(f"device {rank} died: {reason}") from error
    return answers


def _describe_error(error: BaseException) -> str:
    if isinstance(error, RayActorError):
        return "its process ended (killed, out of memory, or crashed; see weft logs)"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
