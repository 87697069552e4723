"""Experiments registered by name: found, called for, given their trial's name."""

from __future__ import annotations

import inspect
from dataclasses import replace

from weft.errors import ConfigError
from weft.experiment import Experiment, Scheduling
from weft.experiments.common import RunConfig
from weft.launch.run import RunResult, check_mode, run
from weft.registry import experiments


def registered(name: str, trial_name: str, mode: str = "local") -> Experiment:
    """The experiment that `register_experiment(name)` made, as the trial `trial_name` of `name`.

    It is a function returning an `Experiment` (or a configuration that builds one), or a class with
    `initial_setup() -> Experiment` and optionally `scheduling_setup() -> Scheduling`.

    Raises `ConfigError` with the nearest names, or what is wrong with it.
    """
    thing = experiments.get(name)
    made = thing()
    if inspect.isclass(thing):
        if "scheduling_setup" in dir(thing):
            _check_machines(name, made.scheduling_setup(), mode)
        if "initial_setup" not in dir(thing):
            raise ConfigError(
                f"experiment {name!r}: the class {thing.__qualname__} has no initial_setup(); give it one"
            )
        made = made.initial_setup()
    if isinstance(made, RunConfig):
        made = made.build()
    if not isinstance(made, Experiment):
        raise ConfigError(f"experiment {name!r} gives a {type(made).__name__}; it must return an Experiment")
    config = {**made.config, "experiment_name": name, "trial_name": trial_name} if made.config else {}
    return replace(made, control=replace(made.control, experiment_name=name, trial_name=trial_name), config=config)


def start(name: str, trial_name: str, *, mode: str = "local") -> RunResult:
    """Run a registered experiment. Raises as `run` does."""
    check_mode(mode)
    return run(registered(name, trial_name, mode), mode=mode)


def _check_machines(name: str, asked: Scheduling, mode: str) -> None:
    if mode == "local" and asked.n_nodes > 1:
        raise ConfigError(
            f"experiment {name!r} asks for {asked.n_nodes} machines, and mode=local is this one; ask for one, or give "
            "--mode ray and a cluster of them"
        )
