"""Forecast of a run's memory from its configuration and data, and comparison with the actual use."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from weft import kernels
from weft.data.sample import SequenceSample
from weft.engine.device import measure_peak_memory_gib
from weft.engine.generation.caches import (
    DEFAULT_MAX_SEQUENCES,
    KV_SHARE,
    MAX_SEQUENCES,
    compute_kv_bytes,
)
from weft.engine.rows import PackLayout, split_batch
from weft.engine.spec import GenerationSpec, ModelSpec
from weft.engine.torch.adapters_off import can_share_base
from weft.engine.torch.engine import What, choose_dtype
from weft.engine.torch.prepare import share_prompts, share_training_prefixes
from weft.experiment import Experiment
from weft.graph.mfc import MFCDef, Offload
from weft.models.network.token_outputs import count_chunk_rows
from weft.observe.memory import measure_file_pages_gb
from weft.planner import memory, memory_options
from weft.planner.memory import CallDemand, MemorySettings, NetworkShape, RoleMemory, build_settings
from weft.planner.memory_options import MemoryCase
from weft.runtime.split import split_minibatches
from weft.topology import Mesh

GIB = 2.0**30
MIB = 2.0**20
GPU = torch.device("cuda")  # any GPU
SLOT = 64  # initial tokens per cache slot; doubled as needed
# Python objects of a run, without tensors: 17 to 23 MiB for SFT, DPO, GRPO and PPO, measured on
# one small layer
PROGRAM = 20 * MIB
# process of a CPU device without a model: Python, torch and their libraries
PROCESS = 0.4 * GIB


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


@dataclass(frozen=True)
class MemoryForecast:
    """Forecast of the memory that each role needs, in bytes.

    `incomplete` lists the roles whose network sizes are unknown. For these roles, only weights and
    optimizer states are counted.
    """

    roles: Mapping[str, RoleMemory]
    device: torch.device
    incomplete: tuple[str, ...]
    # GiB used by the process before the engines are built, see `measure_held_memory`
    baseline: float
    # maximum bytes of the KV cache, by generation call
    cache_limits: Mapping[str, int] = field(default_factory=dict)
    # cases for the same roles on a GPU
    on_gpu: Mapping[str, MemoryCase] = field(default_factory=dict)
    process: float = 0.0  # bytes of a separate device process, or 0

    @property
    def total(self) -> float:
        """Total memory at the peak, in bytes."""
        whole = memory.compute_peak(self.roles)
        held = sum(role.permanent for role in self.roles.values())
        if self.device.type != "cpu":
            return whole
        # The heap keeps freed memory, with gaps between tensors of many sizes; memory freed by a
        # cache is rarely reused.
        caches = sum(role.cache for role in self.roles.values())
        return held + kernels.HOLES * (whole - held) + caches + PROGRAM + self.process

    def format_lines(self, on: Mapping[int, Sequence[str]] | None = None) -> Iterator[str]:
        """Yield lines for the plan that state the memory of each role, KV cache and device.

        `on` maps the rank of each device to the names of its roles; without it, all roles are on
        one device.
        """
        on = on or {0: list(self.roles)}
        for name, role in self.roles.items():
            parts = []
            for f in fields(role):
                if f.name not in ("call", "away", "kept"):
                    parts.append((f.name, getattr(role, f.name)))
            sizes = ", ".join(f"{what} {format_size(number)}" for what, number in parts if number)
            if role.away:
                sizes += f"; {format_size(role.away)} of it in host memory between its calls"
            yield f"memory of {name}: {sizes or 'shared with another role'}"
        for call, limit in self.cache_limits.items():
            yield f"memory of {call}: keys and values in at most {format_size(limit)} (gen.kv_cache_gb)"
        for device, names in on.items():
            part = self.select_roles(names)
            yield f"memory{f' of device {device}' if len(on) > 1 else ''}: about {format_size(part.total)} {part.scope}"
        if len(on) == 1 and not self.incomplete:
            yield from memory_options.format_fit(
                self.on_gpu, "" if self.device.type == "cuda" else "on a GPU in bfloat16: "
            )

    def select_roles(self, names: Sequence[str]) -> MemoryForecast:
        """Return the forecast for only the roles in `names`."""
        roles = {}
        for name in names:
            if name in self.roles:
                roles[name] = self.roles[name]
        return replace(
            self, roles=roles, incomplete=tuple(name for name in self.incomplete if name in roles)
        )

    @property
    def scope(self) -> str:
        """Text that qualifies the total in messages, usually "at most".

        If the network sizes of some roles are unknown, their activations are not part of the total.
        The text is then "without activations of" and the names of these roles.
        """
        if self.incomplete:
            return f"without activations of {', '.join(self.incomplete)}"
        return "at most"

    def compute_needed(self, most: float) -> float:
        """Return the memory in GiB that the run itself needed; `most` is the measured peak.

        The memory used before the engines were built is subtracted. For a run in one process on a
        CPU, memory mapped from files is subtracted, too. Most of it is library code, whose size
        varies with the processor and which the system can drop from memory.
        """
        alone = self.device.type == "cpu" and not self.process
        return most - self.baseline - (measure_file_pages_gb() if alone else 0.0)

    def format_comparison(self, most: float) -> str:
        """Return a line that compares the measured peak `most`, in GiB, with the forecast."""
        used = self.compute_needed(most) * GIB
        scope = f" {self.scope}" if self.incomplete else ""
        return (
            f"memory: {most:.2f} GB at most, of which this run needed {format_size(used)}; "
            f"{format_size(self.total)}{scope} were expected "
            f"({used / self.total:.0%})"
        )


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


def forecast(
    experiment: Experiment,
    facts: Mapping[str, Mapping[str, Any]],
    given: Sequence[SequenceSample],
    device: torch.device,
    baseline: float = 0.0,
    capacity: float | None = None,
) -> MemoryForecast:
    """Forecast the memory that a run needs.

    `facts` maps roles to the descriptions of their engines, including those of copies. `given` are
    the batches that are expected to need the most memory. `baseline` is the memory in GiB that the
    process used before the engines were built. `capacity` is the memory in bytes of a GPU that is
    not on this machine.
    """
    # Estimate each role on each of its meshes, also on a GPU for comparison.
    batches = [_add_completions(experiment, batch) for batch in given]
    meshes = experiment.build_meshes()
    roles = {}
    incomplete = []
    on_gpu = dict[str, MemoryCase]()
    for role, spec in experiment.roles.items():
        if not facts[role].get("num_parameters"):
            continue  # only a tokenizer
        for mesh, own in {meshes[role]: facts[role], **facts[role].get("copies", {})}.items():
            calls = []
            for c in experiment.graph.list_model_calls():
                if c.role == role and experiment.get_mesh(c) == mesh:
                    calls.append(c)
            place = RoleDevice(device, capacity, mesh.layout.data, mesh.layout.context)
            works = _collect_works(experiment, calls, batches, place, own)
            name = format_role_name(experiment, role, mesh)
            if own.get("sizes") is None:
                incomplete.append(name)
            chosen = spec if mesh == meshes[role] else spec.mirror()
            if device.type != "cpu":
                leaves = _find_offloaded(chosen, calls)
            else:
                leaves = frozenset[What]()
            case = build_case(chosen, own, works, device, leaves)
            roles[name] = memory.estimate(case.shape, case.settings, case.works)
            on_gpu[name] = case
            if device.type != "cuda":
                works = _collect_works(experiment, calls, batches, replace(place, device=GPU), own)
                on_gpu[name] = build_case(
                    replace(chosen, dtype="bfloat16"),
                    own,
                    works,
                    GPU,
                    _find_offloaded(chosen, calls),
                )
        # The parameters of a role that shares another one's base are counted there.
        if any(
            can_share_base(spec, s) and meshes[role].has_same_parts(meshes[r])
            for r, s in experiment.roles.items()
        ):
            roles[role] = replace(
                roles[role], parameters=0, masters=0, optimizer=0, gradients=0, away=0
            )
            on_gpu.pop(role)
    # Add the limits of KV caches and the memory of separate processes.
    calls = [call for call in experiment.graph.list_model_calls() if call.method == "generate"]
    limits = {
        call.name: limit
        for call in calls
        if (limit := _get_cache_limit(call, RoleDevice(device, capacity)))
    }
    if device.type == "cpu" and experiment.num_devices > 1:
        process = PROCESS
    else:
        process = 0.0
    return MemoryForecast(roles, device, tuple(incomplete), baseline, limits, on_gpu, process)


def _collect_works(
    experiment: Experiment,
    calls: Sequence[MFCDef],
    batches: Sequence[SequenceSample],
    place: RoleDevice,
    facts: Mapping[str, Any],
) -> list[CallDemand]:
    shared = facts.get("shared_prompts", {})
    batches = [_select_largest_share(batch, place.data) for batch in batches]
    result: list[CallDemand] = []
    for call in calls:
        for batch in batches:
            result.extend(_iterate_works(experiment, call, batch, place, shared))
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
        least = None if place.capacity is None else int(KV_SHARE * place.capacity)
        return least if limit_gb is None else int(limit_gb * GIB)
    return compute_kv_bytes(device, limit_gb)


def format_role_name(experiment: Experiment, role: str, mesh: Mesh) -> str:
    """Return a readable name for the engine of a role on `mesh`.

    The name is the role or, for a copy, the role with its calls: `actor (actor_gen)`.
    """
    if mesh == experiment.build_meshes()[role]:
        return role
    calls = []
    for call in experiment.list_calls():
        if call.role == role and experiment.get_mesh(call) == mesh:
            calls.append(call.name)
    return f"{role} ({', '.join(dict.fromkeys(calls))})"


def _find_offloaded(spec: ModelSpec, calls: Sequence[MFCDef]) -> frozenset[What]:
    """Return what is offloaded between a role's calls: weights, optimizer state, both or neither.

    The result is a set of the words "weights" and "optimizer". The optimizer state is offloaded if
    every training call offloads it. Weights are offloaded if every call offloads them and the
    option `offload` is set. Without this option, the weights are on the device before the first
    call, together with the weights of all other roles, and therefore count as not offloaded.
    """
    after = []
    for call in calls:
        after.append({hook.what for hook in call.post_hooks if isinstance(hook, Offload)})
    trains = []
    for hooks, call in zip(after, calls, strict=True):
        if call.method == "train_step":
            trains.append(hooks)
    offloaded_state: set[What] = set()
    if spec.offload and after and all("weights" in hooks for hooks in after):
        offloaded_state.add("weights")
    if trains and all("optimizer" in hooks for hooks in trains):
        offloaded_state.add("optimizer")
    return frozenset(offloaded_state)


def build_case(
    spec: ModelSpec,
    facts: Mapping[str, Any],
    works: Sequence[CallDemand],
    device: torch.device,
    leaves: frozenset[What] = frozenset(),
) -> MemoryCase:
    """Return the input for estimating the memory of one role.

    `facts` is the description of the role's engine, and `works` are the memory demands of the
    role's calls. `leaves` says what is offloaded between calls: it can contain "weights" and
    "optimizer" (the optimizer state).
    """
    sizes = facts.get("sizes")
    if sizes is None:
        works = []
        sizes = dict.fromkeys(("layers", "hidden", "query", "key", "inner", "embedding"), 0) | {
            "vocab": 1
        }
    held = facts.get("held_parameters", facts["num_parameters"])
    shape = NetworkShape(held, facts.get("held_trainable", facts["num_trainable"]), **sizes)
    return MemoryCase(shape, _build_settings(spec, device, shape.vocab, leaves), tuple(works))


def _build_settings(
    spec: ModelSpec, device: torch.device, vocab_size: int, leaves: frozenset[What]
) -> MemorySettings:
    dtype = choose_dtype(spec)
    plain = device.type == "cpu" and dtype == "float32"
    settings = build_settings(spec, dtype, device.type, count_chunk_rows(vocab_size, device))
    return replace(
        settings,
        weights_leave="weights" in leaves,
        optimizer_leaves="optimizer" in leaves,
        packs=plain and kernels.cpu_library() is None,
        in_place=plain and kernels.cpu_library() is not None,
        adds_rows=plain,
        widens=device.type == "cpu" and dtype in ("bfloat16", "float16"),
    )


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
                own = [max(group) for group in batch.seqlens["completion"]]
            else:
                own = [0] * batch.num_ids
            groups = [[max(length, most)] * count for most in own]
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
    # sequences over the limit are reported at run time: sampling can end earlier
    limit = max(limit, int(layout.lengths.max()))
    trains = call.method == "train_step"
    shares = bool(shared) and (shared["in_training"] or not trains)
    entropy = trains and bool(
        call.args.get("entropy_coef")
    )  # with a coefficient of 0, entropy has no gradient
    parts: Sequence[SequenceSample] = [batch]
    if trains:
        updates = max(
            1, experiment.updates_per_firing.get(call.name, 1) // int(call.args.get("epochs", 1))
        )
        parts = split_minibatches(batch, min(updates, batch.num_ids), "group")
    for part in parts:
        cuts = split_batch(part, limit, "sequence")
        for cut in cuts:
            at = PackLayout.from_sample(cut)
            if shares and int(at.lengths.max()) <= shared["longest"]:
                keys = (*call.input_keys, *call.optional_keys)
                if trains:
                    at = share_training_prefixes(at, keys, cut, device)
                else:
                    at = share_prompts(at, keys)
            if trains and "loss_mask" in cut.data:
                rows = int(cut.data["loss_mask"].count_nonzero())
            else:
                rows = int(at.length.sum())
            tokens, rows = (
                -(-number // place.context) for number in (int(at.segment_lengths.sum()), rows)
            )
            yield CallDemand(tokens, rows, trains, len(cuts), entropy)


def format_size(number: float) -> str:
    """Format a number of bytes in GiB or MiB."""
    if number >= 0.1 * GIB:
        return f"{number / GIB:.2f} GiB"
    return f"{number / MIB:.1f} MiB"
