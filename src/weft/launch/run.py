"""Functions that run a configuration in this process, or return its plan.

A command line has been parsed into a configuration (`cli/quickstart.py`). From there to the first
step, `run` goes through these stages once: build the experiment (`build_with_choices`), check it,
fetch missing files from the hub, lock the run's directory, resolve the models and check what needs
torch (`launch/resolve.py`), read the data, plan and build the engines (`launch/assemble.py`), and
run. All checks that do not need torch are made before torch is imported.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from weft.checkpoints import config_file, names
from weft.data.spec import list_source_specs
from weft.engine.spec import ModelSpec
from weft.errors import CheckpointError, ConfigError, build_unknown_name_error
from weft.experiment import Experiment
from weft.experiments.checks import MODES
from weft.experiments.common import ExperimentConfig, build_experiment
from weft.experiments.models import find_option_role, resolve_roles
from weft.launch import other_launchers
from weft.observe.configuration import flatten_options, is_left_open
from weft.observe.sinks import check_sinks
from weft.options import to_mapping
from weft.redaction import MASK, iterate_masked_options
from weft.registry import import_user_code

if TYPE_CHECKING:
    from weft.observe.progress import DisplayOptions
    from weft.runtime.ray import RayCluster


@dataclass(frozen=True)
class RunResult:
    """Result of a finished run.

    `metrics` has one mapping of metrics per step, and `directory` is the run's directory.
    """

    metrics: list[dict[str, Any]]
    directory: Path

    def checkpoint(self, role: str) -> Path:
        """Return the directory of a role's latest checkpoint, in Hugging Face format.

        Raises `CheckpointError` if the role has no checkpoint.
        """
        folder = self.directory / "checkpoints"
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
    None stands for the mode in the configuration. With `local` and a single device, the run uses
    this process. `show` configures the output. `built` is the result of
    `build_with_choices(config)`, if the caller has it already.

    Raises `UserError` for invalid input, before anything is trained or written. Raises `RunError`
    if the run fails. Raises `Interrupted` after Ctrl-C or SIGTERM, once the current step is
    finished and a recovery point is written.
    """
    experiment, mode = _build_checked(config, mode, built=built)
    from weft.runtime.directory import RunDirectory, RunLock, admit
    from weft.runtime.processes import SupervisorPipe

    directory = RunDirectory.from_control(experiment.control)
    resumes = admit(directory, experiment.control, experiment.resolve(), experiment.left_at_default)
    lock = RunLock(directory.path)
    lock.take()
    try:
        is_restart = SupervisorPipe.from_environment(os.environ).restarts > 0
        cluster = None if is_restart else start_ray_while_torch_loads(experiment, mode)
        from weft.launch.assemble import assemble
        from weft.launch.supervisor import RestartingRun

        restarting_run = RestartingRun(
            assemble(
                experiment, directory, mode, is_restart=is_restart, show=show, cluster=cluster
            ),
            lambda: assemble(experiment, directory, mode, is_restart=True, show=show),
            experiment,
        )
        return RunResult(restarting_run.run(resumes=resumes), directory.path)
    finally:
        lock.release()


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
    experiment, mode = _build_checked(mark_as_planned(config), mode, data=data)
    from weft.launch.dry_run_plan import build_plan_lines
    from weft.runtime.directory import RunDirectory, admit

    lines = build_plan_lines(experiment, mode, data=data, width=width)
    try:
        admit(
            RunDirectory.from_control(experiment.control),
            experiment.control,
            experiment.resolve(),
            experiment.left_at_default,
        )
    except ConfigError as error:  # does not matter for a plan
        lines.append(f"note: the run itself would be refused: {error}")
    return lines


def mark_as_planned(config: ExperimentConfig | Experiment) -> ExperimentConfig | Experiment:
    """Return a copy of the configuration in which all models have `planned=True`, for a dry run.

    The weights of such models are not read. An `Experiment` is returned unchanged.
    """
    if isinstance(config, Experiment) or not is_dataclass(config) or isinstance(config, type):
        return config
    own = {spec.name: getattr(config, spec.name) for spec in fields(config)}
    models = {}
    for name, value in own.items():
        if isinstance(value, ModelSpec):
            models[name] = replace(value, planned=True)
    return cast(ExperimentConfig, replace(config, **models))


def _build_checked(
    config: ExperimentConfig | Experiment,
    mode: str | None,
    *,
    data: bool = True,
    built: Experiment | None = None,
) -> tuple[Experiment, str]:
    """Build the experiment and return it with the mode, after all checks that don't need torch.

    Without `data`, tokenizers and datasets are not checked. `built` is the experiment of `config`,
    if the caller has it already.
    """
    other_launchers.check_started_directly(os.environ)
    experiment = built or build_with_choices(config)
    if mode is None:
        mode = str(experiment.config.get("mode", "local"))
    check_mode(mode)
    check_no_masks(experiment)
    os.environ.update(experiment.control.env)
    import_user_code(experiment.control.imports)
    experiment.check()
    if mode == "local" and experiment.control.n_nodes > 1:
        raise ConfigError(
            f"n_nodes={experiment.control.n_nodes}: mode=local is this machine; write mode=ray or "
            f"mode=slurm"
        )
    check_devices(experiment)
    check_sinks(experiment.control.loggers)
    return build_with_files(config, experiment, data=data), mode


def build_with_files(
    config: ExperimentConfig | Experiment, experiment: Experiment, *, data: bool = True
) -> Experiment:
    """Download missing config.json files of models, and return the experiment to run.

    `experiment` was built from `config` before the download. If files were downloaded, it is built
    again, unless `config` is already an `Experiment`. Raises `UserError` if a model is neither on
    this machine nor on the hub. With `data`, tokenizers and datasets are checked too.
    """
    if fetch_configs(experiment, data=data) and not isinstance(config, Experiment):
        return build_with_choices(config)  # build again, with values from the downloaded files
    return experiment


def fetch_configs(experiment: Experiment, *, data: bool = True) -> bool:
    """Check that models and datasets can be downloaded, and fetch the config.json of each model.

    Models and datasets at local paths or in the local cache are not checked. Returns whether any
    file was downloaded. If so, the caller must build the experiment again, with the values in the
    files.

    Without `data`, only models are checked, not tokenizers and datasets. Raises `CheckpointError`
    for a model or `DataError` for a dataset if it is not on the hub or the hub does not answer. The
    message names the option.
    """
    # the import of the hub's library takes a noticeable part of a second
    import huggingface_hub

    from weft.data import hub
    from weft.data.sources import check_available

    fileroot = experiment.control.fileroot
    fetched = False
    for role, spec in experiment.roles.items():
        for path, kind in ((spec.path, "path"), (spec.tokenizer.path, "tokenizer.path")):
            if path is None or Path(path).expanduser().exists() or not (data or kind == "path"):
                continue
            if not data and kind == "path" and config_file.find_shipped_config(path) is not None:
                continue  # a plan uses the config.json that is shipped with weft
            option = f"{find_option_role(experiment.config, role, path) if kind == 'path' else role}.{kind}"
            hint = names.suggest_path(path, fileroot)
            if kind == "path" and config_file.find_shipped_config(path) is not None:
                hint = "--dry-run=config plans the run from the config.json that weft ships"
            hub.check_model(option, path, hint)
            if kind == "path" and not hub.is_cached(path, ["config.json"]):
                huggingface_hub.hf_hub_download(path, "config.json")
                fetched = True
    for option, path in _iterate_datasets(experiment) if data else ():
        check_available(path, option)
    return fetched


def _iterate_datasets(experiment: Experiment) -> Iterator[tuple[str, str]]:
    """Yield (option name, path) for every dataset that is given by a path."""
    dataset = experiment.dataset
    for option in ("train_path", "valid_path", "path"):
        path = getattr(dataset, option)
        if path is not None:
            typed = experiment.config.get("dataset", {}).get("path") == path
            yield "dataset.path" if typed else f"dataset.{option}", path
    for index, source in enumerate(list_source_specs(dataset)):
        for option, path in (("path", source.path), ("valid_path", source.valid_path)):
            if path and source.named is None:
                yield f"dataset.sources[{index}].{option}", path


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
    given = dict(flatten_options(to_mapping(config)))
    settled = flatten_options(experiment.config)
    chosen = []
    for name, value in settled:
        if is_left_open(given.get(name, "")) and value != given.get(name, value):
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


def start_ray_while_torch_loads(experiment: Experiment, mode: str) -> RayCluster | None:
    """Start a private Ray cluster while another thread imports `weft.launch.assemble` and torch.

    A cluster is started only if the run has several devices that are all CPUs of this machine;
    otherwise, returns None. Ray is started in the main thread, because the cluster ends with the
    thread that started it.
    """
    from weft.launch.cluster import can_start_early, check_ray, start_early

    if not can_start_early(experiment, mode):
        return None
    check_ray(experiment)
    # imported first, because two threads importing one package can interfere
    import_module("weft.runtime.ray")

    def load_assemble() -> None:
        with suppress(Exception):  # the next import raises the error
            import_module("weft.launch.assemble")

    loader = threading.Thread(target=load_assemble, name="weft-imports")
    loader.start()
    try:
        return start_early(experiment)
    finally:
        loader.join()
