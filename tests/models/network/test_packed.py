"""Packs: nobody attends across a boundary, and no gradient depends on what stands beside a
sequence.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.bounds import assert_within, gamma
from tests.models.common import sequences, tiny
from tests.roundings import assert_computed
from weft.models.network.packed import pack
from weft.models.network.token_outputs import compute_token_outputs


def test_a_pack_of_next_tokens() -> None:
    packed = pack([torch.tensor([5, 6, 7]), torch.tensor([8]), torch.tensor([9, 3])])
    assert packed.tokens.tolist() == [5, 6, 7, 8, 9, 3] and packed.positions.tolist() == [
        0,
        1,
        2,
        0,
        0,
        1,
    ]
    assert packed.rows.tolist() == [0, 1, 4] and packed.labels.tolist() == [6, 7, 3]


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt2", "mixtral"])
def test_changing_one_sequence_changes_no_other(name: str) -> None:
    """Values of the others stay bit for bit, and no gradient reaches them."""
    network = tiny(name)
    rows = sequences([9, 30, 17, 30, 5, 28])
    changed = [*rows]
    changed[1] = (rows[1] + 1) % 131
    bounds = torch.tensor([0, *map(len, rows)]).cumsum(0).tolist()
    before, after = network.compute_hidden(pack(rows)), network.compute_hidden(pack(changed))
    for i, (start, stop) in enumerate(pairwise(bounds)):
        assert torch.equal(before[start:stop], after[start:stop]) == (i != 1), f"sequence {i}"
    network.zero_grad()
    network.compute_hidden(pack(rows))[bounds[3] : bounds[4]].square().sum().backward()
    others = set(torch.cat([r for i, r in enumerate(rows) if i != 3]).tolist()) - set(
        rows[3].tolist()
    )
    gradient = network.embed.weight.grad
    assert gradient is not None and others
    assert not gradient[sorted(others)].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_tied_matrix_gets_the_gradients_of_head_and_look_up(dtype: torch.dtype) -> None:
    network, x = tiny(dtype=dtype, tie_word_embeddings=True), pack(sequences([9, 30, 17]))
    weight = network.embed.weight
    (made,) = torch.autograd.grad(network(x, frozenset({"logprobs"}))["logprobs"].sum(), weight)
    looked: list[Tensor] = []
    network.embed.register_forward_hook(lambda _, given, made: looked.append(made))
    states = network.compute_hidden(x, x.rows)
    alone = states.detach().requires_grad_()
    outputs = compute_token_outputs(alone, x.labels, network.projection, frozenset({"logprobs"}))
    by_states, by_head = torch.autograd.grad(outputs["logprobs"].sum(), (alone, weight))
    by_look_up, by_token = torch.autograd.grad(states, (weight, looked[0]), by_states)
    assert by_look_up.abs().sum() > 0 and made.layout == torch.strided
    # Both passes compute the same numbers in the same way; then they add a row's up, those of its
    # tokens and the head's, in orders of their own. Of a token there are as many as it occurs.
    terms = by_head.double().abs().index_add(0, x.tokens, by_token.double().abs())
    most = int(x.tokens.bincount().max())
    assert_within(made, by_head.double() + by_look_up.double(), 2 * gamma(most + 1, dtype) * terms)


def test_nobody_looks_ahead() -> None:
    network = tiny()
    (row,) = sequences([24])
    changed = row.clone()
    changed[13:] = (changed[13:] + 1) % 131
    before, after = network.compute_hidden(pack([row])), network.compute_hidden(pack([changed]))
    assert torch.equal(before[:13], after[:13]) and not torch.equal(before[13], after[13])


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_neox", "opt", "mixtral", "phi3"])
def test_gradients_do_not_depend_on_packing(name: str) -> None:
    network = tiny(name, dtype=torch.float64)
    rows = sequences([9, 30, 1, 17, 30, 5])
    wanted = frozenset({"logprobs"})

    def together() -> tuple[Tensor, ...]:
        return torch.autograd.grad(
            network(pack(rows), wanted)["logprobs"].sum(), list(network.parameters())
        )

    apart = [torch.zeros_like(p) for p in network.parameters()]
    for row in [r for r in rows if len(r) > 1]:
        parts = torch.autograd.grad(
            network(pack([row]), wanted)["logprobs"].sum(), list(network.parameters())
        )
        apart = [a + b for a, b in zip(apart, parts, strict=True)]
    assert_computed(apart, together, torch.float64)


def test_recomputing_blocks_changes_no_gradient() -> None:
    network = tiny("gemma2")
    packed = pack(sequences([9, 30, 17]))
    gradients = []
    for every in (0, 1):
        network.recompute_every = every
        objective = network(packed, frozenset({"logprobs"}))["logprobs"].sum()
        gradients.append(torch.autograd.grad(objective, list(network.parameters())))
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)
