"""Attention that is computed in parts, each over some of the keys, and merged exactly.

For one row and part i of the keys, s_i are the scores and v_i the values of these keys. Let o_i =
softmax(s_i) v_i and l_i = log sum exp s_i. The merged values are l = log sum exp l_i and o = sum_i
exp(l_i - l) o_i.

The backward pass of flash attention (Dao et al. 2022, arXiv:2205.14135, algorithm 4) needs only the
output and the log-sum-exp of each row. It therefore runs once per part with the merged output and
log-sum-exp, and the gradients of the parts are added.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.kernels import AttentionState, in_vectors
from weft.models.attention.contexts import AttentionPart, SequenceBucket

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


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

    `mask`, if given, is added to the scores. With `causal`, the query at index i attends only to
    the keys at indices up to i. The result can be merged with the attention of the same queries
    over other keys.
    """
    out, lse = _forward(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    return AttentionState(out, lse)


def merge_states(left: AttentionState, right: AttentionState) -> AttentionState:
    """Return the attention of some rows over the union of two disjoint sets of keys.

    `left` and `right` are the attention of the same rows over each of the two sets. Training and
    decoding merge with the same rounding: the merge uses only exp and log, whose results do not
    depend on an element's position in the tensor.
    """
    most = torch.maximum(left.lse, right.lse)
    weights = [(part.lse - most).exp_() for part in (left, right)]
    total = weights[0] + weights[1]
    shares = [(weight / total).unsqueeze(-1).to(left.out.dtype) for weight in weights]
    return AttentionState(left.out * shares[0] + right.out * shares[1], total.log().add_(most))


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
            # Attend to the keys of this part only.
            cells = _take_rectangles(q, k, v, part, group)
            length = part.queries.index.shape[1]
            # Pad keys to whole vectors, as `rectangles` does, for the same rounding.
            tail = (0, 0, 0, in_vectors(length, q.device) - length)
            padded = [F.pad(x, tail) if part.causal or x is cells[0] else x for x in cells]
            seen = attend_to(padded[0], padded[1], padded[2], scale, causal=part.causal)
            part_out = seen.out[:, :, :length]
            sums = seen.lse[:, :, :length]
            new = AttentionState(
                _to_rows(part_out, part.queries),
                _to_rows(sums.unsqueeze(-1), part.queries).squeeze(-1),
            )
            # The causal part is the first of each row; merge the others with it.
            if part.causal:
                _put(out, part.queries, new.out)
                _put(lse, part.queries, new.lse)
            else:
                merged = merge_states(
                    AttentionState(
                        _select_tokens(out, part.queries), _select_tokens(lse, part.queries)
                    ),
                    new,
                )
                _put(out, part.queries, merged.out)
                _put(lse, part.queries, merged.lse)
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
            sums = _to_cells(lse.unsqueeze(-1), queries).squeeze(-1)
            grad_out = _to_cells(gradients[0], queries)
            if queries.valid is not None:
                grad_out = grad_out * _is_valid(queries, grad_out)[:, None, :, None]
            part_q, part_k, part_v = _backward(
                grad_out,
                *_take_rectangles(q, k, v, part, group),
                _to_cells(out, queries),
                sums,
                0.0,
                part.causal,
                scale=ctx.scale,
            )
            _add(grad_q, queries, _to_rows(part_q, queries))
            for total, part_grad in ((grad_k, part_k), (grad_v, part_v)):
                summed = part_grad if group == 1 else part_grad.unflatten(1, (-1, group)).sum(2)
                _add(total, keys, _to_rows(summed, keys))
        return grad_q, grad_k, grad_v, None, None


def _take_rectangles(
    q: Tensor, k: Tensor, v: Tensor, part: AttentionPart, group: int
) -> tuple[Tensor, Tensor, Tensor]:
    keys, values = _to_cells(k, part.keys), _to_cells(v, part.keys)
    if group > 1:
        keys = keys.repeat_interleave(group, dim=1)
        values = values.repeat_interleave(group, dim=1)
    return _to_cells(q, part.queries), keys, values


def _to_cells(x: Tensor, bucket: SequenceBucket) -> Tensor:
    """Return the tokens of the sequences in `bucket` as a padded rectangle, [n, heads, L, dim].

    x [T, heads, dim] contains all tokens of the pack.
    """
    return (
        _select_tokens(x, bucket, padded=True)
        .unflatten(0, tuple(bucket.index.shape))
        .transpose(1, 2)
    )


def _to_rows(cells: Tensor, bucket: SequenceBucket) -> Tensor:
    """Return a padded bucket's values without the padding.

    `cells` is [n, heads, L, dim] for n sequences padded to length L; the result is [tokens, heads,
    dim].
    """
    flat = cells.transpose(1, 2).flatten(0, 1)
    return flat if bucket.valid is None else flat.index_select(0, bucket.valid)


def _is_valid(bucket: SequenceBucket, like: Tensor) -> Tensor:
    """Return a mask of a bucket's padded rectangle, [n, L]: 1 for tokens and 0 for padding.

    The mask has the dtype of `like`.
    """
    assert bucket.valid is not None
    return (
        like.new_zeros(bucket.index.numel())
        .index_fill_(0, bucket.valid, 1.0)
        .view(bucket.index.shape)
    )


def _select_tokens(x: Tensor, bucket: SequenceBucket, padded: bool = False) -> Tensor:
    """Return the rows of x [T, ...] for the tokens of the sequences in `bucket`.

    If `padded`, the result also has a row for each padding cell of the bucket's rectangle.
    """
    if bucket.span is not None:
        return x[bucket.span[0] : bucket.span[1]]
    return x.index_select(0, bucket.index.flatten() if padded else bucket.tokens)


def _put(x: Tensor, bucket: SequenceBucket, values: Tensor) -> None:
    if bucket.span is not None:
        x[bucket.span[0] : bucket.span[1]] = values
    else:
        x.index_copy_(0, bucket.tokens, values)


def _add(x: Tensor, bucket: SequenceBucket, values: Tensor) -> None:
    if bucket.span is not None:
        x[bucket.span[0] : bucket.span[1]] += values
    else:
        x.index_add_(0, bucket.tokens, values)
