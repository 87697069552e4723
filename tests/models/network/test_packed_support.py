"""The kept ids of rows, and what lies outside them, without asking a device for sizes."""

from __future__ import annotations

import numpy as np
import torch

from weft.models.network.packed import SamplingSupport

IDS, COUNTS = torch.tensor([4, 1, 7, 2, 9]), torch.tensor([2, 0, 3])


def test_rows_are_chosen_with_their_ids() -> None:
    chosen = SamplingSupport(IDS, COUNTS, COUNTS.numpy()).select(np.array([1, 2]))
    assert (
        chosen.ids.tolist() == [7, 2, 9]
        and chosen.counts.tolist() == [0, 3]
        and chosen.ends.tolist() == [0, 3]
    )


def test_outside_are_ids_that_are_neither_kept_nor_labels() -> None:
    support, labels = SamplingSupport(IDS, COUNTS), torch.tensor([5, 3, 2])
    whole = support.find_outside(slice(0, 3), labels, slice(0, 10))
    assert [(~row).nonzero().flatten().tolist() for row in whole] == [
        [1, 4, 5],
        list(range(10)),
        [2, 7, 9],
    ]
    parts = [
        support.find_outside(slice(0, 3), labels, part) for part in (slice(0, 6), slice(6, 10))
    ]
    assert torch.equal(torch.cat(parts, dim=1), whole)
    assert torch.equal(support.find_outside(slice(2, 3), labels[2:], slice(0, 10)), whole[2:])
