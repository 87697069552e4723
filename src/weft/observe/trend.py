"""Statistics of noisy metrics: first, last and best value, and the significance of a change.

The value of one step depends on the rows in its batch. So the end of a curve is a mean over several
steps, the best value is the best such mean, and a change comes with the width of its noise.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from weft.observe.metrics import EVAL, format_number, get_direction, get_last_part

TENTH = 10  # the end of a curve is its last 1 / TENTH
EDGE = 5  # minimum steps of an end, in a curve of at least three times as many
LEAST = 8  # minimum values from which noise is estimated
ROUNDING = 1e-6  # relative; smaller noise is due to rounding
# Minimum blocks of a curve for comparing blocks, and the number of last blocks compared.
BLOCKS = 10
LATER = 6
# Lag-1 autocorrelation of a shorter curve: estimated from the residuals of its last part if the
# curve has at least ESTIMATED values, else ASSUMED.
ESTIMATED = 16
LATER_PART = 2 / 3
ASSUMED = 0.3
MOST_DEPENDENT = 0.9
SHARES = ("accuracy", "accuracies")  # evaluation metrics that are shares of the rows


@dataclass(frozen=True)
class MetricChange:
    """Change from the mean of the first steps to the mean of the last.

    `noise` is the half-width of the change's 95% interval; None if there are too few values to
    estimate it.
    """

    first: float
    last: float
    noise: float | None = None

    @property
    def delta(self) -> float:
        """Difference of the last and the first mean."""
        return self.last - self.first

    @property
    def is_within_noise(self) -> bool:
        """Return whether the 95% interval of the change includes 0."""
        return self.noise is not None and abs(self.delta) <= self.noise

    def format_text(self) -> str:
        """Format the change: `+0.0075, within noise`, `+0.21 ± 0.04`, or `+0.21` without noise."""
        signed = f"{'+' if self.delta >= 0 else '-'}{format_number(abs(self.delta))}"
        if self.noise is None or self.noise <= ROUNDING * max(abs(self.first), abs(self.last)):
            return signed
        if self.is_within_noise:
            return f"{signed}, within noise"
        return f"{signed} ± {format_noise(self.noise)}"


def format_noise(noise: float) -> str:
    """Format the width of a noise with two digits, since it is itself an estimate."""
    return format_number(float(f"{noise:.2g}"))


def count_last(count: int) -> int:
    """Return the number of last values, of `count`, that are averaged for the end of a curve."""
    return max(1, count // TENTH, min(EDGE, count // 3))


def count_first(count: int) -> int:
    """Return the number of first values, of `count`, that are averaged for the start of a curve.

    The number is small, since curves are steep at the start.
    """
    return max(1, min(EDGE, count // 3))


def compute_mean(values: Sequence[float]) -> float:
    """Return the mean of the values, which must not be empty."""
    return sum(values) / len(values)


def compute_end_mean(values: Sequence[float]) -> float:
    """Return the mean of the last values; `values` must not be empty."""
    return compute_mean(values[-count_last(len(values)) :])


def find_best(name: str, values: Sequence[float]) -> tuple[float, int]:
    """Return (the best mean of `count_last` neighbouring values, index of the last of them).

    `name` decides if higher or lower is better; higher if the metric has no direction.
    """
    width = count_last(len(values))
    total = sum(values[:width])
    means = [total / width]
    for place in range(width, len(values)):
        total += values[place] - values[place - width]
        means.append(total / width)
    chosen = min(means) if get_direction(name) < 0 else max(means)
    place = means.index(chosen)
    return compute_mean(values[place : place + width]), place + width - 1


def compute_change(
    values: Sequence[float], name: str = "", rows: float | None = None
) -> MetricChange:
    """Return the change of a metric over its steps; `values` must not be empty.

    If `name` and the number of evaluated `rows` are given, the noise is at least the sampling noise
    of so few rows, which repeated evaluations of the same rows do not reduce.
    """
    few = count_first(len(values))
    many = count_last(len(values))
    first = compute_mean(values[:few])
    last = compute_mean(values[-many:])
    ends = [compute_sampling_noise(name, value, rows or 0) for value in (first, last)]
    sampled = compute_difference_noise(ends)
    if len(values) < LEAST:
        return MetricChange(first, last, sampled)
    noise = _estimate_noise(values)
    estimated = max(noise.compute_for_means(few, many), noise.of_end * math.sqrt(1 + many / few))
    return MetricChange(first, last, max(estimated, sampled or 0.0))


def compute_end_noise(values: Sequence[float]) -> float | None:
    """Return the half-width of the 95% interval of `compute_end_mean`.

    None for fewer than `LEAST` values.     The steep beginning of the curve is left out.
    """
    if len(values) < LEAST:
        return None
    late = _estimate_noise(values[-max(LEAST, len(values) // 2) :])
    return max(late.compute_for_means(count_last(len(values))), _estimate_noise(values).of_end)


def compute_sampling_noise(name: str, value: float, rows: float) -> float | None:
    """Return the half-width of the 95% interval of an evaluated share: sqrt(p (1 - p) / n).

    None for metrics that are not shares of the `rows` evaluated. Adding two rows of either kind
    keeps the interval of 0 and 1 from being empty (Agresti and Coull 1998).
    """
    if (
        not name.startswith(EVAL)
        or get_last_part(name) not in SHARES
        or not 0 <= value <= 1
        or rows < 1
    ):
        return None
    share = (value * rows + 2) / (rows + 4)
    return 1.96 * math.sqrt(share * (1 - share) / (rows + 4))


def compute_difference_noise(noises: Sequence[float | None]) -> float | None:
    """Return the half-width for the difference of the two noisiest curves; None if one is unknown."""
    known = sorted(each for each in noises if each is not None)
    return math.hypot(*known[-2:]) if len(known) == len(noises) else None


@dataclass(frozen=True)
class CurveNoise:
    """Noise of a curve, as half-widths of 95% intervals.

    `single` is the noise of one value, `dependence` the correlation between the noise of one value
    and of the next. `of_end` is the noise of the end of a curve, including noise that lasts several
    steps; 0 if the curve is too short to compare blocks.
    """

    single: float
    dependence: float
    of_end: float

    def compute_for_means(self, *counts: int) -> float:
        """Return the half-width of a difference of means over `counts` values, or of one mean."""
        return self.single * math.sqrt(sum(map(self._compute_mean_variance, counts)))

    def _compute_mean_variance(self, count: int) -> float:
        """Return the variance of a mean of AR(1) noise, relative to the variance of one value."""
        return (
            1 + 2 * sum((1 - lag / count) * self.dependence**lag for lag in range(1, count))
        ) / count


def _estimate_noise(values: Sequence[float]) -> CurveNoise:
    """Estimate the noise of a curve.

    The variance of a single value is the mean of the squared third differences (a - 3 b + 3 c -
    d)^2 / 20, in which the trend of a smooth curve cancels (Gasser, Sroka and Jennen-Steinmetz
    1986). If the noise of neighbouring steps is correlated, third differences underestimate it. In
    a short curve this is corrected with the lag-1 autocorrelation. In a long curve, blocks of the
    length of an end are compared with the line through them, in the second half, where curves are
    less steep. Both use Student's t.
    """
    count = len(values)
    many = count_last(len(values))
    bent = []
    for a, b, c, d in zip(values, values[1:], values[2:], values[3:], strict=False):
        bent.append(a - 3 * b + 3 * c - d)
    variance = compute_mean([each * each for each in bent]) / 20
    freedom = max(1.0, (count - 3) * 2 // 5)  # fewer, since neighbouring differences overlap
    # A long curve: the scatter of blocks includes noise that lasts several steps.
    blocks = [compute_mean(values[at : at + many]) for at in range(count % many, count, many)]
    if many > 1 and len(blocks) >= BLOCKS:
        of_end = _approximate_student(LATER - 2) * math.sqrt(
            _compute_line_variance(blocks[-LATER:])
        )
        return CurveNoise(_approximate_student(freedom) * math.sqrt(variance), 0.0, of_end)
    # A short curve: correct the variance for noise correlated between neighbouring steps.
    r = ASSUMED
    if count >= ESTIMATED:
        r = _compute_autocorrelation(values[-int(count * LATER_PART) :])
        freedom = max(1.0, freedom * (1 - r) / (1 + r))  # effective number if correlated
    # Divide by the share of AR(1) noise that third differences retain.
    variance /= (20 - 30 * r + 12 * r**2 - 2 * r**3) / 20
    return CurveNoise(_approximate_student(freedom) * math.sqrt(variance), r, 0.0)


def _compute_autocorrelation(values: Sequence[float]) -> float:
    """Return the correlation of neighbouring values around a line, in [0, `MOST_DEPENDENT`].

    Fitting the line lowers the correlation by (2 + 4 r) / n, which is added back.
    """
    rest = _compute_residuals(values)
    spread = sum(each * each for each in rest)
    if spread == 0:
        return 0.0
    raw = sum(a * b for a, b in itertools.pairwise(rest)) / spread
    count = len(values)
    return min(MOST_DEPENDENT, max(0.0, (raw + 2 / count) / (1 - 4 / count)))


def _compute_line_variance(values: Sequence[float]) -> float:
    """Return the variance of values around the straight line that fits them best."""
    return sum(each * each for each in _compute_residuals(values)) / (len(values) - 2)


def _compute_residuals(values: Sequence[float]) -> list[float]:
    """Return the differences of the values from the straight line that fits them best."""
    count = len(values)
    middle = (count - 1) / 2
    level = compute_mean(values)
    slope = sum((x - middle) * y for x, y in enumerate(values)) / sum(
        (x - middle) ** 2 for x in range(count)
    )
    return [y - level - slope * (x - middle) for x, y in enumerate(values)]


def _approximate_student(freedom: float) -> float:
    """Approximate the 97.5% point of Student's t, to 1% for at least 3 degrees of freedom.

    Source: Cornish-Fisher expansion.
    """
    return 1.96 + 2.372 / freedom + 2.823 / freedom**2 + 2.556 / freedom**3
