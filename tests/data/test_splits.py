"""Division of items into contiguous parts by cost."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data import splits
from weft.errors import ConfigError


def best_largest(costs: list[int], parts: int) -> int:
    """Return the minimum, over all contiguous splits, of the largest part's cost."""
    count = len(costs)
    table = {(0, 0): 0}
    for p in range(1, parts + 1):
        for stop in range(p, count + 1):
            options = [
                max(table[p - 1, s], sum(costs[s:stop]))
                for s in range(p - 1, stop)
                if (p - 1, s) in table
            ]
            table[p, stop] = min(options)
    return table[parts, count]


@settings(deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=9), st.data())
def test_the_split_is_the_best_there_is(costs: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(costs)))
    bounds = splits.split_evenly(costs, parts)
    sums = [sum(costs[a:b]) for a, b in pairwise(bounds)]
    assert all(b > a for a, b in pairwise(bounds)) and bounds[0] == 0 and bounds[-1] == len(costs)
    assert max(sums) == best_largest(costs, parts)


def test_too_many_parts_is_an_error() -> None:
    with pytest.raises(ConfigError, match="2 ids do not split into 3"):
        splits.split_evenly([1, 1], 3)
    with pytest.raises(
        ConfigError, match=r"train_tokens_per_batch=5.*longest sequence.*9 tokens.*9 or more"
    ):
        splits.split_by_budget([9], 5, "dataset.train_tokens_per_batch")
