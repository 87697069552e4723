"""Times of the messages within a call: of tensor, context, expert and pipeline parallelism and ZeRO.

The functions are pure.
"""

from __future__ import annotations

from weft.planner.compute_times import PassSize, compute_expert_imbalance
from weft.planner.decoder_sizes import DecoderSizes
from weft.planner.devices import DeviceRates
from weft.planner.memory import WIDE
from weft.topology import Mesh


def list_group(mesh: Mesh, kind: str) -> tuple[int, ...]:
    """Return the ranks of a group of a mesh: the one that has the first rank.

    `kind` is "tensor", "context", "fsdp" (ranks that share one sharded copy), "copies" (ranks with
    the same part of the network), "expert" (ranks among which the experts are divided), "expert fsdp"
    (ranks that share one copy of the same experts), "pipeline" (the first stage's rank and the
    next one's) or "ends" (the first stage's rank and the last one's).
    """
    layout = mesh.layout
    row = layout.tensor * layout.context
    match kind:
        case "tensor":
            return mesh.ranks[: layout.tensor]
        case "context":
            return mesh.ranks[: row : layout.tensor]
        case "fsdp":
            return mesh.ranks[: row * layout.fsdp : row]
        case "copies":
            rows = range(0, row * layout.data, row * layout.fsdp)
            contexts = range(0, row, layout.tensor)
            return tuple(mesh.ranks[first + number] for first in rows for number in contexts)
        case "expert":
            return mesh.ranks[: row * layout.expert : row]
        case "expert fsdp":
            return mesh.ranks[: row * layout.expert * layout.expert_shards : row * layout.expert]
        case "ends":
            return mesh.ranks[0], mesh.ranks[row * layout.data * layout.placement.last_rank]
    return mesh.ranks[: row * layout.data + 1 : row * layout.data]


def estimate_pass_messages(
    network: DecoderSizes, size: PassSize, mesh: Mesh, rates: DeviceRates, wait: float
) -> float:
    """Return the seconds of a micro-batch's messages on one rank, without those between stages.

    These are the sums of tensor parallelism, the keys and values of context parallelism, and the
    rows for experts of other ranks. Each sum takes `wait` extra seconds.
    """
    layout = mesh.layout
    shape = network.shape
    layers = shape.layers / layout.pipeline
    states = size.tokens * shape.hidden * network.element_bytes
    recomputes = size.trains and network.settings.recompute
    forwards = 1.0 + (1.0 / network.settings.recompute if recomputes else 0.0)
    passes = forwards + (1.0 if size.trains else 0.0)
    seconds = 0.0
    if layout.tensor > 1:
        # After attention and after the MLP; the embedding, and the softmax of the head
        group = list_group(mesh, "tensor")
        sums = 2 * layers * passes + (1 if shape.vocab > 1 else 0)
        seconds += sums * (rates.time_sum(states, group, layout.tensor) + wait)
    if layout.context > 1:
        kv = size.tokens * 2 * shape.key * network.element_bytes
        rounds = 3 if size.trains else 1
        send_seconds = rates.time_send(kv, list_group(mesh, "context"))
        seconds += layers * rounds * (layout.context - 1) * send_seconds
    if layout.expert > 1:
        # To the experts and back, in each pass
        seconds += layers * passes * 2 * estimate_expert_exchange(network, size.tokens, mesh, rates)
    return seconds


def estimate_stage_sends(
    network: DecoderSizes, size: PassSize, mesh: Mesh, rates: DeviceRates
) -> float:
    """Return the seconds in which a rank sends a micro-batch's hidden states to other stages."""
    if mesh.layout.pipeline == 1:
        return 0.0
    states = size.tokens * network.shape.hidden * network.element_bytes
    count = mesh.layout.stages_per_rank * (2 if size.trains else 1)
    return count * rates.time_send(states, list_group(mesh, "pipeline"))


def estimate_expert_exchange(
    network: DecoderSizes, tokens: float, mesh: Mesh, rates: DeviceRates
) -> float:
    """Return the seconds in which ranks send the rows of `tokens` tokens to the experts of a layer."""
    size = mesh.layout.expert
    rows = tokens * network.chosen_experts * compute_expert_imbalance(network, size)
    num_bytes = rows * network.shape.hidden * network.element_bytes
    return rates.time_exchange(num_bytes, list_group(mesh, "expert"), size)


def estimate_shard_messages(
    network: DecoderSizes,
    mesh: Mesh,
    rates: DeviceRates,
    parts: int,
    *,
    trains: bool,
    wait: float,
    has_ends: bool = True,
) -> float:
    """Return the seconds of gathering and scattering sharded tensors, block by block.

    `parts` is the number of micro-batches of a minibatch. Each message takes `wait` extra seconds.
    The rank is one of a pipeline's first or last stage or, without `has_ends`, of one between them.
    """
    layout = mesh.layout
    shape = network.shape
    width = network.element_bytes
    blocks = shape.layers / layout.pipeline
    # Experts are sharded over other groups than the rest of a block.
    experts = network.expert_elements / layout.tensor / layout.expert
    block = (shape.block_elements - network.expert_elements) / layout.tensor
    groups = [(block, "fsdp", layout.fsdp), (experts, "expert fsdp", layout.expert_shards)]
    most = max(elements for _, elements in network.count_stage_parts(layout))
    ends = most / layout.tensor if has_ends else 0.0
    group = list_group(mesh, "fsdp")
    gather = scatter = 0.0
    trained = network.num_trained / shape.parameters
    for elements, kind, size in groups:
        if elements > 0 and size > 1:
            kind_group = list_group(mesh, kind)
            gather += rates.time_gather(elements * width, kind_group, size) + wait
            scatter += rates.time_scatter(elements * WIDE * trained, kind_group, size) + wait
    gathers = parts if not network.settings.reshards else parts * (2 if trains else 1)
    seconds = gathers * blocks * gather
    if has_ends:
        seconds += parts * (rates.time_gather(ends * width, group, layout.fsdp) + wait)
    if trains:
        scatters = blocks * scatter
        if has_ends:
            scatters += rates.time_scatter(ends * WIDE * trained, group, layout.fsdp) + wait
        seconds += (1 if network.settings.sums_once else parts) * scatters
    return seconds


def estimate_decode_messages(
    network: DecoderSizes, batch: float, mesh: Mesh, rates: DeviceRates, wait: float
) -> float:
    """Return the time of the messages of tensor-parallel ranks in a decode step, in seconds.

    These are two sums in each layer, and three exchanges for the softmax and the sampling. Each
    takes `wait` extra seconds. Experts are gathered before a generation.
    """
    size = mesh.layout.tensor
    if size == 1:
        return 0.0
    states = batch * network.element_bytes * network.shape.hidden
    group = list_group(mesh, "tensor")
    sums = 2 * network.shape.layers * (rates.time_sum(states, group, size) + wait)
    return sums + 3 * (rates.time_sum(batch * WIDE, group, size) + wait)
