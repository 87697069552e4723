"""Protocol of model interfaces, and the types of their arguments and results.

A model interface only has to implement the methods that it supports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from weft.data.sample import SequenceSample
from weft.data.tokenizer import Tokenizer
from weft.engine.base import DEFAULT_MAX_TOKENS, Engine
from weft.engine.spec import Schedule

Unit = Literal["sequence", "group"]
T = TypeVar("T")


class PendingUpdates(Protocol):
    """Requests that reach a role's devices during a call, mostly to load new weights.

    An interruptible call checks for requests between its steps, for example between two tokens.
    Requests that it does not handle run after the call. Ranks that compute the same steps together,
    such as tensor-parallel ranks, check at the same time and get the same answer.
    """

    def are_waiting(self) -> bool: ...
    def take(self, *, left: bool) -> bool:
        """Run the waiting requests if any rank has work left; return whether the call continues.

        All ranks call this method together, while no generator or other engine resource is open.
        `left` is True if this rank has work left. If any rank passes True, all ranks run the
        requests and return True; otherwise all return False.
        """
        ...


@dataclass(frozen=True)
class Model:
    """Engine, tokenizers and settings of a role, as passed to the methods of a model interface.

    `tokenizer` is the role's tokenizer, and `data_tokenizer` is the one that produced the token ids
    of the batch. Both are the same object unless the role's tokenizer differs from that of the
    data.
    """

    role: str
    engine: Engine
    tokenizer: Tokenizer
    data_tokenizer: Tokenizer
    device: str
    dtype: str
    step: int = 0  # index of the node's firing, from 0; seeds generation
    seed: int = 0
    schedule: Schedule | None = None  # schedule of a trained role, in optimizer steps of the run
    # Publishes the outputs of completed ids during the call, so that host functions can start on
    # them; the call returns them as well. None if no host function can start early.
    announce: Callable[[SequenceSample], None] | None = None
    # limit of one forward pass, passed on to the engine
    max_tokens: int = DEFAULT_MAX_TOKENS
    updates: PendingUpdates | None = None  # None if the call cannot be interrupted

    @property
    def version(self) -> int:
        """Number of train steps that the role has completed."""
        return self.engine.version

    def gather(self, own: T) -> list[T]:
        """Return the values of all ranks that have a part of the batch, in the order of the parts.

        Interfaces use this to compute metrics over the whole batch. `own` is the value of this
        rank, made of plain Python values. Every rank must call this method, because it is a
        collective operation. On one device, the result is `[own]`.
        """
        gather: Callable[[T], list[T]] | None = getattr(self.engine, "gather", None)
        return [own] if gather is None else gather(own)


@dataclass(frozen=True)
class Minibatches:
    """Settings for splitting the batch of a training call into minibatches.

    Attributes:
        count: Number of minibatches per pass over the batch, unless `size` is set.
        size: Number of completions per minibatch.
        epochs: Number of passes over the batch.
        unit: With "group", all completions of an id are in the same minibatch. With "sequence",
            they can be in different minibatches.
    """

    count: int = 1
    size: int | None = None
    epochs: int = 1
    unit: Unit = "group"

    def count_requested(self, completions: int) -> int:
        """Return the number of minibatches per epoch for a batch of `completions` completions.

        This is the number that the settings ask for. A small batch may be split into fewer
        minibatches; see `count_for_batch`.
        """
        return self.count if self.size is None else -(-completions // self.size)

    def count_for_batch(self, batch: SequenceSample) -> int:
        """Return the number of minibatches per epoch into which this batch is split.

        This is less than requested if the batch has too few ids or, if `unit` is "sequence", too
        few completions.
        """
        if self.count == 1 and self.size is None:
            return 1
        completions = batch.num_sequences()
        return min(
            self.count_requested(completions),
            batch.num_ids if self.unit == "group" else completions,
        )


@dataclass(frozen=True)
class MFCResult:
    """Result of a model function call.

    Attributes:
        outputs: Keys that the call computed for its ids, or None if the call has no outputs.
        metrics: Metrics of the call, each of which is logged as `{node}/{metric}`.
        seen: Log-probs or scores of a few ids, to be shown with the step's samples.
    """

    outputs: SequenceSample | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    seen: SequenceSample | None = None


class ModelInterface(Protocol):
    """Protocol of model interfaces, which are constructed from the `args` of a node.

    An interface implements only some of these methods. A graph is rejected if it calls a method
    that the node's interface does not implement.

    `check_tokens` is called before the run starts, with the tokenizers of the role and of the data.
    It raises `UserError` if the interface does not support this combination. `train_step` gets the
    minibatches in the order of the optimizer steps, split as `minibatches` specifies. If the
    interface does not define `minibatches`, `train_step` gets the whole batch as one minibatch.
    """

    def minibatches(self) -> Minibatches: ...
    def check_tokens(self, role: str, own: Tokenizer, data: Tokenizer) -> None: ...
    def generate(self, model: Model, batch: SequenceSample) -> MFCResult: ...
    def inference(self, model: Model, batch: SequenceSample) -> MFCResult: ...
    def train_step(self, model: Model, minibatches: Sequence[SequenceSample]) -> MFCResult: ...
    def evaluate(self, model: Model, batch: SequenceSample) -> MFCResult: ...
    def save(self, model: Model, directory: Path) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def have_same_tokens(one: Tokenizer, other: Tokenizer) -> bool:
    """Return whether two tokenizers have the same vocabulary.

    They may still differ in chat templates and other settings.
    """
    return (
        one is other
        or one.fingerprint == other.fingerprint
        or one.hf.get_vocab() == other.hf.get_vocab()
    )
