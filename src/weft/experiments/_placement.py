"""Place calls on devices for `allocation_mode=search` and `heuristic`, and report the estimates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weft.checkpoints.config_file import prefix_option
from weft.engine.spec import MAX_NEW_TOKENS, ModelSpec
from weft.errors import ConfigError
from weft.experiment import Experiment
from weft.experiments import checks
from weft.experiments._allocation import HEURISTIC, SEARCH, is_placed
from weft.experiments.common import RunConfig
from weft.experiments.models import find_option_role
from weft.graph.mfc import MFCDef
from weft.planner.cost import CallWorkload, DecoderSizes, build_decoder_sizes
from weft.planner.devices import GIB, DeviceRates, estimate_cpu_rates, find_gpu_rates
from weft.planner.search import (
    PlacementEstimate,
    PlacementProblem,
    PlacementUnit,
    SearchResult,
    list_meshes,
    list_uniform_placements,
    search_placement,
)
from weft.topology import LETTERS, Layout, Mesh

# Tokens of a prompt and of an answer if no option sets them
DEFAULT_PROMPT_TOKENS = 512
DEFAULT_ANSWER_TOKENS = 512
PAIRED_TYPES = (
    "paired_comparison",
    "preference",
    "ranking",
)  # dataset types with two or more answers per row


class UnknownRates(ConfigError):
    """Raised if nothing can be estimated because the speed of the devices is unknown."""


@dataclass(frozen=True)
class PlacementReport:
    """Result of a placement search, with the data that the estimates are based on.

    `rates` are the speeds of the devices, and `loads` maps each call to its workload.
    """

    result: SearchResult
    rates: DeviceRates
    loads: Mapping[str, CallWorkload]

    def to_dict(self) -> dict[str, Any]:
        """Return the estimates for the best and the heuristic placement, as plain values.

        The result also contains facts about the search and the device.
        """
        result = self.result
        return {
            "device": self.rates.name,
            "device_memory_gb": self.rates.capacity / GIB,
            "tried": result.num_tried,
            "exhaustive": result.is_exhaustive,
            "search": _estimate_to_dict(result.best),
            "heuristic": _estimate_to_dict(result.first),
        }

    def build_lines(self) -> list[str]:
        """Return lines of text that compare the best placement with the heuristic placement."""
        # Describe the search and the heuristic's placement.
        best = self.result.best
        first = self.result.first
        result = self.result
        if result.is_exhaustive:
            how = f"all {result.num_tried:,} placements"
        else:
            how = f"{result.num_tried:,} placements by annealing"
        if not first.excess_bytes:
            fits = ""
        else:
            fits = f", which does not fit: {first.peak_bytes / GIB:.1f} GiB of {self.rates.capacity / GIB:.1f}"
        lines = [
            f"allocation_mode=search: {_format_seconds(best.step_seconds)} per step on {self.rates.name} as "
            f"estimated, {_format_seconds(first.step_seconds)} "
            f"with allocation_mode=heuristic{fits}; tried {how}"
        ]
        # Compare both placements for each call.
        for call, mesh in best.meshes.items():
            load = self.loads[call]
            lines.append(
                f"  {call}: {_format_mesh(mesh)}, {_with_moving(best, call)}; heuristic "
                f"{_format_mesh(first.meshes[call])}, "
                f"{_with_moving(first, call)} ({load.num_sequences:,} x ({load.prompt_tokens:,} + "
                f"{load.new_tokens:,}) tokens)"
            )
        lines.append(
            f"  memory: {best.peak_bytes / GIB:.2f} GiB at most of {self.rates.capacity / GIB:.2f} on "
            f"a device"
        )
        return lines


def place_calls(
    experiment: Experiment, config: RunConfig, given: Mapping[str, ModelSpec]
) -> Experiment:
    """Return the experiment with its calls placed on devices, and with notes on the placement.

    This implements the values "search" and "heuristic" of `allocation_mode`. `given` has the roles
    as the user wrote them. A call is placed unless the layout of the call or of its role is set. If
    nothing can be estimated, calls stay on all devices and a note says why. With "search", raises
    `ConfigError` if the speed of the devices is unknown, or if no placement fits into memory.
    """
    # Nothing to choose on one device, or if every role names its layout
    per_node = config.n_gpus_per_node or 1
    mode = config.allocation_mode
    roles = {call.role for call in experiment.graph.list_model_calls()}
    free = {role for role in roles if not is_placed(given[role])}
    if config.n_nodes * per_node == 1 or not free:
        return experiment
    # Without sizes or speeds there is no estimate: leave every call on all devices.
    missing = _list_unread_models({role: given[role] for role in roles}, mode)
    if missing:
        return _with_notes(experiment, missing)
    try:
        problem, start = _build_problem(experiment, config, free)
    except UnknownRates as error:
        if mode == SEARCH:
            raise
        return _with_notes(experiment, [f"{error}; until then every call is on all devices"])
    # The search begins with the placement of the heuristic.
    usual = min(list_uniform_placements(problem) or [start], key=problem.compute_score)
    if mode == HEURISTIC:
        best = problem.estimate(usual)
        everywhere = problem.estimate(start)
        placed = _with_placement(experiment, best, problem.units, free)
        return _with_notes(placed, _build_heuristic_lines(best, everywhere, problem.rates))
    result = search_placement(problem, usual)
    if result.best.excess_bytes:
        raise ConfigError(
            f"allocation_mode=search: no placement on {config.n_nodes * per_node} devices fits "
            f"into memory; the smallest needs {result.best.peak_bytes / GIB:.1f} GiB of a device's "
            f"{problem.rates.capacity / GIB:.1f} (search.memory_gb); lower "
            "max_tokens_per_microbatch, set gradient_checkpointing=true, or use more devices"
        )
    report = PlacementReport(result, problem.rates, problem.loads)
    placed = _with_placement(experiment, result.best, problem.units, free)
    return replace(_with_notes(placed, report.build_lines()), search=report.to_dict())


def _with_notes(experiment: Experiment, notes: Sequence[str]) -> Experiment:
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
        f"allocation_mode=heuristic: {_format_seconds(best.step_seconds)} per step on {rates.name} as estimated, "
        f"{_format_seconds(everywhere.step_seconds)} with all calls sharded over all devices{fits}"
    ]
    return [*lines, *(f"  {call}: {_format_mesh(mesh)}" for call, mesh in best.meshes.items())]


def _build_problem(
    experiment: Experiment, config: RunConfig, free: set[str]
) -> tuple[PlacementProblem, list[int]]:
    """Return the search problem, and the placement in which every movable call uses all devices.

    Calls of the roles in `free` can be moved. Calls that must be on the same mesh form a unit (see
    `_build_units`). A placement has one index per unit, which selects the unit's mesh from the list
    `PlacementUnit.meshes`.
    """
    from weft.checkpoints.hf_io import read_config

    per_node = config.n_gpus_per_node or 1
    count = config.n_nodes * per_node
    # Read the sizes of the models.
    on_gpu, dtypes = _find_devices(experiment, config)
    called = {call.role for call in experiment.graph.list_model_calls()}
    networks = {}
    for role, spec in experiment.roles.items():
        if role in called and spec.path:
            with prefix_option(f"{find_option_role(experiment.config, role, spec.path)}.path"):
                network = read_config(spec.path, spec.type)[1]
                networks[role] = build_decoder_sizes(spec, network, dtypes, on_gpu=on_gpu)
    # List the candidates; roles without a network take no device.
    units, start = _build_units(experiment, free, count, per_node)
    graph = experiment.graph
    placed = [unit for unit in units if unit.role in networks]
    problem = PlacementProblem(
        units=placed,
        networks=networks,
        loads={call.name: _load(experiment, config, call) for call in graph.list_model_calls()},
        order=graph.order,
        producers={name: graph.find_producers(name) for name in graph.order},
        rates=_find_rates(config, on_gpu, networks, per_node),
        num_devices=max([count, *(1 + max(mesh.ranks) for unit in placed for mesh in unit.meshes)]),
        max_staleness=max((edge.max_staleness for edge in graph.version_edges), default=0),
        shared_roles=_find_shared_references(experiment),
    )
    return problem, [start[unit.calls] for unit in placed]


def _list_unread_models(roles: Mapping[str, ModelSpec], mode: str) -> list[str]:
    """Return a message for each model whose config.json is not available on this machine.

    Without this file nothing can be estimated.
    """
    missing = {}
    for role, spec in roles.items():
        if spec.path and not checks.read_model_config(spec):
            missing[role] = spec.path
    unread_models: list[str] = []
    for role, path in missing.items():
        unread_models.append(
            f"allocation_mode={mode}: the config.json of {role}.path={path} is not on this "
            f"machine, so every call is on all devices; download it with: hf download {path} "
            "config.json"
        )
    return unread_models


def _with_placement(
    experiment: Experiment, best: PlacementEstimate, units: Sequence[PlacementUnit], free: set[str]
) -> Experiment:
    for unit in units:
        if unit.role in free and len(unit.meshes) > 1:
            for call in unit.calls:
                mesh = best.meshes[call]
                ranks = ",".join(map(str, mesh.ranks))
                experiment = experiment.with_mfc(call, layout=str(mesh.layout), device_mesh=ranks)
    return experiment


def _build_units(
    experiment: Experiment, free: set[str], count: int, per_node: int
) -> tuple[list[PlacementUnit], dict[tuple[str, ...], int]]:
    """Return the units to place, and the initial mesh of each unit.

    A unit is a group of calls that are placed together: all calls that train a role, or a single
    call that does not train. The second result maps each unit, identified by the names of its
    calls, to the index of the initial mesh in `PlacementUnit.meshes`. Calls of the roles in `free`
    are initially on all devices and can be moved, unless their layout is set. `count` is the number
    of all devices, and `per_node` is the number of devices per machine.
    """
    # Group the calls that share a placement: all that train a role, or one other call.
    groups: dict[tuple[str, str], list[MFCDef]] = {}
    for call in experiment.graph.list_model_calls():
        groups.setdefault((call.role, "" if call.trains else call.name), []).append(call)
    # List the meshes of each group; a layout that is set leaves one.
    units = []
    start = {}
    for (role, _), calls in groups.items():
        named = any(call.layout is not None or call.device_mesh is not None for call in calls)
        now = experiment.get_mesh(calls[0])
        names = tuple(call.name for call in calls)
        meshes = [now]
        if role in free and not named:
            spec = experiment.roles[role]
            at_once = min(_count_ids_per_minibatch(experiment, call) for call in calls)
            candidates = list_meshes(
                count, per_node, _build_layout_filter(spec, at_once, trains=calls[0].trains)
            )
            meshes = list(dict.fromkeys([*candidates, now]))
        units.append(PlacementUnit(role, names, tuple(meshes), trains=calls[0].trains))
        start[names] = meshes.index(now)
    return units, start


def _build_layout_filter(
    spec: ModelSpec, at_once: int, *, trains: bool
) -> Callable[[Layout], Layout | None]:
    """Return a function that adapts a layout to a role, or returns None to exclude the layout.

    To adapt a layout, the function sets its number of stages per pipeline rank, which depends on
    the role's pipeline schedule. A layout is excluded if the network or the role's options do not
    allow it, or if it has more than `at_once` data-parallel ranks.
    """
    from weft.checkpoints.hf_io import read_config
    from weft.engine.torch.network_source import check_layout

    assert spec.path is not None
    network = read_config(spec.path, spec.type)[1]

    def adapt_layout(layout: Layout) -> Layout | None:
        other_stage = (
            trains
            and layout.data > 1
            and spec.zero_stage is not None
            and (spec.zero_stage > 0) != (layout.fsdp > 1)
        )
        if layout.data > at_once or other_stage:
            return None
        try:
            adapted_layout = spec.with_virtual_stages(layout)
            check_layout(spec, adapted_layout, network)
        except ConfigError:
            return None
        return adapted_layout

    return adapt_layout


def _count_ids_per_minibatch(experiment: Experiment, call: MFCDef) -> int:
    """Return the number of dataset rows per minibatch of a call.

    This is also the call's maximum number of data-parallel ranks, because each needs a row.
    """
    if call.trains:
        updates = experiment.updates_per_firing.get(call.name, 1) // int(call.args.get("epochs", 1))
    else:
        updates = 1
    return max(1, (call.batch_size or _count_ids(experiment)) // max(1, updates))


# -- inputs of the estimate


def _find_devices(experiment: Experiment, config: RunConfig) -> tuple[bool, str]:
    """Return whether the run uses GPUs, and the default dtype of roles on the run's devices."""
    import torch

    device = experiment.control.device
    on_gpu = config.search.gpu is not None or (
        device or ("cuda" if torch.cuda.is_available() else "cpu")
    ).startswith("cuda")
    return on_gpu, "bfloat16" if on_gpu else "float32"


def _find_rates(
    config: RunConfig, on_gpu: bool, networks: Mapping[str, DecoderSizes], per_node: int
) -> DeviceRates:
    import os

    import torch

    from weft.engine.device import read_memory_bytes

    # CPUs: share this machine's memory and cores.
    memory = config.search.memory_gb
    if not on_gpu:
        if memory is not None:
            share = memory
        else:
            share = 0.9 * read_memory_bytes(torch.device("cpu")) / GIB / per_node
        omp_num_threads = os.environ.get("OMP_NUM_THREADS", "")
        threads = (
            int(omp_num_threads) if omp_num_threads.isdecimal() and int(omp_num_threads) else None
        )
        return estimate_cpu_rates(len(os.sched_getaffinity(0)), share, per_node, threads)
    # GPUs: look up the type that is set, or that of this machine.
    if config.search.gpu is None and not torch.cuda.is_available():
        raise UnknownRates(
            f"allocation_mode={config.allocation_mode}: this machine has no GPU; set search.gpu "
            "to the type of the cluster's GPUs, such as H100"
        )
    name = config.search.gpu or torch.cuda.get_device_name(0)
    if all(network.settings.dtype == "float32" for network in networks.values()):
        dtype = "float32"
    else:
        dtype = "bfloat16"
    try:
        return find_gpu_rates(name, dtype, memory, per_node)
    except ConfigError as error:
        raise UnknownRates(str(error)) from None


def _load(experiment: Experiment, config: RunConfig, call: MFCDef) -> CallWorkload:
    prompt, new, samples = _estimate_lengths(experiment, config)
    rows = samples * (2 if experiment.dataset_type in PAIRED_TYPES else 1)
    epochs = int(call.args.get("epochs", 1)) if call.trains else 1
    if call.trains:
        updates = max(1, experiment.updates_per_firing.get(call.name, 1) // epochs)
    else:
        updates = 1
    limit = call.max_tokens_per_microbatch or experiment.control.max_tokens_per_microbatch
    return CallWorkload(
        call.method, _count_ids(experiment) * rows, prompt, new, updates, epochs, limit
    )


def _count_ids(experiment: Experiment) -> int:
    """Return the number of dataset rows per step.

    If batches are formed by token count, this is an estimate.
    """
    size = experiment.get_node(experiment.steps_follow).batch_size
    dataset = experiment.dataset
    return size or max(
        1,
        (dataset.train_tokens_per_batch or 0)
        // (dataset.limit or DEFAULT_PROMPT_TOKENS + DEFAULT_ANSWER_TOKENS),
    )


def _estimate_lengths(experiment: Experiment, config: RunConfig) -> tuple[int, int, int]:
    """Return the estimated tokens per prompt, tokens per answer, and sampled answers per prompt."""
    # Lengths are those of the call that samples, or those of the rows.
    samplers = []
    for call in experiment.graph.list_model_calls():
        if call.method == "generate":
            samplers.append(call)
    # The experiment's dataset has defaults filled in; prefer the lengths that the user set.
    spec = config.search
    written = getattr(config, "dataset", experiment.dataset)
    prompt = (
        spec.prompt_tokens
        or written.max_prompt_len
        or min(DEFAULT_PROMPT_TOKENS, experiment.dataset.max_prompt_len or DEFAULT_PROMPT_TOKENS)
    )
    if samplers:
        args = samplers[0].args
        new = int(args.get("max_new_tokens") or MAX_NEW_TOKENS)
        return prompt, spec.answer_tokens or new, int(args.get("samples_per_prompt", 1))
    most = written.limit
    if most is None:
        return prompt, spec.answer_tokens or DEFAULT_ANSWER_TOKENS, 1
    prompt = min(prompt, max(1, most // 2))
    return prompt, spec.answer_tokens or max(1, most - prompt), 1


def _find_shared_references(experiment: Experiment) -> dict[str, str]:
    """Map reference roles to trained roles whose weights they can share.

    A reference can share the weights of a trained role if it equals this role with its adapters
    disabled.
    """
    from weft.engine.torch.adapters_off import can_share_base

    shared_references: dict[str, str] = {}
    for role, spec in experiment.roles.items():
        for other, trained in experiment.roles.items():
            if role != other and can_share_base(spec, trained):
                shared_references[role] = other
    return shared_references


# -- output


def _estimate_to_dict(estimate: PlacementEstimate) -> dict[str, Any]:
    calls = {}
    for call, mesh in estimate.meshes.items():
        calls[call] = {
            "layout": str(mesh.layout),
            "devices": list(mesh.ranks),
            "seconds": estimate.seconds[call],
            "seconds_for_its_weights": estimate.transfer_seconds[call],
        }
    return {
        "step_seconds": estimate.step_seconds,
        "memory_gb": estimate.peak_bytes / GIB,
        "fits": not estimate.excess_bytes,
        "calls": calls,
    }


def _format_mesh(mesh: Mesh) -> str:
    degrees = {letter: getattr(mesh.layout, name) for letter, name in LETTERS.items()}
    written = "".join(f"{k}{v}" for k, v in degrees.items() if v > 1 or k == "d")
    first = mesh.ranks[0]
    last = mesh.ranks[-1]
    if mesh.ranks != tuple(range(first, last + 1)):
        return f"{written} on {','.join(map(str, mesh.ranks))}"
    if first == last:
        return f"{written} on {first}"
    return f"{written} on {first}-{last}"


def _with_moving(estimate: PlacementEstimate, call: str) -> str:
    moving = estimate.transfer_seconds[call]
    return _format_seconds(estimate.seconds[call]) + (
        f" + {_format_seconds(moving)} for its weights" if moving else ""
    )


def _format_seconds(number: float) -> str:
    return f"{number:.3g} s" if number >= 0.1 else f"{1e3 * number:.3g} ms"
