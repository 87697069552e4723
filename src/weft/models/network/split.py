"""Interface through which a network's head uses a vocabulary that is split over ranks."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class VocabularySplit(Protocol):
    """Interface of a vocabulary that is split over ranks, each of which has consecutive ids.

    The methods combine tensors over the ranks.
    """

    @property
    def first_id(self) -> int:
        """First id of this rank's part of the vocabulary."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of ids in the whole vocabulary."""
        ...

    @property
    def max_ids(self) -> int:
        """Largest number of ids that any rank has."""
        ...

    def logsumexp(self, own: Tensor) -> Tensor: ...
    def sum(self, own: Tensor) -> Tensor: ...
    def argmax(self, values: Tensor, ids: Tensor) -> Tensor:
        """Return, for each row, the id of the largest value on any rank.

        `values` contains this rank's largest value in each row, and `ids` the ids of these values.
        If the values of several ranks are equal, the first of these ranks wins.
        """
        ...

    def gather(self, own: Tensor) -> Tensor:
        """Return the values for all ids, without a gradient: [R, this rank's ids] -> [R, all ids]."""
        ...

    def gather_candidates(self, own: Tensor) -> Tensor:
        """Return the values of all ranks side by side, in rank order, without a gradient.

        `own` is [R, K], for example the K largest logits of each row on this rank. The result is
        [R, ranks * K]. In the example, it includes the K largest logits of the whole vocabulary.
        """
        ...


def to_local_ids(ids: Tensor, size: int, split: VocabularySplit | None) -> Tensor:
    """Return each id relative to this rank's first id, or -1 if another rank has the id.

    `size` is the number of ids that this rank has.
    """
    if split is None:
        return ids
    local = ids - split.first_id
    return torch.where((local >= 0) & (local < size), local, torch.full_like(local, -1))
