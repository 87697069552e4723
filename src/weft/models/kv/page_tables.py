"""Which page of memory holds which tokens of which row. Pure accounting: numpy, no torch.

A page holds `page` tokens; a row's pages in order hold its tokens. Pages are counted by the rows
that use them, so rows that begin alike share pages; a row that is about to write to a page which
others use is given a copy of it first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

SCRATCH = 0  # the page that nobody owns; rows that only fill up a step write there
FIRST_PAGES = 64
FIRST_ROWS = 8
FIRST_WIDTH = 16
Ids = npt.NDArray[np.int32]


class Pages:
    """The pages of one device: free ones, and how many rows use each of the others.

    There are as many as were made room for (`reserve`); where that is too few their number doubles,
    up to `most`.
    """

    def __init__(self, page: int, count: int = FIRST_PAGES, most: int | None = None) -> None:
        self.page = page
        self.most = most
        self.users = np.zeros(max(count, 1), np.int32)
        self.users[SCRATCH] = 1
        self._free = list(range(len(self.users) - 1, SCRATCH, -1))

    def __len__(self) -> int:
        return len(self.users)

    @property
    def num_used(self) -> int:
        """Pages that rows hold."""
        return len(self) - 1 - len(self._free)

    def reserve(self, count: int) -> None:
        """Have `count` pages for rows, or as many as there may be."""
        old = len(self)
        new = count + 1 if self.most is None else min(count + 1, self.most)
        if new > old:
            self.users = np.concatenate([self.users, np.zeros(new - old, np.int32)])
            self._free = [*range(new - 1, old - 1, -1), *self._free]

    def take(self, count: int) -> Ids:
        """New pages, each with one user."""
        if count > len(self._free):
            self.reserve(max(2 * len(self) - 1, self.num_used + count))
        assert count <= len(self._free), (
            f"{self.num_used} pages are in use and {count} more are asked for, of {len(self)}"
        )
        taken = np.array([self._free.pop() for _ in range(count)], np.int32)
        self.users[taken] = 1
        return taken

    def share(self, pages: Ids) -> None:
        """One more user of each."""
        self.users[pages] += 1

    def drop(self, pages: Ids) -> None:
        """One user less of each, all different; those without any are free."""
        self.users[pages] -= 1
        left = pages[self.users[pages] == 0]
        self._free.extend(left[::-1].tolist())


@dataclass(frozen=True)
class Copies:
    """Pages whose contents are to be copied before anything is written; int32 [n] each."""

    source: Ids
    target: Ids

    @classmethod
    def none(cls) -> Copies:
        return cls(np.zeros(0, np.int32), np.zeros(0, np.int32))


class Tables:
    """The pages of rows: `table[row, : held[row]]`, and SCRATCH after them.

    Rows are those of one `PagedCache`.
    """

    def __init__(self, pages: Pages, rows: int = FIRST_ROWS, width: int = FIRST_WIDTH) -> None:
        self.pages = pages
        self.table = np.full((rows, width), SCRATCH, np.int32)
        self.held = np.zeros(rows, np.int64)

    def fit(self, rows: int, width: int) -> None:
        """Room for so many rows of so many pages."""
        shape = self.table.shape
        wanted = tuple(
            n if n >= least else max(least, 2 * n)
            for n, least in zip(shape, (rows, width), strict=True)
        )
        if wanted != shape:
            old = self.table
            self.table = np.full(wanted, SCRATCH, np.int32)
            self.table[: shape[0], : shape[1]] = old
            self.held = np.concatenate([self.held, np.zeros(wanted[0] - shape[0], np.int64)])

    def of(self, row: int) -> Ids:
        return self.table[row, : self.held[row]].copy()

    def put(self, row: int, pages: Ids) -> None:
        """Make these, which the row shares with their other users, the pages of an empty row."""
        assert not self.held[row]
        self.fit(row + 1, len(pages))
        self.pages.share(pages)
        self.table[row, : len(pages)] = pages
        self.held[row] = len(pages)

    def clear(self, row: int, keep: int = 0) -> None:
        """Give back a row's pages but the first `keep`."""
        stop = int(self.held[row])
        if stop > keep:
            self.pages.drop(self.table[row, keep:stop])
            self.table[row, keep:stop] = SCRATCH
            self.held[row] = keep

    def move(self, source: int, target: int) -> None:
        """An empty row takes over the pages of another, which is empty then."""
        assert not self.held[target]
        self.table[target], self.held[target] = self.table[source], self.held[source]
        self.table[source], self.held[source] = SCRATCH, 0

    def extend(
        self,
        rows: npt.NDArray[np.int64],
        before: npt.NDArray[np.int64],
        after: npt.NDArray[np.int64],
    ) -> Copies:
        """Room in `rows` (distinct), which hold `before` tokens, for `after`, and pages of their
        own for what is written.
        """
        page = self.pages.page
        wanted = -(-after // page)
        self.fit(0, int(wanted.max()))
        shared = self._shared(rows, before)
        source = self.table[rows[shared], before[shared] // page]
        # One page after the other: of several rows that write to a shared page the last one keeps
        # it.
        copied = []
        kept = []
        for row, place, old in zip(
            rows[shared].tolist(), (before[shared] // page).tolist(), source.tolist(), strict=True
        ):
            if self.pages.users[old] == 1:
                continue
            self.pages.drop(np.array([old], np.int32))
            self.table[row, place] = self.pages.take(1)[0]
            kept.append(old)
            copied.append(self.table[row, place])
        short = np.flatnonzero(wanted > self.held[rows])
        for row, count in zip(rows[short].tolist(), wanted[short].tolist(), strict=True):
            held = int(self.held[row])
            self.table[row, held:count] = self.pages.take(count - held)
            self.held[row] = count
        return Copies(np.array(kept, np.int32), np.array(copied, np.int32))

    def places(
        self, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Return the storage index of the token at each position of each row.

        Indices count tokens from the beginning of the first page.
        """
        page = self.pages.page
        return self.table[rows, positions // page].astype(np.int64) * page + positions % page

    def _shared(
        self, rows: npt.NDArray[np.int64], before: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Return those of `rows` whose next token goes to a partly filled page that others use too."""
        page = self.pages.page
        partial = np.flatnonzero(before % page)
        last = self.table[rows[partial], before[partial] // page]
        return partial[self.pages.users[last] > 1]


def order(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """0 .. n - 1 for each n of `counts`, end to end."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
