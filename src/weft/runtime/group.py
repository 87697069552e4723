"""Interface between the master and the processes that run engines; it exchanges metadata only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from weft.data.sample import SequenceSample
from weft.errors import RunError
from weft.graph.mfc import ParamSync
from weft.runtime.events import Events

SampleMeta = SequenceSample  # ids, lengths and metadata, no tensors

# Metrics that a group adds to every result: start of the call (seconds since the epoch) and
# duration in seconds.
STARTED = "started"
SECONDS = "seconds"
EVALUATION = "eval/"  # prefix of the evaluation graph's calls


class WorkerGroup(Protocol):
    """Interface of a group of processes whose engines are identified by (role, mesh).

    The requests for each role run in the order in which they were made. Progress and results are
    put on `events`, the only queue that the master waits on.
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
        """Start a model function call on the ids in `parts`.

        `parts[minibatch][rank]` has the metadata of the part of one data-parallel rank. `step` is
        the index of the node's firing. The call's events have the task `(mfc, step)`, and the
        result is an `MFCResult`.

        Without `version`, the call uses the newest weights of its role; with `version`, the weights
        after that many train steps. These must be the weights that the call's copy of the role has
        already, the newest weights, or weights that were kept because the train step with index
        `version` was submitted with `keeps`. The version of a copy never decreases. An
        interruptible call may use newer weights.
        """
        ...

    def sync(self, s: ParamSync, step: int) -> None:
        """Start a parameter transfer between roles.

        Its events have the task `(s.name, step)`, and the result is the target's new version.
        """
        ...

    def snapshot(self, d: Path) -> Future[None]:
        """Write engine and interface states, and all stored tensors, to the empty directory `d`."""
        ...

    def restore(self, d: Path) -> None:
        """Load the state that `snapshot` wrote to `d`."""
        ...

    def toggle_trace(self, path: str | None = None) -> None:
        """Start a trace on all devices, or end it and write one file per device to `path`.

        The trace is started if `path` is None. `{rank}` in `path` is replaced by the device's rank.
        Requests made earlier run first.
        """
        ...

    def close(self, deadline_s: float) -> None:
        """Release all resources. Work that is unfinished after `deadline_s` seconds is abandoned."""
        ...

    def put(self, sample: SequenceSample) -> SampleMeta:
        """Store tensors that were made outside of the group, and return their metadata.

        Such tensors are the loader's rows and the outputs of host functions.
        """
        ...

    def build_overdue_error(self, mfc: str, step: int, message: str) -> RunError:
        """Return the error for a call that missed its deadline.

        The message is `message`, followed by the devices that are late, if they are known.
        """
        ...

    def announce_outputs(self, mfc: str) -> None:
        """Enable `OutputsAnnounced` events for the early outputs of the call `mfc`."""
        ...

    def fetch(
        self, ids: Sequence[str], keys: Iterable[str], optional: Iterable[str] = ()
    ) -> SequenceSample:
        """Return the tensors `keys` of the samples `ids`, with all their metadata.

        A key in `optional` is included if every id has it.
        """
        ...

    def discard(self, ids: Iterable[str]) -> None:
        """Remove the tensors of ids that no node needs any more."""
        ...

    def save(self, role: str, directory: Path) -> Future[None]:
        """Write a role's model into the empty `directory` in the Hugging Face format."""
        ...

    def describe(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the properties of each role, such as `num_parameters` and `vocab_size`."""
        ...

    def describe_numerics(self) -> Mapping[str, Any]:
        """Return the settings on which bitwise reproducibility depends: torch, device, threads, ..."""
        ...

    def describe_hardware(self) -> Mapping[str, Any]:
        """Return a description of the first device (`weft.engine.device.describe_hardware`)."""
        ...

    def peak_memory_gb(self) -> float:
        """Return the run's peak device memory in GiB; on CPUs, the peak memory of its processes."""
        ...
