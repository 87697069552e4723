"""Estimates of a call's duration and device memory with a given layout.

The duration of a computation comes from a profile or from the rates of the device
(`weft.planner.compute_times`). This module adds what the layout brings: micro-batches, messages,
pipeline stages, steps of generation, copies to host memory, and the batch that the call reads. On
GPUs, messages of sharded weights and copies overlap with computation; nothing else does within a
call. Host functions are not part of a call. The functions are pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from weft.planner.compute_times import PARTS, CallCost, ComputeTimes, PassCost, PassSize
from weft.planner.decoder_sizes import DecoderSizes
from weft.planner.decoding import plan_decoding
from weft.planner.devices import DeviceRates
from weft.planner.memory import WIDE, CallDemand, MemoryCase
from weft.planner.messages import (
    estimate_decode_messages,
    estimate_pass_messages,
    estimate_shard_messages,
    estimate_stage_sends,
    list_group,
)
from weft.planner.offload import (
    estimate_host_updates,
    estimate_state_copies,
    estimate_weight_copies,
)
from weft.planner.overlaps import compute_lacked_elements
from weft.planner.row_lengths import RowBatch, compute_imbalance
from weft.topology import Layout, Mesh, compute_stage

# Bytes per second at which a process gets a batch from another: pickled, over sockets
BATCH_BANDWIDTH = 1e9
# Reads and writes of each byte of new weights, in addition to sending it: it is copied into a message
# and out of it (two each), and read for a checksum on both sides (one each)
PACKING = 6
# CUDA graphs of a generation, one for each of some batch sizes; a layer's kernels are started one by
# one twice before a graph is captured, and meanwhile
GRAPHS, RUNS_PER_GRAPH = 6, 3
CACHE_SHARE = 0.25  # maximum share of a device's memory for the KV cache
SLOT = 64  # initial tokens per slot of the KV cache; doubled as needed


@dataclass(frozen=True)
class CallWorkload:
    """Workload of a model function call in one step.

    The call processes `num_sequences` sequences. A training call makes `num_epochs` passes with
    `num_updates` optimizer steps each.

    Attributes:
        method: Method of the call's interface, such as "generate" or "train_step".
        num_sequences: Number of sequences.
        prompt_tokens: Mean number of tokens of a prompt.
        new_tokens: Mean number of tokens of an answer.
        num_updates: Number of optimizer steps per pass.
        num_epochs: Number of passes over the batch.
        microbatch: Maximum number of tokens that a device processes at a time.
        longest_prompt: Tokens of the longest prompt, or None if all are like the mean.
        longest_answer: Tokens of the longest answer, or None if all are like the mean.
        samples: Number of sequences with the same prompt.
        shared_tokens: Mean number of tokens of a prompt that are computed once for its sequences.
        saved_share: Share of the tokens that need no computation, since prompts of different
            samples begin with the same tokens.
        repeats_head: True if training computes the logits again in the backward pass, as preference
            losses do, whose gradients by a row depend on other rows.
        batches: Tokens and answer tokens of each row of some batches of the data. They tell how
            unequally data-parallel ranks share the tokens; if empty, the shares are equal.
        attended_length: Mean number of tokens of the sequence to which a token belongs; longer
            than the mean sequence if lengths differ. None: all are like the mean.
        cache_bytes: Maximum size of a generation's KV cache on a device, if the user set it.
        batch_bytes: Size of the batch that the call reads.
        offloads: Parts of the role that are in host memory between its calls: "weights",
            "optimizer", both or neither.
        has_entropy: True if the loss contains the entropy.
    """

    method: str
    num_sequences: int
    prompt_tokens: int
    new_tokens: int
    num_updates: int = 1
    num_epochs: int = 1
    microbatch: int = 16384
    longest_prompt: int | None = None
    longest_answer: int | None = None
    samples: int = 1
    shared_tokens: float = 0.0
    saved_share: float = 0.0
    repeats_head: bool = False
    batches: tuple[RowBatch, ...] = ()
    attended_length: float | None = None
    cache_bytes: int | None = None
    batch_bytes: float = 0.0
    offloads: frozenset[str] = frozenset()
    has_entropy: bool = False

    @property
    def sequence_length(self) -> int:
        """Mean number of tokens per sequence."""
        return self.prompt_tokens + self.new_tokens

    @property
    def longest_sequence(self) -> int:
        """Number of tokens of the longest prompt with the longest answer."""
        return (self.longest_prompt or self.prompt_tokens) + (
            self.longest_answer or self.new_tokens
        )

    @property
    def num_tokens(self) -> int:
        """Total number of tokens of all sequences, each with its prompt."""
        return self.num_sequences * self.sequence_length

    @property
    def trains(self) -> bool:
        """True if the call trains a model."""
        return self.method == "train_step"

    def count_microbatches(self, layout: Layout) -> int:
        """Return the number of micro-batches of a data-parallel rank, per optimizer step."""
        ranks = layout.data * layout.context
        updates = self.num_updates if self.trains else 1
        return max(1, math.ceil(self.num_tokens / ranks / updates / self.microbatch))

    def count_active_stages(self, layout: Layout) -> float:
        """Return the mean number of pipeline ranks that compute at the same time.

        The others wait for the first micro-batch, or have passed on their last one. While
        decoding, all stages always have work.
        """
        ranks = layout.pipeline
        if self.method == "generate":
            return ranks
        parts = self.count_microbatches(layout) * layout.stages_per_rank
        return ranks * parts / (parts + ranks - 1)

    def count_computed_tokens(self, network: DecoderSizes) -> float:
        """Return the number of tokens that a pass computes, without those of shared prefixes."""
        if not network.shares_prefixes:
            return self.num_tokens
        others = self.num_sequences * (1.0 - 1.0 / self.samples)
        return (self.num_tokens - others * self.shared_tokens) * (1.0 - self.saved_share)


# -- seconds


@dataclass(frozen=True)
class CallEstimate:
    """Estimated time of a call, and its parts in seconds.

    The parts are "products", "memory" (reads and writes), "messages", "overhead" (starting kernels,
    packing, passing calls on), "bubble" (waiting of pipeline stages), "offload" (copies to host
    memory and back that nothing hides, and updates there) and "preemption" (what sequences that were
    preempted compute again).
    """

    seconds: float
    parts: Mapping[str, float]

    @property
    def bound(self) -> str:
        """Name of the largest part."""
        return max(self.parts, key=lambda name: self.parts[name])

    def with_overhead(self, seconds: float) -> CallEstimate:
        """Return the estimate with more overhead."""
        parts = {**self.parts, "overhead": self.parts["overhead"] + seconds}
        return CallEstimate(self.seconds + seconds, parts)


def estimate_call(
    network: DecoderSizes, load: CallWorkload, mesh: Mesh, rates: DeviceRates
) -> CallEstimate:
    """Return the time that a call takes per step on `mesh`, with its parts."""
    cost = _estimate_cost(network, load, mesh, rates)
    return CallEstimate(cost.seconds, dict(zip(PARTS, cost, strict=True)))


def _estimate_cost(
    network: DecoderSizes, load: CallWorkload, mesh: Mesh, rates: DeviceRates
) -> CallCost:
    layout = mesh.layout
    times = ComputeTimes(network, rates, layout)
    offload = 0.0
    if load.method == "generate":
        cost = first = _estimate_generation(network, load, mesh, rates, times)
    elif not load.trains:
        cost = first = _estimate_passes(network, load, mesh, rates, times)
    else:
        first = _estimate_passes(network, load, mesh, rates, times)
        update = _estimate_update(network, mesh, rates)
        updates = load.num_updates * load.num_epochs
        if network.settings.offload_optimizer:
            parts = load.count_microbatches(layout)
            computed = first.seconds / load.num_updates
            offload += updates * estimate_host_updates(network, layout, rates, parts, computed)
            update = CallCost(messages=update.messages)
        elif "optimizer" in load.offloads:
            offload += estimate_state_copies(network, layout, rates, update.seconds)
        cost = first.add(update.multiply(load.num_updates)).multiply(load.num_epochs)
    if "weights" in load.offloads and network.settings.weights_leave:
        offload += estimate_weight_copies(network, layout, rates, first.seconds, trains=load.trains)
    return cost.add(CallCost(messages=_estimate_batch(load, mesh), offload=offload))


def _estimate_batch(load: CallWorkload, mesh: Mesh) -> float:
    """Return the seconds in which each data-parallel rank gets its part of the call's batch.

    The parts are in the processes of the calls that made them. Only the first device has its own
    process for certain: in a run on one device, nothing is sent.
    """
    if mesh.ranks == (0,):
        return 0.0
    return load.batch_bytes / mesh.layout.data / BATCH_BANDWIDTH


def estimate_transfers(
    network: DecoderSizes, source: Mesh, targets: Sequence[Mesh], rates: DeviceRates
) -> list[float]:
    """Return the seconds to copy the weights trained on `source` to each of `targets`.

    All targets have the same number of devices. The busiest link determines the time, within
    machines and between them: the link of the device that receives the most, or the links of the
    devices of `source`, which send equal parts. If only adapters are trained, only they are copied.
    GPUs pack a message while others are in flight; on CPUs, packing takes extra time.
    """
    lacked = compute_lacked_elements(network, source, targets, rates.per_node)
    width = network.element_bytes
    near = width * (lacked.missing - lacked.crossing)
    far = width * lacked.crossing
    seconds = [0.0] * len(targets)
    for received, ranks in ((near, (0,)), (far, (0, rates.per_node))):
        sent = received.sum(axis=1) / len(source.ranks)
        for number, most in enumerate(np.maximum(received.max(axis=1), sent).tolist()):
            if most > 0:
                copied = 0.0 if rates.cores is None else PACKING * most / rates.memory_bandwidth
                seconds[number] = max(seconds[number], rates.time_send(most, ranks) + copied)
    return seconds


def count_received_bytes(network: DecoderSizes, source: Mesh, target: Mesh) -> dict[int, float]:
    """Return the bytes of trained weights that each device of `target` lacks, by rank."""
    lacked = compute_lacked_elements(network, source, [target], len(target.ranks))
    received = network.element_bytes * lacked.missing[0]
    return dict(zip(target.ranks, received.tolist(), strict=True))


def _estimate_passes(
    network: DecoderSizes, load: CallWorkload, mesh: Mesh, rates: DeviceRates, times: ComputeTimes
) -> CallCost:
    """Return the cost of one pass over all tokens; with a backward pass if the call trains."""
    layout = mesh.layout
    updates = load.num_updates if load.trains else 1
    ranks = layout.data * layout.context
    computed = load.count_computed_tokens(network) / ranks / updates
    rows_per_sequence = 1 if network.scores else load.new_tokens or load.prompt_tokens
    read = load.num_sequences * rows_per_sequence / ranks / updates
    if layout.data > 1 and load.batches:
        # All ranks wait for the one with the most tokens.
        tokens, answers = compute_imbalance(load.batches, layout.data)
        computed *= tokens
        read *= 1.0 if network.scores else answers
    # A micro-batch is filled with whole sequences; a shared prompt counts for each of them.
    parts = load.count_microbatches(layout)
    size = PassSize(
        tokens=computed / parts,
        length=load.attended_length or load.sequence_length,
        rows=read / parts,
        trains=load.trains,
        repeats_head=load.trains and load.repeats_head,
    )
    pass_cost = times.compute_pass(size)
    messages = estimate_pass_messages(network, size, mesh, rates, times.get_wait("tensor"))
    sends = estimate_stage_sends(network, size, mesh, rates)
    cost = _run_stages(network, size, pass_cost, layout, parts, messages, sends)
    # Sharded weights are gathered for each micro-batch, and gradients scattered after each.
    if layout.fsdp > 1:
        wait = times.get_wait("shards")
        shards = estimate_shard_messages(network, mesh, rates, parts, trains=load.trains, wait=wait)
        if rates.kernels is not None:
            # GPUs gather a layer while they compute the one before, and scatter during the next.
            first = shards * layout.pipeline / network.shape.layers / parts
            shards = max(first, shards - cost.seconds + cost.bubble)
        # A rank of a pipeline also waits for the messages of the stages before it.
        waiting = 0.0
        if layout.pipeline > 1:
            between = estimate_shard_messages(
                network, mesh, rates, parts, trains=load.trains, wait=wait, has_ends=False
            )
            between = min(between, shards)  # on GPUs, a part of them is hidden
            waiting = (shards + between * (layout.pipeline - 2)) / parts / layout.stages_per_rank
        cost = cost.add(CallCost(messages=shards, bubble=waiting))
    return cost.multiply(updates)


def _run_stages(
    network: DecoderSizes,
    size: PassSize,
    pass_cost: PassCost,
    layout: Layout,
    parts: int,
    messages: float,
    sends: float,
) -> CallCost:
    """Return the cost of `parts` micro-batches, each of which passes through all pipeline stages.

    `messages` are the seconds of a micro-batch's messages within a stage, and `sends` those of
    sending it to other stages. After attention, the last layer computes only the rows that are read.
    """
    layers = network.shape.layers
    recomputes = size.trains and network.settings.recompute
    recomputed = (layers // network.settings.recompute) / layers if recomputes else 0.0
    layer = pass_cost.block.multiply(1.0 + recomputed).add(pass_cost.block_backward)
    # The last layer applies some of its weights only to the rows that are read.
    skipped = network.late / max(1, network.active) * (1.0 - min(1.0, size.rows / size.tokens))
    last = layer.multiply(1.0 - skipped)
    all_layers = layer.multiply(layers - 1).add(last, pass_cost.ends)
    if layout.pipeline == 1:
        return all_layers.add(CallCost(messages=messages)).multiply(parts)
    # The slowest stage determines the time between two micro-batches.
    stages = min(layers, layout.placement.num_stages)
    head = network.outputs / max(1, network.active)
    layers_at_end = len(
        compute_stage(layers, stages, stages - 1, head if network.shape.vocab > 1 else 0)
    )
    last_stage = layer.multiply(layers_at_end - 1).add(last, pass_cost.ends)
    other_stage = layer.multiply((layers - layers_at_end) / max(1, layout.pipeline - 1))
    if layout.stages_per_rank > 1:
        slowest = all_layers.multiply(1.0 / layout.pipeline)
    else:
        slowest = max(last_stage, other_stage, key=lambda cost: cost.seconds)
    # The first micro-batch passes all stages one after another. With several stages on each rank,
    # a rank waits for shorter stages.
    waiting = all_layers.seconds - slowest.seconds
    waiting += messages * (layout.pipeline - 1) + sends * (layout.pipeline - 2)
    if size.trains and network.splits_backward:
        # A rank computes the gradients of weights while it would wait, so no other rank waits for
        # them.
        share = network.gradient_share / (1.0 + network.gradient_share)
        weights = layers * pass_cost.block_backward.seconds * share
        waiting = max(0.0, waiting - 2 * weights * (1.0 - 1.0 / layout.pipeline))
    waiting /= layout.stages_per_rank
    sent = CallCost(messages=messages + sends)
    return slowest.add(sent).multiply(parts).add(CallCost(bubble=waiting))


def _estimate_update(network: DecoderSizes, mesh: Mesh, rates: DeviceRates) -> CallCost:
    """Return the cost of summing gradients over copies and of one optimizer step.

    All stages of a pipeline do this at the same time.
    """
    layout = mesh.layout
    if not network.settings.trained:
        return CallCost()
    if layout.pipeline > 1:
        processes = min(len(mesh.ranks), rates.per_node)
        threads = rates.threads_used or rates.threads
        rates = replace(rates, threads=threads).share_cores(processes, processes)
    trained = network.count_stored_parameters(layout, trainable=True)
    cost = ComputeTimes(network, rates, layout).compute_update(trained)
    copies = layout.data // layout.fsdp * layout.context
    if copies > 1:
        # Gradients are copied into one buffer, and back.
        copied = 4 * trained * WIDE / rates.memory_bandwidth
        summed = rates.time_sum(trained * WIDE, list_group(mesh, "copies"), copies)
        cost = cost.add(CallCost(memory=copied, messages=summed))
    if layout.placement.last_rank > 0 and network.shape.tied:
        # The first and the last stage have copies of the embedding.
        tied = network.count_ends(trainable=True) / layout.tensor / layout.fsdp
        if tied:
            summed = rates.time_sum(tied * WIDE, list_group(mesh, "ends"), 2)
            cost = cost.add(CallCost(messages=summed))
    return cost


def _estimate_generation(
    network: DecoderSizes, load: CallWorkload, mesh: Mesh, rates: DeviceRates, times: ComputeTimes
) -> CallCost:
    """Return the cost of computing the prompts and decoding all sequences.

    The longest answer determines the number of decode steps, and the batch shrinks as answers end.
    If the KV cache is too small for all sequences, they decode in turn, and what preempted sequences
    had computed is computed again.
    """
    layout = mesh.layout
    shape = network.shape
    ranks = layout.data * layout.context
    sequences_per_rank = math.ceil(load.num_sequences / ranks)
    decoding = plan_decoding(
        sequences_per_rank,
        min(sequences_per_rank, rates.most_sequences),
        prompt=load.prompt_tokens,
        mean=load.new_tokens,
        longest=load.longest_answer,
        samples=load.samples,
        room=_count_cache_tokens(network, load, layout, rates),
    )
    # Equal prompts are computed once.
    prompts = sequences_per_rank / load.samples * load.prompt_tokens
    cost = _estimate_prompts(network, load, mesh, rates, times, prompts)
    if decoding.computed_again:
        tokens = prompts + decoding.computed_again
        repeated = _estimate_prompts(network, load, mesh, rates, times, tokens)
        cost = cost.add(CallCost(preemption=max(0.0, repeated.seconds - cost.seconds)))
    if layout.fsdp > 1 or layout.expert > 1:
        # A generator gathers the weights once.
        num_bytes = shape.parameters * network.element_bytes / (layout.tensor * layout.pipeline)
        size = max(layout.fsdp, layout.expert)
        kind = "fsdp" if size == layout.fsdp else "expert"
        gathered = rates.time_gather(num_bytes, list_group(mesh, kind), size)
        waits = (1 + shape.layers / layout.pipeline) * times.get_wait("shards")
        cost = cost.add(CallCost(messages=gathered + waits))
    if rates.kernels is not None and (
        layout.fsdp > 1 or layout.expert > 1 or "weights" in load.offloads
    ):
        # Weights at other addresses need new CUDA graphs.
        starts = GRAPHS * RUNS_PER_GRAPH * shape.layers / layout.pipeline
        cost = cost.add(CallCost(overhead=starts * rates.launch))
    for steps, batch, context in decoding.steps:
        # Pipeline stages decode groups of the sequences in turn.
        group_size = batch / layout.pipeline
        block, rest = times.compute_decode(group_size, context)
        step = block.multiply(shape.layers).add(rest)
        seconds = estimate_decode_messages(
            network, group_size, mesh, rates, times.get_wait("decode")
        )
        if layout.pipeline > 1:
            states = group_size * network.element_bytes * shape.hidden
            sent = rates.time_send(states, list_group(mesh, "pipeline"))
            seconds += 2 * layout.pipeline * sent
        cost = cost.add(step.add(CallCost(messages=seconds)).multiply(steps))
    return cost


def _estimate_prompts(
    network: DecoderSizes,
    load: CallWorkload,
    mesh: Mesh,
    rates: DeviceRates,
    times: ComputeTimes,
    tokens: float,
) -> CallCost:
    """Return the cost of computing `tokens` tokens of prompts on each data-parallel rank."""
    layout = mesh.layout
    prompts = math.ceil(load.num_sequences / layout.data / layout.context) / load.samples
    block, rest = times.compute_prefill(tokens, load.prompt_tokens, prompts)
    layers = network.shape.layers / layout.pipeline
    cost = block.multiply(layers).add(rest.multiply(1.0 / layout.pipeline))
    if layout.tensor > 1:
        states = tokens * network.element_bytes * network.shape.hidden
        seconds = rates.time_sum(states, list_group(mesh, "tensor"), layout.tensor)
        seconds = 2 * layers * (seconds + times.get_wait("tensor"))
        cost = cost.add(CallCost(messages=seconds))
    return cost


def _compute_cache_bytes(load: CallWorkload, rates: DeviceRates) -> int:
    """Return the maximum size of the KV cache of a generation on one device."""
    if load.cache_bytes is not None:
        return load.cache_bytes
    return int(CACHE_SHARE * (rates.memory or rates.capacity))


def _count_cache_tokens(
    network: DecoderSizes, load: CallWorkload, layout: Layout, rates: DeviceRates
) -> int:
    """Return the number of tokens for which a device has room in its KV cache."""
    shape = network.shape
    parts = layout.tensor * layout.pipeline
    token = 2 * shape.layers * shape.key * network.element_bytes / parts
    return int(_compute_cache_bytes(load, rates) / token)


# -- memory


def build_memory_case(
    network: DecoderSizes,
    loads: Iterable[CallWorkload],
    layout: Layout,
    rates: DeviceRates,
    *,
    own: bool = True,
) -> MemoryCase:
    """Return the input for estimating the memory of a role on one device.

    `loads` are the workloads of the role's calls with this layout. With `own=False`, the device has
    only a copy of the weights of a trained role, and no optimizer state.
    """
    loads = list(loads)
    # Weights or optimizer state are in host memory between the calls if every call leaves them
    # there.
    trains = [load for load in loads if load.trains]
    settings = replace(
        network.settings,
        trained=own and network.settings.trained,
        weights_leave=network.settings.weights_leave
        and bool(loads)
        and all("weights" in load.offloads for load in loads),
        optimizer_leaves=rates.cores is None
        and bool(trains)
        and all("optimizer" in load.offloads for load in trains),
    )
    works = tuple(_build_work(network, load, layout, rates) for load in loads)
    return MemoryCase(network.divide_shape(layout), settings, works)


def _build_work(
    network: DecoderSizes, load: CallWorkload, layout: Layout, rates: DeviceRates
) -> CallDemand:
    """Return the largest demand of a call, whose sequences all have the mean length."""
    sequences_per_rank = math.ceil(load.num_sequences / layout.data)
    if load.method == "generate":
        together = min(sequences_per_rank, rates.most_sequences)
        slot = SLOT
        while slot < load.longest_sequence:
            slot *= 2
        return CallDemand(
            cache_tokens=together * slot,
            cache_limit=_compute_cache_bytes(load, rates),
            sequences=together,
        )
    # A micro-batch has whole sequences, at least one; sequences of the same prompt are adjacent.
    sequences = math.ceil(sequences_per_rank / max(1, load.num_updates if load.trains else 1))
    limit = max(load.microbatch, load.longest_sequence)
    together = min(sequences, max(1, limit // load.sequence_length))
    tokens = float(together * load.sequence_length)
    if network.shares_prefixes and layout.context == 1:
        tokens -= (together - math.ceil(together / load.samples)) * load.shared_tokens
    rows = together * (load.new_tokens or load.sequence_length)
    return CallDemand(
        tokens=math.ceil(max(tokens, load.longest_sequence) / layout.context),
        rows=math.ceil(rows / layout.context),
        backward=load.trains,
        parts=math.ceil(sequences / together),
        entropy=load.has_entropy,
    )
