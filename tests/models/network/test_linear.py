"""Layers that read the same input are one matrix, and compute what they would compute apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from tests.bounds import assert_within, gamma, product_bound
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
            made[name].weight.copy_(layer.weight[layer.find_rows(name)])
            if layer.bias is not None:
                made[name].bias.copy_(layer.bias[layer.find_rows(name)])
    return made


def test_parts_are_rows_side_by_side() -> None:
    layer = linear(bias=True)
    assert [layer.find_rows(name) for name in SIZES] == [slice(0, 6), slice(6, 10), slice(10, 19)]
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]


@pytest.mark.parametrize("trained", ["all", "weights", "input"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # weft's kernels, torch's
def test_values_and_gradients_are_those_of_each_layer(
    dtype: torch.dtype, bias: bool, trained: str
) -> None:
    """Parts are computed in float64.

    A sum of K products and a bias meets K + 1 roundings; the gradient 2 out is as wrong as the
    output, twice, which its products with weights, inputs and ones carry on and round again.
    """
    layer, x = linear(bias=bias, dtype=dtype), torch.randn(11, 7, dtype=dtype)
    parts = {name: part.double() for name, part in apart(layer).items()}
    for each in (layer, *parts.values()):
        each.weight.requires_grad_(trained != "input")
        if each.bias is not None:
            each.bias.requires_grad_(trained == "all")
    ours, theirs = (
        x.to(to, copy=True).requires_grad_(trained != "weights") for to in (dtype, torch.float64)
    )
    out, expected = layer(ours), torch.cat([part(theirs) for part in parts.values()], dim=-1)
    weight = layer.weight.detach().double()
    lost = product_bound(x, weight.T, dtype, 1)
    if layer.bias is not None:
        lost += gamma(8, dtype) * layer.bias.detach().double().abs()
    assert_within(out, expected, lost)
    out.square().sum().backward()
    expected.square().sum().backward()

    def joined(name: str) -> Tensor | None:
        found = [getattr(part, name).grad for part in parts.values()]
        return None if found[0] is None else torch.cat(found)

    by_out, ones = 2 * expected.detach(), torch.ones(11).double()
    pairs = [
        (ours.grad, theirs.grad, by_out, weight),
        (layer.weight.grad, joined("weight"), by_out.T, x.double()),
    ]
    if layer.bias is not None:
        pairs.append((layer.bias.grad, joined("bias"), by_out.T, ones))
    for one, other, left, right in pairs:
        assert (one is None) == (other is None), "a gradient is made where one is asked for"
        if one is not None and other is not None:
            carried = 2 * (lost if left is by_out else lost.T) @ right.abs()
            assert_within(one, other, carried + product_bound(left, right, dtype, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_row_has_the_same_bits_as_in_a_product_of_its_own_layer(dtype: torch.dtype) -> None:
    layer, x = linear(bias=False, dtype=dtype), torch.randn(16, 7, dtype=dtype)
    alone = [kernels.linear(x, part.weight) for part in apart(layer).values()]
    assert torch.equal(layer(x), torch.cat(alone, dim=-1))


@torch.no_grad()
def test_the_bias_can_be_added_after_the_product() -> None:
    layer, x = linear(bias=True, dtype=torch.float64), torch.randn(5, 7, dtype=torch.float64)
    assert layer.bias is not None
    expected = 2 * (x @ layer.weight.T) + layer.bias
    assert_close(2 * layer(x, biased=False) + layer.bias, expected, rtol=1e-12, atol=1e-12)
