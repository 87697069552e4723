"""pass@k, avg@n, maj@n and intervals, against direct computation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from weft.evaluation import sampling


@pytest.mark.parametrize(("count", "correct"), [(5, 0), (5, 2), (6, 3), (4, 4)])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(count: int, correct: int) -> None:
    samples = [True] * correct + [False] * (count - correct)
    for k in range(1, count + 1):
        subsets = list(itertools.combinations(samples, k))
        expected = sum(map(any, subsets)) / len(subsets)
        assert sampling.estimate_pass(count, correct, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_needs_k_samples() -> None:
    with pytest.raises(ValueError, match="at least 4 samples, not 3"):
        sampling.estimate_pass(3, 1, 4)


def test_reported_values_of_k() -> None:
    assert sampling.choose_counts(1) == [1]
    assert sampling.choose_counts(20) == [1, 2, 4, 8, 10, 16, 20]


def test_the_majority_is_the_most_frequent_answer() -> None:
    assert sampling.compute_majority([True, False, False], ["7", "8", "8"]) == 0.0
    assert sampling.compute_majority([True, True, False], ["7", "7", "8"]) == 1.0
    # A sample without an answer has no vote; tied answers share the result.
    assert sampling.compute_majority([True, False, False], ["7", None, None]) == 1.0
    assert sampling.compute_majority([True, False], ["7", "8"]) == 0.5
    assert sampling.compute_majority([False, False], [None, None]) == 0.0


def test_summary_of_an_item() -> None:
    metrics = sampling.summarize_samples([True, False, True, False], ["1", "2", "1", "3"])
    assert metrics == {
        "pass@1": 0.5,
        "pass@2": pytest.approx(5 / 6),
        "pass@4": 1.0,
        "avg@4": 0.5,
        "maj@4": 1.0,
    }
    assert list(metrics) == sampling.list_metrics(4, has_votes=True)


def test_wilsons_interval_of_zeros_and_ones() -> None:
    # scipy.stats.binomtest(8, 10).proportion_ci(method="wilson")
    low, high = sampling.compute_mean_interval([1.0] * 8 + [0.0] * 2) or (0.0, 0.0)
    assert (low, high) == pytest.approx((0.4901625, 0.9433178), abs=1e-6)
    low, high = sampling.compute_mean_interval([1.0] * 20) or (0.0, 0.0)
    assert low == pytest.approx(0.8388748, abs=1e-6) and high == pytest.approx(1.0)


def test_the_bootstrap_interval_covers_the_mean() -> None:
    """About 95 % of 200 intervals contain the mean of the distribution; at least 90 % do."""
    draws = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        interval = sampling.compute_mean_interval(draws.beta(2, 3, size=40).tolist())
        assert interval is not None
        hits += interval[0] <= 0.4 <= interval[1]
    assert 180 <= hits <= 199


def test_one_item_has_no_interval() -> None:
    assert sampling.compute_mean_interval([1.0]) is None


def test_intervals_are_added_to_means_only() -> None:
    samples = [
        {"filter": "none", "metrics": ["acc", "ppl"], "acc": value, "ppl": (-1.0, 3)}
        for value in (1.0, 0.0, 1.0)
    ]
    row = {"acc,none": 2 / 3, "acc_stderr,none": 0.33, "ppl,none": 1.4, "sample_len": 3}
    results = {"results": {"quiz": row}, "samples": {"quiz": samples}}
    sampling.add_intervals(results)
    low, high = row["acc_ci95,none"]
    assert 0 < low < 2 / 3 < high < 1
    assert "ppl_ci95,none" not in row
