"""Length of a run, number of optimizer steps of its roles, and frequencies of actions."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from weft.data.batches import BatchLoader
from weft.engine.spec import ModelSpec
from weft.errors import ConfigError
from weft.experiment import Experiment


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
