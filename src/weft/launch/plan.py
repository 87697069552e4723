"""Plan of a run, as it is shown before its engines are built, and as `--dry-run` shows it.

Both are made from the resolved models and the data, without weights and without using the run's
devices. `build_plan_lines` adds a line that says whether the run fits in memory. Without data, as
for `--dry-run=config`, only options and config.json are known.

`predict_step` predicts the steps of the run itself, to be compared with what it measures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weft.checkpoints.hf_io import read_config
from weft.data.loader import LoadedData
from weft.data.sample import SequenceSample
from weft.data.spec import DatasetSpec
from weft.engine.backends.auto import choose_backend
from weft.engine.device import (
    count_cores,
    describe_profiled_device,
    read_memory_bytes,
    read_thread_limit,
)
from weft.engine.service_spec import NO_NETWORK
from weft.engine.shared_prefixes import find_shared_prefixes
from weft.engine.spec import MAX_NEW_TOKENS, TPU
from weft.errors import ConfigError, UserError
from weft.experiment import Experiment
from weft.experiments.planned_networks import MODULES, build_planned_network
from weft.graph.mfc import MFCDef
from weft.launch.facts import TargetDevices, find_shared_base, forecast, predict_facts
from weft.launch.resolve import ResolvedRun, RunData
from weft.observe.memory import measure_file_pages_gb
from weft.observe.metrics import PREDICTED, format_three_digits
from weft.observe.plan_table import build_plan
from weft.observe.predicted import PEAK, PEAK_MEMORY, STEP_SECONDS, WEIGHTS, PredictedStep
from weft.observe.progress import RunPlan
from weft.options import read
from weft.planner.cluster import find_cluster, is_mixed
from weft.planner.devices import GIB, estimate_cpu_rates, find_gpu_rates, subtract_reserved
from weft.planner.forecast import MemoryForecast, format_smaller_options
from weft.planner.placement import (
    DEFAULT_ANSWER_TOKENS,
    DEFAULT_PROMPT_TOKENS,
    PAIRED_TYPES,
    SearchSpec,
    is_plan_path,
)
from weft.planner.plan_file import PLAN, parse_plan
from weft.planner.problem import PlacementProblem
from weft.planner.profile import ProfileMachine, find_usable_profile
from weft.planner.row_lengths import RowLengths
from weft.planner.run_plan import describe_run, group_roles_by_device
from weft.planner.simulated_run import build_shown_plan
from weft.planner.step_forecast import StepForecast, forecast_step, with_expert_loads

SAMPLED_ROWS = 128  # rows whose lengths are read, evenly distributed over the data
SHOWN_DIFFERENCE = 0.1  # share by which an estimate differs from that of a plan file, to be shown
MIN_PREFIX = 15  # tokens of the shortest prefix that training shares between rows


def build_early_plan(run: ResolvedRun, data: RunData, mode: str) -> RunPlan:
    """Return the plan of a run, computed before the device processes build their engines.

    If the options name no GPU, all devices are assumed to be like those of this machine.
    """
    experiment = run.experiment
    target = TargetDevices.from_experiment(experiment, mode)
    facts = predict_facts(experiment, target.device, run.tokenizers)
    batches = data.loaded.train.build_large_batches()
    expected = forecast(experiment, facts, batches, target.device, capacity=target.usable)
    numerics: dict[str, Any] = {"hardware": target.description or "GPUs of other machines"}
    if target.usable is not None and target.usable < math.inf:
        numerics["memory"] = int(
            target.usable * (target.count if target.device.type == "cpu" else 1)
        )
    described = describe_run(experiment, data.horizon, facts, data.loaded, expected)
    return build_plan(described, numerics)


def build_plan_lines(
    run: ResolvedRun, data: RunData | None, target: TargetDevices, width: int | None = None
) -> list[str]:
    """Return the lines of a dry run's plan for a terminal of `width` columns.

    Without `data`, a batch of the configured size is assumed. The roles are `planned`.
    """
    experiment = run.experiment
    notes: list[str] = []
    step = forecast_run_step(experiment, target, None if data is None else data.loaded)
    workload: Sequence[SequenceSample] | PlacementProblem
    if data is not None:
        workload = data.loaded.train.build_large_batches()
    else:
        batch, lengths = build_assumed_batch(experiment)
        workload = [batch] if step is None else step.problem
        notes = [
            f"data: not read; memory is that of {lengths}, which dataset.max_seqlen, or "
            f"dataset.max_prompt_len and gen.max_new_tokens, bound"
        ]
    facts = predict_facts(experiment, target.device, run.tokenizers)
    assumed = None
    if experiment.plan and is_plan_path(str(experiment.config.get("allocation_mode"))):
        assumed = forecast_run_step(_with_planned_lengths(experiment), target)
    target, expected = _forecast(experiment, facts, workload, target)
    described = describe_run(
        experiment,
        None if data is None else data.horizon,
        facts,
        None if data is None else data.loaded,
        expected,
    )
    plan = build_plan(described, {"hardware": target.description})
    return [
        *_drop_memory_lines(plan).format_whole(width),
        *notes,
        *([] if step is None else step.format_lines(None if data is None else data.horizon.steps)),
        *(() if step is None else step.notes),
        *([] if assumed is None else compare_with_plan(experiment, assumed, target)),
        *_format_verdict(experiment, target, expected),
    ]


def forecast_run_step(
    experiment: Experiment, target: TargetDevices, data: LoadedData | None = None
) -> StepForecast | None:
    """Return the forecast of a step on the devices of `target`.

    With `data`, lengths are those of a sample of its rows. A profile of these devices is used if
    there is one; if it is damaged or stale, a note says so. Returns None for TPUs and for GPUs
    whose speed is not known, and if no call has a network of weft's.
    """
    if target.usable is None or target.name == "TPU":
        return None
    on_gpu = target.device.type == "cuda"
    # Read the sizes of the networks.
    networks = {}
    for role, spec in experiment.roles.items():
        if spec.path and spec.backend not in (*NO_NETWORK, "hf"):
            family = read_config(spec.path, spec.type)[1]
            networks[role] = build_planned_network(spec, family, target.device)
    if not networks:
        return None
    # Find the speed of the devices.
    per_node = experiment.control.n_gpus_per_node or experiment.num_devices
    gib = target.usable / GIB
    cluster = None
    if on_gpu:
        single = all(network.settings.dtype == "float32" for network in networks.values())
        dtype = "float32" if single else "bfloat16"
        try:
            if is_mixed(target.name):
                total = int(experiment.config.get("n_nodes") or 1) * per_node
                cluster = find_cluster(target.name, dtype, gib, total, per_node)
                rates = cluster.rates
            else:
                rates = find_gpu_rates(target.name, dtype, gib, per_node)
        except ConfigError:
            return None
    else:
        rates = estimate_cpu_rates(count_cores(), gib, per_node, read_thread_limit())
        rates = replace(rates, memory=float(read_memory_bytes(target.device)))
    options = experiment.config
    search = read(SearchSpec(), options.get("search") or {})
    user_dataset = read(DatasetSpec(), select_user_dataset_options(experiment))
    # Use a profile if there is one; that of this machine does not fit GPUs that an option names.
    notes: tuple[str, ...] = ()
    if search.profile is not None or not on_gpu or torch.cuda.is_available():
        keys = {(sizes.profile_key, sizes.settings.dtype) for sizes in networks.values()}
        # The profile of a GPU can be used on a machine that has none.
        profiled_device = target.device if torch.cuda.is_available() else torch.device("cpu")
        machine = ProfileMachine(*describe_profiled_device(profiled_device))
        profile, notes = find_usable_profile(keys, machine, search.profile)
        rates = rates.with_profile(profile)
    # Forecast a step with the lengths of the rows, if they were read.
    rows = None
    if data is not None:
        size = experiment.graph.get_node(experiment.steps_follow).batch_size
        rows = sample_lengths(data, size or 1)
    shared_roles = {}
    for role in networks:
        base = find_shared_base(experiment, role)
        if base is not None and base in networks:
            shared_roles[role] = base
    forecast = forecast_step(
        experiment, networks, rates, search, user_dataset, rows, cluster, shared_roles
    )
    return replace(forecast, notes=notes)


def name_device_type(target: TargetDevices) -> str:
    """Return the type of the devices, such as "H100" or "cpu", whose speed is known."""
    if target.device.type != "cuda":
        return target.device.type
    if is_mixed(target.name):
        return target.name
    return find_gpu_rates(target.name, "bfloat16").name


def _with_planned_lengths(experiment: Experiment) -> Experiment:
    """Return the experiment with the lengths that its plan assumes, up to the limits of the options.

    With the same assumed lengths, the estimates differ from those of the plan only for other
    reasons.
    """
    assert experiment.plan is not None
    estimates = parse_plan(experiment.plan, PLAN).estimates
    search = dict(experiment.config.get("search") or {})
    user_options = select_user_dataset_options(experiment)
    names = []
    if _list_samplers(experiment):
        if user_options.get("max_prompt_len") is None:
            names = ["prompt_tokens"]
    elif not isinstance(user_options.get("max_seqlen"), int):
        names = ["prompt_tokens", "answer_tokens"]
    new_tokens = [
        int(call.args.get("max_new_tokens") or MAX_NEW_TOKENS)
        for call in experiment.graph.list_model_calls()
        if call.method == "generate"
    ]
    limits = {
        "prompt_tokens": user_options.get("max_prompt_len") or math.inf,
        "answer_tokens": min(new_tokens, default=math.inf),
    }
    for name in names:
        planned = estimates.get(name)
        if search.get(name) is None and type(planned) is int and planned > 0:
            search[name] = int(min(planned, limits[name]))
    return replace(experiment, config={**experiment.config, "search": search})


def _list_samplers(experiment: Experiment) -> list[MFCDef]:
    """Return the calls that sample all answers.

    A call that samples only a share of them is left out, because it also uses answers of the rows.
    """
    samplers = []
    for call in experiment.graph.list_model_calls():
        if call.method == "generate" and "share" not in call.args:
            samplers.append(call)
    return samplers


def compare_with_plan(
    experiment: Experiment, step: StepForecast, target: TargetDevices
) -> list[str]:
    """Return lines on estimates of the run's plan file that differ much from those of `step`.

    `step` is a forecast without the run's rows, like the estimates in the file.
    """
    if not experiment.plan:
        return []
    source = str(experiment.config.get("allocation_mode"))
    if not is_plan_path(source):
        return []
    plan = parse_plan(experiment.plan, source)
    lines = []
    planned_device, device = plan.estimates.get("device"), name_device_type(target)
    if planned_device is not None and planned_device != device:
        lines.append(f"{source}: was made for {planned_device}, and this run is on {device}")
    values: list[tuple[str, Any, float]] = [
        ("step", plan.estimates.get("step_seconds"), step.step_seconds)
    ]
    for name, call in step.calls.items():
        estimated = plan.calls[name].estimated if name in plan.calls else {}
        values.append((name, estimated.get("seconds"), call.seconds))
    changed = []
    tokens = plan.estimates.get("tokens_per_step")
    if isinstance(tokens, int) and tokens != step.num_tokens:
        changed.append(f"{tokens:,} tokens per step there, {step.num_tokens:,} now")
    for name, planned, seconds in values:
        if not isinstance(planned, int | float) or planned <= 0:
            continue
        if abs(seconds - planned) > SHOWN_DIFFERENCE * planned:
            changed.append(
                f"{name} {format_three_digits(planned)} s there, "
                f"{format_three_digits(seconds)} s now"
            )
    if changed:
        lines.append(
            f"{source}: other estimates than in the file, since it was edited or the options "
            f"differ: {'; '.join(changed)}"
        )
    return lines


def sample_lengths(data: LoadedData, batch: int) -> RowLengths | None:
    """Return the lengths of a sample of the training rows, or None if they cannot be sampled.

    `batch` is the number of rows per step. Rows that are read as a stream are not sampled, and
    neither are those of a dataset that makes whole batches.
    """
    total = sum(len(part) for part in data.parts)
    if not total:
        return None
    samples = []
    for part in data.parts:
        count = min(len(part), max(1, SAMPLED_ROWS * len(part) // total))
        chosen = [number * len(part) // count for number in range(count)]
        if chosen:
            samples.append(part.take(chosen))
    rows = SequenceSample.gather(samples)
    prompts = np.zeros(rows.num_ids, np.int64)
    if "prompt" in rows.data:
        prompts = rows.lengths["prompt"].astype(np.int64)
    answers = np.zeros(0, np.int64)
    if "completion" in rows.data:
        answers = rows.lengths["completion"].astype(np.int64)
    return RowLengths(prompts, answers, _compute_saved_share(rows, prompts, answers, batch))


def _compute_saved_share(
    rows: SequenceSample, prompts: npt.NDArray[np.int64], answers: npt.NDArray[np.int64], batch: int
) -> float:
    """Return the share of a batch's tokens in prefixes that another row has computed already."""
    count = min(rows.num_ids, batch)
    if "prompt" not in rows.data or count < 2:
        return 0.0
    tokens: Sequence[npt.NDArray[np.int64]] = [
        np.asarray(prompt) for prompt in list(rows.sequences("prompt"))[:count]
    ]
    saved = 0
    for shared in find_shared_prefixes(tokens, MIN_PREFIX):
        saved += shared.size * (len(shared.sequences) - 1)
    answered = float(answers.mean()) * count if len(answers) else 0.0
    return saved / max(1.0, float(prompts[:count].sum()) + answered)


def _drop_memory_lines(plan: RunPlan) -> RunPlan:
    """Return the plan without its lines on memory.

    A dry run reports the same numbers in the lines after the plan.
    """
    return replace(
        plan,
        hidden=["memory"],
        details=[line for line in plan.details if not line.startswith("memory: ")],
    )


def select_user_dataset_options(experiment: Experiment) -> dict[str, Any]:
    """Return the dataset options that the user has set, by name.

    Options that weft has chosen are left out: a limit such as the model's context says nothing
    about the rows.
    """
    user_options = {}
    for name, value in (experiment.config.get("dataset") or {}).items():
        if f"dataset.{name}" not in experiment.chosen:
            user_options[name] = value
    return user_options


def build_assumed_batch(experiment: Experiment) -> tuple[SequenceSample, str]:
    """Return a batch of assumed rows, and a phrase for its lengths.

    Rows have the maximum length that the user's options allow, or 512 + 512 tokens. If no data are
    read, the memory forecast uses this batch instead of the data's largest batches.
    """
    user_options = select_user_dataset_options(experiment)
    search = experiment.config.get("search") or {}
    samplers = _list_samplers(experiment)
    total = user_options.get("max_seqlen")
    if not isinstance(total, int):
        total = DEFAULT_PROMPT_TOKENS + DEFAULT_ANSWER_TOKENS
    longest = user_options.get("max_prompt_len")
    limit = experiment.dataset.max_prompt_len or DEFAULT_PROMPT_TOKENS
    default_prompt = longest or min(DEFAULT_PROMPT_TOKENS, limit)
    if not samplers or not longest:
        default_prompt = min(default_prompt, max(1, total // 2))
    prompt = search.get("prompt_tokens") or default_prompt
    answer = search.get("answer_tokens") or max(1, total - prompt)
    size = experiment.graph.get_node(experiment.steps_follow).batch_size
    size = size or max(1, int(user_options.get("train_tokens_per_batch") or 0) // (prompt + answer))
    lengths = {"prompt": [[prompt]] * size}
    if not samplers:
        lengths["completion"] = [
            [answer] * (2 if experiment.dataset_type in PAIRED_TYPES else 1)
        ] * size
    data = {}
    for key, groups in lengths.items():
        data[key] = torch.zeros(sum(map(sum, groups)), dtype=torch.int64)
    batch = SequenceSample.from_groups([str(number) for number in range(size)], lengths, data)
    if samplers:
        description = f"prompts of {prompt:,} tokens and {_describe_answers(samplers[0], search)}"
    else:
        description = f"rows of {prompt:,} + {answer:,} tokens"
    return batch, description


def _describe_answers(call: MFCDef, search: Mapping[str, Any]) -> str:
    """Return a phrase for the lengths of the answers that a call samples."""
    longest = int(call.args.get("max_new_tokens") or MAX_NEW_TOKENS)
    mean = search.get("answer_tokens") or longest
    return f"answers of {mean:,}" + (f" (at most {longest:,})" if mean < longest else "")


def _forecast(
    experiment: Experiment,
    facts: Mapping[str, Mapping[str, Any]],
    workload: Sequence[SequenceSample] | PlacementProblem,
    target: TargetDevices,
) -> tuple[TargetDevices, MemoryForecast]:
    """Return the smallest devices on which the run fits, and the memory forecast for them.

    The devices to choose from are `target.list_candidates()`; if the run fits on none of them, the
    largest are returned. `facts` and `workload` are those of `forecast`.
    """
    for candidate in target.list_candidates():
        memory_forecast = forecast(
            experiment, facts, workload, candidate.device, capacity=candidate.usable
        )
        assert candidate.usable is not None
        if find_largest_need(experiment, memory_forecast)[0] <= candidate.usable:
            break
    return candidate, memory_forecast


def find_largest_need(
    experiment: Experiment, expected: MemoryForecast
) -> tuple[float, MemoryForecast]:
    """Return the highest memory need of any device, in bytes, and the forecast for that device.

    `expected` is the forecast for all roles on all devices.
    """
    parts = []
    for names in group_roles_by_device(experiment).values():
        parts.append(expected.select_roles(names))
    worst = max(parts, key=lambda part: part.total)
    return worst.total, worst


def _format_verdict(
    experiment: Experiment, target: TargetDevices, expected: MemoryForecast
) -> list[str]:
    needed, worst = find_largest_need(experiment, expected)
    assert target.usable is not None
    if worst.incomplete:
        scope = f" without activations of {', '.join(worst.incomplete)}"
    else:
        scope = ""
    lines = [target.format_verdict(needed, scope)]
    if needed > target.usable and target.device.type == "cuda" and not worst.incomplete:
        cases = {}
        for name, case in expected.on_gpu.items():
            if name in worst.roles:
                cases[name] = case
        for line in format_smaller_options(cases, target.usable, expected.missing):
            lines.append(f"  {line}")
    return lines


# -- predictions for each step of a run


def predict_step(
    experiment: Experiment,
    expected: MemoryForecast,
    device: torch.device,
    machine: Mapping[str, Any],
    data: LoadedData | None,
    *,
    in_process: bool,
) -> PredictedStep:
    """Return the values that are predicted for each step of a run.

    `expected` is the memory forecast, `device` a device of the run, and `machine` its description
    (`describe_hardware`). `data` are the run's rows. With `in_process`, the run computes in this
    process. Seconds are those of a step with rows of average length, memory is that of the largest
    batches.
    """
    metrics = _predict_memory(experiment, expected, in_process=in_process)
    target = _find_target(experiment, device, machine)
    forecast, reason = _forecast_seconds(experiment, target, data)
    if forecast is None:
        return PredictedStep(metrics, reason=reason)
    memory = dict(metrics)
    metrics |= _list_seconds(forecast)

    def predict_again(loads: Mapping[str, float]) -> dict[str, float]:
        return memory | _list_seconds(with_expert_loads(forecast, experiment, loads))

    divides_experts = any(mesh.layout.expert > 1 for mesh in forecast.estimate.meshes.values())
    basis = "; ".join([forecast.basis, *forecast.notes])
    title = f"{experiment.control.experiment_name}/{experiment.control.trial_name}"
    steps = 1 if not forecast.problem.max_staleness else forecast.problem.max_staleness + 3
    plan = build_shown_plan(experiment, forecast, title, steps=steps)
    repeat = predict_again if divides_experts else None
    return PredictedStep(metrics, basis, forecast.left_out, plan=plan, predict_again=repeat)


def _list_seconds(forecast: StepForecast) -> dict[str, float]:
    """Return the predicted seconds of a step and of its calls, and the bytes of moved weights."""
    metrics = {f"{PREDICTED}{STEP_SECONDS}": forecast.step_seconds}
    for name, call in forecast.calls.items():
        metrics[f"{PREDICTED}{name}"] = call.seconds
        if call.moved_bytes:
            metrics[f"{PREDICTED}{name}/{WEIGHTS}"] = float(call.moved_bytes)
    return metrics


def _find_target(
    experiment: Experiment, device: torch.device, machine: Mapping[str, Any]
) -> TargetDevices:
    """Return the devices that the run has, as their processes describe them."""
    count = experiment.num_devices
    if experiment.control.device == TPU:
        return TargetDevices(device, "TPU", count, math.inf, "TPU")
    name = str(machine["name"])
    if device.type == "cuda":
        usable = subtract_reserved(machine["memory"] / GIB) * GIB
    else:
        usable = machine["memory"] / count
    return TargetDevices(device, name, count, usable, name)


def _forecast_seconds(
    experiment: Experiment, target: TargetDevices, data: LoadedData | None
) -> tuple[StepForecast | None, str]:
    """Return the forecast of a step and "", or None and the reason why nothing can be predicted."""
    backends = {}
    for role, spec in experiment.roles.items():
        if spec.path:
            backends[role] = choose_backend(spec).backend
    for role, backend in backends.items():
        if backend not in (*MODULES, *NO_NETWORK):
            return None, f"the speed of {role}.backend={backend} is not known"
    if not set(backends.values()) & {"torch", "jax"}:
        return None, "no role has a network of weft's own (backend=torch or jax)"
    try:
        forecast = forecast_run_step(experiment, target, data)
    except UserError as error:  # the forecast needs more than the run does
        return None, str(error)
    if forecast is None:
        return None, f"the speed of the device is not known ({target.name})"
    return forecast, ""


def _predict_memory(
    experiment: Experiment, expected: MemoryForecast, *, in_process: bool
) -> dict[str, float]:
    """Return the predicted peak memory of the run and of each call.

    On a CPU, a run measures the size of its process. This includes memory that was in use before
    the engines were built, and files that are mapped into memory.
    """
    on = group_roles_by_device(experiment)
    other = expected.baseline * GIB
    if in_process and expected.device == "cpu":
        other += measure_file_pages_gb() * GIB
    metrics: dict[str, float] = {}
    if expected.roles and not expected.incomplete:
        most = max(expected.select_roles(names).total for names in on.values())
        metrics[f"{PREDICTED}{PEAK_MEMORY}"] = (most + other) / GIB
    for name, peak in expected.compute_call_peaks(on).items():
        metrics[f"{PREDICTED}{name}/{PEAK}"] = float(round(peak + other))
    return metrics
