"""Matrix products by the fastest available kernel, fp8 products, and products by groups of rows.

On a CPU, float32 products use weft's own kernels, which reach more than four fifths of the
processor's peak rate in training. Without a compiler to build these, torch's oneDNN kernels are
used, because torch's default, MKL, does not use the wide vector units of AMD's processors.

The result of a row has the same bits regardless of the other rows. For very few rows, torch uses
other CPU kernels, whose results differ in rounding, so inputs on a CPU with fewer than `MIN_ROWS`
rows are padded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from weft.kernels.cpu import rows as native
from weft.kernels.cpu.library import is_plain, serves

if torch.backends.mkldnn.is_available():
    _LINEAR_KERNELS: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
else:
    _LINEAR_KERNELS = None
ONEDNN_LINEAR: Any = None if _LINEAR_KERNELS is None else _LINEAR_KERNELS.default
MIN_ROWS = 4  # rows to which products by torch's CPU kernels are padded
MAX_TEMPORARY_SIZE = 1 << 24  # most elements of a temporary copy or product
HALF_DTYPES = (torch.bfloat16, torch.float16)
# Device types that multiply half-precision matrices to a float32 result; meta tensors follow them.
WIDE_OUTPUT_DEVICES = ("cuda", "meta")


class GradientSum:
    """Float32 sum of a weight's gradients, stored in the `grad` of a separate parameter.

    This parameter is the float32 master copy of the weight. Gradients are added to the sum as they
    are computed, so autograd does not return a gradient for the weight.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter

    def add(self, left: Tensor, right: Tensor) -> None:
        """Add the product of left [rows, n] and the transpose of right [m, n] to the sum.

        Both matrices have half precision.
        """
        if self._parameter.grad is None:
            self._parameter.grad = wide_product(left, right)
        else:
            add_product(self._parameter.grad, left, right)

    def add_gradient(self, gradient: Tensor) -> None:
        """Add a float32 gradient to the sum.

        `gradient` may become the stored sum itself, so the caller must not write to it later.
        """
        if self._parameter.grad is None:
            self._parameter.grad = gradient
        else:
            self._parameter.grad = self._parameter.grad.add_(gradient)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, gradient_sum: GradientSum | None = None
) -> Tensor:
    """Return `x @ weight.T + bias`, a tensor [..., out].

    `x` is [..., in], `weight` is [out, in], and `bias` is [out]. The result can be differentiated
    once with respect to each of them. If there is a `gradient_sum`, the gradient of the weight is
    added to it. Under torch's compiler, torch's own function is used, and there must be no
    `gradient_sum`.
    """
    if torch.compiler.is_compiling():
        return F.linear(x, weight, bias)
    if not torch.is_grad_enabled():
        return product(x, weight, bias)
    if gradient_sum is not None or native.serves(x, weight, bias) or _uses_onednn(x, weight, bias):
        return _LinearFunction.apply(x, weight, bias, gradient_sum)
    return F.linear(x, weight, bias)


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return left [..., n] times the transpose of right [m, n], plus an optional `bias` [m].

    The result is [..., m] and is not differentiable. Both matrices can be transposed views.
    """
    if native.serves(left, right, bias):
        return native.product(left, right, bias)
    if left.is_cpu and left.dim() == 2 and 0 < left.shape[0] < MIN_ROWS:
        padded = F.pad(left, (0, 0, 0, MIN_ROWS - left.shape[0]))
        return product(padded, right, bias)[: left.shape[0]]
    if not _uses_onednn(left, right, bias):
        return F.linear(left, right, bias)
    prepared_bias = None if bias is None else bias.to(right.dtype).contiguous()
    out: Tensor = ONEDNN_LINEAR(left, right, prepared_bias, "none", [], "")
    return out


def prepare_wide(right: Tensor) -> Tensor | None:
    """Return the float32 copy of `right` that each call of `wide_product` would otherwise make.

    Returns None if `wide_product` needs no copy. Making the copy once saves time if the matrix is
    used many times.
    """
    if right.dtype in HALF_DTYPES and right.device.type not in WIDE_OUTPUT_DEVICES:
        return right.detach().float()
    return None


def wide_product(
    left: Tensor, right: Tensor, bias: Tensor | None = None, wide_right: Tensor | None = None
) -> Tensor:
    """Return the result of `product`, in float32 if both matrices have half precision.

    left is [n, k], and right is [m, k]; the result is [n, m]. In float32, the sums are not rounded
    to half precision. `wide_right` is the result of `prepare_wide(right)`.
    """
    if left.dtype not in HALF_DTYPES or right.dtype not in HALF_DTYPES:
        return product(left, right, bias)
    if left.device.type in WIDE_OUTPUT_DEVICES:
        output = torch.mm(left, right.T, out_dtype=torch.float32)
        return output if bias is None else output.add_(bias)
    output = left.new_empty(left.shape[0], right.shape[0], dtype=torch.float32)
    wide = left.float()
    part_size = max(1, MAX_TEMPORARY_SIZE // max(1, right.shape[1]))
    for first in range(0, right.shape[0], part_size):  # by parts, to limit the size of copies
        part = slice(first, first + part_size)
        wide_part = _widen(right, part) if wide_right is None else wide_right[part]
        output[:, part] = product(wide, wide_part, None if bias is None else bias[part].float())
    return output


def _widen(right: Tensor, rows: slice) -> Tensor:
    """Return a float32 copy of some rows of a matrix."""
    return right[rows].float()


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the product of left [rows, n] and the transpose of right [m, n] to total [rows, m].

    `total` must be contiguous. The sums are computed in the dtype of `total`.
    """
    if native.serves(left, right) and serves(total):
        native.add_product(total, left, right)
    elif (
        total.dtype == torch.float32
        and left.dtype in HALF_DTYPES
        and left.device.type in WIDE_OUTPUT_DEVICES
    ):
        torch.addmm(total, left, right.T, out_dtype=torch.float32, out=total)
    elif total.dtype == left.dtype and not _uses_onednn(left, right):
        total.addmm_(left, right.T)
    else:
        size = max(MIN_ROWS, MAX_TEMPORARY_SIZE // total.shape[1])
        for part, rows in zip(total.split(size), left.split(size), strict=True):
            part += product(rows, right)


def _uses_onednn(left: Tensor, right: Tensor, bias: Tensor | None = None) -> bool:
    are_plain = is_plain(left) and is_plain(right) and (bias is None or is_plain(bias))
    return (
        ONEDNN_LINEAR is not None
        and are_plain
        and left.dtype == right.dtype == torch.float32
        and left.numel() > 0
    )


class _LinearFunction(torch.autograd.Function):
    """Autograd function behind `linear`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gradient_sum: GradientSum | None = None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.gradient_sum = gradient_sum
        return product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad_out = gradients[0].reshape(-1, gradients[0].shape[-1])
        if ctx.needs_input_grad[0]:
            grad_x = product(grad_out, weight.T).view_as(x)
        else:
            grad_x = None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = compute_weight_gradient(
                grad_out.T, x.reshape(-1, x.shape[-1]).T, ctx.gradient_sum
            )
        return grad_x, grad_weight, grad_out.sum(0) if ctx.needs_input_grad[2] else None, None


def compute_weight_gradient(
    left: Tensor, right: Tensor, gradient_sum: GradientSum | None
) -> Tensor | None:
    """Return left [rows, n] times right [m, n] transposed, as the gradient of a weight.

    If there is a `gradient_sum`, add the product to it and return None.
    """
    if gradient_sum is None:
        return product(left, right)
    gradient_sum.add(left, right)
    return None


FP8_SIZE_MULTIPLE = 16  # required divisor of both sizes of a matrix
MIN_FP8_CAPABILITY = (9, 0)  # Hopper

NarrowProduct = Callable[[Tensor, Tensor], Tensor]  # x [..., in], weight [out, in] -> [..., out]


def find_fp8_obstacle(device: torch.device) -> str | None:
    """Return the reason why the device cannot multiply matrices in fp8, or None if it can."""
    if (
        device.type != "cuda"
        or torch.version.hip is not None
        or torch.cuda.get_device_capability(device) < MIN_FP8_CAPABILITY
    ):
        return f"{device} has no fp8 matrix products, but NVIDIA GPUs from the H100 on have"
    return None


class Fp8Product:
    """Product of x [..., in] and weight [out, in] transposed, computed in fp8.

    The product and its gradients with respect to x and to weight are matrix products whose inputs
    are rounded to 8 bits; their results are not. With the torchao `recipe` "rowwise_with_gw_hp",
    the gradient of the weight is computed without rounding to 8 bits. The recipe also determines
    whether scales are computed from the largest element of the whole tensor or of each row. If
    `emulate` is True, the rounded inputs are multiplied in a wider dtype, which works on any
    device.

    Raises `ImportError` if torchao is not installed.
    """

    @staticmethod
    def supports(weight: Tensor) -> bool:
        """Return whether the sizes of `weight` allow a matrix multiplication in fp8."""
        return all(size % FP8_SIZE_MULTIPLE == 0 for size in weight.shape)

    def __init__(self, recipe: str, *, emulate: bool = False) -> None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        # Weight gradients sum over the tokens of a pack, whose number need not be a multiple of 16:
        # let torchao pad this dimension.
        config = replace(
            Float8LinearConfig.from_recipe_name(recipe), pad_inner_dim=True, emulate=emulate
        )
        with torch.device("meta"):
            holder = nn.Sequential(nn.Linear(FP8_SIZE_MULTIPLE, FP8_SIZE_MULTIPLE, bias=False))
        self._layer = convert_to_float8_training(holder, config=config)[0]

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        output: Tensor = torch.func.functional_call(self._layer, {"weight": weight}, (x,))
        return output


ALIGNMENT = 16  # bytes: the kernel reads rows that begin at multiples of this


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
    is_supported = (
        x.dtype == torch.bfloat16
        and x.device.type in ("cuda", "meta")
        and torch.version.hip is None
    )
    multiple = ALIGNMENT // x.element_size()
    return is_supported and all(
        w.dtype == x.dtype and not (w.shape[1] % multiple or w.shape[2] % multiple) for w in weights
    )


def grouped_linear(x: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
    """Multiply each row of x by the transposed matrix of the row's group; return [rows, out].

    The rows of x [rows, in] are sorted by group, and `weight` [groups, out, in] contains the
    matrices. The result can be differentiated once with respect to x and weight.
    """
    if serves_groups(x, weight):
        return _GroupedLinear.apply(x, weight, groups)
    # The backward pass of `unbind` makes one stack of gradients; the backward pass of each
    # `weight[e]` would make a gradient as large as the whole weight.
    matrices = weight.unbind()
    outputs = [
        linear(part, matrices[e]) for e, part in enumerate(x.split(groups.sizes)) if len(part)
    ]
    # Multiply even without rows, so that this rank takes part in the backward pass's collectives.
    return torch.cat(outputs) if outputs else linear(x, matrices[0])


class _GroupedLinear(torch.autograd.Function):
    """Autograd function behind `grouped_linear`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.groups = groups
        return F.grouped_mm(x, weight.transpose(1, 2), offs=groups.ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad_out = gradients[0].contiguous()
        groups = ctx.groups
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = F.grouped_mm(grad_out, weight, offs=groups.ends)
        if ctx.needs_input_grad[1]:
            grad_weight = F.grouped_mm(grad_out.T, x, offs=groups.ends)
            # On some devices the kernel leaves the memory of a group without rows as it was
            # (pytorch issue 172439).
            grad_weight.masked_fill_((groups.counts == 0)[:, None, None], 0.0)
        return grad_x, grad_weight, None
