"""Operations between the matrix products of a block, each computed in one pass over memory."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.kernels.cpu import library


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """Return the RMS norm over the last dimension of x, and the inverse RMS [..., 1].

    The norm is x / rms * (offset + weight) with rms = sqrt(mean(x^2) + eps).
    """
    x = x.contiguous()
    weight = weight.contiguous()
    out = x.new_empty(x.shape)
    inverse = x.new_empty(*x.shape[:-1], 1)
    size = x.shape[-1]
    library.call(
        "weft_rms_norm", x, weight, out, inverse, inverse.numel(), size, float(eps), float(offset)
    )
    return out, inverse


def compute_rms_norm_gradients(
    x: Tensor,
    weight: Tensor,
    inverse: Tensor,
    grad_y: Tensor,
    offset: float,
    *,
    want_x: bool,
    want_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of `rms_norm` with respect to x and weight, each None if not requested.

    `inverse` is the second result of `rms_norm`, and `grad_y` is the gradient with respect to the
    first result.
    """
    x = x.contiguous()
    weight = weight.contiguous()
    grad_y = grad_y.contiguous()
    grad_x = torch.empty_like(x) if want_x else None
    grad_weight = torch.empty_like(weight) if want_weight else None
    sizes = inverse.numel(), x.shape[-1]
    library.call(
        "weft_rms_norm_backward",
        x,
        weight,
        inverse,
        grad_y,
        grad_x,
        grad_weight,
        *sizes,
        float(offset),
    )
    return grad_x, grad_weight


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, direction: float, *, rotated: int | None = None
) -> Tensor:
    """Return a contiguous copy of x [T, heads, dim] with the first `rotated` heads rotated.

    By default, all heads are rotated. Dimension i is rotated with dimension i + half, by the angles
    whose cosines and sines are `cos` and `sin` [T, 1, half]. `direction` is 1, or -1 for the
    opposite rotation.
    """
    x = x if x.stride(2) == 1 else x.contiguous()
    out = x.new_empty(x.shape)
    _rotate(x, cos, sin, out, x.shape[1] if rotated is None else rotated, direction)
    return out


def rotate_back(x: Tensor, cos: Tensor, sin: Tensor, rotated: int) -> None:
    """Undo `rotate` for the first `rotated` heads of x, in place; x must be contiguous."""
    assert x.is_contiguous()
    _rotate(x, cos, sin, x, rotated, -1.0)


def _rotate(
    x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, rotated: int, direction: float
) -> None:
    (tokens, heads, dim), half = x.shape, cos.shape[-1]
    angles = cos.contiguous(), sin.contiguous()
    library.call(
        "weft_rotate",
        x,
        *angles,
        out,
        *x.stride()[:2],
        tokens,
        heads,
        rotated,
        dim,
        half,
        direction,
    )


def compute_silu(gate_up: Tensor, gated: bool) -> Tensor:
    """Return silu(gate_up), or silu(gate) * up if `gated`, [T, n].

    `gate_up` is [T, n]. If `gated`, it is [T, 2 n], and each row contains gate and up side by side.
    """
    gate_up = gate_up.contiguous()
    gate, up, (rows, row_stride) = *_split_halves(gate_up, gated), gate_up.shape
    out = gate_up.new_empty(gate.shape)
    library.call("weft_silu", gate, up, out, row_stride, rows, gate.shape[1])
    return out


def compute_silu_gradients(
    gate_up: Tensor, gated: bool, grad_out: Tensor, *, again: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradient with respect to `gate_up`, and the recomputed result of `compute_silu`.

    `grad_out` is the gradient with respect to the result of `compute_silu`. The recomputed result
    is None if `again` is False.
    """
    gate_up = gate_up.contiguous()
    grad_out = grad_out.contiguous()
    grad_gate_up = torch.empty_like(gate_up)
    out = torch.empty_like(grad_out) if again else None
    (gate, up), (grad_gate, grad_up) = (
        _split_halves(gate_up, gated),
        _split_halves(grad_gate_up, gated),
    )
    sizes = gate_up.shape[1], *gate.shape
    library.call("weft_silu_backward", gate, up, grad_out, out, grad_gate, grad_up, *sizes)
    return grad_gate_up, out


def _split_halves(gate_up: Tensor, gated: bool) -> tuple[Tensor, Tensor | None]:
    if not gated:
        return gate_up, None
    gate, up = gate_up.chunk(2, dim=1)
    return gate, up


def store(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, places: Tensor) -> None:
    """Write k and v [T, heads, dim] into caches [slots, heads, room, dim].

    `places`, int64 [T], are the indices at which the first head of each token is written. An index
    counts rows of `dim` floats from the start of the cache.
    """
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    steps = (*k.stride()[:2], *v.stride()[:2])
    library.call("weft_store", k, v, keys, values, places, *steps, *k.shape, keys.shape[2])
