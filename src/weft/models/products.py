"""Matrix products by the fastest kernel at hand.

On a CPU torch multiplies float32 matrices with MKL, which leaves the wide vector units of AMD's processors idle; oneDNN, which
torch carries too, uses them (twice the rate with AVX-512), and weft's own kernel is the faster one for few rows. All give a row
the same bits whatever rows stand beside it, but for passes of very few rows by torch's, which take other kernels; those are
filled up.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.models.native import product as native

_KERNELS: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None
ONEDNN: Any = None if _KERNELS is None else _KERNELS.default
LEAST_ROWS = 4  # of a product on a CPU
CELLS = 1 << 19  # of a part that is added to a sum: 2 MB, which a core's cache holds


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in] times weight [out, in] transposed, plus bias [out] -> [..., out]; differentiable in all three, once."""
    if not torch.is_grad_enabled():
        return product(x, weight, bias)
    return _Linear.apply(x, weight, bias) if _by_onednn(x, weight) else F.linear(x, weight, bias)


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """left [..., n] times right [m, n] transposed, plus bias [m] -> [..., m], without a gradient; both may be views that are
    transposed."""
    if native.serves(left, right):
        return native.product(left, right, bias)
    if left.is_cpu and left.dim() == 2 and 0 < left.shape[0] < LEAST_ROWS:
        return product(F.pad(left, (0, 0, 0, LEAST_ROWS - left.shape[0])), right, bias)[: left.shape[0]]
    if not _by_onednn(left, right):
        return F.linear(left, right, bias)
    whole = None if bias is None else bias.to(right.dtype).contiguous()
    out: Tensor = ONEDNN(left, right, whole, "none", [], "")
    return out


def weight_gradient(by_out: Tensor, x: Tensor) -> Tensor:
    """by_out [T, out] transposed times x [T, in] -> [out, in]: the gradient of a weight matrix."""
    return native.weight_gradient(by_out, x) if native.serves_gradient(by_out, x) else product(by_out.T, x.T)


def add_weight_gradient(total: Tensor, by_out: Tensor, x: Tensor) -> None:
    """total [out, in] += by_out [T, out] transposed times x [T, in], summed in the dtype of `total`."""
    if total.dtype == x.dtype and native.serves_gradient(by_out, x):
        native.weight_gradient(by_out, x, total)
        return
    if total.dtype == x.dtype and not _by_onednn(by_out, x):
        total.addmm_(by_out.T, x)
        return
    size = max(LEAST_ROWS, CELLS // total.shape[1])
    for part, columns in zip(total.split(size), by_out.split(size, dim=1), strict=True):
        part += product(columns.T, x.T)


def _by_onednn(left: Tensor, right: Tensor) -> bool:
    return ONEDNN is not None and left.is_cpu and left.dtype == right.dtype == torch.float32 and left.numel() > 0


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        by_out = gradients[0].reshape(-1, gradients[0].shape[-1])
        to_x = product(by_out, weight.T).view_as(x) if ctx.needs_input_grad[0] else None
        to_weight = weight_gradient(by_out, x.reshape(-1, x.shape[-1])) if ctx.needs_input_grad[1] else None
        return to_x, to_weight, by_out.sum(0) if ctx.needs_input_grad[2] else None
