"""Progress of a run as text: counts, speed, remaining time, and change of the headline metric."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from weft.observe import trend
from weft.observe.metrics import (
    ROWS,
    compute_tokens_per_second,
    find_evaluation,
    find_headline,
    find_title,
    format_duration,
    format_number,
    get_last_part,
)

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
        self._seconds.append(now - self._last)  # includes evaluation and saving between steps
        self._last = now
        self.done = int(numbers["step"])
        self.epoch = numbers.get("epoch", self.epoch)
        self.latest = numbers
        self._record_values(numbers)

    def _record_values(self, numbers: Mapping[str, float]) -> None:
        self.name = self.name or find_headline(numbers)
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
        return trend.find_best(self.name, self.values)[0]

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
        for name, value in self.list_evaluations():
            parts.append(f"{find_title(name)} {format_number(value)}")
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

    def list_evaluations(self) -> list[tuple[str, float]]:
        """Return the latest step's validation metric as [(name, value)], or [] if it has none.

        The metric is the validation counterpart of the headline metric or, if the step has no such
        metric, the validation reward, accuracy or loss.
        """
        name = find_evaluation(self.name, self.latest)
        return [] if name is None else [(name, self.latest[name])]

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
    moved = trend.compute_change(values, name, rows)
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
