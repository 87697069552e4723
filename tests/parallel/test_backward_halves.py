"""The two halves of a backward pass give what the whole one does."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from weft.parallel.backward_halves import compute_input_half, compute_weight_half


def test_a_weight_that_is_used_twice_in_a_row() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    layer = nn.Linear(4, 4, dtype=torch.float64)

    def value() -> Tensor:
        y = layer(layer(x).tanh())
        return (y + y.square()).sum()

    expected = torch.autograd.grad(value(), (x, layer.weight, layer.bias))
    groups = compute_input_half([value()], [None], x)
    assert layer.weight.grad is None
    compute_weight_half(layer, groups, sums=False)
    assert_close((x.grad, layer.weight.grad, layer.bias.grad), expected, rtol=1e-12, atol=1e-12)


def test_a_pass_that_trains_nothing_has_no_halves() -> None:
    x = torch.ones(2, requires_grad=True)
    assert compute_input_half([], [], x) == [] and x.grad is None
