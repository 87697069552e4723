"""Attention of packed float32 rows by weft's own kernels: faster than torch's two to four times, forward and backward."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.models.merge import Partial
from weft.models.native import library, rows

MOST_DIM = 256  # of a head


class _Heads(ctypes.Structure):
    _fields_ = (("at", ctypes.c_void_p), ("by_row", ctypes.c_long), ("by_head", ctypes.c_long))

    @classmethod
    def of(cls, x: Tensor) -> _Heads:
        return cls(x.data_ptr(), x.stride(0), x.stride(1))


class _Arguments(ctypes.Structure):
    _fields_ = (
        *((name, _Heads) for name in ("q", "k", "v", "out", "by_out", "by_q", "by_k", "by_v")),
        *((name, ctypes.c_void_p) for name in ("lse", "segments")),
        *((name, ctypes.c_long) for name in ("count", "heads", "kv", "dim", "causal", "window", "threads")),
        ("scale", ctypes.c_double),
    )


def serves(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernels take queries, keys and values [T, heads, dim] like these."""
    alike = q.dtype == k.dtype == v.dtype and q.shape[2] == k.shape[2] == v.shape[2] <= MOST_DIM
    return alike and library.serves(q)


@dataclass(frozen=True)
class Seen:
    """Who sees what: segments of the pack, int64 [S, 4], on the host, each a first row, how many rows, a first key and how many
    keys.

    The last row of a segment of `own` sees all its keys, each row before it one less, and of these the last `window`; rows of a
    segment of `across` see all its keys too. No two segments of either have a row or a key in common.
    """

    own: Tensor
    across: Tensor | None = None
    window: int | None = None


def attend(heads: Tensor, kv: int, rotation: tuple[Tensor, Tensor] | None, seen: Seen, scale: float) -> Tensor:
    """Attention of a pack's queries over its keys and values, `heads` [T, queries + 2 kv, dim] in this order, with queries and
    keys turned by `rotation` first -> [T, queries, dim]. Differentiable once.
    """
    out: Tensor = _Attend.apply(heads, kv, rotation, seen, scale)
    return out


def attend_to(
    q: Tensor, k: Tensor, v: Tensor, segments: Tensor, scale: float, *, causal: bool, window: int | None = None
) -> Partial:
    """As `attend` with segments of one kind, without a gradient. k and v may be of any first two sizes whose steps are even:
    [..., kv_heads, keys, dim] of a cache, where a key's number counts rows of `dim` floats."""
    out = q.new_empty(q.shape)
    lse = q.new_empty(q.shape[:2])
    given = _arguments(segments, scale, causal, window, lse, q=q, k=k, v=v, out=out)
    library.call("weft_attend", given)
    return Partial(out, lse)


def join(whole: Partial, more: Partial, rows: Tensor) -> None:
    """Join what some rows, int64 [n], see of other keys, `more` of out [n, heads, dim], into what they have in `whole`."""
    count, heads, dim = more.out.shape
    numbers = (count, heads, dim, whole.out.stride(0))
    library.call("weft_join", whole.out, whole.lse, more.out, more.lse, rows, *numbers)


class _Attend(torch.autograd.Function):
    """Keeps the heads as they are after the rotation, and makes their gradients where they lie side by side."""

    @staticmethod
    def forward(
        ctx: Any, heads: Tensor, kv: int, rotation: tuple[Tensor, Tensor] | None, seen: Seen, scale: float
    ) -> Tensor:
        if rotation is None:
            heads = heads if heads.stride(2) == 1 else heads.contiguous()
        else:
            heads = rows.rotate(heads, *rotation, 1.0, turned=heads.shape[1] - kv)
        q, k, v = _parts(heads, kv)
        whole = attend_to(q, k, v, seen.own, scale, causal=True, window=seen.window)
        if seen.across is not None:
            more = attend_to(q, k, v, seen.across, scale, causal=False)
            for first, count in seen.across[:, :2].tolist():
                join(whole, more[slice(first, first + count)], torch.arange(first, first + count))
        ctx.save_for_backward(heads, whole.out, whole.lse, *(rotation or ()))
        ctx.kv, ctx.seen, ctx.scale = kv, seen, scale
        return whole.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        heads, out, lse, *rotation = ctx.saved_tensors
        by_heads, seen = heads.new_zeros(heads.shape), ctx.seen
        tensors = dict(zip(("q", "k", "v"), _parts(heads, ctx.kv), strict=True))
        tensors |= dict(zip(("by_q", "by_k", "by_v"), _parts(by_heads, ctx.kv), strict=True))
        tensors |= {"out": out, "by_out": gradients[0].contiguous()}
        library.call("weft_attend_backward", _arguments(seen.own, ctx.scale, True, seen.window, lse, **tensors))
        if seen.across is not None:
            library.call("weft_attend_backward", _arguments(seen.across, ctx.scale, False, None, lse, **tensors))
        if rotation:
            cos, sin = rotation
            rows.rotate_back(by_heads, cos, sin, heads.shape[1] - ctx.kv)
        return by_heads, None, None, None, None


def _parts(heads: Tensor, kv: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = heads.split([heads.shape[1] - 2 * kv, kv, kv], dim=1)
    return q, k, v


def _arguments(
    segments: Tensor, scale: float, causal: bool, window: int | None, lse: Tensor, **tensors: Tensor
) -> _Arguments:
    q, k = tensors["q"], tensors["k"]
    assert all(x.stride(2) == 1 and x.dtype == torch.float32 for x in tensors.values()) and segments.is_contiguous()
    return _Arguments(
        **{name: _Heads.of(x) for name, x in tensors.items()},
        lse=lse.data_ptr(), segments=segments.data_ptr(), count=len(segments), heads=q.shape[1], kv=k.shape[1],
        dim=q.shape[2], causal=int(causal), window=window or 0, threads=torch.get_num_threads(), scale=scale,
    )  # fmt: skip
