"""Length of a run and what is done at which step: frequencies of actions, and traces of steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from weft.data.batches import BatchLoader
from weft.engine.spec import ModelSpec
from weft.errors import ConfigError, DevicesLost, Interrupted, WeftError
from weft.experiment import Experiment, parse_step_range
from weft.runtime.group import WorkerGroup


@dataclass(frozen=True)
class RunLength:
    """Length of a run in steps.

    A run that trains and has `max_steps` set takes that many steps, over as many epochs as needed.
    Any other run takes `total_train_epochs` epochs, or `max_steps` steps if these are fewer.
    Filters that drop ids can only make the run shorter.

    Attributes:
        num_ids: Number of sample ids per epoch.
        firings: Number of firings (executions) of each node per epoch.
        steps_per_epoch: Number of steps per epoch.
        steps: Number of steps of the run.
    """

    num_ids: int
    firings: Mapping[str, int]
    steps_per_epoch: int
    steps: int

    @classmethod
    def from_experiment(cls, experiment: Experiment, loader: BatchLoader) -> RunLength:
        """Compute the length of a run. Raises `ConfigError` if it has no steps."""
        num_ids = loader.num_ids
        batches = loader.batches_per_epoch
        control = experiment.control
        firings = {}
        for n in experiment.graph.nodes:
            firings[n.name] = math.ceil(num_ids / n.batch_size) if n.batch_size else batches
        per_epoch = firings[experiment.steps_follow]
        epochs = control.total_train_epochs
        by_batch = experiment.get_node(experiment.steps_follow).batch_size == 0
        steps = loader.count_batches(epochs) if by_batch else per_epoch * epochs
        if control.max_steps is not None:
            if steps and math.isinf(experiment.most_epochs):
                steps = control.max_steps
            else:
                steps = min(steps, control.max_steps)
        if steps < 1:
            raise ConfigError(
                f"the run has no steps: {num_ids} prompts per epoch, {epochs} epochs, "
                f"max_steps={control.max_steps}; "
                "give more rows or a smaller batch"
            )
        return cls(num_ids, firings, per_epoch, steps)

    def updates(self, experiment: Experiment, node: str) -> tuple[int, int]:
        """Return a training node's number of optimizer steps per epoch, and in the whole run."""
        per_epoch = self.firings[node] * experiment.updates_per_firing.get(node, 1)
        share = self.steps / self.steps_per_epoch  # number of epochs, as a fraction
        firings = math.ceil(self.firings[node] * share - 1e-9)
        return per_epoch, firings * experiment.updates_per_firing.get(node, 1)

    def count_trained_updates(self, experiment: Experiment, node: str) -> int:
        """Return the number of optimizer steps of a training node in the whole run.

        Steps during which its role is frozen are not counted.
        """
        per_epoch, total = self.updates(experiment, node)
        optimizer = experiment.roles[
            next(n.role for n in experiment.list_trained_nodes() if n.name == node)
        ].optimizer
        return optimizer.build_schedule(total, per_epoch).total_steps

    def build_specs(self, experiment: Experiment) -> dict[str, ModelSpec]:
        """Return the model specs of all roles, completed with the options of the run.

        Specs of trained roles also get their learning rate schedule.
        """
        control = experiment.control
        specs = {
            role: replace(
                spec,
                device=control.device,
                seed=control.seed,
                flash_attention=control.flash_attention,
                on_nonfinite=control.on_nonfinite,
            )
            for role, spec in experiment.roles.items()
        }
        for node in experiment.list_trained_nodes():
            per_epoch, total = self.updates(experiment, node.name)
            spec = specs[node.role]
            specs[node.role] = replace(
                spec, schedule=spec.optimizer.build_schedule(total, per_epoch)
            )
        return specs


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
