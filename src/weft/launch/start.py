"""Starting of experiments registered by name."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import partial
from typing import Any

from weft.errors import ConfigError
from weft.experiment import Experiment, Scheduling
from weft.experiments._machines import LaunchSpec
from weft.experiments.common import RunConfig, build_experiment
from weft.launch.run import RunResult, check_mode, run
from weft.options import validate
from weft.registry import experiments


def build_registered(
    name: str, trial_name: str, *, allocation_mode: str | None = None
) -> Experiment:
    """Return the experiment that `register_experiment(name)` registered, as trial `trial_name`.

    It is a function returning an `Experiment` (or a configuration that builds one), or a class with
    `initial_setup() -> Experiment` and optionally `scheduling_setup() -> Scheduling`. Either may be
    a `functools.partial`.

    Raises `ConfigError` with the nearest names, or with the problem of the registered object.
    """
    # The registered object returns a configuration, an object with a setup, or an experiment.
    thing = experiments.get(name)
    made = thing()
    if isinstance(made, RunConfig):
        made.allocation_mode = allocation_mode or made.allocation_mode
        made = build_experiment(made)
    elif inspect.isclass(_unwrap_partial(thing)):
        if not hasattr(made, "initial_setup"):
            raise ConfigError(
                f"experiment {name!r}: the class {_unwrap_partial(thing).__qualname__} has no "
                f"initial_setup(); give it one"
            )
        made = made.initial_setup()
    if not isinstance(made, Experiment):
        raise ConfigError(
            f"experiment {name!r} returns a {type(made).__name__}; it must return an Experiment"
        )
    # An experiment from user code has its layouts already.
    if allocation_mode not in (None, made.config.get("allocation_mode")):
        raise ConfigError(
            f"--allocation_mode {allocation_mode}: the layouts of {name!r} are set in its "
            f"code, which returns an "
            "Experiment; set allocation_mode there, or return the configuration instead of the "
            "result of its build()"
        )
    # Set the names and the environment of the run.
    if made.config:
        config = {**made.config, "experiment_name": name, "trial_name": trial_name}
    else:
        config = {}
    asked = build_scheduling(name)
    env = {**(asked.env if asked is not None else {}), **made.control.env}
    validate(LaunchSpec(env=env), "launch.")
    control = replace(made.control, experiment_name=name, trial_name=trial_name, env=env)
    return replace(made, control=control, config=config)


def build_scheduling(name: str) -> Scheduling | None:
    """Return the `scheduling_setup()` of a registered class, or None if it has none."""
    thing = experiments.get(name)
    if not inspect.isclass(_unwrap_partial(thing)) or not hasattr(
        _unwrap_partial(thing), "scheduling_setup"
    ):
        return None
    made: Any = thing()
    asked: Scheduling = made.scheduling_setup()
    return asked


def _unwrap_partial(thing: Any) -> Any:
    """Return the class or function behind any `functools.partial`."""
    return _unwrap_partial(thing.func) if isinstance(thing, partial) else thing


def start(name: str, trial_name: str, *, mode: str = "local") -> RunResult:
    """Run a registered experiment. Raises as `run` does."""
    check_mode(mode)
    check_machines(name, mode)
    return run(build_registered(name, trial_name), mode=mode)


def check_machines(name: str, mode: str = "local") -> list[str]:
    """Return notes on requested resources that `mode` ignores.

    Raises `ConfigError` if the experiment needs more machines than the mode has.
    """
    asked = build_scheduling(name)
    if asked is None:
        return []
    if mode == "local" and asked.n_nodes > 1:
        raise ConfigError(
            f"experiment {name!r} requests {asked.n_nodes} x {asked.gpus_per_node} devices, and "
            f"mode=local is one machine; "
            "start it with --mode slurm or --mode ray, or request one node"
        )
    ignored = asked.list_ignored_fields()
    if ignored:
        return [f"mode={mode} ignores {', '.join(ignored)} of {name!r}; mode=slurm uses them"]
    return []
