"""FlexAttention (Dong et al. 2024, arXiv:2412.05496): one fused kernel for what flash attention has
no form of.

Who sees whom is given as two spans of keys a query, the near one causal and the far one (a shared
prefix) whole. The mask's blocks follow from the spans without laying out the mask. It is the one
place where weft compiles: other layers are a few large matrix products, and a decode step is one
captured graph, so compiling them costs start-up time and gains little.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from weft.kernels.transfer import put
from weft.kernels.types import AttentionSpec

BLOCK = 128  # tokens of a mask block in training
LEAST_DIM = 16  # of a head: the kernels multiply tiles of so many columns
RECOMPILE_LIMIT = 256  # shapes a process may meet; torch's own limit is 8, past which it would stop

Mod = Callable[..., Tensor]
Join = tuple[
    tuple[int, int], tuple[int, int]
]  # a prefix and what goes on from it, each as (first token, one past the last)


def serves(device: torch.device, head_dim: int) -> bool:
    """Whether there is a fused kernel.

    A CPU has one for the forward pass alone, and weft has better there.
    """
    return device.type == "cuda" and head_dim >= LEAST_DIM and _compiles()


@functools.cache
def _compiles() -> bool:
    """Whether the kernels can be made here: Triton builds a small C extension for each."""
    compiler = (
        os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
    )
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return (
        compiler is not None
        and headers.is_file()
        and importlib.util.find_spec("triton") is not None
    )


@dataclass(frozen=True)
class Spans:
    """Query t sees the keys `near[t]` to t, and `far_start[t]` to `far_stop[t]` (not included);
    each int32 [whole blocks].
    """

    near: Tensor
    far_start: Tensor
    far_stop: Tensor

    @classmethod
    def of(
        cls, cu_seqlens: Tensor, joins: Iterable[Join], length: int, window: int | None
    ) -> Spans:
        """Those of a pack of `length` tokens, filled up with tokens that see themselves;
        `cu_seqlens` int32 [S + 1] bound its segments, and each of `joins` says which tokens go on
        from which.
        """
        whole = padded(length)
        device = cu_seqlens.device
        own = torch.arange(whole, device=device, dtype=torch.int32)
        near = own.clone()
        near[:length] = cu_seqlens[:-1].repeat_interleave(
            cu_seqlens.diff().long(), output_size=length
        )
        if window is not None:
            near = torch.maximum(near, own - (window - 1))
        far = np.zeros((2, whole), np.int32)
        for prefix, rest in joins:
            far[:, slice(*rest)] = np.array(prefix, np.int32)[:, None]
        start, stop = put(far, device)
        return cls(near, start, stop)

    @property
    def mask_mod(self) -> Mod:
        """bool: whether `query` sees `key`, as FlexAttention asks."""
        near = self.near
        start = self.far_start
        stop = self.far_stop

        def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            causal = (key >= near[query]) & (key <= query)
            return causal | ((key >= start[query]) & (key < stop[query]))

        return visible

    def blocks(self) -> tuple[Tensor, Tensor]:
        """bool [T / BLOCK, T / BLOCK], query blocks by key blocks: (some query sees some key, every
        query sees every key).
        """
        length = len(self.near)
        device = self.near.device
        first = torch.arange(0, length, BLOCK, device=device)
        last = first + BLOCK - 1
        query = torch.arange(length, device=device)[:, None]
        near = self.near[:, None]
        start = self.far_start[:, None]
        stop = self.far_stop[:, None]
        some = ((near <= last) & (query >= first)) | (
            (start <= last) & (stop > first) & (start < stop)
        )
        # A block that lies partly in the near span and for the rest in the far one is taken as
        # partial, which is also right.
        every = ((near <= first) & (query >= last)) | ((start <= first) & (stop > last))
        shape = (length // BLOCK, BLOCK, length // BLOCK)
        return some.view(shape).any(1), every.view(shape).all(1)

    def mask(self) -> BlockMask:
        """The mask of one pack for all heads."""
        some, every = self.blocks()
        partial = _listed(some & ~every)
        full = _listed(every)
        return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=BLOCK, mask_mod=self.mask_mod)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """(how many, which ones first) of each row: int32 [1, 1, n] and [1, 1, n, n]."""
    order = torch.argsort(blocks.to(torch.int8), dim=1, descending=True, stable=True)
    return blocks.sum(1, dtype=torch.int32)[None, None], order.to(torch.int32)[
        None, None
    ].contiguous()


def padded(length: int) -> int:
    """Tokens of the pack that the kernel is given: each new size is compiled anew, so sizes are
    powers of two.
    """
    return max(BLOCK, _power_of_two(length))


def packed(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, spec: AttentionSpec) -> Tensor:
    """q [T, heads, dim], k and v [T, kv_heads, dim] -> [T, heads, dim], by the mask of `pack_mask`."""
    length = len(q)
    tail = padded(len(q)) - len(q)
    q, k, v = (
        torch.nn.functional.pad(x, (0, 0, 0, 0, 0, tail)).transpose(0, 1)[None] for x in (q, k, v)
    )
    return attention(q, k, v, mask, spec)[0].transpose(0, 1)[:length]


def pack_mask(
    cu_seqlens: Tensor, joins: Iterable[Join], length: int, window: int | None
) -> BlockMask:
    """The mask of a pack, as `Spans.of` is told it."""
    return Spans.of(cu_seqlens, joins, length, window).mask()


def paged(q: Tensor, keys: Tensor, values: Tensor, mask: BlockMask, spec: AttentionSpec) -> Tensor:
    """One new token a row over its pages: q [R, heads, dim], keys and values [pages, page,
    kv_heads, dim]; as q. By the mask of `page_mask`. The kernel for few queries takes groups of 1,
    2, 4, ... query heads, so others are filled up with heads of zeros, which nobody reads.
    """
    rows, (kv_heads, dim) = len(q), keys.shape[2:]
    groups = q.reshape(rows, kv_heads, -1, dim)
    size = groups.shape[2]
    filled = torch.nn.functional.pad(groups, (0, 0, 0, _power_of_two(size) - size))
    # all pages, of which each row reads its own
    k, v = (x.flatten(0, 1).transpose(0, 1)[None] for x in (keys, values))
    out = attention(filled.flatten(1, 2)[:, :, None], k, v, mask, spec)[:, :, 0]
    return out.reshape(rows, kv_heads, -1, dim)[:, :, :size].flatten(1, 2)


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def page_mask(table: Tensor, used: Tensor, size: tuple[int, int], window: int | None) -> BlockMask:
    """Row r of one query each sees its `used[r]` tokens (int32 [R]), of these the last `window`.

    They lie in the pages `table[r]` (int32 [R, W]) of `size` (number of pages, at least W; tokens
    of a page).
    """
    (rows, width), (num_pages, page) = table.shape, size
    order = torch.arange(width, device=table.device, dtype=torch.int32).expand(rows, width)
    # For each page its place in the row; past the row's end where it is not the row's. The smallest
    # counts: what stands in the table after the row's own pages is one page over and over, which no
    # row but those that fill a step up begins with.
    places = torch.full((rows, num_pages), width, device=table.device, dtype=torch.int32)
    places = places.scatter_reduce(1, table.long(), order, "amin")
    newest = used - 1

    def visible(row: Tensor, _head: Tensor, _query: Tensor, key: Tensor) -> Tensor:
        position = places[row, key // page] * page + key % page
        seen = position <= newest[row]
        return seen if window is None else seen & (position > newest[row] - window)

    count = ((used + (page - 1)) // page).to(torch.int32)[:, None, None]
    listed = torch.nn.functional.pad(table, (0, num_pages - width))[:, None, None]
    lengths = (1, num_pages * page)
    return BlockMask.from_kv_blocks(
        count,
        listed,
        BLOCK_SIZE=(BLOCK, page),
        mask_mod=visible,
        seq_lengths=lengths,
        compute_q_blocks=False,
    )


def attention(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, spec: AttentionSpec) -> Tensor:
    """q [B, heads, T, dim], k and v [B or 1, kv_heads, U, dim] -> [B, heads, T, dim]."""
    settings: dict[str, Any] = {
        "scale": 1.0,
        "block_mask": mask,
        "enable_gqa": q.shape[1] != k.shape[1],
    }
    scale = torch.full(
        (), spec.scale, device=q.device, dtype=torch.promote_types(q.dtype, torch.float32)
    )
    settings["score_mod"] = _scored(scale, spec.softcap)
    if _runs_unfused(q.device):
        return flex_attention(q, k, v, **settings)
    with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
        return _compiled()(q, k, v, **settings)


def _runs_unfused(device: torch.device) -> bool:
    return device.type == "cpu"


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def _scored(scale: Tensor, softcap: float | None) -> Mod:
    """The scale is a tensor, so that layers which differ in it share what is compiled."""

    if softcap is None:
        return lambda score, *_: score * scale
    return lambda score, *_: torch.tanh(score * scale / softcap) * softcap
