"""Ends of noisy curves, their best values, and changes beyond the noise."""

from __future__ import annotations

import random

import pytest

from weft.observe import pace
from weft.observe.pace import MetricChange


def test_an_end_is_a_mean_of_several_steps() -> None:
    assert [pace.count_last(n) for n in (1, 3, 9, 15, 60, 400)] == [1, 1, 3, 5, 6, 40]
    assert [pace.count_first(n) for n in (1, 3, 9, 15, 60, 400)] == [1, 1, 3, 5, 5, 5]
    assert pace.compute_end_mean([0.0] * 10 + [1.0, 2.0, 3.0, 4.0, 5.0]) == 3.0


def test_the_best_value_is_no_single_lucky_batch() -> None:
    values = [0.5] * 15
    values[3] = 1.0
    assert pace.find_best("r/reward", values) == (pytest.approx(0.6), 4), (
        "five steps, the lucky one among them"
    )
    assert pace.find_best("t/loss", [3.0, 1.0, 2.0]) == (1.0, 1)
    assert pace.find_best("t/loss", [-value for value in values])[0] == pytest.approx(-0.6)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (MetricChange(0.33, 0.3375, 0.04), "+0.0075, within noise"),
        (MetricChange(0.33, 0.54, 0.04), "+0.21 ± 0.04"),
        (MetricChange(2.0, 0.5, 0.25), "-1.5 ± 0.25"),
        (MetricChange(1.0, 2.0), "+1"),
        (MetricChange(1.0, 2.0, 1e-12), "+1"),
        (MetricChange(0.5, 0.5), "+0"),
    ],
)
def test_a_change_is_shown_with_its_noise(change: MetricChange, text: str) -> None:
    assert change.format_text() == text


@pytest.mark.parametrize("count", [8, 12, 20, 40, 100, 400])
def test_noise_alone_is_hardly_ever_called_a_change(count: int) -> None:
    draws = random.Random(count)
    found = [
        pace.compute_change([draws.gauss(0.3, 0.1) for _ in range(count)]).is_within_noise
        for _ in range(400)
    ]
    # At a rate of 5%, 400 draws hold 20 +- 4.4 changes; 40 are out of reach.
    assert found.count(False) <= 40


@pytest.mark.parametrize("count", [12, 20, 40, 100, 400])
def test_a_rise_and_a_steep_fall_are_seen_through_noise(count: int) -> None:
    draws = random.Random(count)
    rise = [0.3 + 0.4 * step / count + draws.gauss(0, 0.05) for step in range(count)]
    fall = [0.6 + 4 * 0.5 ** (step / (count / 15)) + draws.gauss(0, 0.02) for step in range(count)]
    assert pace.compute_change(rise).delta > 0 and not pace.compute_change(rise).is_within_noise
    assert pace.compute_change(fall).delta < 0 and not pace.compute_change(fall).is_within_noise


def test_noise_that_lasts_for_several_steps_is_noise() -> None:
    draws, wrong = random.Random(1), 0
    for _ in range(200):
        value, values = 0.0, []
        for _ in range(150):
            value = 0.5 * value + draws.gauss(0, 1)
            values.append(value)
        wrong += not pace.compute_change(values[50:]).is_within_noise
    assert wrong <= 20, "10% at most, where independent steps would give a third"


@pytest.mark.parametrize("count", [8, 12, 16, 20, 30, 40, 49])
@pytest.mark.parametrize(("dependence", "most"), [(0.0, 0.07), (0.3, 0.1), (0.5, 0.13)])
def test_noise_of_short_runs_whose_steps_depend_on_each_other_is_noise(
    count: int, dependence: float, most: float
) -> None:
    """At a rate of 5%, 5 +- 1.1% of 400 draws are changes.

    With third differences alone, 35% are called changes at a correlation of 0.5.
    """
    draws, wrong = random.Random(count), 0
    for _ in range(400):
        value, values = draws.gauss(0, 1 / (1 - dependence**2) ** 0.5), []
        for _ in range(count):
            value = dependence * value + draws.gauss(0, 1)
            values.append(value)
        wrong += not pace.compute_change(values).is_within_noise
    assert wrong / 400 <= most


def test_an_evaluated_share_has_the_noise_of_its_rows() -> None:
    """For draws of n rows, 95% of the intervals contain the true share."""
    draws = random.Random(1)
    for share, rows in ((0.5, 100), (0.9, 50), (0.03, 200)):
        inside = 0
        for _ in range(400):
            found = sum(draws.random() < share for _ in range(rows)) / rows
            noise = pace.compute_sampling_noise("eval/accuracy", found, rows)
            assert noise is not None
            inside += abs(found - share) <= noise + 2 / rows
        assert inside / 400 >= 0.92
    assert pace.compute_sampling_noise("eval/accuracy", 0.5, 10_000) == pytest.approx(
        1.96 * 0.005, rel=1e-3
    )
    assert pace.compute_sampling_noise("eval/accuracy", 1.0, 4) == pytest.approx(0.3, abs=0.02), (
        "no certainty of four rows"
    )
    for name, value in (("eval/loss", 0.5), ("train/accuracy", 0.5), ("eval/accuracy", 1.5)):
        assert pace.compute_sampling_noise(name, value, 100) is None


def test_a_change_of_evaluations_is_judged_by_their_rows() -> None:
    assert (
        pace.compute_change([0.5, 0.56], "eval/accuracy", 100).format_text()
        == "+0.06, within noise"
    )
    assert (
        pace.compute_change([0.5, 0.56], "eval/accuracy", 10_000).format_text() == "+0.06 ± 0.014"
    )
    assert pace.compute_change([0.5, 0.56], "eval/accuracy").noise is None
    assert pace.compute_change([0.5] * 9 + [0.51], "eval/accuracy", 100).is_within_noise


def test_few_values_make_no_claim() -> None:
    assert pace.compute_change([0.1, 0.9, 0.2, 0.8, 0.3, 0.7, 0.4]).noise is None
    assert pace.compute_end_noise([0.1] * 7) is None and pace.compute_end_noise([0.1] * 8) == 0.0
