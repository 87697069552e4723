"""Layers that read the same input are one matrix, and compute what they would compute apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from weft import kernels
from weft.models.network.linear import Linear

SIZES = {"q": 6, "k": 4, "v": 9}


def linear(*, bias: bool, dtype: torch.dtype = torch.float32) -> Linear:
    torch.manual_seed(0)
    layer = Linear(7, SIZES, bias=bias).to(dtype)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


def apart(layer: Linear) -> dict[str, nn.Linear]:
    """Its parts as layers of their own."""
    made = {}
    for name, size in SIZES.items():
        made[name] = nn.Linear(7, size, bias=layer.bias is not None, dtype=layer.weight.dtype)
        with torch.no_grad():
            made[name].weight.copy_(layer.weight[layer.rows(name)])
            if layer.bias is not None:
                made[name].bias.copy_(layer.bias[layer.rows(name)])
    return made


def test_parts_are_rows_side_by_side() -> None:
    layer = linear(bias=True)
    assert [layer.rows(name) for name in SIZES] == [slice(0, 6), slice(6, 10), slice(10, 19)]
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]


@pytest.mark.parametrize("trained", ["all", "weights", "input"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # weft's kernels, torch's
def test_values_and_gradients_are_those_of_each_layer(dtype: torch.dtype, bias: bool, trained: str) -> None:
    layer, x = linear(bias=bias, dtype=dtype), torch.randn(11, 7, dtype=dtype)
    parts = apart(layer)
    for each in (layer, *parts.values()):
        each.weight.requires_grad_(trained != "input")
        if each.bias is not None:
            each.bias.requires_grad_(trained == "all")
    ours, theirs = (x.clone().requires_grad_(trained != "weights") for _ in range(2))
    out, expected = layer(ours), torch.cat([part(theirs) for part in parts.values()], dim=-1)
    assert_close(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()

    def joined(name: str) -> Tensor | None:
        found = [getattr(part, name).grad for part in parts.values()]
        return None if found[0] is None else torch.cat(found)

    pairs = [(ours.grad, theirs.grad), (layer.weight.grad, joined("weight"))]
    if layer.bias is not None:
        pairs.append((layer.bias.grad, joined("bias")))
    for one, other in pairs:
        assert (one is None) == (other is None), "a gradient is made where one is asked for"
        if other is not None:
            assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_row_has_the_same_bits_as_in_a_product_of_its_own_layer(dtype: torch.dtype) -> None:
    layer, x = linear(bias=False, dtype=dtype), torch.randn(16, 7, dtype=dtype)
    alone = [kernels.linear(x, part.weight) for part in apart(layer).values()]
    assert torch.equal(layer(x), torch.cat(alone, dim=-1))


@torch.no_grad()
def test_what_reduces_ranks_comes_before_the_bias() -> None:
    layer, x = linear(bias=True), torch.randn(5, 7)
    layer.reduce = lambda y: 2 * y
    assert layer.bias is not None
    assert_close(layer(x), 2 * (x @ layer.weight.T) + layer.bias)
