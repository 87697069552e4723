"""Activation functions, and a block's pointwise operations, each compiled into one GPU kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.kernels.types import Activation


def activate(x: Tensor, name: Activation) -> Tensor:
    """Apply the activation function `name` to every element of x."""
    match name:
        case "silu":
            return F.silu(x)
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "relu":
            return F.relu(x)


def compute_activation_gradient(grad_y: Tensor, x: Tensor, name: Activation) -> Tensor:
    """Return the gradient of `activate(x, name)` with respect to x.

    `grad_y` is the gradient with respect to the result of `activate`.
    """
    match name:
        case "silu":
            return torch.ops.aten.silu_backward(grad_y, x)
        case "gelu":
            return torch.ops.aten.gelu_backward(grad_y, x)
        case "gelu_tanh":
            return torch.ops.aten.gelu_backward(grad_y, x, approximate="tanh")
        case "relu":
            return torch.ops.aten.threshold_backward(grad_y, x, 0)


def _widen(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """Return x / rms * (offset + weight), and 1 / rms [..., 1], with rms = sqrt(mean(x^2) + eps)."""
    wide = _widen(x)
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * inverse * (_widen(weight) + offset)).to(x.dtype), inverse


def compute_rms_norm_gradients(
    x: Tensor,
    weight: Tensor,
    inverse: Tensor,
    grad_y: Tensor,
    offset: float,
    needs_x: bool,
    needs_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients dx and dweight of `rms_norm`, each None if not requested.

    With r = `inverse`, dy = `grad_y`, n = x r and g = dy (offset + weight), the gradients are dx =
    r (g - n mean(g n)) and dweight = sum of dy n.
    """
    grad = _widen(grad_y)
    normed = _widen(x) * inverse
    grad_x = grad_weight = None
    if needs_x:
        scaled = grad * (_widen(weight) + offset)
        grad_x = (inverse * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))).to(
            x.dtype
        )
    if needs_weight:
        grad_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
    return grad_x, grad_weight


def activated(gate_up: Tensor, gated: bool, activation: Activation) -> Tensor:
    """Return activation(gate_up), or activation(gate) * up if `gated`, [T, n].

    `gate_up` is [T, n]. If `gated`, it is [T, 2 n], and each row contains gate and up side by side.
    """
    wide = _widen(gate_up)
    if not gated:
        return activate(wide, activation).to(gate_up.dtype)
    gate, up = wide.chunk(2, dim=1)
    return (activate(gate, activation) * up).to(gate_up.dtype)


def compute_activated_gradients(
    grad_out: Tensor, gate_up: Tensor, gated: bool, activation: Activation, recompute: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradient with respect to `gate_up`, and the recomputed result of `activated`.

    `grad_out` is the gradient with respect to the result of `activated`. The recomputed result is
    None if `recompute` is False.
    """
    wide = _widen(gate_up)
    grad = _widen(grad_out)
    if not gated:
        value = activate(wide, activation)
        grad_gate_up = compute_activation_gradient(grad, wide, activation)
    else:
        gate, up = wide.chunk(2, dim=1)
        inner = activate(gate, activation)
        grad_gate_up = torch.cat(
            [compute_activation_gradient(grad * up, gate, activation), grad * inner], dim=1
        )
        value = inner * up
    return grad_gate_up.to(gate_up.dtype), value.to(gate_up.dtype) if recompute else None


def rotate(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """Return x [T, heads, dim] with the first `2 * cos.shape[-1]` dimensions of each head rotated.

    If `inverse` is True, the dimensions are rotated in the opposite direction.
    """
    half = cos.shape[-1]
    wide = _widen(x)
    first = wide[..., :half]
    second = wide[..., half : 2 * half]
    rest = wide[..., 2 * half :]
    cosine = _widen(cos)
    sine = -_widen(sin) if inverse else _widen(sin)
    rotated = [first * cosine - second * sine, second * cosine + first * sine]
    return torch.cat([*rotated, rest] if rest.shape[-1] else rotated, dim=-1).to(x.dtype)


def rotate_heads(heads: Tensor, count: int, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `heads` [T, n, dim] with the first `count` heads rotated as by `rotate`."""
    return torch.cat([rotate(heads[:, :count], cos, sin, False), heads[:, count:]], dim=1)


def compute_heads_gradient(
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """Return the gradient of `rotate_heads` with respect to `heads`.

    `grad_q` and `grad_k` are the gradients with respect to the rotated queries and keys, and
    `grad_v` is the gradient with respect to the values.
    """
    return torch.cat(
        [rotate(grad_q, cos, sin, True), rotate(grad_k, cos, sin, True), grad_v], dim=1
    )
