"""Input of a network: the concatenated tokens of many sequences, with an attention context.

In `Packed(tokens, positions, attention, rows, labels)`, `rows[n]` is the index of a token, and
`labels[n]` is the token whose log-prob is computed from the hidden state at that index. An index
may be repeated in `rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from weft.algorithms.base import Output
from weft.models.attention.contexts import AttentionContext, Dense
from weft.models.network.aux_loss import MoEAuxLoss
from weft.models.network.dropout import DropoutKeys

# Function from a network's outputs to their gradients, all [N], if a row's gradients depend only on
# its own outputs. Outputs of rows that are not computed yet are 0. The result always contains the
# gradient of the log-probs.
RowGradient = Callable[[Mapping[Output, Tensor]], Mapping[Output, Tensor]]


@dataclass(frozen=True)
class TopIds:
    """Request for the `count` most likely ids of each row, considering only ids less than `below`.

    If fewer than `count` ids are considered, all of them are returned.
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

    tokens: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    attention: AttentionContext
    # int64 [N]: the hidden state (a token's index) that each wanted output is read from
    rows: Tensor
    labels: Tensor  # int64 [N]: the token whose log-prob is wanted at each row
    dropout: DropoutKeys | None = None  # None: no dropout
    # Load-balancing loss to which layers with experts add; only for `Dense` attention.
    aux_loss: MoEAuxLoss | None = None
    # gradients of the outputs, if each row's depend only on its own outputs
    row_gradient: RowGradient | None = None
    # int [N, K]: more ids whose log-probs are wanted at each row; `TopIds`: the most likely ids
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
