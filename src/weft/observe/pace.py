"""Progress of a run as text, and statistics of noisy metrics: whether a change is significant."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from weft.observe.metrics import (
    EVAL,
    ROWS,
    compute_rank,
    compute_tokens_per_second,
    find_evaluation,
    find_headline,
    find_title,
    format_duration,
    format_number,
    get_direction,
    get_last_part,
)

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
START_METRICS = 3  # evaluation metrics shown before the first step
SHARES = ("accuracy", "accuracies")  # evaluation metrics that are shares of the rows


@dataclass(frozen=True)
class MetricChange:
    """Change of a metric from the mean of its first steps to the mean of its last steps.

    `noise` is the half-width of the 95% confidence interval of the change. It is None if there are
    too few values to estimate it.
    """

    first: float
    last: float
    noise: float | None = None

    @property
    def delta(self) -> float:
        """Mean of the last steps minus mean of the first steps."""
        return self.last - self.first

    @property
    def is_within_noise(self) -> bool:
        """True if the 95% confidence interval of the change includes 0."""
        return self.noise is not None and abs(self.delta) <= self.noise

    def format_text(self) -> str:
        """Format the change, such as `+0.21 ± 0.04`.

        A change that is not significant is formatted as `+0.0075, within noise`, and a change with
        unknown noise as `+0.21`.
        """
        signed = f"{'+' if self.delta >= 0 else '-'}{format_number(abs(self.delta))}"
        if self.noise is None or self.noise <= ROUNDING * max(abs(self.first), abs(self.last)):
            return signed
        if self.is_within_noise:
            return f"{signed}, within noise"
        return f"{signed} ± {format_noise(self.noise)}"


def format_noise(noise: float) -> str:
    """Format the half-width of a confidence interval with two digits, since it is only an estimate."""
    return format_number(float(f"{noise:.2g}"))


def count_last(count: int) -> int:
    """Return the number of values to average at the end of a curve with `count` values."""
    return max(1, count // TENTH, min(EDGE, count // 3))


def count_first(count: int) -> int:
    """Return the number of values to average at the start of a curve of `count` values.

    The number is small, because curves are steep at the start.
    """
    return max(1, min(EDGE, count // 3))


def compute_mean(values: Sequence[float]) -> float:
    """Return the mean of the values, which must not be empty."""
    return sum(values) / len(values)


def compute_end_mean(values: Sequence[float]) -> float:
    """Return the mean of the values at the end of a curve; `values` must not be empty.

    `count_last` determines how many values are averaged.
    """
    return compute_mean(values[-count_last(len(values)) :])


def find_best(name: str, values: Sequence[float]) -> tuple[float, int]:
    """Return the best mean over a window of values, and the index of the window's last value.

    The window has `count_last(len(values))` values. The best mean is the lowest one if lower values
    of the metric `name` are better, and otherwise the highest.
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
    """Return the change of a metric between the beginning and the end of its curve.

    `values` are the values of the metric, in the order of the steps; there must be at least one.
    `name` is the metric's name, and `rows` is the number of rows on which the metric was evaluated.
    Both are needed only for a validation metric that is a proportion of these rows, such as an
    accuracy. The noise of such a metric is at least its sampling error, which depends on `rows`,
    because repeated evaluations of the same rows do not reduce this error.
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
    """Return the noise of the result of `compute_end_mean`, as the half-width of a 95% interval.

    Returns None for fewer than `LEAST` values. The steep beginning of the curve is not used.
    """
    if len(values) < LEAST:
        return None
    late = _estimate_noise(values[-max(LEAST, len(values) // 2) :])
    return max(late.compute_for_means(count_last(len(values))), _estimate_noise(values).of_end)


def compute_sampling_noise(name: str, value: float, rows: float) -> float | None:
    """Return the half-width of the 95% confidence interval of an evaluated proportion.

    `value` is the fraction of successes among `rows` evaluated rows. The half-width is 1.96 sqrt(p
    (1 - p) / n), where p is the fraction and n the number of rows after adding two successes and
    two failures. They keep the half-width above 0 if all rows or none are successes (Agresti and
    Coull 1998). Returns None for metrics that are not such proportions.
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
    """Return the noise of the difference between the two noisiest of several curves.

    This is an upper bound on the noise of the difference between any two of the curves. `noises`
    has the noise of each curve. All noises are half-widths of 95% confidence intervals. Returns
    None if the noise of any curve is unknown.
    """
    known = sorted(each for each in noises if each is not None)
    return math.hypot(*known[-2:]) if len(known) == len(noises) else None


@dataclass(frozen=True)
class CurveNoise:
    """Estimated noise of a curve.

    Attributes:
        single: half-width of the 95% confidence interval for a single value
        dependence: correlation between the noise of neighbouring values
        of_end: half-width of the 95% confidence interval for the mean at the curve's end, including
            noise that lasts for several steps; 0 if the curve is too short to estimate such noise
    """

    single: float
    dependence: float
    of_end: float

    def compute_for_means(self, *counts: int) -> float:
        """Return the half-width of the confidence interval for the mean of `counts[0]` values.

        With two counts, the half-width is for the difference between the mean of `counts[0]` values
        and the mean of `counts[1]` values.
        """
        return self.single * math.sqrt(sum(map(self._compute_mean_variance, counts)))

    def _compute_mean_variance(self, count: int) -> float:
        """Return the variance of the mean of `count` values, relative to that of a single value.

        The noise is assumed to be an AR(1) process.
        """
        return (
            1 + 2 * sum((1 - lag / count) * self.dependence**lag for lag in range(1, count))
        ) / count


def _estimate_noise(values: Sequence[float]) -> CurveNoise:
    """Estimate the noise of a curve.

    The variance of a single value is estimated from third differences: it is the mean of (a - 3 b +
    3 c - d)^2 / 20 over every four consecutive values a, b, c, d. The trend of a smooth curve
    cancels in these differences (Gasser, Sroka and Jennen-Steinmetz 1986). The estimate is too low
    if the noise of neighbouring steps is correlated. In a short curve, it is therefore corrected
    with the lag-1 autocorrelation.

    A long curve is divided into blocks, each as long as the curve's end (see `count_last`). The
    noise at the end is the scatter of the block means around the straight line that fits them best.
    Only the last `LATER` = 6 blocks are used, because a curve is steep at its start.

    The result has the half-widths of 95% confidence intervals. Each is a standard deviation
    multiplied by a quantile of Student's t distribution.
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
    """Return the lag-1 autocorrelation of the residuals of a linear fit, in [0, `MOST_DEPENDENT`].

    For n values, the fit makes the estimate of the correlation r too low by (2 + 4 r) / n on
    average. The result is corrected for this bias.
    """
    rest = _compute_residuals(values)
    spread = sum(each * each for each in rest)
    if spread == 0:
        return 0.0
    raw = sum(a * b for a, b in itertools.pairwise(rest)) / spread
    count = len(values)
    return min(MOST_DEPENDENT, max(0.0, (raw + 2 / count) / (1 - 4 / count)))


def _compute_line_variance(values: Sequence[float]) -> float:
    """Return the variance of the values around the straight line that fits them best."""
    return sum(each * each for each in _compute_residuals(values)) / (len(values) - 2)


def _compute_residuals(values: Sequence[float]) -> list[float]:
    """Return the differences between the values and the straight line that fits them best."""
    count = len(values)
    middle = (count - 1) / 2
    level = compute_mean(values)
    slope = sum((x - middle) * y for x, y in enumerate(values)) / sum(
        (x - middle) ** 2 for x in range(count)
    )
    return [y - level - slope * (x - middle) for x, y in enumerate(values)]


def _approximate_student(freedom: float) -> float:
    """Approximate the 97.5% quantile of Student's t distribution with `freedom` degrees of freedom.

    Uses a Cornish-Fisher expansion, which is accurate to 1% for at least 3 degrees of freedom.
    """
    return 1.96 + 2.372 / freedom + 2.823 / freedom**2 + 2.556 / freedom**3


RECENT = 50  # number of last steps from which the remaining time is estimated
BARS = "▁▂▃▄▅▆▇█"
BESIDE = (
    "kl",
    "kl_exact",
    "accuracy",
    "accuracies",
    "token_accuracy",
    "margin",
    "response_length",
)  # last parts of metrics shown next to the headline, most informative first


@dataclass
class RunPace:
    """Progress of a run and the values of its headline metric, for display as text.

    Durations refer to this process only, not to earlier processes of a resumed run. `clock` is a
    monotonic clock in seconds, such as `time.monotonic`.
    """

    clock: Callable[[], float] = time.monotonic
    total: int | None = None
    done: int = 0
    epoch: float = 0.0
    name: str | None = None  # the headline metric
    values: list[float] = field(default_factory=list)
    # metric `eval/...` over all sources -> its values
    evaluations: dict[str, list[float]] = field(default_factory=dict)
    latest: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.began = self.clock()
        self._last = self.began
        self._seconds: deque[float] = deque(maxlen=RECENT)
        self._since = 0  # number of steps done by earlier processes
        self._rows: float | None = None  # number of validation rows
        self._start: Mapping[str, float] = {}  # metrics before the first step
        self._whole = True  # `values` start at the first step of the run

    def expect(
        self, total: int | None, done: int, earlier: Sequence[Mapping[str, float]] = ()
    ) -> None:
        """Set the total number of steps (None if unknown), and the number of steps already done.

        `done` counts the steps that earlier processes of the run have completed, and `earlier` has
        the metric lines of these steps. Also starts the clock of the first step.
        """
        self.total, self.done, self._since = total, done, done
        self._whole = bool(earlier) or done == 0
        for line in earlier:
            self._record_values(line)
        self._last = self.clock()

    def record_step(self, numbers: Mapping[str, float]) -> None:
        """Record the finite metrics of one step."""
        now = self.clock()
        if numbers["step"] > 0:  # step 0 is the evaluation before the first step
            self._seconds.append(now - self._last)  # includes evaluation and saving between steps
        self._last = now
        self.done = int(numbers["step"])
        self.epoch = numbers.get("epoch", self.epoch)
        self.latest = numbers
        self._record_values(numbers)

    def _record_values(self, numbers: Mapping[str, float]) -> None:
        if numbers["step"] == 0:  # which of its metrics matters, the first step tells
            self._start = numbers
            return
        self.name = self.name or find_headline(numbers)
        evaluated = find_evaluation(self.name, self._start)
        if evaluated is not None:
            self.evaluations[evaluated] = [self._start[evaluated]]
        self._start = {}
        if self.name is not None and self.name in numbers:
            self.values.append(numbers[self.name])
        self._rows = numbers.get(ROWS, self._rows)
        evaluated = find_evaluation(self.name, numbers)
        if evaluated is not None:
            self.evaluations.setdefault(evaluated, []).append(numbers[evaluated])

    @property
    def elapsed(self) -> float:
        """Seconds since this process started the run."""
        return self.clock() - self.began

    @property
    def remaining(self) -> float | None:
        """Estimated seconds until the end, at the speed of the last steps; None if unknown."""
        if self.total is None or not self._seconds:
            return None
        return max(0, self.total - self.done) * sum(self._seconds) / len(self._seconds)

    @property
    def best(self) -> float | None:
        """Best value of the headline metric so far, as a mean over several steps; None if unknown."""
        if not self.values or self.name is None:
            return None
        return find_best(self.name, self.values)[0]

    def list_other_metrics(self, count: int = 3) -> list[tuple[str, float]]:
        """Return titles and latest values of up to `count` metrics besides the headline metric.

        The most informative metrics come first. If several metrics have the same title, only the
        first is returned.
        """
        values_by_title: dict[str, float] = {}
        for word in BESIDE:
            for name, value in self.latest.items():
                if (
                    get_last_part(name) == word
                    and name != self.name
                    and not name.startswith("eval/")
                ):
                    values_by_title.setdefault(find_title(name), value)
        return list(values_by_title.items())[:count]

    def format_step(self) -> str:
        """Return `step 12/60`, or `step 12` if the total is unknown."""
        if self.total is not None:
            return f"step {self.done:>{len(str(self.total))}}/{self.total}"
        return f"step {self.done}"

    def format_line(self) -> str:
        """Format the latest step as one line of plain text."""
        parts = [self.format_step(), f"epoch {self.epoch:.2f}"]
        evaluation = find_evaluation(self.name, self.latest)
        if self.done == 0:
            parts += self._list_start()
        elif evaluation is not None:
            parts.append(f"{find_title(evaluation)} {format_number(self.latest[evaluation])}")
        if self.name is not None and self.name in self.latest:
            parts.append(f"{find_title(self.name)} {format_number(self.latest[self.name])}")
        for name, value in self.list_other_metrics(2):
            parts.append(f"{name} {format_number(value)}")
        rate = compute_tokens_per_second(self.latest)
        parts += [f"{format_number(round(rate))} tokens/s"] if rate else []
        parts += (
            [format_duration(self.latest["step_seconds"])] if "step_seconds" in self.latest else []
        )
        parts += [f"ETA {format_duration(self.remaining)}"] if self.remaining else []
        return "  ".join(parts)

    def _list_start(self) -> list[str]:
        """Return the most informative metrics of the evaluation before the first step."""
        names = []
        for name in self.latest:
            if name.startswith(EVAL) and name.count("/") == 1 and name != ROWS:
                names.append(name)
        names = sorted(names, key=compute_rank)[:START_METRICS]
        return [f"{find_title(name)} {format_number(self.latest[name])}" for name in names]

    def format_summary(self, status: str) -> str:
        """Summarize the run in one line. `status` is the outcome of the run."""
        return ", ".join(self.format_summary_parts(status))

    def format_summary_parts(self, status: str) -> list[str]:
        """Return phrases on the run's outcome, and on the changes of its main metrics.

        `status` is the outcome. The main metrics are the validation metrics and the headline
        metric.
        """
        of = f" of {self.total}" if self.total is not None else ""
        since = f" since step {self._since}" if self._since else ""
        parts = [f"{status} after step {self.done}{of} in {format_duration(self.elapsed)}{since}"]
        courses = list(self.evaluations.items())
        if self.name is not None and self.values:
            courses.append((self.name, self.values))
        return parts + [
            f"{find_title(name)} {format_course(values, name, self._rows)}"
            + ("" if self._whole else since)
            for name, values in courses
        ]


def format_course(values: Sequence[float], name: str = "", rows: float | None = None) -> str:
    """Format how a metric changed, such as `0.33 -> 0.3375 (+0.0075, within noise)`.

    `rows` is the number of rows on which the metric `name` was evaluated. If `name` and `rows` are
    given, the noise includes the sampling noise of the evaluation.
    """
    if len(values) == 1:
        return format_number(values[0])
    moved = compute_change(values, name, rows)
    return f"{format_number(moved.first)} -> {format_number(moved.last)} ({moved.format_text()})"


def draw_sparkline(values: Sequence[float], width: int) -> str:
    """Draw `values` as a sparkline of at most `width` bar characters.

    If there are more values than bars, each bar shows the mean of several consecutive values.
    """
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low = min(means)
    high = max(means)
    if high == low:
        return BARS[3] * count
    return "".join(
        BARS[min(len(BARS) - 1, int((mean - low) / (high - low) * len(BARS)))] for mean in means
    )
