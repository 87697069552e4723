"""Interface of engines.

An engine runs the network of one role on one layout of devices. The signatures must not be changed
(docs/architecture.md).
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

DEFAULT_MAX_TOKENS = 16384  # default limit on the tokens of one forward pass

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
    """Result of one optimizer step.

    `metrics` contains the statistics of the loss, reduced over ranks, plus `loss`, `grad_norm`,
    `learning_rate`, `num_tokens` (tokens that the network processed, prompts included) and
    `seconds`. `skipped` is the reason if the update was skipped. `seen` contains the outputs of a
    few samples, for display.
    """

    metrics: Mapping[str, float]
    # reason for skipping the step: a veto or a loss that is not finite
    skipped: str | None = None
    seen: SequenceSample | None = None  # outputs `logprobs` or `scores` of a few ids, for display


@dataclass(frozen=True)
class Request:
    """Request for one completion of a prompt.

    `k` is the index of the completion among all completions with the same `id`. `step` is part of
    the seed of the completion's random numbers. If an earlier request for this completion was
    aborted, `generated` contains the tokens sampled until then, with their log-probs and weight
    versions; sampling continues after these tokens.
    """

    id: str
    k: int
    prompt: Sequence[int]
    step: int = 0
    generated: Partial | None = None
    max_new_tokens: int | None = None  # limit of this request, below that of the settings
    # settings of this request (see `SettingsTable.find_index`); None: the generator's
    sampling: GenerationSpec | None = None
    # id that seeds the draws, if it isn't `id`; requests with equal ids use equal random numbers
    draws_as: str | None = None


@dataclass(frozen=True)
class Partial:
    """Tokens that were sampled before a request was aborted.

    A new `Request` with `generated` set to this object continues the completion.
    """

    id: str
    k: int
    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    versions: Sequence[int] = ()
    supports: Sequence[Sequence[int]] = ()


class TokenEvent(NamedTuple):
    """One sampled token.

    `finish` is "stop" if the completion ends with an end token or a stop text, "length" if it
    reached its limit, and None if it continues.
    """

    id: str
    k: int
    token: int
    logprob: float
    version: int
    finish: Literal["stop", "length"] | None = None
    support: Sequence[int] = ()  # ids kept by top-k/top-p/min-p, if the spec records them
    # likeliest ids and their log-probs, if the spec asks for them
    top: Sequence[tuple[int, float]] = ()


class Generator(Protocol):
    """Interface of a generator that samples completions with continuous batching.

    Each call of `step` samples tokens for the requests that are not finished.
    """

    def submit(self, requests: Sequence[Request]) -> None: ...
    def step(self) -> list[TokenEvent]: ...
    def abort(self, ids: Iterable[str]) -> list[Partial]: ...
    def weights_changed(self, version: int, *, keep_kv: bool) -> None:
        """Tell the generator that the weights have changed and have version `version`.

        Must be called before the next step if weights were written or moved while the generator is
        open. Tokens that were computed ahead with the old weights are discarded. With `keep_kv`,
        the cached keys and values are kept; otherwise they are computed again.
        """
        ...

    @property
    def idle(self) -> bool:
        """True if every submitted request has finished."""
        ...


class Engine(Protocol):
    """Interface of an engine, which runs the network of one role on one layout of devices.

    All ranks of the layout call the same methods (SPMD), each with its data-parallel part of the
    batch. In these methods, `temperature` divides the logits, as it does in sampling. `max_tokens`
    limits the number of tokens in one forward pass; larger batches are split into micro-batches.
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
        """Return the outputs named in `want` for each id of the batch.

        `top` selects the ids of the outputs `top_ids` and `top_logprobs`.
        """
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
        """Run one optimizer step for each minibatch, in order."""
        ...

    def evaluate(
        self,
        batch: SequenceSample,
        loss: Loss,
        *,
        temperature: float = 1.0,
        max_tokens: int = DEFAULT_MAX_TOKENS,
    ) -> dict[str, float]:
        """Return the loss of a batch and the metrics that the loss defines, without training."""
        ...

    def generating(self, spec: GenerationSpec) -> AbstractContextManager[Generator]: ...
    def slices(self) -> Mapping[str, Slice]: ...
    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Slice, Array]]: ...
    def write(
        self, parts: Iterable[tuple[str, Slice, Array]], *, version: int, eta: float = 1.0
    ) -> None: ...
    def save_state(self, directory: Path) -> None: ...
    def load_state(self, directory: Path) -> None: ...
    def offload(self, what: Literal["weights", "optimizer"]) -> None: ...
    def onload(self, what: Literal["weights", "optimizer"]) -> None: ...
    def save_model(self, directory: Path, tokenizer: Any) -> None:
        """Write a Hugging Face directory that `transformers` can load.

        The directory contains weights, config, generation config and tokenizer.
        """
        ...

    @property
    def description(self) -> Mapping[str, Any]:
        """Facts about the engine for the run's report.

        The keys are `family`, `num_parameters`, `num_trainable`, `vocab_size`, `num_layers` and
        `flops_per_token`.
        """
        ...
