"""What the Master asks of the processes that hold engines.

It hands over descriptions and gets descriptions back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from weft.data.sample import SequenceSample
from weft.errors import RunError
from weft.graph.mfc import ParamSync
from weft.runtime.events import Events

SampleMeta = SequenceSample  # a description: ids, lengths and metadata, no tensors

# Metrics that a group adds to every result: when the call began (seconds since the epoch) and how
# long it took.
STARTED = "started"
SECONDS = "seconds"
EVALUATION = "eval/"  # what the names of the evaluation graph's calls begin with, in a group


class WorkerGroup(Protocol):
    """Engines are keyed by (role, layout).

    What a role is asked for is done in the order in which it was asked for.

    The group hands over a description and tells what becomes of it on `events`, the one queue that
    its user waits on.
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
        """Begin a model function call on the ids of `parts` [minibatch][data-parallel rank]; `step`
        counts the node's firings from 0. The events' task is `(mfc, step)`, the result an
        `MFCResult`.

        A call uses its role's newest weights, or with `version` those that were there after so many
        train steps. These are what its copy of the role has, the newest, or kept, by the train step
        number `version` that was submitted with `keeps`. Versions of a copy never go back. An
        interruptible call may have newer ones than these.
        """
        ...

    def sync(self, s: ParamSync, step: int) -> None:
        """Begin to move parameters between roles.

        The events' task is `(s.name, step)`, the result the target's new version.
        """
        ...

    def snapshot(self, d: Path) -> Future[None]:
        """Write everything that a restart needs into the empty directory `d`: engines, interfaces,
        tensors in use.
        """
        ...

    def restore(self, d: Path) -> None:
        """Take up what `snapshot` wrote."""
        ...

    def profile(self, path: str | None = None) -> None:
        """Begin a trace of all devices, or end it: each then writes its own to `path`, in which
        `{rank}` stands for its number. What was submitted before goes first.
        """
        ...

    def close(self, deadline_s: float) -> None:
        """Let go of everything; what is still at work after the deadline is left behind."""
        ...

    def put(self, sample: SequenceSample) -> SampleMeta:
        """Take in tensors made outside (rows of the loader, keys of a host function)."""
        ...

    def overdue(self, mfc: str, step: int, told: str) -> RunError:
        """What to raise for a call that has passed its deadline: `told` and, where that is known,
        who is late.
        """
        ...

    def listen(self, mfc: str) -> None:
        """Have `Announced` told of outputs that this call has made before its end."""
        ...

    def fetch(
        self, ids: Sequence[str], keys: Iterable[str], optional: Iterable[str] = ()
    ) -> SequenceSample:
        """Tensors of these ids, with all their metadata; `optional` keys where every id has them."""
        ...

    def discard(self, ids: Iterable[str]) -> None:
        """Forget ids that no node needs any more."""
        ...

    def save(self, role: str, directory: Path) -> Future[None]:
        """Write a role's model into the empty `directory`, as Hugging Face lays it out."""
        ...

    def describe(self) -> Mapping[str, Mapping[str, Any]]:
        """Role -> facts for the plan and the report: `num_parameters`, `num_trainable`,
        `vocab_size`, ...
        """
        ...

    def numerics(self) -> Mapping[str, Any]:
        """What bitwise repetition depends on beside the inputs: torch, device, threads,
        deterministic.
        """
        ...

    def hardware(self) -> Mapping[str, Any]:
        """What the first device is, for people (`weft.engine.device.hardware`)."""
        ...

    def peak_memory_gb(self) -> float:
        """Most memory held at once since the run began, in GiB; on a CPU since the process did."""
        ...
