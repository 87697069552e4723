"""What an interface receives and returns.

An interface implements the methods it needs and no others.
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


class Updates(Protocol):
    """What is asked of a role's devices while one of its calls is under way: new weights above all.

    A call that can stop in the middle asks between its steps; whatever it does not take happens
    after it. Ranks that step together ask together, and are told the same.
    """

    def are_waiting(self) -> bool: ...
    def take(self, *, left: bool) -> bool:
        """Asked by all ranks once nothing of the engine is open, no generator.

        Where something is `left` to do on any of them: have it done, and True, so that all of them
        go on. Else False.
        """
        ...


@dataclass(frozen=True)
class Model:
    """The handle of a role.

    `tokenizer` is the role's own; `data_tokenizer` is the one that made the batch's token ids (they
    are the same object unless the role has another tokenizer).
    """

    role: str
    engine: Engine
    tokenizer: Tokenizer
    data_tokenizer: Tokenizer
    device: str
    dtype: str
    step: int = 0  # the firing's index, counted from 0; seeds generation
    seed: int = 0
    schedule: Schedule | None = None  # of a trained role, in optimizer steps of the real run
    # Takes the outputs of ids that are complete before the call ends, so that host functions can
    # begin with them; the call returns them all the same. None where nobody can.
    announce: Callable[[SequenceSample], None] | None = None
    # of one forward pass; an interface hands it on to the engine
    max_tokens: int = DEFAULT_MAX_TOKENS
    updates: Updates | None = None  # None where nothing can be taken in the middle of a call

    @property
    def version(self) -> int:
        """Completed train steps."""
        return self.engine.version

    def gather(self, own: T) -> list[T]:
        """Plain values of every rank that has a part of the batch, in the order of parts, for
        metrics that are of all of it. Every rank calls it; on one device it gives `own` alone.
        """
        gather: Callable[[T], list[T]] | None = getattr(self.engine, "gather", None)
        return [own] if gather is None else gather(own)


@dataclass(frozen=True)
class Minibatches:
    """How a training call wants its batch: as `count` minibatches, or as minibatches of `size`
    completions, and all of them `epochs` times. A `unit` of "group" keeps all completions of an id
    together.
    """

    count: int = 1
    size: int | None = None
    epochs: int = 1
    unit: Unit = "group"

    def asked(self, completions: int) -> int:
        """Minibatches of so many completions, in an epoch, where none is short of ids."""
        return self.count if self.size is None else -(-completions // self.size)

    def of(self, batch: SequenceSample) -> int:
        """Minibatches of this batch: fewer than asked for where it holds less than one thing for
        each.
        """
        if self.count == 1 and self.size is None:
            return 1
        completions = batch.num_sequences()
        return min(self.asked(completions), batch.num_ids if self.unit == "group" else completions)


@dataclass(frozen=True)
class MFCResult:
    """New keys by id (None where a call makes none), metrics, logged as `{node}/{metric}`, and what
    the network made of a few ids (`StepStats.seen`), which is shown with the samples of a step.
    """

    outputs: SequenceSample | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    seen: SequenceSample | None = None


class ModelInterface(Protocol):
    """Built as `cls(**args)` with the node's args.

    A graph that calls a method its interface lacks is refused.

    `check_tokens` is asked before the start, of the role's tokenizer and the data's, and raises
    `UserError` where the call needs others. `train_step` gets its batch cut already: as
    `minibatches` says, in the order in which the optimizer is to step, or whole where the interface
    does not say.
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
