"""A matrix that is embedding and output layer gets both gradients, once each."""

from __future__ import annotations

import torch
from torch.testing import assert_close

from tests.models.common import sequences, tiny
from weft.models.network.packed import pack

WANT = frozenset({"logprobs"})


def test_a_second_backward_pass_makes_the_same_gradients() -> None:
    network, x = tiny(tie_word_embeddings=True), pack(sequences([9, 30, 17]))
    value = network(x, WANT)["logprobs"].sum()
    first, second = (
        torch.autograd.grad(value, network.embed.weight, retain_graph=True)[0] for _ in range(2)
    )
    assert torch.equal(first, second)


def test_micro_batches_add_up() -> None:
    network = tiny(tie_word_embeddings=True, dtype=torch.float64)
    parts = [pack([row]) for row in sequences([9, 30, 17])]
    alone = [
        torch.autograd.grad(network(x, WANT)["logprobs"].sum(), network.embed.weight)[0]
        for x in parts
    ]
    for x in parts:
        network(x, WANT)["logprobs"].sum().backward()
    assert network.embed.weight.grad is not None
    assert_close(network.embed.weight.grad, alone[0] + alone[1] + alone[2], rtol=1e-12, atol=1e-12)


def test_a_frozen_matrix_gets_none() -> None:
    network, x = tiny(tie_word_embeddings=True), pack(sequences([9, 30]))
    network.embed.weight.requires_grad_(False)
    network(x, WANT)["logprobs"].sum().backward()
    assert network.embed.weight.grad is None
    assert all(p.grad is not None for p in network.blocks.parameters())
