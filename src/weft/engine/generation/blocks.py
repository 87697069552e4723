"""Which sequence holds which part of the key-value cache. Pure bookkeeping: no torch, no tensors.

The scheduler asks through `Blocks` and cannot tell what a block is. Here a block is a whole contiguous slot: all slots hold
equally many tokens and double together, and the slots in use are always 0 .. n - 1, so that a decode step reads them as one
view (gathering scattered parts costs several times a decode step on a CPU). Where that needs a copy, it is listed in `moves`.
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
    """Equal slots, doubled together: `capacity` tokens each, at most `max_slots` of them and `max_tokens` in all."""

    FIRST = 64  # tokens of a slot at first

    def __init__(self, max_slots: int, max_tokens: int) -> None:
        self.max_slots, self.max_tokens = max_slots, max_tokens
        self.capacity = 0
        self._keys: list[Key] = []
        self._slot: dict[Key, int] = {}
        self._moves: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._keys)

    def slot(self, key: Key) -> int:
        return self._slot[key]

    def admit(self, key: Key, length: int) -> bool:
        capacity = self._capacity_for(length)
        if len(self) >= self.max_slots or (len(self) + 1) * capacity > self.max_tokens:
            return False
        self.capacity = capacity
        self._slot[key] = len(self._keys)
        self._keys.append(key)
        return True

    def extend(self, key: Key, length: int) -> bool:
        capacity = self._capacity_for(length)
        if len(self) * capacity > self.max_tokens:
            return False
        self.capacity = capacity
        return True

    def release(self, key: Key) -> None:
        """The last slot's sequence moves into the freed one; `moves` says so."""
        slot, last = self._slot.pop(key), self._keys.pop()
        if last != key:
            self._keys[slot], self._slot[last] = last, slot
            self._moves.append((len(self._keys), slot))
        if not self._keys:
            self.capacity, self._moves = 0, []

    def moves(self) -> list[tuple[int, int]]:
        """Copies (from slot, to slot) to make, in this order, before the cache is used again. Asked for once."""
        moves, self._moves = self._moves, []
        return moves

    def _capacity_for(self, length: int) -> int:
        """The present capacity, doubled until it holds `length` tokens, but never past what one slot alone may have."""
        capacity = self.capacity or self.FIRST
        while capacity < length:
            capacity *= 2
        return max(length, self.capacity, min(capacity, self.max_tokens))
