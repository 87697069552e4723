"""The sequences that decode, as columns: row r of every array is slot r of the key-value cache.

What a step reads and writes for each sequence lies in arrays, so a step costs a few array
operations however many there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from weft import randomness
from weft.engine.generation.scheduler import Sequence as Live

FIRST = 64  # rows, and tokens a row, that there is room for at first
# tokens of a row whose random numbers are made at once: numpy takes as long for one as for hundreds
NUMBERS = 64


class DecodeBatch:
    """`count` tokens of each completion are booked; `keys` seed its draws; `settings` is the index
    of how it is sampled.
    """

    def __init__(self) -> None:
        self.sequences: list[Live] = []
        self.ids: list[str] = []
        self.ks: list[int] = []
        self.places: dict[tuple[str, int], int] = {}
        self.count = np.zeros(FIRST, np.int64)
        self.limit = np.zeros(FIRST, np.int64)
        self.settings = np.zeros(FIRST, np.int64)
        self.keys = np.zeros((FIRST, 2), np.uint32)
        self.last = np.zeros(FIRST, np.int64)  # the last token
        self.watched = np.zeros(FIRST, bool)  # whether stop texts are looked for
        self._tokens = np.zeros((FIRST, FIRST), np.int64)
        self._logprobs = np.zeros((FIRST, FIRST), np.float64)
        self._versions = np.zeros((FIRST, FIRST), np.int64)
        self._supports: list[list[tuple[int, ...]]] = []
        self._uniforms = np.zeros((FIRST, NUMBERS))  # of tokens `_block` * NUMBERS and on
        self._block = np.zeros(FIRST, np.int64)
        self._steps_ahead = 0  # that all rows have numbers for; 0 where that is to be found out

    def __len__(self) -> int:
        return len(self.sequences)

    def add(self, live: Live, settings: int, keys: Sequence[np.uint32], watched: bool) -> None:
        row = len(self)
        done = len(live.tokens)
        self._fit(row + 1, done + 1)
        self.sequences.append(live)
        self.ids.append(live.id)
        self.ks.append(live.k)
        self.places[live.key] = row
        self.count[row], self.limit[row], self.settings[row] = done, live.limit, settings
        self.keys[row], self.watched[row] = keys, watched
        self._tokens[row, :done], self._logprobs[row, :done] = live.tokens, live.logprobs
        self._versions[row, :done] = live.versions
        self._supports.append(list(live.supports))
        self._block[row], self._steps_ahead = -1, 0

    @property
    def fewest_left(self) -> int:
        """Tokens that the row next to its limit may still have."""
        return int((self.limit[: len(self)] - self.count[: len(self)]).min())

    def uniforms(self, most: int) -> npt.NDArray[np.float64]:
        """[m, n] in [0, 1): each row's numbers for its next m tokens, 1 <= m <= `most`, as many as
        are at hand. They are those of `weft.randomness` for its key and `count`, `count` + 1, ...
        """
        count = self.count[: len(self)]
        if self._steps_ahead < 1:
            block = count // NUMBERS
            stale = (block != self._block[: len(self)]).nonzero()[0]
            positions = block[stale, None] * NUMBERS + np.arange(NUMBERS)
            made = randomness.uniforms(self.keys[stale].repeat(NUMBERS, 0), positions.ravel())
            self._uniforms[stale], self._block[stale] = made.reshape(-1, NUMBERS), block[stale]
            self._steps_ahead = NUMBERS - int((count % NUMBERS).max())
        steps = np.arange(min(most, self._steps_ahead))[:, None]
        return self._uniforms[np.arange(len(count)), count % NUMBERS + steps]

    def book(
        self,
        tokens: npt.NDArray[np.int64],
        logprobs: npt.NDArray[np.float64],
        version: int,
        supports: Sequence[tuple[int, ...]] | None,
    ) -> None:
        """One token more for every row; `supports` are the kept ids where they are recorded."""
        rows = np.arange(len(self))
        count = self.count[: len(self)]
        self._fit(len(self), int(count.max()) + 1)
        self._tokens[rows, count] = tokens
        self._logprobs[rows, count] = logprobs
        self._versions[rows, count] = version
        self.last[: len(tokens)] = tokens
        count += 1
        self._steps_ahead -= 1
        if supports is not None:
            for kept, support in zip(self._supports, supports, strict=True):
                kept.append(support)

    def remove(self, row: int) -> Live:
        """Take a row out and give its sequence what was booked; the last row moves into its place."""
        live = self.sequences[row]
        last = len(self) - 1
        done = self.count[row]
        live.tokens = self._tokens[row, :done].tolist()
        live.versions = self._versions[row, :done].tolist()
        live.logprobs = self._logprobs[row, :done].tolist()
        live.supports = self._supports[row] or [()] * int(done)
        for column in self._columns():
            column[row] = column[last]
        lists: tuple[list[Any], ...] = (self.sequences, self.ids, self.ks, self._supports)
        for one in lists:
            one[row] = one[last]
            one.pop()
        if row < last:
            self.places[self.sequences[row].key] = row
        del self.places[live.key]
        return live

    def _columns(self) -> list[npt.NDArray[np.generic]]:
        return [self.__dict__[name] for name in COLUMNS]

    def _fit(self, rows: int, tokens: int) -> None:
        if rows <= self._tokens.shape[0] and tokens <= self._tokens.shape[1]:
            return
        for name in COLUMNS:
            old = self.__dict__[name]
            shape = [_doubled(old.shape[0], rows), *old.shape[1:]]
            if name in HISTORIES:
                shape[1] = _doubled(old.shape[1], tokens)
            if tuple(shape) != old.shape:
                new = np.zeros(shape, old.dtype)
                new[tuple(slice(size) for size in old.shape)] = old
                self.__dict__[name] = new


HISTORIES = ("_tokens", "_logprobs", "_versions")
COLUMNS = (
    "count",
    "limit",
    "settings",
    "keys",
    "last",
    "watched",
    "_uniforms",
    "_block",
    *HISTORIES,
)


def _doubled(size: int, least: int) -> int:
    return size if size >= least else max(least, 2 * size)
