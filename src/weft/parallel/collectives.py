"""Sums over the ranks of a process group, and tensors put together of their rows, that gradients pass through."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True)
class RowParts:
    """Which rows of a tensor each rank of a group has, every row one of them, in rising order."""

    group: ProcessGroup
    own: Tensor  # int64: the rows of this rank
    number: Tensor  # int64 [rows]: which one of its rank's rows each is
    places: Tensor  # int64 [rows]: where each lies when what the ranks have stands end to end, each filled up to `most` rows
    most: int

    @classmethod
    def of(cls, owner: Tensor, group: ProcessGroup) -> RowParts:
        """`owner` int64 [rows]: the rank of the group that has each."""
        counts = owner.bincount(minlength=group.size())
        order = owner.argsort(stable=True)
        number = torch.empty_like(owner)
        number[order] = torch.arange(len(owner), device=owner.device) - (counts.cumsum(0) - counts)[owner[order]]
        most = int(counts.max())
        return cls(group, (owner == group.rank()).nonzero().flatten(), number, owner * most + number, most)


def gathered(x: Tensor, rows: RowParts) -> Tensor:
    """All rows [rows, ...] of what each rank has [n, ...], where each goes on with them to another part of the result:
    gradients are summed."""
    y: Tensor = _Gather.apply(x, rows, True)
    return y


def gathered_alike(x: Tensor, rows: RowParts) -> Tensor:
    """As `gathered`, where every rank goes on to the same result: each has the gradient of its own rows already."""
    y: Tensor = _Gather.apply(x, rows, False)
    return y


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: RowParts, sums: bool) -> Tensor:
        ctx.rows, ctx.sums = rows, sums
        padded = x.new_zeros(rows.most, *x.shape[1:])
        padded[: len(x)] = x
        every = x.new_empty(rows.group.size() * rows.most, *x.shape[1:])
        if rows.most:
            dist.all_gather(list(every.split(rows.most)), padded, group=rows.group)
        return every.index_select(0, rows.places)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        rows, (grad,) = ctx.rows, gradients
        if not ctx.sums:
            return grad.index_select(0, rows.own), None, None
        own = grad.new_zeros(rows.most, *grad.shape[1:])
        if rows.most:
            every = grad.new_zeros(rows.group.size() * rows.most, *grad.shape[1:]).index_copy(0, rows.places, grad)
            dist.reduce_scatter(own, list(every.split(rows.most)), group=rows.group)
        return own[: len(rows.own)], None, None


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
