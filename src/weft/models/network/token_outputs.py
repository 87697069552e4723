"""Log-probs, entropy and top-1 from hidden states, in float32 (float64 for float64 networks).

The logits [N, vocabulary] are never in memory as a whole: rows are computed in chunks. If the
gradients of a row depend only on the outputs of that row, the gradients of each chunk are computed
together with the logits. Otherwise the backward pass computes the logits again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft import kernels
from weft.algorithms.base import Output
from weft.models.network.packed import RowGradient, SamplingSupport
from weft.models.network.vocabulary import WHOLE, OutputVocabulary

# Largest number of logits in a chunk, unless `LEAST_CHUNK_ROWS` rows have more. On a CPU, 64 MB in
# float32; an accelerator needs more rows to run at full speed.
CHUNK_CELLS = {"cpu": 1 << 24}
DEFAULT_CHUNK_CELLS = 1 << 27
LEAST_CHUNK_ROWS = 256  # each chunk reads the whole output matrix, too costly for fewer rows


@dataclass(frozen=True)
class OutputProjection:
    """Output layer: logits = cap(hidden weight^T + bias) with cap(x) = softcap tanh(x / softcap)."""

    weight: Tensor  # [V, H]
    bias: Tensor | None = None  # [V]
    softcap: float | None = None
    vocabulary: OutputVocabulary = WHOLE
    # sum to which the weight's gradient is added, instead of its `grad`
    gradient_sum: kernels.GradientSum | None = None

    @property
    def vocab_size(self) -> int:
        """Number of ids in the whole vocabulary."""
        return self.vocabulary.count_ids(len(self.weight))

    def count_chunk_rows(self) -> int:
        """Return the chunk size: the number of rows whose logits are computed together."""
        columns = self.vocabulary.count_most_columns(len(self.weight))
        return count_chunk_rows(columns, self.weight.device)

    def compute_logits(self, hidden: Tensor, wide: Tensor | None = None) -> Tensor:
        """Return float32 logits [R, V] of the whole vocabulary, not divided by a temperature.

        The rows are not computed in chunks. `wide` is the result of `kernels.prepare_wide` for the
        weight.
        """
        return self.vocabulary.complete(self.compute_columns(hidden, wide))

    def compute_columns(self, hidden: Tensor, wide: Tensor | None = None) -> Tensor:
        """Return logits as `compute_logits` does, but only for the ids of the weight's rows."""
        return _apply_softcap(_project(hidden, self.weight, self.bias, wide), self.softcap)


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
    known = gradient if torch.is_grad_enabled() else None
    rows = chunk or projection.count_chunk_rows()
    wanted = ("entropy" in want, "top1" in want)
    sums = projection.gradient_sum
    settings = _TokenOutputSettings(
        projection.softcap, temperature, rows, *wanted, support, known, projection.vocabulary, sums
    )
    values = _TokenOutputs.apply(hidden, projection.weight, projection.bias, labels, settings)
    names: tuple[Output, ...] = ("logprobs", "entropy", "top1")
    token_outputs: dict[Output, Tensor] = {}
    for name, value in zip(names, values, strict=True):
        if name in want:
            token_outputs[name] = value
    return token_outputs


def count_chunk_rows(vocab_size: int, device: torch.device) -> int:
    """Return the number of rows whose logits are computed together.

    It is limited so that the logits of these rows need little memory.
    """
    return max(LEAST_CHUNK_ROWS, get_chunk_cells(device) // vocab_size)


def get_chunk_cells(device: torch.device) -> int:
    """Return the largest number of logits in a chunk of more than `LEAST_CHUNK_ROWS` rows."""
    return CHUNK_CELLS.get(device.type, DEFAULT_CHUNK_CELLS)


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


class ProjectionGradients:
    """Gradients of an output layer's hidden states, weight and bias, computed in chunks of rows.

    The gradients of the weight and the bias are summed over the chunks. The weight's gradient is
    added to `gradient_sum` if this is given, and is returned otherwise.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        needed: Sequence[bool],
        gradient_sum: kernels.GradientSum | None = None,
    ) -> None:
        self._gradient_sum = gradient_sum
        self._sum_dtype = torch.promote_types(weight.dtype, torch.float32)
        self._inputs = (hidden, weight, bias)
        self._needed = needed
        self._grad_hidden = torch.empty_like(hidden) if needed[0] else None
        self._grad_weight: Tensor | None = None
        if bias is not None and needed[2]:
            self._grad_bias: Tensor | None = torch.zeros_like(bias, dtype=self._sum_dtype)
        else:
            self._grad_bias = None

    def add(self, rows: slice, grad_logits: Tensor, scale: Tensor) -> None:
        """Add the gradients of a chunk of rows, whose logits have the gradient scale * grad_logits.

        The factors `scale` [R] are applied to matrices [R, H] and not to `grad_logits` [R, V],
        which is larger.
        """
        hidden, weight, _ = self._inputs
        grad_raw = grad_logits.to(weight.dtype)
        if self._grad_hidden is not None:
            self._grad_hidden[rows] = (kernels.product(grad_raw, weight.T) * scale[:, None]).to(
                hidden.dtype
            )
        if self._needed[1]:
            self._add_weight(grad_raw, (hidden[rows] * scale[:, None]).to(weight.dtype))
        if self._grad_bias is not None:
            self._grad_bias += scale @ grad_logits

    def _add_weight(self, grad_logits: Tensor, hidden: Tensor) -> None:
        if self._grad_weight is None and (hidden.dtype == self._sum_dtype or not hidden.is_cpu):
            # The first product can be the sum itself: no zeros need to be written and read.
            self._grad_weight = kernels.wide_product(grad_logits.T, hidden.T)
        else:
            kernels.add_product(self._get_weight_gradient(), grad_logits.T, hidden.T)

    def _get_weight_gradient(self) -> Tensor:
        if self._grad_weight is None:
            self._grad_weight = torch.zeros_like(self._inputs[1], dtype=self._sum_dtype)
        return self._grad_weight

    def cast(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        """Return the gradients in the inputs' dtypes, as the result of an autograd `backward`.

        This can be called only once. The weight's gradient is None if it is added to a
        `gradient_sum`.
        """
        _, weight, bias = self._inputs
        grad_weight = None
        if self._needed[1] and self._gradient_sum is not None:
            self._gradient_sum.take(self._get_weight_gradient())
        elif self._needed[1]:
            grad_weight = self._get_weight_gradient().to(weight.dtype)
        if self._grad_bias is None or bias is None:
            grad_bias = None
        else:
            grad_bias = self._grad_bias.to(bias.dtype)
        return self._grad_hidden, grad_weight, grad_bias, None, None


@dataclass(frozen=True)
class _RowSoftmax:
    """Logits of some rows, with the data for computing their gradient.

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
        whole = torch.full_like(grad_logprob, 1.0 / settings.temperature)
        # Weft's kernel computes the gradient from the statistics.
        if self.statistics is not None:
            if settings.softcap is not None and self.logits is self.capped:
                grad_logits = self.capped.clone()
            else:
                grad_logits = self.logits
            kernels.to_gradients(grad_logits, self.statistics, labels, grad_logprob, grad_entropy)
            return apply_cap_gradient(grad_logits, self.capped, settings.softcap), whole
        # Torch computes it from the log-probs.
        assert self.logp is not None
        if grad_entropy is None:
            p = self.logp.exp_()
            p.scatter_add_(1, labels[:, None], p.new_full((len(p), 1), -1.0))
            return apply_cap_gradient(
                p, self.capped, settings.softcap
            ), -grad_logprob / settings.temperature
        p = self.logp.exp()
        finite = _replace_infinite(self.logp, settings)
        grad_logits = p * -grad_logprob[:, None]
        grad_logits.scatter_add_(1, labels[:, None], grad_logprob[:, None])
        grad_logits -= (
            grad_entropy[:, None] * p * (finite - torch.linalg.vecdot(p, finite)[:, None])
        )
        return apply_cap_gradient(grad_logits, self.capped, settings.softcap), whole


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
        own, statistics = settings.vocabulary.compute_statistics(
            logits, labels, entropy=settings.entropy, best=settings.top1
        )
        return _ChunkResults(
            _RowSoftmax(logits, capped, statistics, None),
            labels,
            own,
            statistics.lse,
            statistics.entropy,
            statistics.best,
        )
    logp = torch.log_softmax(logits, dim=-1)
    own = logp.gather(1, labels[:, None])[:, 0]
    if settings.entropy:
        entropy = -torch.linalg.vecdot(logp.exp(), _replace_infinite(logp, settings))
    else:
        entropy = None
    best = logp.argmax(-1) if settings.top1 else None
    return _ChunkResults(_RowSoftmax(logits, capped, None, logp), labels, own, None, entropy, best)


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
        given: dict[Output, Tensor] = {}
        total = None
        if settings.gradient is not None and any(ctx.needs_input_grad):
            total = ProjectionGradients(
                hidden, weight, bias, ctx.needs_input_grad, settings.gradient_sum
            )
        # Compute the outputs chunk by chunk, and the gradients too if their function is known.
        for rows in split_rows(len(labels), settings.chunk):
            capped = _apply_softcap(_project(hidden[rows], weight, bias), settings.softcap)
            known = _compute_results(
                _apply_temperature(capped, rows, labels, settings), capped, labels[rows], settings
            )
            logprobs[rows] = known.logprobs
            if known.lse is not None:
                lse[rows] = known.lse
            if known.entropy is not None:
                entropies[rows] = known.entropy
            if known.best is not None:
                top1[rows] = (known.best == labels[rows]).to(dtype)
            if settings.gradient is not None and total is not None:
                for name, value in settings.gradient(outputs).items():
                    given.setdefault(name, torch.zeros_like(value))[rows] = value[rows]
                total.add(
                    rows,
                    *known.softmax.compute_gradient(
                        known.labels, *_select_gradients(given, rows), settings
                    ),
                )
            del capped, known  # free them before the next chunk is computed
        ctx.save_for_backward(hidden, weight, bias, labels, lse, entropies)
        ctx.settings = settings
        ctx.precomputed = None if total is None else (total, given)
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
        # Use the gradients of the forward pass if they are for these gradients of the outputs.
        if (
            precomputed is not None
            and is_same_gradient(gradients[0], precomputed[1].get("logprobs"))
            and is_same_gradient(gradients[1], precomputed[1].get("entropy"))
        ):
            return precomputed[0].cast()
        # Else compute the logits again.
        total = ProjectionGradients(
            hidden, weight, bias, ctx.needs_input_grad, settings.gradient_sum
        )
        known: dict[Output, Tensor] = {
            "logprobs": torch.zeros_like(lse) if gradients[0] is None else gradients[0]
        }
        if gradients[1] is not None:
            known["entropy"] = gradients[1]
        for rows in split_rows(len(labels), settings.chunk):
            capped = _apply_softcap(_project(hidden[rows], weight, bias), settings.softcap)
            softmax, at = _recompute_softmax(
                _apply_temperature(capped, rows, labels, settings),
                capped,
                labels[rows],
                settings,
                lse[rows],
                entropies[rows] if "entropy" in known else None,
            )
            total.add(
                rows, *softmax.compute_gradient(at, *_select_gradients(known, rows), settings)
            )
            del capped, softmax  # free them before the next chunk is computed
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
    labels = settings.vocabulary.find_columns(labels, logits.shape[1])
    if settings.vocabulary.uses_statistics(logits):
        return _RowSoftmax(
            logits, capped, kernels.SoftmaxStatistics(lse, entropy, None), None
        ), labels
    return _RowSoftmax(logits, capped, None, torch.log_softmax(logits, dim=-1)), labels


def _select_gradients(
    gradients: Mapping[Output, Tensor], rows: slice
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients with respect to the log-probs and to the entropy, for a range of rows.

    The gradient with respect to the entropy is None if `gradients` does not contain it.
    """
    grad_entropy = gradients.get("entropy")
    return gradients["logprobs"][rows], None if grad_entropy is None else grad_entropy[rows]


def apply_cap_gradient(grad_logits: Tensor, capped: Tensor, softcap: float | None) -> Tensor:
    """Return the gradient with respect to the logits before the soft cap; overwrites `grad_logits`.

    `capped` are the logits after the soft cap.
    """
    if softcap is None:
        return grad_logits
    return grad_logits.mul_((capped / softcap).square_().neg_().add_(1))


def is_same_gradient(one: Tensor | None, other: Tensor | None) -> bool:
    """Return whether two gradients with respect to the same output can be treated as equal.

    The forward pass can compute the gradients of the inputs in advance, from the gradients that it
    expects for the outputs. The backward pass compares the actual gradients with the expected ones.
    On an accelerator, this function assumes that two tensors are equal, because comparing them
    would wait for the device.
    """
    if one is None or other is None:
        return one is other
    return one.device.type != "cpu" or torch.equal(one, other)


def split_rows(total: int, size: int) -> list[slice]:
    """Split the range from 0 to `total` into slices of at most `size` rows."""
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _project(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, wide: Tensor | None = None
) -> Tensor:
    """Return the logits before the soft cap, in float32 or wider.

    In bfloat16, logits of about 20 would be rounded by up to 0.06.
    """
    return kernels.wide_product(hidden, weight, bias, wide)


def _apply_softcap(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


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
        # divide in place, unless the gradient of the soft cap needs the undivided logits
        if settings.softcap is None:
            logits = logits.div_(settings.temperature)
        else:
            logits = logits / settings.temperature
    if settings.support is None:
        return logits
    ids = settings.vocabulary.find_ids(logits.shape[1])
    return logits.masked_fill(settings.support.find_outside(rows, labels[rows], ids), float("-inf"))
