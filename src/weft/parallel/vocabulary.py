"""Softmax over a vocabulary that is split over ranks, each with consecutive ids.

For each row, the ranks exchange only the log of the sum of exponentials, the label's logit and the
ids with the highest logits. The logits of all ids are exchanged only for sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from weft import kernels
from weft.kernels import SoftmaxStatistics
from weft.parallel.collectives import find_max_over_ranks, gather_from_ranks, sum_without_gradient
from weft.topology import compute_vocabulary


@dataclass(frozen=True)
class SplitVocabulary:
    """Vocabulary of which each rank of a process group has consecutive ids.

    Implements the protocol `OutputVocabulary` (see `weft.models.network.vocabulary`). All ranks
    must call the methods that combine tensors of the ranks.
    """

    first_id: int  # this rank's first id
    vocab_size: int  # ids in all
    group: ProcessGroup

    def count_ids(self, columns: int) -> int:
        return self.vocab_size

    def count_most_columns(self, columns: int) -> int:
        """Return the largest number of ids of a rank, so that all ranks have equal chunks."""
        return -(-self.vocab_size // self.group.size())

    def find_ids(self, columns: int) -> slice:
        return slice(self.first_id, self.first_id + columns)

    def find_columns(self, ids: Tensor, columns: int) -> Tensor:
        local = ids - self.first_id
        return torch.where((local >= 0) & (local < columns), local, torch.full_like(local, -1))

    def complete(self, logits: Tensor) -> Tensor:
        """Return the logits of all ids; the result is bitwise identical on all ranks."""
        counts = []
        for rank in range(self.group.size()):
            ids = compute_vocabulary(self.vocab_size, self.group.size(), rank)
            counts.append(ids.stop - ids.start)
        padded = logits.new_zeros(len(logits), max(counts))
        padded[:, : logits.shape[1]] = logits
        parts = self._gather_side_by_side(padded).split(max(counts), dim=1)
        return torch.cat(
            [part[:, :count] for part, count in zip(parts, counts, strict=True)], dim=1
        )

    def logsumexp(self, own: Tensor) -> Tensor:
        most = own.detach().clone(memory_format=torch.contiguous_format)
        find_max_over_ranks(most, self.group)
        shift = torch.where(most.isfinite(), most, torch.zeros_like(most))
        return sum_without_gradient((own - shift).exp(), self.group).log() + shift

    def gather(self, logits: Tensor, columns: Tensor) -> Tensor:
        own = logits.gather(1, columns.clamp_min(0))
        return sum_without_gradient(
            torch.where(columns >= 0, own, torch.zeros_like(own)), self.group
        )

    def scatter(self, x: Tensor, columns: Tensor, values: Tensor) -> None:
        row, which = (columns >= 0).nonzero(as_tuple=True)
        x[row, columns[row, which]] = values[row, which]

    def find_likeliest(self, logits: Tensor, count: int, below: int | None) -> Tensor:
        if below is None:
            here = logits.shape[1]
        else:
            here = min(max(below - self.first_id, 0), logits.shape[1])
        best = logits[:, :here].topk(min(count, here), dim=1)
        lacking = (0, count - best.values.shape[1])  # every rank must send equally many
        values = self._gather_side_by_side(
            nn.functional.pad(best.values, lacking, value=float("-inf"))
        )
        ids = self._gather_side_by_side(nn.functional.pad(best.indices + self.first_id, lacking))
        return ids.gather(1, values.topk(count, dim=1).indices)

    def uses_statistics(self, logits: Tensor) -> bool:
        return True

    def compute_statistics(
        self, logits: Tensor, columns: Tensor, *, entropy: bool, best: bool
    ) -> tuple[Tensor, SoftmaxStatistics]:
        """Return the log-probs of one id per row, and the statistics over all ranks' logits.

        Rank r has the log-sum-exp lse_r and the entropy H_r of its own logits. The log-sum-exp of
        all logits is lse = logsumexp of lse_r, and the entropy is lse - sum over ranks of exp(lse_r
        - lse) (lse_r - H_r).
        """
        own = kernels.statistics(logits, entropy=entropy, best=best)
        lse = self.logsumexp(own.lse)
        logprobs = self.gather(logits, columns[:, None])[:, 0] - lse
        whole_entropy = None
        if own.entropy is not None:
            share = (own.lse - lse).exp()
            mean = torch.where(share > 0, share * (own.lse - own.entropy), torch.zeros_like(share))
            whole_entropy = lse - sum_without_gradient(mean, self.group)
        likeliest = None
        if own.best is not None:
            # On ties, argmax takes the first rank.
            values = self._gather_side_by_side(logits.gather(1, own.best[:, None]))
            ids = self._gather_side_by_side(own.best[:, None] + self.first_id)
            likeliest = ids.gather(1, values.argmax(dim=1, keepdim=True))[:, 0]
        return logprobs, SoftmaxStatistics(lse, whole_entropy, likeliest)

    def _gather_side_by_side(self, own: Tensor) -> Tensor:
        """Return the values of all ranks, in rank order: [R, K] -> [R, ranks * K]."""
        return torch.cat(list(gather_from_ranks(own, self.group)), dim=1)
