"""Facts for a plan: the devices, predicted descriptions of the engines, and the needed memory."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

from weft.data.sample import SequenceSample
from weft.data.tokenizer import Tokenizer
from weft.engine.device import (
    describe_hardware,
    format_hardware,
    measure_peak_memory_gib,
    read_memory_bytes,
    resolve_device,
)
from weft.engine.generation.caches import (
    DEFAULT_MAX_SEQUENCES,
    KV_SHARE,
    MAX_SEQUENCES,
    compute_kv_bytes,
)
from weft.engine.rows import PackLayout, split_batch
from weft.engine.spec import TPU, GenerationSpec, ModelSpec
from weft.engine.torch.adapters_off import can_share_base
from weft.engine.torch.prepare import share_prompts, share_training_prefixes
from weft.experiment import Experiment
from weft.experiments.planned_networks import build_memory_settings, describe_planned_engine
from weft.graph.mfc import MFCDef
from weft.launch.cluster import check_processes, get_device_kind
from weft.observe.memory import MIB, format_size, measure_file_pages_gb
from weft.observe.plan_table import MIN_SHOWN_SHARE
from weft.planner import memory
from weft.planner.cluster import find_cluster, find_least_memory, is_mixed
from weft.planner.cost import SLOT
from weft.planner.devices import (
    GIB,
    GPU_SIZES,
    RESERVED_GIB,
    find_gpu_rates,
    get_usable_memory,
    subtract_reserved,
)
from weft.planner.forecast import (
    EXTRAS,
    CallMemory,
    MemoryForecast,
    find_offloaded,
)
from weft.planner.lengths import count_updates
from weft.planner.memory import CallDemand, MemoryCase, NetworkShape
from weft.planner.problem import PlacementProblem
from weft.planner.run_plan import name_engines
from weft.runtime.split import split_minibatches

GPU = torch.device("cuda")  # any GPU
GPU_OPTION_HINT = "name one with search.gpu=H100"


# -- devices


@dataclass(frozen=True)
class TargetDevices:
    """Devices for which a plan is made: `count` devices with `usable` bytes of memory each.

    `usable` is None for GPUs of unknown type.
    """

    device: torch.device
    name: str
    count: int
    usable: float | None
    description: str

    @classmethod
    def from_experiment(cls, experiment: Experiment, mode: str) -> TargetDevices:
        """Return the devices that the options name, or else those of this machine.

        The option `search.gpu` is the name of a GPU, which does not have to be on this machine, or
        has several names with numbers; every device then counts as having the least memory. The
        option is ignored with `device=cpu` and `device=tpu`. If the run needs a GPU, but
        `search.gpu` is not set and this machine has no GPU, the GPU's type is unknown. Raises
        `ConfigError` for an unknown name.
        """
        device_option = experiment.control.device
        count = experiment.num_devices
        search = experiment.config.get("search") or {}
        gpu = search.get("gpu")
        memory_gb = search.get("memory_gb")
        if device_option == TPU:
            room = math.inf if memory_gb is None else memory_gb * GIB
            return cls(torch.device("cpu"), "TPU", count, room, "TPU")
        on_gpu = gpu is not None if device_option is None else device_option.startswith("cuda")
        # A GPU named by an option; it need not be on this machine.
        if gpu is not None and on_gpu:
            if is_mixed(gpu):
                per_node = experiment.control.n_gpus_per_node or 1
                total = int(experiment.config.get("n_nodes") or 1) * per_node
                cluster = find_cluster(gpu, "bfloat16", None, total, per_node)
                name = cluster.name
                least = find_least_memory(cluster)
            else:
                name = find_gpu_rates(gpu, "bfloat16").name
                least = get_usable_memory(name)
            usable = memory_gb if memory_gb is not None else least
            return cls(
                torch.device("cuda"),
                name,
                count,
                usable * GIB,
                f"{name}, {usable:.1f} GiB of it (search.gpu)",
            )
        # A GPU of unknown type.
        if on_gpu and not torch.cuda.is_available():
            return cls(torch.device("cuda"), "GPU", count, None, "")
        # A device of this machine; devices on CPUs share its memory.
        in_process = mode == "local" and count == 1
        device = resolve_device(device_option if in_process else get_device_kind(experiment))
        if mode == "local" and device.type == "cpu":
            check_processes(count)
        share = read_memory_bytes(device) / (1 if in_process or device.type != "cpu" else count)
        if memory_gb is not None:
            usable = memory_gb * GIB
        elif device.type == "cuda":
            usable = subtract_reserved(share / GIB) * GIB
        else:
            usable = share
        line = format_hardware(
            describe_hardware(device),
            torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        )
        return cls(device, line, count, usable, line)

    def list_candidates(self) -> list[TargetDevices]:
        """Return the targets to try in a plan, from the smallest to the largest.

        If the type of the GPU is unknown, there is one target for each common GPU size. Otherwise
        this target is the only one.
        """
        if self.usable is not None:
            return [self]
        template = (
            "GPU of {gb} GB, the smallest that suffices: this machine has no GPU and none is named "
            "({option})"
        )
        candidates: list[TargetDevices] = []
        for gb, gib in GPU_SIZES:
            candidates.append(
                replace(
                    self,
                    name=f"GPU of {gb} GB",
                    usable=subtract_reserved(gib) * GIB,
                    description=template.format(gb=gb, option=GPU_OPTION_HINT),
                )
            )
        return candidates

    def format_verdict(self, needed: float, scope: str = "") -> str:
        """Return a line that says whether the needed memory fits in a device's memory.

        `needed` is in bytes per device. `scope` is a phrase that follows the needed memory in the
        line.
        """
        assert self.usable is not None
        devices = f"each of {self.count} devices" if self.count > 1 else "the device"
        needs = f"{devices} needs about {format_size(needed)}{scope}"
        if self.usable == math.inf:
            return f"{needs}; weft does not know how much the {self.name} has"
        holds = "fits" if needed <= self.usable else "does NOT fit"
        name = self.name.replace(f", {format_size(self.usable)}", "")  # already shown
        return f"{holds}: {needs} of {format_size(self.usable)}: {name}"


# -- engines


def predict_facts(
    experiment: Experiment, device: torch.device, tokenizers: Mapping[str, Tokenizer]
) -> dict[str, Mapping[str, Any]]:
    """Return the predicted description of each role's engine.

    Each description also has the key `copies`, with the descriptions of the role's copies on other
    meshes (groups of devices), keyed by mesh.
    """
    meshes = experiment.role_meshes
    facts_by_role = dict[str, Mapping[str, Any]]()
    for role, spec in experiment.roles.items():
        tokenizer = tokenizers.get(role)
        copies = {}
        for name, mesh in experiment.copies:
            if name == role:
                copies[mesh] = describe_planned_engine(spec.mirror(), mesh, device, tokenizer)
        shared = find_shared_base(experiment, role)
        facts = dict(describe_planned_engine(spec, meshes[role], device, tokenizer))
        if shared is not None:
            facts["notes"] = [*facts["notes"], f"the same weights as {shared}'s, with adapters off"]
        facts_by_role[role] = {**facts, "copies": copies}
    return facts_by_role


def find_shared_base(experiment: Experiment, role: str) -> str | None:
    """Return the role whose weights `role` uses with adapters off, or None if it has its own."""
    meshes = experiment.role_meshes
    for other, spec in experiment.roles.items():
        same_parts = meshes[role].has_same_parts(meshes[other])
        if can_share_base(experiment.roles[role], spec) and same_parts:
            return other
    return None


# -- memory


@dataclass(frozen=True)
class RoleDevice:
    """Device of a role, and the numbers of ranks over which the role's batches are split.

    Attributes:
        device: torch device of the role. "cuda" without an index means a GPU that is not on this
            machine.
        capacity: Memory of the device in bytes, or None if it is unknown. It is used only for a GPU
            that is not on this machine.
        data: Number of data-parallel ranks.
        context: Number of context-parallel ranks.
    """

    device: torch.device
    capacity: float | None = None
    data: int = 1
    context: int = 1


def measure_held_memory(device: torch.device) -> float:
    """Return the memory that this process currently uses, in GiB.

    On a GPU, this is the memory allocated by torch. On a CPU, it is the resident size without file
    pages.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / GIB
    if sys.platform != "linux":
        return measure_peak_memory_gib(device)
    with open("/proc/self/status") as status:
        resident = next(line for line in status if line.startswith("VmRSS"))
    return int(resident.split()[1]) / MIB - measure_file_pages_gb()


def find_missing_packages() -> set[str]:
    """Return the packages that options with a lower memory need and that are not installed."""
    packages = {package for package, _ in EXTRAS.values()}
    return {package for package in packages if importlib.util.find_spec(package) is None}


def make_peak_formatter(expected: MemoryForecast, room: int) -> Callable[[float], tuple[str, bool]]:
    """Return a function that formats the measured peak memory, in GiB, at the end of a run.

    The function returns a line of text and a Boolean, which is true if the line should be shown
    because the run needed a considerable part of the memory. `room` is the device's memory in
    bytes.
    """

    def format_peak(most: float) -> tuple[str, bool]:
        needed = expected.compute_needed(most, measure_file_pages_gb())
        line = expected.format_comparison(most, needed)
        return line, needed * GIB >= MIN_SHOWN_SHARE * room

    return format_peak


def forecast(
    experiment: Experiment,
    facts: Mapping[str, Mapping[str, Any]],
    workload: Sequence[SequenceSample] | PlacementProblem,
    device: torch.device,
    baseline: float = 0.0,
    capacity: float | None = None,
) -> MemoryForecast:
    """Forecast the memory that a run needs.

    `facts` maps roles to the descriptions of their engines, including those of copies. `workload`
    are the batches that are expected to need the most memory or, if no rows were read, the problem
    of placing the calls, with assumed workloads, from which a search estimates the same. `baseline`
    is the memory in GiB that the process used before the engines were built. `capacity` is the
    memory in bytes of a GPU that is not on this machine.
    """
    # Estimate each role on each of its meshes, also on a GPU for comparison.
    batches = []
    if not isinstance(workload, PlacementProblem):
        batches = [_add_completions(experiment, batch) for batch in workload]
    meshes = experiment.role_meshes
    names = name_engines(experiment)
    roles = {}
    incomplete = []
    on_gpu = dict[str, MemoryCase]()
    call_memory = dict[str, CallMemory]()
    for role, spec in experiment.roles.items():
        if not facts[role].get("num_parameters"):
            continue  # only a tokenizer
        engines = {meshes[role]: facts[role], **facts[role].get("copies", {})}
        for mesh, engine_facts in engines.items():
            calls = []
            for call in experiment.graph.list_model_calls():
                if call.role == role and experiment.call_meshes[call.name] == mesh:
                    calls.append(call)
            name = names[role, mesh]
            place = RoleDevice(device, capacity, mesh.layout.data, mesh.layout.context)
            mesh_spec = spec if mesh == meshes[role] else spec.mirror()
            leaves = find_offloaded(mesh_spec, calls)
            if engine_facts.get("sizes") is None:
                incomplete.append(name)
            if isinstance(workload, PlacementProblem) and engine_facts.get("sizes") is not None:
                case = workload.build_memory_case(
                    role, mesh, [call.name for call in calls], own=mesh == meshes[role]
                )
                by_call = zip(calls, case.works, strict=True)
                works = {call.name: [demand] for call, demand in by_call}
            else:
                works = _collect_works(experiment, calls, batches, place, engine_facts)
                all_works = list(chain.from_iterable(works.values()))
                case = build_case(mesh_spec, engine_facts, all_works, device, leaves)
            roles[name] = memory.estimate(case.shape, case.settings, case.works)
            on_gpu[name] = case
            if engine_facts.get("sizes") is not None:
                for call_name, demands in works.items():
                    call_estimate = memory.estimate(case.shape, case.settings, demands)
                    call_memory[call_name] = CallMemory(name, call_estimate.call)
            if device.type != "cuda":
                if batches:
                    gpu_place = replace(place, device=GPU)
                    works = _collect_works(experiment, calls, batches, gpu_place, engine_facts)
                all_works = list(chain.from_iterable(works.values()))
                in_bfloat16 = replace(mesh_spec, dtype="bfloat16")
                on_gpu[name] = build_case(in_bfloat16, engine_facts, all_works, GPU, leaves)
        # If a role shares the weights of another one, they are counted for the other role.
        if find_shared_base(experiment, role) is not None:
            roles[role] = roles[role].drop_weights()
            on_gpu.pop(role)
    return MemoryForecast(
        roles,
        device.type,
        tuple(incomplete),
        baseline,
        _list_cache_limits(experiment, RoleDevice(device, capacity)),
        on_gpu,
        experiment.num_devices,
        find_missing_packages(),
        call_memory,
    )


def _list_cache_limits(experiment: Experiment, place: RoleDevice) -> dict[str, int]:
    """Return the largest size of the KV cache in bytes, by the name of each call that generates."""
    limits = {}
    for call in experiment.graph.list_model_calls():
        if call.method == "generate" and (limit := _get_cache_limit(call, place)):
            limits[call.name] = limit
    return limits


def _collect_works(
    experiment: Experiment,
    calls: Sequence[MFCDef],
    batches: Sequence[SequenceSample],
    place: RoleDevice,
    facts: Mapping[str, Any],
) -> dict[str, list[CallDemand]]:
    """Return the memory demands of each call for each batch, by the name of the call."""
    shared = facts.get("shared_prompts", {})
    batches = [_select_largest_share(batch, place.data) for batch in batches]
    result: dict[str, list[CallDemand]] = {}
    for call in calls:
        result[call.name] = []
        for batch in batches:
            result[call.name].extend(_iterate_works(experiment, call, batch, place, shared))
    return result


def _select_largest_share(batch: SequenceSample, ranks: int) -> SequenceSample:
    """Split a batch over `ranks` data-parallel ranks, and return the part with the most tokens.

    A prompt is counted once for each of its completions.
    """
    if ranks == 1 or batch.num_ids < ranks:
        return batch
    return max(batch.split(ranks), key=lambda part: int(part.token_costs().sum()))


def _get_cache_limit(call: MFCDef, place: RoleDevice) -> int | None:
    """Return the maximum size in bytes of a generation call's KV cache.

    `place` is the device of the call's role. Returns None if the user sets no limit and the size of
    the device's memory is unknown.
    """
    limit_gb = call.args.get("kv_cache_gb")
    device = place.device
    if device.type == "cuda" and device.index is None:
        if place.capacity is None:
            least = None
        else:
            least = int(KV_SHARE * (place.capacity + RESERVED_GIB * GIB))
        return least if limit_gb is None else int(limit_gb * GIB)
    return compute_kv_bytes(device, limit_gb)


def build_case(
    spec: ModelSpec,
    facts: Mapping[str, Any],
    works: Sequence[CallDemand],
    device: torch.device,
    leaves: frozenset[str] = frozenset(),
) -> MemoryCase:
    """Return the input for estimating the memory of one role.

    `facts` is the description of the role's engine, and `works` are the memory demands of the
    role's calls. `leaves` says what is offloaded between calls, unless the device is a CPU: it can
    contain "weights" and "optimizer" (the optimizer state).
    """
    sizes = facts.get("sizes")
    if sizes is None:
        works = []
        sizes = dict.fromkeys(("layers", "hidden", "query", "key", "inner", "embedding"), 0) | {
            "vocab": 1
        }
    held = facts.get("held_parameters", facts["num_parameters"])
    shape = NetworkShape(held, facts.get("held_trainable", facts["num_trainable"]), **sizes)
    on_cpu = device.type == "cpu"  # nothing is offloaded there
    settings = replace(
        build_memory_settings(spec, device),
        weights_leave=not on_cpu and "weights" in leaves,
        optimizer_leaves=not on_cpu and "optimizer" in leaves,
    )
    return MemoryCase(shape, settings, tuple(works))


def _add_completions(experiment: Experiment, batch: SequenceSample) -> SequenceSample:
    """Return the batch with the completions that generation would add, each of the maximum length.

    If some completions of a prompt come from the dataset, and the longest of them exceeds the
    maximum length, all completions of the prompt get the length of the longest.
    """
    for call in experiment.graph.list_model_calls():
        mixed = "share" in call.args
        if call.method == "generate" and (mixed or "completion" not in batch.data):
            count = int(call.args.get("samples_per_prompt", 1))
            length = int(call.args.get("max_new_tokens") or GenerationSpec().new_token_limit)
            if mixed:
                longest = [max(group) for group in batch.seqlens["completion"]]
            else:
                longest = [0] * batch.num_ids
            groups = [[max(length, most)] * count for most in longest]
            tokens = torch.zeros(sum(map(sum, groups)), dtype=torch.int64)
            sampled = SequenceSample.from_groups(
                batch.ids, {"completion": groups}, {"completion": tokens}
            )
            batch = (batch.select(keys=["prompt"]) if mixed else batch).update(sampled)
    return batch


def _iterate_works(
    experiment: Experiment,
    call: MFCDef,
    batch: SequenceSample,
    place: RoleDevice,
    shared: Mapping[str, Any],
) -> Iterator[CallDemand]:
    """Yield the memory demands of a model function call on one device of its role.

    Generation has one demand; other calls have one per micro-batch. `place` is the device.

    A prompt that several sequences of a micro-batch have in common is computed only once if no
    sequence has more than `shared["longest"]` tokens. In training, `shared["in_training"]` must
    also be True. If `shared` is empty, each sequence's prompt is computed separately.
    """
    if "completion" not in batch.data:
        return
    layout = PackLayout.from_sample(batch)
    device = place.device
    if call.method == "generate":
        together = min(len(layout.length), MAX_SEQUENCES.get(device.type, DEFAULT_MAX_SEQUENCES))
        capacity = SLOT
        while capacity < int(layout.lengths.max()):
            capacity *= 2
        limit = _get_cache_limit(call, place)
        yield CallDemand(
            tokens=0, cache_tokens=together * capacity, cache_limit=limit, sequences=together
        )
        return
    limit = call.max_tokens_per_microbatch or experiment.control.max_tokens_per_microbatch
    # Sequences over the limit are reported at run time, because sampling can end earlier.
    limit = max(limit, int(layout.lengths.max()))
    trains = call.method == "train_step"
    shares = bool(shared) and (shared["in_training"] or not trains)
    entropy = trains and bool(
        call.args.get("entropy_coef")
    )  # with a coefficient of 0, entropy has no gradient
    parts: Sequence[SequenceSample] = [batch]
    if trains:
        updates = count_updates(experiment.updates_per_firing, call)
        parts = split_minibatches(batch, min(updates, batch.num_ids), "group")
    for part in parts:
        cuts = split_batch(part, limit, "sequence")
        for cut in cuts:
            cut_layout = PackLayout.from_sample(cut)
            if shares and int(cut_layout.lengths.max()) <= shared["longest"]:
                keys = (*call.input_keys, *call.optional_keys)
                if trains:
                    cut_layout = share_training_prefixes(cut_layout, keys, cut, device)
                else:
                    cut_layout = share_prompts(cut_layout, keys)
            if trains and "loss_mask" in cut.data:
                rows = int(cut.data["loss_mask"].count_nonzero())
            else:
                rows = int(cut_layout.length.sum())
            tokens, rows = (
                -(-number // place.context)
                for number in (int(cut_layout.segment_lengths.sum()), rows)
            )
            yield CallDemand(tokens, rows, trains, len(cuts), entropy)
