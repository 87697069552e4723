"""Collectives: sums over a process group, and gather and scatter of a tensor's rows.

Most are differentiable. On CPUs, the all-reduce and reduce-scatter of gloo exchange many small
messages, one after another. They are therefore replaced, the all-reduce only for small tensors:
each rank sends its values directly to the others, and adds up the values that it receives in the
order of the ranks. All ranks get bitwise identical sums.

torch's compiler does not compile these functions, but calls them between compiled parts.
`_disable_dynamo` is like `torch.compiler.disable`, except that it imports the compiler at the first
call instead of when this module is imported.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.distributed import ProcessGroup

# Up to this many bytes over all ranks, values are sent to all ranks instead of being all-reduced.
MAX_DIRECT_BYTES = 1 << 20


def sum_over_ranks(x: Tensor, group: ProcessGroup) -> None:
    """Replace x, which must be contiguous, by its sum over the ranks of `group`."""
    if _is_sent_directly(x, group):
        torch.sum(_exchange(x, group), 0, dtype=x.dtype, out=x)
    else:
        dist.all_reduce(x, group=group)


def find_max_over_ranks(x: Tensor, group: ProcessGroup) -> None:
    """Replace x, which must be contiguous, by its element-wise maximum over the ranks of `group`."""
    if _is_sent_directly(x, group):
        torch.amax(_exchange(x, group), 0, out=x)
    else:
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)


def gather_from_ranks(x: Tensor, group: ProcessGroup) -> Tensor:
    """Stack the tensors x of all ranks, which have the same shape, as [ranks, *x.shape]."""
    x = x.detach().contiguous()
    if _is_sent_directly(x, group):
        return _exchange(x, group)
    every = x.new_empty(group.size(), *x.shape)
    if every.numel():
        dist.all_gather(list(every.unbind()), x, group=group)
    return every


def _is_sent_directly(x: Tensor, group: ProcessGroup) -> bool:
    return x.device.type == "cpu" and 0 < x.nbytes * group.size() <= MAX_DIRECT_BYTES


def _exchange(x: Tensor, group: ProcessGroup) -> Tensor:
    """Send x to all ranks, and return what they sent, [ranks, *x.shape]."""
    sent = x.expand(group.size(), *x.shape).contiguous()
    every = torch.empty_like(sent)
    dist.all_to_all_single(every, sent, group=group)
    return every


@_disable_dynamo
def sum_forward(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum of x over the ranks. The backward pass returns the gradient unchanged.

    Used for the output of a layer whose weight is split over the ranks by input features.
    """
    y: Tensor = _SumForward.apply(x, group)
    return y


@_disable_dynamo
def sum_backward(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return x, which must be equal on all ranks, and sum its gradient over the ranks.

    Used for the input of a layer whose weight is split over the ranks by output features.
    """
    y: Tensor = _SumBackward.apply(x, group)
    return y


def sum_both_ways(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum of x over the ranks. The backward pass also sums the gradient over the ranks.

    Use this if each rank computes a different part of the result from the sum. Each rank then has
    only a part of the gradient with respect to the sum.
    """
    return sum_backward(sum_forward(x, group), group)


def sum_without_gradient(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum of x over the ranks as a new tensor without a gradient."""
    y = x.detach().clone(memory_format=torch.contiguous_format)
    sum_over_ranks(y, group)
    return y


def connect_outputs(loss: Tensor, outputs: Iterable[Tensor]) -> Tensor:
    """Return a loss with the value of `loss` whose backward pass also runs through `outputs`.

    The gradients of the outputs are zero. Used if the loss does not depend on the outputs: the
    backward pass must run through the whole network nevertheless, because other ranks wait for this
    rank's gradients.
    """
    return loss + sum(
        torch.where(torch.zeros_like(each, dtype=torch.bool), each, 0).sum() for each in outputs
    )


@dataclass(frozen=True)
class RowAssignment:
    """Assignment of the rows of a tensor to the ranks of a process group.

    Each row belongs to exactly one rank, which holds its rows in ascending order.
    """

    group: ProcessGroup
    own_rows: Tensor  # int64: this rank's rows
    local_indices: Tensor  # int64 [rows]: index of each row among the rows of its rank
    # int64 [rows]: index of each row in the concatenation of all ranks' rows, each rank's padded to
    # `max_rows` rows
    places: Tensor
    max_rows: int  # largest number of rows of a rank
    is_contiguous: bool = False  # True if `places` are 0, 1, 2, ...

    @classmethod
    def from_equal_runs(
        cls, count: int, group: ProcessGroup, device: torch.device
    ) -> RowAssignment:
        """Assign `count` rows to the ranks in consecutive runs of equal length.

        If `count` is not divisible by the number of ranks, the last ranks get fewer rows or none.
        """
        most = -(-count // group.size())
        places = torch.arange(count, device=device)
        own = places[group.rank() * most : (group.rank() + 1) * most]
        return cls(group, own, places % max(1, most), places, most, is_contiguous=True)

    @classmethod
    def from_owners(cls, owner: Tensor, group: ProcessGroup) -> RowAssignment:
        """Assign each row i to the rank `owner[i]` of `group`.

        `owner` is int64 [rows]. Its elements are ranks within the group, not global ranks.
        """
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

    def select(self, rows: Tensor) -> RowAssignment:
        """Return the assignment of n selected rows, each of which stays on its rank.

        `rows` has the indices of the selected rows, int64 [n]. An index may occur several times.
        """
        return RowAssignment.from_owners(self.places[rows] // max(1, self.max_rows), self.group)


@_disable_dynamo
def gather_rows(x: Tensor, rows: RowAssignment) -> Tensor:
    """Gather the rows of all ranks on every rank, [N, ...].

    `x` [n, ...] contains this rank's rows, and `rows` assigns the N rows to the ranks. The backward
    pass sums the gradients over the ranks. Used if each rank computes a different part of the
    result from the rows.
    """
    y: Tensor = _GatherRows.apply(x, rows, True)
    return y


@_disable_dynamo
def gather_replicated_rows(x: Tensor, rows: RowAssignment) -> Tensor:
    """Gather all rows [rows, ...] on every rank from each rank's own rows x [n, ...].

    The backward pass does not sum the gradients over the ranks. Used if all ranks compute the same
    result from the rows: each rank then already has the complete gradient of its own rows.
    """
    y: Tensor = _GatherRows.apply(x, rows, False)
    return y


@_disable_dynamo
def scatter_rows(x: Tensor, rows: RowAssignment) -> Tensor:
    """Sum x [rows, ...] over the ranks, and return this rank's own rows [n, ...] of the sum.

    The backward pass gathers the gradients of all rows on every rank.
    """
    y: Tensor = _ScatterRows.apply(x, rows)
    return y


def _all_gather(own: Tensor, rows: RowAssignment) -> Tensor:
    # Every rank's rows, each rank's padded to `max_rows` rows.
    every = gather_from_ranks(_pad_rows(rows.max_rows, own), rows.group).flatten(0, 1)
    if rows.is_contiguous:
        return every[: len(rows.places)]
    return every.index_select(0, rows.places)


def _reduce_scatter(x: Tensor, rows: RowAssignment) -> Tensor:
    size = rows.group.size()
    if rows.is_contiguous:
        every = _pad_rows(size * rows.max_rows, x)
    else:
        every = x.new_zeros(size * rows.max_rows, *x.shape[1:]).index_copy(0, rows.places, x)
    if not every.numel():
        own = x.new_empty(rows.max_rows, *x.shape[1:])
    elif x.device.type == "cpu":
        parts = torch.empty_like(every)
        dist.all_to_all_single(parts, every, group=rows.group)
        own = parts.unflatten(0, (size, rows.max_rows)).sum(0)
    else:
        own = x.new_empty(rows.max_rows, *x.shape[1:])
        dist.reduce_scatter(own, list(every.split(rows.max_rows)), group=rows.group)
    return own[: len(rows.own_rows)]


def _pad_rows(count: int, x: Tensor) -> Tensor:
    """Return x [n, ...] padded with zeros to `count` rows."""
    if len(x) == count:
        return x.contiguous()
    return torch.cat([x, x.new_zeros(count - len(x), *x.shape[1:])])


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: RowAssignment, sums: bool) -> Tensor:
        ctx.rows = rows
        ctx.sums = sums
        return _all_gather(x, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        rows, (grad,) = ctx.rows, gradients
        return (
            _reduce_scatter(grad, rows) if ctx.sums else grad.index_select(0, rows.own_rows),
            None,
            None,
        )


class _ScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: RowAssignment) -> Tensor:
        ctx.rows = rows
        return _reduce_scatter(x, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _all_gather(gradients[0], ctx.rows), None


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return sum_without_gradient(x, group)

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
        return sum_without_gradient(gradients[0], ctx.group), None
