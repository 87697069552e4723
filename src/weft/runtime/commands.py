"""Commands that the driver (the process of the run's master) sends to the device processes.

Commands are small picklable classes. Each device runs them in order.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from weft.data.sample import SequenceSample
from weft.data.tokenizer import Tokenizer
from weft.engine.device import (
    DeviceTrace,
    describe_hardware,
    describe_numerics,
    reset_peak_memory,
    resolve_device,
    set_deterministic,
    set_tf32,
    set_threads,
)
from weft.engine.spec import TPU, ModelSpec
from weft.experiment import Experiment
from weft.graph.mfc import ParamSync
from weft.interfaces.base import MFCResult
from weft.realloc.execute import ParameterSnapshot, ParameterSource, Reallocation
from weft.realloc.plan import ParameterTransfer
from weft.registry import import_user_code
from weft.runtime import directory
from weft.runtime.calls import OutputsAnnounced, SampleMeta
from weft.runtime.checkpoints import (
    NUMERICS_FILE,
    get_rank_folder,
    list_rank_folders,
    read_state,
    write_state,
)
from weft.runtime.device_process import NO_COMMAND, CommandReport, DeviceProcess
from weft.runtime.roles import EngineKey
from weft.runtime.worker import Worker
from weft.topology import Mesh, Slice
from weft.writing import resolve_destination

Slices = Mapping[str, Slice]
COMMAND_SECONDS = 600.0  # wait for a command that other ranks have received


@dataclass(frozen=True)
class BuiltEngines:
    """Description of the engines that one device has built.

    A role has one engine on its own mesh, and may have copies on other meshes. Only meshes that
    include the device are listed.

    Attributes:
        facts: Description of the role's engine on its own mesh, by role.
        copies: Description of each copy, by role and mesh.
        trained: Names of the parameters that train steps change, by role. None if the engine does
            not report them.
        slices: For each engine that takes part in parameter transfers, the slices of its
            parameters on this device.
    """

    facts: Mapping[str, Mapping[str, Any]]
    copies: Mapping[EngineKey, Mapping[str, Any]]
    trained: Mapping[str, frozenset[str] | None]
    slices: Mapping[EngineKey, Slices]


@dataclass(frozen=True)
class BuildWorker:
    """Command to build this device's worker, with the engines of its roles."""

    experiment: Experiment
    specs: Mapping[str, ModelSpec]
    tokenizers: Mapping[str, Tokenizer]
    cache: Path
    kind: str  # device, or type of the device: cpu, cuda

    def run(self, process: DeviceProcess, number: int) -> BuiltEngines:
        control = self.experiment.control
        if not process.is_driver:  # the driver has imported it already
            import_user_code(control.imports)
        process.device = device = resolve_device(self.kind)
        if not process.is_driver:
            set_deterministic(control.deterministic)
            set_tf32(control.tf32, device)
        reset_peak_memory(device)
        name = TPU if control.device == TPU else str(device)
        specs = {role: replace(spec, device=name) for role, spec in self.specs.items()}
        worker = Worker(
            self.experiment,
            specs,
            self.tokenizers,
            str(device),
            self.cache,
            process.store,
            process.rank,
            process.groups,
        )
        process.worker = worker
        roles = worker.roles
        facts = roles.describe()
        moved = _find_transferred_roles(self.experiment)
        engines = {}
        for place in roles.engine_keys:
            if place[0] in moved:
                engines[place] = roles.find_engine(place)
        slices = {}
        for place, engine in engines.items():
            if engine is not None:
                slices[place] = dict(engine.slices())
        return BuiltEngines(
            facts,
            roles.describe_copies(),
            {role: roles.get_trained_names(role) for role in facts},
            slices,
        )


def _find_transferred_roles(experiment: Experiment) -> set[str]:
    """Return the roles that are the source or target of a parameter transfer.

    Parameters are transferred by syncs, by `init_from`, and from roles to their copies.
    """
    synced: set[str] = set()
    for sync in experiment.graph.syncs:
        synced |= {sync.source, sync.target}
    initialized = {*experiment.init_from, *experiment.init_from.values()}
    return synced | initialized | {role for role, _ in experiment.copies}


@dataclass(frozen=True)
class RunCall:
    """Command to run a model function call on this device's part of the batch.

    Attributes:
        mfc: Name of the call.
        step: Index of the call's firing (execution of its node).
        minibatches: This device's part of each minibatch, without tensors.
        descriptions: Metadata of all samples in this device's part of the batch, or None if the
            device uses the driver's tensor store, which has them.
        announces: True if the outputs of completed ids are reported to the driver during the call.
        weights: If the call uses a copy of its role's engine on another mesh, the number of weight
            updates that the copy must have received; else None.
    """

    mfc: str
    step: int
    minibatches: Sequence[SampleMeta]
    descriptions: SampleMeta | None
    announces: bool
    weights: int | None = None  # version required of the role's copy on these devices

    def run(self, process: DeviceProcess, number: int) -> MFCResult:
        if self.descriptions is not None:
            process.store.put(self.descriptions)
        worker = process.worker
        updates = None
        if worker.calls[self.mfc].interruptible:
            updates = PendingCommands(process, worker.get_mesh(self.mfc))

        def announce(outputs: OutputsAnnounced) -> None:
            process.report(CommandReport(number, "announced", outputs))

        early = announce if self.announces else None
        result = worker.run_call(
            self.mfc, self.step, self.minibatches, early, self.weights, updates
        )
        if result.seen is None or process.is_driver:
            return result
        # the result is sent to another process
        return replace(result, seen=result.seen.to("cpu"))


class PendingCommands:
    """Commands that arrive during a generation call on `mesh`, mostly transfers of new weights.

    This class implements `PendingUpdates`. Between two generation steps, the call can run these
    commands in the order in which they were sent. The next generation command, and all commands
    after it, stay in the queue until the call has ended.

    Ranks that generate the same sequences stop after the same step. Data-parallel ranks with
    different sequences may stop at different steps, but no rank resumes before all ranks have run
    the commands. This is necessary because ranks may gather weights from each other during
    generation, and because they reduce metrics at the end of the call. Ranks that have finished
    their sequences wait for the others.

    The driver sends commands to all devices in the same order, but a command may reach some ranks
    later than others. The ranks therefore agree on the last command to run, and wait until all
    commands up to it have arrived.
    """

    def __init__(self, process: DeviceProcess, mesh: Mesh) -> None:
        self._process = process
        self._ranks = mesh.ranks
        part = mesh.list_ranks_along(process.rank, "tensor", "context", "pipeline")
        self._part_group, self._mesh_group = (
            self._create_group(part),
            self._create_group(mesh.ranks),
        )

    def _create_group(self, ranks: tuple[int, ...]) -> ProcessGroup | None:
        if len(ranks) == 1:
            return None
        assert self._process.groups is not None, "the ranks have joined a process group"
        return self._process.groups.get_group(ranks, host=True)

    def are_waiting(self) -> bool:
        # Run leading `DiscardSamples` commands now: they need no engine.
        while (waiting := self._process.list_pending()) and isinstance(
            waiting[0].command, DiscardSamples
        ):
            self._process.run_commands(waiting[0].number)
        last_runnable = self._find_last_runnable()
        if self._part_group is None:
            return last_runnable is not None
        flag = torch.tensor([last_runnable is not None])
        dist.broadcast(flag, group=self._part_group, group_src=0)
        return bool(flag)

    def take(self, *, left: bool) -> bool:
        if self._mesh_group is None:
            while left and self.are_waiting():
                self._process.run_commands(self._process.list_pending()[0].number)
            return left
        last = self._find_last_runnable()
        own_state = torch.tensor([left, NO_COMMAND if last is None else last])
        states = [torch.empty_like(own_state) for _ in self._ranks]
        dist.all_gather(states, own_state, group=self._mesh_group)
        left = any(bool(state[0]) for state in states)
        last = next((int(state[1]) for state in states if state[1] != NO_COMMAND), None)
        if not left:
            return False
        assert last is not None, "a rank that stopped must have a pending command"
        self._process.run_commands(last, COMMAND_SECONDS)
        return True

    def _find_last_runnable(self) -> int | None:
        """Return the job number of the last pending command that all ranks of the mesh can run now.

        A command can run if it was sent to all of these ranks and comes before the next generation
        call. `DiscardSamples` commands are ignored, because the running call need not stop for
        them. Returns None if no command can run.
        """
        last = None
        for queued in self._process.list_pending():
            if (
                isinstance(queued.command, RunCall)
                and self._process.worker.calls[queued.command.mfc].method == "generate"
            ):
                break
            if set(self._ranks) <= set(queued.ranks) and not isinstance(
                queued.command, DiscardSamples
            ):
                last = queued.number
        return last


@dataclass(frozen=True)
class SyncOnSameMesh:
    """Command to update a role's parameters from those of another role on the same mesh.

    Each device updates the slices that it holds, so nothing is sent.
    """

    sync: ParamSync

    def run(self, process: DeviceProcess, number: int) -> int:
        return process.worker.roles.sync(self.sync)


@dataclass(frozen=True)
class PrepareReallocation:
    """Command to create the `Reallocation` that runs the plan `key`.

    Attributes:
        key: Name of the plan.
        ranks: All ranks that send or receive parameters.
        transfers: Transfers of the plan.
    """

    key: str
    ranks: tuple[int, ...]
    transfers: Sequence[ParameterTransfer]

    def run(self, process: DeviceProcess, number: int) -> None:
        assert process.groups is not None, "the ranks have joined a process group"
        group = process.groups.get_group(self.ranks)
        process.reallocations[self.key] = Reallocation(
            self.transfers, rank=process.rank, group=group
        )


@dataclass(frozen=True)
class MoveParameters:
    """Command to set target = eta * source + (1 - eta) * target, following a reallocation plan.

    All ranks of both engines run this command, after `PrepareReallocation`. It returns the version
    of the source, which becomes the version of the target.

    Attributes:
        key: Name of the plan.
        source: Role and mesh of the engine whose parameters are read.
        target: Role and mesh of the engine whose parameters are updated.
        eta: Weight of the source, from 0 to 1.
        weights: Number of times that the target's weights have been updated, including this update.
            None if the target is not a copy of a role.
        saved_version: Version of the saved parameters to send (see `SaveParameters`). They are
            freed afterwards. If it is None, the current parameters are sent.
    """

    key: str
    source: EngineKey
    target: EngineKey
    eta: float = 1.0
    weights: int | None = None
    saved_version: int | None = None

    def run(self, process: DeviceProcess, number: int) -> int:
        roles = process.worker.roles
        reallocation = process.reallocations[self.key]
        source: ParameterSource | None = roles.find_engine(self.source)
        if source is not None and self.saved_version is not None:
            snapshots = process.saved_weights[self.source, self.saved_version]
            source = snapshots.pop(self.key)
            if not snapshots:
                del process.saved_weights[self.source, self.saved_version]
        with roles.open_for_update(self.target, self.weights) as target:
            return reallocation.move(source, target, eta=self.eta).version


@dataclass(frozen=True)
class SaveParameters:
    """Command to save parameters of this device in host memory, so that they can be sent later.

    The saved parameters are those that this device sends in the reallocation plan `key`. A later
    `MoveParameters` with the same `saved_version` sends them.
    """

    key: str
    source: EngineKey
    saved_version: int

    def run(self, process: DeviceProcess, number: int) -> None:
        engine = process.worker.roles.find_engine(self.source)
        assert engine is not None, "only the ranks of the source run this command"
        snapshots = process.saved_weights.setdefault((self.source, self.saved_version), {})
        snapshots[self.key] = ParameterSnapshot.from_source(
            engine, process.reallocations[self.key].sent_names, snapshots.values()
        )


@dataclass(frozen=True)
class DiscardSamples:
    """Command to remove samples from the device's tensor store."""

    ids: Sequence[str]

    def run(self, process: DeviceProcess, number: int) -> None:
        process.store.discard(self.ids)


@dataclass(frozen=True)
class WriteSnapshot:
    """Command to write this device's state into the recovery point.

    Each device has a folder there, unless the driver's process is the only device.
    """

    point: Path

    def run(self, process: DeviceProcess, number: int) -> None:
        if process.is_driver:
            folder = self.point
        else:
            folder = get_rank_folder(self.point, process.rank)
        with _explain_disk_errors(
            process, f"{folder} was not written; earlier recovery points are intact"
        ):
            folder.mkdir(exist_ok=process.is_driver)
            write_state(folder / NUMERICS_FILE, describe_numerics(process.device))
            process.worker.save_state(self.point, folder)


@dataclass(frozen=True)
class RestoreSnapshot:
    """Command to load a recovery point and return the metadata of the samples on this device.

    If the number of devices (`world`) is unchanged, each device loads the samples that it saved;
    otherwise rank 0 loads all of them. The number of CPU threads affects the rounding of
    floating-point sums, so it is restored too, from the value that the first device saved.
    """

    point: Path
    world: int

    def run(self, process: DeviceProcess, number: int) -> list[SampleMeta]:
        folders = list_rank_folders(self.point)
        set_threads(read_state(folders[0] / NUMERICS_FILE)["threads"])
        has_same_devices = len(folders) == self.world
        if has_same_devices:
            sample_folders = [folders[process.rank]]
        elif process.rank == 0:
            sample_folders = folders
        else:
            sample_folders = []
        process.saved_weights.clear()
        process.worker.load_state(self.point, sample_folders)
        return [sample.meta() for sample in process.store.iterate_batches()]


@dataclass(frozen=True)
class SaveModel:
    """Command to write a role's model to `directory` in the Hugging Face format."""

    role: str
    directory: Path

    def run(self, process: DeviceProcess, number: int) -> None:
        with _explain_disk_errors(
            process, f"{self.directory} was not written; earlier checkpoints are intact"
        ):
            process.worker.save(self.role, self.directory)


def _explain_disk_errors(process: DeviceProcess, consequence: str) -> AbstractContextManager[None]:
    """Return a context in which disk errors are explained.

    It does nothing in the driver's process, which explains them itself.
    """
    return nullcontext() if process.is_driver else directory.explain_disk_errors(consequence)


@dataclass(frozen=True)
class RedirectOutput:
    """Command to append this process's stdout and stderr to `worker-RANK.log` in `folder`.

    The output of C code is included.
    """

    folder: Path

    def run(self, process: DeviceProcess, number: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        log = os.open(
            resolve_destination(self.folder / f"worker-{process.rank}.log"),
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
class ToggleTrace:
    """Command to start or end a profiler trace of this device.

    If `path` is None, a trace is started. Otherwise the running trace is ended and written to
    `path`, in which `{rank}` is replaced by the device's rank.
    """

    path: str | None

    def run(self, process: DeviceProcess, number: int) -> None:
        if self.path is None:
            process.trace = DeviceTrace(process.device)
        elif process.trace is not None:
            process.trace.end(Path(self.path.replace("{rank}", str(process.rank))))
            process.trace = None


@dataclass(frozen=True)
class DescribeHardware:
    """Command that returns a description of the device's hardware."""

    def run(self, process: DeviceProcess, number: int) -> Mapping[str, Any]:
        return describe_hardware(process.device)


@dataclass(frozen=True)
class DescribeNumerics:
    """Command that returns the device's numerical settings."""

    def run(self, process: DeviceProcess, number: int) -> Mapping[str, Any]:
        return describe_numerics(process.device)


def describe_samples(
    minibatches: Sequence[SequenceSample], ids: Sequence[str], owner: str
) -> SampleMeta:
    """Return the metadata columns of `ids`, collected from the minibatches of a batch.

    If the batch was split into single completions, the metadata column named `owner` has the id of
    the sample to which each completion belongs.
    """
    if len(minibatches) == 1 and minibatches[0].ids == tuple(ids):
        return SequenceSample(minibatches[0].ids, {}, {}, {}, minibatches[0].metadata)
    values: dict[str, dict[str, Any]] = {}
    for part in minibatches:
        names = part.metadata.get(owner, part.ids)
        for column in (name for name in part.metadata if name != owner):
            values.setdefault(column, {}).update(zip(names, part.metadata[column], strict=True))
    metadata = {}
    for column, value_of in values.items():
        metadata[column] = tuple([value_of.get(id) for id in ids])
    return SequenceSample(tuple(ids), {}, {}, {}, metadata)
