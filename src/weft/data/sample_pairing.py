"""Random pairing of short samples within an epoch.

A pair counts as one id of a batch, so that batches of short samples have more tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Index = npt.NDArray[np.int64]


def pair_short(
    costs: Index, below: int, probability: float, draw: np.random.Generator
) -> tuple[Index, Index]:
    """Pair short samples at random by putting them next to each other in a new order.

    Each sample of fewer than `below` tokens is selected with `probability`. The first selected
    sample is paired with the second, the third with the fourth, and so on. A pair takes the
    position of its second sample. A selected sample without a partner is put at the end.

    Returns (order of the samples, boundaries). In the new order, the samples from boundary i up to,
    but not including, boundary i + 1 are a pair or a single sample.
    """
    drawn = (draw.random(len(costs)) < probability) & (costs < below)
    units: list[list[int]] = []
    waiting: list[int] = []
    for place, short in enumerate(drawn.tolist()):
        if not short:
            units.append([place])
        elif waiting:
            units.append([waiting.pop(), place])
        else:
            waiting.append(place)
    for place in waiting:
        units.append([place])
    order = np.asarray([place for unit in units for place in unit], dtype=np.int64)
    return order, np.cumsum([0, *map(len, units)]).astype(np.int64)
