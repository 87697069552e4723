"""Construction of a run's engines and of the components of its session.

Also builds the lines with follow-up commands that are shown at the end of a run.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from weft.data.loader import LoadedData
from weft.data.sample import SequenceSample
from weft.data.tokenizer import Tokenizer
from weft.engine.device import format_hardware
from weft.evaluation.run_suite import RunEngine, RunSuite
from weft.evaluation.suite import FOLDER
from weft.experiment import Control, Experiment
from weft.graph.mfc import MFCDef
from weft.launch.facts import forecast, make_peak_formatter
from weft.launch.plan import predict_step
from weft.launch.resolve import ResolvedRun, RunData
from weft.launch.run_lock import find_run_url
from weft.observe.jsonl import shorten_path
from weft.observe.plan_table import build_plan
from weft.planner.run_plan import describe_run
from weft.runtime.calls import WorkerGroup
from weft.runtime.commands import BuildWorker
from weft.runtime.device_group import DeviceGroup
from weft.runtime.directory import LOGS, RunDirectory
from weft.runtime.dispatch import DeviceTransport, ThreadDevice
from weft.runtime.evaluate import Evaluator, FixedPrompts
from weft.runtime.hosts import HostGroup
from weft.runtime.master import Master
from weft.runtime.samples import SampleReader
from weft.runtime.session import SessionParts
from weft.storage.buckets import is_remote
from weft.storage.copies import find_runs_folder

if TYPE_CHECKING:
    from weft.runtime.ray import DeviceLaunch


def build_engines(
    run: ResolvedRun, data: RunData, directory: RunDirectory, launch: DeviceLaunch | None
) -> DeviceGroup:
    """Build the engines of a run, on the devices of `launch` or in this process.

    Waits for the device processes. Raises `UserError` if an engine cannot be built.
    """
    experiment = run.experiment
    cache = _get_cache_folder(experiment, directory)
    if launch is None:
        devices: DeviceTransport = ThreadDevice(run.device)
        logs = None
    else:
        devices = launch.wait_for_devices()
        logs = directory.path.absolute() / LOGS
        cache = cache.absolute()
    specs = data.horizon.build_specs(experiment, data.longest)
    build = BuildWorker(experiment, specs, run.tokenizers, cache, str(run.device))
    return DeviceGroup(devices, experiment, build, logs)


def assemble(
    run: ResolvedRun,
    data: RunData,
    directory: RunDirectory,
    group: DeviceGroup,
    baseline: float | None,
    *,
    plan_shown: bool = False,
    hosts: HostGroup | None = None,
) -> SessionParts:
    """Return all components of a session that runs the engines of `group`. Writes nothing.

    `baseline` is the memory in GiB that this process used before the engines were built, or None if
    other processes have built them. `plan_shown` says that a plan has been shown already. `hosts`
    are the hosts that run the experiment together.
    """
    experiment, tokenizers, horizon = run.experiment, run.tokenizers, data.horizon
    loaded = data.loaded
    # Forecast the memory from what the engines describe.
    facts = group.describe()
    numerics = group.describe_numerics()
    machine = group.describe_hardware()
    hardware = format_hardware(machine, numerics["device"])
    room = machine["memory"]
    described_numerics = {**numerics, "hardware": hardware, "memory": room}
    batches = loaded.train.build_large_batches()
    expected = forecast(experiment, facts, batches, run.device, baseline or 0.0)
    ending_lines = build_next_lines(experiment, _find_run_place(experiment.control))
    if hosts is not None and not hosts.is_first:
        ending_lines = []  # the folder of this host is removed at the end
    return SessionParts(
        experiment=experiment,
        directory=directory,
        group=group,
        master=Master(experiment, group, loaded.train, tokenizers, hosts),
        evaluator=_build_evaluator(experiment, group, loaded, tokenizers, hosts),
        samples=SampleReader(
            experiment.graph, group, tokenizers[experiment.data_role], horizon.steps
        ),
        horizon=horizon,
        hardware=hardware,
        ending_lines=ending_lines,
        format_peak_memory=None if baseline is None else make_peak_formatter(expected, room),
        plan_shown=plan_shown,
        fixed_prompts=_build_fixed_prompts(
            experiment, group, data.fixed_prompts, tokenizers, directory, hosts
        ),
        eval_suite=_build_suite(run, data, group, directory, hosts),
        data=loaded,
        plan=build_plan(
            describe_run(experiment, horizon, facts, loaded, expected), described_numerics
        ),
        predicted=predict_step(
            experiment, expected, run.device, machine, loaded, in_process=baseline is not None
        ),
        hosts=hosts,
    )


def _get_cache_folder(experiment: Experiment, directory: RunDirectory) -> Path:
    """Return the folder in which the outputs of model function calls are cached.

    The folder is `outputs` in `dataset.cache_dir` if that is set, else `cache` in the run's
    directory.
    """
    shared = experiment.dataset.cache_dir
    if shared is None:
        return directory.path / "cache"
    return Path(shared).expanduser() / "outputs"


def _build_fixed_prompts(
    experiment: Experiment,
    group: WorkerGroup,
    prompts: SequenceSample | None,
    tokenizers: Mapping[str, Tokenizer],
    directory: RunDirectory,
    hosts: HostGroup | None,
) -> FixedPrompts | None:
    if experiment.fixed_prompts is None or prompts is None:
        return None
    return FixedPrompts(
        experiment, experiment.fixed_prompts, group, prompts, tokenizers, directory.path, hosts
    )


def _build_suite(
    run: ResolvedRun,
    data: RunData,
    group: WorkerGroup,
    directory: RunDirectory,
    hosts: HostGroup | None,
) -> RunSuite | None:
    if data.eval_suite is None:
        return None
    engine = RunEngine(run.experiment, group, run.tokenizers, hosts)
    name = _find_run_place(run.experiment.control)
    return RunSuite(data.eval_suite, engine, directory.path / FOLDER, name)


def _build_evaluator(
    experiment: Experiment,
    group: WorkerGroup,
    data: LoadedData,
    tokenizers: Mapping[str, Tokenizer],
    hosts: HostGroup | None,
) -> Evaluator | None:
    if experiment.evaluation is None or not data.valid:
        return None
    return Evaluator(experiment, experiment.evaluation, group, data.valid, tokenizers, hosts)


INDENT = " " * 8
REPORT = "report.html"


def _find_run_place(control: Control) -> str:
    """Return the URL of a run in a bucket, or the path of another run, for messages."""
    if is_remote(control.fileroot):
        return find_run_url(control)
    return str(Path(control.fileroot).expanduser() / control.experiment_name / control.trial_name)


def build_next_lines(experiment: Experiment, run: Path | str) -> list[str]:
    """Return the lines for the end of a run: the path of its report, and follow-up commands.

    `run` is the run's directory or URL. Returns an empty list if the run saves no model.
    """
    heads = {experiment.roles[role].head: role for role in reversed(experiment.saved_roles)}
    if "lm" in heads:
        commands = _build_policy_lines(experiment, heads["lm"], run)
    elif "score" in heads:
        commands = _build_reward_model_lines(experiment, heads["score"], run)
    else:
        return []
    lines = [f"report: {run}/{REPORT}", f"next:   {commands[0]}"]
    for command in commands[1:]:
        lines.append(INDENT + command)
    return lines


def _build_policy_lines(experiment: Experiment, role: str, run: Path | str) -> list[str]:
    control = experiment.control
    run_word = shlex.quote(str(run))
    calls = []
    for node in experiment.graph.nodes:
        if isinstance(node, MFCDef) and node.role == role and node.trains:
            calls.append(node)
    if not any(call.args.get("loss") == "sft" for call in calls):
        initial_path = experiment.roles[role].path
        commands = [f"weft chat {run_word}"]
        if initial_path is not None:
            before = shlex.quote(shorten_path(initial_path))
            commands.append(f"weft chat {before} {run_word}    # before and after")
        return commands
    name = _find_free_trial(control, "rw")
    reward = _find_run_place(replace(control, trial_name=name))
    ppo = _build_quickstart("ppo", _find_free_trial(control, "ppo"), control)
    return [
        f"weft chat {run_word}",
        f"{_build_quickstart('rw', name, control)} model.path={run_word} dataset.type=preference "
        f"dataset.path=PAIRS.jsonl",
        f"{ppo} actor.path={run_word} rew.path={shlex.quote(str(reward))} "
        "dataset.path=PROMPTS.jsonl",
    ]


def _build_reward_model_lines(experiment: Experiment, role: str, run: Path | str) -> list[str]:
    control = experiment.control
    initial_path = experiment.roles[role].path
    run_word = shlex.quote(str(run))
    actor = "POLICY" if initial_path is None else shlex.quote(shorten_path(initial_path))
    ppo = _build_quickstart("ppo", _find_free_trial(control, "ppo"), control)
    return [
        f"{ppo} actor.path={actor} rew.path={run_word} dataset.path=PROMPTS.jsonl",
        f"weft eval rm {run_word} PAIRS.jsonl    # accuracy",
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
    folder = find_runs_folder(control.fileroot) / control.experiment_name
    trial = name
    number = 2
    while (folder / trial).exists():
        trial = f"{name}-{number}"
        number += 1
    return trial
