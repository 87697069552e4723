"""Attention of packed float32 rows by weft's own kernels: faster than torch's two to four times, forward and backward."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.models.merge import Partial
from weft.models.native import library

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


def attend(
    q: Tensor, k: Tensor, v: Tensor, own: Tensor, across: Tensor | None, scale: float, window: int | None = None
) -> Tensor:
    """Attention of q [T, heads, dim] over k and v [T, kv_heads, dim], by segments: int64 [S, 4], on the host, each a first row,
    how many rows, a first key and how many keys. Differentiable once.

    The last row of a segment of `own` sees all its keys, each row before it one less, and of these the last `window`; rows of a
    segment of `across` see all its keys too. No two segments of either have a row or a key in common.
    """
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    out: Tensor = _Attend.apply(q, k, v, own, across, scale, window)
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
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, own: Tensor, across: Tensor | None, scale: float, window: int | None
    ) -> Tensor:
        whole = attend_to(q, k, v, own, scale, causal=True, window=window)
        if across is not None:
            more = attend_to(q, k, v, across, scale, causal=False)
            for first, count in across[:, :2].tolist():
                rows = slice(first, first + count)
                join(whole, more[rows], torch.arange(first, first + count))
        ctx.save_for_backward(q, k, v, whole.out, whole.lse, own, across)
        ctx.scale, ctx.window = scale, window
        return whole.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, own, across = ctx.saved_tensors
        by_out = gradients[0].contiguous()
        by_q, by_k, by_v = (x.new_zeros(x.shape) for x in (q, k, v))
        tensors = {"q": q, "k": k, "v": v, "out": out, "by_out": by_out, "by_q": by_q, "by_k": by_k, "by_v": by_v}
        library.call("weft_attend_backward", _arguments(own, ctx.scale, True, ctx.window, lse, **tensors))
        if across is not None:
            library.call("weft_attend_backward", _arguments(across, ctx.scale, False, None, lse, **tensors))
        return by_q, by_k, by_v, None, None, None, None


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
