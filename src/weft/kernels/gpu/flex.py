"""FlexAttention (Dong et al. 2024, arXiv:2412.05496), for masks unsupported by flash attention.

Each query attends to two spans of keys: a causal span near the query, and a far span, which is a
shared prefix that the query sees as a whole. The blocks of the mask are computed from these spans,
without building the whole mask.

Only attention is compiled here. Compiling the other layers would take time at the start and gain
little, because they are a few large matrix products, and a decode step is one captured CUDA graph.
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

from weft.kernels.copy_queue import put
from weft.kernels.types import AttentionSpec

BLOCK = 128  # tokens of a mask block in training
MIN_DIM = 16  # smallest head size: the kernels' tiles have this many columns
RECOMPILE_LIMIT = 256  # most shapes of a function that are compiled; torch's default is 8

Modifier = Callable[..., Tensor]
# (prefix, continuation), each as (first token, exclusive end)
ContinuationSpans = tuple[tuple[int, int], tuple[int, int]]


def serves(device: torch.device, head_dim: int) -> bool:
    """Return whether a fused kernel supports this device and head size.

    On a CPU, the result is False: torch has a fused kernel only for the forward pass, and weft's
    own kernels are better.
    """
    return device.type == "cuda" and head_dim >= MIN_DIM and can_compile()


@functools.cache
def can_compile() -> bool:
    """Return whether Triton can compile kernels.

    This requires Triton, a C compiler and Python's headers, because Triton compiles a small C
    extension for each kernel.
    """
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
class KeySpans:
    """Spans of keys to which each query attends.

    Query t attends to each key k with `near[t] <= k <= t` or `far_start[t] <= k < far_stop[t]`. All
    fields are int32 [padded tokens].
    """

    near: Tensor
    far_start: Tensor
    far_stop: Tensor

    @classmethod
    def from_segments(
        cls,
        cu_seqlens: Tensor,
        continuations: Iterable[ContinuationSpans],
        length: int,
        window: int | None,
    ) -> KeySpans:
        """Return the spans of keys for a pack of `length` tokens.

        `cu_seqlens`, int32 [S + 1], are the boundaries of the pack's segments. A query attends to
        itself and to the earlier keys of its segment. With a `window`, it attends only to the last
        `window` of these keys. Each of the `continuations` is a pair of token ranges: a prefix, and
        the tokens that continue it, which also attend to the whole prefix. Padding tokens attend
        only to themselves.
        """
        padded_length = compute_padded_length(length)
        device = cu_seqlens.device
        query = torch.arange(padded_length, device=device, dtype=torch.int32)
        near = query.clone()
        near[:length] = cu_seqlens[:-1].repeat_interleave(
            cu_seqlens.diff().long(), output_size=length
        )
        if window is not None:
            near = torch.maximum(near, query - (window - 1))
        far_spans = np.zeros((2, padded_length), np.int32)
        for prefix, continuation in continuations:
            far_spans[:, slice(*continuation)] = np.array(prefix, np.int32)[:, None]
        start, stop = put(far_spans, device)
        return cls(near, start, stop)

    @property
    def mask_mod(self) -> Modifier:
        """Mask function for FlexAttention, which returns True where a query attends to a key."""
        near = self.near
        start = self.far_start
        stop = self.far_stop

        def is_visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            causal = (key >= near[query]) & (key <= query)
            return causal | ((key >= start[query]) & (key < stop[query]))

        return is_visible

    def find_blocks(self) -> tuple[Tensor, Tensor]:
        """Return two masks of block pairs, each bool [T / BLOCK, T / BLOCK]: query by key blocks.

        The first mask is True if any query of the query block attends to any key of the key block,
        and the second if every query attends to every key.
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
        # A block covered by the near and the far span together counts as partial, which is also
        # correct.
        every = ((near <= first) & (query >= last)) | ((start <= first) & (stop > last))
        shape = (length // BLOCK, BLOCK, length // BLOCK)
        return some.view(shape).any(1), every.view(shape).all(1)

    def build_mask(self) -> BlockMask:
        """Return the FlexAttention mask of the pack, for all heads."""
        some, every = self.find_blocks()
        partial = _list_blocks(some & ~every)
        full = _list_blocks(every)
        return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=BLOCK, mask_mod=self.mask_mod)


def _list_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of True blocks in each row, and the indices of the blocks, True ones first.

    `blocks` is bool [n, n]: one row per query block and one column per key block. The results are
    int32 [1, 1, n] and [1, 1, n, n].
    """
    order = torch.argsort(blocks.to(torch.int8), dim=1, descending=True, stable=True)
    counts = blocks.sum(1, dtype=torch.int32)
    return counts[None, None], order.to(torch.int32)[None, None].contiguous()


def compute_padded_length(length: int) -> int:
    """Return the number of tokens to which a pack is padded: a power of two.

    This limits the number of different sizes, each of which is compiled separately.
    """
    return max(BLOCK, round_to_power_of_two(length))


def attend_packed(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, spec: AttentionSpec) -> Tensor:
    """Return attention over a pack, [T, heads, dim], with a mask from `build_pack_mask`.

    q is [T, heads, dim]; k and v are [T, kv_heads, dim].
    """
    length = len(q)
    padding = compute_padded_length(length) - length
    q, k, v = (
        torch.nn.functional.pad(x, (0, 0, 0, 0, 0, padding)).transpose(0, 1)[None]
        for x in (q, k, v)
    )
    return attend(q, k, v, mask, spec)[0].transpose(0, 1)[:length]


def build_pack_mask(
    cu_seqlens: Tensor, continuations: Iterable[ContinuationSpans], length: int, window: int | None
) -> BlockMask:
    """Return the FlexAttention mask of a pack.

    The arguments are the same as those of `KeySpans.from_segments`.
    """
    return KeySpans.from_segments(cu_seqlens, continuations, length, window).build_mask()


def attend_paged(
    q: Tensor, keys: Tensor, values: Tensor, mask: BlockMask, spec: AttentionSpec
) -> Tensor:
    """Return the attention of one new token per row over the row's pages, [R, heads, dim].

    q is [R, heads, dim]; keys and values are [pages, page size, kv_heads, dim]. `mask` is the
    result of `build_page_mask`. The kernel requires that the number of query heads per key head is
    a power of two. If it is not, heads of zeros are added, and their results are dropped.
    """
    rows, (kv_heads, dim) = len(q), keys.shape[2:]
    groups = q.reshape(rows, kv_heads, -1, dim)
    size = groups.shape[2]
    padded = torch.nn.functional.pad(groups, (0, 0, 0, round_to_power_of_two(size) - size))
    # Pass all pages; the mask selects the pages of each row.
    k, v = (x.flatten(0, 1).transpose(0, 1)[None] for x in (keys, values))
    out = attend(padded.flatten(1, 2)[:, :, None], k, v, mask, spec)[:, :, 0]
    return out.reshape(rows, kv_heads, -1, dim)[:, :, :size].flatten(1, 2)


def round_to_power_of_two(least: int) -> int:
    """Return the smallest power of two that is at least `least`."""
    return 1 << (least - 1).bit_length()


def build_page_mask(
    table: Tensor, used: Tensor, size: tuple[int, int], window: int | None
) -> BlockMask:
    """Return the mask for one query per row, which attends to the keys in the row's pages.

    `used`, int32 [R], is the number of tokens of each row. `table`, int32 [R, W], lists the pages
    that contain these tokens. The query attends to all tokens of its row, or only to the last
    `window` of them. `size` is a pair: the number of pages, which is at least W, and the number of
    tokens per page.
    """
    (rows, width), (num_pages, page) = table.shape, size
    order = torch.arange(width, device=table.device, dtype=torch.int32).expand(rows, width)
    # Index of each page in the row's table, or `width` if the row does not have the page. If a page
    # is repeated, use its first index: tables are padded with one repeated page, which is the first
    # page of padding rows only.
    table_indices = torch.full((rows, num_pages), width, device=table.device, dtype=torch.int32)
    table_indices = table_indices.scatter_reduce(1, table.long(), order, "amin")
    last_position = used - 1

    def is_visible(row: Tensor, _head: Tensor, _query: Tensor, key: Tensor) -> Tensor:
        position = table_indices[row, key // page] * page + key % page
        is_seen = position <= last_position[row]
        return is_seen if window is None else is_seen & (position > last_position[row] - window)

    count = ((used + (page - 1)) // page).to(torch.int32)[:, None, None]
    page_lists = torch.nn.functional.pad(table, (0, num_pages - width))[:, None, None]
    lengths = (1, num_pages * page)
    return BlockMask.from_kv_blocks(
        count,
        page_lists,
        BLOCK_SIZE=(BLOCK, page),
        mask_mod=is_visible,
        seq_lengths=lengths,
        compute_q_blocks=False,
    )


def attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, spec: AttentionSpec) -> Tensor:
    """Return attention of q [B, heads, T, dim] over k and v [B or 1, kv_heads, U, dim]."""
    options: dict[str, Any] = {
        "scale": 1.0,
        "block_mask": mask,
        "enable_gqa": q.shape[1] != k.shape[1],
    }
    scale = torch.full(
        (), spec.scale, device=q.device, dtype=torch.promote_types(q.dtype, torch.float32)
    )
    options["score_mod"] = _build_score_mod(scale, spec.softcap)
    if _is_unfused(q.device):
        return flex_attention(q, k, v, **options)
    with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
        return _compile()(q, k, v, **options)


def _is_unfused(device: torch.device) -> bool:
    return device.type == "cpu"


@functools.cache
def _compile() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def _build_score_mod(scale: Tensor, softcap: float | None) -> Modifier:
    """Return the function that scales attention scores and applies the soft cap.

    The scale is a tensor, so layers that differ only in the scale share compiled code.
    """

    if softcap is None:
        return lambda score, *_: score * scale
    return lambda score, *_: torch.tanh(score * scale / softcap) * softcap
