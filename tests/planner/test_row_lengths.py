"""What estimates need to know of the lengths of a run's rows."""

from __future__ import annotations

import numpy as np
import pytest

from weft.planner.row_lengths import RowLengths, compute_imbalance


def test_ranks_share_consecutive_rows() -> None:
    """Of 60, 40, 50 and 50 tokens two ranks get 100 each, and 60 and 30 of 90 answer tokens."""
    batch = ((60, 50), (40, 10), (50, 20), (50, 10))
    assert compute_imbalance((batch,), 2) == (1.0, 60 * 2 / 90)
    uneven = ((90, 10), (10, 5), (10, 5))
    assert compute_imbalance((batch, uneven), 2) == (
        (1.0 + 90 * 2 / 110) / 2,
        (60 * 2 / 90 + 1.0) / 2,
    )
    # The third of three ranks has nothing to do.
    assert compute_imbalance((((10, 5), (10, 5)),), 3) == (1.5, 1.5)
    assert compute_imbalance((), 2) == (1.0, 1.0)


def test_batches_are_whole_ones_of_the_sample() -> None:
    rows = RowLengths(np.array([10, 20, 30]), np.array([1, 2, 3]))
    assert rows.list_batches(1, 1, 9) == (((11, 1),), ((22, 2),), ((33, 3),))
    assert rows.list_batches(2, 1, 9) == (((11, 1), (22, 2)),)
    assert rows.list_batches(4, 1, 9) == ()
    pairs = RowLengths(np.array([10, 20]), np.array([1, 2, 3, 4]))
    assert pairs.list_batches(2, 1, 9) == (((23, 3), (47, 7)),)
    prompts = RowLengths(np.array([10, 20]), np.zeros(0, np.int64))
    assert prompts.list_batches(2, 4, 5) == (((60, 20), (100, 20)),)


@pytest.mark.parametrize(
    ("least", "samples", "spared", "shared"),
    [
        (16, 2, 0, (0 + 29 + 99) / 3),
        (65, 2, 0, 99 / 3),
        (16, 2, 50, 99 / 3),
        (16, 8, 50, (29 + 99) / 3),
        (16, 1, 1, 0.0),
    ],
)
def test_prompts_are_shared_where_it_pays(
    least: int, samples: int, spared: int, shared: float
) -> None:
    rows = RowLengths(np.array([10, 30, 100]), np.zeros(0, np.int64))
    assert rows.compute_shared_tokens(least, samples, spared) == pytest.approx(shared)
