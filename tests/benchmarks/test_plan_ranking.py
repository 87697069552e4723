"""The rank correlation of forecasts and measured times, by hand."""

from __future__ import annotations

import pytest

from benchmarks.plan_ranking import compute_noise, compute_tau


def test_tau_counts_the_pairs_in_the_same_order() -> None:
    forecasts, measured = [1.0, 2.0, 4.0, 3.0], [1.0, 2.0, 3.0, 4.0]
    assert compute_tau(forecasts, measured, [0.0] * 4) == (pytest.approx((5 - 1) / 6), 6, 0)


def test_pairs_within_the_noise_do_not_count() -> None:
    forecasts, measured = [2.0, 1.0, 5.0], [1.0, 1.05, 2.0]
    assert compute_tau(forecasts, measured, [0.0, 0.0, 0.0]) == (pytest.approx(1 / 3), 3, 0)
    assert compute_tau(forecasts, measured, [0.1, 0.0, 0.0]) == (1.0, 2, 1)


def test_equal_forecasts_of_different_times_count_against_it() -> None:
    assert compute_tau([1.0, 1.0], [1.0, 2.0], [0.0, 0.0]) == (0.0, 1, 0)


def test_noise_is_how_far_rounds_differ() -> None:
    rounds = [{"steps": [{"step_seconds": 1.0}] * 3}, {"steps": [{"step_seconds": 1.2}] * 3}]
    assert compute_noise(rounds) == pytest.approx(0.2 / 1.1)
