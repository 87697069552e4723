"""Attention on accelerators.

Flash attention is used in half precision. FlexAttention is used for soft caps, for shared prefixes,
and for decode steps over pages that the installed flash kernel cannot read. All other passes, such
as those in float32 or with dropout of attention weights, use torch's own operations
(`weft.models.attention.rectangles`).
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from weft.kernels import AttentionSpec, VarlenLengths, flash, flex
from weft.models.attention import rectangles
from weft.models.attention.contexts import AttentionInputs, Dense, Prefixed
from weft.models.kv.pages import Paged


def attend_dense(inputs: AttentionInputs, context: Dense) -> Tensor:
    """Return causal attention within each sequence, [T, heads, dim]."""
    q = inputs.q
    k = inputs.k
    v = inputs.v
    spec = inputs.spec
    if inputs.has_dropout:
        return rectangles.attend_dense(inputs, context)
    if spec.softcap is not None and flex.serves(q.device, q.shape[2]):
        return flex.attend_packed(q, k, v, _prepare_mask(context, len(q), spec.window), spec)
    if supports_flash(q, spec):
        bounds = context.cu_seqlens
        lengths = VarlenLengths(bounds, bounds, context.max_len, context.max_len)
        return flash.attend_packed(q, k, v, lengths, spec)
    return rectangles.attend_dense(inputs, context)


def attend_prefixed(inputs: AttentionInputs, context: Prefixed) -> Tensor:
    """Return causal attention [T, heads, dim] over sequences, some of which share a prefix."""
    mask = _prepare_mask(context, len(inputs.q), inputs.spec.window)
    return flex.attend_packed(inputs.q, inputs.k, inputs.v, mask, inputs.spec)


def attend_paged(inputs: AttentionInputs, context: Paged) -> Tensor:
    """Return the attention output of the new tokens, [T, heads, dim].

    The new tokens attend to the keys and values stored in the pages, which must already include
    those of the new tokens.
    """
    q = inputs.q
    spec = inputs.spec
    pool = context.pool
    layer = inputs.layer
    history = context.history
    # In a decode step, read the pages directly.
    if history is None:
        keys = pool.keys[layer]
        values = pool.values[layer]
        if supports_flash(q, spec) and flash.find_features().block_table:
            return flash.attend_paged(q, keys, values, context.table, context.used, spec)
        if spec.window not in context.masks:
            size = (keys.shape[0], keys.shape[1])
            context.masks[spec.window] = flex.build_page_mask(
                context.table, context.used, size, spec.window
            )
        return flex.attend_paged(q, keys, values, context.masks[spec.window], spec)
    # In a prefill, copy the keys and values of all tokens, which is cheap compared to the products.
    keys, values = pool.read(layer, history)
    if supports_flash(q, spec):
        lengths = VarlenLengths(
            context.cu_seqlens, history.cu_seqlens, context.max_len, history.max_len
        )
        return flash.attend_packed(q, keys, values, lengths, spec)
    # Without flash attention, compute row by row.
    outputs = []
    bounds = history.cu_seqlens.tolist()
    for new_span, key_span in zip(pairwise(context.dense.starts), pairwise(bounds), strict=True):
        row_q, row_k, row_v = (
            x[slice(*span)].transpose(0, 1)[None]
            for x, span in ((q, new_span), (keys, key_span), (values, key_span))
        )
        outputs.append(rectangles.attend_tail(row_q, row_k, row_v, spec)[0].transpose(0, 1))
    return torch.cat(outputs)


def supports_flash(q: Tensor, spec: AttentionSpec) -> bool:
    """Return whether flash attention supports the queries `q` and the parameters in `spec`."""
    return spec.softcap is None and flash.serves(q.device, q.dtype, q.shape[2])


def _prepare_mask(context: Dense | Prefixed, length: int, window: int | None) -> flex.BlockMask:
    """Return the FlexAttention mask of a pack of `length` tokens for one window size.

    The mask is built at the first call and kept in `context.masks`, so all layers with this window
    share it.
    """
    if window not in context.masks:
        if isinstance(context, Prefixed):
            continuations = [(each.prefix, each.continuation) for each in context.continuations]
        else:
            continuations = []
        context.masks[window] = flex.build_pack_mask(
            context.dense.cu_seqlens, continuations, length, window
        )
    return context.masks[window]
