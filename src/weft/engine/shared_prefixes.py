"""Which sequences of a micro-batch begin alike, and how much of that to compute once.

Pure: no torch.

Rows of one template or one system prompt begin with the same tokens, whatever ids they belong to.
Sorted by their tokens, those that begin alike stand together, and their common prefixes make a
tree. A prefix that is chosen is computed once and spares its tokens to each sequence that goes on
from it: those that no longer one is chosen for.
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
    """Sequences, by number, whose first `size` tokens are the same."""

    sequences: tuple[int, ...]
    size: int


@dataclass(eq=False)
class _Common:
    """Common prefix of `size` tokens of the sequences `start` to `end` in sorted order."""

    start: int
    end: int
    size: int
    longer: list[_Common]  # of some of these sequences
    # Sizes of what these and more have in common, the shortest first; the first stands for nothing.
    shorter: list[int] = field(default_factory=lambda: [0])
    # Whether to choose this where the longest chosen of `shorter` is the i-th, for each i; and
    # which one it is.
    worth: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    chosen: int = 0


def shared_prefixes(prompts: Sequence[Tokens], least: int) -> list[SharedPrefix]:
    """Return the prefixes that save most tokens in all.

    Each has at least `least` >= 1 tokens, and never the last token of a prompt.
    """
    order = sorted(range(len(prompts)), key=lambda i: prompts[i].tobytes())
    tree = _tree([_alike(prompts[a], prompts[b]) for a, b in pairwise(order)], least)
    for one in reversed(tree):
        for longer in one.longer:
            longer.shorter = [*one.shorter, one.size]
    # at most, by where it starts and then as in `worth`
    spared: dict[int, npt.NDArray[np.int64]] = {}
    for one in tree:
        alone = one.end - one.start - sum(longer.end - longer.start for longer in one.longer)
        below = alone * np.array([*one.shorter, one.size])
        for longer in one.longer:
            below += spared.pop(longer.start)
        one.worth = below[-1] - one.size > below[:-1]
        spared[one.start] = np.maximum(below[:-1], below[-1] - one.size)
    belongs = np.full(len(order), -1)
    for number, one in reversed([*enumerate(tree)]):
        if one.worth[one.chosen]:
            belongs[one.start : one.end] = number
        for longer in one.longer:
            longer.chosen = len(one.shorter) if one.worth[one.chosen] else one.chosen
    places = {number: np.flatnonzero(belongs == number) for number in set(belongs.tolist()) - {-1}}
    made = [
        SharedPrefix(tuple(sorted(order[at] for at in of)), tree[number].size)
        for number, of in places.items()
    ]
    return sorted(made, key=lambda prefix: prefix.sequences)


def _tree(common: Sequence[int], least: int) -> list[_Common]:
    """Return all common prefixes, given the lengths of those of neighbors.

    Longer prefixes of fewer sequences come before shorter ones of more.
    """
    made: list[_Common] = []
    # by the first and by the last place of each that lies in no other yet
    ends: dict[int, _Common] = {}
    for at in sorted(
        (at for at, size in enumerate(common) if size >= least), key=lambda at: -common[at]
    ):
        left = ends.pop(at, None)
        right = ends.pop(at + 1, None)
        if left is not None and left.size == common[at]:
            one = left
        else:
            one = _Common(
                at if left is None else left.start, at, common[at], [] if left is None else [left]
            )
            made.append(one)
        if right is not None:
            one.longer.append(right)
        one.end = at + 2 if right is None else right.end
        ends[one.start] = ends[one.end - 1] = one
    return made


def _alike(one: Tokens, other: Tokens) -> int:
    """Return the number of equal first tokens of two prompts, without the last token of either."""
    most = max(0, min(len(one), len(other)) - 1)
    differing = np.flatnonzero(one[:most] != other[:most])
    return int(differing[0]) if len(differing) else most
