"""Every metric is on one chart, and a metric that repeats another is on none."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

import pytest

from weft.observe import metrics
from weft.observe.metrics import (
    MetricGroup,
    SeriesIndex,
    compute_rank,
    drop_repeats,
    find_node,
    group_metrics,
    is_changing,
    is_same_series,
)


def groups(columns: Mapping[str, Sequence[float]]) -> dict[str, list[str]]:
    def series(name: str) -> tuple[Sequence[float], Sequence[float]]:
        return list(range(len(columns[name]))), columns[name]

    found = drop_repeats(group_metrics(list(columns)), series, compute_rank)
    return {f"{group.measure} of {', '.join(group.nodes)}": group.names for group in found}


def test_nodes_share_the_chart_of_a_measure_unless_it_is_a_loss() -> None:
    found = groups(
        {
            "actor_train/grad_norm": [1, 2],
            "critic_train/grad_norm": [2, 3],
            "actor_train/loss": [0, 1],
            "critic_train/loss": [5, 6],
            "time/gen": [1, 1],
            "time/train": [2, 2],
            "peak_memory_gb": [1, 1],
        }
    )
    assert found == {
        "loss of actor_train": ["actor_train/loss"],
        "loss of critic_train": ["critic_train/loss"],
        "grad_norm of actor_train, critic_train": [
            "actor_train/grad_norm",
            "critic_train/grad_norm",
        ],
        "seconds by call of run": ["time/gen", "time/train"],
        "peak_memory_gb of run": ["peak_memory_gb"],
    }


def test_repeats_are_left_out() -> None:
    found = groups(
        {
            "rew_inf/reward": [1, 2],
            "advantages/reward": [1, 2],
            "actor_train/loss": [0.5, 0.25],
            "actor_train/policy_loss": [0.5, 0.25 + 1e-9],
            "reward/reward/mine": [3, 4],
        }
    )
    assert found == {
        "reward of rew_inf": ["rew_inf/reward"],
        "loss of actor_train": ["actor_train/loss"],
        "reward/mine of reward": ["reward/reward/mine"],
    }


def test_constants_are_no_repeats_of_each_other() -> None:
    found = groups({"t/clip_ratio": [0, 0], "t/skipped": [0, 0]})
    assert len(found) == 2


def test_evaluations_pairs_and_maxima_join_the_chart_of_their_metric() -> None:
    found = groups(
        {
            "train/loss": [2, 1],
            "eval/a/loss": [3, 2],
            "eval/loss": [4, 3],
            "t/rewards/chosen": [1, 2],
            "t/rewards/rejected": [0, 1],
            "eval/rewards/chosen": [2, 5],
            "g/length": [1, 2],
            "g/length_max": [2, 3],
        }
    )
    assert found["loss of train, eval"] == ["train/loss", "eval/loss", "eval/a/loss"]
    assert found["rewards/chosen|rejected of t, eval"] == [
        "t/rewards/chosen",
        "t/rewards/rejected",
        "eval/rewards/chosen",
    ]
    assert found["length of g"] == ["g/length", "g/length_max"]


def walk(number: int, length: int = 30) -> list[float]:
    """Return a series that is different for each number, but with the same first and last value."""
    return [0.0, *(math.sin(number + 1 + step * (number + 2)) for step in range(length - 2)), 0.0]


def test_the_index_finds_the_same_repeats_as_a_comparison_of_all_pairs() -> None:
    steps = [float(step) for step in range(30)]
    series = {f"node{number % 3}/m{number}": walk(number) for number in range(120)}
    for number in range(0, 120, 5):  # the same within 1e-6, of the same node, and of another
        jittered = [
            value * (1 + 0.9e-6 * (-1) ** place) for place, value in enumerate(walk(number))
        ]
        series[f"node{number % 3}/same{number}"] = jittered
        series[f"other/own{number}"] = jittered
        series[f"node{number % 3}/near{number}"] = [value * (1 + 3e-6) for value in walk(number)]
        series[f"node{number % 3}/shorter{number}"] = walk(number)[:-1]
    series |= {f"node0/constant{number}": [1.0] * 30 for number in range(4)}
    curves = {name: (steps[: len(values)], values) for name, values in series.items()}

    kept: list[str] = []  # the rule as it is written down
    for name in sorted(series, key=_rank):
        alike = (
            other
            for other in kept
            if find_node(other) == find_node(name) and is_same_series(curves[name], curves[other])
        )
        if not (is_changing(series[name]) and any(alike)):
            kept.append(name)
    groups = [MetricGroup(name, [find_node(name)], [name]) for name in series]
    found = [
        name for group in drop_repeats(groups, curves.__getitem__, _rank) for name in group.names
    ]
    assert found == kept and len(series) - len(kept) == 24


def _rank(name: str) -> tuple[int, int]:
    return (1, 0) if "/m" in name else (2, 0)


def test_numbers_that_count_as_the_same_are_found_at_the_edges_of_bins() -> None:
    x = [0.0, 1.0, 2.0]
    generator = random.Random(5)
    for _ in range(300):
        value = generator.choice([1, -1]) * 10.0 ** generator.uniform(-99, 99)
        other = value * (1 + generator.uniform(-1, 1) * 1e-6)
        curves = SeriesIndex[str]()
        curves.add("a", (x, [value, value, 0.0]), 7)
        wanted = [7] if is_same_series((x, [value, value, 0.0]), (x, [other, value, 0.0])) else []
        assert curves.find_equal("a", (x, [other, value, 0.0])) == wanted
        assert (
            curves.find_equal("b", (x, [value, value, 0.0])) == []
            and curves.find_equal("a", (x, [value, -value, 0.0])) == []
        )


def test_a_thousand_curves_are_not_compared_each_with_each(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0

    def counted(*both: metrics.Values) -> bool:
        nonlocal compared
        compared += 1
        return is_same_series(*both)

    monkeypatch.setattr(metrics, "is_same_series", counted)
    names = [f"node{number % 5}/m{number}" for number in range(1000)]
    names += [f"eval/x{number}/y{number}" for number in range(300)]
    curves = {
        name: ([float(step) for step in range(30)], walk(number))
        for number, name in enumerate(names)
    }
    assert len(drop_repeats(group_metrics(names), curves.__getitem__, compute_rank)) == 1300
    assert compared < 100, "curves with other values in the middle are not even looked at"
