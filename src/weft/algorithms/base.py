"""What a loss sees and returns.

Losses are array maths: numpy, torch and, later, jax run the same function.

A loss reads one micro-batch laid out by rows. A row is one trained position (`[N]` rows); rows
belong to sequences (`[S]`, one completion each), sequences to groups (`[G]`, one id each). It
returns a plain sum over samples divided by `total`, the denominators of the whole minibatch over
all ranks, so gradients do not depend on how the minibatch was cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import array_api_compat
import numpy as np
import numpy.typing as npt

Array = Any
# `top1` [N] is 1 where the label is the likeliest token, else 0; no gradient (token accuracy needs
# it). `top_ids` [N, K] are the likeliest ids and `top_logprobs` [N, K + 1] their log-probs and the
# log of what all other ids have together, without a gradient; `given_logprobs` [N, K + 1] are the
# same of the ids that the batch holds as `given_ids`, with one.
Output = Literal[
    "logprobs", "entropy", "values", "scores", "top1", "top_ids", "top_logprobs", "given_logprobs"
]

# a log-ratio is cut to +-20 before `exp`: e^20 = 5e8 still squares within float32
LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True)
class Sum:
    """A weighted mean: parts add up as sum of values over sum of weights.

    Without any weight it is left out.
    """

    value: Any
    weight: Any = 1.0


@dataclass(frozen=True)
class Max:
    """The largest of the parts."""

    value: Any


@dataclass(frozen=True)
class Min:
    """The smallest of the parts."""

    value: Any


Stat = Sum | Max | Min


@runtime_checkable
class RowBatch(Protocol):
    """One micro-batch as a loss sees it.

    `batch[key]` is `[N]` for a key with one value a completion token (`loss_mask`, `advantages`,
    `logprobs`, ...), `[N, K]` for one with K a token, and `[S]` for a key with one value a sequence
    (`rank`, `rewards`, ...); all are arrays of the network's framework on its device.
    """

    num_rows: int
    num_sequences: int
    sequence: Array  # [N] int64, the sequence a row belongs to
    # [S] int64, the group a sequence belongs to, counted from 0 within the micro-batch
    group: Array
    lengths: Array  # [S] float, trained rows of a sequence (the sum of its mask)
    # [N] float, 1 where a row is trained; `loss_mask` where the sample holds one, else ones
    mask: Array

    def __getitem__(self, key: str) -> Array: ...
    def __contains__(self, key: object) -> bool: ...
    def sum(self, rows: Array) -> Array:
        """[N] -> [S], the sum of a sequence's rows (segment sum; differentiable)."""
        ...

    def spread(self, sequences: Array) -> Array:
        """[S] -> [N], a sequence's value at each of its rows."""
        ...

    def pairs(self) -> tuple[Array, Array]:
        """Indices ([P], [P]) of sequences (better, worse): same group, same `comparison`, smaller
        `rank` is better.
        """
        ...


@runtime_checkable
class Sample(Protocol):
    """What `denominators` reads of a `SequenceSample` (which lives a floor higher)."""

    @property
    def num_ids(self) -> int: ...
    @property
    def lengths(self) -> Mapping[str, npt.NDArray[np.int32]]: ...
    @property
    def data(self) -> Mapping[str, Array]: ...
    def group_of(self, key: str) -> npt.NDArray[np.int64]: ...


class Loss(Protocol):
    """A trainable objective.

    Shipped losses are frozen dataclasses whose fields are their options; they inherit `veto` and
    `summary`.
    """

    outputs: frozenset[Output]
    unit: Literal["sequence", "group"]  # group: needs all completions of an id together

    @property
    def by_row(self) -> bool:
        """Whether the gradient by a row's log-prob and entropy depends on no other row's outputs:
        it can then be made as soon as they are known.
        """
        return False

    def denominators(self, minibatch: Sample) -> Mapping[str, float]:
        """Sums over the ids of a `SequenceSample` that `__call__` divides by; additive over ids,
        from data alone.
        """
        ...

    def __call__(
        self, out: Mapping[str, Array], batch: RowBatch, total: Mapping[str, float]
    ) -> tuple[Array, Mapping[str, Stat]]:
        """(loss, statistics) of one micro-batch; `out` holds `[N]` logprobs, entropy, values, `[N,
        K + 1]` given_logprobs and `[S]` scores.
        """
        ...

    def veto(self, stats: Mapping[str, float]) -> str | None:
        """Why the optimizer must not step on this minibatch, from its reduced statistics, or None."""
        return None

    def summary(self, stats: Mapping[str, float]) -> dict[str, float]:
        """The metrics to log, from the reduced statistics: what is no sum over samples (a
        perplexity, an explained variance) is made here, after all parts and ranks have been joined.
        """
        return dict(stats)


def reduce_stats(parts: Iterable[Mapping[str, Stat]]) -> dict[str, float]:
    """Join the statistics of micro-batches: sums over sums, largest, smallest.

    A name without weight is left out.
    """
    values: dict[str, list[Stat]] = {}
    for part in parts:
        for name, stat in part.items():
            values.setdefault(name, []).append(stat)
    reduced = {name: _reduce(stats) for name, stats in values.items()}
    return {name: value for name, value in reduced.items() if value == value}


def _reduce(stats: list[Stat]) -> float:
    first = stats[0]
    if isinstance(first, Sum):
        weight = sum(float(s.weight) for s in stats if isinstance(s, Sum))
        if weight:
            return sum(float(s.value) for s in stats) / weight
        return float("nan")
    pick = max if isinstance(first, Max) else min
    return pick(float(s.value) for s in stats)


def fixed(array: Array) -> Array:
    """The same values as a constant: no gradient flows through.

    The array API has no name for this.
    """
    if array_api_compat.is_jax_array(array):
        import jax  # of whoever made the array

        return jax.lax.stop_gradient(array)
    return array.detach() if array_api_compat.is_torch_array(array) else array


def exp_ratio(log_ratio: Array) -> Array:
    """exp of a log-ratio of any shape, which is cut to +-`LOG_RATIO_BOUND` first; beyond it the
    gradient is 0.
    """
    xp = array_api_compat.array_namespace(log_ratio)
    return xp.exp(xp.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))


def log_sigmoid(x: Array) -> Array:
    """log(1 / (1 + exp(-x))) of any shape, stable at both ends; its gradient at 0 is exactly 1/2."""
    xp = array_api_compat.array_namespace(x)
    return -xp.logaddexp(xp.zeros_like(x), -x)


def masked_sum(values: Array, mask: Array) -> Array:
    """Sum of `values` [N] where `mask` [N] is not 0, weighted by it; what a masked row holds (inf,
    NaN) does not matter.
    """
    xp = array_api_compat.array_namespace(values, mask)
    return xp.sum(xp.where(mask != 0, values, xp.zeros_like(values)) * mask)


def masked_mean(values: Array, mask: Array) -> Sum:
    """The statistic "mean of `values` [N] over trained rows"; no gradient."""
    xp = array_api_compat.array_namespace(values, mask)
    return Sum(masked_sum(fixed(values), mask), xp.sum(mask))


def host_array(array: Array) -> npt.NDArray[Any]:
    """The array in host memory, as numpy."""
    return np.asarray(array_api_compat.to_device(fixed(array), "cpu"))


def trained_rows(minibatch: Sample) -> npt.NDArray[np.float64]:
    """float64 [S]: trained rows of each completion, as `RowBatch.lengths` counts them, from data
    alone.

    The sum of its `loss_mask` (its length where there is none), without the first token where
    nothing precedes it.
    """
    lengths = minibatch.lengths["completion"].astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    mask = np.ones(int(lengths.sum()))
    if "loss_mask" in minibatch.data:
        mask = host_array(minibatch.data["loss_mask"]).astype(np.float64)
    prompts = np.zeros(minibatch.num_ids, dtype=np.int64)
    if "prompt" in minibatch.lengths:
        prompts = minibatch.lengths["prompt"].astype(np.int64)
    unpredicted = (prompts[minibatch.group_of("completion")] == 0) & (lengths > 0)
    mask[starts[unpredicted]] = 0.0
    sums = np.concatenate([[0.0], np.cumsum(mask)])
    return sums[starts + lengths] - sums[starts]
