"""Ids that sampling kept for each row, over which log-probs are normalized."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft import kernels


@dataclass(frozen=True)
class SamplingSupport:
    """Ids that sampling kept for each row after top-k, top-p or min-p.

    The log-probs of a row are normalized over its kept ids. The row's label always counts as kept.
    If no ids are listed for a row, its log-probs are normalized over the whole vocabulary.

    Attributes:
        ids: Kept ids of all rows, one row after the other, int64.
        counts: Number of ids listed for each row, int64 [N].
        known_counts: Copy of `counts` on the host, or None.
    """

    ids: Tensor  # int64 [sum of counts]
    counts: Tensor  # int64 [N]
    known_counts: npt.NDArray[np.int64] | None = None  # the counts, on the host

    @cached_property
    def host_counts(self) -> npt.NDArray[np.int64]:
        """Number of ids of each row, as an array [N] on the host.

        If `known_counts` is None, the host waits for the device and copies `counts`.
        """
        if self.known_counts is None:
            counts: npt.NDArray[np.int64] = self.counts.cpu().numpy()
        else:
            counts = self.known_counts
        return counts

    @cached_property
    def ends(self) -> npt.NDArray[np.int64]:
        """Exclusive end of each row's ids in `ids`, as an array [N] on the host."""
        return np.cumsum(self.host_counts)

    def select(self, rows: npt.NDArray[np.int64]) -> SamplingSupport:
        """Return the support of the given rows, whose indices must be in ascending order."""
        chosen = np.zeros(len(self.host_counts), np.bool_)
        chosen[rows] = True
        indices = np.flatnonzero(np.repeat(chosen, self.host_counts))
        device = self.ids.device
        return SamplingSupport(
            self.ids[kernels.put(indices, device)],
            self.counts[kernels.put(rows, device)],
            self.host_counts[rows],
        )

    def find_outside(self, rows: slice, labels: Tensor, ids: slice) -> Tensor:
        """Return a mask [R, ids] that is True for ids that sampling did not keep.

        `rows` are consecutive rows, and `ids` is the range of ids that the mask covers. The
        `labels` [R] count as kept.
        """
        first = int(self.ends[rows.start] - self.host_counts[rows.start])
        size = ids.stop - ids.start
        support_ids = self.ids[first : int(self.ends[rows.stop - 1])]
        here = self.counts[rows]
        # Ids outside the span are written to an extra last column.
        outside = (here > 0)[:, None].repeat(1, size + 1)
        row = torch.arange(len(here), device=support_ids.device)
        for at, of_row in (
            (row.repeat_interleave(here, output_size=len(support_ids)), support_ids),
            (row, labels),
        ):
            local = of_row - ids.start
            outside[at, torch.where((local >= 0) & (local < size), local, size)] = False
        return outside[:, :size]
