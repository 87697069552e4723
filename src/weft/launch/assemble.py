"""Construction of a run's session from an experiment, with cheap checks before expensive ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from weft.checkpoints.config_file import HF_BACKEND, TORCH_BACKEND, prefix_option
from weft.checkpoints.hf_io import read_config, read_raw
from weft.data.datasets.prompt import read_fixed_prompts
from weft.data.features import with_additions
from weft.data.loader import LoadedData, load_data
from weft.data.sample import SequenceSample
from weft.data.tokenizer import Tokenizer
from weft.engine.backends.auto import choose_backend
from weft.engine.backends.common import check_replicated_layout, check_spec, with_dtype
from weft.engine.device import (
    GIGABYTE,
    format_hardware,
    resolve_device,
    set_deterministic,
    set_tf32,
)
from weft.engine.generation.caches import compute_token_bytes
from weft.engine.service_spec import NO_NETWORK
from weft.engine.torch.engine import DTYPES, choose_dtype
from weft.engine.torch.network_source import check_layout
from weft.errors import ConfigError
from weft.experiment import Experiment
from weft.experiments.models import find_option_role, read_model_context
from weft.launch.cluster import get_device_kind, launch_devices, relaunch_devices
from weft.launch.facts import TargetDevices, forecast, measure_held_memory, predict_facts
from weft.launch.next_steps import build_next_lines
from weft.observe.plan import RunPlan
from weft.observe.progress import DisplayOptions
from weft.planner.lengths import RunLength
from weft.planner.run_plan import build_plan, make_peak_formatter
from weft.registry import backends
from weft.runtime.calls import check_calls, check_tokens
from weft.runtime.commands import BuildWorker
from weft.runtime.device_group import DeviceGroup
from weft.runtime.directory import LOGS, RunDirectory
from weft.runtime.dispatch import DeviceTransport, ThreadDevice
from weft.runtime.evaluate import Evaluator, FixedPrompts
from weft.runtime.group import WorkerGroup
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
        experiment, tokenizers = check_without_data(experiment, device)
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
        data.check_max_seqlen(partial(check_longest_sequence, experiment))
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


def check_without_data(
    experiment: Experiment, device: torch.device
) -> tuple[Experiment, dict[str, Tokenizer]]:
    """Run all checks that need no data, and load the tokenizers.

    Returns the experiment, in which every role has a dtype, and a mapping from role to tokenizer.
    Also configures torch (determinism and TF32). Raises `UserError` if a check fails.
    """
    set_deterministic(experiment.control.deterministic)
    set_tf32(experiment.control.tf32, device)
    check_calls(experiment)
    tokenizers = load_checked_tokenizers(experiment)
    experiment = with_dtypes(experiment, device)
    check_layouts(experiment)
    return experiment, tokenizers


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


def with_dtypes(experiment: Experiment, device: torch.device) -> Experiment:
    """Return a copy of the experiment in which every role has a dtype.

    Roles without a dtype get the dtype of the role whose tokenizer encodes the data (`data_role`).
    A policy and its reference model therefore have equal dtypes.
    """
    main = experiment.roles[experiment.data_role]
    if main.path is None or main.backend in NO_NETWORK:
        own = main
    else:
        own = with_dtype(main, main.path, device)
    dtype = own.dtype or "float32"
    roles = {}
    for name, spec in experiment.roles.items():
        roles[name] = replace(spec, dtype=spec.dtype or dtype)
    return replace(experiment, roles=roles)


def check_layouts(experiment: Experiment) -> None:
    """Raise `ConfigError` if a backend does not support a layout that the run uses.

    A layout describes how a model is distributed over devices. Roles and their calls can each have
    one. The message names the layout's option.
    """
    wanted = dict(experiment.role_meshes)
    roles = {role: role for role in experiment.roles}
    for name, call in experiment.calls.items():
        roles[call.name] = call.role
        if call.layout is not None:
            wanted[call.name] = experiment.call_meshes[name]
    for name, mesh in reversed(
        wanted.items()
    ):  # check calls first: an error should name a call's own option
        spec = experiment.roles[roles[name]]
        try:
            if spec.backend == "torch":
                check_layout(spec, mesh.layout, read_config(check_spec(spec), spec.type)[1])
            elif spec.backend == "hf":
                check_replicated_layout(mesh.layout)
            elif (
                mesh.layout.num_devices > 1
                and len(signature(backends.get(spec.backend)).parameters) < 3
            ):
                raise ConfigError(
                    f"backend={spec.backend} runs on one device; write d1, or backend=torch"
                )
        except ConfigError as error:
            rule = str(error).removeprefix("layout: ").removeprefix(f"layout={mesh.layout}: ")
            raise ConfigError(f"{name}.layout={mesh.layout}: {rule}") from None


def check_longest_sequence(experiment: Experiment, rows: int) -> None:
    """Raise `ConfigError` if a call cannot process the longest sequence.

    The longest sequence consists of the longest row of the data, which has `rows` tokens, and of
    the tokens sampled after it. It must not exceed any call's maximum number of tokens per
    micro-batch, and must fit in the KV cache.
    """
    check_kv_cache(experiment, rows)
    calls = experiment.graph.list_model_calls()
    sampled = max(
        (int(call.args.get("max_new_tokens") or 0) for call in calls if call.method == "generate"),
        default=0,
    )
    for call in calls:
        limit = call.max_tokens_per_microbatch or experiment.control.max_tokens_per_microbatch
        if rows and call.method != "generate" and rows + sampled > limit:
            own = f"{call.name}." if call.max_tokens_per_microbatch else ""
            if sampled:
                what = f"a prompt of {rows:,} tokens and {sampled:,} new ones"
            else:
                what = f"a row of {rows:,} tokens"
            if sampled:
                fix = "gen.max_new_tokens"
            else:
                fix = "dataset.max_seqlen, which cuts longer rows"
            raise ConfigError(
                f"{own}max_tokens_per_microbatch={limit}: cannot hold the longest sequence, "
                f"{what}; raise it, or lower {fix}"
            )


def check_kv_cache(experiment: Experiment, rows: int) -> None:
    """Raise `ConfigError` if the KV cache of a single sequence does not fit in `gen.kv_cache_gb`.

    `rows` is the number of tokens of the longest row.
    """
    for name, call in experiment.calls.items():
        limit_gb = call.args.get("kv_cache_gb")
        spec = experiment.roles[call.role]
        if call.method != "generate" or limit_gb is None or spec.backend != "torch":
            continue
        layout = experiment.call_meshes[name].layout
        config = read_config(check_spec(spec), spec.type)[1]
        each = compute_token_bytes(config, DTYPES[choose_dtype(spec)]) / (
            layout.tensor * layout.pipeline
        )
        # rows have completions here, so the length of the prompts is not known
        if "share" in call.args:
            prompt = 1
        else:
            prompt = max(rows, 1)
        needed = prompt + int(call.args.get("max_new_tokens") or 0)
        room = int(limit_gb * GIGABYTE / each)
        if needed > room:
            raise ConfigError(
                f"gen.kv_cache_gb={limit_gb:g}: has room for keys and values of {room:,} tokens, and "
                f"a prompt with its completion can "
                f"have {needed:,}; write {1.05 * needed * each / GIGABYTE:.3g} or more, or leave "
                f"it out"
            )


def check_stop_ids(experiment: Experiment, tokenizers: Mapping[str, Tokenizer]) -> None:
    """Raise `ConfigError` if a stop id is not in the model's vocabulary.

    The message contains the size of the vocabulary.
    """
    for call in experiment.calls.values():
        spec = experiment.roles[call.role]
        stop_ids = call.args.get("stop_ids") or []
        if not stop_ids or spec.path is None or spec.backend in NO_NETWORK:
            continue
        size = read_raw(spec.path).get("vocab_size")
        if isinstance(size, int) and max(stop_ids) >= (
            known := max(size, tokenizers[call.role].vocab_size)
        ):
            raise ConfigError(
                f"gen.stop_ids={list(stop_ids)}: {call.role} has a vocabulary of {known:,} tokens, 0 "
                f"to {known - 1:,}, and "
                f"no token {max(stop_ids):,}; take it out (gen.stop takes texts)"
            )


def load_checked_tokenizers(experiment: Experiment) -> dict[str, Tokenizer]:
    """Load every role's tokenizer, and check that it fits the run.

    Raises `UserError` if a tokenizer is not usable.
    """
    tokenizers = load_tokenizers(experiment)
    check_tokens(experiment, tokenizers)
    check_stop_ids(experiment, tokenizers)
    return tokenizers


def check_configs(experiment: Experiment) -> None:
    """Raise `CheckpointError` if a role's config.json does not describe a network.

    The message names the option and the file. Must be called before the tokenizers are loaded: the
    library that loads them also reads config.json, and would report a problem in it as a problem
    with the tokenizer.
    """
    for role, spec in experiment.roles.items():
        if spec.path is None or spec.backend not in (TORCH_BACKEND, HF_BACKEND):
            continue
        with prefix_option(f"{find_option_role(experiment.config, role, spec.path)}.path"):
            if spec.backend == TORCH_BACKEND:
                read_config(spec.path, spec.type)
            else:
                read_raw(spec.path)


def load_tokenizers(experiment: Experiment) -> dict[str, Tokenizer]:
    """Load the tokenizers of all roles, and return them by role.

    Roles with equal tokenizer options and paths share one object. Raises `ConfigError` for a role
    without a path, and `UserError` if a config.json does not describe a network or a tokenizer
    cannot be loaded.
    """
    check_configs(experiment)
    shared: dict[str, Tokenizer] = {}
    tokenizers = {}
    for role, spec in experiment.roles.items():
        if spec.path is None and spec.tokenizer.path is None:
            raise ConfigError(
                f"{role}.path is missing: give a Hugging Face directory or a hub name"
            )
        key = repr((spec.tokenizer, spec.path, spec.trust_remote_code))
        if key not in shared:
            option = f"{find_option_role(experiment.config, role, str(spec.path))}.tokenizer"
            shared[key] = Tokenizer.load(spec.tokenizer, spec.path, spec.trust_remote_code, option)
        tokenizers[role] = shared[key]
    return tokenizers


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
