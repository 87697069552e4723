"""Plan of a run for `--dry-run`, from its options, config.json, tokenizers and data.

The plan is made without reading weights and without using the run's devices.
`build_plan_lines(experiment, "local")` returns the lines that a run prints before its first step,
and a line that says whether the run fits in memory. With `data=False`, as for `--dry-run=config`,
only options and config.json are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from weft.data.loader import LoadedData, load_data
from weft.data.sample import SequenceSample
from weft.engine.backends.auto import choose_backend
from weft.experiment import Experiment
from weft.launch.facts import TargetDevices, forecast, predict_facts
from weft.launch.resolve import check_longest_sequence, resolve_run
from weft.observe.progress import RunPlan
from weft.planner.forecast import MemoryForecast, format_smaller_options
from weft.planner.lengths import RunLength
from weft.planner.placement import DEFAULT_ANSWER_TOKENS, DEFAULT_PROMPT_TOKENS, PAIRED_TYPES
from weft.planner.run_plan import build_plan, group_roles_by_device
from weft.runtime.schedule import check_steps


def build_plan_lines(
    experiment: Experiment, mode: str, *, data: bool = True, width: int | None = None
) -> list[str]:
    """Return the lines of the plan for a terminal of `width` columns.

    Raises `UserError` for everything that a run would reject before its first step, apart from
    errors that can only be found with the weights or the devices.
    """
    roles = experiment.roles.items()
    control = experiment.control
    # Check the experiment as a run does, without weights and devices.
    experiment = replace(
        experiment,
        roles={name: choose_backend(replace(spec, planned=True)) for name, spec in roles},
    )
    target = TargetDevices.from_experiment(experiment, mode)
    run = resolve_run(experiment, target.device, tokenizers=data)
    experiment, tokenizers = run.experiment, run.tokenizers
    # Read the real batches, or assume one of the configured size.
    read: LoadedData | None = None
    horizon: RunLength | None = None
    notes: list[str] = []
    if data:
        read = load_data(
            experiment.dataset,
            experiment.dataset_type,
            tokenizers[experiment.data_role],
            seed=control.seed,
        )
        check_longest_sequence(run, read.max_seqlen)
        horizon = RunLength.from_experiment(experiment, read.train)
        check_steps(control.profile_steps, horizon.steps)
        batches: Sequence[SequenceSample] = read.train.build_large_batches()
    else:
        batch, note = build_assumed_batch(experiment)
        batches = [batch]
        notes = [note]
    # Predict time and memory.
    facts = predict_facts(experiment, target.device, tokenizers)
    target, expected = _forecast(experiment, facts, batches, target)
    plan = build_plan(experiment, horizon, facts, {"hardware": target.description}, read, expected)
    return [
        *_drop_memory_lines(plan).format_whole(width),
        *notes,
        *_format_verdict(experiment, target, expected),
    ]


def _drop_memory_lines(plan: RunPlan) -> RunPlan:
    """Return the plan without its lines on memory.

    A dry run reports the same numbers in the lines after the plan.
    """
    return replace(
        plan,
        hidden=["memory"],
        details=[line for line in plan.details if not line.startswith("memory: ")],
    )


def build_assumed_batch(experiment: Experiment) -> tuple[SequenceSample, str]:
    """Return a batch of the longest rows that the options allow, and a note that describes it.

    If no data are read, the memory forecast uses this batch instead of the data's largest batches.
    """
    written = experiment.config.get("dataset") or {}
    search = experiment.config.get("search") or {}
    samples = any(call.method == "generate" for call in experiment.graph.list_model_calls())
    most = written.get("max_seqlen")
    total = most if isinstance(most, int) else DEFAULT_PROMPT_TOKENS + DEFAULT_ANSWER_TOKENS
    prompt = (
        search.get("prompt_tokens")
        or written.get("max_prompt_len")
        or min(DEFAULT_PROMPT_TOKENS, total // 2)
    )
    answer = search.get("answer_tokens") or max(1, total - prompt)
    size = experiment.graph.get_node(experiment.steps_follow).batch_size
    size = size or max(1, int(written.get("train_tokens_per_batch") or 0) // (prompt + answer))
    lengths = {"prompt": [[prompt]] * size}
    if not samples:
        lengths["completion"] = [
            [answer] * (2 if experiment.dataset_type in PAIRED_TYPES else 1)
        ] * size
    data = {}
    for key, groups in lengths.items():
        data[key] = torch.zeros(sum(map(sum, groups)), dtype=torch.int64)
    batch = SequenceSample.from_groups([str(number) for number in range(size)], lengths, data)
    if samples:
        long = f"prompts of {prompt:,} tokens"
    else:
        long = f"rows of {prompt:,} + {answer:,} tokens"
    return (
        batch,
        f"data: not read; memory is that of {long}, which dataset.max_prompt_len and "
        f"dataset.max_seqlen bound",
    )


def _forecast(
    experiment: Experiment,
    facts: Mapping[str, Mapping[str, Any]],
    batches: Sequence[SequenceSample],
    target: TargetDevices,
) -> tuple[TargetDevices, MemoryForecast]:
    """Return the smallest devices on which the run fits, and the memory forecast for them.

    The devices to choose from are `target.list_candidates()`; if the run fits on none of them, the
    largest are returned. `facts` maps roles to the descriptions of their engines, and `batches` are
    the batches that are expected to need the most memory.
    """
    for each in target.list_candidates():
        memory_forecast = forecast(experiment, facts, batches, each.device, capacity=each.usable)
        assert each.usable is not None
        if _find_largest(experiment, memory_forecast)[0] <= each.usable:
            break
    return each, memory_forecast


def _find_largest(experiment: Experiment, expected: MemoryForecast) -> tuple[float, MemoryForecast]:
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
    needed, worst = _find_largest(experiment, expected)
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
        for line in format_smaller_options(cases, target.usable):
            lines.append(f"  {line}")
    return lines
