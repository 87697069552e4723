"""Sums over the ranks of a process group, and tensors put together of their rows, that gradients
pass through.

A compiler leaves them out of what it compiles, so that ranks wait for each other between compiled
parts. `_disable_dynamo` is `torch.compiler.disable` that loads the compiler at the first call, not
with this file.
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
    """The sum of what the ranks have; each gets its gradient as it is.

    Where ranks hold columns of a layer, what leaves it.
    """
    y: Tensor = _SumForward.apply(x, group)
    return y


@_disable_dynamo
def summed_backward(x: Tensor, group: ProcessGroup) -> Tensor:
    """x, which every rank has; its gradient is the sum of theirs.

    Where ranks hold rows of a layer, what enters it.
    """
    y: Tensor = _SumBackward.apply(x, group)
    return y


def summed(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of what the ranks have, where each goes on with it to another part of the result:
    gradients are summed too.
    """
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
    # int64 [rows]: where each lies when what the ranks have stands end to end, each filled up to
    # `most` rows
    places: Tensor
    most: int
    filled: bool = False  # whether `places` are 0, 1, 2, ...

    @classmethod
    def stretches(cls, count: int, group: ProcessGroup, device: torch.device) -> RowParts:
        """`count` rows as consecutive ones for each rank, as many for all but the last that have
        some.
        """
        most = -(-count // group.size())
        places = torch.arange(count, device=device)
        own = places[group.rank() * most : (group.rank() + 1) * most]
        return cls(group, own, places % max(1, most), places, most, filled=True)

    @classmethod
    def of(cls, owner: Tensor, group: ProcessGroup) -> RowParts:
        """`owner` int64 [rows]: the rank of the group that has each."""
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
        """Of some of them, int64 [n], which may repeat: each is its rank's still."""
        return RowParts.of(self.places[rows] // max(1, self.most), self.group)

    def gather(self, x: Tensor) -> Tensor:
        return gathered(x, self)

    def gather_alike(self, x: Tensor) -> Tensor:
        return gathered_alike(x, self)

    def scatter(self, x: Tensor) -> Tensor:
        return scattered(x, self)


@_disable_dynamo
def gathered(x: Tensor, rows: RowParts) -> Tensor:
    """All rows [rows, ...] of what each rank has [n, ...], where each goes on with them to another
    part of the result: gradients are summed.
    """
    y: Tensor = _Gather.apply(x, rows, True)
    return y


@_disable_dynamo
def gathered_alike(x: Tensor, rows: RowParts) -> Tensor:
    """As `gathered`, where every rank goes on to the same result: each has the gradient of its own
    rows already.
    """
    y: Tensor = _Gather.apply(x, rows, False)
    return y


@_disable_dynamo
def scattered(x: Tensor, rows: RowParts) -> Tensor:
    """Of all rows [rows, ...], each a sum of which every rank has a part, those of this rank [n,
    ...]; each rank gets the gradient of all of them.
    """
    y: Tensor = _Scatter.apply(x, rows)
    return y


def _all(own: Tensor, rows: RowParts) -> Tensor:
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
    """x [n, ...], filled up to `count` rows."""
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
