"""Attention contexts: which tokens of a pack attend to which.

`Dense` is for whole sequences and `Prefixed` for sequences of which some share a prefix. Contexts
of new tokens of cached sequences are defined with the caches (`weft.models.kv.slots.Cached`,
`weft.models.kv.pages.Paged`), and that of a pack whose tokens are split over ranks is
`weft.models.attention.pack_shards.PackShard`. All implement `AttentionContext`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

# Largest share of padding in a bucket: more padding costs more than a saved kernel launch gains.
PADDING_SHARE = 0.25
SHORT = 16  # sequences up to this length share a bucket, however much padding they need


class AttentionContext(Protocol):
    """Rule for the keys that each token of a forward pass attends to."""

    @property
    def dense(self) -> Dense:
        """The tokens of this pass without cached or shared ones, as whole sequences."""
        ...

    @property
    def last_tokens(self) -> Tensor:
        """int64 [S]: index of each sequence's last token."""
        ...

    @property
    def token_lengths(self) -> Tensor:
        """int64 [T]: the length of the sequence that a token belongs to."""
        ...


@dataclass(frozen=True)
class SequenceBucket:
    """Sequences of similar length as one padded rectangle.

    Padding comes after each sequence, so causal attention never reads it.
    """

    # int64 [n, L]: token of each cell; cells of padding repeat the sequence's last token
    index: Tensor
    # int64 [tokens]: cells (row-major) that are not padding; None if no cell is padding
    valid: Tensor | None
    # (start, stop) if the cells are the tokens from start to stop, in order; else None
    span: tuple[int, int] | None

    @cached_property
    def tokens(self) -> Tensor:
        """int64 [tokens]: tokens of the cells that are not padding."""
        cells = self.index.flatten()
        return cells if self.valid is None else cells.index_select(0, self.valid)


@dataclass(frozen=True)
class AttentionPart:
    """One part of attention: the tokens of `queries` attend to those of `keys`.

    Each rectangle of `queries` attends to the whole rectangle of `keys`, or causally (`causal`) if
    both are the same tokens.
    """

    queries: SequenceBucket
    keys: SequenceBucket
    causal: bool


@dataclass(frozen=True)
class Dense:
    """Whole sequences with causal attention within each.

    Sequence s consists of the tokens `cu_seqlens[s]` to `cu_seqlens[s + 1]` (excluded).
    """

    cu_seqlens: Tensor  # int32 [S + 1]
    max_len: int
    num_tokens: int | None = None  # None if the host does not know it and would wait for the device

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def dense(self) -> Dense:
        """This context itself; other contexts return the tokens of the pass without cached ones."""
        return self

    @cached_property
    def masks(self) -> dict[int | None, Any]:
        """Masks of FlexAttention by window size; layers add the ones they need."""
        return {}

    @cached_property
    def starts(self) -> list[int]:
        """`cu_seqlens` as a list on the host."""
        return [int(start) for start in self.cu_seqlens.tolist()]

    @cached_property
    def lengths(self) -> Tensor:
        """int64 [S], on the device: number of tokens of each sequence."""
        return self.cu_seqlens.diff().long()

    @cached_property
    def token_lengths(self) -> Tensor:
        """int64 [T]: the length of the sequence that a token belongs to."""
        return self.lengths.repeat_interleave(self.lengths, output_size=self.num_tokens)

    @cached_property
    def last_tokens(self) -> Tensor:
        """int64 [S]: index of each sequence's last token."""
        return self.cu_seqlens[1:].long() - 1

    @cached_property
    def segments(self) -> Tensor:
        """int64 [S, 4], on the host: (first row, rows, first key, keys) of each sequence."""
        return torch.tensor([(a, b - a, a, b - a) for a, b in pairwise(self.starts)])

    @cached_property
    def buckets(self) -> list[SequenceBucket]:
        """The sequences grouped into rectangles, longest first; empty sequences are left out."""
        result: list[SequenceBucket] = []
        for members in _group_by_length(self.starts):
            result.append(_build_bucket(self.starts, members, self.cu_seqlens.device))
        return result

    @cached_property
    def cell_positions(self) -> Tensor | None:
        """int64 [T]: index of each token in the concatenation of the buckets' valid cells.

        None if the concatenation is already in the order of the tokens.
        """
        order = []
        for members in _group_by_length(self.starts):
            for s in members:
                for t in (self.starts[s], self.starts[s + 1]):
                    order.append(t)
        if all(a <= b for a, b in pairwise(order)):
            return None
        return torch.argsort(torch.cat([bucket.tokens for bucket in self.buckets]))


@dataclass(frozen=True)
class PrefixContinuation:
    """A prefix and the tokens that continue it, each as (first token, one past the last).

    `continuation` covers all continuations of the prefix, which are consecutive.
    """

    prefix: tuple[int, int]
    continuation: tuple[int, int]


@dataclass(frozen=True)
class Prefixed:
    """Sequences of which some share a prefix, which is computed once.

    The pack consists of segments: prefixes, continuations and whole sequences. A token sees its own
    segment causally, and a token of a continuation also sees the whole prefix.
    """

    dense: Dense  # the segments
    continuations: tuple[PrefixContinuation, ...]
    last_tokens: Tensor  # int64 [S]: index of each sequence's last token

    @cached_property
    def masks(self) -> dict[int | None, Any]:
        """Return masks by window size, as `Dense.masks` does."""
        return {}

    @property
    def token_lengths(self) -> Tensor:
        """int64 [T]: the length of the segment that a token belongs to.

        Networks with rotations that depend on the length of the whole sequence do not share
        prefixes; see `Transformer.can_share_prefixes`.
        """
        return self.dense.token_lengths

    @cached_property
    def prefix_segments(self) -> Tensor:
        """int64 [joins, 4], on the host: (first row, rows, first key, keys) of each join.

        The rows are the continuations of a prefix, the keys are those of the prefix.
        """
        spans = [(*join.continuation, *join.prefix) for join in self.continuations]
        return torch.tensor([(a, b - a, c, d - c) for a, b, c, d in spans])

    @cached_property
    def parts(self) -> tuple[AttentionPart, ...]:
        """Parts of attention: first within each segment, then from each continuation to its prefix."""
        within = [AttentionPart(bucket, bucket, causal=True) for bucket in self.dense.buckets]
        device = self.dense.cu_seqlens.device
        across = []
        for j in self.continuations:
            across.append(
                AttentionPart(
                    _build_span_bucket(*j.continuation, device),
                    _build_span_bucket(*j.prefix, device),
                    causal=False,
                )
            )
        return (*within, *across)


def _group_by_length(starts: list[int]) -> list[list[int]]:
    """Return the numbers of the sequences of each bucket.

    Sequences keep their order if all have one length.
    """
    lengths = [stop - start for start, stop in pairwise(starts)]
    groups: list[list[int]] = []
    room = 0  # cells of padding that the last bucket can still have
    for s in sorted((s for s, n in enumerate(lengths) if n), key=lambda s: -lengths[s]):
        longest = lengths[groups[-1][0]] if groups else 0
        padding = longest - lengths[s]
        if groups and (longest <= SHORT or padding <= room + PADDING_SHARE * longest):
            room += int(PADDING_SHARE * longest) - padding
            groups[-1].append(s)
        else:
            groups.append([s])
            room = 0
    return [sorted(members) for members in groups]


def _build_span_bucket(start: int, stop: int, device: torch.device) -> SequenceBucket:
    """Return the tokens from start to stop (excluded) as a bucket with one row."""
    return SequenceBucket(torch.arange(start, stop, device=device)[None], None, (start, stop))


def _build_bucket(starts: list[int], members: list[int], device: torch.device) -> SequenceBucket:
    lengths = torch.tensor([starts[s + 1] - starts[s] for s in members])
    first = torch.tensor([starts[s] for s in members])
    longest = int(lengths.max())
    offsets = torch.arange(longest)
    index = first[:, None] + torch.minimum(offsets, lengths[:, None] - 1)
    if bool((lengths == longest).all()):
        span = (starts[members[0]], starts[members[-1] + 1])
        adjoining = span[1] - span[0] == index.numel()
        return SequenceBucket(index.to(device), None, span if adjoining else None)
    valid = (offsets < lengths[:, None]).flatten().nonzero().flatten()
    return SequenceBucket(index.to(device), valid.to(device), None)
