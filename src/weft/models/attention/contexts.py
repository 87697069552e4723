"""Inputs of attention, and contexts, which define the keys to which each token of a pack attends.

A pack is the concatenation of the tokens of several sequences. `Dense` is for whole sequences, and
`Prefixed` is for sequences that share prefixes. For new tokens of cached sequences, the caches
define the contexts `weft.models.kv.slots.Cached` and `weft.models.kv.pages.Paged`.
`weft.models.attention.pack_shards.PackShard` is for packs whose tokens are split over ranks. All
implement `AttentionContext`. `AttentionInputs` are a layer's queries, keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from weft.kernels import AttentionSpec
from weft.models.network.dropout import TokenDropout

# Largest share of padding in a bucket. With more padding, a separate bucket would be faster,
# although it needs another kernel launch.
PADDING_SHARE = 0.25
SHORT = 16  # sequences up to this length share a bucket, regardless of the padding


class AttentionContext(Protocol):
    """Interface of attention contexts, which define the keys to which each token attends."""

    @property
    def dense(self) -> Dense:
        """Attention context in which each sequence consists only of the tokens of this pass.

        Tokens in caches and on other ranks are left out. A shared prefix in the pass counts as a
        separate sequence.
        """
        ...

    @property
    def last_tokens(self) -> Tensor:
        """Index of each sequence's last token, int64 [S]."""
        ...

    @property
    def token_lengths(self) -> Tensor:
        """Length of the sequence to which each token belongs, int64 [T]."""
        ...


@dataclass(frozen=True)
class AttentionInputs:
    """Inputs of one layer's attention: queries, keys and values, and the parameters of attention.

    `q` is [T, heads, dim]; `k` and `v` are [T, kv_heads, dim], and heads is a multiple of kv_heads.
    Query head h uses key-value head h // (heads / kv_heads). Rotary positions are already applied
    to `q` and `k`. `layer` is the index of the layer in the whole network, from 0.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    spec: AttentionSpec
    layer: int
    dropout: TokenDropout | None = None

    @property
    def has_dropout(self) -> bool:
        """True if dropout is applied to attention weights in this pass."""
        return self.dropout is not None and self.spec.dropout > 0.0


@dataclass(frozen=True)
class SequenceBucket:
    """Group of sequences of similar length, padded to a rectangle of n rows and L columns.

    The padding follows the tokens of each sequence, so causal attention never reads it.

    Attributes:
        index: Pack indices of the tokens in the rectangle, int64 [n, L]. Padding repeats the index
            of the row's last token.
        valid: Row-major indices of the cells that are not padding, int64 [tokens], or None if
            there is no padding.
        span: Pair (start, stop) if the cells are the pack's tokens `start:stop` in order, else
            None.
    """

    index: Tensor
    valid: Tensor | None
    span: tuple[int, int] | None

    @cached_property
    def tokens(self) -> Tensor:
        """Index in the pack of each token of the bucket, without padding, int64 [tokens]."""
        cells = self.index.flatten()
        return cells if self.valid is None else cells.index_select(0, self.valid)


@dataclass(frozen=True)
class AttentionPart:
    """Part of an attention computation: the tokens of `queries` attend to the tokens of `keys`.

    If `causal`, `queries` and `keys` are the same tokens, and attention is causal within each
    sequence. Otherwise every token of `queries` attends to all tokens of `keys`.
    """

    queries: SequenceBucket
    keys: SequenceBucket
    causal: bool


@dataclass(frozen=True)
class Dense:
    """Attention context of complete sequences, with causal attention within each sequence.

    Sequence s consists of the tokens `cu_seqlens[s]:cu_seqlens[s + 1]` of the pack, and `max_len`
    is the length of the longest sequence. `num_tokens` is the total number of tokens, or None if
    this number is stored only on the device; the host must wait for the device to read it.
    """

    cu_seqlens: Tensor  # int32 [S + 1]
    max_len: int
    num_tokens: int | None = None

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def dense(self) -> Dense:
        """This context itself, because it has no cached or shared tokens."""
        return self

    @cached_property
    def masks(self) -> dict[int | None, Any]:
        """FlexAttention masks by window size, each built by the first layer that needs it."""
        return {}

    @cached_property
    def starts(self) -> list[int]:
        """Start of each sequence and end of the last: `cu_seqlens` as a list on the host."""
        return [int(start) for start in self.cu_seqlens.tolist()]

    @cached_property
    def lengths(self) -> Tensor:
        """Number of tokens of each sequence, int64 [S] on the device."""
        return self.cu_seqlens.diff().long()

    @cached_property
    def token_lengths(self) -> Tensor:
        """Length of the sequence to which each token belongs, int64 [T]."""
        return self.lengths.repeat_interleave(self.lengths, output_size=self.num_tokens)

    @cached_property
    def last_tokens(self) -> Tensor:
        """Index of each sequence's last token, int64 [S]."""
        return self.cu_seqlens[1:].long() - 1

    @cached_property
    def segments(self) -> Tensor:
        """Ranges of the queries and keys of each sequence, int64 [S, 4], on the host.

        The columns are the first query, the number of queries, the first key and the number of
        keys.
        """
        return torch.tensor(
            [(start, stop - start, start, stop - start) for start, stop in pairwise(self.starts)]
        )

    @cached_property
    def buckets(self) -> list[SequenceBucket]:
        """The sequences grouped into padded rectangles, longest first, without empty sequences."""
        result: list[SequenceBucket] = []
        for members in _group_by_length(self.starts):
            result.append(_build_bucket(self.starts, members, self.cu_seqlens.device))
        return result

    @cached_property
    def cell_positions(self) -> Tensor | None:
        """Index of each token in the concatenation of all `buckets` without padding, int64 [T].

        With these indices, results that were computed bucket by bucket are put back into the order
        of the pack. None if they are already in this order.
        """
        order = []
        for members in _group_by_length(self.starts):
            for sequence in members:
                order += [self.starts[sequence], self.starts[sequence + 1]]
        if all(left <= right for left, right in pairwise(order)):
            return None
        return torch.argsort(torch.cat([bucket.tokens for bucket in self.buckets]))


@dataclass(frozen=True)
class PrefixContinuation:
    """Position of a shared prefix in a pack, and position of the tokens that continue the prefix.

    `prefix` and `continuation` are pairs (first token, one past the last token). `continuation`
    covers all continuations of the prefix, which are consecutive in the pack.
    """

    prefix: tuple[int, int]
    continuation: tuple[int, int]


@dataclass(frozen=True)
class Prefixed:
    """Attention context of sequences, some of which share a prefix that is computed only once.

    The pack consists of segments: prefixes, continuations of prefixes, and whole sequences. A token
    attends causally within its segment. A token of a continuation also attends to the whole prefix.
    `dense` is a context with one sequence per segment, and `continuations` lists each prefix with
    the tokens that continue it. `last_tokens`, int64 [S], are the indices of each sequence's last
    token.
    """

    dense: Dense
    continuations: tuple[PrefixContinuation, ...]
    last_tokens: Tensor

    @cached_property
    def masks(self) -> dict[int | None, Any]:
        """FlexAttention masks by window size, each built by the first layer that needs it."""
        return {}

    @property
    def token_lengths(self) -> Tensor:
        """Length of the segment to which each token belongs, int64 [T].

        This is less than the length of the whole sequence if the sequence has a shared prefix.
        Networks whose rotation depends on the sequence length therefore do not share prefixes; see
        `Transformer.can_share_prefixes`.
        """
        return self.dense.token_lengths

    @cached_property
    def prefix_segments(self) -> Tensor:
        """Ranges of queries and keys for each prefix, int64 [prefixes, 4], on the host.

        The columns are the first query, the number of queries, the first key and the number of
        keys. The queries are the tokens that continue the prefix, and the keys are the tokens of
        the prefix.
        """
        rows = []
        for each in self.continuations:
            first_query, query_stop = each.continuation
            first_key, key_stop = each.prefix
            rows.append((first_query, query_stop - first_query, first_key, key_stop - first_key))
        return torch.tensor(rows)

    @cached_property
    def parts(self) -> tuple[AttentionPart, ...]:
        """Parts into which the attention computation is divided.

        In the first parts, tokens attend causally within their segments. They are followed by one
        part for each shared prefix, in which the tokens that continue the prefix attend to it.
        """
        within = [AttentionPart(bucket, bucket, causal=True) for bucket in self.dense.buckets]
        device = self.dense.cu_seqlens.device
        across = []
        for each in self.continuations:
            queries = _build_span_bucket(*each.continuation, device)
            keys = _build_span_bucket(*each.prefix, device)
            across.append(AttentionPart(queries, keys, causal=False))
        return (*within, *across)


def _group_by_length(starts: list[int]) -> list[list[int]]:
    """Group sequences of similar length, and return the indices of the sequences in each group.

    The indices in a group are in ascending order. Empty sequences are left out.
    """
    lengths = [stop - start for start, stop in pairwise(starts)]
    groups: list[list[int]] = []
    spare_padding = 0  # padding that the last group can still have, in tokens
    nonempty = [sequence for sequence, length in enumerate(lengths) if length]
    for sequence in sorted(nonempty, key=lambda sequence: -lengths[sequence]):
        longest = lengths[groups[-1][0]] if groups else 0
        padding = longest - lengths[sequence]
        if groups and (longest <= SHORT or padding <= spare_padding + PADDING_SHARE * longest):
            spare_padding += int(PADDING_SHARE * longest) - padding
            groups[-1].append(sequence)
        else:
            groups.append([sequence])
            spare_padding = 0
    return [sorted(members) for members in groups]


def _build_span_bucket(start: int, stop: int, device: torch.device) -> SequenceBucket:
    """Return a `SequenceBucket` with one sequence: the tokens from `start` to `stop` (excluded)."""
    return SequenceBucket(torch.arange(start, stop, device=device)[None], None, (start, stop))


def _build_bucket(starts: list[int], members: list[int], device: torch.device) -> SequenceBucket:
    """Return the bucket of the sequences with the indices `members`, which are ascending."""
    lengths = torch.tensor([starts[sequence + 1] - starts[sequence] for sequence in members])
    first = torch.tensor([starts[sequence] for sequence in members])
    longest = int(lengths.max())
    offsets = torch.arange(longest)
    index = first[:, None] + torch.minimum(offsets, lengths[:, None] - 1)
    if bool((lengths == longest).all()):
        span = (starts[members[0]], starts[members[-1] + 1])
        is_contiguous = span[1] - span[0] == index.numel()
        return SequenceBucket(index.to(device), None, span if is_contiguous else None)
    valid = (offsets < lengths[:, None]).flatten().nonzero().flatten()
    return SequenceBucket(index.to(device), valid.to(device), None)
