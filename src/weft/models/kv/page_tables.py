"""Page tables, which list the pages that contain the tokens of each cached sequence.

A row is one cached sequence. A page has room for `page_size` tokens, and the pages of a row contain
the row's tokens in order. The allocator counts the rows that use each page, so rows with a common
prefix can share pages. Before a row writes to a page that other rows also use, the row gets a copy
of the page.

Tables are numpy arrays; this module does not use torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

SCRATCH = 0  # the page that no row owns; rows that pad a decode step write there
FIRST_PAGES = 64
FIRST_ROWS = 8
FIRST_WIDTH = 16
Ids = npt.NDArray[np.int32]


class PageAllocator:
    """Allocator of the pages of one device, with a count of the rows that use each page.

    If there are too few free pages, the number of pages doubles, up to `max_pages`. `reserve` makes
    room for a number of pages in advance.
    """

    def __init__(self, page: int, count: int = FIRST_PAGES, most: int | None = None) -> None:
        self.page_size = page
        self.max_pages = most
        self.users = np.zeros(max(count, 1), np.int32)
        self.users[SCRATCH] = 1
        self._free = list(range(len(self.users) - 1, SCRATCH, -1))

    def __len__(self) -> int:
        return len(self.users)

    @property
    def num_used(self) -> int:
        """Number of pages that rows use."""
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
        taken = np.array([self._free.pop() for _ in range(count)], np.int32)
        self.users[taken] = 1
        return taken

    def add_users(self, pages: Ids) -> None:
        """Increase the number of users of each page by 1."""
        self.users[pages] += 1

    def remove_users(self, pages: Ids) -> None:
        """Decrease the number of users of each page by 1; the pages must be distinct.

        Pages that no longer have a user become free.
        """
        self.users[pages] -= 1
        left = pages[self.users[pages] == 0]
        self._free.extend(left[::-1].tolist())


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
        """Grow the table to at least `rows` rows of `width` pages."""
        shape = self.table.shape
        wanted = tuple(
            n if n >= least else max(least, 2 * n)
            for n, least in zip(shape, (rows, width), strict=True)
        )
        if wanted != shape:
            old = self.table
            self.table = np.full(wanted, SCRATCH, np.int32)
            self.table[: shape[0], : shape[1]] = old
            self.page_counts = np.concatenate(
                [self.page_counts, np.zeros(wanted[0] - shape[0], np.int64)]
            )

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
        self.table[target], self.page_counts[target] = self.table[source], self.page_counts[source]
        self.table[source], self.page_counts[source] = SCRATCH, 0

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
        wanted = -(-after // page)
        self.ensure_size(0, int(wanted.max()))
        # Find the partly filled pages that other rows use too.
        shared = self._find_shared(rows, before)
        source = self.table[rows[shared], before[shared] // page]
        # Go page by page: if all users of a page write to it, the last one keeps it.
        copied = []
        old_pages = []
        for row, place, old in zip(
            rows[shared].tolist(), (before[shared] // page).tolist(), source.tolist(), strict=True
        ):
            if self.pages.users[old] == 1:
                continue
            self.pages.remove_users(np.array([old], np.int32))
            self.table[row, place] = self.pages.allocate(1)[0]
            old_pages.append(old)
            copied.append(self.table[row, place])
        # Add pages to rows that have too few.
        short = np.flatnonzero(wanted > self.page_counts[rows])
        for row, count in zip(rows[short].tolist(), wanted[short].tolist(), strict=True):
            held = int(self.page_counts[row])
            self.table[row, held:count] = self.pages.allocate(count - held)
            self.page_counts[row] = count
        return PageCopies(np.array(old_pages, np.int32), np.array(copied, np.int32))

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
        """Return each index i for which the last page of row `rows[i]` is partly filled and shared.

        Row `rows[i]` contains `before[i]` tokens. A page is shared if several rows use it.
        """
        page = self.pages.page_size
        partial = np.flatnonzero(before % page)
        last = self.table[rows[partial], before[partial] // page]
        return partial[self.pages.users[last] > 1]


def build_ranges(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the concatenation of the ranges 0, ..., n - 1, one for each n in `counts`."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
