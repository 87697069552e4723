"""Matrix products by the fastest available kernel.

On a CPU, float32 products use weft's own kernels, which reach more than four fifths of the
processor's peak rate in training. Without a compiler to build these, torch's oneDNN kernels are
used, because torch's default, MKL, does not use the wide vector units of AMD's processors.

The result of a row has the same bits regardless of the other rows. For products of very few rows,
torch uses other kernels, whose results would differ, so the inputs of such products are padded.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from weft.kernels.cpu import rows as native
from weft.kernels.cpu.library import is_plain, serves

if torch.backends.mkldnn.is_available():
    _KERNELS: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
else:
    _KERNELS = None
ONEDNN: Any = None if _KERNELS is None else _KERNELS.default
LEAST_ROWS = 4  # rows to which products by torch's CPU kernels are padded
CELLS = 1 << 24  # limit on the size of temporary copies and products
HALF = (torch.bfloat16, torch.float16)
# Devices with half-precision products whose result is float32; meta tensors are treated alike.
WIDE = ("cuda", "meta")


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

    def take(self, total: Tensor) -> None:
        """Add `total`, a float32 gradient, to the sum.

        `total` may become the stored sum itself, so the caller must not write to it later.
        """
        if self._parameter.grad is None:
            self._parameter.grad = total
        else:
            self._parameter.grad = self._parameter.grad.add_(total)


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
    own = (
        gradient_sum is not None or native.serves(x, weight, bias) or _uses_onednn(x, weight, bias)
    )
    if own:
        return _LinearFunction.apply(x, weight, bias, gradient_sum)
    return F.linear(x, weight, bias)


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return left [..., n] times the transpose of right [m, n], plus `bias` [m] if it is given.

    The result is [..., m] and is not differentiable. Both matrices can be transposed views.
    """
    if native.serves(left, right, bias):
        return native.product(left, right, bias)
    if left.is_cpu and left.dim() == 2 and 0 < left.shape[0] < LEAST_ROWS:
        return product(F.pad(left, (0, 0, 0, LEAST_ROWS - left.shape[0])), right, bias)[
            : left.shape[0]
        ]
    if not _uses_onednn(left, right, bias):
        return F.linear(left, right, bias)
    whole = None if bias is None else bias.to(right.dtype).contiguous()
    out: Tensor = ONEDNN(left, right, whole, "none", [], "")
    return out


def prepare_wide(right: Tensor) -> Tensor | None:
    """Return the float32 copy of `right` that each call of `wide_product` would otherwise make.

    Returns None if `wide_product` needs no copy. Making the copy once saves time if the matrix is
    used many times.
    """
    if right.dtype in HALF and right.device.type not in WIDE:
        return right.detach().float()
    return None


def wide_product(
    left: Tensor, right: Tensor, bias: Tensor | None = None, wide_right: Tensor | None = None
) -> Tensor:
    """Return the same as `product`, but in float32 if both matrices have half precision.

    left is [n, k], and right is [m, k]. A float32 result keeps the sums from being rounded to half
    precision. `wide_right` is the result of `prepare_wide(right)`.
    """
    if left.dtype not in HALF or right.dtype not in HALF:
        return product(left, right, bias)
    if left.device.type in WIDE:
        output = torch.mm(left, right.T, out_dtype=torch.float32)
        return output if bias is None else output.add_(bias)
    output = left.new_empty(left.shape[0], right.shape[0], dtype=torch.float32)
    wide = left.float()
    size = max(1, CELLS // max(1, right.shape[1]))
    for first in range(0, right.shape[0], size):  # a copy of a whole large matrix would not fit
        part = slice(first, first + size)
        own = _widen(right, part) if wide_right is None else wide_right[part]
        output[:, part] = product(wide, own, None if bias is None else bias[part].float())
    return output


def _widen(right: Tensor, rows: slice) -> Tensor:
    return right[rows].float()


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the product of left [rows, n] and the transpose of right [m, n] to total [rows, m].

    `total` must be contiguous. The sums are computed in the dtype of `total`.
    """
    if native.serves(left, right) and serves(total):
        native.add_product(total, left, right)
    elif total.dtype == torch.float32 and left.dtype in HALF and left.device.type in WIDE:
        torch.addmm(total, left, right.T, out_dtype=torch.float32, out=total)
    elif total.dtype == left.dtype and not _uses_onednn(left, right):
        total.addmm_(left, right.T)
    else:
        size = max(LEAST_ROWS, CELLS // total.shape[1])
        for part, rows in zip(total.split(size), left.split(size), strict=True):
            part += product(rows, right)


def _uses_onednn(left: Tensor, right: Tensor, bias: Tensor | None = None) -> bool:
    plain = (
        ONEDNN is not None
        and is_plain(left)
        and is_plain(right)
        and (bias is None or is_plain(bias))
    )
    return plain and left.dtype == right.dtype == torch.float32 and left.numel() > 0


class _LinearFunction(torch.autograd.Function):
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
