"""What a loss sees and returns. Losses are array maths: numpy, torch and, later, jax run the same function.

A loss reads one micro-batch laid out by rows. A row is one trained position (`[N]` rows); rows belong to sequences (`[S]`,
one completion each), sequences to groups (`[G]`, one id each). It returns a plain sum over samples divided by `total`, the
denominators of the whole minibatch over all ranks, so gradients do not depend on how the minibatch was cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Array = Any
Output = Literal["logprobs", "entropy", "values", "scores"]


@dataclass(frozen=True)
class Sum:
    """A weighted mean: parts add up as sum of values over sum of weights. Without any weight it is left out."""

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


class RowBatch(Protocol):
    """One micro-batch as a loss sees it. `batch[key]` is `[N]` for a key with one value a completion token (`loss_mask`,
    `advantages`, `logprobs`, ...) and `[S]` for a key with one value a sequence (`rank`, `rewards`, ...); both are arrays of
    the network's framework on its device."""

    num_rows: int
    num_sequences: int
    sequence: Array  # [N] int64, the sequence a row belongs to
    group: Array  # [S] int64, the group a sequence belongs to, counted from 0 within the micro-batch
    lengths: Array  # [S] float, trained rows of a sequence (the sum of its mask)
    mask: Array  # [N] float, 1 where a row is trained; `loss_mask` where the sample holds one, else ones

    def __getitem__(self, key: str) -> Array: ...
    def __contains__(self, key: object) -> bool: ...
    def sum(self, rows: Array) -> Array:
        """[N] -> [S], the sum of a sequence's rows (segment sum; differentiable)."""
        ...

    def spread(self, sequences: Array) -> Array:
        """[S] -> [N], a sequence's value at each of its rows."""
        ...

    def pairs(self) -> tuple[Array, Array]:
        """Indices ([P], [P]) of sequences (better, worse): same group, same `comparison`, smaller `rank` is better."""
        ...


class Loss(Protocol):
    """A trainable objective. Shipped losses are frozen dataclasses whose fields are their options; they inherit `veto`."""

    outputs: frozenset[Output]
    unit: Literal["sequence", "group"]  # group: needs all completions of an id together

    def denominators(self, minibatch: Any) -> Mapping[str, float]:
        """Sums over the ids of a `SequenceSample` that `__call__` divides by; additive over ids, from data alone."""
        ...

    def __call__(
        self, out: Mapping[str, Array], batch: RowBatch, total: Mapping[str, float]
    ) -> tuple[Array, Mapping[str, Stat]]:
        """(loss, statistics) of one micro-batch; `out` holds `[N]` logprobs, entropy, values and `[S]` scores."""
        ...

    def veto(self, stats: Mapping[str, float]) -> str | None:
        """Why the optimizer must not step on this minibatch, from its reduced statistics, or None."""
        return None


def reduce_stats(parts: Iterable[Mapping[str, Stat]]) -> dict[str, float]:
    """Join the statistics of micro-batches: sums over sums, largest, smallest. A name without weight is left out."""
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
        return sum(float(s.value) for s in stats) / weight if weight else float("nan")
    pick = max if isinstance(first, Max) else min
    return pick(float(s.value) for s in stats)
