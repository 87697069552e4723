"""Vocabulary of an output layer: what is computed from logits over all of its ids.

The columns of logits [R, V] are consecutive ids of the vocabulary. `WholeVocabulary` is for an
output layer that computes the logits of all ids. Other implementations of `OutputVocabulary` can be
for an output layer that computes only some of them: column 0 is then another id than 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from weft import kernels
from weft.kernels import SoftmaxStatistics


class OutputVocabulary(Protocol):
    """Operations on logits [R, V] of V ids of a vocabulary.

    Ids are int64. A column is the index of an id among the V ids, or -1 for other ids.
    """

    def count_ids(self, columns: int) -> int:
        """Return the size of the vocabulary, for logits with this number of columns."""
        ...

    def count_most_columns(self, columns: int) -> int:
        """Return the largest number of columns of any part of the vocabulary.

        The number of rows per chunk is computed from it.
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

    def logsumexp(self, own: Tensor) -> Tensor:
        """Return the log-sum-exp of all logits, given that of the columns, [R]."""
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

    def count_most_columns(self, columns: int) -> int:
        return columns

    def find_ids(self, columns: int) -> slice:
        return slice(0, columns)

    def find_columns(self, ids: Tensor, columns: int) -> Tensor:
        return ids

    def complete(self, logits: Tensor) -> Tensor:
        return logits

    def logsumexp(self, own: Tensor) -> Tensor:
        return own

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
