"""Lengths of a run's rows, from a sample of them."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch

from weft.data.batches import SourceSubset
from weft.data.loader import LoadedData
from weft.data.sample import SequenceSample
from weft.launch.plan import SAMPLED_ROWS, sample_lengths


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


def test_no_rows_can_be_sampled_from_a_stream() -> None:
    assert sample_lengths(LoadedData(cast(Any, None)), 4) is None
