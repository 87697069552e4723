"""Interface of a vocabulary that is split over ranks, as the head uses it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class VocabularySplit(Protocol):
    """Operations over ranks that have consecutive parts of the vocabulary each.

    Tensors have one number per row, or a few.
    """

    @property
    def first_id(self) -> int:
        """Id of this rank's first row of the output matrix."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of ids of the whole vocabulary."""
        ...

    @property
    def max_ids(self) -> int:
        """Largest number of ids of a rank."""
        ...

    def logsumexp(self, own: Tensor) -> Tensor: ...
    def sum(self, own: Tensor) -> Tensor: ...
    def argmax(self, values: Tensor, ids: Tensor) -> Tensor:
        """Return the ids of the largest values; on ties, the id of the first rank."""
        ...

    def gather(self, own: Tensor) -> Tensor:
        """Return the values of all ids, without a gradient: [R, ids of this rank] -> [R, all ids]."""
        ...

    def gather_candidates(self, own: Tensor) -> Tensor:
        """Return the values of all ranks in order, without a gradient: [R, K] -> [R, ranks * K]."""
        ...


def to_local_ids(ids: Tensor, size: int, split: VocabularySplit | None) -> Tensor:
    """Return ids relative to this rank's part of the vocabulary, of `size` ids; -1 for other ids."""
    if split is None:
        return ids
    local = ids - split.first_id
    return torch.where((local >= 0) & (local < size), local, torch.full_like(local, -1))
