"""Model function calls as the runtime sees them, and the interface to the processes that run them.

The master makes requests to a `WorkerGroup`. Worker groups and the threads of host functions report
progress and results as events on one queue. Requests and results contain only metadata. Tensors
stay in the processes, unless they are explicitly stored with `put` or read with `fetch`.

Keys of inputs and outputs are renamed between the names that a node uses and those on the graph's
edges.
"""

from __future__ import annotations

import inspect
import queue
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from weft.data.sample import SequenceSample
from weft.errors import RunError
from weft.graph.mfc import MFCDef, Node, ParamSync
from weft.interfaces.base import Minibatches, ModelInterface
from weft.registry import interfaces

SampleMeta = SequenceSample  # ids, lengths and metadata, no tensors
# Metrics that a group adds to every result: start of the call (seconds since the epoch) and
# duration in seconds.
STARTED = "started"
SECONDS = "seconds"
PEAK_BYTES = "peak_bytes"  # peak memory of the call, where it can be measured
# (name of a call, host function or sync; index of the firing)
Task = tuple[str, int]


class WorkerGroup(Protocol):
    """Interface of a group of processes that run engines, which are identified by (role, mesh).

    The requests for each role run in the order in which they were made. Progress and results are
    put on `events`, the only queue on which the master waits.
    """

    @property
    def events(self) -> Events: ...

    def submit(
        self,
        mfc: str,
        step: int,
        parts: list[list[SampleMeta]],
        *,
        version: int | None = None,
        keeps: bool = False,
    ) -> None:
        """Start the model function call `mfc` on the ids in `parts`.

        `parts[minibatch][rank]` has the metadata of one data-parallel rank's part of a minibatch.
        `step` is the index of the node's firing (execution). The call's events have the task `(mfc,
        step)`, and the result is an `MFCResult`.

        By default, the call uses the newest weights of its role. If `version` is given, it uses the
        weights that the role had after `version` train steps; an interruptible call may use newer
        ones. Weights that are not the newest are available only if the call runs on a copy of the
        role that still has them, or if they were saved. To save them, the train step that replaces
        them must be submitted with `keeps=True`. The version of a copy never decreases.
        """
        ...

    def sync(self, sync: ParamSync, step: int) -> None:
        """Start a parameter transfer between two roles.

        `step` is the index of the firing (execution of a node) after which the transfer runs.
        Events about the transfer have the task `(sync.name, step)`, and its result is the target's
        new version.
        """
        ...

    def snapshot(self, directory: Path) -> Future[None]:
        """Write all engine and interface states and stored tensors to `directory`."""
        ...

    def restore(self, directory: Path) -> None:
        """Load the state that `snapshot` wrote to `directory`."""
        ...

    def toggle_trace(self, path: str | None = None) -> None:
        """Start or end a profiler trace on all devices.

        If `path` is None, a trace is started. Otherwise the running trace is ended and written to
        one file per device: `{rank}` in `path` is replaced by the device's rank. Requests made
        earlier run first.
        """
        ...

    def close(self, deadline_s: float) -> None:
        """Release all resources.

        Work that is unfinished after `deadline_s` seconds is abandoned.
        """
        ...

    def put(self, sample: SequenceSample) -> SampleMeta:
        """Store tensors that were made outside of the group, and return their metadata.

        Such tensors are the data loader's rows and the outputs of host functions.
        """
        ...

    def build_overdue_error(self, mfc: str, step: int, message: str) -> RunError:
        """Return the error for a call that missed its deadline.

        `message` is extended by a description of the devices that delay the call, if they are
        known.
        """
        ...

    def announce_outputs(self, mfc: str) -> None:
        """Request `OutputsAnnounced` events for outputs that are ready before the call `mfc` ends."""
        ...

    def fetch(
        self, ids: Sequence[str], keys: Iterable[str], optional: Iterable[str] = ()
    ) -> SequenceSample:
        """Return the tensors of the given ids and keys, with all metadata of these ids.

        A key in `optional` is included only if every id has it.
        """
        ...

    def discard(self, ids: Iterable[str]) -> None:
        """Remove all tensors of these ids."""
        ...

    def save(self, role: str, directory: Path) -> Future[None]:
        """Write a role's model into the empty `directory` in the Hugging Face format."""
        ...

    def describe(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the properties of each role's model, such as `num_parameters` and `vocab_size`."""
        ...

    def describe_numerics(self) -> Mapping[str, Any]:
        """Return the settings that bitwise reproducibility depends on.

        They include the torch version, the device and the number of threads.
        """
        ...

    def describe_hardware(self) -> Mapping[str, Any]:
        """Return a description of the first device (`weft.engine.device.describe_hardware`)."""
        ...

    def peak_memory_gb(self) -> float:
        """Return the run's peak device memory in GiB.

        On CPUs, this is the peak memory of the processes.
        """
        ...


# -- events


@dataclass(frozen=True)
class TaskStarted:
    """Event that reports the start of a task, from which the task's deadline is counted.

    A task is one run of a call, host function or sync. It is identified by its name and the index
    of the firing (execution of the node).
    """

    task: Task


@dataclass(frozen=True)
class OutputsAnnounced:
    """Event that reports early outputs of a running call, for some of its ids.

    The call has passed these outputs to `Model.announce`, and they can be fetched already.
    """

    call: str
    outputs: SequenceSample  # metadata only


@dataclass(frozen=True)
class TaskFinished:
    """Event that reports the successful end of a task.

    `result` is the `MFCResult` of a model call, the `FiringOutcome` of a host function, or the new
    version of the weights that a sync has updated.
    """

    task: Task
    result: Any


@dataclass(frozen=True)
class TaskFailed:
    """Event that reports the failure of a task."""

    task: Task
    error: BaseException


Event = TaskStarted | OutputsAnnounced | TaskFinished | TaskFailed
Events = queue.SimpleQueue[Event]


def implements_method(interface: str, method: str) -> bool:
    """Return whether the class registered under the name `interface` implements `method`.

    A method inherited from `ModelInterface` does not count.
    """
    cls = interfaces.get(interface)
    return any(method in vars(base) for base in inspect.getmro(cls) if base is not ModelInterface)


def get_minibatches(node: MFCDef) -> Minibatches:
    """Return the settings by which the node's interface splits a batch into minibatches.

    By default, the whole batch is one minibatch.
    """
    if not node.trains or not implements_method(node.interface, "minibatches"):
        return Minibatches()
    settings: Minibatches = interfaces.get(node.interface)(**node.args).minibatches()
    return settings


# -- inputs and outputs


class TensorSource(Protocol):
    """Object that returns tensors by sample id, such as a tensor store or a worker group."""

    def fetch(
        self, ids: Sequence[str], keys: Iterable[str], optional: Iterable[str] = ()
    ) -> SequenceSample: ...


def read_inputs(source: TensorSource, node: Node, ids: Sequence[str]) -> SequenceSample:
    """Return a node's inputs for these ids, with the key names that the node itself uses.

    An optional input is included if all ids have it. `source` is the source of the tensors.
    """
    batch = source.fetch(ids, node.inputs, node.optional_inputs)
    return batch.remap_keys(
        {edge: name for name, edge in node.input_key_remap.items() if edge in batch.keys}
    )


def make_empty_sample(description: SequenceSample) -> SequenceSample:
    """Return a sample with the keys and metadata of `description` and empty tensors.

    It serves as the input of a rank that gets no ids of a batch but still has to take part in
    collective operations.
    """
    # empty integers can be concatenated with values of any dtype
    data = {key: torch.empty(0, dtype=torch.int64) for key in description.keys}
    return SequenceSample(
        description.ids, description.lengths, description.offsets, data, description.metadata
    )


def to_edge_outputs(
    node: Node, outputs: SequenceSample | None, ids: Sequence[str], *, filters: bool = False
) -> SequenceSample | None:
    """Return a node's outputs in the order of `ids`, with the key names of the graph's edges.

    Raises `RunError` if a key is missing, or if an id is unknown or missing. If `filters` is True,
    the node is a filter, and ids may be missing.
    """
    if not node.output_keys and (outputs is None or not filters):
        return None
    if outputs is None:
        raise RunError(f"returned no outputs; its output keys are {', '.join(node.output_keys)}")
    absent = [key for key in node.output_keys if key not in outputs.data]
    if absent:
        raise RunError(
            f"produced no {', '.join(absent)}; its outputs are {', '.join(outputs.data) or 'none'}"
        )
    unknown = set(outputs.ids) - set(ids)
    missing = set(ids) - set(outputs.ids)
    if unknown or (missing and not filters):
        raise RunError(
            f"returned ids that it was not given ({sorted(unknown)[:5]}) or lost some "
            f"({sorted(missing)[:5]})"
        )
    chosen = outputs.select(keys=node.output_keys)
    if outputs.ids != tuple(ids):
        output_ids = set(outputs.ids)
        chosen = chosen.select(ids=[id for id in ids if id in output_ids])
    return chosen.remap_keys(node.output_key_remap)
