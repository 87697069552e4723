"""Attention of new tokens over cache slots, and its computation in parts that are merged exactly.

A slot is the contiguous memory for the keys and values of one sequence (`weft.models.kv.slots`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft import kernels
from weft.kernels import AttentionSpec, AttentionState, in_vectors
from weft.models.attention import rectangles
from weft.models.attention.contexts import AttentionInputs, AttentionPart, SequenceBucket
from weft.models.attention.rectangles import pad_to_rectangle
from weft.models.kv.slots import Cached, KVCache

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend_to(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
) -> AttentionState:
    """Return attention of q [n, heads, L, dim] over k and v [n, heads, M, dim], on a CPU.

    `mask`, if given, is added to the scores. If `causal` is True, the query at index i attends only
    to the keys at indices up to i. The result can be merged with the attention of the same queries
    over other keys.
    """
    out, lse = _flash_forward(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    return AttentionState(out, lse)


def merge_states(left: AttentionState, right: AttentionState) -> AttentionState:
    """Return the attention of some rows over the union of two disjoint sets of keys.

    `left` and `right` are the attention of the same rows over each of the two sets. Training and
    decoding merge with the same rounding: the merge uses only exp and log, whose results do not
    depend on an element's position in the tensor.
    """
    largest = torch.maximum(left.lse, right.lse)
    weights = [(part.lse - largest).exp_() for part in (left, right)]
    total = weights[0] + weights[1]
    shares = [(weight / total).unsqueeze(-1).to(left.out.dtype) for weight in weights]
    return AttentionState(left.out * shares[0] + right.out * shares[1], total.log().add_(largest))


def attend(
    q: Tensor, k: Tensor, v: Tensor, parts: tuple[AttentionPart, ...], scale: float
) -> Tensor:
    """Return the attention [T, heads, dim] of q over k and v, computed in parts and merged.

    q is [T, heads, dim]; k and v are [T, kv_heads, dim], and heads is a multiple of kv_heads.
    `parts` define the keys to which each row attends. Every row is in exactly one causal part and
    in any number of other parts.
    """
    return _CascadeAttention.apply(q, k, v, parts, scale)


class _CascadeAttention(torch.autograd.Function):
    """Autograd function behind `attend`.

    Saves the merged output and log-sum-exp of each row for the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, parts: tuple[AttentionPart, ...], scale: float
    ) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
        group = q.shape[1] // k.shape[1]
        for part in parts:
            # Attend to the keys of this part only. Pad queries, and keys of a causal part, to whole
            # vectors as `rectangles` does, for the same rounding.
            part_q, part_k, part_v = _pad_to_rectangles(q, k, v, part, group)
            length = part.queries.index.shape[1]
            padding = (0, 0, 0, in_vectors(length, q.device) - length)
            part_q = F.pad(part_q, padding)
            if part.causal:
                part_k = F.pad(part_k, padding)
                part_v = F.pad(part_v, padding)
            padded = attend_to(part_q, part_k, part_v, scale, causal=part.causal)
            padded_lse = padded.lse[:, :, :length].unsqueeze(-1)
            state = AttentionState(
                _remove_padding(padded.out[:, :, :length], part.queries),
                _remove_padding(padded_lse, part.queries).squeeze(-1),
            )
            # The causal part of each row is computed first; merge the other parts with it.
            if not part.causal:
                earlier = AttentionState(
                    _select_tokens(out, part.queries), _select_tokens(lse, part.queries)
                )
                state = merge_states(earlier, state)
            _write_tokens(out, part.queries, state.out)
            _write_tokens(lse, part.queries, state.lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.parts = parts
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        group = q.shape[1] // k.shape[1]
        grad_q = torch.zeros_like(q)
        grad_k = torch.zeros_like(k)
        grad_v = torch.zeros_like(v)
        for part in ctx.parts:
            queries = part.queries
            keys = part.keys
            part_lse = pad_to_rectangle(lse.unsqueeze(-1), queries).squeeze(-1)
            grad_out = pad_to_rectangle(gradients[0], queries)
            if queries.valid is not None:
                grad_out = grad_out * _build_token_mask(queries, grad_out)[:, None, :, None]
            part_grad_q, part_grad_k, part_grad_v = _flash_backward(
                grad_out,
                *_pad_to_rectangles(q, k, v, part, group),
                pad_to_rectangle(out, queries),
                part_lse,
                0.0,
                part.causal,
                scale=ctx.scale,
            )
            _add_to_tokens(grad_q, queries, _remove_padding(part_grad_q, queries))
            for total, part_grad in ((grad_k, part_grad_k), (grad_v, part_grad_v)):
                # Add up the gradients of the query heads that share a key-value head.
                summed = part_grad if group == 1 else part_grad.unflatten(1, (-1, group)).sum(2)
                _add_to_tokens(total, keys, _remove_padding(summed, keys))
        return grad_q, grad_k, grad_v, None, None


def _pad_to_rectangles(
    q: Tensor, k: Tensor, v: Tensor, part: AttentionPart, group: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the queries, keys and values of a part as rectangles, each [n, heads, L, dim].

    Each key-value head is repeated for the `group` query heads that share it.
    """
    keys = pad_to_rectangle(k, part.keys)
    values = pad_to_rectangle(v, part.keys)
    if group > 1:
        keys = keys.repeat_interleave(group, dim=1)
        values = values.repeat_interleave(group, dim=1)
    return pad_to_rectangle(q, part.queries), keys, values


def _remove_padding(rectangle: Tensor, bucket: SequenceBucket) -> Tensor:
    """Return the values of a bucket's tokens, [tokens, heads, dim], without the padding.

    `rectangle` is [n, heads, L, dim], for n sequences padded to length L.
    """
    flat = rectangle.transpose(1, 2).flatten(0, 1)
    return flat if bucket.valid is None else flat.index_select(0, bucket.valid)


def _build_token_mask(bucket: SequenceBucket, like: Tensor) -> Tensor:
    """Return a mask of a bucket's padded rectangle, [n, L]: 1 for tokens and 0 for padding.

    The mask has the dtype of `like`.
    """
    assert bucket.valid is not None
    mask = like.new_zeros(bucket.index.numel()).index_fill_(0, bucket.valid, 1.0)
    return mask.view(bucket.index.shape)


def _select_tokens(x: Tensor, bucket: SequenceBucket) -> Tensor:
    """Return the rows of x [T, ...] for the tokens of the sequences in `bucket`."""
    if bucket.span is not None:
        return x[bucket.span[0] : bucket.span[1]]
    return x.index_select(0, bucket.tokens)


def _write_tokens(x: Tensor, bucket: SequenceBucket, values: Tensor) -> None:
    """Write `values` [tokens, ...] to the rows of x [T, ...] for the tokens of `bucket`."""
    if bucket.span is not None:
        x[bucket.span[0] : bucket.span[1]] = values
    else:
        x.index_copy_(0, bucket.tokens, values)


def _add_to_tokens(x: Tensor, bucket: SequenceBucket, values: Tensor) -> None:
    """Add `values` [tokens, ...] to the rows of x [T, ...] for the tokens of `bucket`."""
    if bucket.span is not None:
        x[bucket.span[0] : bucket.span[1]] += values
    else:
        x.index_add_(0, bucket.tokens, values)


def attend_by_kernels(inputs: AttentionInputs, context: Cached) -> Tensor:
    """Return attention of new tokens over cached and new tokens, computed by weft's CPU kernels.

    The result is [T, heads, dim]. The cached tokens of a row are those in the row's slot and in the
    row's prefix. The keys and values of the new tokens must already be stored in the slots.
    """
    assert not torch.is_grad_enabled(), "keys and values in a cache have no gradient"
    q = inputs.q if inputs.q.stride(2) == 1 else inputs.q.contiguous()
    cache = context.cache
    layer = cache.layer_indices[inputs.layer]
    spec = inputs.spec
    keys = _view_as_rows(cache.keys[layer])
    values = _view_as_rows(cache.values[layer])
    total = kernels.attend_cache(
        q, keys, values, context.segments, spec.scale, causal=True, window=spec.window
    )
    for prefix, tokens in context.tokens_by_prefix:
        keys = _view_as_rows(prefix.keys[layer])
        values = _view_as_rows(prefix.values[layer])
        segments = torch.tensor([(0, len(tokens), 0, int(prefix.used[0]))])
        additional = kernels.attend_cache(
            q[tokens], keys, values, segments, spec.scale, causal=False
        )
        kernels.merge_rows(total, additional, tokens)
    return total.out


def attend_by_torch(inputs: AttentionInputs, context: Cached) -> Tensor:
    """Compute the same attention as `attend_by_kernels`, but with torch operations.

    A decode step is computed for all rows at once, with a mask that hides the keys that a row does
    not have. A pass with several new tokens per row is computed row by row.
    """
    layer = context.cache.layer_indices[inputs.layer]
    if context.max_len == 1:
        return _attend_decode_step(inputs.q, context, inputs.spec, layer)
    if context.is_first_prefill:
        return rectangles.attend_dense(inputs, context.dense)
    return _attend_chunk(inputs.q, context, inputs.spec, layer)


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
    mask = context.build_decode_mask(spec.window, k.shape[2], q.dtype)
    if q.device.type != "cpu" or spec.softcap is not None:
        return rectangles.attend_masked(grouped, k, v, mask == 0, spec).flatten(1, 2)
    # Repeat the queries if there are few, for the same rounding as with many queries.
    min_queries = kernels.MIN_QUERIES
    if group >= min_queries:
        repeated = grouped
    else:
        repeated = torch.cat([grouped] * -(-min_queries // group), dim=2)
    state = attend_to(repeated, k, v, spec.scale, mask=mask)
    if not context.groups:
        return state.out[:, :, :group].flatten(1, 2)
    # Merge with the attention over the rows' prefixes.
    state = AttentionState(state.out[:, :, :group], state.lse[:, :, :group])
    return merge_states(state, _attend_prefixes(grouped, context, spec, layer)).out.flatten(1, 2)


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
        length = int(group.prefix.used[0])
        count = len(group.rows)
        k = group.prefix.keys[layer][:, :, :length]
        v = group.prefix.values[layer][:, :, :length]
        queries = grouped[group.queries].transpose(0, 1)  # [kv_heads, S, group, dim]
        state = attend_to(queries.flatten(1, 2)[None], k, v, spec.scale)
        out[group.rows] = state.out[0].view(queries.shape).transpose(0, 1)[:count]
        lse[group.rows] = state.lse[0].view(queries.shape[:3]).transpose(0, 1)[:count]
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
        row_q = q[starts[row] : starts[row + 1]].transpose(0, 1)[None]
        stop = used + row_q.shape[2]
        k = keys[slot : slot + 1, :, :stop]
        v = values[slot : slot + 1, :, :stop]
        prefix = context.prefixes[row]
        if prefix is None:
            out = rectangles.attend_tail(row_q, k, v, spec)
        else:
            out = _attend_after_prefix(row_q, k, v, prefix, spec, layer)
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
    prefix_length = int(prefix.used[0])
    # Mask the keys after each query.
    mask = torch.zeros(count, k.shape[2], dtype=q.dtype, device=q.device)
    mask.masked_fill_(
        torch.ones_like(mask, dtype=torch.bool).triu_(k.shape[2] - count + 1), -torch.inf
    )
    # Pad keys to whole vectors and queries to a minimum, for the same rounding as in training.
    padding = kernels.in_vectors(k.shape[2], q.device) - k.shape[2]
    extra_rows = max(0, kernels.MIN_QUERIES - count)
    padded_q = F.pad(q, (0, 0, 0, extra_rows))
    mask = F.pad(F.pad(mask, (0, padding), value=-torch.inf), (0, 0, 0, extra_rows))
    k, v = rectangles.repeat_kv_heads(q, F.pad(k, (0, 0, 0, padding)), F.pad(v, (0, 0, 0, padding)))
    state = attend_to(padded_q, k, v, spec.scale, mask=mask)
    k, v = rectangles.repeat_kv_heads(
        q, prefix.keys[layer][:, :, :prefix_length], prefix.values[layer][:, :, :prefix_length]
    )
    prefix_state = attend_to(padded_q, k, v, spec.scale)
    return merge_states(state, prefix_state).out[:, :, :count]
