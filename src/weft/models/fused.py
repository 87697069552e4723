"""The parts of a block between its matrix products, as autograd functions that keep little for the backward pass.

RMS norm keeps its input and one number a token; the MLP's second half keeps what came out of its first matrices and computes
the activation again. What torch keeps for the same formulas is two to three times as much.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from weft.models.activations import activate, activation_gradient
from weft.models.config import Activation
from weft.models.native import library
from weft.models.native import rows as native
from weft.models.products import product


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dimension; statistics in float32.

    Zhang and Sennrich 2019, arXiv:1910.07467. Gemma's weights count from 1 (`offset` 1) and it rounds to `x`'s dtype after
    scaling; the others round before.
    """
    if not torch.is_grad_enabled():
        return _rms_norm(x, weight, eps, offset)[0]
    return _RMSNorm.apply(x, weight, eps, offset)


def _rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """(the result, what x is multiplied by before the weights [..., 1])."""
    if library.serves(x) and weight.dtype == x.dtype:
        return native.rms_norm(x, weight, eps, offset)
    wide, inverse = _normed(x, eps)
    return _scaled(wide, inverse, weight, offset, x.dtype), inverse


def _normed(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(float32 x, what it is multiplied by [..., 1])."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    squares = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
    return wide, squares.div_(x.shape[-1]).add_(eps).rsqrt_()


def _scaled(wide: Tensor, inverse: Tensor, weight: Tensor, offset: float, dtype: torch.dtype) -> Tensor:
    normed = wide * inverse
    if offset:
        return normed.mul_(weight.to(wide.dtype) + offset).to(dtype)
    return normed.to(dtype).mul_(weight)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        out, inverse = _rms_norm(x, weight, eps, offset)
        ctx.save_for_backward(x, weight, inverse)
        ctx.offset = offset
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """With n = x r, r = 1 / rms and g = dy (offset + weight): dx = r (g - n mean(g n)), dweight = sum of dy n."""
        x, weight, inverse = ctx.saved_tensors
        if library.serves(x) and weight.dtype == x.dtype:
            to_x, to_weight = ctx.needs_input_grad[:2]
            made = native.rms_norm_gradients(
                x, weight, inverse, gradients[0], ctx.offset, to_x=to_x, to_weight=to_weight
            )
            return *made, None, None
        wide, by_y = x.to(inverse.dtype), gradients[0].to(inverse.dtype)
        scale = weight.to(wide.dtype) + ctx.offset if ctx.offset else weight.to(wide.dtype)
        products = by_y * wide
        flat = products.flatten(0, -2)
        by_weight = None
        if ctx.needs_input_grad[1]:
            by_weight = (inverse.flatten() @ flat).to(weight.dtype)
        if not ctx.needs_input_grad[0]:
            return None, by_weight, None, None
        along = (flat @ scale).view_as(inverse)
        share = along * inverse.pow(3) / -x.shape[-1]
        by_x = torch.mul(by_y, scale, out=products).mul_(inverse).addcmul_(wide, share)
        return by_x.to(x.dtype), by_weight, None, None


def activated(joined: Tensor, gated: bool, activation: Activation) -> Tensor:
    """activation(joined), [T, n]; where it is `gated`, that of its first half, times its second."""
    if not torch.is_grad_enabled():
        return _activated(joined, gated, activation)
    return _Activated.apply(joined, gated, activation)


def activated_linear(joined: Tensor, gated: bool, down: nn.Linear, activation: Activation) -> Tensor:
    """down(activated(joined)), [T, n] -> [T, hidden]."""
    if not torch.is_grad_enabled():
        return product(_activated(joined, gated, activation), down.weight, down.bias)
    return _ActivatedLinear.apply(joined, gated, down.weight, down.bias, activation)


def _activated(joined: Tensor, gated: bool, activation: Activation) -> Tensor:
    if activation == "silu" and library.serves(joined):
        return native.silu(joined, gated)
    if not gated:
        return activate(joined, activation)
    opened, factor = joined.chunk(2, dim=1)
    return activate(opened, activation).mul_(factor)


def _by_joined(
    by_out: Tensor, joined: Tensor, gated: bool, activation: Activation, *, again: bool
) -> tuple[Tensor, Tensor | None]:
    """(the gradient of `activated` by `joined`, given the one by its result; that result, where it is wanted `again`)."""
    if activation == "silu" and library.serves(joined):
        return native.silu_gradients(joined, gated, by_out, again=again)
    if not gated:
        return activation_gradient(by_out, joined, activation), activate(joined, activation) if again else None
    opened, factor = joined.chunk(2, dim=1)
    by_joined, value = torch.empty_like(joined), activate(opened, activation)
    by_opened, by_factor = by_joined.chunk(2, dim=1)
    torch.mul(by_out, value, out=by_factor)
    by_opened.copy_(activation_gradient(by_out * factor, opened, activation))
    return by_joined, value.mul_(factor) if again else None


class _Activated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joined: Tensor, gated: bool, activation: Activation) -> Tensor:
        ctx.save_for_backward(joined)
        ctx.gated, ctx.activation = gated, activation
        return _activated(joined, gated, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (joined,) = ctx.saved_tensors
        return _by_joined(gradients[0], joined, ctx.gated, ctx.activation, again=False)[0], None, None


class _ActivatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, joined: Tensor, gated: bool, weight: Tensor, bias: Tensor | None, activation: Activation
    ) -> Tensor:
        ctx.save_for_backward(joined, weight)
        ctx.gated, ctx.activation = gated, activation
        return product(_activated(joined, gated, activation), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, Tensor | None, Tensor | None, None]:
        (joined, weight), by_y, needed = ctx.saved_tensors, gradients[0], ctx.needs_input_grad
        by_inner = product(by_y, weight.T)
        by_joined, inner = _by_joined(by_inner, joined, ctx.gated, ctx.activation, again=needed[2])
        by_weight = None if inner is None else product(by_y.T, inner.T)
        return by_joined, None, by_weight, by_y.sum(0) if needed[3] else None, None
