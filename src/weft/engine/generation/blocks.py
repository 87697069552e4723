"""Accounting of the memory of the KV cache, for the scheduler.

The scheduler uses the interface `BlockManager`, which hides how the memory is organized.
`SlotManager` is the implementation for `models/kv/slots.py`. There, each sequence has one
contiguous slot, because on a CPU, gathering scattered memory would take several times as long as a
decode step. All slots grow together, by doubling. A shared prefix is stored once, outside the
slots.

`PageManager` is the implementation for `models/kv/pages.py`, which shares the pages of common
prefixes, and copies a partly full page when a sequence writes to it. Each sequence is charged for
the maximum number of unshared pages that it can need, so memory that is counted as free really is
free. The module does not import torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Protocol

Key = Hashable


class BlockManager(Protocol):
    """Interface of objects that reserve KV-cache memory for sequences, counted in tokens.

    Each sequence and each shared prefix is identified by a `key`.
    """

    # minimum tokens that a stored prefix must save; None: prefixes are not shared
    min_saved_tokens: int | None

    def expect(self, count: int, longest: int) -> None:
        """Announce the expected load, so that memory can be planned.

        `count` is the number of submitted sequences, including those that are still waiting. No
        sequence will have more than `longest` tokens.
        """
        ...

    def admit(self, key: Key, length: int) -> bool:
        """Reserve room for `length` tokens of a new sequence, in addition to its shared prefix.

        Returns False and changes nothing if there is not enough room.
        """
        ...

    def admit_prefix(self, key: Key, length: int) -> bool:
        """Reserve room for `length` tokens of a new shared prefix.

        Returns False and changes nothing if there is not enough room.
        """
        ...

    def start(self, key: Key) -> None:
        """Mark an admitted sequence as running, so that `advance` reserves tokens for it."""
        ...

    def advance(self) -> bool:
        """Reserve room for one more token of every running sequence.

        Returns False and changes nothing if there is not enough room.
        """
        ...

    def release(self, key: Key) -> None:
        """Free the memory reserved for a sequence or a prefix."""
        ...


class SlotManager:
    """Manager of KV-cache memory in slots of equal size; implements `BlockManager`.

    Each sequence has one slot (see `weft.models.kv.slots`). A slot has room for `capacity` tokens,
    which is a multiple of `unit`. At most `max_slots` sequences can have a slot. Slots and shared
    prefixes have at most `max_tokens` + `unit` - 1 tokens in total, where `unit` - 1 allows for
    rounding up.

    All slots are copied whenever their number changes. Some spare slots are therefore allocated in
    advance; they are freed if their memory is needed for something else. `num_slots` includes them.

    If `ahead` is True and the limit is large enough, slots have room for the longest expected
    sequence from the start. They then need not be enlarged later. The unused room costs little on
    operating systems that provide memory only when it is written.
    """

    INITIAL_CAPACITY = 64  # initial tokens per slot
    MIN_SLOTS = 8  # initial number of slots, if that many fit

    def __init__(
        self,
        max_slots: int,
        max_tokens: int,
        least_spared: int | None = None,
        unit: int = 1,
        *,
        ahead: bool = False,
    ) -> None:
        self.max_slots = max_slots
        self.max_tokens = max_tokens + unit - 1
        self.min_saved_tokens = least_spared
        self.unit = unit
        self.reserves_ahead = ahead
        self.capacity = self.num_slots = 0
        self._expected = (0, 0)  # slots, and tokens of each
        self._clock = 0
        self._waiting: dict[Key, int] = {}  # tokens
        self._started: dict[Key, int] = {}  # tokens - clock
        self._prefixes: dict[Key, int] = {}
        # maximum of `_started`; None: to be computed
        self._longest: int | None = None

    def __len__(self) -> int:
        return len(self._waiting) + len(self._started)

    @property
    def num_tokens(self) -> int:
        """Number of tokens reserved for prefixes and for slots in use, without spare slots."""
        return len(self) * self.capacity + sum(self._prefixes.values())

    def expect(self, count: int, longest: int) -> None:
        longest = -(-longest // self.unit) * self.unit
        fits = self.reserves_ahead and 2 * self.max_slots * longest <= self.max_tokens
        self._expected = (min(count, self.max_slots), longest) if fits else (0, 0)

    def admit(self, key: Key, length: int) -> bool:
        if len(self) == self.max_slots or not self._fit(len(self) + 1, length):
            return False
        self._waiting[key] = length
        return True

    def admit_prefix(self, key: Key, length: int) -> bool:
        if self.num_tokens + length > self.max_tokens:
            return False
        self._prefixes[key] = length
        self._resize()
        return True

    def start(self, key: Key) -> None:
        distance = self._waiting.pop(key) - self._clock
        self._started[key] = distance
        if self._longest is not None:
            self._longest = max(self._longest, distance)

    def advance(self) -> bool:
        if not self._started:
            return True
        if self._longest is None:
            self._longest = max(self._started.values())
        if not self._fit(len(self), self._longest + self._clock + 1):
            return False
        self._clock += 1
        return True

    def release(self, key: Key) -> None:
        if key in self._prefixes:
            del self._prefixes[key]
            return
        if key in self._waiting:
            del self._waiting[key]
        elif self._started.pop(key) == self._longest:
            self._longest = None
        if not len(self):
            self.capacity = self.num_slots = 0

    def _resize(self, count: int = 0) -> None:
        """Allocate at least `count` slots, within the limits.

        If there are too few slots, their number is at least doubled.
        """
        if count > self.num_slots:
            self.num_slots = max(count, 2 * self.num_slots, self._expected[0] or self.MIN_SLOTS)
        if self.num_slots:
            room = self.max_tokens - sum(self._prefixes.values())
            self.num_slots = min(self.num_slots, self.max_slots, room // self.capacity)

    def _fit(self, count: int, length: int) -> bool:
        """Enlarge all slots to at least `length` tokens, if the limit allows `count` such slots.

        If possible, the size of the slots is doubled. Returns False and changes nothing if there is
        not enough room.
        """
        room = (self.max_tokens - sum(self._prefixes.values())) // count // self.unit * self.unit
        capacity = max(self.capacity, min(self._expected[1], room)) or min(
            self.INITIAL_CAPACITY, room
        )
        if length > capacity:
            capacity = max(-(-length // self.unit) * self.unit, min(2 * capacity, room))
        if capacity > room:
            return False
        self.capacity = capacity
        self._resize(count)
        return True


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
