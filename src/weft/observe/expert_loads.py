"""Loads of experts in past steps, for predicting the next step of a run with expert parallelism.

The first prediction assumes a distribution of tokens over the experts. Later predictions use the
median of the loads that the run's training calls have measured.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from weft.observe.host_times import MAX_STEPS
from weft.observe.metrics import is_finite
from weft.observe.predicted import PredictedStep

EXPERT_LOAD = "expert_load"


class ExpertLoads:
    """Expert loads of a run by role: tokens of the busiest expert relative to the mean.

    `roles` maps the names of training calls to their roles.
    """

    def __init__(self, roles: Mapping[str, str]) -> None:
        self._roles = dict(roles)
        self._loads: dict[str, deque[float]] = {}

    @property
    def medians(self) -> dict[str, float]:
        """Median load in past steps, by role."""
        return {role: median(loads) for role, loads in self._loads.items()}

    def record(self, metrics: Mapping[str, Any]) -> None:
        """Add the loads of a step; `metrics` is the step's line of metrics.jsonl."""
        for call, role in self._roles.items():
            load = metrics.get(f"{call}/{EXPERT_LOAD}")
            if load is not None and is_finite(load):
                self._loads.setdefault(role, deque(maxlen=MAX_STEPS)).append(float(load))

    def complete(self, prediction: PredictedStep) -> PredictedStep:
        """Return the prediction of the next step, with the median loads of past steps."""
        if prediction.predict_again is None or not self._loads:
            return prediction
        return replace(prediction, metrics=prediction.predict_again(self.medians))


def read_expert_loads(
    lines: Sequence[Mapping[str, Any]], roles: Mapping[str, str]
) -> dict[str, float]:
    """Return the median load of experts by role; `lines` are the rows of metrics.jsonl."""
    loads = ExpertLoads(roles)
    for line in lines:
        loads.record(line)
    return loads.medians
