"""One gradient for a matrix that is embedding and output layer."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import embedding
from torch.testing import assert_close

from tests.models.common import sequences, tiny
from weft.models.packed import pack
from weft.models.tied import Tied, look_up

TOKENS = torch.tensor([3, 0, 3, 7, 3])
WANT = frozenset({"logprobs"})


def matrix() -> torch.Tensor:
    return torch.randn(9, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()


@pytest.mark.parametrize("left", [True, False])
def test_the_look_up_adds_to_what_the_head_left(left: bool) -> None:
    weight, tied, by_out, by_head = matrix(), Tied(), torch.randn(5, 4), torch.randn(9, 4)
    out = look_up(TOKENS, weight, tied)
    assert torch.equal(out, embedding(TOKENS, weight))
    (expected,) = torch.autograd.grad(embedding(TOKENS, weight), weight, by_out)
    if left:
        tied.leave(by_head)
        expected = expected + by_head
    (made,) = torch.autograd.grad(out, weight, by_out)
    assert_close(made, expected)
    assert (made.data_ptr() == by_head.data_ptr()) == left, "added in place, not in a third tensor"


def test_what_was_left_counts_once() -> None:
    weight, tied, by_out = matrix(), Tied(), torch.randn(5, 4)
    out = look_up(TOKENS, weight, tied)
    tied.leave(torch.ones(9, 4))
    first, second = (torch.autograd.grad(out, weight, by_out, retain_graph=True)[0] for _ in range(2))
    assert_close(first, second + 1)


def test_a_second_backward_pass_makes_the_same_gradients() -> None:
    network, x = tiny(tie_word_embeddings=True), pack(sequences([9, 30, 17]))
    value = network(x, WANT)["logprobs"].sum()
    first, second = (torch.autograd.grad(value, network.embed.weight, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_micro_batches_add_up() -> None:
    network = tiny(tie_word_embeddings=True)
    parts = [pack([row]) for row in sequences([9, 30, 17])]
    alone = [torch.autograd.grad(network(x, WANT)["logprobs"].sum(), network.embed.weight)[0] for x in parts]
    for x in parts:
        network(x, WANT)["logprobs"].sum().backward()
    assert network.embed.weight.grad is not None
    assert_close(network.embed.weight.grad, alone[0] + alone[1] + alone[2])


def test_a_frozen_matrix_gets_none() -> None:
    network, x = tiny(tie_word_embeddings=True), pack(sequences([9, 30]))
    network.embed.weight.requires_grad_(False)
    network(x, WANT)["logprobs"].sum().backward()
    assert network.embed.weight.grad is None
    assert all(p.grad is not None for p in network.blocks.parameters())
