"""State of the running sequences, with one array per attribute.

Row r of each array belongs to slot r of the KV cache. With arrays, a step costs a few array
operations for any number of sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from weft import randomness
from weft.engine.generation.scheduler import Sequence as Live

INITIAL_SIZE = 64  # initial numbers of rows and of tokens per row
# random numbers of a row computed at once; numpy takes as long for one as for hundreds
UNIFORMS_PER_BLOCK = 64


class DecodeBatch:
    """State of the running sequences, with one row per sequence in each array.

    For each row, `count` contains the number of sampled tokens, `keys` the seed of the random
    numbers, and `settings` an index into a `SettingsTable`.
    """

    def __init__(self) -> None:
        self.sequences: list[Live] = []
        self.ids: list[str] = []
        self.ks: list[int] = []
        self.row_by_key: dict[tuple[str, int], int] = {}
        self.count = np.zeros(INITIAL_SIZE, np.int64)
        self.limit = np.zeros(INITIAL_SIZE, np.int64)
        self.settings = np.zeros(INITIAL_SIZE, np.int64)
        self.keys = np.zeros((INITIAL_SIZE, 2), np.uint32)
        self.last = np.zeros(INITIAL_SIZE, np.int64)  # the last token
        self.watched = np.zeros(INITIAL_SIZE, bool)  # True if the row has stop texts
        # index of the row in the step that was launched last (`weft.engine.generation.ahead`)
        self.launch_rows = np.zeros(INITIAL_SIZE, np.int64)
        self._tokens = np.zeros((INITIAL_SIZE, INITIAL_SIZE), np.int64)
        self._logprobs = np.zeros((INITIAL_SIZE, INITIAL_SIZE), np.float64)
        self._versions = np.zeros((INITIAL_SIZE, INITIAL_SIZE), np.int64)
        self._supports: list[list[tuple[int, ...]]] = []
        self._uniforms = np.zeros(
            (INITIAL_SIZE, UNIFORMS_PER_BLOCK)
        )  # for the tokens from `_block` * NUMBERS
        self._block = np.zeros(INITIAL_SIZE, np.int64)
        self._steps_ahead = 0  # steps with random numbers for all rows; 0: to be computed

    def __len__(self) -> int:
        return len(self.sequences)

    def add(self, live: Live, settings: int, keys: Sequence[np.uint32], watched: bool) -> None:
        row = len(self)
        done = len(live.tokens)
        self._grow(row + 1, done + 1)
        self.sequences.append(live)
        self.ids.append(live.id)
        self.ks.append(live.k)
        self.row_by_key[live.key] = row
        self.count[row], self.limit[row], self.settings[row] = done, live.limit, settings
        self.keys[row], self.watched[row] = keys, watched
        self._tokens[row, :done], self._logprobs[row, :done] = live.tokens, live.logprobs
        self._versions[row, :done] = live.versions
        self._supports.append(list(live.supports))
        self._block[row], self._steps_ahead = -1, 0

    @property
    def min_remaining(self) -> int:
        """Minimum, over all rows, of the number of tokens left before the row reaches its limit."""
        return int((self.limit[: len(self)] - self.count[: len(self)]).min())

    def compute_uniforms(self, most: int, skip: int = 0) -> npt.NDArray[np.float64]:
        """Return random numbers [m, n] in [0, 1) for the next m tokens of each of the n rows.

        m is at least 1 and at most `most`. It can be less than `most`, because random numbers are
        computed in blocks. The number for a token depends only on the row's key and on the token's
        index in the completion (`weft.randomness`). The first `skip` tokens of each row are left
        out.
        """
        count = self.count[: len(self)] + skip
        if self._steps_ahead < 1 or skip:
            block = count // UNIFORMS_PER_BLOCK
            stale = (block != self._block[: len(self)]).nonzero()[0]
            positions = block[stale, None] * UNIFORMS_PER_BLOCK + np.arange(UNIFORMS_PER_BLOCK)
            uniforms = randomness.draw_uniforms(
                self.keys[stale].repeat(UNIFORMS_PER_BLOCK, 0), positions.ravel()
            )
            self._uniforms[stale], self._block[stale] = (
                uniforms.reshape(-1, UNIFORMS_PER_BLOCK),
                block[stale],
            )
            self._steps_ahead = UNIFORMS_PER_BLOCK - int((count % UNIFORMS_PER_BLOCK).max())
        steps = np.arange(min(most, self._steps_ahead))[:, None]
        if skip:
            self._steps_ahead = 0  # the numbers of skipped tokens may be gone
        return self._uniforms[np.arange(len(count)), count % UNIFORMS_PER_BLOCK + steps]

    def append_tokens(
        self,
        tokens: npt.NDArray[np.int64],
        logprobs: npt.NDArray[np.float64],
        version: int,
        supports: Sequence[tuple[int, ...]] | None,
    ) -> None:
        """Append one sampled token to every row.

        `supports` contains, for each row, the ids that the sampling limits kept, or is None if
        these are not recorded.
        """
        rows = np.arange(len(self))
        count = self.count[: len(self)]
        self._grow(len(self), int(count.max()) + 1)
        self._tokens[rows, count] = tokens
        self._logprobs[rows, count] = logprobs
        self._versions[rows, count] = version
        self.last[: len(tokens)] = tokens
        count += 1
        self._steps_ahead -= 1
        if supports is not None:
            for row_supports, support in zip(self._supports, supports, strict=True):
                row_supports.append(support)

    def remove(self, row: int) -> Live:
        """Remove a row, and return its sequence with the sampled tokens.

        The last row is moved to the index of the removed row.
        """
        live = self.sequences[row]
        last = len(self) - 1
        done = self.count[row]
        live.tokens = self._tokens[row, :done].tolist()
        live.versions = self._versions[row, :done].tolist()
        live.logprobs = self._logprobs[row, :done].tolist()
        live.supports = self._supports[row] or [()] * int(done)
        for name in COLUMNS:
            column = self.__dict__[name]
            column[row] = column[last]
        lists: tuple[list[Any], ...] = (self.sequences, self.ids, self.ks, self._supports)
        for one in lists:
            one[row] = one[last]
            one.pop()
        if row < last:
            self.row_by_key[self.sequences[row].key] = row
        del self.row_by_key[live.key]
        return live

    def _grow(self, rows: int, tokens: int) -> None:
        if rows <= self._tokens.shape[0] and tokens <= self._tokens.shape[1]:
            return
        for name in COLUMNS:
            old = self.__dict__[name]
            shape = [_grow_size(old.shape[0], rows), *old.shape[1:]]
            if name in TOKEN_COLUMNS:
                shape[1] = _grow_size(old.shape[1], tokens)
            if tuple(shape) != old.shape:
                new = np.zeros(shape, old.dtype)
                new[tuple(slice(size) for size in old.shape)] = old
                self.__dict__[name] = new


TOKEN_COLUMNS = ("_tokens", "_logprobs", "_versions")
COLUMNS = (
    "count",
    "limit",
    "settings",
    "keys",
    "last",
    "watched",
    "launch_rows",
    "_uniforms",
    "_block",
    *TOKEN_COLUMNS,
)


def _grow_size(size: int, least: int) -> int:
    return size if size >= least else max(least, 2 * size)
