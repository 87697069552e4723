"""From hidden states to log-probs, entropy, top-1, values and scores, in float32 (float64 for float64 networks).

The [N, vocabulary] logits never exist at once: the pass goes through the rows in chunks. Where a row's gradient depends on its
own outputs alone, each chunk's gradients are made while its logits are there; else the backward pass computes them again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.algorithms.base import Output
from weft.models.native import library
from weft.models.native import logits as native
from weft.models.packed import AttentionContext, Packed
from weft.models.products import add_product, linear, product
from weft.models.tied import Tied

# The gradients of log-probs and entropy as a function of them, all [N], where a row's depend on its own outputs alone; those of
# rows not computed yet are 0, and that of the log-probs is always there.
Gradient = Callable[[Mapping[Output, Tensor]], Mapping[Output, Tensor]]

# Logits held at once, and rows at least. On a CPU 64 MB in float32, or what few rows of a large vocabulary take; an
# accelerator needs more rows to run at full speed.
CHUNK_CELLS = {"cpu": 1 << 24}
DEFAULT_CHUNK_CELLS = 1 << 27
LEAST_CHUNK_ROWS = 256  # each chunk reads all of the output matrix, which fewer are not worth


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
class TopIds:
    """Asks for the `count` likeliest ids of each row, of those below `below`; for all of these where they are fewer."""

    count: int
    below: int | None = None


@dataclass(frozen=True)
class Projection:
    """The output layer: logits = cap(hidden weight^T + bias) / temperature, cap(x) = softcap tanh(x / softcap)."""

    weight: Tensor  # [V, H]
    bias: Tensor | None = None  # [V]
    softcap: float | None = None
    tied: Tied | None = None  # where the gradient of a weight goes that is looked up in, too

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, V] in float32 before any temperature; as many rows as the caller wants to hold."""
        return _cap(_wide(linear(hidden, self.weight, self.bias)), self.softcap)


def token_outputs(
    hidden: Tensor, labels: Tensor, projection: Projection, want: frozenset[Output], *,
    temperature: float = 1.0, support: Support | None = None, chunk: int | None = None, gradient: Gradient | None = None,
) -> dict[Output, Tensor]:  # fmt: skip
    """`want` of float32 [N] logprobs of `labels`, entropy in nats, and top1, from `hidden` [N, H] and `labels` int64 [N].

    All are of softmax(logits / temperature), over the support where one is given. Log-probs and entropy are differentiable in
    the hidden states and the projection; top1 (1 where the label is the likeliest id) is not. `chunk` is the number of rows
    handled at once; by default as many as keep the logits small. `gradient` says what log-probs and entropy will get, where
    each row's depends on its own outputs alone: the backward pass then need not compute the logits again.
    """
    known = gradient if torch.is_grad_enabled() else None
    rows = chunk or chunk_rows(projection.weight.shape[0], hidden.device)
    wanted = ("entropy" in want, "top1" in want)
    settings = _Settings(projection.softcap, temperature, rows, *wanted, support, known, projection.tied)
    values = _TokenOutputs.apply(hidden, projection.weight, projection.bias, labels, settings)
    names: tuple[Output, ...] = ("logprobs", "entropy", "top1")
    return {name: value for name, value in zip(names, values, strict=True) if name in want}


def chunk_rows(vocab_size: int, device: torch.device) -> int:
    """Rows whose logits are held at once."""
    return max(LEAST_CHUNK_ROWS, CHUNK_CELLS.get(device.type, DEFAULT_CHUNK_CELLS) // vocab_size)


@dataclass(frozen=True)
class _Settings:
    softcap: float | None
    temperature: float
    chunk: int
    entropy: bool
    top1: bool
    support: Support | None
    gradient: Gradient | None
    tied: Tied | None


class Gradients:
    """The gradients of a projection's inputs, added up over chunks of rows."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: Sequence[bool]) -> None:
        self._kept = torch.promote_types(weight.dtype, torch.float32)
        self._inputs, self._needed = (hidden, weight, bias), needed
        self._to_hidden = torch.empty_like(hidden) if needed[0] else None
        self._to_weight: Tensor | None = None
        self._to_bias = torch.zeros_like(bias, dtype=self._kept) if bias is not None and needed[2] else None

    def add(self, rows: slice, by_logit: Tensor, scale: Tensor) -> None:
        """The gradient by the logits of `rows` is scale * by_logit; the scale goes to the short side of each product."""
        hidden, weight, _ = self._inputs
        by_raw = by_logit.to(weight.dtype)
        if self._to_hidden is not None:
            self._to_hidden[rows] = (product(by_raw, weight.T) * scale[:, None]).to(hidden.dtype)
        if self._needed[1]:
            self._add_to_weight(by_raw, (hidden[rows] * scale[:, None]).to(weight.dtype))
        if self._to_bias is not None:
            self._to_bias += scale @ by_logit

    def _add_to_weight(self, by_logit: Tensor, hidden: Tensor) -> None:
        if self._to_weight is None and hidden.dtype == self._kept:
            self._to_weight = product(
                by_logit.T, hidden.T
            )  # there is nothing yet that would have to be filled and read
        else:
            add_product(self._weight_so_far(), by_logit.T, hidden.T)

    def _weight_so_far(self) -> Tensor:
        if self._to_weight is None:
            self._to_weight = torch.zeros_like(self._inputs[1], dtype=self._kept)
        return self._to_weight

    def cast(self, tied: Tied | None) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        """In the dtypes of the inputs; that of the weight goes to where it is `tied`."""
        _, weight, bias = self._inputs
        to_weight = self._weight_so_far().to(weight.dtype) if self._needed[1] else None
        to_bias = None if self._to_bias is None or bias is None else self._to_bias.to(bias.dtype)
        if tied is not None:
            tied.leave(to_weight)
            to_weight = None
        return self._to_hidden, to_weight, to_bias, None, None


@dataclass(frozen=True)
class _Softmax:
    """Of some rows: logits over the temperature, and what is known of their softmax: statistics, or all log-probs."""

    logits: Tensor
    capped: Tensor
    found: native.Statistics | None
    logp: Tensor | None

    def by_logit(
        self, labels: Tensor, by_logprob: Tensor, by_entropy: Tensor | None, settings: _Settings
    ) -> tuple[Tensor, Tensor]:
        """(the gradient by the logits before the temperature [R, V], what to multiply its rows by [R]), in the place of what
        was known."""
        whole = torch.full_like(by_logprob, 1.0 / settings.temperature)
        if self.found is not None:
            made = self.capped.clone() if settings.softcap is not None and self.logits is self.capped else self.logits
            native.to_gradients(made, self.found, labels, by_logprob, by_entropy)
            return through_cap(made, self.capped, settings.softcap), whole
        assert self.logp is not None
        if by_entropy is None:
            p = self.logp.exp_()
            p.scatter_add_(1, labels[:, None], p.new_full((len(p), 1), -1.0))
            return through_cap(p, self.capped, settings.softcap), -by_logprob / settings.temperature
        p, finite = self.logp.exp(), _finite(self.logp, settings)
        made = p * -by_logprob[:, None]
        made.scatter_add_(1, labels[:, None], by_logprob[:, None])
        made -= by_entropy[:, None] * p * (finite - torch.linalg.vecdot(p, finite)[:, None])
        return through_cap(made, self.capped, settings.softcap), whole


class _TokenOutputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, settings: _Settings
    ) -> tuple[Tensor, Tensor, Tensor]:
        kept = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = hidden.new_zeros(len(labels), dtype=kept)
        entropies = hidden.new_zeros(len(labels) if settings.entropy else 0, dtype=kept)
        top1 = hidden.new_zeros(len(labels) if settings.top1 else 0, dtype=kept)
        lse = torch.zeros_like(logprobs)
        outputs: dict[Output, Tensor] = {"logprobs": logprobs}
        if settings.entropy:
            outputs["entropy"] = entropies
        given: dict[Output, Tensor] = {}
        total = None
        if settings.gradient is not None and any(ctx.needs_input_grad):
            total = Gradients(hidden, weight, bias, ctx.needs_input_grad)
        for rows in chunks(len(labels), settings.chunk):
            capped = _cap(_project(hidden[rows], weight, bias), settings.softcap)
            logits, at = _tempered(capped, rows, labels, settings), labels[rows]
            found, logp = None, None
            if library.serves(logits):
                found = native.statistics(logits, entropy=settings.entropy, best=settings.top1)
                lse[rows] = found.lse
                logprobs[rows] = logits.gather(1, at[:, None])[:, 0] - found.lse
                if found.entropy is not None:
                    entropies[rows] = found.entropy
                best = found.best
            else:
                logp = torch.log_softmax(logits, dim=-1)
                logprobs[rows] = logp.gather(1, at[:, None])[:, 0]
                if settings.entropy:
                    entropies[rows] = -torch.linalg.vecdot(logp.exp(), _finite(logp, settings))
                best = logp.argmax(-1) if settings.top1 else None
            if best is not None:
                top1[rows] = (best == at).to(kept)
            if settings.gradient is not None and total is not None:
                for name, value in settings.gradient(outputs).items():
                    given.setdefault(name, torch.zeros_like(value))[rows] = value[rows]
                total.add(rows, *_Softmax(logits, capped, found, logp).by_logit(at, *_of(given, rows), settings))
            del capped, logits, logp  # before the next rows' are made
        ctx.save_for_backward(hidden, weight, bias, labels, lse, entropies)
        ctx.settings, ctx.made = settings, None if total is None else (total, given)
        ctx.mark_non_differentiable(top1)
        ctx.set_materialize_grads(False)  # an entropy that is only looked at costs nothing here
        return logprobs, entropies, top1

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        hidden, weight, bias, labels, lse, entropies = ctx.saved_tensors
        settings: _Settings = ctx.settings
        made: tuple[Gradients, dict[Output, Tensor]] | None = ctx.made
        ctx.made = None  # nothing but the parameters keeps them
        if (
            made is not None
            and same(gradients[0], made[1].get("logprobs"))
            and same(gradients[1], made[1].get("entropy"))
        ):
            return made[0].cast(settings.tied)
        total = Gradients(hidden, weight, bias, ctx.needs_input_grad)
        known: dict[Output, Tensor] = {"logprobs": torch.zeros_like(lse) if gradients[0] is None else gradients[0]}
        if gradients[1] is not None:
            known["entropy"] = gradients[1]
        for rows in chunks(len(labels), settings.chunk):
            capped = _cap(_project(hidden[rows], weight, bias), settings.softcap)
            logits = _tempered(capped, rows, labels, settings)
            found, logp = None, None
            if library.serves(logits):
                found = native.Statistics(lse[rows], entropies[rows] if "entropy" in known else None, None)
            else:
                logp = torch.log_softmax(logits, dim=-1)
            softmax = _Softmax(logits, capped, found, logp)
            total.add(rows, *softmax.by_logit(labels[rows], *_of(known, rows), settings))
            del capped, logits, logp, softmax  # before the next rows' are made
        return total.cast(settings.tied)


def _of(gradients: Mapping[Output, Tensor], rows: slice) -> tuple[Tensor, Tensor | None]:
    """Those of the log-probs and of the entropy of some rows."""
    by_entropy = gradients.get("entropy")
    return gradients["logprobs"][rows], None if by_entropy is None else by_entropy[rows]


def through_cap(by_logit: Tensor, capped: Tensor, softcap: float | None) -> Tensor:
    """The gradient by logits before the cap, in the place of that by `capped` ones."""
    return by_logit if softcap is None else by_logit.mul_((capped / softcap).square_().neg_().add_(1))


def same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether a gradient is what it was said to be; an accelerator takes it at its word, since asking would make it wait."""
    if one is None or other is None:
        return one is other
    return one.device.type != "cpu" or torch.equal(one, other)


def chunks(total: int, size: int) -> list[slice]:
    """Rows 0 to `total`, `size` at a time."""
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
    if settings.temperature != 1.0:  # in place where nobody asks for those before it
        logits = logits.div_(settings.temperature) if settings.softcap is None else logits / settings.temperature
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


def score_rows(x: Packed, padding: int | None) -> Tensor:
    """int64 [S]: the token that a sequence's score is read at, its last one.

    With a `padding` token the last that is another, as `transformers` pools: a sequence that ends with the padding token is
    read one token earlier. A sequence of padding alone is read at its end.
    """
    last = x.attention.last
    if padding is None:
        return last
    places = torch.arange(len(x.tokens), device=last.device)
    read = torch.where(x.tokens != padding, places, -1).cummax(0).values[last]
    starts = x.attention.dense.cu_seqlens.long()
    first = starts[torch.searchsorted(starts, last, right=True) - 1]  # of the segment that a sequence ends in
    return torch.where(read >= first, read, last)


def mean_scores(hidden: Tensor, weight: Tensor, context: AttentionContext) -> Tensor:
    """[T, H] -> [S] float32: one score a sequence, from the mean over its tokens.

    The head is linear, so the mean of the tokens' scores is the score of their mean.
    """
    lengths = context.dense.lengths
    sequence = torch.arange(len(lengths), device=hidden.device).repeat_interleave(lengths)
    per_token = row_values(hidden, weight)
    return per_token.new_zeros(len(lengths)).index_add(0, sequence, per_token) / lengths
