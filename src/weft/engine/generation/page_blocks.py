"""Accounting of the KV cache in pages, for the scheduler.

`models/kv/pages.py` shares the pages of common prefixes, and copies a partly full page when a
sequence writes to it. Each sequence is charged for the maximum number of unshared pages that it can
need, so memory that is counted as free really is free. The module does not import torch.
"""

from __future__ import annotations

from collections import Counter

from weft.engine.generation.blocks import Key


class PageManager:
    """Manager of KV-cache memory in pages of `page` tokens; implements `BlockManager`.

    The pages have room for `max_tokens` tokens in total. The time that the manager needs per decode
    step does not depend on the number of sequences.
    """

    def __init__(
        self, max_sequences: int, max_tokens: int, page: int, least_spared: int | None
    ) -> None:
        self.max_sequences = max_sequences
        self.page = page
        self.min_saved_tokens = least_spared
        # so that a sequence of `max_tokens` fits wherever its prefix ends
        self.num_pages = -(-max_tokens // page) + 2
        self.num_used = 0
        # expected number of running sequences, and maximum tokens of one
        self.rows = self.longest = 0
        self._clock = 0
        self._waiting: dict[Key, int] = {}  # tokens
        self._started: dict[Key, int] = {}  # tokens - clock
        self._prefixes: dict[Key, int] = {}  # tokens
        # number of running sequences by the clock % page at which they need another page
        self._num_opening: Counter[int] = Counter()

    @property
    def num_expected(self) -> int:
        """Number of pages to allocate: enough for all expected sequences, within the limit."""
        return min(self.num_pages, max(self.num_used, self.rows * self._count_pages(self.longest)))

    def expect(self, count: int, longest: int) -> None:
        self.rows = min(count, self.max_sequences)
        self.longest = longest

    def admit(self, key: Key, length: int) -> bool:
        full = len(self._waiting) + len(self._started) == self.max_sequences
        if full or not self._reserve(self._count_pages(length)):
            return False
        self._waiting[key] = length
        return True

    def admit_prefix(self, key: Key, length: int) -> bool:
        if not self._reserve(-(-length // self.page)):
            return False
        self._prefixes[key] = length
        return True

    def start(self, key: Key) -> None:
        distance = self._waiting.pop(key) - self._clock
        self._started[key] = distance
        self._num_opening[self._compute_phase(distance)] += 1

    def advance(self) -> bool:
        if not self._reserve(self._num_opening[(self._clock + 1) % self.page]):
            return False
        self._clock += 1
        return True

    def release(self, key: Key) -> None:
        if key in self._prefixes:
            self.num_used -= -(-self._prefixes.pop(key) // self.page)
        elif key in self._waiting:
            self.num_used -= self._count_pages(self._waiting.pop(key))
        else:
            distance = self._started.pop(key)
            self._num_opening[self._compute_phase(distance)] -= 1
            self.num_used -= self._count_pages(distance + self._clock)

    def _count_pages(self, length: int) -> int:
        """Return the maximum number of pages that `length` tokens can occupy.

        The number is highest if the first token takes the last place of a page, as can happen after
        a shared prefix.
        """
        return (length + 2 * self.page - 2) // self.page

    def _compute_phase(self, distance: int) -> int:
        """Return the step at which a sequence needs another page, modulo the page size `page`.

        A sequence needs another page when its length reaches 2, page + 2, 2 page + 2, and so on
        (see `_count_pages`). `distance` is the sequence's length minus the step counter. Each step
        increases both by 1, so `distance` is constant while the sequence runs.
        """
        return (2 - distance) % self.page

    def _reserve(self, count: int) -> bool:
        if self.num_used + count > self.num_pages:
            return False
        self.num_used += count
        return True
