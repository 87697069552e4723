"""Key-value cache in pages, for generation on GPUs, and the tables that list each sequence's pages.

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
import numpy.typing as npt
import torch
from torch import Tensor

from weft.kernels import fused, put
from weft.models.attention.contexts import Dense
from weft.models.network.config import TransformerConfig
from weft.models.network.packed import Packed

SCRATCH = 0  # index of a page that belongs to no row; padding rows of a decode step write to it
FIRST_PAGES = 64
FIRST_ROWS = 8
FIRST_WIDTH = 16
Ids = npt.NDArray[np.int32]


class PageAllocator:
    """Allocator of the pages of one device, with the number of rows that use each page.

    If there are too few free pages, the number of pages doubles, up to `max_pages`. `reserve` adds
    pages in advance.
    """

    def __init__(
        self, page_size: int, count: int = FIRST_PAGES, max_pages: int | None = None
    ) -> None:
        """Create an allocator of `count` pages of `page_size` tokens, including the scratch page.

        `max_pages` is the largest number of pages, or None for no limit.
        """
        self.page_size = page_size
        self.max_pages = max_pages
        self.users = np.zeros(max(count, 1), np.int32)
        self.users[SCRATCH] = 1
        self._free = list(range(len(self.users) - 1, SCRATCH, -1))

    def __len__(self) -> int:
        return len(self.users)

    @property
    def num_used(self) -> int:
        """Number of pages that rows use, without the scratch page."""
        return len(self) - 1 - len(self._free)

    def reserve(self, count: int) -> None:
        """Add pages until rows can use `count` pages, or until there are `max_pages` pages."""
        old = len(self)
        new = count + 1 if self.max_pages is None else min(count + 1, self.max_pages)
        if new > old:
            self.users = np.concatenate([self.users, np.zeros(new - old, np.int32)])
            self._free = [*range(new - 1, old - 1, -1), *self._free]

    def allocate(self, count: int) -> Ids:
        """Allocate `count` pages, each of which has one user, and return their indices."""
        if count > len(self._free):
            self.reserve(max(2 * len(self) - 1, self.num_used + count))
        assert count <= len(self._free), (
            f"{self.num_used} of {len(self)} pages are in use, and {count} more are needed"
        )
        pages = np.array([self._free.pop() for _ in range(count)], np.int32)
        self.users[pages] = 1
        return pages

    def add_users(self, pages: Ids) -> None:
        """Increase the number of users of each page by 1."""
        self.users[pages] += 1

    def remove_users(self, pages: Ids) -> None:
        """Decrease the number of users of each page by 1; the pages must be distinct.

        Pages that no longer have a user become free.
        """
        self.users[pages] -= 1
        unused = pages[self.users[pages] == 0]
        self._free.extend(unused[::-1].tolist())


@dataclass(frozen=True)
class PageCopies:
    """Page copies that must be made before new tokens are written to the rows.

    Page `source[i]` is copied to page `target[i]`; both arrays are int32 [n].
    """

    source: Ids
    target: Ids

    @classmethod
    def build_empty(cls) -> PageCopies:
        """Return a `PageCopies` without any copies."""
        return cls(np.zeros(0, np.int32), np.zeros(0, np.int32))


class PageTables:
    """Page tables of the rows of one `PagedCache`.

    The pages of a row are `table[row, : page_counts[row]]`. The rest of the table is filled with
    `SCRATCH`, the index of a page that no row owns.
    """

    def __init__(
        self, pages: PageAllocator, rows: int = FIRST_ROWS, width: int = FIRST_WIDTH
    ) -> None:
        self.pages = pages
        self.table = np.full((rows, width), SCRATCH, np.int32)
        self.page_counts = np.zeros(rows, np.int64)

    def ensure_size(self, rows: int, width: int) -> None:
        """Grow the table to at least `rows` rows of `width` pages.

        A size that must grow is at least doubled.
        """
        shape = self.table.shape
        new_shape = tuple(
            size if size >= least else max(least, 2 * size)
            for size, least in zip(shape, (rows, width), strict=True)
        )
        if new_shape != shape:
            old = self.table
            self.table = np.full(new_shape, SCRATCH, np.int32)
            self.table[: shape[0], : shape[1]] = old
            new_counts = np.zeros(new_shape[0] - shape[0], np.int64)
            self.page_counts = np.concatenate([self.page_counts, new_counts])

    def copy_pages(self, row: int) -> Ids:
        """Return a copy of the row's page indices."""
        return self.table[row, : self.page_counts[row]].copy()

    def assign_pages(self, row: int, pages: Ids) -> None:
        """Assign `pages`, which other rows already use, to an empty row.

        The rows then share these pages.
        """
        assert not self.page_counts[row]
        self.ensure_size(row + 1, len(pages))
        self.pages.add_users(pages)
        self.table[row, : len(pages)] = pages
        self.page_counts[row] = len(pages)

    def clear(self, row: int, keep: int = 0) -> None:
        """Release a row's pages, except the first `keep`."""
        stop = int(self.page_counts[row])
        if stop > keep:
            self.pages.remove_users(self.table[row, keep:stop])
            self.table[row, keep:stop] = SCRATCH
            self.page_counts[row] = keep

    def move(self, source: int, target: int) -> None:
        """Move the pages of row `source` to the empty row `target`, which leaves `source` empty."""
        assert not self.page_counts[target]
        self.table[target] = self.table[source]
        self.page_counts[target] = self.page_counts[source]
        self.table[source] = SCRATCH
        self.page_counts[source] = 0

    def extend(
        self,
        rows: npt.NDArray[np.int64],
        before: npt.NDArray[np.int64],
        after: npt.NDArray[np.int64],
    ) -> PageCopies:
        """Make room for `after[i]` tokens in row `rows[i]`, which contains `before[i]` tokens.

        The rows must be distinct. If a row's last page is partly filled and shared with other rows,
        the row gets a new page in its place. Returns the copies from old to new pages that must be
        made before the rows are written.
        """
        page = self.pages.page_size
        needed_counts = -(-after // page)
        self.ensure_size(0, int(needed_counts.max()))
        # Find the partly filled pages that other rows use too.
        shared = self._find_shared(rows, before)
        shared_rows = rows[shared]
        columns = before[shared] // page
        # Replace them one by one. If all users of a page write to it, the last one keeps it.
        old_pages = []
        new_pages = []
        for row, column, old in zip(
            shared_rows.tolist(),
            columns.tolist(),
            self.table[shared_rows, columns].tolist(),
            strict=True,
        ):
            if self.pages.users[old] == 1:
                continue
            self.pages.remove_users(np.array([old], np.int32))
            self.table[row, column] = self.pages.allocate(1)[0]
            old_pages.append(old)
            new_pages.append(self.table[row, column])
        # Add pages to rows that have too few.
        short = np.flatnonzero(needed_counts > self.page_counts[rows])
        for row, count in zip(rows[short].tolist(), needed_counts[short].tolist(), strict=True):
            old_count = int(self.page_counts[row])
            self.table[row, old_count:count] = self.pages.allocate(count - old_count)
            self.page_counts[row] = count
        return PageCopies(np.array(old_pages, np.int32), np.array(new_pages, np.int32))

    def compute_token_indices(
        self, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Return the storage index of the token at `positions[i]` of row `rows[i]`, for each i.

        The storage index counts tokens from the beginning of the first page.
        """
        page = self.pages.page_size
        return self.table[rows, positions // page].astype(np.int64) * page + positions % page

    def _find_shared(
        self, rows: npt.NDArray[np.int64], before: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Return the indices i for which row `rows[i]` has a partly filled, shared last page.

        Row `rows[i]` contains `before[i]` tokens. A page is shared if several rows use it.
        """
        page = self.pages.page_size
        partly_filled = np.flatnonzero(before % page)
        last = self.table[rows[partly_filled], before[partly_filled] // page]
        return partly_filled[self.pages.users[last] > 1]


def build_ranges(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the concatenation of the ranges 0, ..., n - 1, one for each n in `counts`."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


# Tokens per page: the size that flash kernels require, and a multiple of FlexAttention's blocks.
PAGE = 256
# Columns of the matrix of a decode step, which ends with the rows' page tables.
TOKEN = 0
POSITION = 1
STORAGE_INDEX = 2
TABLE = 3  # first column of the table


@dataclass(frozen=True)
class PagedHistory:
    """All tokens of the sequences in a pass, both stored and new, concatenated.

    Attributes:
        storage_indices: Storage index of each token, int64 [U] for U tokens, counted in tokens from
            the beginning of the first page.
        cu_seqlens: Boundaries of the sequences, int32 [R + 1]. Sequence r consists of the tokens
            `cu_seqlens[r]:cu_seqlens[r + 1]`.
        max_len: Number of tokens of the longest sequence.
    """

    storage_indices: Tensor
    cu_seqlens: Tensor
    max_len: int


@dataclass(frozen=True)
class Paged:
    """Attention context of a pass over sequences whose keys and values are stored in pages.

    It is built by `PagedCache`. The pass has T new tokens of R sequences, which are called rows.

    Attributes:
        pool: Memory of the pages.
        storage_indices: Storage index of each new token, counted in tokens from the beginning of
            the first page, int64 [T].
        table: Indices of each row's pages in order, for up to W pages per row, int32 [R, W].
        used: Number of tokens of each row, including the new ones, int32 [R].
        cu_seqlens: Boundaries of the rows' new tokens, int32 [R + 1].
        max_len: Largest number of new tokens of a row, which is 1 in a decode step.
        is_first_prefill: True if no row had stored tokens before this pass.
        history: All tokens of the rows; None in a first prefill and in a decode step.
    """

    pool: PagePool
    storage_indices: Tensor
    table: Tensor
    used: Tensor
    cu_seqlens: Tensor
    max_len: int
    is_first_prefill: bool
    history: PagedHistory | None

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
        return self.used.long().repeat_interleave(
            self.dense.lengths, output_size=len(self.storage_indices)
        )


class PagePool:
    """Memory for the pages of key-value caches.

    `keys[layer]` and `values[layer]` are [pages, page, kv_heads, head_dim], where `page` is the
    number of tokens per page.
    """

    def __init__(
        self,
        config: TransformerConfig,
        device: torch.device | str,
        dtype: torch.dtype,
        *,
        page: int = PAGE,
        max_pages: int | None = None,
    ) -> None:
        """Create a pool with `page` tokens per page.

        `max_pages` is the largest number of pages, including the scratch page; None for no limit.
        """
        self.device = torch.device(device)
        self.dtype = dtype
        self.config = config
        count = FIRST_PAGES if max_pages is None else min(FIRST_PAGES, max_pages)
        self.pages = PageAllocator(page, count, max_pages)
        self._allocate()

    def _allocate(self) -> None:
        """Allocate keys and values of zeros for the allocator's number of pages."""
        config = self.config
        shape = (len(self.pages), self.pages.page_size, config.num_kv_heads, config.head_dim)
        tensors = [
            torch.zeros(shape, device=self.device, dtype=self.dtype)
            for _ in range(2 * config.num_layers)
        ]
        self.keys = tensors[: config.num_layers]
        self.values = tensors[config.num_layers :]

    def reserve(self, count: int) -> None:
        """Make room for at least `count` pages, or for the pool's maximum if that is less.

        The number of pages is rounded up to a power of two, so that only a few different sizes
        occur.
        """
        if count < len(self.pages):
            return
        is_unused = not self.pages.num_used
        self.pages.reserve((1 << count.bit_length()) - 1)
        # If no row has any pages, free the old memory before new memory is allocated.
        if is_unused and len(self.keys[0]) < len(self.pages):
            self.keys = []
            self.values = []
            self._allocate()
        self.fit(PageCopies.build_empty())

    @property
    def num_bytes(self) -> int:
        """Size of the keys and values in bytes."""
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

    def build_packed(self, step: Tensor, tokens: Tensor | None = None) -> Packed:
        """Return the network's input for a decode step, computed on the device from `step`.

        `step` is the result of `PagedCache.step`; `tokens`, int64 [R], replace its tokens if given.
        """
        tokens = step[:, TOKEN].long() if tokens is None else tokens
        positions = step[:, POSITION].long()
        storage_indices = step[:, STORAGE_INDEX].long()
        context = Paged(
            pool=self,
            storage_indices=storage_indices,
            table=step[:, TABLE:].contiguous(),
            used=step[:, POSITION] + 1,
            cu_seqlens=torch.arange(len(step) + 1, device=step.device, dtype=torch.int32),
            max_len=1,
            is_first_prefill=False,
            history=None,
        )
        rows = torch.arange(len(step), device=step.device)
        return Packed(tokens, positions, context, rows, labels=tokens)

    def write(self, layer: int, context: Paged, k: Tensor, v: Tensor) -> None:
        """Store the new tokens' keys and values, each [T, kv_heads, head_dim]."""
        keys, values = (pages[layer].flatten(0, 1) for pages in (self.keys, self.values))
        if fused.serves("store", k, v, keys, values):
            fused.store(k, v, keys, values, context.storage_indices)
        else:
            keys.index_copy_(0, context.storage_indices, k)
            values.index_copy_(0, context.storage_indices, v)

    def read(self, layer: int, history: PagedHistory) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all tokens in `history`, each [U, kv_heads, head_dim]."""
        keys = self.keys[layer].flatten(0, 1)
        values = self.values[layer].flatten(0, 1)
        indices = history.storage_indices
        return keys.index_select(0, indices), values.index_select(0, indices)


class PagedCache:
    """Key-value cache whose rows are stored in the pages of a pool.

    Row r contains `before[r] + used[r]` tokens, of which the first `before[r]` are the row's
    prefix.
    """

    def __init__(self, pool: PagePool, width: int = FIRST_WIDTH) -> None:
        """Create an empty cache; its page table initially has `width` columns."""
        self.pool = pool
        self.device = pool.device
        self.dtype = pool.dtype
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
        added = np.zeros(max(0, len(self.tables.page_counts) - len(self.used)), np.int64)
        self.used = np.concatenate([self.used, added])
        self.before = np.concatenate([self.before, added])
        return list(range(first, self.num_active))

    def link(self, slots: Iterable[int], prefix: PagedCache | None) -> None:
        """Use row 0 of `prefix` as the prefix of the given empty rows; None means no prefix."""
        if prefix is None:
            return
        for slot in slots:
            self.tables.assign_pages(slot, prefix.tables.copy_pages(0))
            self.before[slot] = prefix.before[0] + prefix.used[0]

    def take(self, other: PagedCache) -> int:
        """Create a row with the contents of row 0 of `other`, and return the new row's index.

        The two rows share their pages.
        """
        (slot,) = self.allocate()
        self.tables.assign_pages(slot, other.tables.copy_pages(0))
        self.used[slot] = other.used[0]
        self.before[slot] = other.before[0]
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
            self.used[slot] = self.used[last]
            self.before[slot] = self.before[last]
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
        num_tokens = int(self.before[slot] + length)
        self.tables.clear(slot, keep=-(-num_tokens // self.pool.pages.page_size))

    def fork(self, slot: int, count: int) -> list[int]:
        """Create `count` rows with the contents of row `slot`, and return their indices.

        This is used for several samples of one prompt. All these rows share their pages.
        """
        new = self.allocate(count)
        for row in new:
            self.tables.assign_pages(row, self.tables.copy_pages(slot))
        self.used[new] = self.used[slot]
        self.before[new] = self.before[slot]
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
        token_rows = np.repeat(rows, counts)
        positions = np.repeat(start, counts) + build_ranges(counts)
        ends = np.cumsum(counts)
        # Unless this is a first prefill, list the storage of all tokens of the rows.
        history = None
        if start.any():
            indices = self.tables.compute_token_indices(np.repeat(rows, stop), build_ranges(stop))
            bounds = np.concatenate([[0], np.cumsum(stop)]).astype(np.int32)
            history = PagedHistory(self._put(indices), self._put(bounds), int(stop.max()))
        context = Paged(
            pool=self.pool,
            storage_indices=self._put(self.tables.compute_token_indices(token_rows, positions)),
            table=self._put(self.tables.table[rows]),
            used=self._put(stop.astype(np.int32)),
            cu_seqlens=self._put(np.concatenate([[0], ends]).astype(np.int32)),
            max_len=int(counts.max()),
            is_first_prefill=history is None,
            history=history,
        )
        flat_tokens = torch.cat(list(tokens))
        last_tokens = self._put(ends - 1)
        if flat_tokens.device.type == "cpu":
            flat_tokens = self._put(flat_tokens.numpy())
        labels = flat_tokens[last_tokens]
        return Packed(flat_tokens, self._put(positions), context, last_tokens, labels)

    def step(self, slots: Sequence[int], tokens: np.ndarray) -> np.ndarray:
        """Make room for one token per row, and return the input of the decode step.

        The input is int32 [R, 3 + W]. The columns are the token, the position of the token, the
        storage index of the token, and the W pages of the row. Rows of zeros can be appended as
        padding. They denote the first token of a sequence in the scratch page, which belongs to no
        row.
        """
        rows = np.asarray(slots, np.int64)
        start = self._extend_rows(rows, np.ones(len(rows), np.int64))
        indices = self.tables.compute_token_indices(rows, start)
        columns = np.stack([tokens, start, indices], axis=1).astype(np.int32)
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
