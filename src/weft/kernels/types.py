"""What attention is told beside queries, keys and values, and what it may return beside its result;
tensors and numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True)
class AttentionSpec:
    """softmax(softcap * tanh(scale * q k^T / softcap)) over the visible keys; without `softcap`
    softmax(scale * q k^T).
    """

    scale: float
    window: int | None = None  # keys a position sees, itself included
    softcap: float | None = None
    dropout: float = 0.0  # of the weights, where a pass has dropout keys


@dataclass(frozen=True)
class AttentionState:
    """Attention of rows over some of their keys.

    Two states over different keys of the same rows can be merged exactly.
    """

    out: Tensor  # [..., rows, dim]
    lse: Tensor  # [..., rows]: log of the sum of exp(score)

    def __getitem__(self, part: slice | Tensor) -> AttentionState:
        return AttentionState(self.out[part], self.lse[part])


@dataclass(frozen=True)
class VarlenSegments:
    """Which keys the rows of a pack see.

    Segments are int64 [S, 4] on the host: first row, rows, first key, keys.

    The last row of a segment of `own` sees all its keys, each row before it one less, and of these
    the last `window`; rows of a segment of `across` see all its keys too. No two segments of either
    have a row or a key in common.
    """

    own: Tensor
    across: Tensor | None = None
    window: int | None = None


@dataclass(frozen=True)
class VarlenLengths:
    """Queries and keys of sequences laid end to end; where a sequence has fewer queries than keys
    they are its last ones.
    """

    queries: Tensor  # int32 [S + 1]: where each sequence's queries begin, and the end
    keys: Tensor  # int32 [S + 1], likewise
    most_queries: int  # of a sequence
    most_keys: int


@dataclass(frozen=True)
class Statistics:
    """Of the softmax over each row of logits."""

    lse: Tensor  # [R]: log of the sum of exp
    entropy: Tensor | None  # [R], in nats
    best: Tensor | None  # int64 [R]: the first of the likeliest ids
