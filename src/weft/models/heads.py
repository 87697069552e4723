"""From hidden states to log-probs, entropy, top-1, values and scores, in float32 (float64 for float64 networks).

The [N, vocabulary] logits never exist at once: forward and backward go through the rows in chunks and the backward pass
computes each chunk's logits again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.algorithms.base import Output
from weft.models.native import library
from weft.models.native import logits as native
from weft.models.packed import AttentionContext
from weft.models.products import add_product, linear, product

# Logits held at once. On a CPU 32 MB in float32, with which its products run at full speed; an accelerator needs more rows.
CHUNK_CELLS = {"cpu": 1 << 23}
DEFAULT_CHUNK_CELLS = 1 << 27


@dataclass(frozen=True)
class Support:
    """The ids that sampling kept at each row (top-k, top-p, min-p); log-probs are normalised over them.

    A row without ids is normalised over the whole vocabulary. A row's label always counts as kept.
    """

    ids: Tensor  # int64 [sum of counts]
    counts: Tensor  # int64 [N]

    def select(self, rows: Tensor) -> Support:
        """The support of some rows, int64 [n] in rising order."""
        chosen = torch.zeros_like(self.counts, dtype=torch.bool).index_fill_(0, rows, True)
        return Support(self.ids[chosen.repeat_interleave(self.counts)], self.counts[rows])


@dataclass(frozen=True)
class Projection:
    """The output layer: logits = cap(hidden weight^T + bias) / temperature, cap(x) = softcap tanh(x / softcap)."""

    weight: Tensor  # [V, H]
    bias: Tensor | None = None  # [V]
    softcap: float | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, V] in float32 before any temperature; as many rows as the caller wants to hold."""
        return _cap(_wide(linear(hidden, self.weight, self.bias)), self.softcap)


def token_outputs(
    hidden: Tensor, labels: Tensor, projection: Projection, want: frozenset[Output], *,
    temperature: float = 1.0, support: Support | None = None, chunk: int | None = None, by_logprob: Tensor | None = None,
) -> dict[Output, Tensor]:  # fmt: skip
    """`want` of float32 [N] logprobs of `labels`, entropy in nats, and top1, from `hidden` [N, H] and `labels` int64 [N].

    All are of softmax(logits / temperature), over the support where one is given. Log-probs and entropy are differentiable in
    the hidden states and the projection; top1 (1 where the label is the likeliest id) is not. `chunk` is the number of rows
    handled at once; by default as many as keep the logits small. `by_logprob` [N] is the gradient that the log-probs will get,
    where it is known (a loss that is linear in them): the backward pass then need not compute the logits again.
    """
    rows = chunk or chunk_rows(projection.weight.shape[0], hidden.device)
    settings = _Settings(projection.softcap, temperature, rows, "entropy" in want, "top1" in want, support, by_logprob)
    values = _TokenOutputs.apply(hidden, projection.weight, projection.bias, labels, settings)
    names: tuple[Output, ...] = ("logprobs", "entropy", "top1")
    return {name: value for name, value in zip(names, values, strict=True) if name in want}


def chunk_rows(vocab_size: int, device: torch.device) -> int:
    """Rows whose logits are held at once."""
    return max(1, CHUNK_CELLS.get(device.type, DEFAULT_CHUNK_CELLS) // vocab_size)


@dataclass(frozen=True)
class _Settings:
    softcap: float | None
    temperature: float
    chunk: int
    entropy: bool
    top1: bool
    support: Support | None
    by_logprob: Tensor | None


class _Gradients:
    """The gradients of a projection's inputs, added up over chunks of rows."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: Sequence[bool]) -> None:
        kept = torch.promote_types(weight.dtype, torch.float32)
        self._inputs = hidden, weight, bias
        self._to_hidden = torch.empty_like(hidden) if needed[0] else None
        self._to_weight = torch.zeros_like(weight, dtype=kept) if needed[1] else None
        self._to_bias = torch.zeros_like(bias, dtype=kept) if bias is not None and needed[2] else None

    def add(self, rows: slice, by_logit: Tensor, scale: Tensor) -> None:
        """The gradient by the logits of `rows` is scale * by_logit; the scale goes to the short side of each product."""
        hidden, weight, _ = self._inputs
        by_raw = by_logit.to(weight.dtype)
        if self._to_hidden is not None:
            self._to_hidden[rows] = (product(by_raw, weight.T) * scale[:, None]).to(hidden.dtype)
        if self._to_weight is not None:
            add_product(self._to_weight, by_raw.T, (hidden[rows] * scale[:, None]).to(weight.dtype))
        if self._to_bias is not None:
            self._to_bias += scale @ by_logit

    def cast(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        """In the dtypes of the inputs."""
        _, weight, bias = self._inputs
        to_weight = None if self._to_weight is None else self._to_weight.to(weight.dtype)
        return (
            self._to_hidden,
            to_weight,
            None if self._to_bias is None or bias is None else self._to_bias.to(bias.dtype),
            None,
            None,
        )


class _TokenOutputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, settings: _Settings
    ) -> tuple[Tensor, Tensor, Tensor]:
        kept = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = hidden.new_empty(len(labels), dtype=kept)
        entropies = hidden.new_empty(len(labels) if settings.entropy else 0, dtype=kept)
        top1 = hidden.new_empty(len(labels) if settings.top1 else 0, dtype=kept)
        known = settings.by_logprob
        gradients = None if known is None else _Gradients(hidden, weight, bias, ctx.needs_input_grad)
        for rows in _chunks(len(labels), settings.chunk):
            capped = _cap(_project(hidden[rows], weight, bias), settings.softcap)
            logits = _tempered(capped, rows, labels, settings)
            if library.serves(logits):
                found = native.statistics(logits, entropy=settings.entropy, best=settings.top1)
                logprobs[rows] = logits.gather(1, labels[rows, None])[:, 0] - found.lse
                if found.entropy is not None:
                    entropies[rows] = found.entropy
                if found.best is not None:
                    top1[rows] = (found.best == labels[rows]).to(kept)
                if gradients is not None and known is not None:
                    by_logit = _by_native(logits, capped, found, labels[rows], known[rows], None, settings)
                    gradients.add(rows, by_logit, torch.full_like(known[rows], 1.0 / settings.temperature))
                continue
            logp = torch.log_softmax(logits, dim=-1)
            logprobs[rows] = logp.gather(1, labels[rows, None])[:, 0]
            if settings.entropy:
                entropies[rows] = -torch.linalg.vecdot(logp.exp(), _finite(logp, settings))
            if settings.top1:
                top1[rows] = (logp.argmax(-1) == labels[rows]).to(kept)
            if gradients is not None and known is not None:
                by_logit = _by_logit(logp.exp_(), capped, labels[rows], settings)
                gradients.add(rows, by_logit, -known[rows] / settings.temperature)
        ctx.save_for_backward(hidden, weight, bias, labels, entropies)
        ctx.settings, ctx.gradients = settings, gradients
        ctx.mark_non_differentiable(top1)
        ctx.set_materialize_grads(False)  # an entropy that is only looked at costs nothing here
        return logprobs, entropies, top1

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        by_logprob, by_entropy = gradients[:2]
        hidden, weight, bias, labels, entropies = ctx.saved_tensors
        settings: _Settings = ctx.settings
        made: _Gradients | None = ctx.gradients
        ctx.gradients = None  # nothing but the parameters keeps them
        if made is not None and by_entropy is None and _same(by_logprob, settings.by_logprob):
            return made.cast()
        total = _Gradients(hidden, weight, bias, ctx.needs_input_grad)
        by_logprob = entropies.new_zeros(len(labels)) if by_logprob is None else by_logprob
        for rows in _chunks(len(labels), settings.chunk):
            capped = _cap(_project(hidden[rows], weight, bias), settings.softcap)
            logits = _tempered(capped, rows, labels, settings)
            if library.serves(logits):
                found = native.statistics(logits, entropy=by_entropy is not None)
                by_rows = None if by_entropy is None else by_entropy[rows]
                by_logit = _by_native(logits, capped, found, labels[rows], by_logprob[rows], by_rows, settings)
                total.add(rows, by_logit, torch.full_like(by_logprob[rows], 1.0 / settings.temperature))
                continue
            if by_entropy is None:
                by_logit = _by_logit(torch.softmax(logits, dim=-1), capped, labels[rows], settings)
                total.add(rows, by_logit, -by_logprob[rows] / settings.temperature)
                continue
            logp = torch.log_softmax(logits, dim=-1)
            p = logp.exp()
            by_logit = p * -by_logprob[rows, None]
            by_logit.scatter_add_(1, labels[rows, None], by_logprob[rows, None])
            by_logit -= by_entropy[rows, None] * p * (_finite(logp, settings) + entropies[rows, None])
            by_logit = _through_cap(by_logit, capped, settings)
            total.add(rows, by_logit, torch.full_like(by_logprob[rows], 1.0 / settings.temperature))
        return total.cast()


def _by_logit(p: Tensor, capped: Tensor, labels: Tensor, settings: _Settings) -> Tensor:
    """The gradient of minus each row's log-prob by its logits, in the place of `p`: p - 1 at the label."""
    p.scatter_add_(1, labels[:, None], p.new_full((len(p), 1), -1.0))
    return _through_cap(p, capped, settings)


def _by_native(
    logits: Tensor, capped: Tensor, found: native.Statistics, labels: Tensor, by_logprob: Tensor, by_entropy: Tensor | None,
    settings: _Settings,
) -> Tensor:  # fmt: skip
    """The gradient by the logits before the temperature, times the temperature; in the place of `logits`."""
    if settings.softcap is not None and logits is capped:
        logits = capped.clone()
    native.to_gradients(logits, found, labels, by_logprob, by_entropy)
    return _through_cap(logits, capped, settings)


def _through_cap(by_logit: Tensor, capped: Tensor, settings: _Settings) -> Tensor:
    return by_logit if settings.softcap is None else by_logit.mul_(1 - (capped / settings.softcap) ** 2)


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether a loss that is said to be linear is; an accelerator takes it at its word, since asking would make it wait."""
    return one is not None and other is not None and (one.device.type != "cpu" or torch.equal(one, other))


def _chunks(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _project(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _wide(product(hidden, weight, bias))


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _cap(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def _finite(logp: Tensor, settings: _Settings) -> Tensor:
    """logp with 0 where an id is outside its row's support, so that p log p is 0 there."""
    return logp if settings.support is None else logp.masked_fill(logp == float("-inf"), 0.0)


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
    return _wide(linear(hidden, weight)[:, 0])


def sequence_scores(hidden: Tensor, weight: Tensor, context: AttentionContext, pooling: str) -> Tensor:
    """[T, H] -> [S] float32: one score a sequence, from its last token's state or the mean over its tokens.

    The head is linear, so the mean of the tokens' scores is the score of their mean.
    """
    if pooling == "last":
        return row_values(hidden[context.last], weight)
    lengths = context.dense.lengths
    sequence = torch.arange(len(lengths), device=hidden.device).repeat_interleave(lengths)
    per_token = row_values(hidden, weight)
    return per_token.new_zeros(len(lengths)).index_add(0, sequence, per_token) / lengths
