"""Progress of a run as text, and statistics of noisy metrics: means, changes and their noise."""

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

END_DIVISOR = 10  # the end of a curve is the last 1 / END_DIVISOR of its values
MIN_END_STEPS = 5  # minimum steps of an end, if the curve has at least three times as many
MIN_VALUES = 8  # minimum values from which noise is estimated
ROUNDING = 1e-6  # relative; smaller noise is due to rounding
# The noise of a curve with at least MIN_BLOCKS blocks is estimated from the last NUM_LAST_BLOCKS.
MIN_BLOCKS = 10
NUM_LAST_BLOCKS = 6
# Lag-1 autocorrelation of a shorter curve: estimated from the residuals of its last LAST_FRACTION
# if the curve has at least MIN_ESTIMATED values, else ASSUMED_CORRELATION.
MIN_ESTIMATED = 16
LAST_FRACTION = 2 / 3
ASSUMED_CORRELATION = 0.3
MAX_CORRELATION = 0.9
MAX_START_METRICS = 3  # maximum metrics shown of the evaluation before the first step
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
        """Mean of the last steps minus the mean of the first steps."""
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
    return max(1, count // END_DIVISOR, min(MIN_END_STEPS, count // 3))


def count_first(count: int) -> int:
    """Return the number of values to average at the start of a curve of `count` values.

    The number is small, because curves are steep at the start.
    """
    return max(1, min(MIN_END_STEPS, count // 3))


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
    for index in range(width, len(values)):
        total += values[index] - values[index - width]
        means.append(total / width)
    best = min(means) if get_direction(name) < 0 else max(means)
    index = means.index(best)
    return compute_mean(values[index : index + width]), index + width - 1


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
    num_first = count_first(len(values))
    num_last = count_last(len(values))
    first = compute_mean(values[:num_first])
    last = compute_mean(values[-num_last:])
    sampling_noises = [compute_sampling_noise(name, value, rows or 0) for value in (first, last)]
    sampling_noise = compute_difference_noise(sampling_noises)
    if len(values) < MIN_VALUES:
        return MetricChange(first, last, sampling_noise)
    noise = _estimate_noise(values)
    estimated = max(
        noise.compute_for_means(num_first, num_last),
        noise.end_noise * math.sqrt(1 + num_last / num_first),
    )
    return MetricChange(first, last, max(estimated, sampling_noise or 0.0))


def compute_end_noise(values: Sequence[float]) -> float | None:
    """Return the noise of the result of `compute_end_mean`, as the half-width of a 95% interval.

    Returns None for fewer than `MIN_VALUES` values. The steep beginning of the curve is not used.
    """
    if len(values) < MIN_VALUES:
        return None
    last_half = values[-max(MIN_VALUES, len(values) // 2) :]
    noise = _estimate_noise(last_half).compute_for_means(count_last(len(values)))
    return max(noise, _estimate_noise(values).end_noise)


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
    known = sorted(noise for noise in noises if noise is not None)
    return math.hypot(*known[-2:]) if len(known) == len(noises) else None


@dataclass(frozen=True)
class CurveNoise:
    """Estimated noise of a curve.

    Attributes:
        single: half-width of the 95% confidence interval for a single value
        correlation: lag-1 autocorrelation of the noise
        end_noise: half-width of the 95% confidence interval for the mean at the end of the curve,
            including noise that lasts for several steps; 0 if the curve is too short to estimate
            such noise
    """

    single: float
    correlation: float
    end_noise: float

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
            1 + 2 * sum((1 - lag / count) * self.correlation**lag for lag in range(1, count))
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
    Only the last `NUM_LAST_BLOCKS` = 6 blocks are used, because a curve is steep at its start.

    The result has the half-widths of 95% confidence intervals. Each is a standard deviation
    multiplied by a quantile of Student's t distribution.
    """
    count = len(values)
    block_size = count_last(len(values))
    third_differences = []
    for a, b, c, d in zip(values, values[1:], values[2:], values[3:], strict=False):
        third_differences.append(a - 3 * b + 3 * c - d)
    variance = compute_mean([difference * difference for difference in third_differences]) / 20
    # Fewer than the number of differences, since neighbouring differences overlap.
    degrees_of_freedom = max(1.0, (count - 3) * 2 // 5)
    # A long curve: the scatter of blocks includes noise that lasts several steps.
    blocks = [
        compute_mean(values[start : start + block_size])
        for start in range(count % block_size, count, block_size)
    ]
    if block_size > 1 and len(blocks) >= MIN_BLOCKS:
        end_noise = _approximate_student(NUM_LAST_BLOCKS - 2) * math.sqrt(
            _compute_line_variance(blocks[-NUM_LAST_BLOCKS:])
        )
        return CurveNoise(
            _approximate_student(degrees_of_freedom) * math.sqrt(variance), 0.0, end_noise
        )
    # A short curve: correct the variance for the lag-1 autocorrelation r of the noise.
    r = ASSUMED_CORRELATION
    if count >= MIN_ESTIMATED:
        r = _compute_autocorrelation(values[-int(count * LAST_FRACTION) :])
        # The effective number for correlated noise.
        degrees_of_freedom = max(1.0, degrees_of_freedom * (1 - r) / (1 + r))
    # Divide by the share of AR(1) noise that third differences retain.
    variance /= (20 - 30 * r + 12 * r**2 - 2 * r**3) / 20
    return CurveNoise(_approximate_student(degrees_of_freedom) * math.sqrt(variance), r, 0.0)


def _compute_autocorrelation(values: Sequence[float]) -> float:
    """Return the lag-1 autocorrelation of the residuals of a linear fit, in [0, `MAX_CORRELATION`].

    For n values, the fit makes the estimate of the correlation r too low by (2 + 4 r) / n on
    average. The result is corrected for this bias.
    """
    residuals = _compute_residuals(values)
    total = sum(residual * residual for residual in residuals)
    if total == 0:
        return 0.0
    biased = sum(a * b for a, b in itertools.pairwise(residuals)) / total
    count = len(values)
    return min(MAX_CORRELATION, max(0.0, (biased + 2 / count) / (1 - 4 / count)))


def _compute_line_variance(values: Sequence[float]) -> float:
    """Return the variance of the values around the straight line that fits them best."""
    return sum(residual * residual for residual in _compute_residuals(values)) / (len(values) - 2)


def _compute_residuals(values: Sequence[float]) -> list[float]:
    """Return the differences between the values and the straight line that fits them best."""
    count = len(values)
    middle = (count - 1) / 2
    mean = compute_mean(values)
    slope = sum((x - middle) * y for x, y in enumerate(values)) / sum(
        (x - middle) ** 2 for x in range(count)
    )
    return [y - mean - slope * (x - middle) for x, y in enumerate(values)]


def _approximate_student(degrees_of_freedom: float) -> float:
    """Approximate the 97.5% quantile of Student's t distribution.

    Uses a Cornish-Fisher expansion, which is accurate to 1% for at least 3 degrees of freedom.
    """
    return (
        1.96
        + 2.372 / degrees_of_freedom
        + 2.823 / degrees_of_freedom**2
        + 2.556 / degrees_of_freedom**3
    )


RECENT = 50  # number of last steps from which the remaining time is estimated
BARS = "▁▂▃▄▅▆▇█"
OTHER_METRICS = (
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
        self._last_time = self.began
        self._step_seconds: deque[float] = deque(maxlen=RECENT)
        self._earlier_steps = 0  # steps done by earlier processes
        self._num_rows: float | None = None  # number of validation rows
        self._start_metrics: Mapping[str, float] = {}  # metrics before the first step
        self._has_all_values = True  # `values` start at the first step of the run

    def expect(
        self, total: int | None, done: int, earlier: Sequence[Mapping[str, float]] = ()
    ) -> None:
        """Set the total number of steps (None if unknown), and the number of steps already done.

        `done` counts the steps that earlier processes of the run have completed, and `earlier` has
        the metric lines of these steps. Also starts the clock of the first step.
        """
        self.total, self.done, self._earlier_steps = total, done, done
        self._has_all_values = bool(earlier) or done == 0
        for line in earlier:
            self._record_values(line)
        self._last_time = self.clock()

    def record_step(self, numbers: Mapping[str, float]) -> None:
        """Record the finite metrics of one step."""
        now = self.clock()
        if numbers["step"] > 0:  # step 0 is the evaluation before the first step
            # The time includes evaluation and saving between steps.
            self._step_seconds.append(now - self._last_time)
        self._last_time = now
        self.done = int(numbers["step"])
        self.epoch = numbers.get("epoch", self.epoch)
        self.latest = numbers
        self._record_values(numbers)

    def _record_values(self, numbers: Mapping[str, float]) -> None:
        """Record the values of the headline metric and of its evaluation."""
        if numbers["step"] == 0:  # kept until the first step shows which metric is the headline
            self._start_metrics = numbers
            return
        self.name = self.name or find_headline(numbers)
        evaluation = find_evaluation(self.name, self._start_metrics)
        if evaluation is not None:
            self.evaluations[evaluation] = [self._start_metrics[evaluation]]
        self._start_metrics = {}
        if self.name is not None and self.name in numbers:
            self.values.append(numbers[self.name])
        self._num_rows = numbers.get(ROWS, self._num_rows)
        evaluation = find_evaluation(self.name, numbers)
        if evaluation is not None:
            self.evaluations.setdefault(evaluation, []).append(numbers[evaluation])

    @property
    def elapsed(self) -> float:
        """Seconds since this process started the run."""
        return self.clock() - self.began

    @property
    def remaining(self) -> float | None:
        """Estimated seconds until the end, at the speed of the last steps; None if unknown."""
        if self.total is None or not self._step_seconds:
            return None
        return max(0, self.total - self.done) * sum(self._step_seconds) / len(self._step_seconds)

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
        for last in OTHER_METRICS:
            for name, value in self.latest.items():
                if (
                    get_last_part(name) == last
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
        if rate:
            parts.append(f"{format_number(round(rate))} tokens/s")
        if "step_seconds" in self.latest:
            parts.append(format_duration(self.latest["step_seconds"]))
        if self.remaining:
            parts.append(f"ETA {format_duration(self.remaining)}")
        return "  ".join(parts)

    def _list_start(self) -> list[str]:
        """Return the most informative metrics of the evaluation before the first step."""
        names = []
        for name in self.latest:
            if name.startswith(EVAL) and name.count("/") == 1 and name != ROWS:
                names.append(name)
        names = sorted(names, key=compute_rank)[:MAX_START_METRICS]
        return [f"{find_title(name)} {format_number(self.latest[name])}" for name in names]

    def format_summary(self, status: str) -> str:
        """Summarize the run in one line. `status` is the outcome of the run."""
        return ", ".join(self.format_summary_parts(status))

    def format_summary_parts(self, status: str) -> list[str]:
        """Return phrases on the run's outcome, and on the changes of its main metrics.

        `status` is the outcome. The main metrics are the validation metrics and the headline
        metric.
        """
        total = f" of {self.total}" if self.total is not None else ""
        resumed = f" since step {self._earlier_steps}" if self._earlier_steps else ""
        parts = [
            f"{status} after step {self.done}{total} in {format_duration(self.elapsed)}{resumed}"
        ]
        series = list(self.evaluations.items())
        if self.name is not None and self.values:
            series.append((self.name, self.values))
        return parts + [
            f"{find_title(name)} {format_change(values, name, self._num_rows)}"
            + ("" if self._has_all_values else resumed)
            for name, values in series
        ]


def format_change(values: Sequence[float], name: str = "", rows: float | None = None) -> str:
    """Format the change of a metric, such as `0.33 -> 0.3375 (+0.0075, within noise)`.

    `rows` is the number of rows on which the metric `name` was evaluated. If `name` and `rows` are
    given, the noise includes the sampling noise of the evaluation.
    """
    if len(values) == 1:
        return format_number(values[0])
    change = compute_change(values, name, rows)
    return f"{format_number(change.first)} -> {format_number(change.last)} ({change.format_text()})"


def draw_sparkline(values: Sequence[float], width: int) -> str:
    """Draw `values` as a sparkline of at most `width` bar characters.

    If there are more values than bars, each bar shows the mean of several consecutive values.
    """
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    means = [sum(values[start:stop]) / (stop - start) for start, stop in itertools.pairwise(edges)]
    low = min(means)
    high = max(means)
    if high == low:
        return BARS[3] * count
    return "".join(
        BARS[min(len(BARS) - 1, int((mean - low) / (high - low) * len(BARS)))] for mean in means
    )
