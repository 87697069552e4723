"""Intervals and tests of scores, against formulas and enumerations."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest

from weft.observe import eval_statistics
from weft.observe.eval_statistics import (
    BITS,
    PERPLEXITY,
    RESAMPLES,
    ScoredItems,
    adjust_for_comparisons,
    compare_pair,
    compute_first_shares,
    compute_interval,
    compute_scores,
    compute_wilson_interval,
    draw_resampled_scores,
)


def score_items(*models: Sequence[float], parts: Sequence[int] = ()) -> ScoredItems:
    values = np.array(models, dtype=float).T
    numbered = np.array(parts or [0] * len(values))
    count = int(numbered.max()) + 1
    return ScoredItems(values, np.ones(len(values)), numbered, np.full(count, 1 / count))


def flip(before: Sequence[float], right: int, wrong: int) -> list[float]:
    """Return answers of which `right` wrong ones became right, and `wrong` right ones wrong."""
    after = list(before)
    for index in [i for i, value in enumerate(before) if value == 0][:right]:
        after[index] = 1.0
    for index in [i for i, value in enumerate(before) if value == 1][:wrong]:
        after[index] = 0.0
    return after


# Values of Newcombe, Statistics in Medicine 17 (1998), table I, method 3.
@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611)],
)
def test_wilson_intervals_are_those_of_the_literature(right, count, low, high):
    assert compute_wilson_interval(right, count) == pytest.approx((low, high), abs=5e-5)


def test_the_bootstrap_has_the_spread_of_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(1).random(200).round(1)
    expected = values.std() / math.sqrt(200)
    for kinds in (256, 0):  # numbers of each kind are drawn, then the items themselves
        monkeypatch.setattr(eval_statistics, "MAX_KINDS", kinds)
        spread = draw_resampled_scores(score_items(values)).std()
        # The standard deviation of R resamples has a relative error of 1 / sqrt(2 R); 5 of them.
        assert spread == pytest.approx(expected, rel=5 / math.sqrt(2 * RESAMPLES))


def test_the_same_items_give_the_same_interval():
    values = np.random.default_rng(1).random(50)
    assert compute_interval(score_items(values)) == compute_interval(score_items(values))


@pytest.mark.parametrize("values", [[0.5], [0.5, 0.5, 0.5], [1.0]])
def test_uninformative_items_have_no_interval(values):
    assert compute_interval(score_items(values)) is None


def test_all_right_is_not_certain():
    low, high = compute_interval(score_items([1.0] * 20)) or (0.0, 0.0)
    assert high == 1.0 and 0.8 < low < 0.9


def test_perplexities_are_functions_of_weighted_means():
    values = np.array([[-6.0], [-3.0]])
    items = ScoredItems(values, np.array([4.0, 2.0]), np.zeros(2, int), np.ones(1), PERPLEXITY)
    assert compute_scores(items)[0] == pytest.approx(math.exp(9 / 6))
    bits = ScoredItems(values, np.array([4.0, 2.0]), np.zeros(2, int), np.ones(1), BITS)
    assert compute_scores(bits)[0] == pytest.approx(1.5 / math.log(2))


def test_parts_have_the_same_weight():
    items = score_items([1.0, 0.0, 0.0, 0.0, 1.0], parts=[0, 0, 0, 0, 1])
    assert compute_scores(items)[0] == pytest.approx((0.25 + 1) / 2)


def compute_exact_chance(before: Sequence[float], after: Sequence[float]) -> float:
    """P-value of the randomization test, from all swaps."""
    gains = [b - a for a, b in zip(before, after, strict=True) if a != b]
    sums = [
        abs(sum(sign * gain for sign, gain in zip(signs, gains, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(gains))
    ]
    return sum(each >= abs(sum(gains)) - 1e-9 for each in sums) / len(sums)


@pytest.mark.parametrize(("right", "wrong"), [(4, 0), (6, 0), (9, 2), (5, 5)])
def test_the_randomization_test_is_that_of_all_swaps(right: int, wrong: int) -> None:
    before = [0.0] * 60 + [1.0] * 40
    difference = compare_pair(score_items(before, flip(before, right, wrong)))
    exact = compute_exact_chance(before, flip(before, right, wrong))
    # Four standard errors of a share of R draws, and the 1 that is added to both counts.
    bound = 4 * math.sqrt(exact * (1 - exact) / RESAMPLES) + 1 / RESAMPLES
    assert difference.p_value == pytest.approx(exact, abs=bound)
    assert difference.value == pytest.approx((right - wrong) / 100)


def test_four_items_in_one_direction_are_noise_although_the_bootstrap_excludes_zero():
    before = [0.0] * 60 + [1.0] * 40
    difference = compare_pair(score_items(before, flip(before, 4, 0)))
    assert difference.low > 0 and not difference.is_beyond_noise()
    assert compare_pair(score_items(before, flip(before, 12, 0))).is_beyond_noise()


def test_equal_models_rarely_differ():
    generator = np.random.default_rng(3)
    marked = 0
    for _ in range(60):
        answers = (generator.random((2, 60)) < 0.5).astype(float)
        marked += compare_pair(score_items(*answers)).is_beyond_noise()
    # The chance is at most 5% each: 3 of 60, and three standard deviations more.
    assert marked <= 3 + 3 * math.sqrt(60 * 0.05 * 0.95)


def test_few_continuous_items_are_not_enough():
    difference = compare_pair(score_items([0.1, 0.2, 0.3], [0.5, 0.7, 0.9]))
    assert difference.low > 0 and not difference.is_beyond_noise()


def test_hundreds_of_comparisons_leave_large_differences():
    before = [0.0] * 100
    difference = compare_pair(score_items(before, flip(before, 80, 0)))
    assert difference.p_value < 0.05 / 10_000


def test_holm_multiplies_the_smallest_by_the_number_of_comparisons():
    corrected = adjust_for_comparisons([0.04, 0.01, 0.03])
    assert corrected == pytest.approx([0.06, 0.03, 0.06])


def test_shares_of_first_places():
    shares = compute_first_shares(score_items([1, 1, 0, 0], [1, 1, 0, 0]), rises=True)
    assert shares.tolist() == [0.5, 0.5]
    shares = compute_first_shares(score_items([1.0] * 9, [0.0] * 9), rises=False)
    assert shares.tolist() == [0.0, 1.0]
