"""What a block does between its products, by weft's own kernels: one pass over memory each."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.models.native import library


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """(x / sqrt(mean(x^2) + eps) * (offset + weight), 1 / sqrt(...) [..., 1]) over the last dimension of x."""
    x = x.contiguous()
    out, inverse = x.new_empty(x.shape), x.new_empty(*x.shape[:-1], 1)
    size = x.shape[-1]
    library.call("weft_rms_norm", x, weight, out, inverse, inverse.numel(), size, float(eps), float(offset))
    return out, inverse


def rms_norm_gradients(
    x: Tensor, weight: Tensor, inverse: Tensor, by_y: Tensor, offset: float, *, to_x: bool, to_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Those by x and by weight, where they are wanted, given the one by the result of `rms_norm` and its second result."""
    x, by_y = x.contiguous(), by_y.contiguous()
    by_x, by_weight = torch.empty_like(x) if to_x else None, torch.empty_like(weight) if to_weight else None
    sizes = inverse.numel(), x.shape[-1]
    library.call("weft_rms_norm_backward", x, weight, inverse, by_y, by_x, by_weight, *sizes, float(offset))
    return by_x, by_weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor, direction: float, *, turned: int | None = None) -> Tensor:
    """x [T, heads, dim] with dimensions i and i + half of the first `turned` heads, or of all, turned by the angles of cos and
    sin [T, 1, half], contiguous."""
    x = x if x.stride(2) == 1 else x.contiguous()
    out = x.new_empty(x.shape)
    _rotate(x, cos, sin, out, x.shape[1] if turned is None else turned, direction)
    return out


def rotate_back(x: Tensor, cos: Tensor, sin: Tensor, turned: int) -> None:
    """Undo `rotate` in the place of x, contiguous."""
    assert x.is_contiguous()
    _rotate(x, cos, sin, x, turned, -1.0)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, turned: int, direction: float) -> None:
    (tokens, heads, dim), half = x.shape, cos.shape[-1]
    angles = cos.contiguous(), sin.contiguous()
    library.call("weft_rotate", x, *angles, out, *x.stride()[:2], tokens, heads, turned, dim, half, direction)


def silu(joined: Tensor, gated: bool) -> Tensor:
    """silu of joined [T, n]; where it is `gated`, of its first half, times its second."""
    joined = joined.contiguous()
    opened, factor, (rows, by_row) = *_halves(joined, gated), joined.shape
    out = joined.new_empty(opened.shape)
    library.call("weft_silu", opened, factor, out, by_row, rows, opened.shape[1])
    return out


def silu_gradients(joined: Tensor, gated: bool, by_out: Tensor, *, again: bool) -> tuple[Tensor, Tensor | None]:
    """(the gradient by `joined`, given the one by what `silu` made of it; that once more, where it is wanted `again`)."""
    joined, by_out = joined.contiguous(), by_out.contiguous()
    by_joined, out = torch.empty_like(joined), torch.empty_like(by_out) if again else None
    (opened, factor), (by_opened, by_factor) = _halves(joined, gated), _halves(by_joined, gated)
    sizes = joined.shape[1], *opened.shape
    library.call("weft_silu_backward", opened, factor, by_out, out, by_opened, by_factor, *sizes)
    return by_joined, out


def _halves(joined: Tensor, gated: bool) -> tuple[Tensor, Tensor | None]:
    if not gated:
        return joined, None
    opened, factor = joined.chunk(2, dim=1)
    return opened, factor


def store(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, places: Tensor) -> None:
    """Put k and v [T, heads, dim] into caches [slots, heads, room, dim]; `places` int64 [T] are rows of a slot's first head,
    counted from the cache's beginning."""
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    steps = (*k.stride()[:2], *v.stride()[:2])
    library.call("weft_store", k, v, keys, values, places, *steps, *k.shape, keys.shape[2])
