"""Which sequences begin alike, and how much of it to store once. Pure: no torch, no tensors.

A prompt is known by a chain of hashes, one every `STRIDE` tokens and one at its last token but one,
so finding who shares what costs a few look-ups a sequence. A shared prefix never holds a sequence's
last token: that one is each sequence's own, and its pass gives the first draw.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

STRIDE = 64  # also the shortest prefix: its own pass would have too few tokens to be worth it
PrefixLevel = tuple[int, int]  # (tokens, hash of the chain up to there)


@dataclass(eq=False)
class PromptPrefix:
    """First tokens shared by several sequences.

    `is_ready` is set once their keys and values are computed; `num_users` is the number of running
    sequences that begin with them.
    """

    tokens: tuple[int, ...]
    chain_hash: int  # hash of the chain
    is_ready: bool = False
    num_users: int = 0


@dataclass
class PrefixIndex:
    """Number of current sequences that begin with each chain of tokens."""

    # minimum tokens that a new prefix must save: its length times the sequences after the first
    min_saved_tokens: int
    counts: Counter[int] = field(default_factory=Counter)

    def list_levels(self, prompt: Sequence[int]) -> tuple[PrefixLevel, ...]:
        """Return the prefixes of a prompt that can be shared, shortest first."""
        last = len(prompt) - 1
        ends = [*range(STRIDE, last, STRIDE), last]
        levels = []
        mark = 0
        start = 0
        for end in ends if last >= STRIDE else []:
            mark = hash((mark, tuple(prompt[start:end])))
            start = end
            levels.append((end, mark))
        return tuple(levels)

    def add(self, levels: Collection[PrefixLevel]) -> None:
        self.counts.update(mark for _, mark in levels)

    def remove(self, levels: Collection[PrefixLevel]) -> None:
        for _, mark in levels:
            self.counts[mark] -= 1
            if not self.counts[mark]:
                del self.counts[mark]

    def find_best(
        self, levels: Collection[PrefixLevel], stored: Mapping[int, PromptPrefix]
    ) -> PrefixLevel | None:
        """Return the prefix that saves a sequence the most tokens, or None if none saves enough.

        `stored` has the prefixes that are already in the KV cache.
        """

        def count_saved_tokens(level: PrefixLevel) -> float:
            length, mark = level
            count = self.counts[mark]
            return float(length) if mark in stored else length * (count - 1) / count

        worth = [
            (n, mark)
            for n, mark in levels
            if mark in stored or n * (self.counts[mark] - 1) >= self.min_saved_tokens
        ]
        return max(worth, key=count_saved_tokens, default=None)
