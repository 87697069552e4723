"""Intervals and tests of evaluation scores: Wilson, paired bootstrap, randomization, Holm.

A score is a function of the items of a test set. Its interval shows how much it could differ with
other items of the same kind. All random numbers have one fixed seed, so that the same files give
the same table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

RESAMPLES = 10_000
SEED = 20
Z = 1.959963984540054  # quantile of the normal distribution for two-sided 95%
LEVEL = 0.05  # 1 - confidence
TAILS = (100 * LEVEL / 2, 100 - 100 * LEVEL / 2)
# With at most this many distinct items, the number of each is drawn instead of the items.
MAX_KINDS = 256
MAX_CACHED_ITEMS = 4096  # with at most this many items, drawn counts are cached
CHUNK = 1 << 22  # maximum number of counts drawn at once

MEAN = "mean"
PERPLEXITY = "perplexity"  # exp(-mean)
BITS = "bits"  # -mean / ln 2


@dataclass(frozen=True)
class ScoredItems:
    """Values of the items of a test set, for one or several models.

    The mean of a part is the sum of its values over the sum of its weights. The score is a
    function of the mean over parts, weighted by `shares`.

    Attributes:
        values: [items, models], such as 0 and 1 for wrong and right
        weights: [items]; 1, or the number of words or bytes for perplexities
        parts: [items], part of each item, from 0
        shares: [parts], with sum 1
        form: `MEAN`, `PERPLEXITY` or `BITS`
    """

    values: np.ndarray
    weights: np.ndarray
    parts: np.ndarray
    shares: np.ndarray
    form: str = MEAN

    @property
    def num_items(self) -> int:
        return len(self.weights)

    def has_only_right_and_wrong(self) -> bool:
        """Return whether the score is the share of right items, all with the same weight."""
        is_binary = bool(np.isin(self.values, (0.0, 1.0)).all())
        return self.form == MEAN and len(self.shares) == 1 and is_binary


def apply_form(form: str, means: np.ndarray) -> np.ndarray:
    """Return scores of the given form from means of any shape. Overflows give infinite scores."""
    if form == MEAN:
        return means
    if form == BITS:
        return -means / math.log(2)
    with np.errstate(over="ignore"):
        return np.exp(-means)


def compute_scores(items: ScoredItems) -> np.ndarray:
    """Return the score of each model, [models]."""
    total = np.zeros(items.values.shape[1])
    for part, share in enumerate(items.shares):
        in_part = items.parts == part
        total += share * items.values[in_part].sum(0) / items.weights[in_part].sum()
    return apply_form(items.form, total)


def draw_resampled_scores(items: ScoredItems) -> np.ndarray:
    """Return the scores of all models on resampled items, [RESAMPLES, models].

    The items of each part are drawn with replacement; the draws are the same for all models.
    """
    total = np.zeros((RESAMPLES, items.values.shape[1]))
    for part, share in enumerate(items.shares):
        in_part = items.parts == part
        rows = np.column_stack([items.values[in_part], items.weights[in_part]])
        sums = _draw_resampled_sums(rows, part)
        total += share * sums[:, :-1] / sums[:, -1:]
    return apply_form(items.form, total)


def _draw_resampled_sums(rows: np.ndarray, part: int) -> np.ndarray:
    """Return the column sums of resampled rows, [RESAMPLES, columns].

    If few rows are distinct, such as right and wrong, the number of each distinct row is drawn from
    a multinomial distribution, which is much faster than drawing every row.
    """
    count = len(rows)
    kinds, numbers = np.unique(rows, axis=0, return_counts=True)
    if len(kinds) <= MAX_KINDS:
        generator = np.random.default_rng((SEED, part))
        counts = generator.multinomial(count, numbers / count, size=RESAMPLES)
        return counts.astype(np.float64) @ kinds
    sums = np.empty((RESAMPLES, rows.shape[1]))
    size = max(1, CHUNK // count)
    for start in range(0, RESAMPLES, size):
        stop = min(start + size, RESAMPLES)
        draw_counts = _draw_cached_counts if count <= MAX_CACHED_ITEMS else _draw_counts
        sums[start:stop] = draw_counts(count, part, start, stop).astype(np.float64) @ rows
    return sums


def _draw_counts(count: int, part: int, start: int, stop: int) -> np.ndarray:
    """Return the number of draws of each of `count` items, [stop - start, count].

    The rows are the resamples from `start` to `stop` (exclusive).
    """
    generator = np.random.default_rng((SEED, part, start))
    counts = np.empty(
        (stop - start, count), dtype=np.uint16 if count <= MAX_CACHED_ITEMS else np.int32
    )
    for row in counts:
        row[:] = np.bincount(generator.integers(count, size=count), minlength=count)
    return counts


_draw_cached_counts = lru_cache(maxsize=8)(_draw_counts)


def compute_wilson_interval(right: float, count: int) -> tuple[float, float]:
    """Return the 95% Wilson interval of a share of `count` items, of which `right` are right."""
    share = right / count
    scale = 1 + Z * Z / count
    center = (share + Z * Z / (2 * count)) / scale
    spread = math.sqrt(share * (1 - share) / count + Z * Z / (4 * count * count))
    half = Z / scale * spread
    return max(0.0, center - half), min(1.0, center + half)


def compute_interval(items: ScoredItems) -> tuple[float, float] | None:
    """Return the 95% interval of one model's score, or None if it cannot be estimated.

    Scores of items that are right or wrong have a Wilson interval, all others a bootstrap interval
    (percentiles). No interval can be estimated from a single item, or by bootstrap from equal
    items.
    """
    if items.num_items < 2:
        return None
    if items.has_only_right_and_wrong():
        return compute_wilson_interval(float(items.values.sum()), items.num_items)
    low, high = np.percentile(draw_resampled_scores(items)[:, 0], TAILS)
    return (float(low), float(high)) if high > low and np.isfinite(high) else None


@dataclass(frozen=True)
class ScoreDifference:
    """Difference of the second model's score from the first's, on the same items.

    `low` and `high` are the ends of the 95% interval by the paired bootstrap. `p_value` is that of
    the paired randomization test.
    """

    value: float
    low: float
    high: float
    p_value: float
    num_items: int

    def is_beyond_noise(self, corrected: float | None = None) -> bool:
        """Return whether the interval excludes 0 and the test rejects equality.

        `corrected` is the p-value corrected for the number of comparisons; None for one comparison.
        """
        p_value = self.p_value if corrected is None else corrected
        return (self.low > 0 or self.high < 0) and p_value < LEVEL


def compare_pair(items: ScoredItems) -> ScoreDifference:
    """Compare two models on the same items."""
    first, second = compute_scores(items)
    resampled = draw_resampled_scores(items)
    with np.errstate(invalid="ignore"):  # perplexities can overflow; NaN is in no interval
        low, high = np.percentile(resampled[:, 1] - resampled[:, 0], TAILS)
    return ScoreDifference(
        float(second - first), float(low), float(high), _compute_p_value(items), items.num_items
    )


def _compute_p_value(items: ScoredItems) -> float:
    """Return the p-value of the paired randomization test.

    If the models were equally good, their values of an item could be swapped. The p-value is the
    share of random swaps whose difference of the means is at least the observed one. Unlike the
    bootstrap, this test is valid if only a few items differ. If no swap reaches the observed
    difference, Hoeffding's bound on the p-value is used if it is smaller than 1 / (RESAMPLES + 1),
    so that the difference can be significant after a correction for hundreds of comparisons.
    """
    gains = np.zeros(items.num_items)
    for part, share in enumerate(items.shares):
        in_part = items.parts == part
        delta = items.values[in_part, 1] - items.values[in_part, 0]
        gains[in_part] = share * delta / items.weights[in_part].sum()
    gains = gains[gains != 0]
    if not len(gains):
        return 1.0
    sizes, numbers = np.unique(np.abs(gains), return_counts=True)
    generator = np.random.default_rng((SEED, len(gains)))
    if len(sizes) <= MAX_KINDS:
        positive = generator.binomial(numbers, 0.5, size=(RESAMPLES, len(sizes)))
        sums = (2.0 * positive - numbers) @ sizes
    else:
        sums = np.empty(RESAMPLES)
        step = max(1, CHUNK // len(gains))
        for start in range(0, RESAMPLES, step):
            stop = min(start + step, RESAMPLES)
            flips = generator.integers(0, 2, size=(stop - start, len(gains)), dtype=np.int8)
            sums[start:stop] = (2.0 * flips - 1.0) @ gains
    # Sums that are equal except for rounding count as reached.
    reached = np.abs(sums) >= abs(gains.sum()) * (1 - 1e-9)
    if reached.any():
        return float((1 + reached.sum()) / (RESAMPLES + 1))
    bound = 2 * math.exp(-(gains.sum() ** 2) / (2 * (gains**2).sum()))
    return min(1 / (RESAMPLES + 1), bound)


def adjust_for_comparisons(p_values: Sequence[float]) -> list[float]:
    """Return the p-values, in the same order, corrected for their number by Holm's method."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    corrected = [0.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, p_values[index] * (len(p_values) - rank)))
        corrected[index] = highest
    return corrected


def compute_first_shares(items: ScoredItems, *, rises: bool) -> np.ndarray:
    """Return the share of resamples in which each model has the best score, [models].

    If several models have the best score of a resample, each counts for an equal part of it.
    `rises` is True if higher scores are better.
    """
    scores = draw_resampled_scores(items) if rises else -draw_resampled_scores(items)
    is_best = scores >= scores.max(1, keepdims=True) - 1e-12
    return (is_best / is_best.sum(1, keepdims=True)).mean(0)
