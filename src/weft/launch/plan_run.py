"""Forecast of a whole run, and of the options with which it would fit or run faster.

Options and config.json suffice; rows are used if they were read. The devices need not exist.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from weft.data.loader import LoadedData
from weft.data.sample import SequenceSample
from weft.data.spec import DatasetSpec
from weft.engine.spec import ModelSpec, ParallelSpec
from weft.errors import ConfigError
from weft.experiment import Experiment
from weft.experiments.common import RunConfig
from weft.experiments.models import find_context, resolve_models
from weft.launch.facts import TargetDevices, forecast, predict_facts
from weft.launch.plan import (
    build_assumed_batch,
    find_largest_need,
    forecast_run_step,
    name_device_type,
)
from weft.launch.resolve import ResolvedRun, read_data, resolve_run
from weft.launch.run import (
    build_with_files,
    check_devices,
    mark_as_planned,
    set_up_experiment,
)
from weft.observe.metrics import format_three_digits
from weft.planner.candidates import list_layouts
from weft.planner.devices import GIB
from weft.planner.forecast import SHARDS, MemoryForecast, list_memory_options
from weft.planner.placement import (
    DEFAULT_ANSWER_TOKENS,
    DEFAULT_PROMPT_TOKENS,
    SEARCH,
    is_plan_path,
)
from weft.planner.plan_file import format_layout
from weft.planner.profile import refuse_unusable_profiles
from weft.planner.run_plan import group_roles_by_device
from weft.planner.step_forecast import StepForecast

# Changes of the limit of tokens in a micro-batch, and of the number of rows in a batch
MICROBATCH_FACTORS = (0.25, 0.5, 2.0, 4.0)
BATCH_FACTORS = (0.5, 2.0)
RECOMPUTE_INTERVALS = (2, 4)
MAX_LAYOUTS = 3  # layouts of a run with one role that are shown
# An option helps if the run is faster by this share, or needs less memory by this share.
MIN_SPEEDUP = 0.02
MIN_MEMORY_SAVED = 0.1


@dataclass(frozen=True)
class RunRows:
    """Rows that a run reads: their lengths, the largest batches, and the length of the run."""

    data: LoadedData
    batches: Sequence[SequenceSample]
    steps: int
    steps_per_epoch: int


@dataclass(frozen=True)
class RunForecast:
    """Forecast of a run on the devices of its options.

    Attributes:
        experiment: The experiment, with its calls placed.
        target: The devices.
        step: Time of a step.
        memory: Memory of all roles.
        worst: Memory of the roles on the device that needs the most.
        needed: Memory that this device needs, in bytes.
        rows: Number of rows per step.
        lengths: Phrase for the lengths of rows; "" if the rows were read.
        steps: Number of steps of the run, or None if it is not known.
        epochs: Number of passes over the rows, or None if they were not read.
    """

    experiment: Experiment
    target: TargetDevices
    step: StepForecast
    memory: MemoryForecast
    worst: MemoryForecast
    needed: float
    rows: int
    lengths: str
    steps: int | None
    epochs: float | None = None

    @property
    def usable(self) -> float:
        """Memory of a device that the run can use, in bytes."""
        assert self.target.usable is not None
        return self.target.usable

    @property
    def fits(self) -> bool:
        return self.needed <= self.usable

    @property
    def device(self) -> str:
        """Type of the devices, such as "H100" or "cpu"."""
        return name_device_type(self.target)

    @property
    def tokens_per_second(self) -> float:
        return self.step.num_tokens / self.step.step_seconds

    def compute_call_peaks(self) -> dict[str, float]:
        """Return the peak memory in bytes of each call, on its device that needs the most."""
        return self.memory.compute_call_peaks(group_roles_by_device(self.experiment))

    def compute_shares(self) -> dict[str, float]:
        """Return the share of the calls' time that each kind of work takes, the largest first."""
        sums: dict[str, float] = {}
        for call in self.step.calls.values():
            for name, seconds in call.parts.items():
                sums[name] = sums.get(name, 0.0) + seconds
        total = sum(sums.values()) or 1.0
        ordered = sorted(sums.items(), key=lambda item: -item[1])
        return {name: seconds / total for name, seconds in ordered}


def with_assumed_lengths(config: RunConfig) -> RunConfig:
    """Return the configuration with usual lengths of rows, unless the user has set a maximum.

    Otherwise, rows would be taken to be as long as the model's context, which can be many times
    what the run's data have. Raises `ConfigError` if the lengths that the user has set exceed the
    model's context.
    """
    data = getattr(config, "dataset", None)
    if not isinstance(data, DatasetSpec):
        return config
    context = find_context(resolve_models(config)) or math.inf
    prompt, answer = config.search.prompt_tokens, config.search.answer_tokens
    if (prompt or 1) + (answer or 1) > context:
        option = (
            "search.prompt_tokens" if (prompt or 1) >= (answer or 1) else "search.answer_tokens"
        )
        raise ConfigError(
            f"{option}={max(prompt or 1, answer or 1)}: prompt and answer together are longer than "
            f"the model's context of {context:,} tokens; lower it"
        )
    if prompt is None:
        room = context / 2 if answer is None else context - answer
        most = data.max_prompt_len or DEFAULT_PROMPT_TOKENS
        prompt = int(min(DEFAULT_PROMPT_TOKENS, most, max(1, room)))
    if answer is None:
        answer = int(min(DEFAULT_ANSWER_TOKENS, context - prompt))
    changes: dict[str, Any] = {}
    if config.generation and data.max_prompt_len is None:
        changes["dataset"] = data = replace(data, max_prompt_len=prompt)
    samples_all = config.generation and config.algorithm != "distill"
    if not samples_all and not isinstance(data.max_seqlen, int):
        changes["dataset"] = replace(data, max_seqlen=prompt + answer)
        if not config.generation:
            lengths = replace(config.search, prompt_tokens=prompt, answer_tokens=answer)
            changes["search"] = lengths
    return cast(RunConfig, replace(cast(Any, config), **changes))


def plan_experiment(config: RunConfig) -> tuple[ResolvedRun, TargetDevices]:
    """Return the resolved experiment of a configuration whose weights and rows need not exist.

    Raises `UserError` for options that cannot be run on any devices.
    """
    planned = mark_as_planned(config, needs_data=False)
    experiment, mode = set_up_experiment(planned, None)
    experiment = build_with_files(planned, experiment, data=False)
    experiment.check()
    check_devices(experiment)
    roles = {name: replace(spec, planned=True) for name, spec in experiment.roles.items()}
    target = TargetDevices.from_experiment(experiment, mode)
    run = resolve_run(replace(experiment, roles=roles), target.device, tokenizers=False)
    return run, target


def read_run_rows(config: RunConfig) -> RunRows:
    """Read and tokenize the rows of a run. Raises `UserError` if they cannot be read."""
    planned = mark_as_planned(config)
    experiment, mode = set_up_experiment(planned, None)
    experiment = build_with_files(planned, experiment)
    target = TargetDevices.from_experiment(experiment, mode)
    data = read_data(resolve_run(experiment, target.device))
    batches = data.loaded.train.build_large_batches()
    return RunRows(data.loaded, batches, data.horizon.steps, data.horizon.steps_per_epoch)


def forecast_run(config: RunConfig, rows: RunRows | None = None) -> RunForecast:
    """Return the forecast of the run of a configuration, as `forecast_experiment` does."""
    if rows is None:
        config = with_assumed_lengths(config)
    return forecast_experiment(*plan_experiment(config), config.max_steps, rows)


def forecast_experiment(
    run: ResolvedRun, target: TargetDevices, max_steps: int | None, rows: RunRows | None = None
) -> RunForecast:
    """Return the forecast of a planned run of at most `max_steps` steps.

    `rows` are its rows, or those of a run with other batch sizes. Raises `UserError` for a damaged
    profile, and if the speed of the devices is not known.
    """
    experiment = run.experiment
    if target.usable is None:
        raise ConfigError(
            "the speed of these devices is not known; name a GPU, such as search.gpu=H100"
        )
    assumed, lengths = build_assumed_batch(experiment)
    batches: Sequence[SequenceSample] = [assumed]
    size = experiment.graph.get_node(experiment.steps_follow).batch_size
    if rows is not None:
        lengths = ""
        batches = rows.batches
        if size:
            batches = [_resize_batch(batch, size) for batch in batches]
    step = forecast_run_step(experiment, target, None if rows is None else rows.data)
    if step is None:
        raise ConfigError(
            f"the speed of {target.name} is not known; name a GPU that is most like it, such as "
            "search.gpu=H100"
        )
    facts = predict_facts(experiment, target.device, run.tokenizers)
    workload = step.problem if rows is None else batches
    expected = forecast(experiment, facts, workload, target.device, capacity=target.usable)
    needed, worst = find_largest_need(experiment, expected)
    refuse_unusable_profiles(step.notes)
    steps = max_steps
    epochs = None
    if rows is not None:
        steps = steps or rows.steps
        epochs = steps / rows.steps_per_epoch
    return RunForecast(
        experiment,
        target,
        step,
        expected,
        worst,
        needed,
        max(batch.num_ids for batch in batches),
        lengths,
        steps,
        epochs,
    )


def _resize_batch(batch: SequenceSample, size: int) -> SequenceSample:
    """Return a batch of `size` rows with the lengths of the rows of `batch`, repeated if needed."""
    if batch.num_ids == size:
        return batch
    lengths = {}
    data = {}
    for key in ("prompt", "completion"):
        if key in batch.data:
            row_lengths = batch.seqlens[key]
            groups = [row_lengths[number % batch.num_ids].tolist() for number in range(size)]
            lengths[key] = groups
            data[key] = torch.zeros(sum(map(sum, groups)), dtype=torch.int64)
    return SequenceSample.from_groups([str(number) for number in range(size)], lengths, data)


# -- options with which the run would fit or run faster


@dataclass(frozen=True)
class RunOption:
    """Options to try: the words to type, and the command that installs packages for them, or ""."""

    words: tuple[str, ...]
    lacks: str = ""


@dataclass(frozen=True)
class OptionForecast:
    """Forecast of a run with other options.

    Attributes:
        option: The options.
        step_seconds: Duration of a step.
        tokens_per_second: Tokens per second, by which runs with other batch sizes are compared.
        needed: Memory that the fullest device needs, in bytes.
        fits: True if this memory fits in the device.
        num_devices: Number of devices.
    """

    option: RunOption
    step_seconds: float
    tokens_per_second: float
    needed: float
    fits: bool
    num_devices: int

    @classmethod
    def from_run(cls, option: RunOption, run: RunForecast) -> OptionForecast:
        return cls(
            option,
            run.step.step_seconds,
            run.tokens_per_second,
            run.needed,
            run.fits,
            run.experiment.num_devices,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the forecast as plain values, as JSON can hold them."""
        return {
            "options": " ".join(self.option.words),
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "memory_gb": self.needed / GIB,
            "fits": self.fits,
            "devices": self.num_devices,
            "needs": self.option.lacks,
        }


def list_run_options(run: RunForecast, config: RunConfig) -> list[RunOption]:
    """Return the options to try for a run: those that save memory, and those that save time."""
    trained = {}
    for name, spec in run.experiment.roles.items():
        if spec.trained:
            trained[name] = spec
    narrow = _list_narrow_words(run)
    options = [*_list_memory_words(run, trained)]
    if narrow:
        options = [RunOption(narrow)] + [
            replace(option, words=(*narrow, *option.words)) for option in options
        ]
    options += [RunOption(words) for words in _list_recompute_words(trained)]
    options += [RunOption(words) for words in _list_batch_words(run, config)]
    options += [RunOption(words) for words in _list_layout_words(run, config)]
    return list({option.words: option for option in options}.values())


def _prefix(roles: Mapping[str, ModelSpec], text: str) -> tuple[str, ...]:
    """Return options below a role, such as "lora.r=16", for each of several roles."""
    return tuple(f"{role}.{word}" for word in text.split() for role in roles)


def _list_narrow_words(run: RunForecast) -> tuple[str, ...]:
    """Return the options by which networks in float32 compute in bfloat16 on GPUs."""
    if run.target.device.type != "cuda":
        return ()
    roles = [name for name, spec in run.experiment.roles.items() if spec.dtype == "float32"]
    return tuple(f"{role}.dtype=bfloat16" for role in roles)


def _list_memory_words(run: RunForecast, trained: Mapping[str, ModelSpec]) -> Iterator[RunOption]:
    """Yield the options of `list_memory_options`, and each of their words alone."""
    cases = {}
    for name, case in run.memory.on_gpu.items():
        if name in run.worst.roles:
            cases[name] = case
    if not any(case.settings.trained for case in cases.values()):
        return
    count = run.experiment.num_devices
    for memory_option in list_memory_options(cases, run.memory.missing)[1:]:
        if memory_option.devices > 1 and (count > 1 or len(run.experiment.roles) > 1):
            continue
        for text in dict.fromkeys([memory_option.options, memory_option.options.split()[-1]]):
            words = _prefix(trained, text)
            if memory_option.devices > 1:
                words = (*words, f"n_gpus_per_node={memory_option.devices}")
            yield RunOption(words, memory_option.lacks)
    if len(run.experiment.roles) > 1:
        others = [name for name, spec in run.experiment.roles.items() if not spec.offload]
        yield RunOption(tuple(f"{role}.offload=true" for role in others))


def _list_recompute_words(trained: Mapping[str, ModelSpec]) -> Iterator[tuple[str, ...]]:
    """Yield other choices of the layers whose activations are recomputed."""
    recomputes = {name: spec for name, spec in trained.items() if spec.recomputed_layers}
    everywhere = {name: spec for name, spec in recomputes.items() if spec.gradient_checkpointing}
    if everywhere:
        yield _prefix(everywhere, "gradient_checkpointing=false")
    for interval in RECOMPUTE_INTERVALS:
        off = _prefix(everywhere, "gradient_checkpointing=false")
        yield (*off, *_prefix(trained, f"recompute_every={interval}"))


def _list_batch_words(run: RunForecast, config: RunConfig) -> Iterator[tuple[str, ...]]:
    """Yield smaller and larger micro-batches and batches."""
    limit = config.max_tokens_per_microbatch
    for factor in MICROBATCH_FACTORS:
        tokens = int(limit * factor)
        if 1 <= tokens < 2 * run.step.num_tokens:
            yield (f"max_tokens_per_microbatch={tokens}",)
    size = run.experiment.graph.get_node(run.experiment.steps_follow).batch_size
    for factor in BATCH_FACTORS if size else ():
        rows = int(size * factor)
        if rows >= 1:
            yield (f"dataset.train_bs_n_seqs={rows}",)


def _list_layout_words(run: RunForecast, config: RunConfig) -> Iterator[tuple[str, ...]]:
    """Yield other layouts of the same devices for a run with one role, or else a search.

    For a run with several roles on one device, a search on more devices is yielded too.
    """
    experiment = run.experiment
    count = experiment.num_devices
    per_node = config.n_gpus_per_node or count
    available = config.n_nodes * per_node
    has_several_roles = len(experiment.roles) > 1
    if is_plan_path(config.allocation_mode):
        return
    if available == 1:
        if has_several_roles and run.target.device.type == "cuda":
            for devices in SHARDS:
                yield ("allocation_mode=search", f"n_gpus_per_node={devices}")
        return
    if has_several_roles or available != count:
        if config.allocation_mode != SEARCH:
            yield ("allocation_mode=search",)
        return
    (role, spec) = next(iter(experiment.roles.items()))
    if spec.parallel != ParallelSpec():
        return
    current = experiment.role_meshes[role].layout
    for layout in list_layouts(count, per_node):
        if str(layout) != str(current):
            yield (f"{role}.layout={format_layout(layout)}",)


def select_options(base: RunForecast, tried: Sequence[OptionForecast]) -> list[OptionForecast]:
    """Return the options that help, the fastest first.

    If the run fits, these are those with which it also fits, and is faster or needs clearly less
    memory. Otherwise, these are those with which it fits or, if there are none, the three that need
    the least memory.
    """
    fitting = [candidate for candidate in tried if candidate.fits]
    if base.fits:
        helpful = []
        for candidate in fitting:
            faster = candidate.tokens_per_second >= (1 + MIN_SPEEDUP) * base.tokens_per_second
            smaller = candidate.needed <= (1 - MIN_MEMORY_SAVED) * base.needed
            if faster or smaller:
                helpful.append(candidate)
    elif fitting:
        helpful = fitting
    else:
        return sorted(tried, key=lambda candidate: candidate.needed)[:3]
    helpful.sort(key=lambda candidate: (-candidate.tokens_per_second, candidate.needed))
    selected = []
    layouts = 0
    for candidate in helpful:
        if len(candidate.option.words) == 1 and ".layout=" in candidate.option.words[0]:
            layouts += 1
            if layouts > MAX_LAYOUTS:
                continue
        selected.append(candidate)
    return selected


def format_options(base: RunForecast, options: Sequence[OptionForecast]) -> list[str]:
    """Return a line per option: seconds per step, tokens per second and memory of a device."""
    rows = [("options", "s per step", "tokens/s", "GiB of a device", "")]
    current = OptionForecast.from_run(RunOption(("as set",)), base)
    for candidate in [current, *options]:
        marks = [] if candidate.fits else ["does not fit"]
        if candidate.num_devices != base.experiment.num_devices:
            marks.append(f"{candidate.num_devices} devices")
        if candidate.option.lacks:
            marks.append(f"needs {candidate.option.lacks}")
        gib = candidate.needed / GIB
        rows.append(
            (
                " ".join(candidate.option.words),
                format_three_digits(candidate.step_seconds),
                f"{candidate.tokens_per_second:,.0f}",
                f"{gib:.1f}" if gib >= 1 else f"{gib:.2g}",
                ", ".join(marks),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = []
    for row in rows:
        cells = [f"{row[0]:<{widths[0]}}"]
        cells += [f"{cell:>{width}}" for cell, width in zip(row[1:4], widths[1:], strict=True)]
        lines.append("  ".join([*cells, row[4]]).rstrip())
    return lines
