"""Functions that build and start experiments registered by name."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import partial
from typing import Any

from weft.errors import ConfigError
from weft.experiment import RUN_NAME, Experiment, Scheduling
from weft.experiments.common import RunConfig, build_experiment
from weft.experiments.machines import LaunchSpec
from weft.launch.run import RunResult, check_mode, run
from weft.options import validate
from weft.registry import experiments


def build_registered(
    name: str,
    trial_name: str,
    *,
    allocation_mode: str | None = None,
    fileroot: str | None = None,
) -> Experiment:
    """Return the experiment registered as `name`, with the trial name `trial_name`.

    The registered object can be a function that returns an `Experiment`, or a function or class
    that returns a configuration, from which the experiment is built. It can also be a class with a
    method `initial_setup() -> Experiment` and optionally `scheduling_setup() -> Scheduling`.
    Functions and classes can be wrapped in `functools.partial`. `allocation_mode` and `fileroot`
    replace the options of the same names in a configuration.

    Raises `ConfigError` if the name is unknown, with similar names in the message, or if the
    registered object is of any other kind. Also raises `ConfigError` if `allocation_mode` differs
    from that of an `Experiment` whose layouts are set in code.
    """
    # The registered object returns a configuration, an object with a setup, or an experiment.
    thing = experiments.get(name)
    experiment = thing()
    if isinstance(experiment, RunConfig):
        experiment.allocation_mode = allocation_mode or experiment.allocation_mode
        experiment.fileroot = fileroot or experiment.fileroot
        # A run that is resumed finds its plan by its name.
        if RUN_NAME.fullmatch(name) and RUN_NAME.fullmatch(trial_name):
            experiment.experiment_name, experiment.trial_name = name, trial_name
        experiment = build_experiment(experiment)
    elif inspect.isclass(_unwrap_partial(thing)):
        if not hasattr(experiment, "initial_setup"):
            raise ConfigError(
                f"experiment {name!r}: the class {_unwrap_partial(thing).__qualname__} has no "
                f"initial_setup(); give it one"
            )
        experiment = experiment.initial_setup()
    if not isinstance(experiment, Experiment):
        raise ConfigError(
            f"experiment {name!r} returns a {type(experiment).__name__}; it must return an Experiment"
        )
    # An experiment from user code has its layouts already.
    if allocation_mode not in (None, experiment.config.get("allocation_mode")):
        raise ConfigError(
            f"--allocation_mode {allocation_mode}: the layouts of {name!r} are set in its "
            f"code, which returns an "
            "Experiment; set allocation_mode there, or return the configuration instead of the "
            "result of its build()"
        )
    # Set the names and the environment of the run.
    if experiment.config:
        config = {**experiment.config, "experiment_name": name, "trial_name": trial_name}
    else:
        config = {}
    scheduling = build_scheduling(name)
    env = {**(scheduling.env if scheduling is not None else {}), **experiment.control.env}
    validate(LaunchSpec(env=env), "launch.")
    control = replace(experiment.control, experiment_name=name, trial_name=trial_name, env=env)
    return replace(experiment, control=control, config=config)


def build_scheduling(name: str) -> Scheduling | None:
    """Return the resources requested by the experiment registered as `name`, or None.

    An experiment can request resources only if it is registered as a class with a method
    `scheduling_setup()`, which returns them.
    """
    thing = experiments.get(name)
    if not inspect.isclass(_unwrap_partial(thing)) or not hasattr(
        _unwrap_partial(thing), "scheduling_setup"
    ):
        return None
    setup: Any = thing()
    scheduling: Scheduling = setup.scheduling_setup()
    return scheduling


def _unwrap_partial(thing: Any) -> Any:
    """Return the class or function in `thing`, without any `functools.partial` around it."""
    return _unwrap_partial(thing.func) if isinstance(thing, partial) else thing


def start(name: str, trial_name: str, *, mode: str = "local") -> RunResult:
    """Run the experiment registered as `name`. Raises the same errors as `run`."""
    check_mode(mode)
    check_machines(name, mode)
    return run(build_registered(name, trial_name), mode=mode)


def check_machines(name: str, mode: str = "local") -> list[str]:
    """Return notes on resources that the experiment `name` requests, but that `mode` ignores.

    `name` is the name under which the experiment is registered. Raises `ConfigError` if the
    experiment requests several nodes and `mode` is `local`.
    """
    scheduling = build_scheduling(name)
    if scheduling is None:
        return []
    if mode == "local" and scheduling.n_nodes > 1:
        raise ConfigError(
            f"experiment {name!r} requests {scheduling.n_nodes} x {scheduling.gpus_per_node} devices, and "
            f"mode=local is one machine; "
            "start it with --mode slurm or --mode ray, or request one node"
        )
    ignored = scheduling.list_ignored_fields()
    if ignored:
        return [f"mode={mode} ignores {', '.join(ignored)} of {name!r}; mode=slurm uses them"]
    return []
