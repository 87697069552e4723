"""A noisy metric in a few numbers: where it began and where it stands, the best it held, and
whether it changed at all.

One step's value depends on which rows happened to be in its batch. So an end of a curve is a mean
over several steps, the best value is the best such mean, and a change is given with the width of
its noise.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from weft.observe.metrics import EVAL, direction, last_part, number

TENTH = 10  # the end of a curve is its last 1 / TENTH
EDGE = 5  # steps that an end has at least, where there are three times as many
LEAST = 8  # values from which noise can be told from change
ROUNDING = 1e-6  # relative: below it the noise is that of arithmetic
# ends that a curve must have to be compared as blocks, and those that are compared
BLOCKS = 10
LATER = 6
# Steps of a shorter curve depend on each other as much as the residuals of its later part do, where
# it has so many values; else as much as is assumed.
ESTIMATED = 16
LATER_PART = 2 / 3
ASSUMED = 0.3
MOST_DEPENDENT = 0.9
SHARES = ("accuracy", "accuracies")  # evaluations whose values are shares of the rows


@dataclass(frozen=True)
class Change:
    """The change from the mean of the first steps to the mean of the last.

    `noise` is the half-width of the change's 95% interval; None where there are too few values to
    estimate it.
    """

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
        """The change for people: `+0.0075, within noise`, `+0.21 ± 0.04`; without an estimate of
        the noise `+0.21`.
        """
        signed = f"{'+' if self.delta >= 0 else '-'}{number(abs(self.delta))}"
        if self.noise is None or self.noise <= ROUNDING * max(abs(self.first), abs(self.last)):
            return signed
        if self.within_noise:
            return f"{signed}, within noise"
        return f"{signed} ± {rough(self.noise)}"


def rough(noise: float) -> str:
    """The width of a noise, which is itself an estimate, with two digits."""
    return number(float(f"{noise:.2g}"))


def num_last(count: int) -> int:
    """Number of values that the end of a curve of `count` values is a mean of."""
    return max(1, count // TENTH, min(EDGE, count // 3))


def num_first(count: int) -> int:
    """Number of values that the beginning of a curve of `count` values is a mean of: few, since
    curves are steep there.
    """
    return max(1, min(EDGE, count // 3))


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def end(values: Sequence[float]) -> float:
    """The mean of the last values, of one or more."""
    return mean(values[-num_last(len(values)) :])


def best(name: str, values: Sequence[float]) -> tuple[float, int]:
    """(the best mean over as many neighbouring values as `end` takes, the index of the last of
    them). `name` tells whether more or less is better; more, where it doesn't.
    """
    width = num_last(len(values))
    total = sum(values[:width])
    means = [total / width]
    for place in range(width, len(values)):
        total += values[place] - values[place - width]
        means.append(total / width)
    chosen = min(means) if direction(name) < 0 else max(means)
    place = means.index(chosen)
    return mean(values[place : place + width]), place + width - 1


def change(values: Sequence[float], name: str = "", rows: float | None = None) -> Change:
    """The change of a metric over its steps, one value or more.

    With its name and the number of `rows` that it is evaluated on, the noise is at least that of
    drawing so few rows, which more evaluations of the same ones do not make less.
    """
    few = num_first(len(values))
    many = num_last(len(values))
    first = mean(values[:few])
    last = mean(values[-many:])
    ends = [sampling_noise(name, value, rows or 0) for value in (first, last)]
    sampled = difference_noise(ends)
    if len(values) < LEAST:
        return Change(first, last, sampled)
    noise = _noise(values)
    estimated = max(noise.of_means(few, many), noise.of_end * math.sqrt(1 + many / few))
    return Change(first, last, max(estimated, sampled or 0.0))


def end_noise(values: Sequence[float]) -> float | None:
    """The half-width of the 95% interval of `end`; None where there are too few values to estimate
    it. The steep beginning of the curve is left out.
    """
    if len(values) < LEAST:
        return None
    late = _noise(values[-max(LEAST, len(values) // 2) :])
    return max(late.of_means(num_last(len(values))), _noise(values).of_end)


def sampling_noise(name: str, value: float, rows: float) -> float | None:
    """The half-width of the 95% interval of an evaluation that draws `rows` rows: of a share,
    sqrt(p (1 - p) / n).

    None for metrics that are no shares. Two rows more of either kind keep the interval of 0 and 1
    open (Agresti and Coull 1998).
    """
    if (
        not name.startswith(EVAL)
        or last_part(name) not in SHARES
        or not 0 <= value <= 1
        or rows < 1
    ):
        return None
    share = (value * rows + 2) / (rows + 4)
    return 1.96 * math.sqrt(share * (1 - share) / (rows + 4))


def difference_noise(noises: Sequence[float | None]) -> float | None:
    """The half-width for the difference of the two noisiest of several values; None where that of
    one is not known.
    """
    known = sorted(each for each in noises if each is not None)
    return math.hypot(*known[-2:]) if len(known) == len(noises) else None


@dataclass(frozen=True)
class Noise:
    """Half-widths of 95% intervals: `single` of one value, whose noise is correlated with that of
    the next by `dependence`, and `of_end` of the end of a curve, for noise that lasts for several
    steps (0 where a curve is too short to compare blocks).
    """

    single: float
    dependence: float
    of_end: float

    def of_means(self, *counts: int) -> float:
        """The half-width of a difference of means over so many neighbouring values, or of one such
        mean.
        """
        return self.single * math.sqrt(sum(map(self._of_mean, counts)))

    def _of_mean(self, count: int) -> float:
        """Variance of a mean of AR(1) noise, in variances of a value."""
        return (
            1 + 2 * sum((1 - lag / count) * self.dependence**lag for lag in range(1, count))
        ) / count


def _noise(values: Sequence[float]) -> Noise:
    """Estimate the noise of a curve.

    That of a single value comes from third differences, (a - 3 b + 3 c - d)^2 / 20 in the mean, in
    which the trend of a smooth curve cancels (Gasser, Sroka and Jennen-Steinmetz 1986). Of noise in
    which steps depend on each other they hold less; in a short curve the difference is made up for
    by the lag-1 autocorrelation. In a long one, blocks of the length of an end are compared with
    the line through them, in the second half, where curves are less steep. Both take Student's t.
    """
    count = len(values)
    many = num_last(len(values))
    bent = [
        a - 3 * b + 3 * c - d
        for a, b, c, d in zip(values, values[1:], values[2:], values[3:], strict=False)
    ]
    variance = mean([each * each for each in bent]) / 20
    freedom = max(1.0, (count - 3) * 2 // 5)  # neighbouring differences share values
    blocks = [mean(values[at : at + many]) for at in range(count % many, count, many)]
    if many > 1 and len(blocks) >= BLOCKS:
        of_end = _student(LATER - 2) * math.sqrt(_around_line(blocks[-LATER:]))
        return Noise(_student(freedom) * math.sqrt(variance), 0.0, of_end)
    r = ASSUMED
    if count >= ESTIMATED:
        r = _autocorrelation(values[-int(count * LATER_PART) :])
        freedom = max(1.0, freedom * (1 - r) / (1 + r))  # independent values are as many fewer
    # the share of AR(1) noise that third differences hold
    variance /= (20 - 30 * r + 12 * r**2 - 2 * r**3) / 20
    return Noise(_student(freedom) * math.sqrt(variance), r, 0.0)


def _autocorrelation(values: Sequence[float]) -> float:
    """Return the correlation of neighbouring values around a straight line, 0 to `MOST_DEPENDENT`.

    The line takes up a part of it, (2 + 4 r) / n, which is made up for.
    """
    rest = _residuals(values)
    spread = sum(each * each for each in rest)
    if spread == 0:
        return 0.0
    raw = sum(a * b for a, b in itertools.pairwise(rest)) / spread
    count = len(values)
    return min(MOST_DEPENDENT, max(0.0, (raw + 2 / count) / (1 - 4 / count)))


def _around_line(values: Sequence[float]) -> float:
    """Variance of values around the straight line that fits them best."""
    return sum(each * each for each in _residuals(values)) / (len(values) - 2)


def _residuals(values: Sequence[float]) -> list[float]:
    """Return the differences of the values from the straight line that fits them best."""
    count = len(values)
    middle = (count - 1) / 2
    level = mean(values)
    slope = sum((x - middle) * y for x, y in enumerate(values)) / sum(
        (x - middle) ** 2 for x in range(count)
    )
    return [y - level - slope * (x - middle) for x, y in enumerate(values)]


def _student(freedom: float) -> float:
    """The 97.5% point of Student's t, to 1% from 3 degrees of freedom on (Cornish-Fisher)."""
    return 1.96 + 2.372 / freedom + 2.823 / freedom**2 + 2.556 / freedom**3
