"""The best checkpoint of a run by one metric, and the end of a run that does not improve.

After each evaluation, `BestTracker.compare` compares the metric `save_best` with the best value so
far. A better checkpoint is saved, recorded in `checkpoints/best.json`, and not removed. A run that
does not evaluate compares at the same intervals.

`early_stop_patience` ends a run after this number of comparisons without an improvement by more
than `early_stop_min_delta`. Many small improvements count as one once their sum exceeds it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from weft.experiment import Control
from weft.observe.best import BEST, BestRecord, build_missing_error, find_direction
from weft.observe.metrics import format_number
from weft.runtime.checkpoints import MAX_POINTS
from weft.runtime.directory import remove, write_text
from weft.runtime.hosts import HostGroup


@dataclass(frozen=True)
class BestState:
    """State of a tracker, which is saved in recovery points.

    Attributes:
        metric: Metric that is compared.
        direction: 1 if higher values are better, or -1.
        step: Step of the best checkpoint; 0 before the first one.
        value: Value of the metric at `step`, or None.
        start_value: Value before step 1, if the run was evaluated then. No checkpoint has it.
        reference: Value that an improvement must exceed for `early_stop_patience`, or None.
        num_stale: Number of comparisons since `reference` was last exceeded.
        extra_steps: Steps of checkpoints that were saved only because they were the best.
        point_steps: Steps of the best checkpoints at the last recovery points.
    """

    metric: str
    direction: int
    step: int = 0
    value: float | None = None
    start_value: float | None = None
    reference: float | None = None
    num_stale: int = 0
    extra_steps: list[int] = field(default_factory=list)
    point_steps: list[int] = field(default_factory=list)


class BestTracker:
    """Comparison of a run's evaluations by the metric `save_best`.

    Without this option, nothing is compared, and no method has an effect. `folder` is the folder of
    the run's checkpoints, and `roles` are the roles that have checkpoints. Values can depend on the
    clock of a host, so the first of `hosts` shares its own.
    """

    def __init__(
        self, control: Control, folder: Path, roles: Sequence[str], hosts: HostGroup | None
    ) -> None:
        self._folder = folder
        self._roles = roles
        self._hosts = hosts
        self._patience = control.early_stop_patience
        self._min_delta = control.early_stop_min_delta
        self._state: BestState | None = None
        if control.save_best is not None:
            direction = find_direction(control.save_best, control.save_best_mode)
            self._state = BestState(control.save_best, direction)

    @property
    def has_stalled(self) -> bool:
        """True if the run ends, because it has not improved for `early_stop_patience` comparisons."""
        if self._state is None or self._patience is None:
            return False
        return self._state.num_stale >= self._patience

    @property
    def protected_steps(self) -> set[int]:
        """Steps whose checkpoints must not be removed.

        They are the best checkpoint, and those that were the best at the last recovery points: a
        run that resumes from one of these finds its best checkpoint.
        """
        return set() if self._state is None else {self._state.step, *self._state.point_steps}

    @property
    def superseded_steps(self) -> set[int]:
        """Steps whose checkpoints were saved only as the best ones, and have been surpassed."""
        return set() if self._state is None else {*self._state.extra_steps} - self.protected_steps

    # -- comparisons

    def record_start(self, line: Mapping[str, Any]) -> None:
        """Record the metrics of the evaluation before step 1. No checkpoint has its weights.

        Raises `ConfigError` if `save_best` is an evaluation metric that is not among them.
        """
        if self._state is None or not line:
            return
        self._check_name(self._state, line)
        if self._state.metric in line:
            value = self._read_value(self._state, line)
            if math.isfinite(value):
                self._state = replace(self._state, start_value=value)

    def compare(self, step: int, line: Mapping[str, Any], *, is_due: bool) -> bool:
        """Return whether the metrics of a step are the best so far, and its checkpoint is to be saved.

        Nothing is compared unless `is_due`, and in steps in which the metric's node did not run.
        Raises `ConfigError` if the metric does not exist.
        """
        state = self._state
        if state is None:
            return False
        self._check_name(state, line)
        if not is_due or state.metric not in line:
            return False
        value = self._read_value(state, line)
        # Count the comparisons without improvement.
        if _is_better(state, value, state.reference, self._min_delta):
            state = replace(state, reference=value, num_stale=0)
        else:
            state = replace(state, num_stale=state.num_stale + 1)
        # Compare with the best checkpoint.
        is_best = _is_better(state, value, state.value)
        self._state = replace(state, step=step, value=value) if is_best else state
        return is_best

    def record_save(self, step: int, *, is_best: bool, is_regular: bool) -> None:
        """Record that a checkpoint is saved. If it is the best one, write `best.json`.

        `is_regular` says that the checkpoint would have been saved in any case.
        """
        if self._state is None:
            return
        if not is_regular:
            self._state = replace(self._state, extra_steps=[*self._state.extra_steps, step])
        if is_best:
            self._write_record()

    def _check_name(self, state: BestState, line: Mapping[str, Any]) -> None:
        """Raise `ConfigError` if the metric's node has reported metrics, and not this one."""
        node = state.metric.partition("/")[0]
        if state.value is not None or state.start_value is not None or state.metric in line:
            return
        if any(name.startswith(f"{node}/") for name in line):
            raise build_missing_error(state.metric, line)

    def _read_value(self, state: BestState, line: Mapping[str, Any]) -> float:
        value = line[state.metric]
        value = math.nan if value is None else float(value)
        return value if self._hosts is None else float(self._hosts.decide(lambda: value))

    # -- recovery points

    def record_point(self) -> dict[str, Any] | None:
        """Return the state to save in a recovery point that is written now; None without one."""
        if self._state is None:
            return None
        point_steps = [*self._state.point_steps, self._state.step][-MAX_POINTS:]
        self._state = replace(self._state, point_steps=point_steps)
        return asdict(self._state)

    def forget_points(self) -> None:
        """Stop protecting checkpoints for earlier recovery points, because the run ends."""
        if self._state is not None:
            self._state = replace(self._state, point_steps=[])

    def open(self, saved: Mapping[str, Any] | None) -> str | None:
        """Restore a saved state, or start with none, and write the record accordingly.

        Returns a message for the user if the saved state cannot be used: it is that of another
        metric, or its checkpoint is not in this run's directory.
        """
        note = None
        if self._state is not None and saved is not None:
            state = BestState(**saved)
            note = self._explain_unusable(state)
            if note is None:
                self._state = state
        self._write_record()
        return note

    def _explain_unusable(self, state: BestState) -> str | None:
        """Return why a saved state cannot be used, or None."""
        assert self._state is not None, "save_best is set"
        if (state.metric, state.direction) != (self._state.metric, self._state.direction):
            return (
                f"save_best={self._state.metric}: compared from here on; before, {state.metric} was"
            )
        if state.step and not self._has_checkpoint(state.step):
            return (
                f"save_best={state.metric}: the best checkpoint so far, of step {state.step}, is not "
                f"in this run's directory; compared from here on"
            )
        return None

    def _has_checkpoint(self, step: int) -> bool:
        def is_there() -> bool:
            return all((self._folder / role / f"step{step}").is_dir() for role in self._roles)

        return is_there() if self._hosts is None else bool(self._hosts.decide(is_there))

    def _write_record(self) -> None:
        """Write `best.json`, or remove it if there is no best checkpoint."""
        state = self._state
        if state is None or state.value is None:
            remove(self._folder / BEST)
            return
        record = {
            "step": state.step,
            "metric": state.metric,
            "value": state.value,
            "mode": "max" if state.direction > 0 else "min",
        }
        write_text(self._folder / BEST, json.dumps(record) + "\n")

    # -- the end of a run

    def explain_end(self, step: int) -> str | None:
        """Return why the run ends after `step`, or None if it does not end early."""
        state = self._state
        if state is None or not self.has_stalled:
            return None
        if state.reference is None:
            reason = "was not a finite number"
        elif self._min_delta:
            reached = format_number(state.reference)
            reason = f"has not improved on {reached} by more than {self._min_delta:g}"
        else:
            reason = f"has not improved on {format_number(state.reference)}"
        if state.num_stale > 1:
            period = f"last {state.num_stale} comparisons"
        else:
            period = "last comparison"
        return (
            f"stopped early after step {step}: {state.metric} {reason} in the {period} "
            f"(early_stop_patience={self._patience})"
        )

    def describe(self, run: Path | str) -> list[str]:
        """Return a line about the best checkpoint of the run with this directory or URL."""
        state = self._state
        if state is None:
            return []
        if state.value is None:
            return [f"best:   none, because {state.metric} was never a finite number"]
        best = BestRecord(state.step, state.metric, state.value)
        line = f"best:   {run}@best is {best.format_text()}"
        start = state.start_value
        if start is not None:
            line += f" (before step 1: {format_number(start)})"
            if not _is_better(state, state.value, start):
                line += "; no checkpoint is better than the model that the run began with"
        return [line]


def _is_better(state: BestState, value: float, other: float | None, min_delta: float = 0.0) -> bool:
    """Return whether `value` is better than `other` by more than `min_delta`; NaN never is."""
    if not math.isfinite(value):
        return False
    return other is None or state.direction * (value - other) > min_delta
