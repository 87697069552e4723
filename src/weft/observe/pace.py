"""How far a run is and how it goes, without a terminal: counts, pace, the headline's history, one plain line a step."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from weft.observe.metrics import direction, duration, headline, last_part, number, title, tokens_per_second

RECENT = 50  # steps whose pace the remaining time is taken from
BARS = "▁▂▃▄▅▆▇█"
BESIDE = (
    "kl",
    "kl_exact",
    "accuracy",
    "accuracies",
    "token_accuracy",
    "margin",
    "response_length",
)  # shown next to the headline


@dataclass
class Pace:
    """What has been measured so far, times in this process alone. `clock` gives seconds that only grow."""

    clock: Callable[[], float] = time.monotonic
    total: int | None = None
    done: int = 0
    epoch: float = 0.0
    name: str | None = None  # of the headline
    values: list[float] = field(default_factory=list)
    latest: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.began = self.clock()
        self._last = self.began
        self._seconds: deque[float] = deque(maxlen=RECENT)
        self._since = 0  # the step that this process began after
        self._whole = True  # whether `values` begin with the run

    def expect(self, total: int | None, done: int, earlier: Sequence[Mapping[str, float]] = ()) -> None:
        """`total` steps in all, `done` of them by an earlier process, which left the lines `earlier`. The clock of the first
        step starts here."""
        self.total, self.done, self._since = total, done, done
        self._whole = bool(earlier) or done == 0
        for line in earlier:
            self._note(line)
        self._last = self.clock()

    def step(self, numbers: Mapping[str, float]) -> None:
        """Take in the finite numbers of one line."""
        now = self.clock()
        self._seconds.append(now - self._last)  # with what lies between steps: evaluation, saving
        self._last = now
        self.done, self.epoch, self.latest = int(numbers["step"]), numbers.get("epoch", self.epoch), numbers
        self._note(numbers)

    def _note(self, numbers: Mapping[str, float]) -> None:
        self.name = self.name or headline(numbers)
        if self.name is not None and self.name in numbers:
            self.values.append(numbers[self.name])

    @property
    def elapsed(self) -> float:
        return self.clock() - self.began

    @property
    def remaining(self) -> float | None:
        """Seconds to the end at the pace of the last steps; None where nobody knows."""
        if self.total is None or not self._seconds:
            return None
        return max(0, self.total - self.done) * sum(self._seconds) / len(self._seconds)

    @property
    def best(self) -> float | None:
        """The best value of the headline so far."""
        if not self.values or self.name is None:
            return None
        return min(self.values) if direction(self.name) < 0 else max(self.values)

    def beside(self, count: int = 3) -> list[tuple[str, float]]:
        """(title, value) of the latest line's other telling numbers, most telling first, one of each kind."""
        found: dict[str, float] = {}
        for word in BESIDE:
            for name, value in self.latest.items():
                if last_part(name) == word and name != self.name and not name.startswith("eval/"):
                    found.setdefault(title(name), value)
        return list(found.items())[:count]

    def counted(self) -> str:
        """`step 12/60`, or `step 12` where the end is not known."""
        return (
            f"step {self.done:>{len(str(self.total))}}/{self.total}" if self.total is not None else f"step {self.done}"
        )

    def text(self) -> str:
        """The latest step as one plain line."""
        parts = [self.counted(), f"epoch {self.epoch:.2f}"]
        if self.name is not None and self.name in self.latest:
            parts.append(f"{title(self.name)} {number(self.latest[self.name])}")
        parts += [f"{name} {number(value)}" for name, value in self.beside(2)]
        parts += [f"eval {title(name)} {number(value)}" for name, value in self.evaluated()]
        rate = tokens_per_second(self.latest)
        parts += [f"{number(round(rate))} tokens/s"] if rate else []
        parts += [duration(self.latest["step_seconds"])] if "step_seconds" in self.latest else []
        parts += [f"ETA {duration(self.remaining)}"] if self.remaining else []
        return "  ".join(parts)

    def evaluated(self) -> list[tuple[str, float]]:
        """(name, value) of the latest evaluation over all sources: what the headline measures, or else the loss."""
        wanted = (last_part(self.name or ""), "loss", "reward", "accuracy")
        for word in wanted:
            if f"eval/{word}" in self.latest:
                return [(word, self.latest[f"eval/{word}"])]
        return []

    def summary(self, status: str) -> str:
        """The run in one line, for its end."""
        return ", ".join(self.summary_parts(status))

    def summary_parts(self, status: str) -> list[str]:
        """How it ended, and its headline from the first step to the last."""
        of = f" of {self.total}" if self.total is not None else ""
        since = f" since step {self._since}" if self._since else ""
        parts = [f"{status} after step {self.done}{of} in {duration(self.elapsed)}{since}"]
        if self.name is not None and self.values:
            course = f"{number(self.values[0])} -> {number(self.values[-1])} (best {number(self.best)})"
            parts.append(f"{title(self.name)} {course}" + ("" if self._whole else since))
        return parts


def sparkline(values: Sequence[float], width: int) -> str:
    """The course of `values` in at most `width` signs; each is the mean of an equal share of them."""
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    if high == low:
        return BARS[3] * count
    return "".join(BARS[min(len(BARS) - 1, int((mean - low) / (high - low) * len(BARS)))] for mean in means)
