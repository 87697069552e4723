"""Common prefixes of token ids and texts."""

from __future__ import annotations

from collections.abc import Sequence


def count_common_prefix(*sequences: Sequence[int]) -> int:
    """Return the number of leading values that all sequences have in common."""
    shared = 0
    for column in zip(*sequences, strict=False):
        if any(value != column[0] for value in column):
            break
        shared += 1
    return shared


def count_common_start(one: str, other: str) -> int:
    """Return the number of leading characters that two texts have in common."""
    low = 0
    high = min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def count_common_end(one: str, other: str) -> int:
    """Return the number of trailing characters that two texts have in common."""
    return count_common_start(one[::-1], other[::-1])
