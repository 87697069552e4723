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
    """Processes with engines, keyed by (role, layout).

    Each role runs its requests in the order in which they were made. Progress and results arrive on
    `events`, the only queue the master waits on.
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
        """Start a model function call on the ids of `parts` [minibatch][data-parallel rank].

        `step` counts the node's firings from 0. The events' task is `(mfc, step)`, the result an
        `MFCResult`.

        A call uses its role's newest weights, or those after `version` train steps: the version its
        copy of the role has, the newest one, or one kept because train step number `version` was
        submitted with `keeps`. Versions of a copy never decrease. An interruptible call may use
        newer weights.
        """
        ...

    def sync(self, s: ParamSync, step: int) -> None:
        """Start a parameter transfer between roles.

        The events' task is `(s.name, step)`, the result the target's new version.
        """
        ...

    def snapshot(self, d: Path) -> Future[None]:
        """Write engines, interfaces and all tensors in use to the empty directory `d`."""
        ...

    def restore(self, d: Path) -> None:
        """Load the state that `snapshot` wrote."""
        ...

    def toggle_trace(self, path: str | None = None) -> None:
        """Start a trace on all devices, or stop it and write one file per device to `path`.

        `{rank}` in `path` is replaced by the device's rank. Earlier requests run first.
        """
        ...

    def close(self, deadline_s: float) -> None:
        """Release all resources; work unfinished after the deadline is abandoned."""
        ...

    def put(self, sample: SequenceSample) -> SampleMeta:
        """Store tensors made outside of the group: the loader's rows, outputs of host functions."""
        ...

    def build_overdue_error(self, mfc: str, step: int, message: str) -> RunError:
        """Return the error for a call past its deadline: `message`, and the late devices if known."""
        ...

    def announce_outputs(self, mfc: str) -> None:
        """Enable `OutputsAnnounced` events for early outputs of this call."""
        ...

    def fetch(
        self, ids: Sequence[str], keys: Iterable[str], optional: Iterable[str] = ()
    ) -> SequenceSample:
        """Return tensors of these ids and all metadata; `optional` keys if every id has them."""
        ...

    def discard(self, ids: Iterable[str]) -> None:
        """Remove ids that no node needs any more."""
        ...

    def save(self, role: str, directory: Path) -> Future[None]:
        """Write a role's model into the empty `directory` in the Hugging Face format."""
        ...

    def describe(self) -> Mapping[str, Mapping[str, Any]]:
        """Return facts by role: `num_parameters`, `num_trainable`, `vocab_size`, ..."""
        ...

    def describe_numerics(self) -> Mapping[str, Any]:
        """Return the settings that bitwise repetition depends on: torch, device, threads, ..."""
        ...

    def describe_hardware(self) -> Mapping[str, Any]:
        """Return a description of the first device (`weft.engine.device.describe_hardware`)."""
        ...

    def peak_memory_gb(self) -> float:
        """Return the peak memory of the run in GiB; on a CPU, that of the process."""
        ...
