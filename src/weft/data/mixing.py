"""Which short samples of an epoch come in pairs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Index = npt.NDArray[np.int64]


def pair_short(
    costs: Index, below: int, probability: float, draw: np.random.Generator
) -> tuple[Index, Index]:
    """(order, bounds): the samples in their new order, and where each single one or pair begins,
    its end included.

    Samples of fewer than `below` tokens are drawn with `probability`; each second one that is drawn
    joins the one before, at its own place. One that is left over stays alone, at the end.
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
    units += [[place] for place in waiting]
    order = np.asarray([place for unit in units for place in unit], dtype=np.int64)
    return order, np.cumsum([0, *map(len, units)]).astype(np.int64)
