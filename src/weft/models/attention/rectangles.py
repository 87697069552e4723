"""Attention by torch over padded rectangles, each of which has sequences of similar length.

The padding follows each sequence, so causal attention never reads it, and torch's fast causal
kernel is exact without a mask. That kernel does not support soft caps, windows or dropout of
attention weights. With any of these, scores, weights and outputs are computed in separate steps.

On a CPU, the keys are padded to a multiple of the number of floats in a vector register, and the
queries to a minimum number of rows per head. Every row is then summed in the same order, regardless
of the other rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from weft import kernels
from weft.kernels import AttentionSpec
from weft.models.attention.contexts import AttentionInputs, Dense, SequenceBucket


def attend_dense(inputs: AttentionInputs, context: Dense) -> Tensor:
    """Return causal attention within each sequence, [T, heads, dim]."""
    outputs = []
    for bucket in context.buckets:
        drop = partial(_drop_weights, inputs, bucket) if inputs.has_dropout else None
        q, k, v = (pad_to_rectangle(x, bucket) for x in (inputs.q, inputs.k, inputs.v))
        padded = attend_causal(q, k, v, inputs.spec, drop).transpose(1, 2).flatten(0, 1)
        outputs.append(padded if bucket.valid is None else padded.index_select(0, bucket.valid))
    output = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    if context.cell_positions is None:
        return output
    return output.index_select(0, context.cell_positions)


def attend_causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    drop: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return the output of causal attention within each sequence, [n, heads, L, dim].

    q is [n, heads, L, dim], and k and v are [n, kv_heads, L, dim], for n sequences padded to L
    tokens. `drop`, if given, applies dropout to the attention weights.
    """
    length = q.shape[2]
    padding = kernels.in_vectors(length, q.device) - length
    if padding and drop is None:
        q = F.pad(q, (0, 0, 0, padding))
        k = F.pad(k, (0, 0, 0, padding))
        v = F.pad(v, (0, 0, 0, padding))
    has_window = spec.window is not None and spec.window < length
    if spec.softcap is None and not has_window and drop is None:
        has_groups = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=spec.scale, enable_gqa=has_groups
        )
    else:
        positions = torch.arange(q.shape[2], device=q.device)
        out = attend_masked(q, k, v, is_visible(positions[:, None], positions, spec), spec, drop)
    return out[:, :, :length]


def attend_tail(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    drop: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return attention of a sequence's last n tokens over all tokens of the sequence.

    q and the result are [1, heads, n, dim]; k and v are [1, kv_heads, L, dim]. `drop`, if given,
    applies dropout to the attention weights.
    """
    count = q.shape[2]
    length = k.shape[2]
    padding = kernels.in_vectors(length, q.device) - length
    positions = torch.arange(length + padding, device=q.device)
    # On a CPU, add queries that see all keys, for the same rounding as with many queries.
    if q.device.type == "cpu":
        extra_rows = max(0, kernels.MIN_QUERIES - count)
    else:
        extra_rows = 0
    mask = is_visible(positions[length - count : length, None], positions, spec)
    q = F.pad(q, (0, 0, 0, extra_rows))
    mask = F.pad(mask, (0, 0, 0, extra_rows), value=True)
    k = F.pad(k, (0, 0, 0, padding))
    v = F.pad(v, (0, 0, 0, padding))
    return attend_masked(q, k, v, mask, spec, drop)[:, :, :count]


def is_visible(query: Tensor, key: Tensor, spec: AttentionSpec) -> Tensor:
    """Return a mask that is True where position `query` attends to position `key`.

    A position attends to itself and to earlier positions, within the window of `spec`. The two
    tensors are broadcast.
    """
    is_causal = key <= query
    return is_causal if spec.window is None else is_causal & (key > query - spec.window)


def attend_masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    spec: AttentionSpec,
    drop: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Compute attention as `attend_causal` does, but over the keys for which `mask` is True.

    `mask` is bool and broadcasts to [n, heads, rows, keys].
    """
    has_groups = q.shape[1] != k.shape[1]
    if spec.softcap is None and drop is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=spec.scale, enable_gqa=has_groups
        )
    k, v = repeat_kv_heads(q, k, v)
    logits = torch.matmul(q, k.transpose(-1, -2)) * spec.scale
    if spec.softcap is not None:
        logits = torch.tanh(logits / spec.softcap) * spec.softcap
    logits = logits.masked_fill(~mask, float("-inf"))
    softmax_dtype = torch.promote_types(q.dtype, torch.float32)
    weights = torch.softmax(logits, dim=-1, dtype=softmax_dtype).to(q.dtype)
    return torch.matmul(weights if drop is None else drop(weights), v)


def repeat_kv_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return k and v [n, kv_heads, ...] with each head repeated for every query head that reads it."""
    group = q.shape[1] // k.shape[1]
    if group == 1:
        return k, v
    return k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)


def _drop_weights(inputs: AttentionInputs, bucket: SequenceBucket, weights: Tensor) -> Tensor:
    assert inputs.dropout is not None
    return inputs.dropout.drop_weights(weights, inputs.spec.dropout, bucket.index)


def pad_to_rectangle(x: Tensor, bucket: SequenceBucket) -> Tensor:
    """Return the tokens of the sequences in `bucket` as a padded rectangle, [n, heads, L, dim].

    x [T, heads, dim] contains all tokens of the pack. The result is a view of x and not a copy if
    the rectangle consists of consecutive tokens.
    """
    if bucket.span is None:
        tokens = x.index_select(0, bucket.index.flatten())
    else:
        tokens = x[bucket.span[0] : bucket.span[1]]
    return tokens.unflatten(0, tuple(bucket.index.shape)).transpose(1, 2)
