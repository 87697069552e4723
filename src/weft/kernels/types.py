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
    position sees, including itself; None means no limit. `dropout` is the probability with which an
    attention weight is dropped, if the pass has dropout keys.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    dropout: float = 0.0


@dataclass(frozen=True)
class AttentionState:
    """Result of attention over some of the keys, which can be merged with results for other keys.

    `out` has the outputs of the queries, [..., rows, dim] with one row per query. `lse` has the
    log-sum-exp of each query's scores, [..., rows]. Merging is exact if the sets of keys are
    disjoint.
    """

    out: Tensor
    lse: Tensor

    def __getitem__(self, part: slice | Tensor) -> AttentionState:
        return AttentionState(self.out[part], self.lse[part])


@dataclass(frozen=True)
class VarlenSegments:
    """Segments that define the keys to which each row of a pack attends.

    A segment is a range of rows that attend to a range of keys. It is given by four numbers: first
    row, number of rows, first key, number of keys. The segments of `causal` do not overlap, and
    neither do those of `full`.

    Attributes:
        causal: Segments with causal attention, int64 [S, 4] on the host. The last row of a segment
            attends to all keys of the segment, the row before it to all except the last key, and so
            on.
        full: Segments in which every row attends to all keys, in addition to its keys in `causal`,
            int64 [S, 4] on the host; None if there are no such segments.
        window: If set, each row attends only to the last `window` of its keys in `causal`.
    """

    causal: Tensor
    full: Tensor | None = None
    window: int | None = None


@dataclass(frozen=True)
class VarlenLengths:
    """Boundaries of sequences in concatenated queries and keys.

    The queries of sequence i are rows `queries[i]:queries[i + 1]` of the concatenated queries, and
    its keys are rows `keys[i]:keys[i + 1]` of the concatenated keys. For S sequences, both tensors
    are int32 [S + 1]. `most_queries` and `most_keys` are the largest numbers of queries and keys of
    a sequence. If a sequence has fewer queries than keys, its queries belong to its last tokens.
    """

    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int


@dataclass(frozen=True)
class SoftmaxStatistics:
    """Statistics of the softmax over each row of logits, for R rows.

    `lse` [R] is the log-sum-exp of the logits, and `entropy` [R] is in nats. `best`, int64 [R], is
    the most likely id, or the first one if several ids are equally likely. `entropy` and `best` are
    None if not requested.
    """

    lse: Tensor
    entropy: Tensor | None
    best: Tensor | None
