"""Matrices held in few bits: what they round to, what they take, and what is computed with them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.bounds import assert_within, gamma, product_bound
from weft.models.network.linear import Linear
from weft.models.network.quantized import (
    BLOCK,
    Kind,
    Quantized,
    allocate_memory,
    count_bytes,
    dequantize,
    linear,
    quantize_matrices,
)

KINDS: list[Kind] = ["8bit", "4bit"]


def matrix(rows: int = 6, columns: int = 128) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def held(kind: Kind, values: Tensor, dtype: torch.dtype = torch.float32) -> Quantized:
    made = Quantized.build_empty(*values.shape, kind, dtype, "cpu")
    made.copy_(values)
    return made


def test_8_bits_round_to_a_127th_of_the_row_s_largest() -> None:
    values = matrix()
    step = values.abs().amax(1, keepdim=True) / 127
    assert torch.equal(held("8bit", values).dequantize(), (values / step).round() * step)


def test_4_bits_are_those_of_the_library() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    values = matrix()
    codes, state = functional.quantize_4bit(values, blocksize=BLOCK, quant_type="nf4")
    assert torch.equal(held("4bit", values).dequantize(), functional.dequantize_4bit(codes, state))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_taken_and_filled_by_themselves(kind: Kind) -> None:
    values = matrix()
    made = nn.Parameter(
        Quantized.build_empty(*values.shape, kind, torch.float32, "cpu"), requires_grad=False
    )
    for part in (slice(0, 2), slice(2, 6)):
        made.detach()[part].copy_(values[part])
    assert isinstance(made[1:4], Quantized)
    assert torch.equal(dequantize(made), held(kind, values).dequantize())
    assert torch.equal(dequantize(made[1:4]), held(kind, values).dequantize()[1:4])
    assert torch.equal(made + 1, held(kind, values).dequantize() + 1)


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_stay_zeros(kind: Kind) -> None:
    assert torch.equal(held(kind, torch.zeros(2, 64)).dequantize(), torch.zeros(2, 64))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_and_its_gradient_are_those_of_the_whole_matrix(
    kind: Kind, dtype: torch.dtype
) -> None:
    weight, bias = held(kind, matrix(), dtype), torch.randn(6).to(dtype)
    x, y = (
        torch.randn(5, 128, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        for _ in "xy"
    )
    made, wanted = linear(x, weight, bias), nn.functional.linear(y, weight.dequantize(), bias)
    # Sums are in float32; in half precision the product and its sum with the bias are rounded.
    whole, half = weight.dequantize().double(), 0 if dtype == torch.float32 else 2
    exact = x.detach().double() @ whole.T + bias.double()
    sizes = x.detach().double().abs() @ whole.T.abs() + bias.double().abs()
    lost = product_bound(x, whole.T, more=1) + gamma(1) * bias.double().abs()
    lost = lost + gamma(half, dtype) * sizes if half else lost
    for one, leaf in ((made, x), (wanted, y)):
        assert_within(one, exact, lost)
        (one.float() ** 2).mean().backward()
        # The mean's gradient is 2 / 30 of a product that is wrong already, rounded twice and, in
        # half precision, once more, as the result is.
        by_out, count = 2 * exact / exact.numel(), exact.numel()
        assert leaf.grad is not None
        by_lost = 2 * lost / count + gamma(3) * by_out.abs()
        by_lost = by_lost + gamma(1, dtype) * (by_out.abs() + by_lost) if half else by_lost
        own = product_bound(by_out, whole) + by_lost @ whole.abs() * (1 + gamma(len(bias)))
        own = own + gamma(1, dtype) * (by_out.abs() @ whole.abs() + own) if half else own
        assert_within(leaf.grad, by_out @ whole, own)


def test_bytes_of_a_layer(kind: Kind = "4bit") -> None:
    with torch.device("meta"):
        network = nn.ModuleDict(
            {
                "a": Linear(128, {"q": 64, "k": 32}, bias=True),
                "b": Linear(96, {"o": 64}, bias=False),
            }
        )
    # rows of 96 are no whole blocks
    assert quantize_matrices(network.values(), kind, torch.bfloat16) == 128 * 96
    allocate_memory(network, torch.device("cpu"))
    elements, size = count_bytes(network)
    assert (elements, size) == (128 * 96, 128 * 96 // 2 + 4 * 128 * 96 // 64)
    assert not network["b"].weight.is_meta and not network["a"].bias.is_meta
    assert network["a"].weight.dtype == torch.bfloat16 and not network["a"].weight.requires_grad


def test_nothing_changes_it_unseen() -> None:
    with pytest.raises(AssertionError, match="on a quantized matrix"):
        held("8bit", matrix()).add_(1.0)
