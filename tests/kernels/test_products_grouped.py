"""Products by group are those of each group, with their gradients, in memory that grows as the
groups do.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.bounds import assert_within, kernel_product_bound
from weft.kernels import RowGroups, grouped_linear, products

SIZES = [3, 0, 5, 1, 0]


def inputs(dtype: torch.dtype, sizes: list[int] = SIZES) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(sum(sizes), 16, dtype=dtype, requires_grad=True)
    return x, torch.randn(len(sizes), 8, 16, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("one_kernel", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_each_group_has_its_own_matrix(
    one_kernel: bool, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "serves", lambda *_: one_kernel)
    x, weight = inputs(torch.float32)
    groups = RowGroups(torch.tensor(SIZES), SIZES if known else None)
    made = grouped_linear(x, weight, groups)
    assert made.dtype == torch.float32
    by = torch.randn_like(made)
    by_x, by_weight = torch.autograd.grad(made, (x, weight), by)
    # each a product of float64, and what its sums may lose in float32
    for part, matrix, part_by, of_part, of_matrix, out in zip(
        x.split(SIZES),
        weight,
        by.split(SIZES),
        by_x.split(SIZES),
        by_weight,
        made.split(SIZES),
        strict=True,
    ):
        for found, left, right in (
            (out, part, matrix.T),
            (of_part, part_by, matrix),
            (of_matrix, part_by.T, part),
        ):
            exact = left.detach().double() @ right.detach().double()
            assert_within(found, exact, kernel_product_bound(left, right))


def test_a_group_without_rows_has_no_gradient_whatever_the_kernel_left_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(products, "serves", lambda *_: True)
    kernel = torch.nn.functional.grouped_mm

    def leaving(left: Tensor, right: Tensor, *, offs: Tensor) -> Tensor:
        made = kernel(left, right, offs=offs)
        if made.dim() == 3:
            made[1] = torch.nan
        return made

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", leaving)
    x, weight = inputs(torch.float32)
    grouped_linear(x, weight, RowGroups(torch.tensor(SIZES))).sum().backward()
    assert (
        weight.grad is not None and weight.grad.isfinite().all() and not weight.grad[[1, 4]].any()
    )


class Moved(TorchDispatchMode):
    """Numbers that operations made."""

    made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.made += sum(
            x.numel() for x in tree_leaves(out) if isinstance(x, Tensor) and not x._is_view()
        )
        return out


def test_the_backward_pass_does_not_grow_with_the_square_of_the_groups() -> None:
    made = {}
    for count in (8, 32):
        x, weight = inputs(torch.float64, [2] * count)
        with Moved() as moved:
            grouped_linear(x, weight, RowGroups(torch.full((count,), 2))).sum().backward()
        made[count] = moved.made
    assert (
        made[32] < 5 * made[8]
    )  # 4 times as many groups; with a gradient of all of them for each it is 15 times as much


def test_what_one_kernel_takes() -> None:
    x, weight = (
        torch.empty(5, 16, device="meta", dtype=torch.bfloat16),
        torch.empty(3, 8, 16, device="meta").bfloat16(),
    )
    assert products.serves_groups(x, weight)
    assert not products.serves_groups(x.float(), weight.float()) and not products.serves_groups(
        x, weight[:, :4]
    )
    assert not products.serves_groups(
        torch.empty(5, 16, dtype=torch.bfloat16), torch.empty(3, 8, 16, dtype=torch.bfloat16)
    )
