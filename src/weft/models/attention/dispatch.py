"""Attention: one function, which chooses a backend by (context, device).

No position attends across a sequence boundary.

Float32 on a CPU is computed by weft's kernels, in training, prefill and decode steps. Everything
that they do not support (other dtypes, soft caps, dropout of weights, no compiler) is computed by
torch.

On a CPU a row's result has the same bits in training and in decoding, whatever the other rows are.
The log-probs of the sampler are then those that training computes (if matrix products have enough
rows; see `weft.engine.generation`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from weft import kernels
from weft.kernels import AttentionSpec, VarlenSegments
from weft.models.attention import accelerator, cached, cascade, portions, rectangles
from weft.models.attention.contexts import AttentionContext, Dense, Prefixed
from weft.models.attention.inputs import AttentionInputs
from weft.models.attention.portions import Portion
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
    """Compute attention as `attend` does, for queries, keys and values in one tensor.

    `heads` is [T, heads + 2 kv_heads, dim]: queries, keys, values, before `rotation` (cos and sin
    of `weft.models.network.rope`).
    """
    by_kernels = kernels.serves_attention(heads, heads, heads) and not _limited(spec, dropout)
    if by_kernels and isinstance(context, Dense | Prefixed):
        return kernels.attend_segments(
            heads, kv_heads, rotation, segments_of(context, spec), spec.scale
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

    Keys and values of cached sequences are stored in the cache first.
    """
    device: Device = "cpu" if given.q.is_cpu else "accelerator"
    if kernels.serves_attention(given.q, given.k, given.v) and not _limited(
        given.spec, given.dropout
    ):
        device = "kernels"
    return BACKENDS[type(context), device](given, context)


def segments_of(context: Dense | Prefixed, spec: AttentionSpec) -> VarlenSegments:
    """Return the keys of a pack that each of its rows attends to."""
    if isinstance(context, Prefixed):  # no window: no sequence is longer than one here
        return VarlenSegments(context.dense.segments, context.across)
    return VarlenSegments(context.segments, None, spec.window)


def _limited(spec: AttentionSpec, dropout: TokenDropout | None) -> bool:
    """Return whether scores are capped or weights dropped, which weft's kernels don't support."""
    return spec.softcap is not None or (dropout is not None and spec.dropout > 0.0)


def _by_segments(given: AttentionInputs, context: Dense | Prefixed) -> Tensor:
    heads = torch.cat([given.q, given.k, given.v], dim=1)
    segments = segments_of(context, given.spec)
    return kernels.attend_segments(heads, given.k.shape[1], None, segments, given.spec.scale)


def _merged(given: AttentionInputs, context: Prefixed) -> Tensor:
    return cascade.attend(given.q, given.k, given.v, context.parts, given.spec.scale)


def _stored(backend: Backend) -> Backend:
    """Return a backend that stores the new keys and values in the cache before it attends."""

    def attend_stored(given: AttentionInputs, context: Cached) -> Tensor:
        context.cache.write(given.layer, context, given.k, given.v)
        return backend(given, context)

    return attend_stored


def _cached_on_accelerator(given: AttentionInputs, context: Cached) -> Tensor:
    if context.max_len > 1 and context.fresh:
        return accelerator.dense(given, context.dense)
    return cached.by_torch(given, context)


def _paged(given: AttentionInputs, context: Paged) -> Tensor:
    context.pool.write(given.layer, context, given.k, given.v)
    if context.fresh:
        return attend(given, context.dense)
    return accelerator.paged(given, context)


BACKENDS: Mapping[tuple[type, Device], Backend] = {
    (Dense, "kernels"): _by_segments,
    (Dense, "cpu"): rectangles.dense,
    (Dense, "accelerator"): accelerator.dense,
    (Prefixed, "kernels"): _by_segments,
    (Prefixed, "cpu"): _merged,
    (Prefixed, "accelerator"): accelerator.prefixed,
    (Portion, "kernels"): portions.by_kernels,
    (Portion, "cpu"): portions.by_torch,
    (Portion, "accelerator"): portions.on_accelerator,
    (Cached, "kernels"): _stored(cached.by_kernels),
    (Cached, "cpu"): _stored(cached.by_torch),
    (Cached, "accelerator"): _stored(_cached_on_accelerator),
    (Paged, "kernels"): _paged,
    (Paged, "cpu"): _paged,
    (Paged, "accelerator"): _paged,
}
