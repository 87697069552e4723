"""Attention: one function, few kernels. No position attends across a sequence boundary.

A CPU's float32 goes through weft's own kernels (`native/attention.cpp`): rows by segments of the pack over the keys they see,
in training, prefill and decode steps alike. What those do not take (other dtypes, soft-capping, dropped weights, no compiler)
goes through torch's: training and prefill lay the pack's sequences out as rectangles of like length (`Dense.buckets`) with
padding after each sequence, where causal attention never looks, so the fast causal kernel is exact without a mask. Soft-capping
has no fused kernel on CPU and takes the written-out form. A decode step is one masked rectangle over the cache.

CUDA devices have kernels for packs as they are: flash attention in half precision (`flash.py`), and FlexAttention for
soft-capping, shared prefixes and pages that the installed flash kernel cannot read (`flex.py`). Float32 and dropped weights
take the rectangles there, too.

On a CPU a row's result has the same bits in training and in decoding, whatever stands beside it; for torch's kernels keys are
padded to whole vectors and a head has a few query rows at least, so every row is added up in the same order. What the sampler
reports as a log-prob is then what training computes (given that matrix products too have rows enough; see `engine/generation`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.models import flash, flex, rope
from weft.models.dropout import TokenNoise
from weft.models.merge import Partial, attend_to, join, merge
from weft.models.native import attention as native
from weft.models.packed import AttentionContext, Bucket, Cached, Dense, Paged, Prefixed, in_vectors
from weft.models.scores import Scores

if TYPE_CHECKING:
    from weft.models.kv_cache import KVCache

LEAST_QUERIES = 4  # a CPU multiplies fewer rows by another kernel, which adds up in another order

Drop = Callable[[Bucket, Tensor], Tensor]


def attend_heads(
    heads: Tensor, kv_heads: int, rotation: tuple[Tensor, Tensor] | None, context: AttentionContext, scores: Scores,
    layer: int, noise: TokenNoise | None = None,
) -> Tensor:  # fmt: skip
    """As `attend`, of queries, keys and values side by side in `heads` [T, heads + 2 kv_heads, dim], with queries and keys
    turned by `rotation` (`weft.models.rope`) first."""
    served = native.serves(heads, heads, heads) and not _limited(scores, noise)
    if served and isinstance(context, Dense | Prefixed):
        return native.attend(heads, kv_heads, rotation, who_sees(context, scores), scores.scale)
    qk, v = heads.split([heads.shape[1] - kv_heads, kv_heads], dim=1)
    if v.requires_grad:
        v = v.contiguous()  # it is kept for the backward pass, and a view would keep all heads
    if rotation is not None:
        qk = rope.rotate(qk, *rotation)
    q, k = qk.split([qk.shape[1] - kv_heads, kv_heads], dim=1)
    return attend(q, k, v, context, scores, layer, noise)


def attend(
    q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, scores: Scores, layer: int,
    noise: TokenNoise | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention within each sequence: q [T, heads, dim], k and v [T, kv_heads, dim] -> [T, heads, dim].

    heads is a multiple of kv_heads; query head h reads kv head h // (heads / kv_heads).
    """
    if isinstance(context, Paged):
        context.pool.write(layer, context, k, v)
        if not context.fresh:
            return _paged(q, context, scores, layer)
        context = context.dense
    if isinstance(context, Cached):
        context.cache.write(layer, context, k, v)
    if not _limited(scores, noise) and native.serves(q, k, v):
        if isinstance(context, Cached):
            return _cached(q, context, scores, layer)
        heads = torch.cat([q, k, v], dim=1)
        return native.attend(heads, k.shape[1], None, who_sees(context, scores), scores.scale)
    if isinstance(context, Cached):
        if context.max_len == 1:
            return _decode(q, context, scores, layer)
        if not context.fresh:
            return _chunk(q, context, scores, layer)
        context = context.dense
    if isinstance(context, Prefixed):
        if q.device.type == "cpu":
            return merge(q, k, v, context.parts, scores.scale)
        return flex.packed(q, k, v, context, scores)
    if noise is not None and scores.dropout > 0.0:

        def drop(bucket: Bucket, weights: Tensor) -> Tensor:
            return noise.drop_weights(weights, scores.dropout, layer, bucket.index)

        return _dense(q, k, v, context, scores, drop)
    if scores.softcap is not None and flex.serves(q.device, q.shape[2]):
        return flex.packed(q, k, v, context, scores)
    if _flashes(q, scores):
        lengths = flash.Ragged(context.cu_seqlens, context.cu_seqlens, context.max_len, context.max_len)
        return flash.packed(q, k, v, lengths, scores)
    return _dense(q, k, v, context, scores, None)


def _limited(scores: Scores, noise: TokenNoise | None) -> bool:
    """Whether scores are capped, or weights dropped: not what weft's kernels do."""
    return scores.softcap is not None or (noise is not None and scores.dropout > 0.0)


def who_sees(context: Dense | Prefixed, scores: Scores) -> native.Seen:
    """Which keys of a pack each of its rows sees."""
    if isinstance(context, Prefixed):  # whose networks have no window that a sequence exceeds
        return native.Seen(context.dense.segments, context.across)
    return native.Seen(context.segments, None, scores.window)


def _cached(q: Tensor, context: Cached, scores: Scores, layer: int) -> Tensor:
    """New tokens over the keys and values of their slots, where their own lie too by now, and of their prefixes."""
    assert not torch.is_grad_enabled(), "a cache keeps what has no gradient"
    q = q if q.stride(2) == 1 else q.contiguous()
    keys, values = (_rows_of(stored[layer]) for stored in (context.cache.keys, context.cache.values))
    own = native.attend_to(q, keys, values, context.segments, scores.scale, causal=True, window=scores.window)
    for prefix, tokens in context.continued:
        keys, values = _rows_of(prefix.keys[layer]), _rows_of(prefix.values[layer])
        segments = torch.tensor([(0, len(tokens), 0, int(prefix.used[0]))])
        seen = native.attend_to(q[tokens], keys, values, segments, scores.scale, causal=False)
        native.join(own, seen, tokens)
    return own.out


def _rows_of(stored: Tensor) -> Tensor:
    """Keys or values [slots, kv_heads, room, head_dim] as the kernels want them: the steps between keys, and between heads; the
    slots follow one another."""
    return stored[0].transpose(0, 1)


def _flashes(q: Tensor, scores: Scores) -> bool:
    return scores.softcap is None and flash.serves(q.device, q.dtype, q.shape[2])


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
    hidden = context.hidden(scores.window, k.shape[2], q.dtype)
    if q.device.type != "cpu" or scores.softcap is not None:
        return _masked(grouped, k, v, hidden == 0, scores).flatten(1, 2)
    wide = grouped if group >= LEAST_QUERIES else torch.cat([grouped] * -(-LEAST_QUERIES // group), dim=2)
    own = attend_to(wide, k, v, scores.scale, mask=hidden)
    if not context.sharers:
        return own.out[:, :, :group].flatten(1, 2)
    own = Partial(own.out[:, :, :group], own.lse[:, :, :group])
    return join(own, _prefixes(grouped, context, scores, layer)).out.flatten(1, 2)


def _prefixes(grouped: Tensor, context: Cached, scores: Scores, layer: int) -> Partial:
    """What rows [R, kv_heads, group, dim] see in their prefixes.

    All sharers of a prefix are the queries of one product with its keys, which are read once.
    """
    kept = torch.promote_types(grouped.dtype, torch.float32)
    out, lse = torch.zeros_like(grouped), grouped.new_full(grouped.shape[:3], -torch.inf, dtype=kept)
    for sharers in context.sharers:
        stop, count = int(sharers.prefix.used[0]), len(sharers.rows)
        k, v = sharers.prefix.keys[layer][:, :, :stop], sharers.prefix.values[layer][:, :, :stop]
        queries = grouped[sharers.queries].transpose(0, 1)  # [kv_heads, S, group, dim]
        seen = attend_to(queries.flatten(1, 2)[None], k, v, scores.scale)
        out[sharers.rows] = seen.out[0].view(queries.shape).transpose(0, 1)[:count]
        lse[sharers.rows] = seen.lse[0].view(queries.shape[:3]).transpose(0, 1)[:count]
    return Partial(out, lse)


def _chunk(q: Tensor, context: Cached, scores: Scores, layer: int) -> Tensor:
    """Some new tokens a row after cached ones, row by row."""
    starts, outputs = context.dense.starts, []
    keys, values = context.cache.keys[layer], context.cache.values[layer]
    for row, (slot, used) in enumerate(zip(context.slots.tolist(), context.used.tolist(), strict=True)):
        new = q[starts[row] : starts[row + 1]].transpose(0, 1)[None]
        stop = used + new.shape[2]
        k, v = keys[slot : slot + 1, :, :stop], values[slot : slot + 1, :, :stop]
        prefix = context.prefixes[row]
        out = _tail(new, k, v, scores) if prefix is None else _after(new, k, v, prefix, scores, layer)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def _after(q: Tensor, k: Tensor, v: Tensor, prefix: KVCache, scores: Scores, layer: int) -> Tensor:
    """As `_tail`, for a sequence that goes on from a prefix: joined as in training, so that rounding is the same."""
    count, before = q.shape[2], int(prefix.used[0])
    hidden = torch.zeros(count, k.shape[2], dtype=q.dtype, device=q.device)
    hidden.masked_fill_(torch.ones_like(hidden, dtype=torch.bool).triu_(k.shape[2] - count + 1), -torch.inf)
    tail, more = in_vectors(k.shape[2], q.device) - k.shape[2], max(0, LEAST_QUERIES - count)
    rows = F.pad(q, (0, 0, 0, more))
    hidden = F.pad(F.pad(hidden, (0, tail), value=-torch.inf), (0, 0, 0, more))
    k, v = _repeat(q, F.pad(k, (0, 0, 0, tail)), F.pad(v, (0, 0, 0, tail)))
    own = attend_to(rows, k, v, scores.scale, mask=hidden)
    k, v = _repeat(q, prefix.keys[layer][:, :, :before], prefix.values[layer][:, :, :before])
    seen = attend_to(rows, k, v, scores.scale)
    return join(own, seen).out[:, :, :count]


def _paged(q: Tensor, context: Paged, scores: Scores, layer: int) -> Tensor:
    """New tokens of rows whose keys and values lie in pages, theirs included."""
    pool, history = context.pool, context.history
    if history is None:
        keys, values = pool.keys[layer], pool.values[layer]
        if _flashes(q, scores) and flash.abilities().block_table:
            return flash.paged(q, keys, values, context.table, context.used, scores)
        return flex.paged(q, keys, values, context, scores)
    keys, values = pool.read(layer, history)  # as many bytes as the pass reads anyway, and few beside its products
    if _flashes(q, scores):
        lengths = flash.Ragged(context.cu_seqlens, history.cu_seqlens, context.max_len, history.max_len)
        return flash.packed(q, keys, values, lengths, scores)
    outputs, bounds = [], history.cu_seqlens.tolist()
    for new, old in zip(pairwise(context.dense.starts), pairwise(bounds), strict=True):
        rows, k, v = (x[slice(*span)].transpose(0, 1)[None] for x, span in ((q, new), (keys, old), (values, old)))
        outputs.append(_tail(rows, k, v, scores)[0].transpose(0, 1))
    return torch.cat(outputs)


def _tail(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
    """The last tokens of one sequence over all of it: q [1, heads, n, dim], k and v [1, kv_heads, L, dim]; as q."""
    count, length = q.shape[2], k.shape[2]
    tail = in_vectors(length, q.device) - length
    places = torch.arange(length + tail, device=q.device)
    more = max(0, LEAST_QUERIES - count) if q.device.type == "cpu" else 0
    visible = _visible(places[length - count : length, None], places, scores)
    q, visible = F.pad(q, (0, 0, 0, more)), F.pad(visible, (0, 0, 0, more), value=True)
    return _masked(q, F.pad(k, (0, 0, 0, tail)), F.pad(v, (0, 0, 0, tail)), visible, scores)[:, :, :count]


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
