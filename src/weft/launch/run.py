"""Stages of a run from its configuration to its end, and of a dry run.

A command line has been parsed into a configuration (`cli/quickstart.py`). Everything up to the
download of missing files needs no torch, so mistakes are reported before torch is loaded.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from weft.data.spec import DatasetSpec
from weft.engine.spec import JAX_COORDINATOR, ModelSpec
from weft.errors import CheckpointError, ConfigError, build_unknown_name_error
from weft.experiment import Experiment
from weft.experiments.checks import MODES
from weft.experiments.common import ExperimentConfig, build_experiment
from weft.experiments.models import resolve_roles
from weft.launch import other_launchers
from weft.observe.best import find_best_checkpoint
from weft.observe.configuration import flatten_options, is_left_open
from weft.observe.sinks import check_sinks
from weft.options import to_mapping
from weft.redaction import MASK, iterate_masked_options
from weft.registry import import_user_code
from weft.storage.buckets import is_remote
from weft.storage.copies import forget_data_copies

if TYPE_CHECKING:
    from weft.observe.progress import DisplayOptions
    from weft.runtime.directory import RunDirectory
    from weft.runtime.hosts import HostGroup
    from weft.runtime.mirror import RunMirror
    from weft.runtime.ray import RayCluster
    from weft.runtime.session import SessionParts


@dataclass(frozen=True)
class RunResult:
    """Result of a finished run.

    `metrics` has the rows of metrics.jsonl, one per step, and `directory` is the run's directory.
    """

    metrics: list[dict[str, Any]]
    directory: Path

    def checkpoint(self, role: str, *, best: bool = False) -> Path:
        """Return the directory of a role's latest checkpoint, in Hugging Face format.

        With `best`, it is the best checkpoint of a run with the option `save_best`. Raises
        `CheckpointError` if the role has no such checkpoint.
        """
        folder = self.directory / "checkpoints"
        if best:
            return find_best_checkpoint(self.directory, role)
        steps = [p for p in (folder / role).glob("step*") if p.name.removeprefix("step").isdigit()]
        if not steps:
            if folder.is_dir():
                roles = sorted(p.name for p in folder.iterdir() if p.is_dir())
            else:
                roles = []
            raise CheckpointError(
                f"{self.directory} has no checkpoint of role {role!r}; roles: "
                f"{', '.join(roles) or 'none'}"
            )
        return max(steps, key=lambda p: int(p.name.removeprefix("step")))


def run(
    config: ExperimentConfig | Experiment,
    *,
    mode: str | None = None,
    show: DisplayOptions | None = None,
    built: Experiment | None = None,
) -> RunResult:
    """Run an experiment to its end.

    `mode` is `local` to use the devices of this machine, or `ray` to use an existing Ray cluster;
    with None, the mode in the configuration is used. With `local` and a single device, the run uses
    this process. `show` configures the output. `built` is the result of
    `build_with_choices(config)`, if the caller has it already.

    Raises `UserError` for invalid input, before anything is trained or written. Raises `RunError`
    if the run fails. Raises `Interrupted` after Ctrl-C or SIGTERM, once the current step is
    finished and a recovery point is written.
    """
    # Configure, check, and download what is missing.
    forget_data_copies()
    experiment, mode = set_up_experiment(config, mode, built=built)
    check_mode(mode)
    check(experiment)
    check_machine(experiment, mode)
    experiment = build_with_files(config, experiment)
    # Find the other hosts of the run, and lock its directory.
    from weft.launch.cluster import start_ray_while_torch_loads
    from weft.launch.run_lock import lock_run, upload_during
    from weft.runtime.directory import RunDirectory
    from weft.runtime.processes import SupervisorPipe

    hosts = None
    if JAX_COORDINATOR in os.environ:
        from weft.launch.hosts import join_hosts

        hosts, experiment = join_hosts(experiment, mode, os.environ)
    directory = RunDirectory.from_control(experiment.control)
    with lock_run(experiment, directory) as (mirror, resumes):
        if hosts is not None:
            resumes = hosts.decide(lambda: resumes)
        # Resolve, read the data, plan and assemble; a restart after lost devices does so again.
        is_restart = SupervisorPipe.from_environment(os.environ).restarts > 0
        cluster = None if is_restart else start_ray_while_torch_loads(experiment, mode)
        from weft.launch.supervisor import RestartingRun
        from weft.observe.progress import DisplayOptions
        from weft.runtime.session import Session

        show = show or DisplayOptions()
        build = partial(prepare, experiment, directory, mode, mirror=mirror, show=show, hosts=hosts)
        parts = build(is_restart=is_restart, cluster=cluster)
        restarting_run = RestartingRun(
            Session(parts, show), lambda: Session(build(is_restart=True), show), experiment
        )
        # Run.
        with upload_during(mirror):
            return RunResult(restarting_run.run(resumes=resumes), directory.path)


def prepare(
    experiment: Experiment,
    directory: RunDirectory,
    mode: str,
    *,
    is_restart: bool = False,
    show: DisplayOptions | None = None,
    cluster: RayCluster | None = None,
    hosts: HostGroup | None = None,
    mirror: RunMirror | None = None,
) -> SessionParts:
    """Resolve models, read data, plan and build the engines of a checked experiment.

    With `mode` "local" and one device, the run uses this process. Otherwise each device gets a
    separate process, which starts while the data are read. If `cluster` is given, the processes
    start in this running Ray cluster. With `is_restart`, they replace those of lost devices.
    `hosts` are those that run the experiment together, each with all of it in one process.

    `mirror` uploads the files of a run in a bucket. `show` configures the output; the plan of a run
    with device processes is shown before their engines are built. Raises `UserError` for every
    problem that can be detected before the first step. On any error, device processes are ended and
    the cluster is closed.
    """
    from weft.launch.assemble import assemble, build_engines
    from weft.launch.cluster import launch_devices, relaunch_devices
    from weft.launch.facts import measure_held_memory
    from weft.launch.plan import build_early_plan
    from weft.launch.resolve import read_data, resolve_run, set_up_device

    in_process = mode == "local" and experiment.num_devices == 1
    with ExitStack() as undo:
        if cluster is not None:
            undo.callback(cluster.close)
        # Resolve the models.
        device = set_up_device(experiment, in_process=in_process)
        resolved = resolve_run(experiment, device)
        # Start the devices in the background, and read the data.
        launch = None
        if not in_process:
            if is_restart:
                launch = relaunch_devices(experiment, mode)
            else:
                launch = launch_devices(experiment, mode, cluster)
            undo.callback(launch.cluster.close)
        is_quiet = show is not None and show.view is not None
        data = read_data(resolved, progress=False if is_quiet else None, ahead=True)
        undo.callback(data.loaded.close)
        # Plan.
        baseline = measure_held_memory(device) if in_process else None
        shows_plan = show is not None and not in_process and not is_restart
        if show is not None and shows_plan:
            count = experiment.num_devices
            processes = "a process for the device"
            if count > 1:
                processes = f"{count} processes, one for each device"
            show.announce(build_early_plan(resolved, data, mode), f"starting {processes}")
        # Build the engines and assemble the session.
        group = build_engines(resolved, data, directory, launch)
        undo.pop_all()
        undo.callback(data.loaded.close)
        undo.callback(group.close, 0.0)
        parts = assemble(
            resolved, data, directory, group, baseline, plan_shown=shows_plan, hosts=hosts
        )
        undo.pop_all()
    return replace(parts, mirror=mirror)


def dry_run(
    config: ExperimentConfig | Experiment,
    *,
    mode: str | None = None,
    data: bool = True,
    width: int | None = None,
) -> list[str]:
    """Return the plan of a run as lines, with a verdict on memory. Writes nothing.

    No weights are read and no devices are needed: with `device=cuda` or `search.gpu`, the plan can
    be for a GPU that this machine does not have. Without `data`, neither rows nor tokenizers are
    read, so the number of steps is unknown. `width` is the number of columns of the terminal.
    Raises `UserError` for invalid input.
    """
    # Configure, check, and download what is missing, as `run` does.
    config = mark_as_planned(config)
    experiment, mode = set_up_experiment(config, mode)
    check_mode(mode)
    check(experiment)
    check_machine(experiment, mode)
    experiment = build_with_files(config, experiment, data=data)
    return plan_checked(experiment, mode, data=data, width=width)


def plan_checked(
    experiment: Experiment, mode: str, *, data: bool = True, width: int | None = None
) -> list[str]:
    """Return the lines of `dry_run` for an experiment that is checked and whose files are there."""
    # Resolve, read the data and plan, as `prepare` does, but for devices that need not exist.
    from weft.launch.facts import TargetDevices
    from weft.launch.plan import build_plan_lines
    from weft.launch.resolve import read_data, resolve_run
    from weft.launch.run_lock import find_refusal

    roles = {name: replace(spec, planned=True) for name, spec in experiment.roles.items()}
    target = TargetDevices.from_experiment(experiment, mode)
    resolved = resolve_run(replace(experiment, roles=roles), target.device, tokenizers=data)
    lines = build_plan_lines(resolved, read_data(resolved) if data else None, target, width)
    # Say whether the run itself would be refused.
    refusal = find_refusal(experiment)
    if refusal is not None:  # does not matter for a plan
        lines.append(f"note: the run itself would be refused: {refusal}")
    return lines


def mark_as_planned(
    config: ExperimentConfig | Experiment, *, needs_data: bool = True
) -> ExperimentConfig | Experiment:
    """Return a copy of the configuration in which all models have `planned=True`, for a dry run.

    The weights of such models are not read. Without `needs_data`, the run need not name a dataset. An
    `Experiment` is returned unchanged.
    """
    if isinstance(config, Experiment) or not is_dataclass(config) or isinstance(config, type):
        return config
    options = {spec.name: getattr(config, spec.name) for spec in fields(config)}
    changed: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, ModelSpec):
            changed[name] = replace(value, planned=True)
        if isinstance(value, DatasetSpec) and not needs_data:
            changed[name] = replace(value, planned=True)
    return cast(ExperimentConfig, replace(config, **changed))


def set_up_experiment(
    config: ExperimentConfig | Experiment, mode: str | None, *, built: Experiment | None = None
) -> tuple[Experiment, str]:
    """Return the experiment and the mode; set its environment variables and import its user code.

    `built` is the experiment of `config`, if the caller has it already.
    """
    other_launchers.check_started_directly(os.environ)
    experiment = built or build_with_choices(config)
    if mode is None:
        mode = str(experiment.config.get("mode", "local"))
    check_no_masks(experiment)
    os.environ.update(experiment.control.env)
    import_user_code(experiment.control.imports)
    return experiment, mode


def check(experiment: Experiment) -> None:
    """Check the experiment and its loggers, for which torch is not needed.

    Options were checked before, when the experiment was built from its configuration
    (`experiments/checks.py`). What needs torch is checked by `resolve_run`.
    """
    experiment.check()
    check_sinks(experiment.control.loggers)


def check_machine(experiment: Experiment, mode: str) -> None:
    """Raise `ConfigError` if the options name other machines or fewer devices than the run needs."""
    if is_remote(experiment.control.fileroot):
        from weft.launch.run_lock import check_bucket

        check_bucket(experiment.control, mode)
    if mode == "local" and experiment.control.n_nodes > 1:
        raise ConfigError(
            f"n_nodes={experiment.control.n_nodes}: mode=local is this machine; write mode=ray or "
            f"mode=slurm"
        )
    check_devices(experiment)


def build_with_files(
    config: ExperimentConfig | Experiment, experiment: Experiment, *, data: bool = True
) -> Experiment:
    """Download missing config.json files of models, and return the experiment to run.

    `experiment` was built from `config` before the download. If files were downloaded, it is built
    again, unless `config` is already an `Experiment`. Raises `UserError` if a model is neither on
    this machine nor on the hub. With `data`, tokenizers and datasets are checked too.
    """
    from weft.launch.downloads import fetch_configs

    if fetch_configs(experiment, data=data) and not isinstance(config, Experiment):
        return build_with_choices(config)  # build again, with values from the downloaded files
    return experiment


def build_with_choices(config: ExperimentConfig | Experiment) -> Experiment:
    """Build the experiment of `config`, and record which values weft has chosen itself.

    These are the values of options that `config` leaves unset or `auto`. The names of the options
    are listed in the experiment's field `chosen`.
    """
    if isinstance(config, Experiment):
        return resolve_roles(config)
    experiment = build_experiment(config)
    if not is_dataclass(config) or isinstance(config, type):
        return experiment
    configured = dict(flatten_options(to_mapping(config)))
    resolved = flatten_options(experiment.config)
    chosen = []
    for name, value in resolved:
        if is_left_open(configured.get(name, "")) and value != configured.get(name, value):
            chosen.append(name)
    return replace(experiment, chosen=chosen)


def check_devices(experiment: Experiment) -> None:
    """Raise `ConfigError` if the layouts need more devices than `n_nodes` x `n_gpus_per_node`."""
    control = experiment.control
    count = experiment.num_devices
    if control.n_gpus_per_node is not None and count > (
        most := control.n_nodes * control.n_gpus_per_node
    ):
        raise ConfigError(
            f"the layouts need {count} devices, and n_nodes={control.n_nodes} x "
            f"n_gpus_per_node={control.n_gpus_per_node} are "
            f"{most}; raise one of them, choose smaller layouts or lower device_mesh numbers, or "
            f"leave n_gpus_per_node out"
        )


def check_no_masks(experiment: Experiment) -> None:
    """Raise `ConfigError` if an option contains a mask instead of a secret.

    A run stores its configuration with masks in place of secrets, so this happens if a stored
    configuration is used again.
    """
    hidden = list(iterate_masked_options(experiment.config))
    if hidden:
        raise ConfigError(
            f"{', '.join(hidden)}: the value is {MASK}, which replaces a secret that was not "
            f"stored; set it again, preferably "
            "by an environment variable: write ${oc.env:NAME} as the value and export NAME"
        )


def check_mode(mode: str) -> None:
    """Raise `ConfigError` for an unknown mode, and for `slurm`, which needs a command line."""
    if mode not in MODES:
        raise build_unknown_name_error("mode", mode, MODES)
    if mode == "slurm":
        raise ConfigError(
            "mode=slurm: a job runs a command line; write weft quickstart ... mode=slurm "
            "or weft start ... --mode "
            "slurm (register_quickstart provides one for your own configuration, "
            "register_experiment for an experiment)"
        )
