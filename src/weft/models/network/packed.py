"""Input of a network: the concatenated tokens of many sequences, with an attention context.

In `Packed(tokens, positions, attention, rows, labels)`, `rows[n]` is the index of a token, and
`labels[n]` is the token whose log-prob is computed from the hidden state at that index. An index
may be repeated in `rows`. `SamplingSupport` has the ids over which the log-probs of a row are
normalized, and `Microbatch` has the arguments of a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft import kernels
from weft.algorithms.base import Output
from weft.models.attention.contexts import AttentionContext, Dense
from weft.models.network.dropout import DropoutKeys
from weft.models.network.moe import MoEAuxLoss

# Function from a network's outputs to the gradients with respect to them, all [N], for losses in
# which the gradients of a row depend only on the outputs of that row. Outputs of rows that are not
# computed yet are 0. The result always contains the gradient with respect to the log-probs.
RowGradient = Callable[[Mapping[Output, Tensor]], Mapping[Output, Tensor]]


@dataclass(frozen=True)
class TopIds:
    """Request for the `count` most likely ids of each row, among the ids less than `below`.

    If there are fewer than `count` such ids, all of them are returned.
    """

    count: int
    below: int | None = None


@dataclass(frozen=True)
class Packed:
    """Input of one forward pass of a network.

    Attributes:
        tokens: Concatenated tokens of all sequences, int64 [T].
        positions: Position of each token, counted from 0 within its sequence, int64 [T].
        attention: Context that defines the keys to which each token attends.
        rows: Indices of the tokens for which outputs are computed, int64 [N]. The outputs of a
            token are computed from its final hidden state.
        labels: Token whose log-prob is computed for each of the `rows`, int64 [N]; in training,
            this is usually the next token.
        dropout: Dropout keys of the sequences, or None without dropout.
        aux_loss: Object that collects the load-balancing losses of layers with experts, or None;
            supported only with `Dense` attention.
        row_gradient: Function from the outputs to their gradients, for losses whose gradients at a
            row depend only on the outputs of that row.
        ids: Further ids whose log-probs are computed for each of the `rows`, int [N, K], or a
            request for the most likely ids.
    """

    tokens: Tensor
    positions: Tensor
    attention: AttentionContext
    rows: Tensor
    labels: Tensor
    dropout: DropoutKeys | None = None
    aux_loss: MoEAuxLoss | None = None
    row_gradient: RowGradient | None = None
    ids: Tensor | TopIds | None = None

    def select_rows(self, rows: Tensor) -> Packed:
        """Return a copy of this pack that requests outputs only at some of its rows.

        `rows`, int64 [n], are indices into this pack's `rows`.
        """
        total = len(self.rows)
        gradient = self.row_gradient

        def compute_selected(out: Mapping[Output, Tensor]) -> Mapping[Output, Tensor]:
            assert gradient is not None
            selected = {}
            for key, value in gradient(scatter_rows(out, rows, total)).items():
                selected[key] = value[rows]
            return selected

        return replace(
            self,
            rows=self.rows[rows],
            labels=self.labels[rows],
            row_gradient=None if gradient is None else compute_selected,
            ids=self.ids[rows] if isinstance(self.ids, Tensor) else self.ids,
        )


@dataclass(frozen=True)
class SamplingSupport:
    """Ids that sampling kept for each row after top-k, top-p or min-p.

    The log-probs of a row are normalized over its kept ids. The row's label always counts as kept.
    If no ids are listed for a row, its log-probs are normalized over the whole vocabulary.

    Attributes:
        ids: Kept ids of all rows, one row after the other, int64 [sum of counts].
        counts: Number of ids listed for each row, int64 [N].
        known_counts: Copy of `counts` on the host, [N], or None.
    """

    ids: Tensor
    counts: Tensor
    known_counts: npt.NDArray[np.int64] | None = None

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
        is_selected = np.zeros(len(self.host_counts), np.bool_)
        is_selected[rows] = True
        indices = np.flatnonzero(np.repeat(is_selected, self.host_counts))
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
        counts = self.counts[rows]
        # The mask has an extra last column, to which ids outside the range `ids` are written.
        is_outside = (counts > 0)[:, None].repeat(1, size + 1)
        label_rows = torch.arange(len(counts), device=support_ids.device)
        support_rows = label_rows.repeat_interleave(counts, output_size=len(support_ids))
        for kept_rows, kept_ids in ((support_rows, support_ids), (label_rows, labels)):
            columns = kept_ids - ids.start
            is_covered = (columns >= 0) & (columns < size)
            is_outside[kept_rows, torch.where(is_covered, columns, size)] = False
        return is_outside[:, :size]


@dataclass(frozen=True)
class Microbatch:
    """Arguments of `Transformer.forward` for one micro-batch, except the hidden states."""

    x: Packed
    want: frozenset[Output]
    temperature: float = 1.0
    support: SamplingSupport | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the micro-batch."""
        return len(self.x.tokens)


def scatter_rows(out: Mapping[Any, Tensor], rows: Tensor, total: int) -> dict[Any, Tensor]:
    """Return outputs for `total` rows: those of `out` at the indices `rows`, and 0 elsewhere."""
    result: dict[Any, Tensor] = {}
    for key, value in out.items():
        result[key] = value.new_zeros(total, *value.shape[1:]).index_copy(0, rows, value)
    return result


def pack(sequences: list[Tensor], device: torch.device | str = "cpu") -> Packed:
    """Pack whole sequences, each int64 [L >= 1], for next-token prediction.

    Outputs are requested at every token except the last of each sequence.
    """
    lengths = torch.tensor([len(s) for s in sequences])
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    tokens = torch.cat([s.to(device) for s in sequences])
    positions = torch.arange(len(tokens)) - cu_seqlens[:-1].repeat_interleave(lengths)
    keep = torch.ones(len(tokens), dtype=torch.bool)
    keep[cu_seqlens[1:] - 1] = False
    rows = keep.nonzero().flatten().to(device)
    attention = Dense(cu_seqlens.to(device=device, dtype=torch.int32), int(lengths.max()))
    return Packed(tokens, positions.to(device), attention, rows, tokens[rows + 1])
