"""Products by the fastest kernel are the plain ones, with their gradients, and a row's bits do not
depend on other rows.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.testing import assert_close

from weft.kernels.products import (
    GradientSum,
    add_product,
    linear,
    prepare_wide,
    product,
    wide_product,
)


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
    ours, theirs = linear(*leaves), torch.nn.functional.linear(*leaves)
    assert_close(ours, theirs)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if wanted:
        by_out = torch.randn_like(ours)
        for one, other in zip(
            torch.autograd.grad(ours, wanted, by_out),
            torch.autograd.grad(theirs, wanted, by_out),
            strict=True,
        ):
            assert_close(one, other)


def test_views_are_multiplied_as_what_they_show() -> None:
    torch.manual_seed(0)
    left, right, bias = (
        torch.randn(9, 12).T[2:8],
        torch.randn(18, 5).T[:, ::2],
        torch.randn(10)[::2],
    )
    assert_close(product(left, right, bias), left @ right.T + bias)


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
    expected = by_out.T @ x
    assert_close(product(by_out.T, x.T), expected)
    whole = total + expected
    add_product(total, by_out.T, x.T)
    assert_close(total, whole, check_dtype=False)


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
    monkeypatch.setattr("weft.kernels.products.CELLS", 256)  # in several parts
    torch.manual_seed(0)
    left, right, bias = (torch.randn(*size).to(dtype) for size in ((5, 64), (30, 64), (30,)))
    made = wide_product(left, right, bias)
    assert made.dtype == torch.promote_types(dtype, torch.float32)
    assert_close(
        made,
        (left.double() @ right.double().T + bias.double()).to(made.dtype),
        rtol=1e-5,
        atol=1e-5,
    )
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
    wanted = torch.zeros(6, 7)
    for _ in range(3):
        x, by = torch.randn(9, 7).bfloat16(), torch.randn(9, 6).bfloat16()
        linear(x, weight, None, GradientSum(master)).backward(by)
        wanted += by.float().T @ x.float()
    assert weight.grad is None and master.grad is not None
    # those after the first are rounded to bfloat16 on a CPU
    assert_close(master.grad, wanted, rtol=0.02, atol=0.02)
