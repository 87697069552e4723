"""Packs: sequences as rectangles, and nobody attends across a boundary."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from weft.models.config import Rope
from weft.models.heads import token_outputs
from weft.models.packed import Dense, pack
from weft.models.rope import rotation
from weft.registry import families

from .common import sequences, tiny


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
    restored = joined if context.restore is None else joined[context.restore]
    assert torch.equal(restored, x)
    assert context.starts == [0, *torch.tensor(lengths).cumsum(0).tolist()]


def test_sequences_of_one_length_are_read_without_a_copy() -> None:
    context = dense([20] * 5)
    assert [b.span for b in context.buckets] == [(0, 100)] and context.restore is None
    assert [b.span for b in dense([33]).buckets] == [(0, 33)]


def test_a_pack_of_next_tokens() -> None:
    packed = pack([torch.tensor([5, 6, 7]), torch.tensor([8]), torch.tensor([9, 3])])
    assert packed.tokens.tolist() == [5, 6, 7, 8, 9, 3] and packed.positions.tolist() == [0, 1, 2, 0, 0, 1]
    assert packed.rows.tolist() == [0, 1, 4] and packed.labels.tolist() == [6, 7, 3]


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt2", "mixtral"])
def test_changing_one_sequence_changes_no_other(name: str) -> None:
    """Values of the others stay bit for bit, and no gradient reaches them."""
    network = tiny(name)
    rows = sequences([9, 30, 17, 30, 5, 28])
    changed = [*rows]
    changed[1] = (rows[1] + 1) % 131
    bounds = torch.tensor([0, *map(len, rows)]).cumsum(0).tolist()
    before, after = network.hidden(pack(rows)), network.hidden(pack(changed))
    for i, (start, stop) in enumerate(pairwise(bounds)):
        assert torch.equal(before[start:stop], after[start:stop]) == (i != 1), f"sequence {i}"
    network.zero_grad()
    network.hidden(pack(rows))[bounds[3] : bounds[4]].square().sum().backward()
    others = set(torch.cat([r for i, r in enumerate(rows) if i != 3]).tolist()) - set(rows[3].tolist())
    gradient = network.embed.weight.grad
    assert gradient is not None and others
    assert not gradient[sorted(others)].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_tied_matrix_gets_the_gradients_of_head_and_look_up(dtype: torch.dtype) -> None:
    network, x = tiny(dtype=dtype, tie_word_embeddings=True), pack(sequences([9, 30, 17]))
    weight = network.embed.weight
    (made,) = torch.autograd.grad(network(x, frozenset({"logprobs"}))["logprobs"].sum(), weight)
    states = network.hidden(x, x.rows)
    alone = states.detach().requires_grad_()
    outputs = token_outputs(alone, x.labels, network.projection, frozenset({"logprobs"}))
    by_states, by_head = torch.autograd.grad(outputs["logprobs"].sum(), (alone, weight))
    (by_look_up,) = torch.autograd.grad(states, weight, by_states)
    assert by_look_up.abs().sum() > 0 and made.layout == torch.strided
    assert_close(made, by_head + by_look_up, atol=1e-5, rtol=1.3e-6 if dtype != torch.bfloat16 else 1.6e-2)


def test_nobody_looks_ahead() -> None:
    network = tiny()
    (row,) = sequences([24])
    changed = row.clone()
    changed[13:] = (changed[13:] + 1) % 131
    before, after = network.hidden(pack([row])), network.hidden(pack([changed]))
    assert torch.equal(before[:13], after[:13]) and not torch.equal(before[13], after[13])


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_neox", "opt", "mixtral", "phi3"])
def test_gradients_do_not_depend_on_packing(name: str) -> None:
    network = tiny(name, dtype=torch.float64)
    rows = sequences([9, 30, 1, 17, 30, 5])
    wanted = frozenset({"logprobs"})
    together = torch.autograd.grad(network(pack(rows), wanted)["logprobs"].sum(), list(network.parameters()))
    apart = [torch.zeros_like(p) for p in network.parameters()]
    for row in [r for r in rows if len(r) > 1]:
        parts = torch.autograd.grad(network(pack([row]), wanted)["logprobs"].sum(), list(network.parameters()))
        apart = [a + b for a, b in zip(apart, parts, strict=True)]
    for one, other in zip(together, apart, strict=True):
        assert_close(one, other)


def test_recomputing_blocks_changes_no_gradient() -> None:
    network = tiny("gemma2")
    packed = pack(sequences([9, 30, 17]))
    gradients = []
    for recompute in (False, True):
        network.checkpointing = recompute
        objective = network(packed, frozenset({"logprobs"}))["logprobs"].sum()
        gradients.append(torch.autograd.grad(objective, list(network.parameters())))
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


def test_scalings_that_depend_on_length_choose_for_each_sequence() -> None:
    rope = Rope(
        100.0,
        4,
        "longrope",
        {"short_factor": [1.0, 1.0], "long_factor": [2.0, 4.0], "original": 5, "attention_factor": 1.0},
    )
    context = dense([5, 6])
    positions = torch.cat([torch.arange(5), torch.arange(6)])
    cos, _ = rotation(rope, positions, context.token_lengths, torch.float32)
    short, _ = rotation(rope, torch.arange(5), torch.full((5,), 5), torch.float32)
    long, _ = rotation(rope, torch.arange(6), torch.full((6,), 6), torch.float32)
    assert torch.equal(cos, torch.cat([short, long])) and not torch.equal(short, long[:5])


def test_every_family_has_a_tiny_network() -> None:
    for name in families.load_all():
        assert sum(p.numel() for p in tiny(name).parameters()) < 200_000
