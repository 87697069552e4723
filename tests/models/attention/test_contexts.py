"""Sequences of a pack as rectangles."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.models.attention.contexts import Dense


def dense(lengths: list[int]) -> Dense:
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return Dense(starts, max(lengths))


@given(st.lists(st.integers(0, 90), min_size=1, max_size=30).filter(any))
@settings(deadline=None)
def test_buckets_hold_every_token_once_and_go_back_in_order(lengths: list[int]) -> None:
    context = dense(lengths)
    x = torch.arange(sum(lengths))
    cells = []
    for bucket in context.buckets:
        flat = bucket.index.flatten()
        if bucket.span is not None:
            assert torch.equal(flat, torch.arange(*bucket.span))
        kept = flat if bucket.valid is None else flat[bucket.valid]
        cells.append(x[kept])
        rows = bucket.index.shape[1]
        assert len(kept) >= 0.5 * bucket.index.numel() or rows <= 16, "more padding than tokens"
    joined = torch.cat(cells)
    restored = joined if context.cell_positions is None else joined[context.cell_positions]
    assert torch.equal(restored, x)
    assert context.starts == [0, *torch.tensor(lengths).cumsum(0).tolist()]


def test_sequences_of_one_length_are_read_without_a_copy() -> None:
    context = dense([20] * 5)
    assert [b.span for b in context.buckets] == [(0, 100)] and context.cell_positions is None
    assert [b.span for b in dense([33]).buckets] == [(0, 33)]
