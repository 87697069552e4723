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

# `kernels`: a CPU, with queries, keys and values that weft's CPU kernels support.
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
    use_kernels = kernels.serves_attention(heads, heads, heads) and not _has_softcap_or_dropout(
        spec, dropout
    )
    # For whole sequences, one of weft's kernels also rotates the heads.
    if use_kernels and isinstance(context, Dense | Prefixed):
        segments = build_segments(context, spec)
        return kernels.attend_segments(heads, kv_heads, rotation, segments, spec.scale)
    # On an accelerator, one kernel splits the heads and rotates them.
    if rotation is not None and not heads.is_cpu:
        q, k, v = kernels.rotate_heads(heads, kv_heads, *rotation)
        return attend(AttentionInputs(q, k, v, spec, layer, dropout), context)
    # Otherwise, rotate queries and keys together, and then split them.
    qk, v = heads.split([heads.shape[1] - kv_heads, kv_heads], dim=1)
    if v.requires_grad:
        v = v.contiguous()  # saved for the backward pass; a view would keep all heads in memory
    if rotation is not None:
        qk = kernels.rotate(qk, *rotation)
    q, k = qk.split([qk.shape[1] - kv_heads, kv_heads], dim=1)
    return attend(AttentionInputs(q, k, v, spec, layer, dropout), context)


def attend(inputs: AttentionInputs, context: AttentionContext) -> Tensor:
    """Return causal attention within each sequence, [T, heads, dim].

    If the sequences are cached, the new keys and values are first stored in the cache, and
    attention also covers the cached tokens.
    """
    device: Device = "cpu" if inputs.q.is_cpu else "accelerator"
    use_kernels = kernels.serves_attention(inputs.q, inputs.k, inputs.v)
    if use_kernels and not _has_softcap_or_dropout(inputs.spec, inputs.dropout):
        device = "kernels"
    return BACKENDS[type(context), device](inputs, context)


def build_segments(context: Dense | Prefixed, spec: AttentionSpec) -> VarlenSegments:
    """Return the segments that define the keys to which each row of a pack attends."""
    if isinstance(context, Prefixed):
        # Prefixes are shared only if no sequence is longer than the window, so no window is needed.
        return VarlenSegments(context.dense.segments, context.prefix_segments)
    return VarlenSegments(context.segments, None, spec.window)


def _has_softcap_or_dropout(spec: AttentionSpec, dropout: TokenDropout | None) -> bool:
    """Return whether attention has a soft cap or dropout, which weft's kernels do not support."""
    return spec.softcap is not None or (dropout is not None and spec.dropout > 0.0)


def _attend_by_segments(inputs: AttentionInputs, context: Dense | Prefixed) -> Tensor:
    heads = torch.cat([inputs.q, inputs.k, inputs.v], dim=1)
    segments = build_segments(context, inputs.spec)
    return kernels.attend_segments(heads, inputs.k.shape[1], None, segments, inputs.spec.scale)


def _attend_by_cascade(inputs: AttentionInputs, context: Prefixed) -> Tensor:
    return cached.attend(inputs.q, inputs.k, inputs.v, context.parts, inputs.spec.scale)


def _with_cache_write(backend: Backend) -> Backend:
    """Return a backend that stores the new keys and values in the cache and then calls `backend`."""

    def attend_stored(inputs: AttentionInputs, context: Cached) -> Tensor:
        context.cache.write(inputs.layer, context, inputs.k, inputs.v)
        return backend(inputs, context)

    return attend_stored


def _attend_cached_on_accelerator(inputs: AttentionInputs, context: Cached) -> Tensor:
    if context.max_len > 1 and context.is_first_prefill:
        return accelerator.attend_dense(inputs, context.dense)
    return cached.attend_by_torch(inputs, context)


def _attend_paged(inputs: AttentionInputs, context: Paged) -> Tensor:
    context.pool.write(inputs.layer, context, inputs.k, inputs.v)
    if context.is_first_prefill:
        return attend(inputs, context.dense)
    return accelerator.attend_paged(inputs, context)


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
