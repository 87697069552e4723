"""How much key-value memory the sequences take. Pure accounting: no torch, no tensors.

The scheduler asks through `Blocks` and cannot tell what a block is. `Slots` says what
`models/kv/slots.py` stores: a block is one whole contiguous slot, all slots grow together by
doubling (gathering scattered parts costs several times a decode step on a CPU), and a prefix that
sequences share is stored by itself, once.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

Key = Hashable


class Blocks(Protocol):
    """Room for the keys and values of sequences and of the prefixes they share, by token count."""

    # tokens that a prefix must spare to be worth storing apart; None: none is
    least_spared: int | None

    def expect(self, count: int, longest: int) -> None:
        """So many sequences are here, those that wait included, and none will have more than
        `longest` tokens.
        """
        ...

    def admit(self, key: Key, length: int) -> bool:
        """Give a new sequence room for `length` tokens of its own; False, and nothing changes,
        where there is none.
        """
        ...

    def admit_prefix(self, key: Key, length: int) -> bool:
        """Give a new shared prefix room for `length` tokens, likewise."""
        ...

    def start(self, key: Key) -> None:
        """From now on `advance` counts a token more of this sequence."""
        ...

    def advance(self) -> bool:
        """Room for one token more of every started sequence; False, and nothing changes, where
        there is none.
        """
        ...

    def release(self, key: Key) -> None:
        """Take the room of a sequence or a prefix back."""
        ...


class Slots:
    """Equal slots of `capacity` tokens, a multiple of `unit`: at most `max_slots` of them;
    `max_tokens` tokens in all, shared prefixes included (and up to `unit` - 1 more, so that a
    sequence of `max_tokens` fits, wherever its prefix ends).

    `num_held` slots are there: those in use and, as far as the limits allow, some for sequences to
    come, since each change of their number copies all of them. They are taken back where something
    else needs the room. Where memory that nobody wrote to is not taken (`ahead`), they are as large
    as the longest sequence will need from the start, if `max_slots` of them take no more than half
    the limit.

    No step looks at the sequences one by one: a started sequence's length is kept as its distance
    from a clock.
    """

    FIRST = 64  # tokens of a slot at first
    FEWEST = 8  # slots at first, where that many fit

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
        self.least_spared = least_spared
        self.unit = unit
        self.ahead = ahead
        self.capacity = self.num_held = 0
        self._expected = (0, 0)  # slots, and tokens of each
        self._clock = 0
        self._waiting: dict[Key, int] = {}  # tokens
        self._started: dict[Key, int] = {}  # tokens - clock
        self._prefixes: dict[Key, int] = {}
        # of the started, less the clock; None where it is to be found again
        self._longest: int | None = None

    def __len__(self) -> int:
        return len(self._waiting) + len(self._started)

    @property
    def tokens(self) -> int:
        """Tokens that need room now; `num_held` slots have more."""
        return len(self) * self.capacity + sum(self._prefixes.values())

    def expect(self, count: int, longest: int) -> None:
        longest = -(-longest // self.unit) * self.unit
        fits = self.ahead and 2 * self.max_slots * longest <= self.max_tokens
        self._expected = (min(count, self.max_slots), longest) if fits else (0, 0)

    def admit(self, key: Key, length: int) -> bool:
        if len(self) == self.max_slots or not self._fit(len(self) + 1, length):
            return False
        self._waiting[key] = length
        return True

    def admit_prefix(self, key: Key, length: int) -> bool:
        if self.tokens + length > self.max_tokens:
            return False
        self._prefixes[key] = length
        self._hold()
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
            self.capacity = self.num_held = 0

    def _hold(self, count: int = 0) -> None:
        """Have `count` slots or more: twice as many where they are too few, none beyond the limits."""
        if count > self.num_held:
            self.num_held = max(count, 2 * self.num_held, self._expected[0] or self.FEWEST)
        if self.num_held:
            room = self.max_tokens - sum(self._prefixes.values())
            self.num_held = min(self.num_held, self.max_slots, room // self.capacity)

    def _fit(self, count: int, length: int) -> bool:
        """Grow to a capacity of `length` if `count` slots of it are within the limit: to twice the
        capacity where that is within it too.
        """
        room = (self.max_tokens - sum(self._prefixes.values())) // count // self.unit * self.unit
        capacity = max(self.capacity, min(self._expected[1], room)) or min(self.FIRST, room)
        if length > capacity:
            capacity = max(-(-length // self.unit) * self.unit, min(2 * capacity, room))
        if capacity > room:
            return False
        self.capacity = capacity
        self._hold(count)
        return True
