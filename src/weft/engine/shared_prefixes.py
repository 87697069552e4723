"""Choice of the common prefixes in a micro-batch that are computed only once.

Sequences with the same template or system prompt begin with the same tokens, whatever ids they
belong to. If the sequences are sorted by their tokens, those with a common prefix are adjacent, and
the common prefixes form a tree. A chosen prefix is computed once, so that its tokens need not be
computed again in the sequences that continue it. Each sequence continues the longest chosen prefix
that it begins with. The module does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.integer]


@dataclass(frozen=True)
class SharedPrefix:
    """Prefix that several sequences have in common.

    Attributes:
        sequences: Indices of these sequences.
        size: Length of the prefix in tokens.
    """

    sequences: tuple[int, ...]
    size: int


@dataclass(eq=False)
class _CommonPrefix:
    """Common prefix of `size` tokens, shared by sequences `start` to `end` - 1 in sorted order."""

    start: int
    end: int
    size: int
    longer: list[_CommonPrefix]  # longer common prefixes of some of these sequences
    # sizes of the prefixes of this one in the tree, in ascending order; 0 is the empty prefix
    shorter: list[int] = field(default_factory=lambda: [0])
    # worth[i] is True if choosing this prefix saves tokens when shorter[i] is the longest chosen
    # prefix of it; `chosen` is the index i that was decided
    worth: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    chosen: int = 0


def find_shared_prefixes(prompts: Sequence[Tokens], least: int) -> list[SharedPrefix]:
    """Return the prefixes that together save the most tokens.

    Each prefix has at least `least` tokens, and never contains the last token of a prompt. `least`
    must be positive.
    """
    order = sorted(range(len(prompts)), key=lambda i: prompts[i].tobytes())
    tree = _build_prefix_tree(
        [_count_common_tokens(prompts[a], prompts[b]) for a, b in pairwise(order)], least
    )
    for one in reversed(tree):
        for longer in one.longer:
            longer.shorter = [*one.shorter, one.size]
    # From the longest prefixes to the shortest: most tokens that can be saved, by the start of a
    # prefix, then indexed like `worth`.
    spared: dict[int, npt.NDArray[np.int64]] = {}
    for one in tree:
        alone = one.end - one.start - sum(longer.end - longer.start for longer in one.longer)
        below = alone * np.array([*one.shorter, one.size])
        for longer in one.longer:
            below += spared.pop(longer.start)
        one.worth = below[-1] - one.size > below[:-1]
        spared[one.start] = np.maximum(below[:-1], below[-1] - one.size)
    # From the shortest to the longest: choose prefixes, and assign them to sequences.
    belongs = np.full(len(order), -1)
    for number, one in reversed([*enumerate(tree)]):
        if one.worth[one.chosen]:
            belongs[one.start : one.end] = number
        for longer in one.longer:
            longer.chosen = len(one.shorter) if one.worth[one.chosen] else one.chosen
    places = {number: np.flatnonzero(belongs == number) for number in set(belongs.tolist()) - {-1}}
    prefixes = []
    for number, of in places.items():
        prefixes.append(SharedPrefix(tuple(sorted(order[at] for at in of)), tree[number].size))
    return sorted(prefixes, key=lambda prefix: prefix.sequences)


def _build_prefix_tree(common: Sequence[int], least: int) -> list[_CommonPrefix]:
    """Return all prefixes of at least `least` tokens that consecutive sequences share.

    `common[i]` is the length of the prefix shared by the sequences i and i + 1 in sorted order.
    Longer prefixes of fewer sequences come before shorter prefixes of more sequences.
    """
    prefixes: list[_CommonPrefix] = []
    # prefixes that are not yet in a larger one, by their first and by their last sequence
    ends: dict[int, _CommonPrefix] = {}
    for at in sorted(
        (at for at, size in enumerate(common) if size >= least), key=lambda at: -common[at]
    ):
        left = ends.pop(at, None)
        right = ends.pop(at + 1, None)
        if left is not None and left.size == common[at]:
            one = left
        else:
            one = _CommonPrefix(
                at if left is None else left.start, at, common[at], [] if left is None else [left]
            )
            prefixes.append(one)
        if right is not None:
            one.longer.append(right)
        one.end = at + 2 if right is None else right.end
        ends[one.start] = ends[one.end - 1] = one
    return prefixes


def _count_common_tokens(one: Tokens, other: Tokens) -> int:
    """Return the length of the longest common prefix that is shorter than both prompts."""
    most = max(0, min(len(one), len(other)) - 1)
    differing = np.flatnonzero(one[:most] != other[:most])
    return int(differing[0]) if len(differing) else most
