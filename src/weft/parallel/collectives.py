"""Sums over the ranks of a process group that gradients pass through."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def summed_forward(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of what the ranks have; each gets its gradient as it is. Where ranks hold columns of a layer, what leaves it."""
    y: Tensor = _SumForward.apply(x, group)
    return y


def summed_backward(x: Tensor, group: ProcessGroup) -> Tensor:
    """x, which every rank has; its gradient is the sum of theirs. Where ranks hold rows of a layer, what enters it."""
    y: Tensor = _SumBackward.apply(x, group)
    return y


def summed(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of what the ranks have, where each goes on with it to another part of the result: gradients are summed too."""
    return summed_backward(summed_forward(x, group), group)


def total(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of what the ranks have, without a gradient; x stays as it is."""
    y = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(y, group=group)
    return y


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return total(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return total(gradients[0], ctx.group), None
