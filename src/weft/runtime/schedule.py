"""Schedule of a run, by step: frequencies of actions, and traces of steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.errors import DevicesLost, Interrupted, WeftError
from weft.experiment import Control, parse_step_range
from weft.runtime.calls import WorkerGroup

# A recovery point is written after the first step that ends this long after the last one, even if
# checkpoints are rarer.
RECOVERY_SECONDS = 600.0


@dataclass
class ActionFrequency:
    """Frequency of an action in steps, epochs or seconds.

    If several of these are set, the action is due when at least one of the intervals ends.

    Attributes:
        steps: Number of steps between two actions.
        epochs: Number of epochs between two actions.
        secs: Number of seconds between two actions.
        last_epochs: Number of completed epochs at the last check.
        last_time: Time of the last action in seconds, on the monotonic clock.
    """

    steps: int | None = None
    epochs: int | None = None
    secs: float | None = None
    last_epochs: int = 0
    last_time: float = field(default_factory=time.monotonic)

    @property
    def wanted(self) -> bool:
        """True if the action has a frequency in steps, epochs or seconds."""
        return self.steps is not None or self.epochs is not None or self.secs is not None

    def check_due(self, step: int, epochs_done: int) -> bool:
        """Return whether the action is due after `step` completed steps.

        Must be called exactly once after each step, with the number of completed epochs.
        """
        by_step = self.steps is not None and step % self.steps == 0
        by_epoch = (
            self.epochs is not None and epochs_done // self.epochs > self.last_epochs // self.epochs
        )
        by_time = self.secs is not None and time.monotonic() - self.last_time >= self.secs
        self.last_epochs = epochs_done
        if by_step or by_epoch or by_time:
            self.last_time = time.monotonic()
            return True
        return False

    def state_dict(self) -> dict[str, Any]:
        return {"last_epochs": self.last_epochs, "elapsed": time.monotonic() - self.last_time}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.last_epochs = state["last_epochs"]
        self.last_time = time.monotonic() - state["elapsed"]


def build_frequencies(control: Control, *, evaluates: bool) -> dict[str, ActionFrequency]:
    """Return the frequencies of the actions `evaluate`, `save`, `milestone` and `cut`.

    `milestone` saves a checkpoint that is never removed, and `cut` writes a recovery point. A run
    that evaluates does so once per epoch if no frequency is set.
    """
    evaluate = ActionFrequency(
        control.eval_freq_steps, control.eval_freq_epochs, control.eval_freq_secs
    )
    if evaluates and not evaluate.wanted:
        evaluate.epochs = 1
    return {
        "evaluate": evaluate,
        "save": ActionFrequency(
            control.save_freq_steps, control.save_freq_epochs, control.save_freq_secs
        ),
        "milestone": ActionFrequency(
            control.save_milestone_freq_steps, control.save_milestone_freq_epochs
        ),
        "cut": ActionFrequency(
            control.recover_freq_steps, secs=RECOVERY_SECONDS
        ),  # recovery points; the key is stored in them
    }


class StepProfiler:
    """Profiler that traces selected steps of a run and writes the traces to `folder`.

    `steps` is the value of the option `profile_steps`; with None, nothing is traced. `tell` shows a
    message to the user.
    """

    def __init__(
        self, steps: str | None, group: WorkerGroup, folder: Path, tell: Callable[[str], None]
    ) -> None:
        self._steps = range(0) if steps is None else parse_step_range(steps)
        self._group = group
        self._folder = folder
        self._tell = tell
        self._first_step: int | None = None  # first traced step while a trace is running

    def start_before(self, step: int) -> None:
        """Start a trace before a step, if the step should be traced and no trace is running."""
        if self._first_step is None and step in self._steps:
            self._group.toggle_trace()
            self._first_step = step

    def write_after(self, step: int, *, over: bool = False) -> None:
        """End and write the running trace if `step` is the last step to trace.

        If `over` is True, no more steps follow, and the trace is written even if `step` is not the
        last step to trace.
        """
        if self._first_step is None or not (over or step >= self._steps[-1]):
            return
        name = f"steps-{self._first_step}-{step}-worker-{{rank}}.json.gz"
        self._group.toggle_trace(str(self._folder.absolute() / name))
        if step == self._first_step:
            traced_steps = f"step {step}"
        else:
            traced_steps = f"steps {self._first_step} to {step}"
        self._first_step = None
        self._tell(
            f"trace of {traced_steps}: {self._folder / name.replace('{rank}', '*')} (open it at "
            f"ui.perfetto.dev)"
        )

    @contextmanager
    def write_on_exit(
        self, done: Callable[[], int], under_way: Callable[[], int]
    ) -> Iterator[None]:
        """Write an unfinished trace when the block ends, even if the run fails.

        No trace is written if devices are lost or the run is interrupted. `done` returns the last
        completed step, and `under_way` returns the running step.
        """
        try:
            yield
        except Exception as error:
            if not isinstance(error, DevicesLost | Interrupted):
                try:
                    self.write_after(under_way(), over=True)
                except WeftError as trouble:  # the first error matters more
                    error.add_note(f"the trace of its steps is lost: {trouble}")
            raise
        self.write_after(max(done(), self._first_step or 0), over=True)
