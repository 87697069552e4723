"""What a block does between its products, by weft's own kernels: one pass over memory each. No gradients."""

from __future__ import annotations

from torch import Tensor

from weft.models.native import library


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """(x / sqrt(mean(x^2) + eps) * (offset + weight), 1 / sqrt(...) [..., 1]) over the last dimension of x."""
    x = x.contiguous()
    out, inverse = x.new_empty(x.shape), x.new_empty(*x.shape[:-1], 1)
    size = x.shape[-1]
    library.call("weft_rms_norm", x, weight, out, inverse, inverse.numel(), size, float(eps), float(offset))
    return out, inverse


def rotate(x: Tensor, cos: Tensor, sin: Tensor, direction: float) -> Tensor:
    """x [T, heads, dim] with dimensions i and i + half turned by the angles of cos and sin [T, 1, half], contiguous."""
    x = x if x.stride(2) == 1 else x.contiguous()
    cos, sin, out = cos.contiguous(), sin.contiguous(), x.new_empty(x.shape)
    library.call("weft_rotate", x, cos, sin, out, *x.stride()[:2], *x.shape, cos.shape[-1], direction)
    return out


def silu(opened: Tensor, factor: Tensor | None) -> Tensor:
    """silu(opened) * factor, [T, n], or silu(opened) where there is no factor; the two may be views of one tensor."""
    if opened.stride(1) != 1 or (factor is not None and factor.stride() != opened.stride()):
        opened, factor = opened.contiguous(), None if factor is None else factor.contiguous()
    out = opened.new_empty(opened.shape)
    library.call("weft_silu", opened, factor, out, opened.stride(0), *opened.shape)
    return out


def store(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, places: Tensor) -> None:
    """Put k and v [T, heads, dim] into caches [slots, heads, room, dim]; `places` int64 [T] are rows of a slot's first head,
    counted from the cache's beginning."""
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    steps = (*k.stride()[:2], *v.stride()[:2])
    library.call("weft_store", k, v, keys, values, places, *steps, *k.shape, keys.shape[2])
