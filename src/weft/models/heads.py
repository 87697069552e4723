"""From hidden states to log-probs, entropy, top-1, values and scores, in float32 (float64 for float64 networks).

The [N, vocabulary] logits never exist at once: forward and backward go through the rows in chunks and the backward pass
computes each chunk's logits again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.algorithms.base import Output

CHUNK_CELLS = 1 << 23  # logits held at once: 32 MB in float32


@dataclass(frozen=True)
class Support:
    """The ids that sampling kept at each row (top-k, top-p, min-p); log-probs are normalised over them.

    A row without ids is normalised over the whole vocabulary. A row's label always counts as kept.
    """

    ids: Tensor  # int64 [sum of counts]
    counts: Tensor  # int64 [N]


@dataclass(frozen=True)
class Projection:
    """The output layer: logits = cap(hidden weight^T + bias) / temperature, cap(x) = softcap tanh(x / softcap)."""

    weight: Tensor  # [V, H]
    bias: Tensor | None = None  # [V]
    softcap: float | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, V] in float32 before any temperature; as many rows as the caller wants to hold."""
        return _cap(_project(hidden, self.weight, self.bias), self.softcap)


def token_outputs(
    hidden: Tensor, labels: Tensor, projection: Projection, want: frozenset[Output], *,
    temperature: float = 1.0, support: Support | None = None, chunk: int | None = None,
) -> dict[Output, Tensor]:  # fmt: skip
    """`want` of float32 [N] logprobs of `labels`, entropy in nats, and top1, from `hidden` [N, H] and `labels` int64 [N].

    All are of softmax(logits / temperature), over the support where one is given. Log-probs and entropy are differentiable in
    the hidden states and the projection; top1 (1 where the label is the likeliest id) is not. `chunk` is the number of rows
    handled at once; by default as many as keep the logits small.
    """
    rows = chunk or max(1, CHUNK_CELLS // projection.weight.shape[0])
    settings = _Settings(projection.softcap, temperature, rows, "entropy" in want, "top1" in want, support)
    values = _TokenOutputs.apply(hidden, projection.weight, projection.bias, labels, settings)
    names: tuple[Output, ...] = ("logprobs", "entropy", "top1")
    return {name: value for name, value in zip(names, values, strict=True) if name in want}


@dataclass(frozen=True)
class _Settings:
    softcap: float | None
    temperature: float
    chunk: int
    entropy: bool
    top1: bool
    support: Support | None


class _TokenOutputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, settings: _Settings
    ) -> tuple[Tensor, Tensor, Tensor]:
        kept = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = hidden.new_empty(len(labels), dtype=kept)
        entropies = hidden.new_empty(len(labels) if settings.entropy else 0, dtype=kept)
        top1 = hidden.new_empty(len(labels) if settings.top1 else 0, dtype=kept)
        for rows in _chunks(len(labels), settings.chunk):
            logits = _tempered(_cap(_project(hidden[rows], weight, bias), settings.softcap), rows, labels, settings)
            logp = torch.log_softmax(logits, dim=-1)
            logprobs[rows] = logp.gather(1, labels[rows, None])[:, 0]
            if settings.entropy:
                entropies[rows] = -_times(logp.exp(), logp).sum(-1)
            if settings.top1:
                top1[rows] = (logp.argmax(-1) == labels[rows]).to(kept)
        ctx.save_for_backward(hidden, weight, bias, labels, entropies)
        ctx.settings = settings
        ctx.mark_non_differentiable(top1)
        return logprobs, entropies, top1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        by_logprob, by_entropy = gradients[:2]
        hidden, weight, bias, labels, entropies = ctx.saved_tensors
        settings: _Settings = ctx.settings
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        kept = torch.promote_types(weight.dtype, torch.float32)
        to_hidden = torch.empty_like(hidden) if wants_hidden else None
        to_weight = torch.zeros_like(weight, dtype=kept) if wants_weight else None
        to_bias = torch.zeros_like(bias, dtype=kept) if wants_bias else None
        for rows in _chunks(len(labels), settings.chunk):
            raw = _project(hidden[rows], weight, bias)
            capped = _cap(raw, settings.softcap)
            logp = torch.log_softmax(_tempered(capped, rows, labels, settings), dim=-1)
            p = logp.exp()
            by_logit = p * -by_logprob[rows, None]
            by_logit.scatter_add_(1, labels[rows, None], by_logprob[rows, None])
            if settings.entropy:
                by_logit -= by_entropy[rows, None] * (_times(p, logp) + p * entropies[rows, None])
            if settings.temperature != 1.0:
                by_logit /= settings.temperature
            if settings.softcap is not None:
                by_logit *= 1 - (capped / settings.softcap) ** 2
            by_raw = by_logit.to(weight.dtype)
            if to_hidden is not None:
                to_hidden[rows] = (by_raw @ weight).to(hidden.dtype)
            if to_weight is not None:
                to_weight += by_raw.T @ hidden[rows]
            if to_bias is not None:
                to_bias += by_logit.sum(0)
        cast_weight = None if to_weight is None else to_weight.to(weight.dtype)
        return to_hidden, cast_weight, None if to_bias is None else to_bias.to(bias.dtype), None, None


def _chunks(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _project(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _cap(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def _times(p: Tensor, logp: Tensor) -> Tensor:
    """p log p, with 0 where p is 0."""
    return torch.where(p > 0, p * logp, torch.zeros_like(p))


def _tempered(logits: Tensor, rows: slice, labels: Tensor, settings: _Settings) -> Tensor:
    """Logits over the temperature; ids outside a row's support at minus infinity."""
    if settings.temperature != 1.0:
        logits = logits / settings.temperature
    if settings.support is None:
        return logits
    counts = settings.support.counts
    ends = counts.cumsum(0)
    first = int(ends[rows.start] - counts[rows.start])
    ids = settings.support.ids[first : int(ends[rows.stop - 1])]
    here = counts[rows]
    outside = (here > 0)[:, None].repeat(1, logits.shape[1])
    outside[torch.arange(len(here), device=ids.device).repeat_interleave(here), ids] = False
    outside.scatter_(1, labels[rows, None], False)
    return logits.masked_fill(outside, float("-inf"))


def row_values(hidden: Tensor, weight: Tensor) -> Tensor:
    """[N, H] -> [N] float32: one value a row; `weight` is [1, H]."""
    return _project(hidden, weight, None)[:, 0]


def sequence_scores(hidden: Tensor, weight: Tensor, lengths: Tensor, pooling: str) -> Tensor:
    """[T, H] -> [S] float32: one score a sequence, from its last token's state or the mean over its tokens.

    `lengths` int64 [S] sum to T. The head is linear, so the mean of the tokens' scores is the score of their mean.
    """
    if pooling == "last":
        return row_values(hidden[lengths.cumsum(0) - 1], weight)
    sequence = torch.arange(len(lengths), device=hidden.device).repeat_interleave(lengths)
    per_token = row_values(hidden, weight)
    return per_token.new_zeros(len(lengths)).index_add(0, sequence, per_token) / lengths
