"""What the driver asks of the processes of many devices: one small class each, pickled there and
run in order.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from weft.data.sample import SequenceSample
from weft.data.tokenizer import Tokenizer
from weft.engine.device import (
    hardware,
    numerics,
    reset_peak_memory,
    resolve_device,
    set_deterministic,
    set_tf32,
    set_threads,
)
from weft.engine.profile import Trace
from weft.engine.spec import ModelSpec
from weft.experiment import Experiment
from weft.graph.mfc import ParamSync
from weft.interfaces.base import MFCResult
from weft.realloc.execute import Giver, Reallocation
from weft.realloc.kept import Kept
from weft.realloc.plan import Transfer
from weft.registry import import_user_code
from weft.runtime import disk
from weft.runtime.device_process import DeviceProcess, Report
from weft.runtime.events import Event
from weft.runtime.group import SampleMeta
from weft.runtime.roles import Place
from weft.runtime.saved import NUMERICS, rank_folder, rank_folders
from weft.runtime.state import read_state, write_state
from weft.runtime.worker import Worker
from weft.topology import Mesh, Slice
from weft.writing import destination

Slices = Mapping[str, Slice]
NONE = -1  # no job has this number
ASKED_SECONDS = 600.0  # for a command that another rank has already


@dataclass(frozen=True)
class Built:
    """What a device made: of every role whose own mesh it is of, facts and the parameters that
    train steps change (None where its engine does not tell); of copies, facts; of every engine that
    parameters go to or come from, what it holds of each.
    """

    facts: Mapping[str, Mapping[str, Any]]
    copies: Mapping[Place, Mapping[str, Any]]
    trained: Mapping[str, frozenset[str] | None]
    slices: Mapping[Place, Slices]


@dataclass(frozen=True)
class Build:
    """Make the worker, with the engines of the roles that are on this device."""

    experiment: Experiment
    specs: Mapping[str, ModelSpec]
    tokenizers: Mapping[str, Tokenizer]
    cache: Path
    kind: str  # of device: cpu, cuda

    def run(self, process: DeviceProcess, number: int) -> Built:
        import_user_code(self.experiment.control.imports)
        process.device = device = resolve_device(self.kind)
        set_deterministic(self.experiment.control.deterministic)
        set_tf32(self.experiment.control.tf32, device)
        reset_peak_memory(device)
        specs = {role: replace(spec, device=str(device)) for role, spec in self.specs.items()}
        worker = Worker(
            self.experiment,
            specs,
            self.tokenizers,
            str(device),
            self.cache,
            process.rank,
            process.groups,
        )
        process.worker = worker
        roles = worker.roles
        facts = roles.describe()
        moved = _moved(self.experiment)
        engines = {place: roles.at(place) for place in roles.places if place[0] in moved}
        slices = {
            place: dict(engine.slices()) for place, engine in engines.items() if engine is not None
        }
        return Built(
            facts,
            roles.describe_copies(),
            {role: roles.trained_names(role) for role in facts},
            slices,
        )


def _moved(experiment: Experiment) -> set[str]:
    """Roles whose parameters go to others or to copies, or come from there."""
    synced = {role for s in experiment.graph.syncs for role in (s.source, s.target)}
    begun = {role for pair in experiment.init_from.items() for role in pair}
    return synced | begun | {role for role, _ in experiment.copies()}


@dataclass(frozen=True)
class Call:
    """A model function call on this device's part; ids that the store does not know yet get their
    metadata from `described`.
    """

    mfc: str
    step: int
    minibatches: Sequence[SampleMeta]
    described: SampleMeta
    announces: bool
    weights: int | None = None  # that the role's copy on these devices must have

    def run(self, process: DeviceProcess, number: int) -> MFCResult:
        process.worker.store.put(self.described)
        early = _Announcements(process, number) if self.announces else None
        mesh = process.worker.mesh_of(self.mfc)
        interruptible = process.worker.calls[self.mfc].interruptible
        updates = Meanwhile(process, mesh) if interruptible else None
        result = process.worker.call(
            self.mfc, self.step, self.minibatches, early, self.weights, updates
        )
        # it goes to another process
        if result.seen is None:
            return result
        return replace(result, seen=result.seen.to("cpu"))


class _Announcements:
    """Takes a call's early outputs to the driver."""

    def __init__(self, process: DeviceProcess, number: int) -> None:
        self._process = process
        self._number = number

    def put(self, event: Event) -> None:
        self._process.report(Report(self._number, "announced", event))


class Meanwhile:
    """What was asked for while a call on `mesh` runs, in the order of asking, up to the next call
    that generates: new weights above all. Implements `Updates`.

    Ranks of one data-parallel part stop after the same step: the first of them sees what waits and
    tells the others. Parts stop each for itself, and go on together: they may bring their weights
    together to generate, and gather what they measured in the end, so one that is done waits for
    the others. What they do in between is what all of them are asked for, and whatever is asked for
    before that: the driver gives all devices their commands in one order.
    """

    def __init__(self, process: DeviceProcess, mesh: Mesh) -> None:
        self._process = process
        self._ranks = mesh.ranks
        part = mesh.along(process.rank, "tensor", "context", "pipeline")
        self._part, self._all = self._group(part), self._group(mesh.ranks)

    def _group(self, ranks: tuple[int, ...]) -> ProcessGroup | None:
        if len(ranks) == 1:
            return None
        assert self._process.groups is not None, "ranks have met before"
        return self._process.groups.of(ranks, host=True)

    def are_waiting(self) -> bool:
        # needs no engine
        while (waiting := self._process.waiting()) and isinstance(waiting[0].command, Discard):
            self._process.run_next()
        found = self._last()
        if self._part is None:
            return found is not None
        told = torch.tensor([found is not None])
        dist.broadcast(told, group=self._part, group_src=0)
        return bool(told)

    def take(self, *, left: bool) -> bool:
        last = self._last()
        if self._all is not None:
            own = torch.tensor([left, NONE if last is None else last])
            found = [torch.empty_like(own) for _ in self._ranks]
            dist.all_gather(found, own, group=self._all)
            left = any(bool(each[0]) for each in found)
            last = next((int(each[1]) for each in found if each[1] != NONE), None)
        if not left:
            return False
        assert last is not None, "who stops has seen what waits"
        while self._process.run_next(ASKED_SECONDS) != last:
            pass
        return True

    def _last(self) -> int | None:
        """The number of the last command to be run now that all of the ranks get."""
        last = None
        for queued in self._process.waiting():
            if (
                isinstance(queued.command, Call)
                and self._process.worker.calls[queued.command.mfc].method == "generate"
            ):
                break
            if set(self._ranks) <= set(queued.ranks) and not isinstance(queued.command, Discard):
                last = queued.number
        return last


@dataclass(frozen=True)
class SyncHere:
    """Move parameters between two roles of one mesh: each device what it holds."""

    sync: ParamSync

    def run(self, process: DeviceProcess, number: int) -> int:
        return process.worker.roles.sync(self.sync)


@dataclass(frozen=True)
class Prepare:
    """Get ready to move parameters as `transfers` say; all of `ranks` do."""

    key: str
    ranks: tuple[int, ...]
    transfers: Sequence[Transfer]

    def run(self, process: DeviceProcess, number: int) -> None:
        assert process.groups is not None, "ranks have met before"
        group = process.groups.of(self.ranks)
        process.reallocations[self.key] = Reallocation(
            self.transfers, rank=process.rank, group=group
        )


@dataclass(frozen=True)
class Move:
    """target = eta * source + (1 - eta) * target as `Prepare` said, by every rank of both; the
    source's version, which is the target's then. A copy of a role has the `weights` of this number
    from then on. With `kept`, what was kept under this number goes, and is kept no longer.
    """

    key: str
    source: Place
    target: Place
    eta: float = 1.0
    weights: int | None = None
    kept: int | None = None

    def run(self, process: DeviceProcess, number: int) -> int:
        roles = process.worker.roles
        way = process.reallocations[self.key]
        giver: Giver | None = roles.at(self.source)
        if giver is not None and self.kept is not None:
            alike = process.kept[self.source, self.kept]
            giver = alike.pop(self.key)
            if not alike:
                del process.kept[self.source, self.kept]
        with roles.refreshing(self.target, self.weights) as taker:
            return way.move(giver, taker, eta=self.eta).version


@dataclass(frozen=True)
class Keep:
    """Keep what this device gives when the way `key` is gone, as it is now, for a `Move` of `kept`."""

    key: str
    source: Place
    kept: int

    def run(self, process: DeviceProcess, number: int) -> None:
        engine = process.worker.roles.at(self.source)
        assert engine is not None, "the ranks of the source keep"
        alike = process.kept.setdefault((self.source, self.kept), {})
        alike[self.key] = Kept.of(engine, process.reallocations[self.key].gives, alike.values())


@dataclass(frozen=True)
class Discard:
    ids: Sequence[str]

    def run(self, process: DeviceProcess, number: int) -> None:
        process.worker.store.discard(self.ids)


@dataclass(frozen=True)
class Snapshot:
    """Write what a restart needs into the recovery point."""

    point: Path

    def run(self, process: DeviceProcess, number: int) -> None:
        own = rank_folder(self.point, process.rank)
        with disk.told(f"{own} was not written; the recovery points before it are whole"):
            own.mkdir()
            write_state(own / NUMERICS, numerics(process.device))
            process.worker.save_state(self.point, own)


@dataclass(frozen=True)
class Restore:
    """Take up a recovery point; descriptions of the tensors that this device holds then.

    Written by as many devices, each has its own again, else the first has all. Computes with as
    many threads as the first one did.
    """

    point: Path
    world: int

    def run(self, process: DeviceProcess, number: int) -> list[SampleMeta]:
        folders = rank_folders(self.point)
        set_threads(read_state(folders[0] / NUMERICS)["threads"])
        alike = len(folders) == self.world
        if alike:
            held = [folders[process.rank]]
        elif process.rank == 0:
            held = folders
        else:
            held = []
        process.kept.clear()
        process.worker.load_state(self.point, held)
        return [sample.meta() for sample in process.worker.store.batches()]


@dataclass(frozen=True)
class Save:
    """Write a role's model as Hugging Face lays it out."""

    role: str
    directory: Path

    def run(self, process: DeviceProcess, number: int) -> None:
        with disk.told(f"{self.directory} was not written; what was saved before it is whole"):
            process.worker.save(self.role, self.directory)


@dataclass(frozen=True)
class LogTo:
    """Have what this process prints, from Python or from C, go to the end of
    `folder/worker-RANK.log`.
    """

    folder: Path

    def run(self, process: DeviceProcess, number: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        log = os.open(
            destination(self.folder / f"worker-{process.rank}.log"),
            os.O_WRONLY | os.O_APPEND | os.O_CREAT,
            0o644,
        )
        for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            os.dup2(log, descriptor)
        os.close(log)
        sys.stdout, sys.stderr = (
            open(number, "w", buffering=1, closefd=False)  # noqa: SIM115
            for number in (1, 2)
        )
        faulthandler.enable(sys.stderr)


@dataclass(frozen=True)
class Profile:
    """Begin a trace of what this device does; or end it and write it to `path`, in which `{rank}`
    stands for the device.
    """

    path: str | None

    def run(self, process: DeviceProcess, number: int) -> None:
        if self.path is None:
            process.trace = Trace(process.device)
        elif process.trace is not None:
            process.trace.end(Path(self.path.replace("{rank}", str(process.rank))))
            process.trace = None


@dataclass(frozen=True)
class Hardware:
    def run(self, process: DeviceProcess, number: int) -> Mapping[str, Any]:
        return hardware(process.device)


@dataclass(frozen=True)
class Numerics:
    def run(self, process: DeviceProcess, number: int) -> Mapping[str, Any]:
        return numerics(process.device)


def described(minibatches: Sequence[SequenceSample], ids: Sequence[str], owner: str) -> SampleMeta:
    """Of the ids that were dealt out as `minibatches`: what of them is no tensor."""
    if len(minibatches) == 1 and minibatches[0].ids == tuple(ids):
        return SequenceSample(minibatches[0].ids, {}, {}, {}, minibatches[0].metadata)
    values: dict[str, dict[str, Any]] = {}
    for part in minibatches:
        names = part.metadata.get(owner, part.ids)
        for column in (name for name in part.metadata if name != owner):
            values.setdefault(column, {}).update(zip(names, part.metadata[column], strict=True))
    metadata = {column: tuple([of.get(id) for id in ids]) for column, of in values.items()}
    return SequenceSample(tuple(ids), {}, {}, {}, metadata)
