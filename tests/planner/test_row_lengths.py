"""Lengths of a run's rows, from a sample of them."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch

from weft.data.batches import SourceSubset
from weft.data.loader import LoadedData
from weft.data.sample import SequenceSample
from weft.planner.row_lengths import SAMPLED_ROWS, RowLengths, compute_imbalance, sample_lengths


class Rows:
    """A dataset whose row i has a prompt of `prompts[i]` tokens and one answer of 10."""

    def __init__(self, prompts: list[list[int]], *, answers: bool = True) -> None:
        self.prompts, self.answers, self.read = prompts, answers, list[int]()

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> SequenceSample:
        self.read.append(index)
        prompt = torch.tensor(self.prompts[index])
        lengths = {"prompt": [[len(prompt)]]}
        data = {"prompt": prompt}
        if self.answers:
            lengths["completion"] = [[10]]
            data["completion"] = torch.ones(10, dtype=torch.int64)
        return SequenceSample.from_groups([str(index)], lengths, data)


def load(rows: Rows) -> LoadedData:
    part = SourceSubset("rows", cast(Any, rows), np.arange(len(rows)))
    return LoadedData(cast(Any, None), parts=(part,))


def test_lengths_of_all_rows_where_they_are_few() -> None:
    found = sample_lengths(load(Rows([[7] * 20, [8] * 30])), 2)
    assert found is not None
    assert found.prompts.tolist() == [20, 30] and found.answers.tolist() == [10, 10]
    assert found.mean_prompt == 25.0 and found.mean_answer == 10.0
    assert found.compute_attended_length(99.0) == (30**2 + 40**2) / 70
    assert found.saved_share == 0.0


def test_a_sample_is_spread_over_many_rows() -> None:
    rows = Rows([[7] * (1 + i % 50) for i in range(1000)])
    assert sample_lengths(load(rows), 8) is not None
    assert len(rows.read) == SAMPLED_ROWS
    assert rows.read[0] == 0 and rows.read[-1] > 980
    assert rows.read == sorted(set(rows.read))


def test_prompts_without_answers() -> None:
    found = sample_lengths(load(Rows([[7] * 20, [8] * 40], answers=False)), 2)
    assert found is not None and found.mean_answer == 0.0
    assert found.compute_attended_length(20) == (40**2 + 60**2) / 100


def test_equal_beginnings_are_saved() -> None:
    """A template of 20 tokens in each of four prompts of 25: three rows need not compute it."""
    template = list(range(100, 120))
    rows = [[*template, *([5 + i] * 5)] for i in range(4)]
    found = sample_lengths(load(Rows(rows)), 4)
    assert found is not None and found.saved_share == 3 * 20 / (4 * 35)
    alone = sample_lengths(load(Rows(rows)), 1)
    assert alone is not None and alone.saved_share == 0.0


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


def test_no_rows_can_be_sampled_from_a_stream() -> None:
    assert sample_lengths(LoadedData(cast(Any, None)), 4) is None


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
