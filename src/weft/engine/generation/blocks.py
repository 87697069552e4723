"""How much key-value memory the sequences take. Pure accounting: no torch, no tensors.

The scheduler asks through `Blocks` and cannot tell what a block is. `Slots` counts as `models/kv_cache.py` stores: a block is
one whole contiguous slot, and all slots grow together by doubling (gathering scattered parts costs several times a decode
step on a CPU).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

Key = Hashable


class Blocks(Protocol):
    """Room for the keys and values of sequences, by token count."""

    def admit(self, key: Key, length: int) -> bool:
        """Give a new sequence room for `length` tokens; False, and nothing changes, where there is none."""
        ...

    def extend(self, key: Key, length: int) -> bool:
        """Make a sequence's room hold `length` tokens; False, and nothing changes, where it cannot."""
        ...

    def release(self, key: Key) -> None:
        """Take a sequence's room back."""
        ...


class Slots:
    """Equal slots of `capacity` tokens each: at most `max_slots` of them, and `max_tokens` tokens in all."""

    FIRST = 64  # tokens of a slot at first

    def __init__(self, max_slots: int, max_tokens: int) -> None:
        self.max_slots, self.max_tokens = max_slots, max_tokens
        self.capacity = 0
        self._held: set[Key] = set()

    def __len__(self) -> int:
        return len(self._held)

    def admit(self, key: Key, length: int) -> bool:
        if len(self) == self.max_slots or not self._fit(len(self) + 1, length):
            return False
        self._held.add(key)
        return True

    def extend(self, key: Key, length: int) -> bool:
        assert key in self._held
        return self._fit(len(self), length)

    def release(self, key: Key) -> None:
        self._held.remove(key)
        if not self._held:
            self.capacity = 0

    def _fit(self, count: int, length: int) -> bool:
        """Grow to a capacity of `length` if `count` slots of it are within the limit; one slot alone may fill the limit."""
        capacity = self.capacity or min(self.FIRST, self.max_tokens)
        if length > capacity:
            capacity = max(length, min(2 * capacity, self.max_tokens))
        if count * capacity > self.max_tokens:
            return False
        self.capacity = capacity
        return True
