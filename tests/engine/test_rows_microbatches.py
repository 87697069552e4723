"""A batch cut by tokens, and put together again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.common import batch_of
from weft.engine import rows
from weft.errors import ConfigError


@settings(max_examples=25, deadline=None)
@given(
    shape=st.lists(
        st.tuples(st.integers(0, 5), st.lists(st.integers(1, 6), min_size=1, max_size=4)),
        min_size=1,
        max_size=5,
    ),
    budget=st.integers(11, 40),
)
def test_micro_batches_join_to_what_they_were_cut_from(shape: Any, budget: int) -> None:
    batch = batch_of(shape, marks=list(range(sum(len(c) for _, c in shape))))
    parts = rows.split_batch(batch, budget, "sequence")
    assert all(part.token_costs().sum() <= budget for part in parts)
    joined = rows.join_results(parts, batch.ids)
    for key in batch.keys:
        assert torch.equal(joined.data[key], batch.data[key]) and np.array_equal(
            joined.lengths[key], batch.lengths[key]
        )
    keys = [key for part in parts for key in rows.list_sequence_keys(part)]
    assert keys == [
        (id, k) for id, (_, c) in zip(batch.ids, shape, strict=True) for k in range(len(c))
    ]
    assert set(batch.ids) == {id for part in parts for id in rows.list_sample_ids(part)}


def test_groups_are_cut_only_where_the_loss_allows() -> None:
    batch = batch_of([(4, [3, 3, 3])])
    assert len(rows.split_batch(batch, 14, "sequence")) == 2
    assert len(rows.split_batch(batch, 21, "group")) == 1
    assert rows.split_batch(batch, 42, "sequence") == [batch]  # what fits stays as it is
    assert rows.split_batch(batch.select(ids=[]), 42, "sequence") == []
    with pytest.raises(ConfigError, match="max_tokens_per_microbatch=20"):
        rows.split_batch(batch, 20, "group")
