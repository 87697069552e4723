"""Construction of a run's session from an experiment, cheap checks before expensive ones.

What the user can do next with the run is put into words here, too."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from weft.data.datasets.prompt import read_fixed_prompts
from weft.data.features import with_additions
from weft.data.loader import LoadedData, load_data
from weft.data.sample import SequenceSample
from weft.data.tokenizer import Tokenizer
from weft.engine.backends.auto import choose_backend
from weft.engine.device import format_hardware, resolve_device, set_deterministic, set_tf32
from weft.experiment import Control, Experiment
from weft.experiments.models import read_model_context
from weft.graph.mfc import MFCDef
from weft.launch.cluster import get_device_kind, launch_devices, relaunch_devices
from weft.launch.facts import TargetDevices, forecast, measure_held_memory, predict_facts
from weft.launch.resolve import check_longest_sequence, resolve_run
from weft.observe.jsonl import shorten_path
from weft.observe.progress import DisplayOptions, RunPlan
from weft.planner.lengths import RunLength
from weft.planner.run_plan import build_plan, make_peak_formatter
from weft.runtime.calls import WorkerGroup
from weft.runtime.commands import BuildWorker
from weft.runtime.device_group import DeviceGroup
from weft.runtime.directory import LOGS, RunDirectory
from weft.runtime.dispatch import DeviceTransport, ThreadDevice
from weft.runtime.evaluate import Evaluator, FixedPrompts
from weft.runtime.master import Master
from weft.runtime.samples import SampleReader
from weft.runtime.schedule import check_steps
from weft.runtime.session import Session, SessionParts

if TYPE_CHECKING:
    from weft.runtime.ray import DeviceLaunch, RayCluster


def assemble(
    experiment: Experiment,
    directory: RunDirectory,
    mode: str = "local",
    *,
    is_restart: bool = False,
    show: DisplayOptions | None = None,
    cluster: RayCluster | None = None,
) -> Session:
    """Build the session of a run: all of its components and the terminal output.

    `show` configures the terminal output. If the run uses device processes, its plan is shown
    before the engines are built. `build_parts` describes the other parameters.
    """
    show = show or DisplayOptions()
    announce = None if is_restart else show.announce
    quiet = show.view is not None
    parts = build_parts(
        experiment,
        directory,
        mode,
        is_restart=is_restart,
        quiet=quiet,
        announce=announce,
        cluster=cluster,
    )
    return Session(parts, show)


def build_parts(
    experiment: Experiment,
    directory: RunDirectory,
    mode: str = "local",
    *,
    is_restart: bool = False,
    quiet: bool = False,
    announce: Callable[[RunPlan, str], None] | None = None,
    cluster: RayCluster | None = None,
) -> SessionParts:
    """Build all components of a session: data, engines, evaluator and others. Writes nothing.

    With `mode` "local" and one device, the run uses this process. Otherwise each device gets a
    separate process, which starts while the data are read. If `cluster` is given, the processes
    start in this running Ray cluster. With `is_restart`, they replace those of lost devices.

    If there are device processes, `announce` is called before the engines are built. Its arguments
    are the plan and the result of `format_start_line`. `quiet` hides the progress of reading the
    data.

    Raises `UserError` for every problem that can be detected before the first step. On any error,
    the cluster is closed.
    """
    control = experiment.control
    alone = mode == "local" and experiment.num_devices == 1
    with ExitStack() as undo:
        if cluster is not None:
            undo.callback(cluster.close)
        # Check what needs no data, and start the devices in the background.
        experiment = replace(
            experiment,
            roles={name: choose_backend(spec) for name, spec in experiment.roles.items()},
        )
        if alone:
            device = resolve_device(control.device)
        else:
            device = torch.device(get_device_kind(experiment))
        set_deterministic(control.deterministic)
        set_tf32(control.tf32, device)
        run = resolve_run(experiment, device)
        experiment, tokenizers = run.experiment, run.tokenizers
        if alone:
            launch = None
        else:
            launch = _launch_devices(experiment, mode, undo, cluster, is_restart=is_restart)
        # Read the data, which determine the length of the run.
        data = load_data(
            experiment.dataset,
            experiment.dataset_type,
            tokenizers[experiment.data_role],
            seed=control.seed,
            progress=False if quiet else None,
            ahead=True,
        )
        undo.callback(data.close)
        fixed_prompts = load_fixed_prompts(experiment, tokenizers)
        data.check_max_seqlen(partial(check_longest_sequence, run))
        horizon = RunLength.from_experiment(experiment, data.train)
        check_steps(control.profile_steps, horizon.steps)
        specs = horizon.build_specs(experiment)
        baseline = measure_held_memory(device) if alone else 0.0
        if not alone and announce is not None:
            announce(
                build_early_plan(experiment, mode, horizon, tokenizers, data),
                format_start_line(experiment),
            )
        # Build the engines.
        cache = _get_cache_folder(experiment, directory)
        if launch is None:
            devices: DeviceTransport = ThreadDevice(device)
            logs = None
        else:
            devices = launch.wait_for_devices()
            logs = directory.path.absolute() / LOGS
            cache = cache.absolute()
        build = BuildWorker(experiment, specs, tokenizers, cache, str(device))
        group = DeviceGroup(devices, experiment, build, logs)
        undo.pop_all()
        undo.callback(data.close)
        undo.callback(group.close, 0.0)
        # Forecast the memory and build the remaining components.
        facts = group.describe()
        numerics = group.describe_numerics()
        machine = group.describe_hardware()
        hardware = format_hardware(machine, numerics["device"])
        room = machine["memory"]
        known = {**numerics, "hardware": hardware, "memory": room}
        expected = forecast(experiment, facts, data.train.build_large_batches(), device, baseline)
        parts = SessionParts(
            experiment=experiment,
            directory=directory,
            group=group,
            master=Master(experiment, group, data.train, tokenizers),
            evaluator=_build_evaluator(experiment, group, data, tokenizers),
            samples=SampleReader(
                experiment.graph, group, tokenizers[experiment.data_role], horizon.steps
            ),
            horizon=horizon,
            plan=build_plan(experiment, horizon, facts, known, data, expected),
            hardware=hardware,
            ending_lines=build_next_lines(experiment, directory.path),
            format_peak_memory=make_peak_formatter(expected, room) if alone else None,
            plan_shown=not alone and announce is not None,
            fixed_prompts=_build_fixed_prompts(
                experiment, group, fixed_prompts, tokenizers, directory
            ),
            data=data,
        )
        undo.pop_all()
    return parts


def _launch_devices(
    experiment: Experiment,
    mode: str,
    undo: ExitStack,
    cluster: RayCluster | None,
    *,
    is_restart: bool,
) -> DeviceLaunch:
    """Start the device processes; with `is_restart`, they replace lost ones.

    Registers a callback with `undo` that closes the Ray cluster of the processes.
    """
    if is_restart:
        launch = relaunch_devices(experiment, mode)
    else:
        launch = launch_devices(experiment, mode, cluster)
    undo.callback(launch.cluster.close)
    return launch


def _get_cache_folder(experiment: Experiment, directory: RunDirectory) -> Path:
    """Return the folder in which the outputs of model function calls are cached.

    The folder is `outputs` in `dataset.cache_dir` if that is set, else `cache` in the run's
    directory.
    """
    shared = experiment.dataset.cache_dir
    if shared is None:
        return directory.path / "cache"
    return Path(shared).expanduser() / "outputs"


def build_early_plan(
    experiment: Experiment,
    mode: str,
    horizon: RunLength,
    tokenizers: Mapping[str, Tokenizer],
    data: LoadedData,
) -> RunPlan:
    """Return the plan of a run, computed before the device processes build their engines.

    If the options name no GPU, all devices are assumed to be like those of this machine.
    """
    target = TargetDevices.from_experiment(experiment, mode)
    facts = predict_facts(experiment, target.device, tokenizers)
    expected = forecast(
        experiment, facts, data.train.build_large_batches(), target.device, capacity=target.usable
    )
    numerics: dict[str, Any] = {"hardware": target.description or "GPUs of other machines"}
    if target.usable is not None:
        numerics["memory"] = int(
            target.usable * (target.count if target.device.type == "cpu" else 1)
        )
    return build_plan(experiment, horizon, facts, numerics, data, expected)


def format_start_line(experiment: Experiment) -> str:
    """Return a line for the user that says how many device processes are about to start."""
    count = experiment.num_devices
    if count > 1:
        return f"starting {count} processes, one for each device"
    return "starting a process for the device"


def load_fixed_prompts(
    experiment: Experiment, tokenizers: Mapping[str, Tokenizer]
) -> SequenceSample | None:
    """Return the tokenized prompts of the file `eval_prompts`, or None if the run has no such file.

    Raises `DataError` if the file cannot be used.
    """
    path = experiment.control.eval_prompts
    if path is None or experiment.fixed_prompts is None:
        return None
    (call,) = experiment.fixed_prompts.graph.list_model_calls()
    context = read_model_context(experiment.roles[call.role])
    spec = experiment.dataset
    as_chat = bool(spec.args.get("as_chat", (spec.type or experiment.dataset_type) == "chat"))
    tokenizer = with_additions(
        replace(spec, system_tags=False, system_tag_length=False), tokenizers[call.role]
    )
    if context is None:
        most = None
    else:
        most = context - int(call.args["max_new_tokens"])
    return read_fixed_prompts(path, tokenizer, as_chat=as_chat, most=most)


def _build_fixed_prompts(
    experiment: Experiment,
    group: WorkerGroup,
    prompts: SequenceSample | None,
    tokenizers: Mapping[str, Tokenizer],
    directory: RunDirectory,
) -> FixedPrompts | None:
    if experiment.fixed_prompts is None or prompts is None:
        return None
    return FixedPrompts(
        experiment, experiment.fixed_prompts, group, prompts, tokenizers, directory.path
    )


def _build_evaluator(
    experiment: Experiment,
    group: WorkerGroup,
    data: LoadedData,
    tokenizers: Mapping[str, Tokenizer],
) -> Evaluator | None:
    if experiment.evaluation is None or not data.valid:
        return None
    return Evaluator(experiment, experiment.evaluation, group, data.valid, tokenizers)


INDENT = " " * 8
REPORT = "report.html"


def build_next_lines(experiment: Experiment, run: Path) -> list[str]:
    """Return the lines for the end of a run: the path of its report, and follow-up commands.

    Returns an empty list if the run saves no model.
    """
    heads = {experiment.roles[role].head: role for role in reversed(experiment.saved_roles)}
    if "lm" in heads:
        commands = _build_policy_lines(experiment, heads["lm"], run)
    elif "score" in heads:
        commands = _build_reward_model_lines(experiment, heads["score"], run)
    else:
        return []
    first, *others = commands
    return [f"report: {run / REPORT}", f"next:   {first}", *(INDENT + each for each in others)]


def _build_policy_lines(experiment: Experiment, role: str, run: Path) -> list[str]:
    control = experiment.control
    at = shlex.quote(str(run))
    calls = []
    for n in experiment.graph.nodes:
        if isinstance(n, MFCDef) and n.role == role and n.trains:
            calls.append(n)
    if not any(call.args.get("loss") == "sft" for call in calls):
        began = experiment.roles[role].path
        if began is None:
            beside = []
        else:
            beside = [f"weft chat {shlex.quote(shorten_path(began))} {at}    # before and after"]
        return [f"weft chat {at}", *beside]
    name = _find_free_trial(control, "rw")
    reward = Path(control.fileroot) / control.experiment_name / name
    return [
        f"weft chat {at}",
        f"{_build_quickstart('rw', name, control)} model.path={at} dataset.type=preference "
        f"dataset.path=PAIRS.jsonl",
        f"{_build_quickstart('ppo', _find_free_trial(control, 'ppo'), control)} actor.path={at} "
        f"rew.path={shlex.quote(str(reward))} "
        "dataset.path=PROMPTS.jsonl",
    ]


def _build_reward_model_lines(experiment: Experiment, role: str, run: Path) -> list[str]:
    control = experiment.control
    began = experiment.roles[role].path
    at = shlex.quote(str(run))
    actor = "POLICY" if began is None else shlex.quote(shorten_path(began))
    ppo = _build_quickstart("ppo", _find_free_trial(control, "ppo"), control)
    return [
        f"{ppo} actor.path={actor} rew.path={at} dataset.path=PROMPTS.jsonl",
        f"weft eval rm {at} PAIRS.jsonl    # accuracy",
    ]


def _build_quickstart(name: str, trial: str, control: Control) -> str:
    if Path(control.fileroot) == Path("./runs"):
        root = ""
    else:
        root = f" fileroot={shlex.quote(control.fileroot)}"
    return (
        f"weft quickstart {name} experiment_name={control.experiment_name} trial_name={trial}{root}"
    )


def _find_free_trial(control: Control, name: str) -> str:
    """Return an unused trial name in the experiment's folder.

    The name is `name` itself or, if that exists, the first free one of `name-2`, `name-3` and so
    on.
    """
    folder = Path(control.fileroot).expanduser() / control.experiment_name
    return next(
        each
        for each in (name, *(f"{name}-{n}" for n in range(2, 10_000)))
        if not (folder / each).exists()
    )
