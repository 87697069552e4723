"""Sizes of the key-value caches of one network, and the reservation of their slots."""

from __future__ import annotations

from typing import Any

from weft.engine.generation.scheduler import GenerationBudget
from weft.engine.jax.network import round_up
from weft.engine.jax.packing import MOST_WASTE

LEAST_SLOTS = 8  # of a cache, on each device
LEAST_CAPACITY = 64  # tokens of a slot


class CacheSizes:
    """Sizes of caches for which functions were compiled: slots, and tokens of each.

    `longest` is the number of tokens of the longest sequence of the run, or None if it is not
    known. The number of slots is a multiple of `multiple`.
    """

    def __init__(self, longest: int | None, multiple: int) -> None:
        self._known: set[tuple[int, int]] = set()
        self._longest = longest or 0
        self._multiple = multiple

    def choose(self, slots: int, capacity: int, most_tokens: int) -> tuple[int, int]:
        """Return the numbers of slots and of tokens in each for a cache.

        `slots` are wanted, and `capacity` tokens are needed in each. Known sizes are taken if they
        hold the longest sequence and a quarter of the wanted slots. Otherwise, slots have room for
        the longest sequence of the run. No cache has more than `most_tokens` tokens, but if the
        smallest one does.
        """
        fitting = []
        for sizes in self._known:
            holds = sizes[1] >= capacity and MOST_WASTE * sizes[0] >= slots
            if holds and sizes[0] * sizes[1] <= most_tokens:
                fitting.append(sizes)
        if fitting:
            enough = [sizes for sizes in fitting if sizes[0] >= slots]
            return min(enough) if enough else max(fitting)
        multiple = self._multiple
        capacity = max(capacity, min(self._longest, most_tokens // multiple))
        wanted = min(-(-slots // multiple), max(1, most_tokens // capacity // multiple))
        sizes = round_up(wanted, LEAST_SLOTS) * multiple, round_up(capacity, LEAST_CAPACITY)
        if sizes[0] * sizes[1] > most_tokens:
            sizes = wanted * multiple, capacity
        self._known.add(sizes)
        return sizes


class SlotsOfOneSize:
    """Slots of a cache, each with room for any sequence; implements `BlockManager`.

    If there are fewer slots than sequences, some wait.
    """

    min_saved_tokens = None

    def __init__(self, budget: GenerationBudget, sizes: CacheSizes) -> None:
        self.slots = self.capacity = 0
        self._budget = budget
        self._sizes = sizes
        self._expected = (0, 0)  # sequences, and tokens of the longest
        self._used: set[Any] = set()

    def expect(self, count: int, longest: int) -> None:
        self._expected = min(count, self._budget.max_sequences), longest

    def admit(self, key: Any, length: int) -> bool:
        slots, capacity = self._sizes.choose(*self._expected, self._budget.max_tokens)
        self.slots, self.capacity = max(self.slots, slots), max(self.capacity, capacity)
        if len(self._used) >= self.slots:
            return False
        self._used.add(key)
        return True

    def admit_prefix(self, key: Any, length: int) -> bool:
        raise AssertionError("prefixes are not shared")

    def start(self, key: Any) -> None:
        """Do nothing: the slot has room for the whole sequence."""

    def advance(self) -> bool:
        return True

    def release(self, key: Any) -> None:
        self._used.discard(key)
