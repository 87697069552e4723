"""Index of prefixes that several prompts share, to choose those that are stored only once.

A prompt is identified by a chain of hashes, one every `STRIDE` tokens and one at its second-to-last
token, so a few look-ups per sequence find the prompts that share a prefix. A shared prefix never
contains a sequence's last token: every sequence computes its own last token, because its first new
token is sampled from the result. The module does not import torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

STRIDE = 64  # also the shortest prefix: its own pass would have too few tokens to be worth it
PrefixLevel = tuple[int, int]  # (tokens, hash of the chain up to there)


@dataclass(eq=False)
class PromptPrefix:
    """Prefix shared by several sequences.

    `is_ready` is set once the keys and values of its tokens are computed. `num_users` is the number
    of admitted sequences that begin with the prefix.
    """

    tokens: tuple[int, ...]
    chain_hash: int  # hash of the chain
    is_ready: bool = False
    num_users: int = 0


@dataclass
class PrefixIndex:
    """Index that counts, for each prefix of a prompt, how many current sequences begin with it."""

    # minimum tokens that a new prefix must save: its length times the sequences after the first
    min_saved_tokens: int
    counts: Counter[int] = field(default_factory=Counter)

    def list_levels(self, prompt: Sequence[int]) -> tuple[PrefixLevel, ...]:
        """Return (length, hash) of each prefix of a prompt that can be shared, shortest first."""
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

        `levels` are the prefixes of the sequence's prompt. `stored` contains the prefixes that are
        already in the KV cache, by hash.
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
