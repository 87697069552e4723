"""A noisy metric in a few numbers: where it began and where it stands, the best it held, and whether it changed at all.

One step's value depends on which rows happened to be in its batch. So an end of a curve is a mean over several steps, the best
value is the best such mean, and a change is given with the width of its noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from weft.observe.metrics import direction, number

TENTH = 10  # the end of a curve is its last 1 / TENTH
EDGE = 5  # steps that an end has at least, where there are three times as many
LEAST = 8  # values from which noise can be told from change
ROUNDING = 1e-6  # relative: below it the noise is that of arithmetic
BLOCKS, LATER = (
    10,
    6,
)  # ends that a curve must have to see noise that lasts for several steps, and those that are compared


@dataclass(frozen=True)
class Change:
    """The change from the mean of the first steps to the mean of the last.

    `noise` is the half-width of the change's 95% interval; None where there are too few values to estimate it."""

    first: float
    last: float
    noise: float | None = None

    @property
    def delta(self) -> float:
        return self.last - self.first

    @property
    def within_noise(self) -> bool:
        """Return whether the change may well be none: its interval holds 0."""
        return self.noise is not None and abs(self.delta) <= self.noise

    def text(self) -> str:
        """The change for people: `+0.0075, within noise`, `+0.21 ± 0.04`; without an estimate of the noise `+0.21`."""
        signed = f"{'+' if self.delta >= 0 else '-'}{number(abs(self.delta))}"
        if self.noise is None or self.noise <= ROUNDING * max(abs(self.first), abs(self.last)):
            return signed
        return f"{signed}, within noise" if self.within_noise else f"{signed} ± {rough(self.noise)}"


def rough(noise: float) -> str:
    """The width of a noise, which is itself an estimate, with two digits."""
    return number(float(f"{noise:.2g}"))


def num_last(count: int) -> int:
    """Number of values that the end of a curve of `count` values is a mean of."""
    return max(1, count // TENTH, min(EDGE, count // 3))


def num_first(count: int) -> int:
    """Number of values that the beginning of a curve of `count` values is a mean of: few, since curves are steep there."""
    return max(1, min(EDGE, count // 3))


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def end(values: Sequence[float]) -> float:
    """The mean of the last values, of one or more."""
    return mean(values[-num_last(len(values)) :])


def best(name: str, values: Sequence[float]) -> tuple[float, int]:
    """(the best mean over as many neighbouring values as `end` takes, the index of the last of them). `name` tells whether
    more or less is better; more, where it doesn't."""
    width = num_last(len(values))
    total = sum(values[:width])
    means = [total / width]
    for place in range(width, len(values)):
        total += values[place] - values[place - width]
        means.append(total / width)
    chosen = min(means) if direction(name) < 0 else max(means)
    place = means.index(chosen)
    return mean(values[place : place + width]), place + width - 1


def change(values: Sequence[float]) -> Change:
    """The change of a metric over its steps, one value or more."""
    few, many = num_first(len(values)), num_last(len(values))
    first, last = mean(values[:few]), mean(values[-many:])
    if len(values) < LEAST:
        return Change(first, last)
    single, lasting = _half_widths(values)
    return Change(first, last, max(single * math.sqrt(1 / few + 1 / many), lasting * math.sqrt(1 + many / few)))


def end_noise(values: Sequence[float]) -> float | None:
    """The half-width of the 95% interval of `end`; None where there are too few values to estimate it. The steep beginning of
    the curve is left out."""
    if len(values) < LEAST:
        return None
    single, _ = _half_widths(values[-max(LEAST, len(values) // 2) :])
    _, lasting = _half_widths(values)
    return max(single / math.sqrt(num_last(len(values))), lasting)


def _half_widths(values: Sequence[float]) -> tuple[float, float]:
    """Half-widths of 95% intervals: of a single value, for noise that differs from step to step, and of the end of a curve, for
    noise that lasts for several steps (0 where the curve is too short to see it).

    The first comes from third differences, (a - 3 b + 3 c - d)^2 / 20 in the mean, in which the trend of a smooth curve cancels
    (Gasser, Sroka and Jennen-Steinmetz 1986). The second compares blocks of the length of an end with the line through them, in
    the second half of the curve, where curves are less steep. Both take Student's t.
    """
    count, many = len(values), num_last(len(values))
    bent = [a - 3 * b + 3 * c - d for a, b, c, d in zip(values, values[1:], values[2:], values[3:], strict=False)]
    freedom = max(1, (count - 3) * 2 // 5)  # neighbouring differences share values
    single = _student(freedom) * math.sqrt(mean([each * each for each in bent]) / 20)
    blocks = [mean(values[at : at + many]) for at in range(count % many, count, many)]
    if many == 1 or len(blocks) < BLOCKS:
        return single, 0.0
    return single, _student(LATER - 2) * math.sqrt(_around_line(blocks[-LATER:]))


def _around_line(values: Sequence[float]) -> float:
    """Variance of values around the straight line that fits them best."""
    count = len(values)
    middle, level = (count - 1) / 2, mean(values)
    slope = sum((x - middle) * y for x, y in enumerate(values)) / sum((x - middle) ** 2 for x in range(count))
    return sum((y - level - slope * (x - middle)) ** 2 for x, y in enumerate(values)) / (count - 2)


def _student(freedom: int) -> float:
    """The 97.5% point of Student's t, to 1% from 3 degrees of freedom on (Cornish-Fisher)."""
    return 1.96 + 2.372 / freedom + 2.823 / freedom**2 + 2.556 / freedom**3
