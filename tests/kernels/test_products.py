"""Products by the fastest kernel are the plain ones, with their gradients, and a row's bits do not
depend on other rows.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tests.bounds import assert_within, gamma, kernel_product_bound, unit
from weft.kernels.products import (
    GradientSum,
    add_product,
    linear,
    prepare_wide,
    product,
    wide_product,
)


def bound(
    left: Tensor,
    right: Tensor,
    added: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    more: int = 1,
) -> Tensor:
    """Of left @ right.T + added, which is added last."""
    lost = kernel_product_bound(left, right.T, dtype, more)
    return lost if added is None else lost + gamma(more, dtype) * added.detach().double().abs()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(7,), (5, 7), (2, 3, 7), (0, 7)])
@pytest.mark.parametrize("needed", list(itertools.product([False, True], repeat=3)))
def test_values_and_gradients_are_those_of_torch(
    dtype: torch.dtype, shape: tuple[int, ...], needed: tuple[bool, ...]
) -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(size, dtype=dtype) for size in (shape, (6, 7), (6,))]
    for leaf, need in zip(leaves, needed, strict=True):
        leaf.requires_grad_(need)
    wide = [leaf.detach().double().requires_grad_(leaf.requires_grad) for leaf in leaves]
    ours, theirs = linear(*leaves), torch.nn.functional.linear(*wide)
    x, weight, bias = leaves
    assert ours.dtype == dtype
    assert_within(ours, theirs, bound(x, weight, bias, dtype))
    if any(needed):
        by_out = torch.randn_like(ours)
        by_row, ones = by_out.reshape(-1, 6), torch.ones(1, by_out.numel() // 6, dtype=dtype)
        lost = (
            bound(by_out, weight.T, None, dtype),
            bound(by_row.T, x.reshape(-1, 7).T, None, dtype),
            bound(ones, by_row.T, None, dtype)[0],
        )
        for one, other, most in zip(
            torch.autograd.grad(ours, [leaf for leaf in leaves if leaf.requires_grad], by_out),
            torch.autograd.grad(
                theirs, [leaf for leaf in wide if leaf.requires_grad], by_out.double()
            ),
            itertools.compress(lost, needed),
            strict=True,
        ):
            assert one.dtype == dtype
            assert_within(one, other, most)


def test_views_are_multiplied_as_what_they_show() -> None:
    torch.manual_seed(0)
    left, right, bias = (
        torch.randn(9, 12).T[2:8],
        torch.randn(18, 5).T[:, ::2],
        torch.randn(10)[::2],
    )
    exact = left.double() @ right.double().T + bias.double()
    assert_within(product(left, right, bias), exact, bound(left, right, bias))


@pytest.mark.parametrize(
    "dtypes",
    [(torch.float32, torch.float32), (torch.float64,) * 2, (torch.float32, torch.bfloat16)],
)
def test_gradients_of_weights(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    torch.manual_seed(0)
    kept, dtype = dtypes
    total, by_out, x = (
        torch.randn(6, 5, dtype=kept),
        torch.randn(6, 9, dtype=dtype).T,
        torch.randn(9, 10, dtype=dtype)[:, ::2],
    )
    expected = by_out.T.double() @ x.double()
    # sums of bfloat16 are in float32, and rounded once
    made, sums = product(by_out.T, x.T), torch.promote_types(dtype, torch.float32)
    assert made.dtype == dtype
    lost = bound(by_out.T, x.T, None, sums) + 1.01 * unit(dtype) * expected.abs()
    assert_within(made, expected, lost)
    whole = total.double() + expected
    lost = bound(by_out.T, x.T, total, sums, more=2) + 1.01 * unit(dtype) * expected.abs()
    add_product(total, by_out.T, x.T)
    assert total.dtype == kept
    assert_within(total, whole, lost)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(48, 16), (300, 64), (64, 172), (96, 700)])
def test_a_row_has_the_same_bits_whatever_stands_beside_it(
    dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    weight, rows = torch.randn(shape, dtype=dtype), torch.randn(300, shape[1], dtype=dtype)
    whole = product(rows, weight)
    # an adapter's
    low, wide = torch.randn(shape[0], 8, dtype=dtype), torch.randn(300, 8, dtype=dtype)
    added = whole.clone()
    add_product(added, wide, low)
    for count in (1, 2, 3, 4, 5, 7, 11, 16, 33, 150):
        part = slice(9, 9 + count)
        found = product(rows[part].clone(), weight)
        assert torch.equal(found, whole[part])
        add_product(found, wide[part].clone(), low)
        assert torch.equal(found, added[part])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_sums_of_half_precision_are_not_rounded_to_it(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.kernels.products.MAX_TEMPORARY_SIZE", 256)  # in several parts
    torch.manual_seed(0)
    left, right, bias = (torch.randn(*size).to(dtype) for size in ((5, 64), (30, 64), (30,)))
    made = wide_product(left, right, bias)
    assert made.dtype == torch.promote_types(dtype, torch.float32)
    exact = left.double() @ right.double().T + bias.double()
    assert_within(made, exact, bound(left, right, bias, made.dtype, more=2))
    wide = prepare_wide(right)
    assert (wide is None) == (dtype not in (torch.bfloat16, torch.float16)), (
        "what is wide needs no copy"
    )
    assert torch.equal(wide_product(left, right, bias, wide), made), "the same bits"


def test_a_gpu_is_asked_for_float32_by_the_product_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors without memory, which go the same way. torch 2.11 cannot add a product to such a
    sum, so what it is asked for is looked at instead.
    """
    left, right = (
        torch.empty(*size, device="meta", dtype=torch.bfloat16) for size in ((5, 64), (30, 64))
    )
    assert wide_product(left, right).dtype == torch.float32
    total, asked = torch.empty(5, 30, device="meta"), []
    monkeypatch.setattr(torch, "addmm", lambda *given, **how: asked.append((given, how)))
    add_product(total, left, right)
    [((sum_so_far, one, other), how)] = asked
    assert sum_so_far is total and how == {"out_dtype": torch.float32, "out": total}
    assert one is left and other.shape == (64, 30)


def test_the_gradient_of_a_weight_goes_to_its_sum() -> None:
    torch.manual_seed(0)
    master = torch.nn.Parameter(torch.zeros(6, 7))
    weight = torch.randn(6, 7).bfloat16().requires_grad_()
    wanted, lost = torch.zeros(6, 7).double(), torch.zeros(6, 7).double()
    for step in range(3):
        x, by = torch.randn(9, 7).bfloat16(), torch.randn(9, 6).bfloat16()
        linear(x, weight, None, GradientSum(master)).backward(by)
        one = by.double().T @ x.double()
        wanted += one
        # two sums follow; those after the first are rounded to bfloat16 on a CPU
        lost += bound(by.T, x.T, more=2)
        lost += 1.01 * unit(torch.bfloat16) * one.abs() if step else 0.0
    assert weight.grad is None and master.grad is not None
    assert_within(master.grad, wanted, lost)
