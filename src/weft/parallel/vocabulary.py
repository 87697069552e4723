"""Softmax over a vocabulary that is split over ranks, each with consecutive ids.

For each row, the ranks exchange only the log of the sum of exponentials, the label's logit and the
ids with the highest logits. The logits of all ids are exchanged only for sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from weft.parallel.collectives import find_max_over_ranks, gather_from_ranks, sum_without_gradient
from weft.topology import compute_vocabulary


@dataclass(frozen=True)
class GroupVocabularySplit:
    """Split of the vocabulary over the ranks of a process group.

    Implements the protocol `VocabularySplit` (see `weft.models.network.split`).
    """

    first_id: int  # this rank's first id
    vocab_size: int  # ids in all
    group: ProcessGroup

    @property
    def max_ids(self) -> int:
        return -(-self.vocab_size // self.group.size())

    def logsumexp(self, own: Tensor) -> Tensor:
        most = own.detach().clone(memory_format=torch.contiguous_format)
        find_max_over_ranks(most, self.group)
        shift = torch.where(most.isfinite(), most, torch.zeros_like(most))
        return sum_without_gradient((own - shift).exp(), self.group).log() + shift

    def sum(self, own: Tensor) -> Tensor:
        return sum_without_gradient(own, self.group)

    def argmax(self, values: Tensor, ids: Tensor) -> Tensor:
        # On ties, argmax takes the first rank.
        best = self.gather_candidates(values[:, None]).argmax(dim=1, keepdim=True)
        return self.gather_candidates(ids[:, None]).gather(1, best)[:, 0]

    def gather(self, own: Tensor) -> Tensor:
        """Return the logits of all ids [rows, vocabulary], gathered from all ranks.

        `own` are the logits of this rank's ids [rows, own ids]. The result is bitwise identical on
        all ranks.
        """
        ranks = []
        for rank in range(self.group.size()):
            ranks.append(compute_vocabulary(self.vocab_size, self.group.size(), rank))
        counts = [ids.stop - ids.start for ids in ranks]
        padded = own.new_zeros(len(own), max(counts))
        padded[:, : own.shape[1]] = own
        parts = self.gather_candidates(padded).split(max(counts), dim=1)
        return torch.cat(
            [part[:, :count] for part, count in zip(parts, counts, strict=True)], dim=1
        )

    def gather_candidates(self, own: Tensor) -> Tensor:
        return torch.cat(list(gather_from_ranks(own, self.group)), dim=1)
