"""Types of the arguments and results of attention and softmax kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True)
class AttentionSpec:
    """Parameters of attention.

    The attention weights are softmax(scale * q k^T) over the visible keys. With a `softcap`, they
    are softmax(softcap * tanh(scale * q k^T / softcap)). `window` is the number of keys that a
    position sees, including itself; None means no limit. `dropout` is the dropout rate of the
    attention weights in passes with dropout.
    """

    scale: float
    window: int | None = None  # keys a position sees, itself included
    softcap: float | None = None
    dropout: float = 0.0  # of attention weights, if the pass has dropout keys


@dataclass(frozen=True)
class AttentionState:
    """Attention outputs of rows over some of their keys, and the log-sum-exp of the scores.

    `out` is [..., rows, dim], and `lse` is [..., rows]. Two states of the same rows over different
    keys can be merged exactly.
    """

    out: Tensor  # [..., rows, dim]
    lse: Tensor  # [..., rows]: log of the sum of exp(score)

    def __getitem__(self, part: slice | Tensor) -> AttentionState:
        return AttentionState(self.out[part], self.lse[part])


@dataclass(frozen=True)
class VarlenSegments:
    """Segments that define the keys to which each row of a pack attends.

    Each segment is given by four numbers: first row, number of rows, first key, number of keys. Two
    segments of `own` never share a row or a key, and neither do two segments of `across`.

    Attributes:
        own: Segments with causal attention, int64 [S, 4] on the host. The last row of a segment
            attends to all keys of the segment, and each row attends to one key fewer than the next
            row.
        across: Segments in which every row attends to all keys, in addition to its keys in `own`,
            int64 [S, 4] on the host; None if there are none.
        window: If set, each row attends only to the last `window` of its keys in `own`.
    """

    own: Tensor
    across: Tensor | None = None
    window: int | None = None


@dataclass(frozen=True)
class VarlenLengths:
    """Lengths of the queries and keys of concatenated sequences.

    `queries`, int32 [S + 1], are the boundaries of the sequences in the concatenated queries, and
    `keys`, int32 [S + 1], are those in the concatenated keys. `most_queries` is the largest number
    of queries of a sequence, and `most_keys` is the largest number of keys. If a sequence has fewer
    queries than keys, the queries are those of the sequence's last tokens.
    """

    queries: Tensor  # int32 [S + 1]: first query of each sequence, then the total
    keys: Tensor  # int32 [S + 1]: the same for keys
    most_queries: int  # largest number of queries of a sequence
    most_keys: int  # largest number of keys of a sequence


@dataclass(frozen=True)
class SoftmaxStatistics:
    """Statistics of the softmax over each row of logits, for R rows.

    `lse` [R] is the log-sum-exp of the logits, and `entropy` [R] is in nats. `best`, int64 [R], is
    the most likely id, or the first one if several ids are equally likely. `entropy` and `best` are
    None if not requested.
    """

    lse: Tensor  # [R]: log of the sum of exp
    entropy: Tensor | None  # [R], in nats
    best: Tensor | None  # int64 [R]: the most likely id, the first on ties
