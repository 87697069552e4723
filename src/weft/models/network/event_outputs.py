"""Outputs of a network with a language-model head for several ids per row.

`token_outputs` computes the outputs for one label. For K ids per row, there are K + 1 events: one
for each of the ids, and one for "any other id". Two networks are compared by the log-probs of these
events: a teacher sends its K most likely ids and the log-probs of the events, and the student
is trained with its own log-probs of the same events.

The probability of "any other id" is the sum over all other ids. Computing it as 1 minus the sum
over the K ids would lose all precision if the K ids have nearly all of the probability. If K is the
size of the vocabulary, the log-prob of "any other id" is minus infinity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft import kernels
from weft.algorithms.base import Output
from weft.models.network.output_projection import (
    OutputProjection,
    OutputVocabulary,
    ProjectionGradients,
    apply_cap_gradient,
    is_same_gradient,
    split_rows,
)
from weft.models.network.packed import RowGradient, TopIds

# Outputs that `_GivenLogprobs` returns, in this order.
OUTPUTS: tuple[Output, Output] = ("given_logprobs", "logprobs")
TOP_OUTPUTS: frozenset[Output] = frozenset({"top_ids", "top_logprobs"})


@torch.no_grad()
def compute_top_outputs(
    hidden: Tensor,
    projection: OutputProjection,
    top: TopIds,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> dict[Output, Tensor]:
    """Return the most likely ids of each row and their log-probs, as `top_ids` and `top_logprobs`.

    `top` specifies how many ids are returned per row. `top_ids` is int32 [N, K], with the most
    likely id first. `top_logprobs` is [N, K + 1]: the log-probs of these ids, followed by the
    log-prob of all other ids together. `hidden` is [N, H], and is processed in chunks of `chunk`
    rows. The log-probs are those of softmax(logits / temperature), in float32 (float64 for float64
    networks), without a gradient.
    """
    vocabulary = projection.vocabulary
    num_ids = projection.vocab_size
    if top.below is not None:
        num_ids = min(num_ids, top.below)
    count = min(top.count, num_ids)
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    ids = hidden.new_empty(len(hidden), count, dtype=torch.int32)
    logprobs = hidden.new_empty(len(hidden), count + 1, dtype=dtype)
    for rows in split_rows(len(hidden), chunk or projection.count_chunk_rows()):
        logits, _ = _compute_logits(hidden[rows], projection, temperature)
        likeliest = vocabulary.find_likeliest(logits, count, top.below)
        ids[rows] = likeliest
        columns = vocabulary.find_columns(likeliest, logits.shape[1])
        logprobs[rows] = _EventLogprobs.from_logits(logits, columns, vocabulary).logprobs
    return {"top_ids": ids, "top_logprobs": logprobs}


def compute_given_outputs(
    hidden: Tensor,
    labels: Tensor,
    ids: Tensor,
    projection: OutputProjection,
    *,
    temperature: float = 1.0,
    labelled: bool = False,
    chunk: int | None = None,
    gradient: RowGradient | None = None,
) -> dict[Output, Tensor]:
    """Return the log-probs of the given `ids`, and of all other ids together.

    `ids` is int [N, K], and the ids of a row are distinct. The result contains `given_logprobs` [N,
    K + 1]: the log-probs of the ids, followed by the log-prob of all other ids together. If
    `labelled`, it also contains `logprobs` [N], the log-probs of `labels`. Both outputs are
    differentiable in `hidden` [N, H] and in the projection.

    The dtypes and the arguments `temperature`, `chunk` and `gradient` are the same as in
    `weft.models.network.token_outputs.compute_token_outputs`.
    """
    settings = _EventSettings(
        labels=labels,
        softcap=projection.softcap,
        temperature=temperature,
        chunk=chunk or projection.count_chunk_rows(),
        labelled=labelled,
        gradient=gradient if torch.is_grad_enabled() else None,
        vocabulary=projection.vocabulary,
        gradient_sum=projection.gradient_sum,
    )
    given_logprobs, logprobs = _GivenLogprobs.apply(
        hidden, projection.weight, projection.bias, ids, settings
    )
    if labelled:
        return {"given_logprobs": given_logprobs, "logprobs": logprobs}
    return {"given_logprobs": given_logprobs}


@dataclass(frozen=True)
class _EventSettings:
    """Arguments of `_GivenLogprobs` that are not differentiable."""

    labels: Tensor
    softcap: float | None
    temperature: float
    chunk: int
    labelled: bool
    gradient: RowGradient | None
    vocabulary: OutputVocabulary
    gradient_sum: kernels.GradientSum | None

    def build_projection(self, weight: Tensor, bias: Tensor | None) -> OutputProjection:
        """Return the projection with these parameters, without a gradient sum."""
        return OutputProjection(weight, bias, self.softcap, self.vocabulary)


def _compute_logits(
    hidden: Tensor, projection: OutputProjection, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return two tensors [R, V]: the logits divided by the temperature, and the undivided logits.

    The caller may overwrite the first tensor. The second is needed only for the gradient of a soft
    cap. Without a soft cap, the first tensor is returned twice.
    """
    capped = projection.compute_columns(hidden)
    if projection.softcap is not None:
        return capped / temperature, capped
    return capped if temperature == 1.0 else capped.div_(temperature), capped


@dataclass(frozen=True)
class _EventLogprobs:
    """Log-probs of K given ids in each row, and the total log-prob of all other ids.

    `logprobs` is [R, K + 1]; its last column is the total of the other ids. `lse` [R] is the
    log-sum-exp of all logits of each row, and `others` [R] is the log-sum-exp of the logits of the
    other ids.
    """

    logprobs: Tensor
    lse: Tensor
    others: Tensor

    @classmethod
    def from_logits(
        cls, logits: Tensor, columns: Tensor, vocabulary: OutputVocabulary
    ) -> _EventLogprobs:
        """Return the log-probs of each of K given ids, and of "any other id".

        `columns`, int64 [R, K], are the columns of the ids in `logits` [R, V], or -1. The logits of
        the given ids are overwritten with minus infinity, so that the log-sum-exp of a row covers
        only the other ids.
        """
        given_logits = vocabulary.gather(logits, columns)
        vocabulary.scatter(logits, columns, torch.full_like(given_logits, float("-inf")))
        if columns.shape[1] == vocabulary.count_ids(logits.shape[1]):
            others = logits.new_full((len(logits),), float("-inf"))
        else:
            others = vocabulary.logsumexp(kernels.statistics(logits).lse)
        event_logits = torch.cat([given_logits, others[:, None]], dim=1)
        lse = event_logits.logsumexp(dim=1)
        return cls(event_logits - lse[:, None], lse, others)

    def compute_logits_gradient(
        self,
        logits: Tensor,
        columns: Tensor,
        grad_event: Tensor,
        labels: Tensor,
        grad_label: Tensor | None,
        vocabulary: OutputVocabulary,
    ) -> Tensor:
        """Return the gradient with respect to the logits [R, V]; overwrites `logits`.

        `logits` must have the values that `from_logits` wrote. An event is one of the given ids, or
        "any other id". `grad_event` [R, K + 1] is the gradient with respect to the log-probs of the
        events, and `grad_label` [R] is the gradient with respect to the log-prob of the label. The
        result is

            grad_k - p_k g  for the k-th given id,
            q_j (grad_rest - p_rest g)  for any other id j,

        and `grad_label` is added for the label. Here grad_k and grad_rest are the elements of the
        row's `grad_event`, p_k and p_rest are the probabilities of the events, and g is the sum of
        the row's `grad_event` and `grad_label`. With p_j as the probability of id j, q_j = p_j /
        p_rest is the softmax over only the other ids. No precision is lost by cancellation, however
        small p_rest is.
        """
        if grad_label is None:
            total = grad_event.sum(dim=1)
        else:
            total = grad_event.sum(dim=1) + grad_label
        grad_event = grad_event - self.logprobs.exp() * total[:, None]
        grad_logits = logits.sub_(self.others[:, None]).exp_().mul_(grad_event[:, -1:])
        # This also overwrites the NaN that results if there are no other ids.
        vocabulary.scatter(grad_logits, columns, grad_event[:, :-1])
        if grad_label is None:
            return grad_logits
        grad_column = torch.where(labels >= 0, grad_label, torch.zeros_like(grad_label))
        return grad_logits.scatter_add_(1, labels.clamp_min(0)[:, None], grad_column[:, None])


class _EventChunk:
    """Chunk of rows, with its logits and the log-probs computed from them.

    `logprobs` has the log-prob of each row's label. `events` has the log-probs of each row's given
    ids, and the log-prob of all other ids together.
    """

    def __init__(
        self,
        hidden: Tensor,
        projection: OutputProjection,
        ids: Tensor,
        labels: Tensor,
        temperature: float,
    ) -> None:
        logits, self._capped = _compute_logits(hidden, projection, temperature)
        self._projection = projection
        self._temperature = temperature
        vocabulary = projection.vocabulary
        self._columns = vocabulary.find_columns(ids.long(), logits.shape[1])
        self._labels = vocabulary.find_columns(labels, logits.shape[1])
        # Read the labels' logits first, because `from_logits` overwrites logits.
        label_logits = vocabulary.gather(logits, self._labels[:, None])[:, 0]
        self.events = _EventLogprobs.from_logits(logits, self._columns, vocabulary)
        self.logprobs = label_logits - self.events.lse
        self._logits = logits

    def add(
        self, total: ProjectionGradients, rows: slice, output_grads: Mapping[Output, Tensor]
    ) -> None:
        """Add the gradients of this chunk to `total`; this can be called only once.

        `rows` selects the rows of this chunk among all rows of the pass. `output_grads` contains
        the gradients with respect to the outputs, for all rows of the pass.
        """
        grad_event, grad_label = (
            output_grads[name][rows] if name in output_grads else None for name in OUTPUTS
        )
        if grad_event is None:
            grad_event = torch.zeros_like(self.events.logprobs)
        grad_logits = self.events.compute_logits_gradient(
            self._logits,
            self._columns,
            grad_event,
            self._labels,
            grad_label,
            self._projection.vocabulary,
        )
        scale = torch.full_like(self.logprobs, 1.0 / self._temperature)
        total.add(
            rows,
            apply_cap_gradient(grad_logits, self._capped, self._projection.softcap),
            scale,
        )


class _GivenLogprobs(torch.autograd.Function):
    """Autograd function that computes the outputs of `compute_given_outputs` in chunks of rows.

    Only the logits of one chunk are in memory at a time. The backward pass computes them again,
    unless the gradients were already computed in the forward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        settings: _EventSettings,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        given_logprobs = hidden.new_zeros(len(ids), ids.shape[1] + 1, dtype=dtype)
        logprobs = hidden.new_zeros(len(ids), dtype=dtype)
        projection = settings.build_projection(weight, bias)
        total = None
        output_grads = dict[Output, Tensor]()
        if settings.gradient is not None and any(ctx.needs_input_grad):
            total = ProjectionGradients(
                hidden, weight, bias, ctx.needs_input_grad, settings.gradient_sum
            )
        for rows in split_rows(len(ids), settings.chunk):
            chunk = _EventChunk(
                hidden[rows], projection, ids[rows], settings.labels[rows], settings.temperature
            )
            given_logprobs[rows] = chunk.events.logprobs
            logprobs[rows] = chunk.logprobs
            # If the gradient function is known, compute the gradients of this chunk too.
            if settings.gradient is not None and total is not None:
                outputs: dict[Output, Tensor] = {
                    "given_logprobs": given_logprobs,
                    "logprobs": logprobs,
                }
                chunk_grads = settings.gradient(outputs)
                for name in OUTPUTS if settings.labelled else OUTPUTS[:1]:
                    if name in chunk_grads:
                        value = chunk_grads[name]
                        output_grads.setdefault(name, torch.zeros_like(value))[rows] = value[rows]
                chunk.add(total, rows, output_grads)
            del chunk  # free it before the next chunk is computed
        ctx.save_for_backward(hidden, weight, bias, ids)
        ctx.settings = settings
        ctx.precomputed = None if total is None else (total, output_grads)
        ctx.set_materialize_grads(False)
        return given_logprobs, logprobs

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, *gradients: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        hidden, weight, bias, ids = ctx.saved_tensors
        settings: _EventSettings = ctx.settings
        precomputed: tuple[ProjectionGradients, dict[Output, Tensor]] | None = ctx.precomputed
        ctx.precomputed = None  # free the gradients, except those of the parameters
        # If the forward pass computed the gradients from these output gradients, return them.
        if precomputed is not None and all(
            is_same_gradient(value, precomputed[1].get(name))
            for name, value in zip(OUTPUTS, gradients, strict=True)
        ):
            return precomputed[0].cast()
        # Otherwise, compute the logits again.
        output_grads = {}
        for name, value in zip(OUTPUTS, gradients, strict=True):
            if value is not None:
                output_grads[name] = value
        total = ProjectionGradients(
            hidden, weight, bias, ctx.needs_input_grad, settings.gradient_sum
        )
        projection = settings.build_projection(weight, bias)
        for rows in split_rows(len(ids), settings.chunk):
            chunk = _EventChunk(
                hidden[rows], projection, ids[rows], settings.labels[rows], settings.temperature
            )
            chunk.add(total, rows, output_grads)
            del chunk  # free it before the next chunk is computed
        return total.cast()
