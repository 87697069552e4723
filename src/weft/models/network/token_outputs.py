"""Outputs of a network with a language-model head, in float32 (float64 for float64 networks).

`compute_outputs` computes all of them. This module has the log-probs of one label per row, the
entropy and top-1; `event_outputs` has the log-probs of several ids per row.

The logits [N, vocabulary] are never in memory as a whole: rows are computed in chunks. If the
gradients of a row depend only on the outputs of that row, the gradients of each chunk are computed
together with the logits. Otherwise the backward pass computes the logits again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft import kernels
from weft.algorithms.base import Output
from weft.models.network.event_outputs import (
    OUTPUTS,
    TOP_OUTPUTS,
    compute_given_outputs,
    compute_top_outputs,
)
from weft.models.network.output_projection import (
    OutputProjection,
    OutputVocabulary,
    ProjectionGradients,
    apply_cap_gradient,
    apply_softcap,
    is_same_gradient,
    project,
    split_rows,
)
from weft.models.network.packed import Packed, RowGradient, SamplingSupport, TopIds


def compute_outputs(
    hidden: Tensor,
    x: Packed,
    projection: OutputProjection,
    want: frozenset[Output],
    temperature: float,
    support: SamplingSupport | None,
) -> dict[Output, Tensor]:
    """Return the outputs named in `want` for the rows of `x`.

    `hidden` [N, H] are the hidden states of these rows. If there is a `support`, the label
    log-probs, the entropy and `top1` are computed over the ids in the support only. The log-probs
    of several ids per row (`given_logprobs` and `top_logprobs`) are always normalized over the
    whole vocabulary.
    """
    # Choose the outputs that are computed together with the log-probs of several ids.
    event_outputs: frozenset[Output] = frozenset()
    if "given_logprobs" in want:
        event_outputs = want & (set(OUTPUTS) if support is None else {"given_logprobs"})
    token_outputs = want - event_outputs - TOP_OUTPUTS
    # The function for the gradients needs all outputs at once.
    gradient = None if event_outputs and token_outputs else x.row_gradient
    outputs: dict[Output, Tensor] = {}
    if event_outputs:
        outputs |= compute_given_outputs(
            hidden,
            x.labels,
            cast(Tensor, x.ids),
            projection,
            temperature=temperature,
            labelled="logprobs" in event_outputs,
            gradient=gradient,
        )
    if want & TOP_OUTPUTS:
        top = compute_top_outputs(hidden, projection, cast(TopIds, x.ids), temperature=temperature)
        for name, value in top.items():
            if name in want:
                outputs[name] = value
    if token_outputs:
        outputs |= compute_token_outputs(
            hidden,
            x.labels,
            projection,
            token_outputs,
            temperature=temperature,
            support=support,
            gradient=gradient,
        )
    return outputs


def compute_token_outputs(
    hidden: Tensor,
    labels: Tensor,
    projection: OutputProjection,
    want: frozenset[Output],
    *,
    temperature: float = 1.0,
    support: SamplingSupport | None = None,
    chunk: int | None = None,
    gradient: RowGradient | None = None,
) -> dict[Output, Tensor]:
    """Return the outputs `want`: log-probs of `labels`, entropy in nats and top1, each float32 [N].

    `hidden` is [N, H] and `labels` is int64 [N]. The distribution is softmax(logits / temperature),
    restricted to the `support` if one is given. `top1` is 1 if the label is the most likely id,
    else 0. Log-probs and entropy are differentiable in the hidden states and the projection.

    Rows are computed in chunks of `chunk` rows; the default keeps the logits of a chunk small.
    `gradient` is a function from the outputs to the gradients with respect to these outputs. It
    saves the backward pass from computing the logits a second time. It can be used only if the
    gradients of a row depend only on that row.
    """
    settings = _TokenOutputSettings(
        softcap=projection.softcap,
        temperature=temperature,
        chunk=chunk or projection.count_chunk_rows(),
        entropy="entropy" in want,
        top1="top1" in want,
        support=support,
        gradient=gradient if torch.is_grad_enabled() else None,
        vocabulary=projection.vocabulary,
        gradient_sum=projection.gradient_sum,
    )
    values = _TokenOutputs.apply(hidden, projection.weight, projection.bias, labels, settings)
    names: tuple[Output, ...] = ("logprobs", "entropy", "top1")
    token_outputs: dict[Output, Tensor] = {}
    for name, value in zip(names, values, strict=True):
        if name in want:
            token_outputs[name] = value
    return token_outputs


@dataclass(frozen=True)
class _TokenOutputSettings:
    """Arguments of `_TokenOutputs` that are not differentiable."""

    softcap: float | None
    temperature: float
    chunk: int
    entropy: bool
    top1: bool
    support: SamplingSupport | None
    gradient: RowGradient | None
    vocabulary: OutputVocabulary
    gradient_sum: kernels.GradientSum | None


@dataclass(frozen=True)
class _RowSoftmax:
    """Logits of some rows, with the data from which their gradient is computed.

    Either `statistics` or `logp` is None.

    Attributes:
        logits: Logits divided by the temperature.
        capped: Logits before this division, after the soft cap if there is one.
        statistics: Log-sum-exp of each row and, if needed, its entropy.
        logp: Log-probs of all ids.
    """

    logits: Tensor
    capped: Tensor
    statistics: kernels.SoftmaxStatistics | None
    logp: Tensor | None

    def compute_gradient(
        self,
        labels: Tensor,
        grad_logprob: Tensor,
        grad_entropy: Tensor | None,
        settings: _TokenOutputSettings,
    ) -> tuple[Tensor, Tensor]:
        """Return an unscaled gradient [R, V] and a factor for each of its rows, [R].

        A row times its factor is the gradient with respect to the row's logits before they are
        divided by the temperature. The attributes `logits` and `logp` may be overwritten, so this
        can be called only once. `labels` are columns of the logits, or -1 if they have no column.
        """
        factors = torch.full_like(grad_logprob, 1.0 / settings.temperature)
        # Weft's kernel computes the gradient from the statistics.
        if self.statistics is not None:
            if settings.softcap is not None and self.logits is self.capped:
                grad_logits = self.capped.clone()
            else:
                grad_logits = self.logits
            kernels.to_gradients(grad_logits, self.statistics, labels, grad_logprob, grad_entropy)
            return apply_cap_gradient(grad_logits, self.capped, settings.softcap), factors
        # Without the kernel, torch computes the gradient from the log-probs.
        assert self.logp is not None
        if grad_entropy is None:
            p = self.logp.exp_()
            p.scatter_add_(1, labels[:, None], p.new_full((len(p), 1), -1.0))
            grad_logits = apply_cap_gradient(p, self.capped, settings.softcap)
            return grad_logits, -grad_logprob / settings.temperature
        p = self.logp.exp()
        finite = _replace_infinite(self.logp, settings)
        grad_logits = p * -grad_logprob[:, None]
        grad_logits.scatter_add_(1, labels[:, None], grad_logprob[:, None])
        grad_logits -= (
            grad_entropy[:, None] * p * (finite - torch.linalg.vecdot(p, finite)[:, None])
        )
        return apply_cap_gradient(grad_logits, self.capped, settings.softcap), factors


@dataclass(frozen=True)
class _ChunkResults:
    """Results for R rows of logits.

    Attributes:
        softmax: Data for computing the gradient: the logits, and either their log-sum-exp or the
            log-probs of all ids.
        labels: Column of each row's label, or -1 if the label has no column.
        logprobs: Log-prob of each row's label.
        lse: Log-sum-exp of each row, or None if `softmax` contains log-probs instead.
        entropy: Entropy of each row, or None if not requested.
        best: Most likely id of the whole vocabulary for each row, or None if not requested.
    """

    softmax: _RowSoftmax
    labels: Tensor
    logprobs: Tensor
    lse: Tensor | None = None
    entropy: Tensor | None = None
    best: Tensor | None = None


def _compute_results(
    logits: Tensor, capped: Tensor, labels: Tensor, settings: _TokenOutputSettings
) -> _ChunkResults:
    """Return the log-probs of the labels and, if requested, the entropies and likeliest ids.

    `logits` [R, V] are already divided by the temperature; `capped` are the logits before the
    division. `labels` is [R].
    """
    labels = settings.vocabulary.find_columns(labels, logits.shape[1])
    if settings.vocabulary.uses_statistics(logits):
        logprobs, statistics = settings.vocabulary.compute_statistics(
            logits, labels, entropy=settings.entropy, best=settings.top1
        )
        return _ChunkResults(
            _RowSoftmax(logits, capped, statistics, None),
            labels,
            logprobs,
            statistics.lse,
            statistics.entropy,
            statistics.best,
        )
    logp = torch.log_softmax(logits, dim=-1)
    logprobs = logp.gather(1, labels[:, None])[:, 0]
    if settings.entropy:
        entropy = -torch.linalg.vecdot(logp.exp(), _replace_infinite(logp, settings))
    else:
        entropy = None
    best = logp.argmax(-1) if settings.top1 else None
    return _ChunkResults(
        _RowSoftmax(logits, capped, None, logp), labels, logprobs, None, entropy, best
    )


class _TokenOutputs(torch.autograd.Function):
    """Autograd function behind `compute_token_outputs`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        settings: _TokenOutputSettings,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = hidden.new_zeros(len(labels), dtype=dtype)
        entropies = hidden.new_zeros(len(labels) if settings.entropy else 0, dtype=dtype)
        top1 = hidden.new_zeros(len(labels) if settings.top1 else 0, dtype=dtype)
        lse = torch.zeros_like(logprobs)
        outputs: dict[Output, Tensor] = {"logprobs": logprobs}
        if settings.entropy:
            outputs["entropy"] = entropies
        output_gradients: dict[Output, Tensor] = {}
        total = None
        if settings.gradient is not None and any(ctx.needs_input_grad):
            total = ProjectionGradients(
                hidden, weight, bias, ctx.needs_input_grad, settings.gradient_sum
            )
        # Compute the outputs chunk by chunk, and the gradients too if their function is known.
        for rows in split_rows(len(labels), settings.chunk):
            capped = apply_softcap(project(hidden[rows], weight, bias), settings.softcap)
            results = _compute_results(
                _apply_temperature(capped, rows, labels, settings), capped, labels[rows], settings
            )
            logprobs[rows] = results.logprobs
            if results.lse is not None:
                lse[rows] = results.lse
            if results.entropy is not None:
                entropies[rows] = results.entropy
            if results.best is not None:
                top1[rows] = (results.best == labels[rows]).to(dtype)
            if settings.gradient is not None and total is not None:
                for name, value in settings.gradient(outputs).items():
                    output_gradients.setdefault(name, torch.zeros_like(value))[rows] = value[rows]
                grad_logits, factors = results.softmax.compute_gradient(
                    results.labels, *_select_gradients(output_gradients, rows), settings
                )
                total.add(rows, grad_logits, factors)
                del grad_logits
            del capped, results  # free them before the next chunk is computed
        ctx.save_for_backward(hidden, weight, bias, labels, lse, entropies)
        ctx.settings = settings
        ctx.precomputed = None if total is None else (total, output_gradients)
        ctx.mark_non_differentiable(top1)
        ctx.set_materialize_grads(False)  # no backward cost for an entropy that is only reported
        return logprobs, entropies, top1

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, *gradients: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        hidden, weight, bias, labels, lse, entropies = ctx.saved_tensors
        settings: _TokenOutputSettings = ctx.settings
        precomputed: tuple[ProjectionGradients, dict[Output, Tensor]] | None = ctx.precomputed
        ctx.precomputed = None  # free the gradients, except those of the parameters
        # If the forward pass computed the gradients from these output gradients, return them.
        if precomputed is not None:
            total, expected = precomputed
            same_logprobs = is_same_gradient(gradients[0], expected.get("logprobs"))
            if same_logprobs and is_same_gradient(gradients[1], expected.get("entropy")):
                return total.cast()
        # Otherwise, compute the logits again.
        total = ProjectionGradients(
            hidden, weight, bias, ctx.needs_input_grad, settings.gradient_sum
        )
        output_gradients: dict[Output, Tensor] = {
            "logprobs": torch.zeros_like(lse) if gradients[0] is None else gradients[0]
        }
        if gradients[1] is not None:
            output_gradients["entropy"] = gradients[1]
        for rows in split_rows(len(labels), settings.chunk):
            capped = apply_softcap(project(hidden[rows], weight, bias), settings.softcap)
            softmax, columns = _recompute_softmax(
                _apply_temperature(capped, rows, labels, settings),
                capped,
                labels[rows],
                settings,
                lse[rows],
                entropies[rows] if "entropy" in output_gradients else None,
            )
            grad_logits, factors = softmax.compute_gradient(
                columns, *_select_gradients(output_gradients, rows), settings
            )
            total.add(rows, grad_logits, factors)
            del capped, softmax, grad_logits  # free them before the next chunk is computed
        return total.cast()


def _recompute_softmax(
    logits: Tensor,
    capped: Tensor,
    labels: Tensor,
    settings: _TokenOutputSettings,
    lse: Tensor,
    entropy: Tensor | None,
) -> tuple[_RowSoftmax, Tensor]:
    """Return the softmax of rows whose statistics are known, and the columns of their labels."""
    columns = settings.vocabulary.find_columns(labels, logits.shape[1])
    if settings.vocabulary.uses_statistics(logits):
        statistics = kernels.SoftmaxStatistics(lse, entropy, None)
        return _RowSoftmax(logits, capped, statistics, None), columns
    return _RowSoftmax(logits, capped, None, torch.log_softmax(logits, dim=-1)), columns


def _select_gradients(
    gradients: Mapping[Output, Tensor], rows: slice
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients with respect to the log-probs and to the entropy, for a range of rows.

    The gradient with respect to the entropy is None if `gradients` does not contain it.
    """
    grad_entropy = gradients.get("entropy")
    return gradients["logprobs"][rows], None if grad_entropy is None else grad_entropy[rows]


def _replace_infinite(logp: Tensor, settings: _TokenOutputSettings) -> Tensor:
    """Return the log-probs with 0 in place of minus infinity, so that p log p is 0 and not NaN.

    Minus infinity occurs only for ids that sampling limits such as top-k have excluded.
    """
    if settings.support is None:
        return logp
    return logp.masked_fill(logp == float("-inf"), 0.0)


def _apply_temperature(
    logits: Tensor, rows: slice, labels: Tensor, settings: _TokenOutputSettings
) -> Tensor:
    """Return the logits divided by the temperature, with -inf for ids outside a row's support."""
    if settings.temperature != 1.0:
        # Divide in place, unless the gradient of the soft cap needs the undivided logits.
        if settings.softcap is None:
            logits = logits.div_(settings.temperature)
        else:
            logits = logits / settings.temperature
    if settings.support is None:
        return logits
    ids = settings.vocabulary.find_ids(logits.shape[1])
    return logits.masked_fill(settings.support.find_outside(rows, labels[rows], ids), float("-inf"))
