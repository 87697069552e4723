"""Dispatch of each layer's attention to the backend for the attention context and the device.

No token attends to a token of another sequence.

On a CPU, weft's kernels compute float32 attention in training, prefill and decode steps. Torch
computes what the kernels do not support (other dtypes, soft caps, dropout of attention weights),
and everything if there is no compiler to build the kernels.

On a CPU, the result of a row has the same bits in training and in decoding, regardless of the other
rows. The log-probs of the sampler are then equal to those computed in training, provided that
matrix products have enough rows (see `weft.engine.generation`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from weft import kernels
from weft.kernels import AttentionSpec, VarlenSegments
from weft.models.attention import accelerator, cached, pack_shards, rectangles
from weft.models.attention.contexts import AttentionContext, AttentionInputs, Dense, Prefixed
from weft.models.attention.pack_shards import PackShard
from weft.models.kv.pages import Paged
from weft.models.kv.slots import Cached
from weft.models.network.dropout import TokenDropout

# `kernels`: weft's CPU kernels support these queries, keys and values.
Device = Literal["kernels", "cpu", "accelerator"]
Backend = Callable[[AttentionInputs, Any], Tensor]


def attend_heads(
    heads: Tensor,
    kv_heads: int,
    rotation: tuple[Tensor, Tensor] | None,
    context: AttentionContext,
    spec: AttentionSpec,
    layer: int,
    dropout: TokenDropout | None = None,
) -> Tensor:
    """Compute attention as `attend` does, from queries, keys and values in one tensor.

    `heads` is [T, n + 2 kv_heads, dim], with n query heads: queries, keys and values, in this order
    and before rotation. `rotation` is (cos, sin) from `weft.models.network.rope`.
    """
    by_kernels = kernels.serves_attention(heads, heads, heads) and not _has_softcap_or_dropout(
        spec, dropout
    )
    if by_kernels and isinstance(context, Dense | Prefixed):
        return kernels.attend_segments(
            heads, kv_heads, rotation, build_segments(context, spec), spec.scale
        )
    if rotation is not None and not heads.is_cpu:
        return attend(
            AttentionInputs(
                *kernels.rotate_heads(heads, kv_heads, *rotation), spec, layer, dropout
            ),
            context,
        )
    qk, v = heads.split([heads.shape[1] - kv_heads, kv_heads], dim=1)
    if v.requires_grad:
        v = v.contiguous()  # saved for the backward pass; a view would keep all heads in memory
    if rotation is not None:
        qk = kernels.rotate(qk, *rotation)
    q, k = qk.split([qk.shape[1] - kv_heads, kv_heads], dim=1)
    return attend(AttentionInputs(q, k, v, spec, layer, dropout), context)


def attend(given: AttentionInputs, context: AttentionContext) -> Tensor:
    """Return causal attention within each sequence, [T, heads, dim].

    If the sequences are cached, the new keys and values are first stored in the cache, and
    attention also covers the cached tokens.
    """
    device: Device = "cpu" if given.q.is_cpu else "accelerator"
    if kernels.serves_attention(given.q, given.k, given.v) and not _has_softcap_or_dropout(
        given.spec, given.dropout
    ):
        device = "kernels"
    return BACKENDS[type(context), device](given, context)


def build_segments(context: Dense | Prefixed, spec: AttentionSpec) -> VarlenSegments:
    """Return the segments that define the keys to which each row of a pack attends."""
    if isinstance(context, Prefixed):  # no window: no sequence is longer than one here
        return VarlenSegments(context.dense.segments, context.prefix_segments)
    return VarlenSegments(context.segments, None, spec.window)


def _has_softcap_or_dropout(spec: AttentionSpec, dropout: TokenDropout | None) -> bool:
    """Return whether attention has a soft cap or dropout, which weft's kernels do not support."""
    return spec.softcap is not None or (dropout is not None and spec.dropout > 0.0)


def _attend_by_segments(given: AttentionInputs, context: Dense | Prefixed) -> Tensor:
    heads = torch.cat([given.q, given.k, given.v], dim=1)
    segments = build_segments(context, given.spec)
    return kernels.attend_segments(heads, given.k.shape[1], None, segments, given.spec.scale)


def _attend_by_cascade(given: AttentionInputs, context: Prefixed) -> Tensor:
    return cached.attend(given.q, given.k, given.v, context.parts, given.spec.scale)


def _with_cache_write(backend: Backend) -> Backend:
    """Return a backend that stores the new keys and values in the cache and then calls `backend`."""

    def attend_stored(given: AttentionInputs, context: Cached) -> Tensor:
        context.cache.write(given.layer, context, given.k, given.v)
        return backend(given, context)

    return attend_stored


def _attend_cached_on_accelerator(given: AttentionInputs, context: Cached) -> Tensor:
    if context.max_len > 1 and context.is_first_prefill:
        return accelerator.attend_dense(given, context.dense)
    return cached.attend_by_torch(given, context)


def _attend_paged(given: AttentionInputs, context: Paged) -> Tensor:
    context.pool.write(given.layer, context, given.k, given.v)
    if context.is_first_prefill:
        return attend(given, context.dense)
    return accelerator.attend_paged(given, context)


BACKENDS: Mapping[tuple[type, Device], Backend] = {
    (Dense, "kernels"): _attend_by_segments,
    (Dense, "cpu"): rectangles.attend_dense,
    (Dense, "accelerator"): accelerator.attend_dense,
    (Prefixed, "kernels"): _attend_by_segments,
    (Prefixed, "cpu"): _attend_by_cascade,
    (Prefixed, "accelerator"): accelerator.attend_prefixed,
    (PackShard, "kernels"): pack_shards.attend_by_kernels,
    (PackShard, "cpu"): pack_shards.attend_by_torch,
    (PackShard, "accelerator"): pack_shards.attend_on_accelerator,
    (Cached, "kernels"): _with_cache_write(cached.attend_by_kernels),
    (Cached, "cpu"): _with_cache_write(cached.attend_by_torch),
    (Cached, "accelerator"): _with_cache_write(_attend_cached_on_accelerator),
    (Paged, "kernels"): _attend_paged,
    (Paged, "cpu"): _attend_paged,
    (Paged, "accelerator"): _attend_paged,
}
