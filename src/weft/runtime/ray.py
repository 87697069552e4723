"""The one file that knows Ray: devices are its actors, messages its calls.

It starts a Ray of its own or joins one.

It imports no torch, so that a device's process gets its environment before anything reads it.
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

START_SECONDS = 300.0  # for the devices' processes to be there, with all that they import
PLACE_SECONDS = 600.0  # for a cluster to have the devices free
POLL_SECONDS = 1.0  # a device that has nothing to tell says so this often
# One that does not even say that counts as dead, after the shortest deadline of a call where that
# is less.
SILENT_SECONDS = 300.0
LEAST_SILENT_SECONDS = 30.0
EXPORT_SECONDS = 600.0
ACTIVITY_SECONDS = 5.0  # for a device to say what it is doing; one that stands still does not
HERE = "Ray's raylet on this machine"
# Ray's own processes count as gone when nobody listens for so long; after 60 s Ray would end this
# process.
OWN_GONE_SECONDS = 2.0
GONE_SECONDS = 20.0
# A device's threads: commands come in one by one; others fetch tensors, and the driver hears
# reports, whatever it computes.
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
        raise RunError(f"tensors that another device should hold: {error.cause}") from error
    except RayError as error:
        raise DevicesLost(
            f"tensors that another device holds are lost ({_reason(error)})"
        ) from error


def _late(seconds: float) -> DevicesLost:
    return DevicesLost(f"tensors that another device holds did not come within {seconds:g} s")


class _Device:
    """The actor of a device.

    `weft.runtime.device_process` is imported by `prepare`, once the environment is there.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank

    @ray.method(concurrency_group="control")
    def prepare(self, environment: Mapping[str, str], folder: str, paths: Sequence[str]) -> Where:
        """Become a process of the run: its environment, working directory and import paths; returns
        where it is.
        """
        os.environ.update(environment)
        if not os.path.isdir(folder):
            raise ConfigError(
                f"there is no directory {folder} on {ray.util.get_node_ip_address()}; all "
                f"machines of a run see one file system"
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

    `close` ends the actors, and the Ray that was started for them.
    """

    def __init__(
        self,
        actors: Sequence[Any],
        where: Sequence[Where],
        nodes: Sequence[str],
        cluster: Cluster,
        group: Any,
    ) -> None:
        """`nodes` are the ids of the machines that the actors are on, by rank."""
        self._actors = list(actors)
        self.where = list(where)
        self._nodes = list(nodes)
        self._cluster = cluster
        self._group = group
        self._wire = Wire.of(os.environ)
        self._wire.anew()
        # what is asked for -> its rank, and since when
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
                # what became of it says more than what became of a device
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
                found.append((rank, Lost(f"it has said nothing for {self._cluster.silent_s:g} s")))
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
    """A Ray that this process is joined to.

    `scratch` is the folder of one that it started itself. A device that says nothing for `silent_s`
    counts as dead.
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
        """What of Ray itself is gone."""
        return self._watch.gone

    def answers(self) -> bool:
        """Whether Ray is there, at this moment: who asks one that is not waits for a minute, and is
        ended by it then.
        """
        self._watch.check()
        return self.gone is None

    def check_here(self) -> None:
        """Raises `DevicesLost` where the raylet of this machine is gone: Ray ends a process that
        uses its store then.
        """
        self._watch.check(HERE)
        self.check_there()

    def check_there(self) -> None:
        """Raises `DevicesLost` where it is known that something of Ray is gone; Ray may end this
        process in a moment.
        """
        if self.gone is not None:
            Wire.of(os.environ).gone(self.gone)
            raise DevicesLost(self.gone)

    @classmethod
    def start(cls, cpus: int, gpus: int) -> Cluster:
        """A Ray of this process alone, on this machine, which ends with it.

        Called from the main thread: the end of a thread would be the end of what it started. Raises
        `RunError` where it does not start.
        """
        remove_leftovers()
        scratch = Scratch()
        before = frozenset(descendants())
        # Its token is in this environment alone, which the processes that it starts inherit.
        wanted = {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            # what is left of a Ray whose head is gone ends after this
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
        except Exception as error:  # Ray has no class of its own for it
            kill(descendants() - before)
            scratch.remove()
            raise RunError(f"Ray did not start on this machine: {_reason(error)}") from error
        return cls(scratch, descendants() - before)

    @classmethod
    def join(cls, address: str) -> Cluster:
        """Raises `ConfigError` where no cluster answers at the address."""
        try:
            check_listens(address)  # Ray itself would try for minutes
            with quiet("ray"):
                if ray.is_initialized():
                    ray.shutdown()  # the attempt before this one could not
                ray.init(
                    address=address,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    configure_logging=False,
                )
            return cls()
        except Exception as error:  # a head that has just come back fails in many ways, some of them assertions of Ray's
            with quiet("ray"), suppress(Exception):
                # what is half connected, to a head without a node yet, would refuse the next
                # attempt
                ray.shutdown()
            raise ConfigError(
                f"ray_address={address!r}: no Ray cluster answers there ({_reason(error)}); start "
                f"one with "
                "`ray start --head` and give its address, or write mode=local"
            ) from error

    def nodes(self) -> list[Node]:
        """The machines that are up: this one first, then by address, so that device 0 is where the
        run was started.
        """
        up = [Node.of(node) for node in ray.nodes() if node["Alive"]]
        return in_order(up, ray.get_runtime_context().get_node_id())

    def find_lost_node(self, id: str) -> Node | None:
        """Return the machine with this id if Ray has given it up, or if its raylet does not listen
        any more.
        """
        for listed in ray.nodes():
            if listed["NodeID"] == id:
                raylet = (listed["NodeManagerAddress"], listed["NodeManagerPort"])
                return None if listed["Alive"] and listens(raylet) else Node.of(listed)
        return None

    def launch(self, count: int, device: str, environment: Mapping[str, str]) -> Launch:
        """Begin to start a process for each of `count` devices, neighbours on one node where that
        can be; see `Launch`.
        """
        return Launch(self, count, device, environment)

    def remember(self, pids: Collection[int]) -> None:
        """Note processes of devices, for `close`: those of this machine that Ray has started."""
        self._processes |= {process for process in descendants() if process.pid in pids}

    def wait(self, promises: Sequence[Any], seconds: float) -> list[Any]:
        """Those that are late. Raises `DevicesLost` as soon as Ray itself is gone."""
        late = list(promises)
        end = time.monotonic() + seconds
        while late and time.monotonic() < end:
            self.check_there()
            _, late = ray.wait(late, num_returns=len(late), timeout=POLL_SECONDS)
        return late

    def close(self) -> None:
        """Leave; a Ray of our own ends with all its processes and files."""
        self._watch.close()
        with quiet("ray"):
            ray.shutdown()
        if self._scratch is not None:
            kill(self._processes)  # helpers outlive a Ray that has lost a part
            self._scratch.remove()


class Launch:
    """Processes for `count` devices that start while the caller does something else; `devices`
    waits for them.

    Each has its share of its node's CPUs as threads, unless `OMP_NUM_THREADS` is set. Who does not
    want them any more closes the `cluster`.
    """

    def __init__(
        self, cluster: Cluster, count: int, device: str, environment: Mapping[str, str]
    ) -> None:
        self.cluster = cluster
        self._device = device
        self._environment = environment
        self._actors: list[Any] = []
        self._nodes: list[str] = []  # ids of the machines that the actors are on, by rank
        self._asked: list[Any] = []  # where each of them is
        bundle = {"CPU": 1, "GPU": 1} if device == "cuda" else {"CPU": 1}
        self._group = placement_group([bundle] * count, strategy="PACK")
        if self._has_place(POLL_SECONDS):
            self._begin()

    def devices(self) -> RayDevices:
        """Wait until all are there and have met.

        Raises `RunError` where they do not start in time.
        """
        if not self._actors:
            if not self._has_place(PLACE_SECONDS):
                remove_placement_group(self._group)
                count = self._group.bundle_count
                raise RunError(
                    f"the cluster had no {count} devices free within {PLACE_SECONDS:g} s; others "
                    f"use it"
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
        """Wait until the devices are free for this run.

        (`PlacementGroup.ready` would start a process to find out.)
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.cluster.check_there()
            try:
                if self._group.wait(POLL_SECONDS) and self._find_place():
                    return True
            except RayError:
                self.cluster.answers()
                self.cluster.check_there()  # what became of Ray says more
                raise
        return False

    def _find_place(self) -> bool:
        """Take in which machine has which device.

        Return false while one of the machines is not up: a machine that was lost may have come back
        under another id, and Ray moves the devices there.
        """
        nodes = self.cluster.nodes()
        self._on: dict[int, str] = placement_group_table(self._group)["bundles_to_node_id"]
        self._up = [node for node in nodes if node.id in self._on.values()]
        return {node.id for node in self._up} == set(self._on.values())

    def _begin(self) -> None:
        """Start the actors, and ask each where it is: it imports what a device needs before it
        answers.
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
    """One answer a rank, of ranks on `nodes`.

    Raises `DevicesLost` naming the ranks that gave none and a node that is lost, or what the device
    raised.
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
            cluster.check_there()  # what became of Ray says more
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
