"""What a loss sees of a micro-batch, by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.common import EXACT, batch_of
from weft.algorithms.base import count_trained_rows
from weft.data.sample import SequenceSample
from weft.engine.rows import PackLayout, SampleRows, build_support, pack, to_sample
from weft.errors import DataError

CPU = torch.device("cpu")
GROUPS = [(2, [3, 1]), (0, [2])]


def rows_of(batch: SequenceSample) -> SampleRows:
    return SampleRows(batch, PackLayout.from_sample(batch), CPU, torch.float32)


def test_the_pack_by_hand() -> None:
    lengths = {"prompt": [[2], [0]], "completion": [[3, 1], [2]]}
    data = {"prompt": torch.tensor([10, 11]), "completion": torch.tensor([20, 21, 22, 30, 40, 41])}
    batch = SequenceSample.from_groups(["a", "b"], lengths, data)
    packed = pack(batch, PackLayout.from_sample(batch), CPU)
    assert packed.tokens.tolist() == [10, 11, 20, 21, 22, 10, 11, 30, 40, 41]
    assert packed.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1]
    assert packed.attention.cu_seqlens.tolist() == [0, 5, 8, 10]
    assert (packed.attention.cu_seqlens.dtype, packed.attention.max_len) == (torch.int32, 5)
    assert packed.rows.tolist() == [1, 2, 3, 6, 8, 8]
    assert packed.labels.tolist() == [20, 21, 22, 30, 40, 41]
    values = pack(batch, PackLayout.from_sample(batch), CPU, extra=1)
    assert values.rows.tolist() == [1, 2, 3, 4, 6, 7, 8, 8, 9]


def test_a_batch_without_prompts_is_packed() -> None:
    batch = batch_of([(0, [3])]).select(keys=["completion"])
    packed = pack(batch, PackLayout.from_sample(batch), CPU)
    assert packed.rows.tolist() == [0, 0, 1]
    assert packed.labels[1:].tolist() == batch.data["completion"][1:].tolist()


def test_rows_groups_and_masks() -> None:
    batch = batch_of(GROUPS, loss_mask=[1.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    rows = rows_of(batch)
    assert (rows.num_rows, rows.num_sequences) == (6, 3)
    assert rows.sequence.tolist() == [0, 0, 0, 1, 2, 2]
    assert rows.group.tolist() == [0, 0, 1]
    # nothing predicts the first token of the second id
    assert rows.mask.tolist() == [1, 0, 1, 1, 0, 1]
    assert rows.lengths.tolist() == [2, 1, 1] == count_trained_rows(batch).tolist()
    assert rows_of(batch_of(GROUPS)).mask.tolist() == [1, 1, 1, 1, 0, 1]


def test_keys_by_their_layout() -> None:
    batch = batch_of(GROUPS, advantages=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], rewards=[7.0, 8.0, 9.0])
    lengths = {"values": [[4, 2], [3]], "beta": [[1], [1]]}
    data = {"values": torch.arange(9.0), "beta": torch.tensor([0.5, 0.25])}
    values = SequenceSample.from_groups(batch.ids, lengths, data)
    rows = rows_of(batch.update(values))
    assert rows["advantages"].tolist() == [1, 2, 3, 4, 5, 6]
    assert rows["rewards"].tolist() == [7, 8, 9]
    assert rows["values"].tolist() == [0, 1, 2, 4, 6, 7]  # the value after the last token is no row
    assert rows["beta"].tolist() == [0.5, 0.5, 0.25]
    assert "rewards" in rows and "nothing" not in rows
    with pytest.raises(KeyError, match="has no key 'nothing'"):
        rows["nothing"]
    with pytest.raises(DataError, match="'prompt'"):
        rows_of(batch_of([(4, [2])]))["prompt"]


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_sum_and_spread_are_each_others_transpose(lengths: list[int], seed: int) -> None:
    rows = rows_of(batch_of([(1, [n]) for n in lengths]))
    random = torch.Generator().manual_seed(seed)
    one = torch.randn(sum(lengths), generator=random, dtype=torch.float64, requires_grad=True)
    other = torch.randn(len(lengths), generator=random, dtype=torch.float64, requires_grad=True)
    summed, spread = rows.sum(one), rows.spread(other)
    wanted = torch.zeros(len(lengths), dtype=torch.float64).index_add(
        0, rows.sequence, one.detach()
    )
    torch.testing.assert_close(summed.detach(), wanted, **EXACT)
    assert torch.equal(spread, other[rows.sequence])
    torch.testing.assert_close((summed * other).sum(), (one * spread).sum(), **EXACT)
    (summed * other.detach()).sum().backward()
    assert torch.equal(one.grad, other.detach()[rows.sequence])
    (spread * one.detach()).sum().backward()
    torch.testing.assert_close(other.grad, wanted, **EXACT)


def test_pairs_stay_within_group_and_comparison() -> None:
    groups = [(1, [1, 1, 1]), (1, [1, 1, 1, 1])]
    rows = rows_of(batch_of(groups, rank=[0, 1, 1, 1, 0, 0, 1], comparison=[0, 0, 0, 0, 0, 1, 1]))
    assert [p.tolist() for p in rows.pairs()] == [[0, 0, 4, 5], [1, 2, 3, 6]]
    rows = rows_of(batch_of(groups, rank=[2, 1, 0, 0, 0, 0, 0]))
    assert [p.tolist() for p in rows.pairs()] == [[1, 2, 2], [0, 0, 1]]
    none = rows_of(batch_of([(1, [1])], rank=[0]))
    assert [p.tolist() for p in none.pairs()] == [[], []]


def test_outputs_come_back_by_id() -> None:
    batch = batch_of(GROUPS)
    out: Any = {
        "logprobs": torch.arange(6.0),
        "values": torch.arange(9.0),
        "scores": torch.arange(3.0),
    }
    sample = to_sample(batch, PackLayout.from_sample(batch), out)
    assert {key: [n.tolist() for n in sample.seqlens[key]] for key in sample.keys} == {
        "logprobs": [[3, 1], [2]],
        "values": [[4, 2], [3]],
        "scores": [[1, 1], [1]],
    }


def test_support_is_handed_on_as_it_lies() -> None:
    batch = batch_of([(1, [2])])
    assert build_support(batch, CPU) is None
    keys = {"support": [[3]], "support_counts": [[2]]}
    data = {"support": torch.tensor([1, 2, 3]), "support_counts": torch.tensor([0, 3])}
    support = build_support(batch.update(SequenceSample.from_groups(batch.ids, keys, data)), CPU)
    assert (
        support is not None
        and support.ids.tolist() == [1, 2, 3]
        and support.counts.tolist() == [0, 3]
    )
