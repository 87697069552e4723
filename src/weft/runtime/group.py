"""What the Master asks of the processes that hold engines. It hands over descriptions and gets descriptions back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from weft.data.sample import SequenceSample
from weft.graph.mfc import ParamSync
from weft.interfaces.base import MFCResult

SampleMeta = SequenceSample  # a description: ids, lengths and metadata, no tensors

# Metrics that a group adds to every result: when the call began (seconds since the epoch) and how long it took.
STARTED, SECONDS = "started", "seconds"
EVALUATION = "eval/"  # what the names of the evaluation graph's calls begin with, in a group


class WorkerGroup(Protocol):
    """Engines are keyed by (role, layout). The first five signatures are frozen (docs/architecture.md)."""

    def submit(self, mfc: str, step: int, parts: list[list[SampleMeta]]) -> Future[MFCResult]:
        """Run a model function call on the ids of `parts` [minibatch][dp]; `step` counts the node's firings from 0."""
        ...

    def sync(self, s: ParamSync) -> Future[int]:
        """Move parameters between roles; the target's new version."""
        ...

    def snapshot(self, d: Path) -> Future[None]:
        """Write everything that a restart needs into the empty directory `d`: engines, interfaces, tensors in use."""
        ...

    def restore(self, d: Path) -> None:
        """Take up what `snapshot` wrote."""
        ...

    def close(self, deadline_s: float) -> None:
        """Let go of everything; what is still at work after the deadline is left behind."""
        ...

    def put(self, sample: SequenceSample) -> SampleMeta:
        """Take in tensors made outside (rows of the loader, keys of a host function)."""
        ...

    def listen(self, mfc: str, hear: Callable[[SampleMeta], None]) -> None:
        """Have `hear` told of outputs that a call has made before its end (`Model.announce`); they can be fetched then. It is
        called where the call is made, and returns at once. Several may listen to one call."""
        ...

    def fetch(self, ids: Sequence[str], keys: Iterable[str], optional: Iterable[str] = ()) -> SequenceSample:
        """Tensors of these ids, with all their metadata; `optional` keys where every id has them."""
        ...

    def discard(self, ids: Iterable[str]) -> None:
        """Forget ids that no node needs any more."""
        ...

    def save(self, role: str, directory: Path) -> Future[None]:
        """Write a role's model into the empty `directory`, as Hugging Face lays it out."""
        ...

    def describe(self) -> Mapping[str, Mapping[str, Any]]:
        """Role -> facts for the plan and the report: `num_parameters`, `num_trainable`, `vocab_size`, ..."""
        ...

    def numerics(self) -> Mapping[str, Any]:
        """What bitwise repetition depends on beside the inputs: torch, device, threads, deterministic."""
        ...

    def peak_memory_gb(self) -> float:
        """Most memory held at once since the last call, in GiB."""
        ...
