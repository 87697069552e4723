"""Output layer of a language model: its logits, their vocabulary, and the layer's gradients.

The columns of logits [R, V] are consecutive ids of the vocabulary. `WholeVocabulary` is for an
output layer that computes the logits of all ids. An output layer that computes only some of the
logits uses another implementation of `OutputVocabulary`; column 0 need not be id 0 then.

The logits [N, vocabulary] are never in memory as a whole: rows are computed in chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from weft import kernels
from weft.kernels import SoftmaxStatistics

# Largest number of logits in a chunk, unless `MIN_CHUNK_ROWS` rows have more. On a CPU, this is
# 64 MB in float32; an accelerator needs more rows to run at full speed.
CHUNK_CELLS = {"cpu": 1 << 24}
DEFAULT_CHUNK_CELLS = 1 << 27
MIN_CHUNK_ROWS = 256  # each chunk reads the whole output matrix, which is slow for fewer rows


class OutputVocabulary(Protocol):
    """Operations on logits [R, V] of V ids of a vocabulary.

    Ids are int64. A column is the index of an id among the V ids, or -1 for other ids.
    """

    def count_ids(self, columns: int) -> int:
        """Return the size of the vocabulary, for logits with this number of columns."""
        ...

    def count_max_columns(self, columns: int) -> int:
        """Return the largest number of columns of any part of the vocabulary.

        The chunk size is computed from this number, so that it is the same for all parts.
        """
        ...

    def find_ids(self, columns: int) -> slice:
        """Return the ids of the columns, which are consecutive."""
        ...

    def find_columns(self, ids: Tensor, columns: int) -> Tensor:
        """Return the column of each id, or -1 if the id has no column."""
        ...

    def complete(self, logits: Tensor) -> Tensor:
        """Return the logits of all ids, without a gradient: [R, V] -> [R, vocabulary]."""
        ...

    def logsumexp(self, lse: Tensor) -> Tensor:
        """Return the log-sum-exp of all logits, given the log-sum-exp of the columns, [R]."""
        ...

    def gather(self, logits: Tensor, columns: Tensor) -> Tensor:
        """Return the logits [R, K] of K ids per row, whose `columns` are [R, K]."""
        ...

    def scatter(self, x: Tensor, columns: Tensor, values: Tensor) -> None:
        """Write `values` [R, K] to the given columns of x [R, V]."""
        ...

    def find_likeliest(self, logits: Tensor, count: int, below: int | None) -> Tensor:
        """Return the ids less than `below` with the largest logits, [R, count]."""
        ...

    def uses_statistics(self, logits: Tensor) -> bool:
        """Return whether log-probs are computed from `compute_statistics`."""
        ...

    def compute_statistics(
        self, logits: Tensor, columns: Tensor, *, entropy: bool, best: bool
    ) -> tuple[Tensor, SoftmaxStatistics]:
        """Return the log-probs [R] of one id per row, and the statistics of the softmax.

        `columns` [R] are the columns of these ids. The statistics cover all ids of the vocabulary.
        """
        ...


@dataclass(frozen=True)
class WholeVocabulary:
    """Vocabulary of an output layer that computes the logits of all ids."""

    def count_ids(self, columns: int) -> int:
        return columns

    def count_max_columns(self, columns: int) -> int:
        return columns

    def find_ids(self, columns: int) -> slice:
        return slice(0, columns)

    def find_columns(self, ids: Tensor, columns: int) -> Tensor:
        return ids

    def complete(self, logits: Tensor) -> Tensor:
        return logits

    def logsumexp(self, lse: Tensor) -> Tensor:
        return lse

    def gather(self, logits: Tensor, columns: Tensor) -> Tensor:
        return logits.gather(1, columns)

    def scatter(self, x: Tensor, columns: Tensor, values: Tensor) -> None:
        x.scatter_(1, columns, values)

    def find_likeliest(self, logits: Tensor, count: int, below: int | None) -> Tensor:
        return logits[:, :below].topk(count, dim=1).indices

    def uses_statistics(self, logits: Tensor) -> bool:
        return kernels.serves(logits)

    def compute_statistics(
        self, logits: Tensor, columns: Tensor, *, entropy: bool, best: bool
    ) -> tuple[Tensor, SoftmaxStatistics]:
        statistics = kernels.statistics(logits, entropy=entropy, best=best)
        return logits.gather(1, columns[:, None])[:, 0] - statistics.lse, statistics


WHOLE = WholeVocabulary()


@dataclass(frozen=True)
class OutputProjection:
    """Output layer: logits = cap(hidden weight^T + bias) with cap(x) = softcap tanh(x / softcap)."""

    weight: Tensor  # [V, H]
    bias: Tensor | None = None  # [V]
    softcap: float | None = None
    vocabulary: OutputVocabulary = WHOLE
    # Sum to which the weight's gradient is added, instead of to its `grad`.
    gradient_sum: kernels.GradientSum | None = None

    @property
    def vocab_size(self) -> int:
        """Number of ids in the whole vocabulary."""
        return self.vocabulary.count_ids(len(self.weight))

    def count_chunk_rows(self) -> int:
        """Return the chunk size: the number of rows whose logits are computed together."""
        columns = self.vocabulary.count_max_columns(len(self.weight))
        return count_chunk_rows(columns, self.weight.device)

    def compute_logits(self, hidden: Tensor, wide: Tensor | None = None) -> Tensor:
        """Return float32 logits [R, V] of the whole vocabulary, not divided by a temperature.

        The rows are not computed in chunks. `wide` is the result of `kernels.prepare_wide` for the
        weight.
        """
        return self.vocabulary.complete(self.compute_columns(hidden, wide))

    def compute_columns(self, hidden: Tensor, wide: Tensor | None = None) -> Tensor:
        """Return logits [R, V] as `compute_logits` does, but only for the V rows of the weight."""
        return apply_softcap(project(hidden, self.weight, self.bias, wide), self.softcap)


def count_chunk_rows(vocab_size: int, device: torch.device) -> int:
    """Return the chunk size: the number of rows whose logits are computed together.

    The size is limited so that the logits of a chunk need little memory.
    """
    return max(MIN_CHUNK_ROWS, get_chunk_cells(device) // vocab_size)


def get_chunk_cells(device: torch.device) -> int:
    """Return the largest number of logits in a chunk of more than `MIN_CHUNK_ROWS` rows."""
    return CHUNK_CELLS.get(device.type, DEFAULT_CHUNK_CELLS)


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
            self._gradient_sum.add_gradient(self._get_weight_gradient())
        elif self._needed[1]:
            grad_weight = self._get_weight_gradient().to(weight.dtype)
        if self._grad_bias is None or bias is None:
            grad_bias = None
        else:
            grad_bias = self._grad_bias.to(bias.dtype)
        return self._grad_hidden, grad_weight, grad_bias, None, None


def split_rows(total: int, size: int) -> list[slice]:
    """Split the range from 0 to `total` into slices of at most `size` rows."""
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def project(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, wide: Tensor | None = None
) -> Tensor:
    """Return the logits before the soft cap, in float32 or wider.

    In bfloat16, logits of about 20 would be rounded by up to 0.06.
    """
    return kernels.wide_product(hidden, weight, bias, wide)


def apply_softcap(logits: Tensor, softcap: float | None) -> Tensor:
    """Return softcap tanh(logits / softcap), or the logits unchanged without a soft cap."""
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def apply_cap_gradient(grad_logits: Tensor, capped: Tensor, softcap: float | None) -> Tensor:
    """Return the gradient with respect to the logits before the soft cap; overwrites `grad_logits`.

    `capped` are the logits after the soft cap.
    """
    if softcap is None:
        return grad_logits
    return grad_logits.mul_((capped / softcap).square_().neg_().add_(1))


def is_same_gradient(left: Tensor | None, right: Tensor | None) -> bool:
    """Return whether two gradients with respect to the same output can be treated as equal.

    If the forward pass has already computed the gradients of the inputs, it has used expected
    gradients of the outputs, which the backward pass compares with the actual ones. On an
    accelerator, this function assumes that two tensors are equal, because comparing them would wait
    for the device.
    """
    if left is None or right is None:
        return left is right
    return left.device.type != "cpu" or torch.equal(left, right)
