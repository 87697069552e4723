"""Key-value cache in pages, for generation on GPUs.

`PagedCache` has the same methods as `weft.models.kv.slots.KVCache`, with the same meaning. All
caches of a generator allocate their pages in one `PagePool`. A row (one cached sequence) shares
pages with the row or prompt from which it was copied, and with its prefix. Only a partly filled
page is copied, when a row writes to it.

The input of a decode step is a single int32 matrix from `PagedCache.step`, which
`PagePool.build_packed` converts to the network's input on the device. A captured CUDA graph
therefore needs only one copy from the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.kernels import put
from weft.models.attention.contexts import Dense
from weft.models.kv.page_tables import (
    FIRST_PAGES,
    FIRST_WIDTH,
    PageAllocator,
    PageCopies,
    PageTables,
    build_ranges,
)
from weft.models.network.config import TransformerConfig
from weft.models.network.packed import Packed

# Tokens per page: the size that flash kernels require, and a multiple of FlexAttention's blocks.
PAGE = 256
TOKEN = 0
POSITION = 1
PLACE = 2
TABLE = 3  # first column of the table in a step's matrix


@dataclass(frozen=True)
class PagedHistory:
    """All tokens of the sequences in a pass, both stored and new, concatenated.

    Attributes:
        places: Storage index of each token, int64 [U] for U tokens. The storage index counts tokens
            from the beginning of the first page.
        cu_seqlens: Boundaries of the sequences, int32 [R + 1]. Sequence r consists of the tokens
            `cu_seqlens[r]:cu_seqlens[r + 1]`.
        max_len: Number of tokens of the longest sequence.
    """

    places: Tensor  # int64 [U]: storage index of each token
    cu_seqlens: Tensor  # int32 [R + 1]
    max_len: int


@dataclass(frozen=True)
class Paged:
    """Attention context of a pass over sequences whose keys and values are stored in pages.

    It is built by `PagedCache`. The pass has T new tokens of R sequences, which are called rows.

    Attributes:
        pool: Memory of the pages.
        places: Storage index of each new token, counted in tokens from the beginning of the first
            page, int64 [T].
        table: Indices of each row's pages in order, for up to W pages per row, int32 [R, W].
        used: Number of tokens of each row, including the new ones, int32 [R].
        cu_seqlens: Boundaries of the rows' new tokens, int32 [R + 1].
        max_len: Largest number of new tokens of a row, which is 1 in a decode step.
        is_first_prefill: True if no row had stored tokens before this pass.
        history: All tokens of the rows; None in a first prefill and in a decode step.
    """

    pool: PagePool
    places: Tensor  # int64 [T]: storage index of each new token
    table: Tensor  # int32 [R, W]: the rows' pages in order
    used: Tensor  # int32 [R]: tokens of each row, new ones included
    cu_seqlens: Tensor  # int32 [R + 1]
    max_len: int  # most new tokens of a row; 1 in a decode step
    is_first_prefill: bool  # True if nothing was stored before this pass
    history: PagedHistory | None  # None if nothing was stored before, or in a decode step

    @cached_property
    def dense(self) -> Dense:
        """Attention context in which each sequence consists only of its new tokens.

        Attention is computed with this context only in a first prefill, when no other tokens are
        stored.
        """
        return Dense(self.cu_seqlens, self.max_len)

    @property
    def is_decode_step(self) -> bool:
        """True in a decode step, in which each row has stored tokens and exactly one new token."""
        return self.history is None and not self.is_first_prefill

    @cached_property
    def masks(self) -> dict[int | None, Any]:
        """FlexAttention masks by window size, each built by the first layer that needs it."""
        return {}

    @property
    def last_tokens(self) -> Tensor:
        """Index of each row's last new token, int64 [R]."""
        return self.dense.last_tokens

    @cached_property
    def token_lengths(self) -> Tensor:
        """Length of each new token's sequence after this pass, int64 [T]."""
        if self.max_len == 1:
            return self.used.long()
        return self.used.long().repeat_interleave(self.dense.lengths, output_size=len(self.places))


class PagePool:
    """Memory for the pages of key-value caches.

    `keys[layer]` and `values[layer]` are [pages, page, kv_heads, head_dim], where `page` is the
    number of tokens per page. Layers are counted from `first_layer`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        device: torch.device | str,
        dtype: torch.dtype,
        *,
        page: int = PAGE,
        first_layer: int = 0,
        most: int | None = None,
    ) -> None:
        """Create a pool with `page` tokens per page.

        `first_layer` is the index of the first cached layer among all layers of the network. `most`
        is the maximum number of pages, or None for no maximum. It includes the scratch page, which
        belongs to no row.
        """
        self.first_layer = first_layer
        self.device = torch.device(device)
        self.dtype = dtype
        self.config = config
        self.pages = PageAllocator(
            page, FIRST_PAGES if most is None else min(FIRST_PAGES, most), most
        )
        self._allocate()

    def _allocate(self) -> None:
        config, shape = (
            self.config,
            (len(self.pages), self.pages.page_size, self.config.num_kv_heads, self.config.head_dim),
        )
        tensors = []
        for _ in range(2 * config.num_layers):
            tensors.append(torch.zeros(shape, device=self.device, dtype=self.dtype))
        self.keys = tensors[: config.num_layers]
        self.values = tensors[config.num_layers :]

    def reserve(self, count: int) -> None:
        """Make room for at least `count` pages, or for the pool's maximum if that is less.

        The number of pages is rounded up to a power of two, so that only a few different sizes
        occur.
        """
        if count < len(self.pages):
            return
        unused = not self.pages.num_used
        self.pages.reserve((1 << count.bit_length()) - 1)
        # If no row has any pages, free the old memory before new memory is allocated.
        if unused and len(self.keys[0]) < len(self.pages):
            self.keys = []
            self.values = []
            self._allocate()
        self.fit(PageCopies.build_empty())

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))

    def fit(self, copies: PageCopies) -> None:
        """Enlarge the pool to the allocator's number of pages, and copy the pages in `copies`."""
        if len(self.keys[0]) < len(self.pages):
            for stored in (self.keys, self.values):
                for layer, old in enumerate(stored):
                    stored[layer] = old.new_zeros(len(self.pages), *old.shape[1:])
                    stored[layer][: len(old)] = old
        if len(copies.source):
            source, target = (put(x, self.device).long() for x in (copies.source, copies.target))
            for pages in (*self.keys, *self.values):
                pages[target] = pages[source]

    def build_packed(self, step: Tensor) -> Packed:
        """Return the network's input for a decode step, computed on the device from `step`.

        `step` is the matrix that `PagedCache.step` returns.
        """
        tokens = step[:, TOKEN].long()
        positions = step[:, POSITION].long()
        places = step[:, PLACE].long()
        bounds = torch.arange(len(step) + 1, device=step.device, dtype=torch.int32)
        context = Paged(
            pool=self,
            places=places,
            table=step[:, TABLE:].contiguous(),
            used=step[:, POSITION] + 1,
            cu_seqlens=bounds,
            max_len=1,
            is_first_prefill=False,
            history=None,
        )
        rows = torch.arange(len(step), device=step.device)
        return Packed(
            tokens=tokens, positions=positions, attention=context, rows=rows, labels=tokens
        )

    def write(self, layer: int, context: Paged, k: Tensor, v: Tensor) -> None:
        """Store the new tokens' keys and values, each [T, kv_heads, head_dim].

        `layer` is the index of the layer in the whole network.
        """
        layer -= self.first_layer
        self.keys[layer].flatten(0, 1).index_copy_(0, context.places, k)
        self.values[layer].flatten(0, 1).index_copy_(0, context.places, v)

    def read(self, layer: int, history: PagedHistory) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all tokens in `history`, each [U, kv_heads, head_dim].

        `layer` is counted from `first_layer`.
        """
        keys = self.keys[layer].flatten(0, 1)
        values = self.values[layer].flatten(0, 1)
        return keys.index_select(0, history.places), values.index_select(0, history.places)


class PagedCache:
    """Key-value cache whose rows are stored in the pages of a pool.

    Row r contains `before[r] + used[r]` tokens, of which the first `before[r]` are the row's
    prefix.
    """

    def __init__(self, pool: PagePool, width: int = FIRST_WIDTH) -> None:
        """Create an empty cache; its page table initially has `width` columns."""
        self.pool, self.device, self.dtype = pool, pool.device, pool.dtype
        self.tables = PageTables(pool.pages, width=width)
        self.used = np.zeros(len(self.tables.page_counts), np.int64)
        self.before = np.zeros(len(self.tables.page_counts), np.int64)
        self.num_active = 0

    def allocate(self, count: int = 1) -> list[int]:
        """Return the indices of `count` new empty rows, which follow the active ones.

        Active rows always have the indices 0 to num_active - 1.
        """
        first = self.num_active
        self.num_active = self.num_active + count
        self.tables.ensure_size(self.num_active, 0)
        more = max(0, len(self.tables.page_counts) - len(self.used))
        self.used, self.before = (
            np.concatenate([x, np.zeros(more, np.int64)]) for x in (self.used, self.before)
        )
        return list(range(first, self.num_active))

    def link(self, slots: Iterable[int], prefix: PagedCache | None) -> None:
        """Use row 0 of `prefix` as the prefix of the given empty rows; None means no prefix."""
        for slot in slots if prefix is not None else ():
            assert prefix is not None
            self.tables.assign_pages(slot, prefix.tables.copy_pages(0))
            self.before[slot] = prefix.before[0] + prefix.used[0]

    def take(self, other: PagedCache) -> int:
        """Create a row with the contents of row 0 of `other`, and return the new row's index.

        The two rows share their pages.
        """
        (slot,) = self.allocate()
        self.tables.assign_pages(slot, other.tables.copy_pages(0))
        self.used[slot], self.before[slot] = other.used[0], other.before[0]
        return slot

    def release(self, slot: int) -> int:
        """Release the row `slot`, and move the last active row to this index.

        Returns the index that the last row had before the move. It equals `slot` if the released
        row was the last one.
        """
        assert 0 <= slot < self.num_active, f"row {slot} is not active"
        self.num_active -= 1
        last = self.num_active
        self.tables.clear(slot)
        if slot != last:
            self.tables.move(last, slot)
            self.used[slot], self.before[slot] = self.used[last], self.before[last]
        self.used[last] = self.before[last] = 0
        return last

    def close(self) -> None:
        """Release all rows."""
        while self.num_active:
            self.release(self.num_active - 1)

    def truncate(self, slot: int, length: int) -> None:
        """Remove all but the first `length` tokens of a row."""
        assert 0 <= length <= self.used[slot]
        self.used[slot] = length
        self.tables.clear(
            slot, keep=-(-int(self.before[slot] + length) // self.pool.pages.page_size)
        )

    def fork(self, slot: int, count: int) -> list[int]:
        """Create `count` rows with the contents of row `slot`, and return their indices.

        This is used for several samples of one prompt. All these rows share their pages.
        """
        new = self.allocate(count)
        for row in new:
            self.tables.assign_pages(row, self.tables.copy_pages(slot))
        self.used[new], self.before[new] = self.used[slot], self.before[slot]
        return new

    def extend(self, slots: Sequence[int], tokens: Sequence[Tensor] | Tensor) -> Packed:
        """Append `tokens` to the sequences in `slots`, and return the network's input for them.

        `tokens` is int64 [R], with one token per sequence, or a list of R tensors, each int64 [n >=
        1]. In the result, `rows` has the index of each sequence's last new token, whose hidden
        state predicts the next token. The next tokens are unknown, so `labels` has the ids of the
        last new tokens instead.
        """
        if isinstance(tokens, Tensor):
            return self.pool.build_packed(put(self.step(slots, tokens.cpu().numpy()), self.device))
        rows = np.asarray(slots, np.int64)
        counts = np.array([len(t) for t in tokens], np.int64)
        # Make room, and compute the row and position of each new token.
        start = self._extend_rows(rows, counts)
        stop = start + counts
        owner = np.repeat(rows, counts)
        positions = np.repeat(start, counts) + build_ranges(counts)
        ends = np.cumsum(counts)
        # Unless this is a first prefill, list the storage of all tokens of the rows.
        history = None
        if start.any():
            everything = self.tables.compute_token_indices(
                np.repeat(rows, stop), build_ranges(stop)
            )
            bounds = np.concatenate([[0], np.cumsum(stop)]).astype(np.int32)
            history = PagedHistory(self._put(everything), self._put(bounds), int(stop.max()))
        context = Paged(
            pool=self.pool,
            places=self._put(self.tables.compute_token_indices(owner, positions)),
            table=self._put(self.tables.table[rows]),
            used=self._put(stop.astype(np.int32)),
            cu_seqlens=self._put(np.concatenate([[0], ends]).astype(np.int32)),
            max_len=int(counts.max()),
            is_first_prefill=history is None,
            history=history,
        )
        flat = torch.cat(list(tokens))
        last = self._put(ends - 1)
        flat = self._put(flat.numpy()) if flat.device.type == "cpu" else flat
        return Packed(
            tokens=flat,
            positions=self._put(positions),
            attention=context,
            rows=last,
            labels=flat[last],
        )

    def step(self, slots: Sequence[int], tokens: np.ndarray) -> np.ndarray:
        """Make room for one token per row, and return the input of the decode step.

        The input is int32 [R, 3 + W]. The columns are the token, the position of the token, the
        storage index of the token, and the W pages of the row. Rows of zeros can be appended as
        padding. They denote the first token of a sequence in the scratch page, which belongs to no
        row.
        """
        rows = np.asarray(slots, np.int64)
        start = self._extend_rows(rows, np.ones(len(rows), np.int64))
        columns = np.stack(
            [tokens, start, self.tables.compute_token_indices(rows, start)], axis=1
        ).astype(np.int32)
        return np.concatenate([columns, self.tables.table[rows]], axis=1)

    def _extend_rows(self, rows: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Make room for new tokens in some rows, and count these tokens as used.

        `rows` are the indices of the rows, and `counts` has the number of new tokens of each.
        Returns the position of each row's first new token, [R].
        """
        start = self.before[rows] + self.used[rows]
        self.pool.fit(self.tables.extend(rows, start, start + counts))
        self.used[rows] += counts
        return start

    def _put(self, array: np.ndarray) -> Tensor:
        return put(array, self.device)
