"""Worker group of one or many devices, which turns the master's requests into jobs on ranks.

Tensors are sent from device to device. The driver process keeps the metadata and locations of
tensors, the loader's rows and the outputs of host functions; it fetches other tensors only on
request. If the only device is in the driver's process, both use one tensor store.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from weft.data.sample import SequenceSample
from weft.errors import CheckpointError, DevicesLost, RunError
from weft.experiment import Experiment
from weft.graph.mfc import ParamSync
from weft.interfaces.base import MFCResult
from weft.runtime import commands
from weft.runtime.calls import (
    PEAK_BYTES,
    Events,
    OutputsAnnounced,
    SampleMeta,
    Task,
    TaskFailed,
    TaskFinished,
    TaskStarted,
)
from weft.runtime.checkpoints import (
    DRIVER_FOLDER,
    ENGINES_FOLDER,
    list_rank_folders,
    read_samples,
    write_samples,
)
from weft.runtime.commands import BuildWorker, BuiltEngines, RunCall
from weft.runtime.device_process import CommandReport, DeviceCommand
from weft.runtime.dispatch import (
    CommandTensors,
    DeviceJob,
    DeviceTransport,
    JobDispatcher,
    repeat_command,
)
from weft.runtime.parameters import ParameterTransfers
from weft.runtime.roles import EngineKey
from weft.runtime.split import OWNER, collect_owners, merge_results, merge_seen
from weft.runtime.store import DRIVER as ON_DRIVER
from weft.runtime.store import TensorLocations, TensorRequest, TensorStore

T = TypeVar("T")
BYTES_MOVED = "num_bytes_moved"  # metric of each call: bytes its devices received for it


class DeviceGroup:
    """`WorkerGroup` of all devices of a run, each of which runs `build` to create its worker.

    When the first call is submitted, stdout and stderr of the device processes are redirected to
    files in the folder `logs`, if it is given.
    """

    def __init__(
        self,
        devices: DeviceTransport,
        experiment: Experiment,
        build: BuildWorker,
        logs: Path | None = None,
    ) -> None:
        self.events: Events = queue.SimpleQueue()
        self._devices = devices
        self._experiment = experiment
        self._meshes = experiment.role_meshes
        self._calls = experiment.calls
        self._mesh_of = experiment.call_meshes
        self._ranks = range(len(devices.addresses))
        self._announcing_calls: set[str] = set()
        # running interruptible calls, with the copy whose weights may be updated
        self._interruptible_calls: dict[Task, EngineKey] = {}
        self._in_process = devices.shared_store is not None
        self._tensors = SampleTensors(devices, self._call_with_explanation)
        self._closed = False
        self._logs = logs
        self._dispatch = JobDispatcher(devices)
        try:
            self._built: Mapping[int, BuiltEngines] = self._ask(
                "building the engines", self._ranks, build
            ).result()
            hosts = [address.host for address in devices.addresses]
            self._parameters = ParameterTransfers(self._dispatch, experiment, self._built, hosts)
            self._parameters.initialize()
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
        self._open_logs()
        # Bring the weights of the call's mesh up to date first.
        node = self._calls[mfc]
        mesh = self._mesh_of[mfc]
        task = (mfc, step)
        on_failed = self._make_failure_callback(task)
        copies = self._parameters.copies
        update = copies.update_running_copy if node.interruptible else copies.update_copy
        weights = update((node.role, mesh), on_failed, version)
        moved_weights = copies.take_moved_bytes((node.role, mesh))
        if keeps:
            copies.save_weights(node.role, step, on_failed)
        # Find the part of each rank; the first rank of each part reports outputs.
        ids = collect_owners([part for minibatch in parts for part in minibatch])
        rank_parts = {
            rank: [minibatch[mesh.get_coordinates(rank).data] for minibatch in parts]
            for rank in mesh.ranks
        }
        part_ids = {rank: collect_owners(minibatches) for rank, minibatches in rank_parts.items()}
        first = [mesh.list_ranks(data)[0] for data in range(mesh.layout.data)]
        shared: dict[Any, Any] = {}
        requests: dict[int, list[TensorRequest]] = {}

        def make_command(rank: int) -> tuple[DeviceCommand, CommandTensors]:
            described = self._describe_samples(rank_parts[rank], part_ids[rank])
            announces = mfc in self._announcing_calls
            command = RunCall(mfc, step, rank_parts[rank], described, announces, weights)
            keys = (*node.inputs, *node.optional_inputs)
            requests[rank] = self._tensors.request_missing(rank, part_ids[rank], keys)
            return command, self._tensors.build_command_tensors(requests[rank], shared)

        def on_finished(ends: Mapping[int, CommandReport]) -> None:
            self._interruptible_calls.pop(task, None)
            results = {rank: report.value for rank, report in ends.items()}
            for rank, result in results.items():
                self._tensors.record_transfers(rank, requests[rank])
                if result.outputs is not None:
                    self._tensors.record_outputs(rank, result.outputs, again=rank not in first)
            if self._in_process:
                self.events.put(TaskFinished(task, results[0]))
                return
            sizes = [len(part_ids[rank]) for rank in first]
            merged = merge_results([results[rank] for rank in first], sizes, ids)
            metrics = {**merged.metrics, **_measure_ranks(ends), **moved_weights}
            seen = merge_seen(results.values())
            self.events.put(TaskFinished(task, MFCResult(merged.outputs, metrics, seen)))

        def on_announced(rank: int, event: OutputsAnnounced) -> None:
            if rank in first:
                self._tensors.record_outputs(rank, event.outputs)
                self.events.put(event)

        # Submit the call, then mark copies as outdated if it trains.
        job = DeviceJob(
            f"call {mfc!r} of role {node.role!r}",
            mesh.ranks,
            make_command,
            on_finished,
            on_failed,
            self._make_start_callback(task),
            on_announced,
            frozenset({node.role}),
            seconds=None,
            task=task,
        )
        if node.interruptible:
            self._interruptible_calls[task] = node.role, mesh
        self._dispatch.submit(job)
        if node.trains:
            copies.record_training(node.role, job, step + 1)
            self._update_running_copies(node.role, on_failed)

    def _update_running_copies(self, role: str, on_failed: Callable[[BaseException], None]) -> None:
        """Update the copies of a role that interruptible calls are using."""
        for place in set(self._interruptible_calls.values()):
            if place[0] == role:
                self._parameters.copies.update_running_copy(place, on_failed)

    def _describe_samples(
        self, minibatches: Sequence[SampleMeta], ids: Sequence[str]
    ) -> SampleMeta | None:
        """Return the metadata of `ids` for a device; None if the device has the driver's store."""
        if self._in_process:
            return None
        return commands.describe_samples(minibatches, ids, OWNER)

    def _open_logs(self) -> None:
        """Redirect the output of the devices to their log files, unless this has already been done.

        This is done when the first model call of the run is submitted.
        """
        if self._logs is not None:
            self._ask("opening its log", self._ranks, commands.RedirectOutput(self._logs))
            self._logs = None

    def _make_start_callback(self, task: Task) -> Callable[[], None]:
        return lambda: self.events.put(TaskStarted(task))

    def _make_failure_callback(self, task: Task) -> Callable[[BaseException], None]:
        return lambda error: self.events.put(TaskFailed(task, error))

    def build_overdue_error(self, mfc: str, step: int, message: str) -> RunError:
        if self._in_process:
            return RunError(message)
        return self._dispatch.build_overdue_error((mfc, step), message)

    def announce_outputs(self, mfc: str) -> None:
        self._announcing_calls.add(mfc)

    # -- tensors on the driver

    def put(self, sample: SequenceSample) -> SampleMeta:
        return self._tensors.put(sample)

    def fetch(
        self, ids: Sequence[str], keys: Iterable[str], optional: Iterable[str] = ()
    ) -> SequenceSample:
        return self._tensors.fetch(ids, keys, optional)

    def discard(self, ids: Iterable[str]) -> None:
        for rank, held in self._tensors.discard(ids).items():
            self._ask("discarding tensors", [rank], commands.DiscardSamples(held))

    def sync(self, sync: ParamSync, step: int) -> None:
        task = (sync.name, step)
        on_finished = lambda version: self.events.put(TaskFinished(task, version))  # noqa: E731
        self._parameters.start_sync(
            sync, on_finished, self._make_failure_callback(task), self._make_start_callback(task)
        )

    # -- state

    def snapshot(self, directory: Path) -> Future[None]:
        if not self._in_process:  # otherwise the device writes the store
            self._tensors.save(directory / DRIVER_FOLDER)
        return _drop_result(
            self._ask("writing the recovery point", self._ranks, commands.WriteSnapshot(directory))
        )

    def restore(self, directory: Path) -> None:
        if not (directory / ENGINES_FOLDER).is_dir() or not list_rank_folders(directory):
            raise CheckpointError(f"{directory}: contains no state of workers")
        command = commands.RestoreSnapshot(directory, len(self._ranks))
        outputs_by_rank = self._ask("loading the recovery point", self._ranks, command).result()
        self._parameters.copies.reset()
        for rank in sorted(outputs_by_rank):
            for held in outputs_by_rank[rank]:
                self._tensors.record_outputs(rank, held, again=True)
        self._tensors.load(directory / DRIVER_FOLDER)

    def save(self, role: str, directory: Path) -> Future[None]:
        command = commands.SaveModel(role, directory)
        return _drop_result(
            self._ask(f"saving role {role!r}", self._meshes[role].ranks, command, role)
        )

    def toggle_trace(self, path: str | None = None) -> None:
        self._ask("tracing its work", self._ranks, commands.ToggleTrace(path)).result()

    def close(self, deadline_s: float) -> None:
        if not self._closed:
            self._closed = True
            self._dispatch.close()
            self._devices.close(deadline_s)

    # -- facts

    def describe(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the properties of each role, including its copies and its parameter transfers.

        In the properties of a role, the key `copies` maps each mesh to the properties of the role's
        copy on that mesh, and the key `moves` has one line of text per recurring transfer.
        """
        facts: dict[str, dict[str, Any]] = {}
        for role, mesh in self._meshes.items():
            copies = {}
            for copied_role, copy_mesh in self._experiment.copies:
                if copied_role == role:
                    built = self._built[copy_mesh.ranks[0]]
                    copies[copy_mesh] = built.copies[role, copy_mesh]
            moves = [
                f"{purpose}: {reallocation}"
                for purpose, reallocation in self._parameters.list_plans(role)
            ]
            facts[role] = {
                **self._built[mesh.ranks[0]].facts[role],
                "copies": copies,
                "moves": moves,
            }
        return facts

    def describe_numerics(self) -> Mapping[str, Any]:
        command = commands.DescribeNumerics()
        numerics = self._ask("reading its numerical settings", [0], command).result()[0]
        if not self._in_process:
            numerics = {**numerics, "devices": len(self._ranks)}
        return dict(numerics)

    def describe_hardware(self) -> Mapping[str, Any]:
        hardware: Mapping[str, Any] = self._ask(
            "reading its hardware", [0], commands.DescribeHardware()
        ).result()[0]
        return hardware

    def peak_memory_gb(self) -> float:
        return self._call_with_explanation(self._devices.peak_memory_gb)

    def _call_with_explanation(self, ask: Callable[[], T]) -> T:
        try:
            return ask()
        except DevicesLost as error:
            raise self._dispatch.find_cause(error) from error

    def _ask(
        self,
        purpose: str,
        ranks: Sequence[int],
        command: DeviceCommand,
        role: str | None = None,
    ) -> Future[dict[int, Any]]:
        """Send the command to all `ranks`, and return a future of the results by rank.

        `purpose` describes the work for error messages. The command runs after all commands that
        were sent to the rank earlier. If earlier jobs for `role`, such as model calls, have not
        been sent yet, the command is sent after them. Otherwise it is sent immediately.
        """
        future: Future[dict[int, Any]] = Future()

        def on_finished(ends: Mapping[int, CommandReport]) -> None:
            future.set_result({rank: report.value for rank, report in ends.items()})

        def on_failed(error: BaseException) -> None:
            if not future.done():
                future.set_exception(error)

        roles = frozenset({role} if role else ())
        self._dispatch.submit(
            DeviceJob(purpose, ranks, repeat_command(command), on_finished, on_failed, roles=roles)
        )
        return future


class SampleTensors:
    """Tensors of the run's samples: those on the driver, and the locations of all.

    `ask_devices` calls a function that waits for the devices, and explains why they were lost.
    """

    def __init__(
        self,
        devices: DeviceTransport,
        ask_devices: Callable[[Callable[[], list[bytes]]], list[bytes]],
    ) -> None:
        self._devices = devices
        self._ask_devices = ask_devices
        self._lock = threading.RLock()  # guards _locations and _store
        shared = devices.shared_store
        self._store = TensorStore() if shared is None else shared
        self._rank = ON_DRIVER if shared is None else 0  # rank of _store in _locations
        self._locations = TensorLocations()

    # -- for the devices

    def request_missing(
        self, rank: int, ids: Sequence[str], keys: Iterable[str]
    ) -> list[TensorRequest]:
        """Return requests for the tensors that a rank lacks, and record that it will get them."""
        with self._lock:
            requests = self._locations.find_missing(rank, ids, keys)
            for request in requests:
                self._locations.record_transfer(rank, request.ids, request.keys)
        return requests

    def record_transfers(self, rank: int, requests: Sequence[TensorRequest]) -> None:
        """Record that a rank has received the tensors that it requested."""
        with self._lock:
            for request in requests:
                self._locations.record_copy(rank, request.ids, request.keys)

    def build_command_tensors(
        self, requests: Sequence[TensorRequest], shared: dict[Any, Any]
    ) -> CommandTensors:
        """Build the `CommandTensors` with which a rank gets the tensors in `requests`.

        The rank itself requests tensors from other devices. Tensors on the driver are serialized
        and shared in advance, and the rank gets handles of them. `shared` caches these handles for
        the other ranks of the same call.
        """
        rows = []
        for request in requests:
            if request.rank == ON_DRIVER:
                rows.append((request.ids, request.keys))
        for row in rows:
            if row not in shared:
                with self._lock:
                    sample = self._store.fetch(*row)
                # Metadata is sent separately, in `RunCall.descriptions`.
                plain = SequenceSample(sample.ids, sample.lengths, sample.offsets, sample.data)
                shared[row] = self._devices.share(plain.to_bytes())
        return CommandTensors(
            [request for request in requests if request.rank != ON_DRIVER],
            [shared[row] for row in rows],
        )

    def record_outputs(self, rank: int, outputs: SampleMeta, *, again: bool = False) -> None:
        """Record the outputs of a rank; with `again`, another rank has computed them already."""
        with self._lock:
            if again:
                self._locations.record_copy(rank, outputs.ids, outputs.keys)
            else:
                self._locations.record_computed(rank, outputs.ids, outputs.keys)
            if outputs.metadata and rank != self._rank:
                self._store.put(SequenceSample(outputs.ids, {}, {}, {}, outputs.metadata))

    # -- on the driver

    def put(self, sample: SequenceSample) -> SampleMeta:
        with self._lock:
            self._locations.record_computed(self._rank, sample.ids, sample.keys)
            return self._store.put(sample)

    def fetch(
        self, ids: Sequence[str], keys: Iterable[str], optional: Iterable[str] = ()
    ) -> SequenceSample:
        all_keys = list(keys)
        with self._lock:
            all_keys += [
                key
                for key in self._locations.select_available(ids, optional)
                if key not in all_keys
            ]
            requests = self._locations.find_missing(self._rank, ids, all_keys)
        raws = self._ask_devices(lambda: self._devices.export(requests)) if requests else []
        with self._lock:
            for request, raw in zip(requests, raws, strict=True):
                self._store.put(SequenceSample.from_bytes(raw))
                self._locations.record_copy(self._rank, request.ids, request.keys)
            return self._store.fetch(ids, all_keys)

    def discard(self, ids: Iterable[str]) -> dict[int, list[str]]:
        """Discard the driver's tensors of `ids`, and return the ids that each other rank has."""
        with self._lock:
            ids_by_rank = self._locations.discard(ids)
            self._store.discard(ids_by_rank.pop(self._rank, ()))
        return ids_by_rank

    def save(self, folder: Path) -> None:
        """Write the driver's tensors into a recovery point."""
        with self._lock:
            write_samples(folder, self._store)

    def load(self, folder: Path) -> None:
        """Read the driver's tensors from a recovery point."""
        for sample in read_samples([folder]):
            with self._lock:
                self._locations.record_copy(self._rank, sample.ids, sample.keys)
                self._store.put(sample)


def _measure_ranks(ends: Mapping[int, CommandReport]) -> dict[str, float]:
    """Return the bytes that all ranks of a call received, and the largest of their memory peaks."""
    measured = {BYTES_MOVED: float(sum(report.num_bytes_received for report in ends.values()))}
    peaks = []
    for report in ends.values():
        if PEAK_BYTES in report.value.metrics:
            peaks.append(report.value.metrics[PEAK_BYTES])
    if peaks:
        measured[PEAK_BYTES] = max(peaks)
    return measured


def _drop_result(future: Future[dict[int, Any]]) -> Future[None]:
    """Return a future that completes or fails when `future` does, and has no result."""
    converted: Future[None] = Future()

    def on_done(finished: Future[dict[int, Any]]) -> None:
        error = finished.exception()
        if error is None:
            converted.set_result(None)
        else:
            converted.set_exception(error)

    future.add_done_callback(on_done)
    return converted
