"""Division of a batch's items into contiguous parts by their token counts.

The module loads no torch: estimates of a step divide batches as a run does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from weft.errors import ConfigError

Costs = Sequence[int] | npt.NDArray[np.integer]


def check_fits(costs: Costs, budget: int, field: str) -> None:
    """Raise `ConfigError` naming the option `field` if one item costs more than `budget` tokens."""
    longest = int(np.max(np.asarray(costs), initial=0))
    if longest > budget:
        raise ConfigError(
            f"{field}={budget}: a batch must have room for the longest sequence, which has "
            f"{longest} tokens; set {field} to {longest} or more, or shorten the rows with "
            f"dataset.max_seqlen"
        )


def split_evenly(costs: Costs, parts: int) -> list[int]:
    """Split items into contiguous non-empty parts, minimizing the largest total cost of a part.

    `costs` are the token counts of the items. Returns `parts` + 1 bounds: part i consists of the
    items from bound i up to, but not including, bound i + 1. Among the optimal splits, the one with
    the most even parts is chosen. Raises `ConfigError` if there are fewer items than parts.
    """
    count = len(costs)
    if not 1 <= parts <= count:
        raise ConfigError(
            f"{count} ids do not split into {parts} parts; every part holds at least one id"
        )
    # Find the smallest possible largest sum, then place each bound near its share of the total.
    sums = np.concatenate([[0], np.cumsum(np.asarray(costs, dtype=np.int64))])
    largest = _minimize_largest(sums, parts)
    bounds = [0]
    earliest = _find_earliest_bounds(sums, parts, largest)
    for index in range(1, parts):
        start = bounds[-1]
        latest = int(np.searchsorted(sums, sums[start] + largest, side="right")) - 1
        low = max(earliest[index], start + 1)
        high = min(latest, count - (parts - index))
        ideal = sums[-1] * index / parts
        bound = int(np.searchsorted(sums, ideal))
        if bound > 0 and bound <= count and ideal - sums[bound - 1] <= sums[bound] - ideal:
            bound -= 1
        bounds.append(min(max(bound, low), high))
    return [*bounds, count]


def split_by_budget(
    costs: Costs, budget: int, field: str = "max_tokens_per_microbatch"
) -> list[int]:
    """Split items into the fewest contiguous parts that cost at most `budget` tokens each.

    Returns the bounds of the parts, like `split_evenly`. The costs of the parts are as even as
    possible. Raises `ConfigError` naming the option `field` if a single item costs more than
    `budget`.
    """
    check_fits(costs, budget, field)
    if len(costs) == 0:
        return [0]
    sums = np.concatenate([[0], np.cumsum(np.asarray(costs, dtype=np.int64))])
    return split_evenly(costs, _count_parts(sums, budget, len(costs)))


def _count_parts(sums: npt.NDArray[np.int64], largest: int, at_most: int) -> int:
    """Return the number of contiguous parts needed if no part may cost more than `largest`.

    `sums` are the cumulative costs, beginning with 0. Stops counting above `at_most`.
    """
    start = 0
    parts = 0
    count = len(sums) - 1
    while start < count and parts <= at_most:
        start = int(np.searchsorted(sums, sums[start] + largest, side="right")) - 1
        parts += 1
    return parts


def _minimize_largest(sums: npt.NDArray[np.int64], parts: int) -> int:
    low = max(int(np.max(np.diff(sums))), -(-int(sums[-1]) // parts))
    high = int(sums[-1])
    while low < high:
        middle = (low + high) // 2
        if _count_parts(sums, middle, parts) <= parts:
            high = middle
        else:
            low = middle + 1
    return low


def _find_earliest_bounds(sums: npt.NDArray[np.int64], parts: int, largest: int) -> list[int]:
    """Return the earliest index at which each part can begin if no part costs more than `largest`.

    `parts` is the number of parts, and `sums` are the cumulative costs of the items, beginning with
    0. The number of items is appended to the result as the end of the last part.
    """
    bounds = [0] * (parts + 1)
    bounds[parts] = len(sums) - 1
    for index in range(parts - 1, 0, -1):
        bounds[index] = int(np.searchsorted(sums, sums[bounds[index + 1]] - largest, side="left"))
    return bounds
