"""Worker group of many devices: turns the master's requests into jobs on the ranks of a role.

Tensors are sent from device to device. The driver keeps metadata, tensor locations, the loader's
rows and outputs of host functions; it fetches other tensors only on request.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from weft.data.sample import SequenceSample
from weft.errors import CheckpointError, DevicesLost, RunError
from weft.experiment import Experiment
from weft.graph.mfc import ParamSync
from weft.interfaces.base import MFCResult
from weft.runtime import commands
from weft.runtime.check import calls_of
from weft.runtime.commands import Build, Built, Call
from weft.runtime.device_process import Command, Report, Want
from weft.runtime.dispatch import Devices, Dispatch, Given, Job
from weft.runtime.events import Announced, Events, Failed, Finished, Started, Task
from weft.runtime.group import SampleMeta
from weft.runtime.locations import DRIVER as ON_DRIVER
from weft.runtime.locations import Locations
from weft.runtime.merge import merged, merged_seen
from weft.runtime.parameters import Parameters
from weft.runtime.roles import Place
from weft.runtime.saved import DRIVER, ENGINES, rank_folders, read_samples, write_samples
from weft.runtime.split import OWNER, owners
from weft.runtime.store import TensorStore

T = TypeVar("T")
BYTES_MOVED = "num_bytes_moved"  # metric of each call: bytes its devices received for it


class DeviceGroup:
    """Implements `WorkerGroup` on `devices`; each device builds its worker with `build`.

    From the first call on, the processes print to files in the folder `logs`.
    """

    def __init__(
        self, devices: Devices, experiment: Experiment, build: Build, logs: Path | None = None
    ) -> None:
        self.events: Events = queue.SimpleQueue()
        self._devices = devices
        self._experiment = experiment
        self._meshes = experiment.meshes()
        self._calls = calls_of(experiment)
        self._mesh_of = {name: experiment.mesh_of(node) for name, node in self._calls.items()}
        self._all = range(len(devices.where))
        self._announcing: set[str] = set()
        # running interruptible calls, with the copy whose weights may be updated
        self._interruptible: dict[Task, Place] = {}
        self._lock = threading.RLock()  # guards _locations and _store
        self._store = TensorStore()
        self._locations = Locations()
        self._closed = False
        self._logs = logs
        self._dispatch = Dispatch(devices)
        try:
            self._built: Mapping[int, Built] = self._ask(
                "building the engines", self._all, lambda rank: build
            ).result()
            hosts = [where.host for where in devices.where]
            self._parameters = Parameters(self._dispatch, experiment, self._built, hosts)
            self._parameters.begin()
        except BaseException:
            self.close(0.0)
            raise

    # -- calls

    def submit(
        self,
        mfc: str,
        step: int,
        parts: list[list[SampleMeta]],
        *,
        version: int | None = None,
        keeps: bool = False,
    ) -> None:
        if self._logs is not None:  # the run has started, so it may write into its directory
            command = commands.LogTo(self._logs)
            self._logs = None
            self._ask("opening its log", self._all, lambda rank: command)
        # Bring the weights of the call's mesh up to date first.
        node = self._calls[mfc]
        mesh = self._mesh_of[mfc]
        task = (mfc, step)
        get = self._parameters.follow if node.interruptible else self._parameters.refresh
        weights = get((node.role, mesh), self._fails(task), version)
        if keeps:
            self._parameters.keep(node.role, step, self._fails(task))
        # Find the part of each rank; the first rank of each part reports outputs.
        ids = owners([part for minibatch in parts for part in minibatch])
        of_rank = {
            rank: [minibatch[mesh.coordinates(rank).data] for minibatch in parts]
            for rank in mesh.ranks
        }
        own = {rank: owners(minibatches) for rank, minibatches in of_rank.items()}
        first = [mesh.ranks_of(data)[0] for data in range(mesh.layout.data)]
        shared: dict[Any, Any] = {}
        wanted: dict[int, list[Want]] = {}

        def make(rank: int) -> tuple[Command, Given]:
            described = commands.described(of_rank[rank], own[rank], OWNER)
            command = Call(mfc, step, of_rank[rank], described, mfc in self._announcing, weights)
            wanted[rank] = self._lacking(rank, own[rank], (*node.inputs, *node.optional_inputs))
            return command, self._given(wanted[rank], shared)

        def done(ends: Mapping[int, Report]) -> None:
            self._interruptible.pop(task, None)
            results = {rank: report.value for rank, report in ends.items()}
            for rank, result in results.items():
                self._arrived(rank, wanted[rank])
                if result.outputs is not None:
                    self._made(rank, result.outputs, again=rank not in first)
            whole = merged(
                [results[rank] for rank in first], [len(own[rank]) for rank in first], ids
            )
            moved = float(sum(report.moved for report in ends.values()))
            metrics = {**whole.metrics, BYTES_MOVED: moved}
            seen = merged_seen(results.values())
            self.events.put(Finished(task, MFCResult(whole.outputs, metrics, seen)))

        def announced(rank: int, event: Announced) -> None:
            if rank in first:
                self._made(rank, event.outputs)
                self.events.put(event)

        # Submit the call, then mark copies as outdated if it trains.
        job = Job(
            f"call {mfc!r} of role {node.role!r}",
            mesh.ranks,
            make,
            done,
            self._fails(task),
            self._starts(task),
            announced,
            frozenset({node.role}),
            seconds=None,
            task=task,
        )
        if node.interruptible:
            self._interruptible[task] = node.role, mesh
        self._dispatch.submit(job)
        if node.trains:
            self._parameters.trained(node.role, job, step + 1)
            for place in set(self._interruptible.values()):
                if place[0] == node.role:
                    self._parameters.follow(place, self._fails(task))

    def _lacking(self, rank: int, ids: Sequence[str], keys: Iterable[str]) -> list[Want]:
        with self._lock:
            wants = self._locations.lacking(rank, ids, keys)
            for want in wants:
                self._locations.expect(rank, want.ids, want.keys)
        return wants

    def _arrived(self, rank: int, wants: Sequence[Want]) -> None:
        with self._lock:
            for want in wants:
                self._locations.copied(rank, want.ids, want.keys)

    def _given(self, wants: Sequence[Want], shared: dict[Any, Any]) -> Given:
        """Return what a rank requests from other devices, and the rows the driver sends.

        `shared` caches the rows already serialized for this call.
        """
        rows = [(want.ids, want.keys) for want in wants if want.rank == ON_DRIVER]
        for row in rows:
            if row not in shared:
                with self._lock:
                    found = self._store.fetch(*row)
                shared[row] = self._devices.share(_bare(found).to_bytes())
        return Given(
            [want for want in wants if want.rank != ON_DRIVER], [shared[row] for row in rows]
        )

    def _made(self, rank: int, outputs: SampleMeta, *, again: bool = False) -> None:
        with self._lock:
            (self._locations.copied if again else self._locations.made)(
                rank, outputs.ids, outputs.keys
            )
            if outputs.metadata:
                self._store.put(SequenceSample(outputs.ids, {}, {}, {}, outputs.metadata))

    def _starts(self, task: Task) -> Callable[[], None]:
        return lambda: self.events.put(Started(task))

    def _fails(self, task: Task) -> Callable[[BaseException], None]:
        return lambda error: self.events.put(Failed(task, error))

    def overdue(self, mfc: str, step: int, told: str) -> RunError:
        return self._dispatch.overdue((mfc, step), told)

    def listen(self, mfc: str) -> None:
        self._announcing.add(mfc)

    # -- tensors on the driver

    def put(self, sample: SequenceSample) -> SampleMeta:
        with self._lock:
            self._locations.made(ON_DRIVER, sample.ids, sample.keys)
            return self._store.put(sample)

    def fetch(
        self, ids: Sequence[str], keys: Iterable[str], optional: Iterable[str] = ()
    ) -> SequenceSample:
        wanted = list(keys)
        with self._lock:
            wanted += [
                key for key in self._locations.everywhere(ids, optional) if key not in wanted
            ]
            wants = self._locations.lacking(ON_DRIVER, ids, wanted)
        raws = self._explained(lambda: self._devices.export(wants)) if wants else []
        with self._lock:
            for want, raw in zip(wants, raws, strict=True):
                self._store.put(SequenceSample.from_bytes(raw))
                self._locations.copied(ON_DRIVER, want.ids, want.keys)
            return self._store.fetch(ids, wanted)

    def discard(self, ids: Iterable[str]) -> None:
        with self._lock:
            gone = self._locations.discard(ids)
            self._store.discard(gone.pop(ON_DRIVER, ()))
        for rank, held in gone.items():
            self._ask(
                "discarding tensors",
                [rank],
                lambda rank, held=held: commands.Discard(held),  # type: ignore[misc]
            )

    def sync(self, s: ParamSync, step: int) -> None:
        task = (s.name, step)
        told = lambda version: self.events.put(Finished(task, version))  # noqa: E731
        self._parameters.move(s, told, self._fails(task), self._starts(task))

    # -- state

    def snapshot(self, d: Path) -> Future[None]:
        with self._lock:
            write_samples(d / DRIVER, self._store)
        return _none(
            self._ask("writing the recovery point", self._all, lambda rank: commands.Snapshot(d))
        )

    def restore(self, d: Path) -> None:
        if not (d / ENGINES).is_dir() or not rank_folders(d):
            raise CheckpointError(f"{d}: contains no state of workers")
        command = commands.Restore(d, len(self._all))
        found = self._ask("loading the recovery point", self._all, lambda rank: command).result()
        self._parameters.restored()
        for rank in sorted(found):
            for held in found[rank]:
                self._made(rank, held, again=True)
        for sample in read_samples([d / DRIVER]):
            with self._lock:
                self._locations.copied(ON_DRIVER, sample.ids, sample.keys)
                self._store.put(sample)

    def save(self, role: str, directory: Path) -> Future[None]:
        command = commands.Save(role, directory)
        return _none(
            self._ask(f"saving role {role!r}", self._meshes[role].ranks, lambda rank: command, role)
        )

    def profile(self, path: str | None = None) -> None:
        command = commands.Profile(path)
        self._ask("tracing its work", self._all, lambda rank: command).result()

    def close(self, deadline_s: float) -> None:
        if not self._closed:
            self._closed = True
            self._dispatch.close()
            self._devices.close(deadline_s)

    # -- facts

    def describe(self) -> Mapping[str, Mapping[str, Any]]:
        """Return facts by role, with `copies` by mesh and `moves`, its described transfers."""
        found: dict[str, dict[str, Any]] = {}
        for role, mesh in self._meshes.items():
            copies = {
                m: self._built[m.ranks[0]].copies[r, m]
                for r, m in self._experiment.copies()
                if r == role
            }
            moves = [f"{what}: {way}" for what, way in self._parameters.ways(role)]
            found[role] = {
                **self._built[mesh.ranks[0]].facts[role],
                "copies": copies,
                "moves": moves,
            }
        return found

    def numerics(self) -> Mapping[str, Any]:
        found = self._ask(
            "reading its numerical settings", [0], lambda rank: commands.Numerics()
        ).result()
        return {**found[0], "devices": len(self._all)}

    def hardware(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._ask(
            "reading its hardware", [0], lambda rank: commands.Hardware()
        ).result()[0]
        return found

    def peak_memory_gb(self) -> float:
        return self._explained(self._devices.peak_memory_gb)

    def _explained(self, ask: Callable[[], T]) -> T:
        try:
            return ask()
        except DevicesLost as error:
            raise self._dispatch.explained(error) from error

    def _ask(
        self,
        what: str,
        ranks: Sequence[int],
        make: Callable[[int], Command],
        role: str | None = None,
    ) -> Future[dict[int, Any]]:
        """Send one command to each rank, in order with earlier ones; return the results by rank."""
        future: Future[dict[int, Any]] = Future()

        def done(ends: Mapping[int, Report]) -> None:
            future.set_result({rank: report.value for rank, report in ends.items()})

        roles = frozenset({role} if role else ())
        made = lambda rank: (make(rank), Given())  # noqa: E731
        self._dispatch.submit(Job(what, ranks, made, done, partial(_fail, future), roles=roles))
        return future


def _fail(future: Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


def _none(future: Future[dict[int, Any]]) -> Future[None]:
    """Return a future that completes or fails with `future`, without its result."""
    over: Future[None] = Future()

    def told(done: Future[dict[int, Any]]) -> None:
        error = done.exception()
        if error is None:
            over.set_result(None)
        else:
            over.set_exception(error)

    future.add_done_callback(told)
    return over


def _bare(sample: SequenceSample) -> SequenceSample:
    """Return the sample without metadata, which is sent with the descriptions."""
    return SequenceSample(sample.ids, sample.lengths, sample.offsets, sample.data)
