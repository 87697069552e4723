"""A vocabulary of which each of several ranks holds a part: what a head asks of the others."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class VocabularySplit(Protocol):
    """Joins what ranks have that hold consecutive parts of the vocabulary each; tensors are one
    number a row, or a few.
    """

    @property
    def first(self) -> int:
        """Id of this rank's first row of the output matrix."""
        ...

    @property
    def size(self) -> int:
        """Ids in all."""
        ...

    @property
    def widest(self) -> int:
        """Most ids that a rank holds."""
        ...

    def logsumexp(self, own: Tensor) -> Tensor: ...
    def sum(self, own: Tensor) -> Tensor: ...
    def argmax(self, values: Tensor, ids: Tensor) -> Tensor:
        """The ids of the largest values, the first rank's where several are equal."""
        ...

    def gather(self, own: Tensor) -> Tensor:
        """[R, ids of this rank] -> [R, all ids], without a gradient."""
        ...

    def every(self, own: Tensor) -> Tensor:
        """[R, K] of each rank -> [R, ranks * K], in the order of ranks, without a gradient."""
        ...


def own_ids(ids: Tensor, size: int, split: VocabularySplit | None) -> Tensor:
    """Ids in a rank's part of the vocabulary, of `size`; -1 for those that lie in another."""
    if split is None:
        return ids
    local = ids - split.first
    return torch.where((local >= 0) & (local < size), local, torch.full_like(local, -1))
