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
from weft.models.products import product, weight_gradient


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


def activated(opened: Tensor, factor: Tensor | None, activation: Activation) -> Tensor:
    """activation(opened) * factor, [T, inner]; without `factor` activation(opened)."""
    if not torch.is_grad_enabled():
        return _activated(opened, factor, activation)
    return _Activated.apply(opened, factor, activation)


def activated_linear(opened: Tensor, factor: Tensor | None, down: nn.Linear, activation: Activation) -> Tensor:
    """down(activation(opened) * factor), [T, inner] -> [T, hidden]; without `factor` down(activation(opened))."""
    if not torch.is_grad_enabled():
        return _activated_product(opened, factor, down.weight, down.bias, activation)
    return _ActivatedLinear.apply(opened, factor, down.weight, down.bias, activation)


def _activated_product(
    opened: Tensor, factor: Tensor | None, weight: Tensor, bias: Tensor | None, activation: Activation
) -> Tensor:
    return product(_activated(opened, factor, activation), weight, bias)


def _activated(opened: Tensor, factor: Tensor | None, activation: Activation) -> Tensor:
    if activation == "silu" and library.serves(opened) and opened.dim() == 2:
        return native.silu(opened, factor)
    inner = activate(opened, activation)
    return inner if factor is None else inner.mul_(factor)


def _by_activated(
    by_inner: Tensor, opened: Tensor, factor: Tensor | None, activation: Activation, value: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The gradients of `activated` by `opened` and `factor`, given the one by its result, which is used up; and so is `value`,
    activation(opened), where it is at hand."""
    by_factor = None
    if factor is not None:
        by_factor = (activate(opened, activation) if value is None else value).mul_(by_inner)
        by_inner = by_inner.mul_(factor)
    return activation_gradient(by_inner, opened, activation), by_factor


class _Activated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, opened: Tensor, factor: Tensor | None, activation: Activation) -> Tensor:
        ctx.save_for_backward(opened, factor)
        ctx.activation = activation
        return _activated(opened, factor, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        opened, factor = ctx.saved_tensors
        return *_by_activated(gradients[0].clone(), opened, factor, ctx.activation), None


class _ActivatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, opened: Tensor, factor: Tensor | None, weight: Tensor, bias: Tensor | None, activation: Activation
    ) -> Tensor:
        ctx.save_for_backward(opened, factor, weight)
        ctx.activation = activation
        return _activated_product(opened, factor, weight, bias, activation)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, None]:
        (opened, factor, weight), by_y = ctx.saved_tensors, gradients[0]
        value = activate(opened, ctx.activation)
        by_weight = None
        if ctx.needs_input_grad[2]:
            inner = value if factor is None else value * factor
            by_weight = weight_gradient(by_y, inner)
            del inner
        by_bias = by_y.sum(0) if ctx.needs_input_grad[3] else None
        by_opened, by_factor = _by_activated(product(by_y, weight.T), opened, factor, ctx.activation, value)
        return by_opened, by_factor, by_weight, by_bias, None
