"""What a network is fed: tokens of many sequences in one row, and who may attend to whom.

`Packed(tokens, positions, attention, rows, labels)`: `rows[n]` is the index of a hidden state in the pack and `labels[n]` the
token it is asked about; a row may repeat. `attention` is `Dense` (whole sequences, one after the other), `Prefixed` (some
sequences share a prefix, which stands in the pack once), or new tokens of sequences whose earlier keys and values lie in a
`weft.models.kv_cache.KVCache` (`Cached`) or in pages (`Paged`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.models.balance import Balance
from weft.models.dropout import Noise

if TYPE_CHECKING:
    from weft.models.heads import Gradient, TopIds
    from weft.models.kv_cache import KVCache
    from weft.models.paged_cache import PagePool

Counts = npt.NDArray[Any]  # of whole numbers

PADDING_SHARE = 0.25  # of a bucket's area at most; more padding costs more than another kernel launch saves
SHORT = 16  # sequences up to this length share a bucket whatever the padding
ROWS = 4  # query rows that a CPU multiplies at once; sums of fewer are added up in another order
VECTOR = 16  # floats that the widest CPUs add at once; sums over whole vectors do not depend on what follows them


@dataclass(frozen=True)
class Bucket:
    """Sequences of like length as one rectangle. Padding stands after a sequence, where causal attention never looks."""

    index: Tensor  # int64 [n, L]: token of each cell; cells of padding repeat the sequence's last token
    valid: Tensor | None  # int64 [tokens]: cells (row-major) that are no padding; None where all are
    span: tuple[int, int] | None  # (start, stop) where the cells are the tokens from start to stop, in order

    @cached_property
    def tokens(self) -> Tensor:
        """int64 [tokens]: the cells that are no padding."""
        cells = self.index.flatten()
        return cells if self.valid is None else cells.index_select(0, self.valid)


@dataclass(frozen=True)
class Part:
    """Rows that look at keys: the tokens of `queries` at those of `keys`, rectangle by rectangle; all of them, or causally
    where the two are the same."""

    queries: Bucket
    keys: Bucket
    causal: bool


@dataclass(frozen=True)
class Dense:
    """Whole sequences: sequence s is the tokens `cu_seqlens[s]` to `cu_seqlens[s + 1]`; causal within each."""

    cu_seqlens: Tensor  # int32 [S + 1]
    max_len: int

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def dense(self) -> Dense:
        """The tokens of this pass by themselves; `Cached` has the same name for its new ones."""
        return self

    @cached_property
    def masks(self) -> dict[int | None, Any]:
        """FlexAttention's masks by window, filled as layers ask for them."""
        return {}

    @cached_property
    def starts(self) -> list[int]:
        """`cu_seqlens` on the host."""
        return [int(start) for start in self.cu_seqlens.tolist()]

    @cached_property
    def lengths(self) -> Tensor:
        """int64 [S] on the device."""
        return self.cu_seqlens.diff().long()

    @cached_property
    def token_lengths(self) -> Tensor:
        """int64 [T]: the length of the sequence that a token belongs to."""
        return self.lengths.repeat_interleave(self.lengths)

    @cached_property
    def last(self) -> Tensor:
        """int64 [S]: index of each sequence's last token."""
        return self.cu_seqlens[1:].long() - 1

    @cached_property
    def segments(self) -> Tensor:
        """int64 [S, 4], on the host: each sequence's first token, its tokens, and the same as keys."""
        return torch.tensor([(a, b - a, a, b - a) for a, b in pairwise(self.starts)])

    @cached_property
    def buckets(self) -> list[Bucket]:
        """The sequences as rectangles, longest first; empty sequences are in none."""
        return [_bucket(self.starts, members, self.cu_seqlens.device) for members in _group(self.starts)]

    @cached_property
    def restore(self) -> Tensor | None:
        """int64 [T]: for each token its place in the buckets' valid cells laid end to end; None where that is its own."""
        order = [t for members in _group(self.starts) for s in members for t in (self.starts[s], self.starts[s + 1])]
        if all(a <= b for a, b in pairwise(order)):
            return None
        return torch.argsort(torch.cat([bucket.tokens for bucket in self.buckets]))


@dataclass(frozen=True)
class Join:
    """A prefix and what goes on from it, each as (first token, one past the last); `rest` holds all continuations."""

    prefix: tuple[int, int]
    rest: tuple[int, int]


@dataclass(frozen=True)
class Prefixed:
    """Sequences of which some share a prefix, which is computed once.

    The pack is made of segments: prefixes, continuations, and whole sequences. A token sees its own segment causally, and a
    continuation's token also the whole prefix before it.
    """

    dense: Dense  # the segments
    joins: tuple[Join, ...]
    last: Tensor  # int64 [S]: index of each sequence's last token

    @cached_property
    def masks(self) -> dict[int | None, Any]:
        """As in `Dense`."""
        return {}

    @property
    def token_lengths(self) -> Tensor:
        """Rotations that depend on a sequence's length are not shared; see `Transformer.shares_prefixes`."""
        return self.dense.token_lengths

    @cached_property
    def across(self) -> Tensor:
        """int64 [joins, 4], on the host: what goes on from a prefix as rows, the prefix as keys; each as (first, how many)."""
        spans = [(*join.rest, *join.prefix) for join in self.joins]
        return torch.tensor([(a, b - a, c, d - c) for a, b, c, d in spans])

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Attention within the segments, then what each continuation sees of its prefix."""
        within = [Part(bucket, bucket, causal=True) for bucket in self.dense.buckets]
        device = self.dense.cu_seqlens.device
        across = [Part(_stretch(*j.rest, device), _stretch(*j.prefix, device), causal=False) for j in self.joins]
        return (*within, *across)


@dataclass(frozen=True)
class Sharers:
    """The rows of a decode step whose sequences begin with one prefix."""

    prefix: KVCache
    rows: Tensor  # int64 [S]
    queries: Tensor  # int64 [S or a few more]: `rows`, the last one repeated to fill up a whole number of `ROWS`

    @classmethod
    def of(cls, prefix: KVCache, rows: list[int], device: torch.device) -> Sharers:
        filled = rows + rows[-1:] * (-len(rows) % ROWS)
        return cls(prefix, torch.tensor(rows, device=device), torch.tensor(filled, device=device))


@dataclass(frozen=True)
class Cached:
    """New tokens of cached sequences; made by `KVCache.extend`, which has made room for them.

    Row r's new tokens are `cu_seqlens[r]` to `cu_seqlens[r + 1]` of the pack, at positions `before[r] + used[r]` and on; they
    see the `before[r]` tokens of the row's prefix, the `used[r]` tokens in slot `slots[r]` and themselves, causally. The
    network writes their keys and values to the slot.
    """

    cache: KVCache
    slots: Counts  # [R], distinct: where in the cache's memory they lie
    used: Counts  # [R]: tokens that the slot held before
    before: Counts  # [R]: tokens of the prefix, which lies elsewhere
    new: Counts  # [R]: tokens of this pass
    prefixes: tuple[KVCache | None, ...]  # [R] in a prefill; () in a decode step, whose `sharers` say it
    sharers: tuple[Sharers, ...]
    max_len: int  # most new tokens of a row; 1 in a decode step
    max_used: int  # most tokens of a row, new ones included

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """int32 [R + 1]"""
        return self._put(np.concatenate([[0], self.new.cumsum()]).astype(np.int32))

    @cached_property
    def dense(self) -> Dense:
        """The new tokens by themselves."""
        return Dense(self.cu_seqlens, self.max_len)

    @property
    def last(self) -> Tensor:
        """int64 [R]: index of each row's last new token."""
        return self.dense.last

    @cached_property
    def token_lengths(self) -> Tensor:
        """int64 [T]: tokens of the sequence a new token belongs to, itself and the later new ones included."""
        return self._put((self.before + self.used + self.new).repeat(self.new))

    @cached_property
    def fresh(self) -> bool:
        """Whether nothing was cached before: a first prefill."""
        return not (self.used.any() or any(self.prefixes) or self.sharers)

    @cached_property
    def segments(self) -> Tensor:
        """int64 [R, 4], on the host: each row's new tokens, as (first, how many), and its slot's first key and keys, new ones
        included; a key's number counts rows of `head_dim` floats in the cache."""
        found = np.empty((len(self.new), 4), np.int64)
        found[:, 0] = self.new.cumsum() - self.new
        found[:, 1] = self.new
        found[:, 2] = self.slots * (self.cache.keys[0].stride(0) // self.cache.keys[0].stride(2))
        found[:, 3] = self.used + self.new
        return torch.from_numpy(found)

    @cached_property
    def places(self) -> Tensor:
        """int64 [T], on the host: the key's number, as in `segments`, that each new token becomes."""
        start, new, key, keys = self.segments.numpy().T
        if self.max_len == 1:
            return torch.from_numpy(key + keys - 1)
        return torch.from_numpy(np.arange(new.sum()) + np.repeat(key + keys - new - start, new))

    @cached_property
    def continued(self) -> list[tuple[KVCache, Tensor]]:
        """Each prefix with the new tokens, int64 [n], of the sequences that begin with it."""
        if self.max_len == 1:
            return [(sharers.prefix, sharers.rows) for sharers in self.sharers]
        tokens: dict[int, tuple[KVCache, list[int]]] = {}
        for prefix, (first, end) in zip(self.prefixes, pairwise(self.dense.starts), strict=True):
            if prefix is not None:
                tokens.setdefault(id(prefix), (prefix, []))[1].extend(range(first, end))
        return [(prefix, torch.tensor(found)) for prefix, found in tokens.values()]

    def hidden(self, window: int | None, length: int, dtype: torch.dtype) -> Tensor:
        """[R, 1, 1, length]: 0 where a decode step's token sees a place of its slot, minus infinity elsewhere; made once for
        all layers of one window."""
        if window not in self._hidden:
            places, used = torch.arange(length, device=self.cache.device), self._put(self.used)[:, None]
            seen = places <= used
            if window is not None:
                seen &= places > used - window
            mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
            self._hidden[window] = mask[:, None, None]
        return self._hidden[window]

    @cached_property
    def _hidden(self) -> dict[int | None, Tensor]:
        return {}

    @cached_property
    def span(self) -> slice | None:
        """The slots as a slice where they are consecutive (their keys are then read without a copy)."""
        first, count = int(self.slots[0]), len(self.slots)
        return slice(first, first + count) if (self.slots == np.arange(first, first + count)).all() else None

    def _put(self, array: Counts) -> Tensor:
        return torch.from_numpy(array).to(self.cache.device)


@dataclass(frozen=True)
class History:
    """All tokens of the rows of a pass, new ones included, end to end."""

    places: Tensor  # int64 [U]: where each lies
    cu_seqlens: Tensor  # int32 [R + 1]
    max_len: int


@dataclass(frozen=True)
class Paged:
    """New tokens of sequences in pages; made by `PagedCache`. The network writes their keys and values to `places`."""

    pool: PagePool
    places: Tensor  # int64 [T]
    table: Tensor  # int32 [R, W]: the rows' pages in order
    used: Tensor  # int32 [R]: tokens of each row, new ones included
    cu_seqlens: Tensor  # int32 [R + 1]
    max_len: int  # most new tokens of a row; 1 in a decode step
    fresh: bool  # whether nothing was there before
    history: History | None  # where something was, and this is no decode step

    @cached_property
    def dense(self) -> Dense:
        """The new tokens by themselves."""
        return Dense(self.cu_seqlens, self.max_len)

    @property
    def decodes(self) -> bool:
        """Whether each row has one new token, after others or not."""
        return self.history is None and not self.fresh

    @cached_property
    def masks(self) -> dict[int | None, Any]:
        """FlexAttention's masks by window, filled as layers ask for them."""
        return {}

    @property
    def last(self) -> Tensor:
        """int64 [R]: index of each row's last new token."""
        return self.dense.last

    @cached_property
    def token_lengths(self) -> Tensor:
        """int64 [T]: tokens of the sequence a new token belongs to."""
        if self.max_len == 1:
            return self.used.long()
        return self.used.long().repeat_interleave(self.dense.lengths, output_size=len(self.places))


AttentionContext = Dense | Prefixed | Cached | Paged


@dataclass(frozen=True)
class Packed:
    """One forward pass of a network. `positions` count from 0 in each sequence."""

    tokens: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    attention: AttentionContext
    rows: Tensor  # int64 [N]: the hidden state (a token's index) that each wanted output is read from
    labels: Tensor  # int64 [N]: the token whose log-prob is wanted at each row
    noise: Noise | None = None  # keys of the sequences' dropout masks; without them nothing is dropped
    balance: Balance | None = None  # filled by layers with experts, where it is asked for; for `Dense` attention alone
    gradient: Gradient | None = None  # of the outputs, where each row's depends on its own alone (`weft.models.heads`)
    ids: Tensor | TopIds | None = None  # int [N, K]: more ids whose log-probs are wanted at each row; or the likeliest


def in_vectors(length: int, device: torch.device) -> int:
    """`length` keys as attention on this device reads them: a CPU reads whole vectors."""
    return -(-length // VECTOR) * VECTOR if device.type == "cpu" else length


def pack(sequences: list[Tensor], device: torch.device | str = "cpu") -> Packed:
    """Whole sequences, each int64 [L >= 1], with one row for every token but each sequence's last: the next-token form."""
    lengths = torch.tensor([len(s) for s in sequences])
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    tokens = torch.cat([s.to(device) for s in sequences])
    positions = torch.arange(len(tokens)) - cu_seqlens[:-1].repeat_interleave(lengths)
    keep = torch.ones(len(tokens), dtype=torch.bool)
    keep[cu_seqlens[1:] - 1] = False
    rows = keep.nonzero().flatten().to(device)
    attention = Dense(cu_seqlens.to(device=device, dtype=torch.int32), int(lengths.max()))
    return Packed(tokens, positions.to(device), attention, rows, tokens[rows + 1])


def _group(starts: list[int]) -> list[list[int]]:
    """Sequence numbers by bucket. Sequences keep their order where all share one length."""
    lengths = [stop - start for start, stop in pairwise(starts)]
    groups: list[list[int]] = []
    room = 0  # cells of padding the open bucket may still take
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


def _stretch(start: int, stop: int, device: torch.device) -> Bucket:
    """The tokens from start to stop as one rectangle."""
    return Bucket(torch.arange(start, stop, device=device)[None], None, (start, stop))


def _bucket(starts: list[int], members: list[int], device: torch.device) -> Bucket:
    lengths = torch.tensor([starts[s + 1] - starts[s] for s in members])
    first = torch.tensor([starts[s] for s in members])
    longest = int(lengths.max())
    offsets = torch.arange(longest)
    index = first[:, None] + torch.minimum(offsets, lengths[:, None] - 1)
    if bool((lengths == longest).all()):
        span = (starts[members[0]], starts[members[-1] + 1])
        adjoining = span[1] - span[0] == index.numel()
        return Bucket(index.to(device), None, span if adjoining else None)
    valid = (offsets < lengths[:, None]).flatten().nonzero().flatten()
    return Bucket(index.to(device), valid.to(device), None)
