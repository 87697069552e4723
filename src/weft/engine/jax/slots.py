"""Sizes of the key-value caches of one network, and the reservation of their slots."""

from __future__ import annotations

from typing import Any

from weft.engine.generation.scheduler import GenerationBudget
from weft.engine.jax.network import round_up
from weft.engine.jax.packing import MAX_WASTE

MIN_SLOTS = 8  # fewest slots of a cache on each device
MIN_CAPACITY = 64  # fewest tokens for which a slot has room


class CacheSizes:
    """Sizes of caches for which functions were compiled, as (number of slots, tokens per slot).

    `longest` is the number of tokens of the longest sequence of the run, or None if it is not
    known. The number of slots is a multiple of `multiple`.
    """

    def __init__(self, longest: int | None, multiple: int) -> None:
        self._known: set[tuple[int, int]] = set()
        self._longest = longest or 0
        self._multiple = multiple

    def choose(self, slots: int, capacity: int, max_tokens: int) -> tuple[int, int]:
        """Return the size of a cache for `slots` sequences of up to `capacity` tokens.

        A known size is used if its slots have room for `capacity` tokens and it has at least a
        quarter of the slots. Otherwise, a new size is chosen, with room for the longest sequence of
        the run in each slot. The cache has at most `max_tokens` tokens, unless the smallest
        possible cache has more.
        """
        # Use a known size if there is a suitable one.
        suitable = []
        for size in self._known:
            has_room = size[1] >= capacity and MAX_WASTE * size[0] >= slots
            if has_room and size[0] * size[1] <= max_tokens:
                suitable.append(size)
        if suitable:
            with_all_slots = [size for size in suitable if size[0] >= slots]
            return min(with_all_slots) if with_all_slots else max(suitable)
        # Choose a new size, rounded up if memory allows it.
        multiple = self._multiple
        capacity = max(capacity, min(self._longest, max_tokens // multiple))
        num_multiples = min(-(-slots // multiple), max(1, max_tokens // capacity // multiple))
        new_size = (
            round_up(num_multiples, MIN_SLOTS) * multiple,
            round_up(capacity, MIN_CAPACITY),
        )
        if new_size[0] * new_size[1] > max_tokens:
            new_size = num_multiples * multiple, capacity
        self._known.add(new_size)
        return new_size


class SlotsOfOneSize:
    """Slots of a cache, each with room for any sequence; implements `BlockManager`.

    If there are fewer slots than sequences, some sequences wait for a free slot.
    """

    min_saved_tokens = None

    def __init__(self, budget: GenerationBudget, sizes: CacheSizes) -> None:
        self.slots = self.capacity = 0
        self._budget = budget
        self._sizes = sizes
        self._expected = (0, 0)  # number of sequences, and tokens of the longest one
        self._used: set[Any] = set()

    def expect(self, count: int, longest: int) -> None:
        self._expected = min(count, self._budget.max_sequences), longest

    def admit(self, key: Any, length: int) -> bool:
        slots, capacity = self._sizes.choose(*self._expected, self._budget.max_tokens)
        self.slots = max(self.slots, slots)
        self.capacity = max(self.capacity, capacity)
        if len(self._used) >= self.slots:
            return False
        self._used.add(key)
        return True

    def admit_prefix(self, key: Any, length: int) -> bool:
        raise AssertionError("prefixes are not shared")

    def start(self, key: Any) -> None:
        """Do nothing, because the slot has room for the whole sequence."""

    def advance(self) -> bool:
        return True

    def release(self, key: Any) -> None:
        self._used.discard(key)
