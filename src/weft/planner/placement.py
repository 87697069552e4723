"""Placement of roles and calls on devices, as the option `allocation_mode` asks.

With "heuristic" and "search", calls are placed by the estimates of their time and memory. The
functions are pure: the caller reads models and measures devices.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from weft.data.spec import DatasetSpec
from weft.engine.service_spec import NO_NETWORK
from weft.engine.spec import MAX_NEW_TOKENS, ModelSpec, ParallelSpec
from weft.errors import ConfigError
from weft.experiment import Experiment
from weft.graph.mfc import MFCDef, Offload
from weft.options import option
from weft.planner.candidates import PlacementUnit, compute_max_context, list_meshes
from weft.planner.cluster import DeviceCluster
from weft.planner.cost import CallWorkload
from weft.planner.decoder_sizes import DecoderSizes
from weft.planner.devices import GIB, DeviceRates
from weft.planner.lengths import count_updates
from weft.planner.placement_report import (
    PlacementReport,
    format_basis,
    format_mesh,
    format_seconds,
)
from weft.planner.problem import PlacementEstimate, PlacementProblem
from weft.planner.row_lengths import RowBatch, RowLengths
from weft.planner.search import list_uniform_placements, search_placement
from weft.topology import Layout

MANUAL, HEURISTIC, SEARCH = MODES = ("manual", "heuristic", "search")
PLAN_ENDINGS = (".yaml", ".yml", ".json")  # of plan files

# Tokens of a prompt and of an answer if no option sets them
DEFAULT_PROMPT_TOKENS = 512
DEFAULT_ANSWER_TOKENS = 512
# Dataset types with two or more answers per row
PAIRED_TYPES = ("paired_comparison", "preference", "ranking")
# Rules by which passes share prompts (`weft.engine.torch.prepare`)
MIN_PROMPT = 16  # tokens of the shortest prompt that sequences share
MIN_SAMPLED_PROMPT = 65  # tokens of the shortest prompt that sampled sequences share
MIN_SPARED_KEYS = 256  # tokens that sharing the prompt of sampled sequences must save
SCORED_KEYS = frozenset({"logprobs", "ref_logprobs", "values"})  # outputs of another pass
MIN_SAVED = 0.02  # share of tokens that training must save where rows begin alike
ID_BYTES = 8  # bytes of a token id in a batch
VALUE_BYTES = 4  # bytes of a token's value in a batch


def _find_memory_problem(gib: float) -> str | None:
    """Return an error message if a device cannot have `gib` GiB of usable memory, else None."""
    if gib > 0.0:
        return None
    return "a device needs memory; write a number above 0, or leave it out"


@dataclass
class SearchSpec:
    """Assumptions for the estimates of `allocation_mode=search` and of `--dry-run`.

    A value that is not set is derived from this machine or from the other options.
    """

    gpu: str | None = option(
        None,
        "type of GPU to estimate for, such as H100, also with --dry-run; several types in the order "
        "of the devices, in whole machines, such as H100:8,A100:8; absent: the GPU of this machine",
    )
    memory_gb: float | None = option(
        None,
        "usable GiB of a device's memory; absent: a GPU's memory without the 1.5 GiB that driver "
        "and libraries take, or for CPUs an equal share of 90% of the machine's memory",
        check=_find_memory_problem,
    )
    prompt_tokens: int | None = option(
        None,
        "tokens per prompt; absent: dataset.max_prompt_len if it is set, else 512",
        at_least=1,
    )
    answer_tokens: int | None = option(
        None,
        "tokens per answer, on average; absent: the maximum of sampled tokens, or for answers in "
        "rows what prompts leave of dataset.max_seqlen, or 512 if that is not set",
        at_least=1,
    )
    profile: str | None = option(
        None,
        "file or folder of profiles made by weft plan profile, also of another machine; absent: "
        "the profiles of this machine, if there are any",
    )


def build_problem(
    experiment: Experiment,
    units: Sequence[PlacementUnit],
    networks: Mapping[str, DecoderSizes],
    loads: Mapping[str, CallWorkload],
    rates: DeviceRates,
    *,
    num_devices: int,
    shared_roles: Mapping[str, str] | None = None,
    cluster: DeviceCluster | None = None,
) -> PlacementProblem:
    """Return the problem of placing the calls of `units` on `num_devices` devices.

    The other arguments are those of `PlacementProblem`.
    """
    graph = experiment.graph
    return PlacementProblem(
        units=units,
        networks=networks,
        loads=loads,
        order=graph.order,
        producers={name: graph.find_producers(name) for name in graph.order},
        rates=rates,
        num_devices=num_devices,
        max_staleness=max((edge.max_staleness for edge in graph.version_edges), default=0),
        shared_roles=shared_roles or {},
        cluster=cluster,
    )


class NoPlacementFits(ConfigError):
    """Raised if no placement of a run's calls fits into the memory of its devices."""


def is_plan_path(mode: str) -> bool:
    """Return whether a value of `allocation_mode` names a plan file, instead of a mode or a layout."""
    if mode in MODES or re.fullmatch(r"([a-z]\d+)+", mode):
        return False
    return mode.endswith(PLAN_ENDINGS) or "/" in mode or Path(mode).is_file()


def allocate_layouts(
    roles: Mapping[str, ModelSpec], mode: str, num_devices: int
) -> dict[str, ModelSpec]:
    """Return the roles, with a parallel layout assigned to each role that needs one.

    `mode` is the value of the option `allocation_mode`, and `num_devices` is the number of devices
    of all machines. A role is unchanged if its layout is set or if its backend runs on one device
    only. For other roles, "manual" assigns no layout, and they run on the first device. The path of a
    plan file assigns none either; the plan places their calls later. "heuristic" and "search" make
    them data-parallel over all devices; `place_calls` improves their placement later. Any other
    mode is a layout, such as "d4t2", which is assigned to all of them.
    """
    if mode in (HEURISTIC, SEARCH):
        layout = f"d{num_devices}"
    elif mode in MODES or is_plan_path(mode):
        layout = None
    else:
        layout = mode
    if layout is None:
        return dict(roles)
    allocated_by = f"allocation_mode={mode}"
    layouts: dict[str, ModelSpec] = {}
    for name, spec in roles.items():
        if is_placed(spec):
            layouts[name] = spec
        else:
            layouts[name] = replace(spec, layout=layout, allocated_by=allocated_by)
    return layouts


def is_placed(spec: ModelSpec) -> bool:
    """Return whether a role's layout is set, or its backend runs in one process only."""
    return (
        spec.layout is not None
        or spec.parallel != ParallelSpec()
        or spec.backend in ("hf", "jax", *NO_NETWORK)
    )


# -- the placement of calls


def place_calls(
    experiment: Experiment, mode: str, problem: PlacementProblem, start: list[int], count: int
) -> Experiment:
    """Return the experiment with its calls placed on devices, and with notes on the placement.

    `mode` is "search" or "heuristic", and `count` is the number of devices that the run may use.
    `start` is the placement in which every movable call uses all of them. With "search", raises
    `NoPlacementFits` if no placement fits into memory.
    """
    rates = problem.rates
    # The placement of the heuristic is also the one from which the search begins.
    uniform = min(list_uniform_placements(problem) or [start], key=problem.compute_score)
    if mode == HEURISTIC:
        best = problem.estimate(uniform)
        everywhere = problem.estimate(start)
        placed = _with_placement(experiment, best, problem.units)
        return with_notes(placed, _build_heuristic_lines(best, everywhere, rates))
    result = search_placement(problem, uniform)
    if result.best.excess_bytes:
        raise NoPlacementFits(
            f"allocation_mode=search: no placement on {count} devices fits "
            f"into memory; the smallest needs {result.best.peak_bytes / GIB:.1f} GiB of a device's "
            f"{rates.capacity / GIB:.1f} (search.memory_gb); lower "
            "max_tokens_per_microbatch, set gradient_checkpointing=true, or use more devices"
        )
    report = PlacementReport(result, problem)
    placed = _with_placement(experiment, result.best, problem.units)
    return replace(with_notes(placed, report.build_lines()), search=report.to_dict())


def with_notes(experiment: Experiment, notes: Sequence[str]) -> Experiment:
    """Return the experiment with more lines for the plan that is printed before the run."""
    return replace(experiment, plan_notes=(*experiment.plan_notes, *notes))


def _build_heuristic_lines(
    best: PlacementEstimate, everywhere: PlacementEstimate, rates: DeviceRates
) -> list[str]:
    """Return lines about `best`, the placement chosen by the heuristic, to print before the run.

    The list is empty if `best` equals `everywhere`, the placement with all calls sharded over all
    devices.
    """
    if best.meshes == everywhere.meshes:
        return []
    fits = "" if not everywhere.excess_bytes else ", which does not fit"
    lines = [
        f"allocation_mode=heuristic: {format_seconds(best.step_seconds)} per step on {format_basis(rates)}, "
        f"{format_seconds(everywhere.step_seconds)} with all calls sharded over all devices{fits}"
    ]
    return [*lines, *(f"  {call}: {format_mesh(mesh)}" for call, mesh in best.meshes.items())]


def _with_placement(
    experiment: Experiment, best: PlacementEstimate, units: Sequence[PlacementUnit]
) -> Experiment:
    for unit in units:
        if len(unit.meshes) > 1:
            for call in unit.calls:
                mesh = best.meshes[call]
                ranks = ",".join(map(str, mesh.ranks))
                experiment = experiment.with_mfc(call, layout=str(mesh.layout), device_mesh=ranks)
    return experiment


def group_calls(calls: Iterable[MFCDef]) -> list[list[MFCDef]]:
    """Group the calls that share a placement: all that train a role, or one other call."""
    groups: dict[tuple[str, str], list[MFCDef]] = {}
    for call in calls:
        groups.setdefault((call.role, "" if call.trains else call.name), []).append(call)
    return list(groups.values())


def build_units(
    experiment: Experiment,
    free: set[str],
    networks: Mapping[str, DecoderSizes],
    count: int,
    per_node: int,
    check: Callable[[str, Layout], None],
    lengths: Mapping[str, int] | None = None,
) -> tuple[list[PlacementUnit], list[int]]:
    """Return the units to place, and for each unit the index of its initial mesh.

    A unit is a group of calls that are placed together: all calls that train a role, or a single
    call that does not train. Calls of the roles in `free` are initially on all devices and can be
    moved, unless their layout is set. Calls of roles without a network are left out, since they
    take no device.

    `count` is the number of all devices, and `per_node` is the number of devices per machine.
    `check(role, layout)` raises `ConfigError` if the role's network does not support the layout.
    `lengths` maps calls to the number of tokens of a sequence. Several ranks may share the tokens
    of a long sequence, except in calls that generate.
    """
    # List the meshes of each unit; a layout that is set leaves one.
    units = []
    start = []
    for calls in group_calls(experiment.graph.list_model_calls()):
        role = calls[0].role
        is_fixed = any(call.layout is not None or call.device_mesh is not None for call in calls)
        initial = experiment.call_meshes[calls[0].name]
        if role not in networks:
            continue
        trains = calls[0].trains
        meshes = [initial]
        if role in free and not is_fixed:
            allowed = partial(
                _adapt_layout,
                experiment.roles[role],
                at_once=min(_count_ids_per_minibatch(experiment, call) for call in calls),
                check=partial(check, role),
                trains=trains,
            )
            longest = 1
            if calls[0].method != "generate" and lengths is not None:
                longest = min(lengths[call.name] for call in calls)
            meshes = list_meshes(
                count,
                per_node,
                allowed,
                max_context=compute_max_context(longest),
                num_experts=max(1, networks[role].experts),
            )
            # If no layout is allowed, the run is refused later with the reason.
            meshes = meshes or [initial]
        names = tuple(call.name for call in calls)
        units.append(PlacementUnit(role, names, tuple(meshes), trains=trains))
        start.append(meshes.index(initial) if initial in meshes else len(meshes) - 1)
    return units, start


def _adapt_layout(
    spec: ModelSpec, layout: Layout, *, at_once: int, check: Callable[[Layout], None], trains: bool
) -> Layout | None:
    """Return the layout with the stages per pipeline rank that the role's schedule needs.

    Returns None if the role's options or `check` do not allow the layout, or if it has more than
    `at_once` data-parallel ranks.
    """
    # The option `zero_stage` decides whether the weights of a trained role are sharded.
    has_other_stage = (
        trains
        and layout.data > 1
        and spec.zero_stage is not None
        and (spec.zero_stage > 0) != (layout.fsdp > 1)
    )
    if layout.data > at_once or has_other_stage:
        return None
    try:
        adapted_layout = spec.with_virtual_stages(layout)
        check(adapted_layout)
    except ConfigError:
        return None
    return adapted_layout


def _count_ids_per_minibatch(experiment: Experiment, call: MFCDef) -> int:
    """Return the number of dataset rows per minibatch of a call.

    This is also the call's maximum number of data-parallel ranks, because each needs a row.
    """
    batch = call.batch_size or _count_ids(experiment)
    return max(1, batch // count_updates(experiment.updates_per_firing, call))


# -- workloads


def build_workload(
    experiment: Experiment,
    search: SearchSpec,
    user_dataset: DatasetSpec,
    call: MFCDef,
    rows: RowLengths | None = None,
) -> CallWorkload:
    """Return the estimated workload of a call in one step.

    `user_dataset` has the dataset's options as the user wrote them, while `experiment.dataset` also
    has the defaults that were filled in. `rows` are the lengths of the run's rows, if they were
    read; lengths that `search` sets take precedence.
    """
    lengths = _estimate_lengths(experiment, search, user_dataset, rows)
    samples = lengths.samples * (2 if experiment.dataset_type in PAIRED_TYPES else 1)
    epochs = int(call.args.get("epochs", 1)) if call.trains else 1
    limit = call.max_tokens_per_microbatch or experiment.control.max_tokens_per_microbatch
    updates = count_updates(experiment.updates_per_firing, call)
    keys = {*call.input_keys, *call.optional_keys}
    shared, saved = _estimate_shared_tokens(lengths, keys, samples, rows, trains=call.trains)
    # The lengths of the single rows count only if `search` does not set others.
    batches: tuple[RowBatch, ...] = ()
    attended_length = None
    if rows is not None and search.prompt_tokens is None and search.answer_tokens is None:
        ids_per_update = max(1, _count_ids(experiment, lengths) // updates)
        batches = rows.list_batches(ids_per_update, lengths.samples, lengths.answer)
        attended_length = rows.compute_attended_length(lengths.answer)
    cache_gb = call.args.get("kv_cache_gb")
    return CallWorkload(
        method=call.method,
        num_sequences=_count_ids(experiment, lengths) * samples,
        prompt_tokens=lengths.prompt,
        new_tokens=lengths.answer,
        num_updates=updates,
        num_epochs=epochs,
        microbatch=limit,
        longest_prompt=lengths.longest_prompt,
        longest_answer=lengths.longest_answer,
        samples=samples,
        shared_tokens=shared,
        saved_share=saved,
        batches=batches,
        repeats_head=experiment.dataset_type in PAIRED_TYPES,
        attended_length=attended_length,
        batch_bytes=_count_batch_bytes(experiment, lengths, keys, samples),
        cache_bytes=None if cache_gb is None else int(cache_gb * GIB),
        offloads=frozenset(hook.what for hook in call.post_hooks if isinstance(hook, Offload)),
        has_entropy=call.trains and bool(call.args.get("entropy_coef")),
    )


def _count_batch_bytes(
    experiment: Experiment, lengths: CallLengths, keys: Collection[str], samples: int
) -> float:
    """Return the size of a call's batch in bytes.

    A token id has 8 bytes; any other value is one of 4 bytes per token of the answer.
    """
    bytes_per_sequence = 0.0
    for key in keys:
        if key == "prompt":
            bytes_per_sequence += ID_BYTES * lengths.prompt / samples
        elif key == "completion":
            bytes_per_sequence += ID_BYTES * lengths.answer
        else:
            bytes_per_sequence += VALUE_BYTES * lengths.answer
    return bytes_per_sequence * samples * _count_ids(experiment, lengths)


def _estimate_shared_tokens(
    lengths: CallLengths,
    keys: Collection[str],
    samples: int,
    rows: RowLengths | None,
    *,
    trains: bool,
) -> tuple[float, float]:
    """Return how many tokens the sequences of a call share, as the engine's passes do.

    These are the mean number of tokens of a prompt that are computed once for its `samples`
    sequences, and the share of tokens that training saves because rows begin alike. `keys` are the
    keys of the call's batch. Passes over sampled sequences share only what the generator shared.
    """
    least, spared = MIN_PROMPT, 0
    if "logprobs" in keys:
        least, spared = MIN_SAMPLED_PROMPT, MIN_SPARED_KEYS
    if rows is not None:
        shared = rows.compute_shared_tokens(least, samples, spared)
    else:
        common = lengths.prompt - 1
        worth = lengths.prompt >= least and common * (samples - 1) >= spared
        shared = float(common) if worth else 0.0
    saved = 0.0
    if (
        rows is not None
        and trains
        and SCORED_KEYS.isdisjoint(keys)
        and rows.saved_share >= MIN_SAVED
    ):
        saved = rows.saved_share
    return shared, saved


def _count_ids(experiment: Experiment, lengths: CallLengths | None = None) -> int:
    """Return the number of dataset rows per step.

    If batches are formed by token count, this is an estimate, from `lengths` if they are given.
    """
    size = experiment.graph.get_node(experiment.steps_follow).batch_size
    dataset = experiment.dataset
    row = dataset.limit or DEFAULT_PROMPT_TOKENS + DEFAULT_ANSWER_TOKENS
    if lengths is not None and lengths.is_measured:
        row = lengths.prompt + lengths.answer
    return size or max(1, (dataset.train_tokens_per_batch or 0) // max(1, row))


@dataclass(frozen=True)
class CallLengths:
    """Lengths of the sequences of a run's calls, in tokens.

    `samples` is the number of answers that are sampled for each prompt, or 1. `is_measured` is True
    if the lengths are those of the run's rows.
    """

    prompt: int
    answer: int
    samples: int
    longest_prompt: int | None = None
    longest_answer: int | None = None
    is_measured: bool = False


def _estimate_lengths(
    experiment: Experiment, spec: SearchSpec, user_dataset: DatasetSpec, rows: RowLengths | None
) -> CallLengths:
    """Return the estimated lengths of sequences, from the options and the rows if they were read.

    Raises `ConfigError` if the lengths that `spec` sets exceed the limits of the run.
    """
    # The call that samples sets the length of answers, if there is one.
    samplers = []
    for call in experiment.graph.list_model_calls():
        if call.method == "generate":
            samplers.append(call)
    new = None
    if samplers:
        new = int(samplers[0].args.get("max_new_tokens") or MAX_NEW_TOKENS)
    _check_lengths(spec, user_dataset, new)
    # Prefer the lengths that the user set, then those of the data.
    if rows is not None:
        return _measure_lengths(spec, rows, samplers)
    prompt = (
        spec.prompt_tokens
        or user_dataset.max_prompt_len
        or min(DEFAULT_PROMPT_TOKENS, experiment.dataset.max_prompt_len or DEFAULT_PROMPT_TOKENS)
    )
    if new is not None:
        samples = int(samplers[0].args.get("samples_per_prompt", 1))
        return CallLengths(prompt, spec.answer_tokens or new, samples, longest_answer=new)
    limit = user_dataset.limit
    if limit is None:
        return CallLengths(prompt, spec.answer_tokens or DEFAULT_ANSWER_TOKENS, 1)
    prompt = spec.prompt_tokens or min(prompt, max(1, limit // 2))
    return CallLengths(prompt, spec.answer_tokens or max(1, limit - prompt), 1)


def _check_lengths(spec: SearchSpec, user_dataset: DatasetSpec, longest_answer: int | None) -> None:
    """Raise `ConfigError` if assumed lengths exceed the limits that the user has set.

    `longest_answer` is the limit of sampled answers, or None if the rows have the answers.
    """
    prompt, answer = spec.prompt_tokens, spec.answer_tokens
    limit = user_dataset.max_prompt_len
    if prompt is not None and limit is not None and prompt > limit:
        raise ConfigError(
            f"search.prompt_tokens={prompt}: prompts have at most dataset.max_prompt_len={limit} "
            "tokens; lower the first or raise the second"
        )
    if longest_answer is not None:
        if answer is not None and answer > longest_answer:
            raise ConfigError(
                f"search.answer_tokens={answer}: sampled answers have at most "
                f"gen.max_new_tokens={longest_answer} tokens; lower the first or raise the second"
            )
        return
    longest_row = user_dataset.limit
    if longest_row is not None and (prompt or 1) + (answer or 1) > longest_row:
        name, tokens = max(
            ("search.prompt_tokens", prompt or 1),
            ("search.answer_tokens", answer or 1),
            key=lambda pair: pair[1],
        )
        raise ConfigError(
            f"{name}={tokens}: rows have at most dataset.max_seqlen={longest_row} tokens, prompt "
            "and answer together; lower the first or raise the second"
        )


def _measure_lengths(spec: SearchSpec, rows: RowLengths, samplers: Sequence[MFCDef]) -> CallLengths:
    """Return the lengths of sequences in the data; sampled answers have the length that options set."""
    prompt = spec.prompt_tokens or max(1, round(rows.mean_prompt))
    longest_prompt = max(prompt, int(rows.prompts.max()))
    if samplers:
        args = samplers[0].args
        longest = int(args.get("max_new_tokens") or MAX_NEW_TOKENS)
        samples = int(args.get("samples_per_prompt", 1))
        answer = spec.answer_tokens or longest
    else:
        samples = 1
        answer = spec.answer_tokens or max(1, round(rows.mean_answer))
        longest = int(rows.answers.max()) if len(rows.answers) else answer
    return CallLengths(
        prompt, answer, samples, longest_prompt, max(answer, longest), is_measured=True
    )
