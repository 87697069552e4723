"""Layers that read the same input are one product, and remain the parameters that they were."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from weft.models.fused_linear import fused_linear, side_by_side

SIZES = (6, 4, 9)


def layers(*, bias: bool, dtype: torch.dtype = torch.float32) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(7, size, bias=bias, dtype=dtype) for size in SIZES]


@pytest.mark.parametrize("trained", ["all", "weights", "input", "one"])
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_are_those_of_each_layer(bias: bool, trained: str) -> None:
    ours, x = layers(bias=bias, dtype=torch.float64), torch.randn(11, 7, dtype=torch.float64)
    theirs = copy.deepcopy(ours)
    found = []
    for mine in (ours, theirs):
        for layer in mine:
            layer.weight.requires_grad_(trained in ("all", "weights"))
            if bias:
                layer.bias.requires_grad_(trained == "all")
        mine[1].weight.requires_grad_(trained != "input")
        leaf = x.clone().requires_grad_(trained in ("all", "input"))
        out = fused_linear(leaf, mine) if mine is ours else torch.cat([layer(leaf) for layer in mine], dim=-1)
        out.square().sum().backward()
        found.append([out, leaf.grad, *(p.grad for layer in mine for p in layer.parameters())])
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None), "a gradient is made where one is asked for"
        if other is not None:
            assert_close(one, other)


def test_the_view_is_the_layers_own_memory() -> None:
    made = layers(bias=True)
    weights = [layer.weight for layer in made]
    whole = side_by_side(weights)
    assert whole.shape == (sum(SIZES), 7)
    with torch.no_grad():
        weights[1].fill_(3.0)
    assert torch.equal(whole[6:10], torch.full((4, 7), 3.0))
    assert side_by_side(weights).data_ptr() == whole.data_ptr(), "found together, nothing moves"
    assert all(w.is_contiguous() and isinstance(w, nn.Parameter) for w in weights)


def test_layers_that_were_moved_apart_are_brought_together_again() -> None:
    made, x = layers(bias=True), torch.randn(5, 7)
    before = fused_linear(x, made)
    for layer in made:
        layer.weight.data, layer.bias.data = layer.weight.data.clone(), layer.bias.data.clone()
    with torch.no_grad():
        made[2].weight.mul_(2.0)
        after = fused_linear(x, made)
    assert_close(after[:, :10], before[:, :10].detach())
    assert_close(after[:, 10:], nn.functional.linear(x, made[2].weight, made[2].bias).detach())


def test_neighbours_in_another_storage_are_not_taken_for_parts_of_one() -> None:
    memory = torch.zeros(10, 7)
    first = nn.Parameter(memory[:6].clone())
    apart = nn.Parameter(memory[6:])
    whole = side_by_side([first, apart])
    assert whole.shape == (10, 7) and first.data_ptr() == whole.data_ptr()
    assert apart.data_ptr() == whole[6:].data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_as_in_a_product_of_its_own_layer(dtype: torch.dtype) -> None:
    made, x = layers(bias=False, dtype=dtype), torch.randn(16, 7, dtype=dtype)
    with torch.no_grad():
        together, alone = fused_linear(x, made), [fused_linear(x, [layer]) for layer in layers(bias=False, dtype=dtype)]
    assert torch.equal(together, torch.cat(alone, dim=-1))
