"""Pairs of short samples: each sample once, no more than two together."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from weft.data.mixture import pair_short


@given(st.lists(st.integers(1, 20), max_size=40), st.floats(0, 1), st.integers(0, 99))
def test_every_sample_comes_once(costs: list[int], probability: float, seed: int) -> None:
    """Open-Assistant's collator joined a leftover sample to a copy of the last one (defect 13)."""
    order, bounds = pair_short(
        np.asarray(costs, dtype=np.int64), 10, probability, np.random.default_rng(seed)
    )
    assert sorted(order.tolist()) == list(range(len(costs)))
    sizes = np.diff(bounds)
    assert bounds[-1] == len(costs) and all(size in (1, 2) for size in sizes)
    assert all(
        costs[order[at]] < 10
        for start, size in zip(bounds, sizes, strict=False)
        if size == 2
        for at in (start, start + 1)
    )


def test_how_many_are_paired() -> None:
    costs = np.asarray([5] * 4000 + [50] * 1000, dtype=np.int64)
    _, bounds = pair_short(costs, 10, 0.4, np.random.default_rng(0))
    assert abs(np.count_nonzero(np.diff(bounds) == 2) - 800) < 60
    _, alone = pair_short(costs, 10, 1.0, np.random.default_rng(0))
    assert len(alone) - 1 == 2000 + 1000
