"""Products of sorted rows, each with the matrix of its group, as in a mixture of experts.

On a GPU and in bfloat16, one kernel computes all groups, and the sizes of the groups stay on the
device. Otherwise, each group is a separate product, and the host must know the sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.kernels.products import linear

ALIGNMENT = 16  # bytes; rows that the kernel reads begin at multiples of this


@dataclass(frozen=True)
class RowGroups:
    """Number of rows in each group; all rows of a group are multiplied by the same matrix.

    `counts` is int64 [groups]. `host_counts` contains the same numbers on the host, or is None if
    they are known only on the device.
    """

    counts: Tensor
    host_counts: list[int] | None = None

    @cached_property
    def sizes(self) -> list[int]:
        """Number of rows in each group, on the host.

        If `host_counts` is None, the host waits for the device and copies the numbers.
        """
        if self.host_counts is None:
            return [int(count) for count in self.counts.tolist()]
        return self.host_counts

    @cached_property
    def ends(self) -> Tensor:
        """Exclusive end of each group's rows, int32 [groups]."""
        return self.counts.cumsum(0).to(torch.int32)


def serves_groups(x: Tensor, *weights: Tensor) -> bool:
    """Return whether one kernel can multiply x [rows, in] with all weights [groups, out, in].

    This needs bfloat16 on a CUDA GPU, and rows that begin at multiples of 16 bytes. AMD GPUs are
    not supported, because torch's kernel for them leaves memory unwritten (pytorch pull request
    174314).
    """
    plain = (
        x.dtype == torch.bfloat16
        and x.device.type in ("cuda", "meta")
        and torch.version.hip is None
    )
    least = ALIGNMENT // x.element_size()
    return plain and all(
        w.dtype == x.dtype and not (w.shape[1] % least or w.shape[2] % least) for w in weights
    )


def grouped_linear(x: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
    """Return each row of x multiplied by the transposed matrix of its group, [rows, out].

    x [rows, in] is sorted by group, and `weight` [groups, out, in] contains the matrices. The
    result can be differentiated once with respect to x and weight.
    """
    if serves_groups(x, weight):
        return _GroupedLinear.apply(x, weight, groups)
    # The gradient of unbind is one stack; that of each weight[e] would be as large as the weight.
    matrices = weight.unbind()
    outputs = [
        linear(part, matrices[e]) for e, part in enumerate(x.split(groups.sizes)) if len(part)
    ]
    # Multiply even without rows, so that this rank takes part in the backward pass's collectives.
    return torch.cat(outputs) if outputs else linear(x, matrices[0])


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.groups = groups
        return F.grouped_mm(x, weight.transpose(1, 2), offs=groups.ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x, weight), grad_out, groups = ctx.saved_tensors, gradients[0].contiguous(), ctx.groups
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = F.grouped_mm(grad_out, weight, offs=groups.ends)
        if ctx.needs_input_grad[1]:
            grad_weight = F.grouped_mm(grad_out.T, x, offs=groups.ends)
            # On some devices the kernel leaves the memory of a group without rows as it was
            # (pytorch issue 172439).
            grad_weight.masked_fill_((groups.counts == 0)[:, None, None], 0.0)
        return grad_x, grad_weight, None
