"""Ray transport: devices are Ray actors, messages are calls of them. No other module imports ray.

A Ray cluster is started or joined. This module does not import torch, so that the environment of a
device's process is set before torch reads it.
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
from weft.runtime.nodes import Node, by_rank, in_order, threads_of
from weft.runtime.processes import Process, descendants, kill
from weft.runtime.scratch import Scratch, remove_leftovers
from weft.runtime.signals import quiet
from weft.runtime.supervised import Wire
from weft.runtime.watch import Watch, check_listens, listens

if TYPE_CHECKING:
    from weft.runtime.device_process import Activity, Command, Report, Want, Where
    from weft.runtime.dispatch import Given, Lost

START_SECONDS = 300.0  # for all device processes to start, including imports
PLACE_SECONDS = 600.0  # for the cluster to have enough free devices
POLL_SECONDS = 1.0  # a device without reports answers after this time
# A silent device counts as dead after this many seconds, or after the shortest call deadline
# if that is less.
SILENT_SECONDS = 300.0
LEAST_SILENT_SECONDS = 30.0
EXPORT_SECONDS = 600.0
ACTIVITY_SECONDS = 5.0  # for a device to report its activity; a frozen process does not
HERE = "Ray's raylet on this machine"
# Ray's head or raylet counts as lost if its port refuses connections for so long; after 60 s Ray
# would end this process.
OWN_GONE_SECONDS = 2.0
GONE_SECONDS = 20.0
# Threads of an actor: one receives commands; the others serve tensors and reports while the device
# computes.
THREADS = {"control": 1, "io": 4, "poll": 1}


class _Peers:
    """Implements `weft.runtime.device_process.Peers` with the other actors."""

    def __init__(self) -> None:
        self.actors: Sequence[Any] = ()

    def ask(self, want: Want) -> Any:
        return self.actors[want.rank].export.remote(want.ids, want.keys)

    def take(self, promises: Sequence[Any], seconds: float) -> list[bytes]:
        return _take(promises, seconds)


def _take(promises: Sequence[Any], seconds: float) -> list[bytes]:
    try:
        found: list[bytes] = ray.get(list(promises), timeout=seconds)
        return found
    except GetTimeoutError:
        raise _late(seconds) from None
    except RayTaskError as error:
        raise RunError(f"tensors of another device cannot be read: {error.cause}") from error
    except RayError as error:
        raise DevicesLost(f"tensors of another device are lost ({_reason(error)})") from error


def _late(seconds: float) -> DevicesLost:
    return DevicesLost(f"tensors of another device did not arrive within {seconds:g} s")


class _Device:
    """Ray actor of one device.

    `prepare` imports `weft.runtime.device_process`, after setting the environment.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank

    @ray.method(concurrency_group="control")
    def prepare(self, environment: Mapping[str, str], folder: str, paths: Sequence[str]) -> Where:
        """Set environment, working directory and import paths, create the process and describe it."""
        os.environ.update(environment)
        if not os.path.isdir(folder):
            raise ConfigError(
                f"there is no directory {folder} on {ray.util.get_node_ip_address()}; all "
                f"machines of a run must share one file system"
            )
        os.chdir(folder)
        sys.path[:0] = [path for path in paths if path not in sys.path]
        from weft.runtime.device_process import DeviceProcess

        self._peers = _Peers()
        self._process = DeviceProcess(self._rank, self._peers)
        return self._process.where(ray.util.get_node_ip_address())

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
        command: Command,
        ranks: Sequence[int],
        wants: Sequence[Want],
        shared: Sequence[Any],
    ) -> None:
        self._process.receive(place, number, command, ranks, wants, shared)

    @ray.method(concurrency_group="poll")
    def next_reports(self, seconds: float) -> list[Report]:
        return self._process.next_reports(seconds)

    @ray.method(concurrency_group="io")
    def export(self, ids: Sequence[str], keys: Sequence[str]) -> bytes:
        return self._process.export(ids, keys)

    @ray.method(concurrency_group="io")
    def peak_memory_gb(self) -> float:
        return self._process.peak_memory_gb()

    @ray.method(concurrency_group="io")
    def activity(self) -> Activity:
        return self._process.activity()


class RayDevices:
    """Implements `weft.runtime.dispatch.Devices`.

    `close` kills the actors, and the Ray cluster if it was started for them.
    """

    def __init__(
        self,
        actors: Sequence[Any],
        where: Sequence[Where],
        nodes: Sequence[str],
        cluster: Cluster,
        group: Any,
    ) -> None:
        """Create the group of devices; `nodes` are the ids of the actors' machines, by rank."""
        self._actors = list(actors)
        self.where = list(where)
        self._nodes = list(nodes)
        self._cluster = cluster
        self._group = group
        self._wire = Wire.of(os.environ)
        self._wire.anew()
        # pending request for reports -> (rank, start time)
        self._polls: dict[Any, tuple[int, float]] = {}
        for rank in range(len(actors)):
            self._poll(rank)

    def send(
        self,
        rank: int,
        place: int,
        number: int,
        command: Command,
        ranks: Sequence[int],
        given: Given,
    ) -> None:
        from weft.runtime.commands import Call

        if isinstance(command, Call):
            self._wire.began(
                number, command.mfc, command.step, ranks, [str(self.where[each]) for each in ranks]
            )
        self._actors[rank].receive.remote(
            place, number, command, tuple(ranks), list(given.wants), list(given.shared)
        )

    def receive(self) -> list[tuple[int, Sequence[Report] | Lost]]:
        from weft.runtime.dispatch import Lost

        self._cluster.check_there()
        if not self._polls:
            time.sleep(POLL_SECONDS)
            return []
        ready, _ = ray.wait(list(self._polls), num_returns=1, timeout=POLL_SECONDS)
        found: list[tuple[int, Sequence[Report] | Lost]] = []
        for each in ready:
            rank, _ = self._polls.pop(each)
            try:
                reports: Sequence[Report] = ray.get(each)
                found.append((rank, reports))
                self._poll(rank)
                self._wire.heard(rank, reports)
            except RayError as error:
                self._cluster.answers()
                # the loss of Ray explains more than the loss of a device
                self._cluster.check_there()
                node = self._cluster.find_lost_node(self._nodes[rank])
                if node is not None:
                    reason = f"its node {node.address} is lost"
                else:
                    reason = _reason(error)
                found.append((rank, Lost(reason)))
        for each, (rank, since) in list(self._polls.items()):
            if time.monotonic() - since > self._cluster.silent_s:
                del self._polls[each]
                found.append((rank, Lost(f"it has not responded for {self._cluster.silent_s:g} s")))
        return found

    def share(self, raw: bytes) -> Any:
        self._cluster.check_here()
        return ray.put(raw)

    def export(self, wants: Sequence[Want]) -> list[bytes]:
        asked = [self._actors[want.rank].export.remote(want.ids, want.keys) for want in wants]
        if self._cluster.wait(asked, EXPORT_SECONDS):
            raise _late(EXPORT_SECONDS)
        self._cluster.check_here()
        return _take(asked, EXPORT_SECONDS)

    def peak_memory_gb(self) -> float:
        asked = [actor.peak_memory_gb.remote() for actor in self._actors]
        return max(_ask(self._cluster, asked, "its peak memory", EXPORT_SECONDS, self._nodes))

    def activities(self, ranks: Sequence[int]) -> dict[int, Activity]:
        if not self._cluster.answers():
            return {}
        asked = {self._actors[rank].activity.remote(): rank for rank in ranks}
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ACTIVITY_SECONDS)
        found: dict[int, Activity] = {}
        for each in ready:
            with suppress(RayError):
                found[asked[each]] = ray.get(each)
        return found

    def close(self, deadline_s: float) -> None:
        if self._cluster.answers():
            with suppress(RayError):
                for actor in self._actors:
                    ray.kill(actor)
                remove_placement_group(self._group)
        self._cluster.close()

    def _poll(self, rank: int) -> None:
        self._polls[self._actors[rank].next_reports.remote(POLL_SECONDS)] = (rank, time.monotonic())


class Cluster:
    """Ray cluster that this process has joined.

    `scratch` is the folder of a cluster started by this process. A device without answer for
    `silent_s` seconds counts as dead.
    """

    def __init__(self, scratch: Scratch | None = None, processes: Iterable[Process] = ()) -> None:
        self._scratch = scratch
        self._processes = set(processes)
        self.silent_s = SILENT_SECONDS
        context = ray.get_runtime_context()
        here = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
        host, _, port = context.gcs_address.rpartition(":")
        places = {
            "Ray's head": (host, int(port)),
            HERE: (here["NodeManagerAddress"], here["NodeManagerPort"]),
        }
        self._watch = Watch(places, OWN_GONE_SECONDS if scratch is not None else GONE_SECONDS)

    @property
    def gone(self) -> str | None:
        """Description of the lost part of Ray, or None."""
        return self._watch.gone

    def answers(self) -> bool:
        """Check now whether Ray is alive.

        A request to a dead Ray blocks for a minute, after which Ray ends this process.
        """
        self._watch.check()
        return self.gone is None

    def check_here(self) -> None:
        """Raise `DevicesLost` if this machine's raylet does not answer.

        Ray ends a process that uses the object store of a dead raylet.
        """
        self._watch.check(HERE)
        self.check_there()

    def check_there(self) -> None:
        """Raise `DevicesLost` if part of Ray is known to be lost.

        The supervisor gets the report first because Ray can end this process at any moment.
        """
        if self.gone is not None:
            Wire.of(os.environ).gone(self.gone)
            raise DevicesLost(self.gone)

    @classmethod
    def start(cls, cpus: int, gpus: int) -> Cluster:
        """Start a private Ray cluster on this machine, which ends with this process.

        Must be called from the main thread, since the cluster's processes end with the thread that
        started them. Raises `RunError` if Ray does not start.
        """
        remove_leftovers()
        scratch = Scratch()
        before = frozenset(descendants())
        # The token is only in this environment, which the cluster's processes inherit.
        wanted = {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            # remaining processes of a cluster without head end after this time
            "RAY_gcs_rpc_server_reconnect_timeout_s": "20",
        }
        os.environ.update({name: value for name, value in wanted.items() if name not in os.environ})
        try:
            with quiet("ray"):
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
            kill(descendants() - before)
            scratch.remove()
            raise RunError(f"Ray did not start on this machine: {_reason(error)}") from error
        return cls(scratch, descendants() - before)

    @classmethod
    def join(cls, address: str) -> Cluster:
        """Join the cluster at `address`. Raises `ConfigError` if none answers there."""
        try:
            check_listens(address)  # fail at once; Ray itself would retry for minutes
            with quiet("ray"):
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
            with quiet("ray"), suppress(Exception):
                # a partial connection, to a head that has no node yet, would make the next
                # attempt fail
                ray.shutdown()
            raise ConfigError(
                f"ray_address={address!r}: no Ray cluster answers there ({_reason(error)}); start "
                f"one with "
                "`ray start --head` and give its address, or write mode=local"
            ) from error

    def nodes(self) -> list[Node]:
        """Return the machines that are up: this one first, the others by address.

        Device 0 is then on the machine where the run was started.
        """
        up = [Node.of(node) for node in ray.nodes() if node["Alive"]]
        return in_order(up, ray.get_runtime_context().get_node_id())

    def find_lost_node(self, id: str) -> Node | None:
        """Return the machine with this id if Ray lists it as dead or its raylet does not listen."""
        for listed in ray.nodes():
            if listed["NodeID"] == id:
                raylet = (listed["NodeManagerAddress"], listed["NodeManagerPort"])
                return None if listed["Alive"] and listens(raylet) else Node.of(listed)
        return None

    def launch(self, count: int, device: str, environment: Mapping[str, str]) -> Launch:
        """Start the processes of `count` devices, packed onto few machines; see `Launch`."""
        return Launch(self, count, device, environment)

    def remember(self, pids: Collection[int]) -> None:
        """Remember local device processes, so that `close` can kill them."""
        self._processes |= {process for process in descendants() if process.pid in pids}

    def wait(self, promises: Sequence[Any], seconds: float) -> list[Any]:
        """Wait for the promises and return the late ones.

        Raises `DevicesLost` as soon as Ray is known to be lost.
        """
        late = list(promises)
        end = time.monotonic() + seconds
        while late and time.monotonic() < end:
            self.check_there()
            _, late = ray.wait(late, num_returns=len(late), timeout=POLL_SECONDS)
        return late

    def close(self) -> None:
        """Disconnect; a cluster started by this process is stopped and its files are removed."""
        self._watch.close()
        with quiet("ray"):
            ray.shutdown()
        if self._scratch is not None:
            kill(self._processes)  # helper processes survive if part of Ray was lost
            self._scratch.remove()


class Launch:
    """Device processes that start in the background; `devices` waits for them.

    Each device uses its share of the machine's CPUs as threads, unless `OMP_NUM_THREADS` is set. To
    cancel, close the `cluster`.
    """

    def __init__(
        self, cluster: Cluster, count: int, device: str, environment: Mapping[str, str]
    ) -> None:
        self.cluster = cluster
        self._device = device
        self._environment = environment
        self._actors: list[Any] = []
        self._nodes: list[str] = []  # ids of the actors' machines, by rank
        self._asked: list[Any] = []  # pending descriptions of the processes
        bundle = {"CPU": 1, "GPU": 1} if device == "cuda" else {"CPU": 1}
        self._group = placement_group([bundle] * count, strategy="PACK")
        if self._has_place(POLL_SECONDS):
            self._begin()

    def devices(self) -> RayDevices:
        """Wait until all processes have started and joined the process group.

        Raises `RunError` if they do not start in time.
        """
        if not self._actors:
            if not self._has_place(PLACE_SECONDS):
                remove_placement_group(self._group)
                count = self._group.bundle_count
                raise RunError(
                    f"the cluster did not have {count} free devices within {PLACE_SECONDS:g} s; "
                    f"other programs use them"
                )
            self._begin()
        cluster = self.cluster
        actors = self._actors
        where = _ask(cluster, self._asked, "its process", START_SECONDS, self._nodes)
        address = where[0].address
        (port,) = _ask(
            cluster,
            [actors[0].open_store.remote(address, len(actors))],
            "its process",
            START_SECONDS,
            self._nodes,
        )
        asked = [actor.join.remote(actors, address, port, self._device) for actor in actors]
        _ask(cluster, asked, "the other ranks", START_SECONDS, self._nodes)
        cluster.remember([each.pid for each in where])
        return RayDevices(actors, where, self._nodes, cluster, self._group)

    def _has_place(self, seconds: float) -> bool:
        """Wait until the placement group is ready, and return whether it is.

        `PlacementGroup.ready` is not used because it would start a process.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.cluster.check_there()
            try:
                if self._group.wait(POLL_SECONDS) and self._find_place():
                    return True
            except RayError:
                self.cluster.answers()
                self.cluster.check_there()  # the loss of Ray explains more
                raise
        return False

    def _find_place(self) -> bool:
        """Look up the machine of each device; return False while one of them is not up.

        A lost machine may have returned under another id, to which Ray moves the devices.
        """
        nodes = self.cluster.nodes()
        self._on: dict[int, str] = placement_group_table(self._group)["bundles_to_node_id"]
        self._up = [node for node in nodes if node.id in self._on.values()]
        return {node.id for node in self._up} == set(self._on.values())

    def _begin(self) -> None:
        """Start the actors and request their descriptions.

        An actor answers once it has imported everything a device needs.
        """
        threads = threads_of(self._on, self._up)
        actor_class = cast(Any, ray.remote)(concurrency_groups=THREADS, max_restarts=0)(_Device)
        for rank, index in enumerate(by_rank(self._on, self._up)):
            actor = actor_class.options(
                num_cpus=1,
                num_gpus=int(self._device == "cuda"),
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=index
                ),
            ).remote(rank)
            node = self._on[index]
            own_threads = os.environ.get("OMP_NUM_THREADS") or str(threads[node])
            told = {**self._environment, "OMP_NUM_THREADS": own_threads}
            self._actors.append(actor)
            self._nodes.append(node)
            self._asked.append(
                actor.prepare.remote(told, os.getcwd(), [path for path in sys.path if path])
            )


def _ask(
    cluster: Cluster, promises: Sequence[Any], what: str, seconds: float, nodes: Sequence[str]
) -> list[Any]:
    """Return one answer per rank; `nodes` are the machines of the ranks.

    Raises `DevicesLost` naming the ranks that did not answer or the lost machine, or the error that
    a device raised.
    """
    late = cluster.wait(promises, seconds)
    if late:
        ranks = ", ".join(str(rank) for rank, each in enumerate(promises) if each in late)
        raise DevicesLost(f"device {ranks} waited for {what} longer than {seconds:g} s")
    found = []
    for rank, each in enumerate(promises):
        try:
            found.append(ray.get(each))
        except RayTaskError as error:
            if isinstance(error.cause, ConfigError):
                raise ConfigError(f"device {rank}: {error.cause}") from error
            raise RunError(
                f"device {rank} failed: {type(error.cause).__name__}: {error.cause}"
            ) from error
        except RayActorError as error:
            cluster.answers()
            cluster.check_there()  # the loss of Ray explains more
            node = cluster.find_lost_node(nodes[rank])
            if node is not None:
                reason = f"its node {node.address} is lost"
            else:
                reason = _reason(error)
            raise DevicesLost(f"device {rank} died: {reason}") from error
    return found


def _reason(error: BaseException) -> str:
    if isinstance(error, RayActorError):
        return "its process ended (killed, out of memory, or crashed; see weft logs)"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
