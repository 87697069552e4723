"""Seconds of host functions in past steps, which are added to what is predicted of the next step.

No formula knows how long a user's reward or filter takes. From the second step on, a run's predicted
step includes the median of what its host functions took so far.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from weft.observe.metrics import PREDICTED, TIME, is_finite
from weft.observe.predicted import STEP_SECONDS, PredictedStep

MAX_STEPS = 64  # past steps whose times are kept


class HostTimes:
    """Times of a run's host functions, by name."""

    def __init__(self, names: Iterable[str]) -> None:
        self._seconds: dict[str, deque[float]] = {name: deque(maxlen=MAX_STEPS) for name in names}

    @property
    def medians(self) -> dict[str, float]:
        """Median seconds of each function that past steps ran."""
        return {name: median(times) for name, times in self._seconds.items() if times}

    def record(self, metrics: Mapping[str, Any]) -> None:
        """Add the times of a step; `metrics` are those of its line of metrics.jsonl."""
        for name, times in self._seconds.items():
            key = f"{TIME}{name}"
            if is_finite(metrics.get(key)):
                times.append(float(metrics[key]))

    def complete(self, prediction: PredictedStep) -> dict[str, float]:
        """Return the predicted metrics of the next step, with the host functions of past ones.

        A step that is predicted takes longer by the sum of their medians.
        """
        metrics = dict(prediction.metrics)
        medians = self.medians
        name = f"{PREDICTED}{STEP_SECONDS}"
        if name not in metrics or not medians:
            return metrics
        metrics[name] += sum(medians.values())
        return metrics | {f"{PREDICTED}{function}": each for function, each in medians.items()}


def read_host_seconds(lines: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, float]:
    """Return the median seconds a step of host functions in a run, by name.

    `lines` are the rows of its metrics.jsonl. Functions that it did not run are left out.
    """
    times = HostTimes(names)
    for line in lines[1:] or lines:  # the first step is longer
        times.record(line)
    return times.medians
