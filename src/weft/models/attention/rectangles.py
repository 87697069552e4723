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


def attend_dense(given: AttentionInputs, context: Dense) -> Tensor:
    """Return causal attention within each sequence, [T, heads, dim]."""
    outputs = []
    for bucket in context.buckets:
        dropped = partial(_drop_weights, given, bucket) if given.has_dropout else None
        cells = (_to_cells(given.q, bucket), _to_cells(given.k, bucket), _to_cells(given.v, bucket))
        out = attend_causal(*cells, given.spec, dropped).transpose(1, 2).flatten(0, 1)
        outputs.append(out if bucket.valid is None else out.index_select(0, bucket.valid))
    joined = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    if context.cell_positions is None:
        return joined
    return joined.index_select(0, context.cell_positions)


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
    tail = kernels.in_vectors(length, q.device) - length
    if tail and drop is None:
        q = F.pad(q, (0, 0, 0, tail))
        k = F.pad(k, (0, 0, 0, tail))
        v = F.pad(v, (0, 0, 0, tail))
    limited = spec.window is not None and spec.window < length
    if spec.softcap is None and not limited and drop is None:
        shared = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=spec.scale, enable_gqa=shared
        )
    else:
        places = torch.arange(q.shape[2], device=q.device)
        out = attend_masked(q, k, v, is_visible(places[:, None], places, spec), spec, drop)
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
    places = torch.arange(length + padding, device=q.device)
    if q.device.type == "cpu":
        more = max(0, kernels.LEAST_QUERIES - count)
    else:
        more = 0
    seen = is_visible(places[length - count : length, None], places, spec)
    q = F.pad(q, (0, 0, 0, more))
    seen = F.pad(seen, (0, 0, 0, more), value=True)
    return attend_masked(
        q, F.pad(k, (0, 0, 0, padding)), F.pad(v, (0, 0, 0, padding)), seen, spec, drop
    )[:, :, :count]


def is_visible(query: Tensor, key: Tensor, spec: AttentionSpec) -> Tensor:
    """Return a mask that is True where position `query` attends to position `key`.

    A position attends to itself and to earlier positions, within the window of `spec`. The two
    tensors are broadcast.
    """
    seen = key <= query
    return seen if spec.window is None else seen & (key > query - spec.window)


def attend_masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    spec: AttentionSpec,
    drop: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Compute attention as `attend_causal` does, but over the keys selected by the mask `seen`.

    `seen` is bool and broadcasts to [n, heads, rows, keys].
    """
    shared = q.shape[1] != k.shape[1]
    if spec.softcap is None and drop is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=spec.scale, enable_gqa=shared
        )
    k, v = repeat_kv_heads(q, k, v)
    logits = torch.matmul(q, k.transpose(-1, -2)) * spec.scale
    if spec.softcap is not None:
        logits = torch.tanh(logits / spec.softcap) * spec.softcap
    logits = logits.masked_fill(~seen, float("-inf"))
    softmax_dtype = torch.promote_types(q.dtype, torch.float32)
    weights = torch.softmax(logits, dim=-1, dtype=softmax_dtype).to(q.dtype)
    return torch.matmul(weights if drop is None else drop(weights), v)


def repeat_kv_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return k and v [n, kv_heads, ...] with each head repeated for every query head that reads it."""
    group = q.shape[1] // k.shape[1]
    if group == 1:
        return k, v
    return k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)


def _drop_weights(given: AttentionInputs, bucket: SequenceBucket, weights: Tensor) -> Tensor:
    assert given.dropout is not None
    return given.dropout.drop_weights(weights, given.spec.dropout, bucket.index)


def _to_cells(x: Tensor, bucket: SequenceBucket) -> Tensor:
    """Return the tokens of the sequences in `bucket` as a padded rectangle, [n, heads, L, dim].

    x [T, heads, dim] contains all tokens of the pack. The result is a view of x and not a copy if
    the rectangle consists of consecutive tokens.
    """
    if bucket.span is None:
        cells = x.index_select(0, bucket.index.flatten())
    else:
        cells = x[bucket.span[0] : bucket.span[1]]
    return cells.unflatten(0, tuple(bucket.index.shape)).transpose(1, 2)
