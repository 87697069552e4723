"""Recording of profiler traces of the steps that the option `profile_steps` selects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from weft.errors import ConfigError, DevicesLost, Interrupted, WeftError
from weft.experiment import parse_step_range
from weft.runtime.group import WorkerGroup


def check_steps(steps: str | None, total: int) -> None:
    """Raise `ConfigError` if the run ends before the first step to trace.

    `steps` is the value of the option `profile_steps`, and `total` is the number of steps of the
    run.
    """
    if steps is not None and parse_step_range(steps)[0] > total:
        count = f"{total} {'step' if total == 1 else 'steps'}"
        raise ConfigError(
            f"profile_steps={steps}: the run has {count}; name one of them, or leave it out"
        )


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
            which = f"step {step}"
        else:
            which = f"steps {self._first_step} to {step}"
        self._first_step = None
        self._tell(
            f"trace of {which}: {self._folder / name.replace('{rank}', '*')} (open it at "
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
