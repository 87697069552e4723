"""Durations of host functions in past steps, which are added to the predicted next step.

The duration of a user's reward or filter cannot be computed in advance. From the second step on,
the predicted step includes the median duration of each host function so far.
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
        """Median seconds of each function that ran in a past step."""
        return {name: median(times) for name, times in self._seconds.items() if times}

    def record(self, metrics: Mapping[str, Any]) -> None:
        """Add the times of a step; `metrics` is the step's line of metrics.jsonl."""
        for name, times in self._seconds.items():
            key = f"{TIME}{name}"
            if is_finite(metrics.get(key)):
                times.append(float(metrics[key]))

    def complete(self, prediction: PredictedStep) -> dict[str, float]:
        """Return the predicted metrics of the next step, including those of host functions.

        The sum of the host functions' medians is added to the predicted duration of the step.
        """
        metrics = dict(prediction.metrics)
        medians = self.medians
        name = f"{PREDICTED}{STEP_SECONDS}"
        if name not in metrics or not medians:
            return metrics
        metrics[name] += sum(medians.values())
        return metrics | {
            f"{PREDICTED}{function}": seconds for function, seconds in medians.items()
        }


def read_host_seconds(lines: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, float]:
    """Return the median seconds per step of each host function in `names`.

    `lines` are the rows of a run's metrics.jsonl. The first row is skipped, if there are others.
    Functions that did not run are left out.
    """
    times = HostTimes(names)
    for line in lines[1:] or lines:  # the first step is longer
        times.record(line)
    return times.medians
