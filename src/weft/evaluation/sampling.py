"""Metrics of repeated sampling (pass@k, avg@n, maj@n) and confidence intervals over items.

pass@k is the probability that at least one of k samples is correct. It is estimated without bias
from n samples of which c are correct: 1 - C(n-c, k) / C(n, k) (Chen et al. 2021, "Evaluating Large
Language Models Trained on Code").
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from weft.observe.eval_statistics import ScoredItems, compute_interval

COMMON_COUNTS = (10, 100)  # values of k in the literature that are no powers of two


def estimate_pass(count: int, correct: int, k: int) -> float:
    """Return the unbiased estimate of pass@k from `count` samples, `correct` of them correct.

    Raises `ValueError` if there are fewer than k samples.
    """
    if not 1 <= k <= count:
        raise ValueError(f"pass@{k} needs at least {k} samples, not {count}")
    return 1.0 - math.comb(count - correct, k) / math.comb(count, k)


def choose_counts(count: int) -> list[int]:
    """Return the values of k to report for `count` samples: powers of two, 10, 100 and `count`."""
    powers = [2**power for power in range(count.bit_length())]
    return sorted({k for k in (*powers, *COMMON_COUNTS, count) if k <= count})


def compute_majority(correct: Sequence[bool], votes: Sequence[Hashable | None]) -> float:
    """Return 1 if the most frequent answer is correct, else 0.

    `votes` has each sample's answer, or None for a sample without an answer, which has no vote.
    Equal answers must be equally correct. If several answers are most frequent, the result is the
    share of correct ones among them. The result is 0 if there is no answer.
    """
    counts = Counter(vote for vote in votes if vote is not None)
    if not counts:
        return 0.0
    highest = max(counts.values())
    verdicts = dict(zip(votes, correct, strict=True))
    winners = [float(verdicts[vote]) for vote, count in counts.items() if count == highest]
    return sum(winners) / len(winners)


def list_metrics(count: int, *, has_votes: bool) -> list[str]:
    """Return the names of the metrics that `summarize_samples` computes for `count` samples."""
    names = [f"pass@{k}" for k in choose_counts(count)] + [f"avg@{count}"]
    return [*names, f"maj@{count}"] if has_votes else names


def summarize_samples(
    correct: Sequence[bool], votes: Sequence[Hashable | None] | None
) -> dict[str, float]:
    """Return pass@k, avg@n and, with `votes`, maj@n of one item's n samples."""
    count = len(correct)
    num_correct = sum(map(bool, correct))
    metrics = {f"pass@{k}": estimate_pass(count, num_correct, k) for k in choose_counts(count)}
    metrics[f"avg@{count}"] = num_correct / count
    if votes is not None:
        metrics[f"maj@{count}"] = compute_majority(correct, votes)
    return metrics


def compute_mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95% confidence interval of the mean over items, as `weft eval table` computes it.

    Returns None if it cannot be estimated, for example from a single item.
    """
    count = len(values)
    array = np.asarray(values, dtype=np.float64)[:, None]
    return compute_interval(
        ScoredItems(array, np.ones(count), np.zeros(count, np.int64), np.ones(1))
    )


def add_intervals(results: Any) -> None:
    """Add an entry `METRIC_ci95,FILTER: [low, high]` for each metric that is a mean over items.

    `results` is the return value of lm_eval's `simple_evaluate`, with samples. Metrics that are not
    the mean of the items' values, such as perplexity, get no interval.
    """
    for task, samples in (results.get("samples") or {}).items():
        row = results["results"][task]
        for key, value in list(row.items()):
            metric, comma, filter_name = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            values = _list_values(samples, metric, filter_name)
            if not values or not _is_near(value, sum(values) / len(values)):
                continue
            interval = compute_mean_interval(values)
            if interval is not None:
                row[f"{metric}_ci95,{filter_name}"] = list(interval)


def _list_values(
    samples: Sequence[Mapping[str, Any]], metric: str, filter_name: str
) -> list[float]:
    """Return the items' values of a metric, or an empty list if they are not numbers."""
    values = []
    for sample in samples:
        if sample.get("filter") != filter_name or metric not in sample.get("metrics", ()):
            continue
        value = sample[metric]
        if not isinstance(value, bool | int | float | np.floating | np.integer):
            return []
        values.append(float(value))
    return values


def _is_near(value: Any, mean: float) -> bool:
    return isinstance(value, int | float) and math.isclose(value, mean, abs_tol=1e-9)
