"""Attention: one function, few kernels. No position attends across a sequence boundary.

Training and prefill lay the pack's sequences out as rectangles of like length (`Dense.buckets`) with padding after each
sequence: causal attention never looks there, so the fast causal kernel is exact without a mask. Soft-capping has no fused
kernel on CPU and takes the written-out form. A decode step is one masked rectangle over the cache.

On a CPU a row's result has the same bits in training and in decoding, whatever stands beside it: keys are padded to whole
vectors and a head has a few query rows at least, so every row is added up in the same order. What the sampler reports as a
log-prob is then what training computes (given that matrix products too have rows enough; see `engine/generation`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.models.dropout import TokenNoise
from weft.models.packed import AttentionContext, Bucket, Cached, Dense, in_vectors

LEAST_QUERIES = 4  # a CPU multiplies fewer rows by another kernel, which adds up in another order

Drop = Callable[[Bucket, Tensor], Tensor]


@dataclass(frozen=True)
class Scores:
    """How q k^T becomes attention weights."""

    scale: float
    window: int | None = None  # keys a position sees, itself included
    softcap: float | None = None
    dropout: float = 0.0  # of the weights, where a pass has noise


def attend(
    q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, scores: Scores, layer: int,
    noise: TokenNoise | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention within each sequence: q [T, heads, dim], k and v [T, kv_heads, dim] -> [T, heads, dim].

    heads is a multiple of kv_heads; query head h reads kv head h // (heads / kv_heads).
    """
    if isinstance(context, Cached):
        context.cache.write(layer, context, k, v)
        if context.max_len == 1:
            return _decode(q, context, scores, layer)
        if not context.fresh:
            return _chunk(q, context, scores, layer)
        context = context.dense
    if noise is not None and scores.dropout > 0.0:

        def drop(bucket: Bucket, weights: Tensor) -> Tensor:
            return noise.drop_weights(weights, scores.dropout, layer, bucket.index)

        return _dense(q, k, v, context, scores, drop)
    return _dense(q, k, v, context, scores, None)


def _dense(q: Tensor, k: Tensor, v: Tensor, context: Dense, scores: Scores, drop: Drop | None) -> Tensor:
    outputs = []
    for bucket in context.buckets:
        dropped = None if drop is None else partial(drop, bucket)
        cells = (_cells(q, bucket), _cells(k, bucket), _cells(v, bucket))
        out = _causal(*cells, scores, dropped).transpose(1, 2).flatten(0, 1)
        outputs.append(out if bucket.valid is None else out.index_select(0, bucket.valid))
    joined = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    return joined if context.restore is None else joined.index_select(0, context.restore)


def _cells(x: Tensor, bucket: Bucket) -> Tensor:
    """[T, heads, dim] -> [n, heads, L, dim]; without a copy where the cells are consecutive tokens."""
    cells = x.index_select(0, bucket.index.flatten()) if bucket.span is None else x[bucket.span[0] : bucket.span[1]]
    return cells.unflatten(0, tuple(bucket.index.shape)).transpose(1, 2)


def _causal(q: Tensor, k: Tensor, v: Tensor, scores: Scores, drop: Callable[[Tensor], Tensor] | None) -> Tensor:
    """Rectangles: q [n, heads, L, dim], k and v [n, kv_heads, L, dim] -> [n, heads, L, dim]."""
    length = q.shape[2]
    tail = in_vectors(length, q.device) - length
    if tail and drop is None:
        q, k, v = F.pad(q, (0, 0, 0, tail)), F.pad(k, (0, 0, 0, tail)), F.pad(v, (0, 0, 0, tail))
    limited = scores.window is not None and scores.window < length
    if scores.softcap is None and not limited and drop is None:
        shared = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scores.scale, enable_gqa=shared)
    else:
        places = torch.arange(q.shape[2], device=q.device)
        out = _masked(q, k, v, _visible(places[:, None], places, scores), scores, drop)
    return out[:, :, :length]


def _decode(q: Tensor, context: Cached, scores: Scores, layer: int) -> Tensor:
    """One new token a row: the query heads that share a kv head stand in the query dimension, so nothing is repeated."""
    k, v = context.cache.read(layer, context)
    grouped = q.unflatten(1, (k.shape[1], -1))  # [R, kv_heads, group, dim]
    group = grouped.shape[2]
    if q.device.type == "cpu" and group < LEAST_QUERIES:
        grouped = grouped.repeat(1, 1, -(-LEAST_QUERIES // group), 1)
    places = torch.arange(k.shape[2], device=q.device)
    visible = _visible(context.used[:, None], places, scores)[:, None, None]
    return _masked(grouped, k, v, visible, scores)[:, :, :group].flatten(1, 2)


def _chunk(q: Tensor, context: Cached, scores: Scores, layer: int) -> Tensor:
    """Some new tokens a row after cached ones, row by row."""
    starts, outputs = context.dense.starts, []
    keys, values = context.cache.keys[layer], context.cache.values[layer]
    for row, (slot, used) in enumerate(zip(context.slots_host, context.used_host, strict=True)):
        new = q[starts[row] : starts[row + 1]].transpose(0, 1)[None]
        stop = used + new.shape[2]
        places = torch.arange(stop, device=q.device)
        visible = _visible(places[used:, None], places, scores)
        out = _masked(new, keys[slot : slot + 1, :, :stop], values[slot : slot + 1, :, :stop], visible, scores)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def _visible(query: Tensor, key: Tensor, scores: Scores) -> Tensor:
    """bool: whether the position `query` sees the position `key` (broadcast)."""
    seen = key <= query
    return seen if scores.window is None else seen & (key > query - scores.window)


def _masked(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scores: Scores, drop: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    shared = q.shape[1] != k.shape[1]
    if scores.softcap is None and drop is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scores.scale, enable_gqa=shared)
    k, v = _repeat(q, k, v)
    logits = torch.matmul(q, k.transpose(-1, -2)) * scores.scale
    if scores.softcap is not None:
        logits = torch.tanh(logits / scores.softcap) * scores.softcap
    logits = logits.masked_fill(~visible, float("-inf"))
    kept = torch.promote_types(q.dtype, torch.float32)
    weights = torch.softmax(logits, dim=-1, dtype=kept).to(q.dtype)
    return torch.matmul(weights if drop is None else drop(weights), v)


def _repeat(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    if group == 1:
        return k, v
    return k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
