"""Differentiable collectives: sums over a process group, and gather and scatter of a tensor's rows.

torch's compiler does not compile these functions but calls them between compiled parts.
`_disable_dynamo` is `torch.compiler.disable`, but it loads the compiler at the first call and not
when this file is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.distributed import ProcessGroup


@_disable_dynamo
def summed_forward(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum of x over the ranks; the gradient passes through unchanged.

    Used for the output of a layer whose input columns are split over the ranks.
    """
    y: Tensor = _SumForward.apply(x, group)
    return y


@_disable_dynamo
def summed_backward(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return x, which is equal on all ranks; its gradient is summed over the ranks.

    Used for the input of a layer whose rows are split over the ranks.
    """
    y: Tensor = _SumBackward.apply(x, group)
    return y


def summed(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum of x over the ranks; the gradient is summed over the ranks too.

    Used if each rank computes a different part of the result from the sum.
    """
    return summed_backward(summed_forward(x, group), group)


def total(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum of x over the ranks, without a gradient; x is not changed."""
    y = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(y, group=group)
    return y


@dataclass(frozen=True)
class RowParts:
    """Assignment of a tensor's rows to the ranks of a group.

    Each row belongs to one rank, and a rank's rows are in rising order.
    """

    group: ProcessGroup
    own: Tensor  # int64: this rank's rows
    number: Tensor  # int64 [rows]: index of each row among the rows of its rank
    # int64 [rows]: index of each row in the concatenation of all ranks' rows, each rank's padded to
    # `most` rows
    places: Tensor
    most: int  # largest number of rows of a rank
    filled: bool = False  # True if `places` are 0, 1, 2, ...

    @classmethod
    def stretches(cls, count: int, group: ProcessGroup, device: torch.device) -> RowParts:
        """Assign `count` rows to the ranks in consecutive runs of equal length.

        The last rank that gets any rows may get fewer, and the ranks after it get none.
        """
        most = -(-count // group.size())
        places = torch.arange(count, device=device)
        own = places[group.rank() * most : (group.rank() + 1) * most]
        return cls(group, own, places % max(1, most), places, most, filled=True)

    @classmethod
    def of(cls, owner: Tensor, group: ProcessGroup) -> RowParts:
        """Assign each row to the rank `owner`, int64 [rows], a rank number within the group."""
        counts = owner.bincount(minlength=group.size())
        order = owner.argsort(stable=True)
        number = torch.empty_like(owner)
        number[order] = (
            torch.arange(len(owner), device=owner.device)
            - (counts.cumsum(0) - counts)[owner[order]]
        )
        most = int(counts.max())
        return cls(
            group, (owner == group.rank()).nonzero().flatten(), number, owner * most + number, most
        )

    def select(self, rows: Tensor) -> RowParts:
        """Return the assignment of these rows, int64 [n]; they may repeat, and keep their ranks."""
        return RowParts.of(self.places[rows] // max(1, self.most), self.group)

    def gather(self, x: Tensor) -> Tensor:
        return gathered(x, self)

    def gather_alike(self, x: Tensor) -> Tensor:
        return gathered_alike(x, self)

    def scatter(self, x: Tensor) -> Tensor:
        return scattered(x, self)


@_disable_dynamo
def gathered(x: Tensor, rows: RowParts) -> Tensor:
    """Return all rows [rows, ...], given each rank's own rows x [n, ...]; gradients are summed.

    Used if each rank computes a different part of the result from the rows.
    """
    y: Tensor = _Gather.apply(x, rows, True)
    return y


@_disable_dynamo
def gathered_alike(x: Tensor, rows: RowParts) -> Tensor:
    """Return all rows [rows, ...], given each rank's own rows x [n, ...]; gradients are not summed.

    Used if all ranks compute the same result from the rows, so that each rank already has the
    complete gradient of its own rows.
    """
    y: Tensor = _Gather.apply(x, rows, False)
    return y


@_disable_dynamo
def scattered(x: Tensor, rows: RowParts) -> Tensor:
    """Sum x [rows, ...] over the ranks and return this rank's own rows [n, ...] of the sum.

    In the backward pass, each rank gets the gradient of all rows.
    """
    y: Tensor = _Scatter.apply(x, rows)
    return y


def _all(own: Tensor, rows: RowParts) -> Tensor:
    # Every rank's rows, each rank's padded to `most` rows.
    every = own.new_empty(rows.group.size() * rows.most, *own.shape[1:])
    if rows.most:
        dist.all_gather(list(every.split(rows.most)), _to(rows.most, own), group=rows.group)
    if rows.filled:
        return every[: len(rows.places)]
    return every.index_select(0, rows.places)


def _own_sum(x: Tensor, rows: RowParts) -> Tensor:
    own = x.new_empty(rows.most, *x.shape[1:])
    count = rows.group.size() * rows.most
    if rows.most:
        if rows.filled:
            every = _to(count, x)
        else:
            every = x.new_zeros(count, *x.shape[1:]).index_copy(0, rows.places, x)
        dist.reduce_scatter(own, list(every.split(rows.most)), group=rows.group)
    return own[: len(rows.own)]


def _to(count: int, x: Tensor) -> Tensor:
    """Return x [n, ...] padded with zeros to `count` rows."""
    if len(x) == count:
        return x.contiguous()
    return torch.cat([x, x.new_zeros(count - len(x), *x.shape[1:])])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: RowParts, sums: bool) -> Tensor:
        ctx.rows = rows
        ctx.sums = sums
        return _all(x, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        rows, (grad,) = ctx.rows, gradients
        return _own_sum(grad, rows) if ctx.sums else grad.index_select(0, rows.own), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: RowParts) -> Tensor:
        ctx.rows = rows
        return _own_sum(x, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _all(gradients[0], ctx.rows), None


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
