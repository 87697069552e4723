"""Matrix products by the fastest kernel at hand.

On a CPU torch multiplies float32 matrices with MKL, which leaves the wide vector units of AMD's processors idle; oneDNN, which
torch carries too, uses them (twice the rate with AVX-512). In both libraries a row's result has the same bits whatever rows
stand beside it, from three rows on.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in] times weight [out, in] transposed, plus bias [out] -> [..., out]; differentiable in all three."""
    if not _by_onednn(x, weight):
        return F.linear(x, weight, bias)
    if not torch.is_grad_enabled():
        return product(x, weight, bias)
    return _Linear.apply(x, weight, bias)


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """left [..., n] times right [m, n] transposed, plus bias [m] -> [..., m], without a gradient; both may be views that are
    transposed."""
    if not _by_onednn(left, right):
        return F.linear(left, right, bias)
    out: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return out


def _by_onednn(left: Tensor, right: Tensor) -> bool:
    on_cpu = left.device.type == "cpu" and left.dtype == right.dtype == torch.float32
    return HAS_ONEDNN and on_cpu and left.numel() > 0


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        return gradients_of(gradients[0], x, weight, ctx.needs_input_grad)


def gradients_of(
    by_out: Tensor, x: Tensor, weight: Tensor, needed: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of a linear layer's input, weight and bias, those that are `needed`, from that of its output."""
    flat = by_out.flatten(0, -2)
    to_x = product(by_out, weight.T) if needed[0] else None
    to_weight = product(flat.T, x.flatten(0, -2).T) if needed[1] else None
    return to_x, to_weight, flat.sum(0) if needed[2] else None
