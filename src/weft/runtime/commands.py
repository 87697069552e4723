"""Commands that the driver sends to device processes: small picklable classes, run in order."""

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
NONE = -1  # means "no command" in collectives; no job has this number
ASKED_SECONDS = 600.0  # wait for a command that other ranks have received


@dataclass(frozen=True)
class Built:
    """Description of the engines that one device built.

    `facts` and `trained` cover the roles whose own mesh includes the device; `trained` names the
    parameters that train steps change, or is None if the engine does not report them. `copies`
    describes copies of roles on other meshes. `slices` lists the local parameter slices of each
    engine that takes part in a parameter transfer.
    """

    facts: Mapping[str, Mapping[str, Any]]
    copies: Mapping[Place, Mapping[str, Any]]
    trained: Mapping[str, frozenset[str] | None]
    slices: Mapping[Place, Slices]


@dataclass(frozen=True)
class Build:
    """Build the worker and the engines of the roles on this device."""

    experiment: Experiment
    specs: Mapping[str, ModelSpec]
    tokenizers: Mapping[str, Tokenizer]
    cache: Path
    kind: str  # device type: cpu, cuda

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
    """Return the roles whose parameters are transferred to or from other roles or copies."""
    synced = {role for s in experiment.graph.syncs for role in (s.source, s.target)}
    begun = {role for pair in experiment.init_from.items() for role in pair}
    return synced | begun | {role for role, _ in experiment.copies()}


@dataclass(frozen=True)
class Call:
    """Run a model function call on this device's part of the batch.

    `described` is the metadata of ids that the device's tensor store does not have yet.
    """

    mfc: str
    step: int
    minibatches: Sequence[SampleMeta]
    described: SampleMeta
    announces: bool
    weights: int | None = None  # version required of the role's copy on these devices

    def run(self, process: DeviceProcess, number: int) -> MFCResult:
        process.worker.store.put(self.described)
        early = _Announcements(process, number) if self.announces else None
        mesh = process.worker.mesh_of(self.mfc)
        interruptible = process.worker.calls[self.mfc].interruptible
        updates = Meanwhile(process, mesh) if interruptible else None
        result = process.worker.call(
            self.mfc, self.step, self.minibatches, early, self.weights, updates
        )
        # the result is sent to another process
        if result.seen is None:
            return result
        return replace(result, seen=result.seen.to("cpu"))


class _Announcements:
    """Send a call's early outputs to the driver."""

    def __init__(self, process: DeviceProcess, number: int) -> None:
        self._process = process
        self._number = number

    def put(self, event: Event) -> None:
        self._process.report(Report(self._number, "announced", event))


class Meanwhile:
    """Commands that arrive during a generation call on `mesh`, mostly new weights.

    Implements `Updates`. The commands run in the order in which they were sent, up to the next call
    that generates.

    All ranks of one data-parallel part stop after the same step: their first rank checks for
    pending commands and broadcasts the answer. Parts stop independently but continue together,
    because they may gather weights to generate and reduce metrics at the end; a finished part waits
    for the others. All parts run the commands that are addressed to all of them, and every command
    before those; the driver sends commands to all devices in the same order.
    """

    def __init__(self, process: DeviceProcess, mesh: Mesh) -> None:
        self._process = process
        self._ranks = mesh.ranks
        part = mesh.along(process.rank, "tensor", "context", "pipeline")
        self._part, self._all = self._group(part), self._group(mesh.ranks)

    def _group(self, ranks: tuple[int, ...]) -> ProcessGroup | None:
        if len(ranks) == 1:
            return None
        assert self._process.groups is not None, "the ranks have joined a process group"
        return self._process.groups.of(ranks, host=True)

    def are_waiting(self) -> bool:
        # Run leading `Discard` commands now: they need no engine.
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
        assert last is not None, "a rank that stopped must have a pending command"
        while self._process.run_next(ASKED_SECONDS) != last:
            pass
        return True

    def _last(self) -> int | None:
        """Return the number of the last pending command sent to all ranks that can run now."""
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
    """Update one role's parameters from another role on the same mesh, each device its slice."""

    sync: ParamSync

    def run(self, process: DeviceProcess, number: int) -> int:
        return process.worker.roles.sync(self.sync)


@dataclass(frozen=True)
class Prepare:
    """Prepare the reallocation plan `key` on all of `ranks`."""

    key: str
    ranks: tuple[int, ...]
    transfers: Sequence[Transfer]

    def run(self, process: DeviceProcess, number: int) -> None:
        assert process.groups is not None, "the ranks have joined a process group"
        group = process.groups.of(self.ranks)
        process.reallocations[self.key] = Reallocation(
            self.transfers, rank=process.rank, group=group
        )


@dataclass(frozen=True)
class Move:
    """Set target = eta * source + (1 - eta) * target; return the source's version.

    Every rank of both roles runs it, after `Prepare`. The target takes the source's version; a copy
    of a role also records `weights` as its version number. If `kept` is given, the parameters saved
    under this number by `Keep` are sent, then dropped.
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
    """Save the parameters that this device sends in plan `key`, for a later `Move` with `kept`."""

    key: str
    source: Place
    kept: int

    def run(self, process: DeviceProcess, number: int) -> None:
        engine = process.worker.roles.at(self.source)
        assert engine is not None, "only the ranks of the source run this command"
        alike = process.kept.setdefault((self.source, self.kept), {})
        alike[self.key] = Kept.of(engine, process.reallocations[self.key].gives, alike.values())


@dataclass(frozen=True)
class Discard:
    """Drop ids from the device's tensor store."""

    ids: Sequence[str]

    def run(self, process: DeviceProcess, number: int) -> None:
        process.worker.store.discard(self.ids)


@dataclass(frozen=True)
class Snapshot:
    """Write this device's state to the recovery point."""

    point: Path

    def run(self, process: DeviceProcess, number: int) -> None:
        own = rank_folder(self.point, process.rank)
        with disk.told(f"{own} was not written; earlier recovery points are intact"):
            own.mkdir()
            write_state(own / NUMERICS, numerics(process.device))
            process.worker.save_state(self.point, own)


@dataclass(frozen=True)
class Restore:
    """Load a recovery point and return the metadata of the samples now on this device.

    If the number of devices is unchanged, each device loads its own samples; otherwise rank 0 loads
    all. The number of CPU threads is set to that of the run's first device.
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
    """Write a role's model in the Hugging Face format."""

    role: str
    directory: Path

    def run(self, process: DeviceProcess, number: int) -> None:
        with disk.told(f"{self.directory} was not written; earlier checkpoints are intact"):
            process.worker.save(self.role, self.directory)


@dataclass(frozen=True)
class LogTo:
    """Append this process's stdout and stderr, including output of C code, to `worker-RANK.log`."""

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
    """Start a trace of this device, or stop it and write it to `path`.

    The first happens if `path` is None. `{rank}` in `path` is replaced by the device's rank.
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
    """Return a description of the device's hardware."""

    def run(self, process: DeviceProcess, number: int) -> Mapping[str, Any]:
        return hardware(process.device)


@dataclass(frozen=True)
class Numerics:
    """Return the device's numerical settings."""

    def run(self, process: DeviceProcess, number: int) -> Mapping[str, Any]:
        return numerics(process.device)


def described(minibatches: Sequence[SequenceSample], ids: Sequence[str], owner: str) -> SampleMeta:
    """Return the non-tensor metadata of `ids`, which were dealt out as `minibatches`."""
    if len(minibatches) == 1 and minibatches[0].ids == tuple(ids):
        return SequenceSample(minibatches[0].ids, {}, {}, {}, minibatches[0].metadata)
    values: dict[str, dict[str, Any]] = {}
    for part in minibatches:
        names = part.metadata.get(owner, part.ids)
        for column in (name for name in part.metadata if name != owner):
            values.setdefault(column, {}).update(zip(names, part.metadata[column], strict=True))
    metadata = {column: tuple([of.get(id) for id in ids]) for column, of in values.items()}
    return SequenceSample(tuple(ids), {}, {}, {}, metadata)
