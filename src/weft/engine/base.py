"""The engine's contract: one role's network on one layout.

Signatures are frozen (docs/architecture.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from weft.algorithms.base import Array, Loss, Max, Min, Output, Stat, Sum
from weft.data.sample import SequenceSample
from weft.engine.spec import GenerationSpec, ModelSpec
from weft.topology import Layout, Slice

if TYPE_CHECKING:
    from collections.abc import Callable

    from weft.models.network.packed import TopIds

    Veto = Callable[[Mapping[str, float]], str | None]
    ModelBackend = Callable[[ModelSpec, Layout], "Engine"]

DEFAULT_MAX_TOKENS = 16384  # of one forward pass, where a call does not say

__all__ = [
    "DEFAULT_MAX_TOKENS",
    "Engine",
    "Generator",
    "Loss",
    "Max",
    "Min",
    "Output",
    "Partial",
    "Request",
    "Stat",
    "StepStats",
    "Sum",
    "TokenEvent",
]


@dataclass(frozen=True)
class StepStats:
    """What one optimizer step did.

    `metrics` holds the loss's reduced statistics plus `loss`, `grad_norm`, `learning_rate`,
    `num_tokens` (tokens that went through the network, prompts included) and `seconds`.
    """

    metrics: Mapping[str, float]
    # why a veto (or a non-finite loss, where allowed) kept the optimizer from stepping
    skipped: str | None = None
    seen: SequenceSample | None = (
        None  # `logprobs` or `scores` of a few ids as the loss read them, for people to look at
    )


@dataclass(frozen=True)
class Request:
    """One completion to sample: `k` is its index among the completions of `id`; `step` seeds its
    draws.

    `generated` holds tokens sampled before an abort, with their log-probs and versions; sampling
    goes on after them.
    """

    id: str
    k: int
    prompt: Sequence[int]
    step: int = 0
    generated: Partial | None = None
    max_new_tokens: int | None = None  # lower than the settings' where a request wants less
    # settings of its own (see `SettingsTable.index`); else the generator's
    sampling: GenerationSpec | None = None
    # the id that names its draws, where that is another: two requests may then draw alike
    draws_as: str | None = None


@dataclass(frozen=True)
class Partial:
    """What an aborted request has so far; `Request(generated=partial)` goes on from it."""

    id: str
    k: int
    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    versions: Sequence[int] = ()
    supports: Sequence[Sequence[int]] = ()


class TokenEvent(NamedTuple):
    """One sampled token.

    `finish` is "stop" (end token or stop text), "length", or None while it goes on.
    """

    id: str
    k: int
    token: int
    logprob: float
    version: int
    finish: Literal["stop", "length"] | None = None
    support: Sequence[int] = ()  # ids kept by top-k/top-p/min-p, where the spec records them
    # the likeliest ids and their log-probs, where the spec asks for them
    top: Sequence[tuple[int, float]] = ()


class Generator(Protocol):
    def submit(self, requests: Sequence[Request]) -> None: ...
    def step(self) -> list[TokenEvent]: ...
    def abort(self, ids: Iterable[str]) -> list[Partial]: ...
    def weights_changed(self, version: int, *, keep_kv: bool) -> None:
        """To be called before the next step where weights are written to, or moved, while the
        generator is open: tokens may have been computed ahead with the old ones, and are then
        forgotten.
        """
        ...

    @property
    def idle(self) -> bool:
        """Whether every submitted request has finished."""
        ...


class Engine(Protocol):
    """SPMD: every rank of the layout calls it with its data-parallel part.

    `temperature` divides the logits, as in the sampler. `max_tokens` is the most tokens of one
    forward pass: a batch of more is cut into micro-batches.
    """

    layout: Layout
    version: int  # completed train steps

    def forward(
        self,
        batch: SequenceSample,
        want: frozenset[Output],
        *,
        temperature: float = 1.0,
        top: TopIds | None = None,
        max_tokens: int = DEFAULT_MAX_TOKENS,
    ) -> SequenceSample:
        """`want` by id. `top` says which ids the outputs `top_ids` and `top_logprobs` are of."""
        ...

    def train(
        self,
        minibatches: Sequence[SequenceSample],
        loss: Loss,
        *,
        veto: Veto | None = None,
        temperature: float = 1.0,
        max_tokens: int = DEFAULT_MAX_TOKENS,
    ) -> list[StepStats]:
        """One optimizer step a minibatch, in order."""
        ...

    def evaluate(
        self,
        batch: SequenceSample,
        loss: Loss,
        *,
        temperature: float = 1.0,
        max_tokens: int = DEFAULT_MAX_TOKENS,
    ) -> dict[str, float]:
        """`loss` and what the loss has to say of a batch, without a step."""
        ...

    def generating(self, spec: GenerationSpec) -> AbstractContextManager[Generator]: ...
    def slices(self) -> Mapping[str, Slice]: ...
    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Slice, Array]]: ...
    def write(
        self, parts: Iterable[tuple[str, Slice, Array]], *, version: int, eta: float = 1.0
    ) -> None: ...
    def save_state(self, d: Path) -> None: ...
    def load_state(self, d: Path) -> None: ...
    def offload(self, what: Literal["weights", "optimizer"]) -> None: ...
    def onload(self, what: Literal["weights", "optimizer"]) -> None: ...
    def save_model(self, d: Path, tokenizer: Any) -> None:
        """Write a Hugging Face directory (weights, config, generation config, tokenizer) that
        `transformers` loads.
        """
        ...

    @property
    def description(self) -> Mapping[str, Any]:
        """Facts for the run's report: family, num_parameters, num_trainable, vocab_size,
        num_layers, flops_per_token.
        """
        ...
