"""Attention of new tokens over keys and values in cache slots, computed by torch or by kernels.

A slot is the contiguous memory for the keys and values of one sequence (`weft.models.kv.slots`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from weft import kernels
from weft.kernels import AttentionSpec, AttentionState
from weft.models.attention import rectangles
from weft.models.attention.cascade import attend_to, merge_states
from weft.models.attention.contexts import AttentionInputs
from weft.models.kv.slots import Cached, KVCache


def attend_by_kernels(given: AttentionInputs, context: Cached) -> Tensor:
    """Return attention of new tokens over cached and new tokens, computed by weft's CPU kernels.

    The result is [T, heads, dim]. The cached tokens of a row are those in the row's slot and in the
    row's prefix. The keys and values of the new tokens must already be stored in the slots.
    """
    assert not torch.is_grad_enabled(), "keys and values in a cache have no gradient"
    q, cache, layer, spec = given.q, context.cache, context.cache.row_of[given.layer], given.spec
    q = q if q.stride(2) == 1 else q.contiguous()
    keys = _view_as_rows(cache.keys[layer])
    values = _view_as_rows(cache.values[layer])
    own = kernels.attend_cache(
        q, keys, values, context.segments, spec.scale, causal=True, window=spec.window
    )
    for prefix, tokens in context.tokens_by_prefix:
        keys = _view_as_rows(prefix.keys[layer])
        values = _view_as_rows(prefix.values[layer])
        segments = torch.tensor([(0, len(tokens), 0, int(prefix.used[0]))])
        seen = kernels.attend_cache(q[tokens], keys, values, segments, spec.scale, causal=False)
        kernels.merge_rows(own, seen, tokens)
    return own.out


def attend_by_torch(given: AttentionInputs, context: Cached) -> Tensor:
    """Compute the same attention as `attend_by_kernels`, but with torch operations.

    A decode step is computed for all rows at once, with a mask that hides the keys that a row does
    not have. A pass with several new tokens per row is computed row by row.
    """
    layer = context.cache.row_of[given.layer]
    if context.max_len == 1:
        return _attend_decode_step(given.q, context, given.spec, layer)
    if context.is_first_prefill:
        return rectangles.attend_dense(given, context.dense)
    return _attend_chunk(given.q, context, given.spec, layer)


def _view_as_rows(stored: Tensor) -> Tensor:
    """Return the keys or values in slot 0 of a cache as a view [room, kv_heads, head_dim].

    `stored` is [slots, kv_heads, room, head_dim]. The kernels take only the address and the strides
    from the view. They find the other slots by the positions in `Cached.segments`.
    """
    return stored[0].transpose(0, 1)


def _attend_decode_step(q: Tensor, context: Cached, spec: AttentionSpec, layer: int) -> Tensor:
    """Compute attention of one new token per row.

    The query heads that share a key-value head are treated as several queries of this head, so that
    keys and values need not be repeated.
    """
    k, v = context.cache.read(layer, context)
    grouped = q.unflatten(1, (k.shape[1], -1))  # [R, kv_heads, group, dim]
    group = grouped.shape[2]
    hidden = context.build_decode_mask(spec.window, k.shape[2], q.dtype)
    if q.device.type != "cpu" or spec.softcap is not None:
        return rectangles.attend_masked(grouped, k, v, hidden == 0, spec).flatten(1, 2)
    least = kernels.LEAST_QUERIES
    if group >= least:
        wide = grouped
    else:
        wide = torch.cat([grouped] * -(-least // group), dim=2)
    own = attend_to(wide, k, v, spec.scale, mask=hidden)
    if not context.groups:
        return own.out[:, :, :group].flatten(1, 2)
    own = AttentionState(own.out[:, :, :group], own.lse[:, :, :group])
    return merge_states(own, _attend_prefixes(grouped, context, spec, layer)).out.flatten(1, 2)


def _attend_prefixes(
    grouped: Tensor, context: Cached, spec: AttentionSpec, layer: int
) -> AttentionState:
    """Return the attention of one query per row over the prefix of the row.

    A row without a prefix gets an output of 0 and a log-sum-exp of minus infinity. The queries
    `grouped` are [R, kv_heads, group, dim], with `group` query heads per key-value head. Rows with
    the same prefix are computed together, so that the keys of the prefix are read only once.
    """
    lse_dtype = torch.promote_types(grouped.dtype, torch.float32)
    out = torch.zeros_like(grouped)
    lse = grouped.new_full(grouped.shape[:3], -torch.inf, dtype=lse_dtype)
    for group in context.groups:
        stop = int(group.prefix.used[0])
        count = len(group.rows)
        k = group.prefix.keys[layer][:, :, :stop]
        v = group.prefix.values[layer][:, :, :stop]
        queries = grouped[group.queries].transpose(0, 1)  # [kv_heads, S, group, dim]
        seen = attend_to(queries.flatten(1, 2)[None], k, v, spec.scale)
        out[group.rows] = seen.out[0].view(queries.shape).transpose(0, 1)[:count]
        lse[group.rows] = seen.lse[0].view(queries.shape[:3]).transpose(0, 1)[:count]
    return AttentionState(out, lse)


def _attend_chunk(q: Tensor, context: Cached, spec: AttentionSpec, layer: int) -> Tensor:
    """Return the attention output of rows that have several new tokens each.

    New tokens attend to the cached tokens and the new tokens of their row. The rows are computed
    one after the other.
    """
    starts = context.dense.starts
    outputs = []
    keys = context.cache.keys[layer]
    values = context.cache.values[layer]
    for row, (slot, used) in enumerate(
        zip(context.slots.tolist(), context.used.tolist(), strict=True)
    ):
        new = q[starts[row] : starts[row + 1]].transpose(0, 1)[None]
        stop = used + new.shape[2]
        k = keys[slot : slot + 1, :, :stop]
        v = values[slot : slot + 1, :, :stop]
        prefix = context.prefixes[row]
        if prefix is None:
            out = rectangles.attend_tail(new, k, v, spec)
        else:
            out = _attend_after_prefix(new, k, v, prefix, spec, layer)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def _attend_after_prefix(
    q: Tensor, k: Tensor, v: Tensor, prefix: KVCache, spec: AttentionSpec, layer: int
) -> Tensor:
    """Compute attention of a sequence's last n tokens over a prefix and the sequence's other keys.

    q and the result are [1, heads, n, dim]; k and v, without the prefix, are [1, kv_heads, L, dim].
    Attention over the prefix and over the other keys is computed separately and merged as in
    training, so that rounding is the same.
    """
    count = q.shape[2]
    before = int(prefix.used[0])
    hidden = torch.zeros(count, k.shape[2], dtype=q.dtype, device=q.device)
    hidden.masked_fill_(
        torch.ones_like(hidden, dtype=torch.bool).triu_(k.shape[2] - count + 1), -torch.inf
    )
    tail = kernels.in_vectors(k.shape[2], q.device) - k.shape[2]
    more = max(0, kernels.LEAST_QUERIES - count)
    rows = F.pad(q, (0, 0, 0, more))
    hidden = F.pad(F.pad(hidden, (0, tail), value=-torch.inf), (0, 0, 0, more))
    k, v = rectangles.repeat_kv_heads(q, F.pad(k, (0, 0, 0, tail)), F.pad(v, (0, 0, 0, tail)))
    own = attend_to(rows, k, v, spec.scale, mask=hidden)
    k, v = rectangles.repeat_kv_heads(
        q, prefix.keys[layer][:, :, :before], prefix.values[layer][:, :, :before]
    )
    seen = attend_to(rows, k, v, spec.scale)
    return merge_states(own, seen).out[:, :, :count]
