"""Estimates of a call's duration and device memory with a given layout, from sizes alone.

A duration is the sum of the times for matrix products, memory reads and messages; nothing is
assumed to overlap within a call. Some costs are left out because they are small in comparison, or
equal for all layouts: data sent between devices, host functions, and the softmax of the head. The
functions are pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from weft.engine.spec import ModelSpec
from weft.planner.devices import DeviceRates
from weft.planner.memory import (
    BYTES,
    SLOTS,
    WIDE,
    CallDemand,
    MemorySettings,
    NetworkShape,
    RoleMemory,
    build_settings,
    estimate,
    list_adapted_sizes,
)
from weft.topology import Layout, Mesh

if TYPE_CHECKING:
    from weft.models.network.config import TransformerConfig

CHUNK_ROWS = 1024  # tokens whose logits are in memory at once
CACHE_SHARE = 0.25  # maximum share of a device's memory for the KV cache
STATE_READS = 3  # reads and writes of each optimizer value per optimizer step


@dataclass(frozen=True)
class DecoderSizes:
    """Sizes of a decoder and settings of its role, used to estimate time and memory.

    Attributes:
        shape: Sizes of the whole network, not divided over ranks. `trainable` is the number of
            adapter weights if only adapters are trained, else the number of all parameters.
        settings: Settings of the role, such as its dtype and optimizer.
        active: Number of weights per layer that process a token. Of the experts, only the selected
            ones count.
        outputs: Number of weights in the output matrix.
    """

    shape: NetworkShape
    settings: MemorySettings
    active: int
    outputs: int

    @property
    def element_bytes(self) -> int:
        """Size of an element in bytes, in the dtype of the computation."""
        return BYTES[self.settings.dtype]

    @property
    def num_trained(self) -> int:
        """Number of trained parameters; 0 for a frozen role."""
        return self.shape.trainable if self.settings.trained else 0

    def count_operations(self, tokens: float, length: float, rows: float) -> float:
        """Return the number of floating-point operations of a forward pass.

        `tokens` is the number of tokens, in sequences of `length` tokens each. `rows` is the number
        of tokens for which logits are computed.
        """
        per_token = 2 * (self.active + self.shape.query * length)
        return tokens * self.shape.layers * per_token + rows * 2 * self.outputs


def build_decoder_sizes(
    spec: ModelSpec, config: TransformerConfig, *, on_gpu: bool = True
) -> DecoderSizes:
    """Return the sizes of a role's decoder, which `config` describes, on GPUs or CPUs."""
    # Elements of a layer: attention, and the MLP or the experts.
    query = config.num_heads * config.head_dim
    key = config.num_kv_heads * config.head_dim
    experts = config.experts
    lm = spec.head == "lm"
    attention = 2 * config.hidden_size * (query + key)
    if experts is None:
        inner = whole = config.intermediate_size
    else:
        inner = experts.top_k * experts.intermediate_size
        whole = experts.num * experts.intermediate_size
    matrices = 3 if config.gated else 2
    embedding = config.vocab_size * (config.embed_dim or config.hidden_size)
    outputs = embedding if lm else config.hidden_size
    tied = config.tied and lm
    # Adapters keep their low-rank products and, without experts, the input of the last matrix.
    adapters = 0
    if spec.has_adapters:
        products = 4 + matrices * (1 if experts is None else experts.top_k)
        adapters = spec.lora.r * products + (config.intermediate_size if experts is None else 0)
    parameters = (
        config.num_layers * (attention + matrices * config.hidden_size * whole)
        + embedding
        + (0 if tied else outputs)
    )
    shape = NetworkShape(
        parameters=parameters,
        trainable=_count_adapter_elements(spec, config) if spec.has_adapters else parameters,
        layers=config.num_layers,
        hidden=config.hidden_size,
        query=query,
        key=key,
        inner=inner,
        vocab=config.vocab_size if lm else 1,
        embedding=embedding,
        gated=config.gated,
        tied=tied,
        adapters=adapters,
        fused=experts is None,
        capped=lm and config.final_softcap is not None,
    )
    device = "cuda" if on_gpu else "cpu"
    dtype = spec.dtype or ("bfloat16" if on_gpu else "float32")
    settings = build_settings(spec, dtype, device, CHUNK_ROWS)
    return DecoderSizes(
        shape,
        replace(settings, weights_leave=spec.offload and on_gpu),
        active=attention + matrices * config.hidden_size * inner,
        outputs=outputs,
    )


def _count_adapter_elements(spec: ModelSpec, config: TransformerConfig) -> int:
    """Return the number of trained elements of a role's LoRA adapters or prefix.

    Each expert has its own adapters.
    """
    query = config.num_heads * config.head_dim
    key = config.num_kv_heads * config.head_dim
    hidden = config.hidden_size
    elements_per_rank = 0
    for layer in range(config.num_layers):
        experts = config.experts if config.has_experts(layer) else None
        if experts is None:
            inner = config.intermediate_size
            copies = 1
        else:
            inner = experts.intermediate_size
            copies = experts.num
        ends = list_adapted_sizes(hidden, query, key, inner, gated=config.gated, copies=copies)
        elements_per_rank += sum(
            size
            for name, size in ends.items()
            if not spec.lora.targets or name in spec.lora.targets
        )
    return spec.lora.r * elements_per_rank + spec.prefix.num_tokens * 2 * key * config.num_layers


@dataclass(frozen=True)
class CallWorkload:
    """Workload of a model function call in one step.

    The call processes `num_sequences` sequences, each with `prompt_tokens` + `new_tokens` tokens. A
    training call makes `num_epochs` passes with `num_updates` optimizer steps each. `microbatch` is
    the maximum number of tokens that a device processes at a time.
    """

    method: str
    num_sequences: int
    prompt_tokens: int
    new_tokens: int
    num_updates: int = 1
    num_epochs: int = 1
    microbatch: int = 16384

    @property
    def sequence_length(self) -> int:
        """Number of tokens per sequence."""
        return self.prompt_tokens + self.new_tokens

    @property
    def num_tokens(self) -> int:
        """Total number of tokens of all sequences."""
        return self.num_sequences * self.sequence_length

    @property
    def trains(self) -> bool:
        """True if the call trains a model."""
        return self.method == "train_step"


# -- seconds


def estimate_call_seconds(
    network: DecoderSizes, load: CallWorkload, mesh: Mesh, rates: DeviceRates
) -> float:
    """Return the time in seconds that a call takes per step on `mesh`.

    The time to transfer weights is not included.
    """
    if load.method == "generate":
        return _estimate_generation(network, load, mesh, rates)
    once = _estimate_pass(network, load, mesh, rates)
    if not load.trains:
        return once
    return load.num_epochs * (once + load.num_updates * _estimate_update(network, mesh, rates))


def estimate_transfer_seconds(
    network: DecoderSizes, source: Mesh, target: Mesh, rates: DeviceRates
) -> float:
    """Return the time to copy the weights trained on `source` to `target`, in seconds.

    The device that sends or receives the most bytes determines the time. If only adapters are
    trained, only they are copied.
    """
    wanted = count_received_bytes(network, source, target)
    most = max(max(wanted.values()), sum(wanted.values()) / len(source.ranks))
    return most / rates.compute_bandwidth({*source.ranks, *target.ranks}) + (
        rates.latency if most else 0.0
    )


def count_received_bytes(network: DecoderSizes, source: Mesh, target: Mesh) -> dict[int, float]:
    """Return the bytes of trained weights that each device of `target` lacks, by rank.

    The devices of `source` send them, each an equal share.
    """
    size = float(network.shape.trainable * network.element_bytes)
    wanted = {}
    for rank in target.ranks:
        wanted[rank] = (
            size
            * _compute_stored_share(target.layout)
            * (1.0 - _compute_present_share(source, target, rank))
        )
    return wanted


def _compute_stored_share(layout: Layout) -> float:
    """Return the fraction of a network's parameters that each device stores with this layout."""
    return 1.0 / (layout.tensor * layout.pipeline * layout.fsdp)


def _compute_present_share(source: Mesh, target: Mesh, rank: int) -> float:
    """Return the fraction of a device's new shard that the device already stores.

    Device `rank` stores its shard of the parameters for the mesh `source`, and needs its shard for
    the mesh `target`. The fraction is 1 if the device has the same position in the same layout, and
    0 if `source` does not include the device.
    """
    if rank not in source.ranks:
        return 0.0
    a = source.layout
    b = target.layout
    here = source.get_coordinates(rank)
    there = target.get_coordinates(rank)
    # The overlap of both intervals, in each dimension of the layout.
    share = 1.0
    for parts, own, at, wanted in (
        (a.tensor, b.tensor, here.tensor, there.tensor),
        (a.pipeline, b.pipeline, here.pipeline, there.pipeline),
        (a.fsdp, b.fsdp, here.data % a.fsdp, there.data % b.fsdp),
    ):
        low = max(at / parts, wanted / own)
        high = min((at + 1) / parts, (wanted + 1) / own)
        share *= max(0.0, high - low) * own
    return share


def _estimate_pass(
    network: DecoderSizes, load: CallWorkload, mesh: Mesh, rates: DeviceRates
) -> float:
    """Return the duration of one pass over all tokens, in seconds.

    If the call trains, this includes the backward pass.
    """
    layout = mesh.layout
    trains = load.trains
    forwards = 2 if trains and network.settings.recompute else 1
    # Cost in forward passes: the gradients of activations cost one, those of trained weights a
    # fraction of one.
    passes = forwards + (1.0 + network.num_trained / network.shape.parameters if trains else 0.0)
    own = load.num_tokens / (layout.data * layout.context)  # tokens per device
    parts = max(1, math.ceil(own / load.microbatch))
    rows = load.num_sequences * (load.new_tokens or load.prompt_tokens)
    products = (
        passes
        * network.count_operations(load.num_tokens, load.sequence_length, rows)
        / len(mesh.ranks)
        / rates.flops
    )
    # Matrix products, and the minimum time of each layer
    layers = network.shape.layers / layout.pipeline
    rounds = 3 if trains else 1
    busy = products + layers * parts * rounds * rates.launch
    band = rates.compute_bandwidth(mesh.ranks)
    # Messages between the devices: sums of tensor parallelism, keys and values of context
    # parallelism, gathered weights of sharding, hidden states of pipelines
    states = own * network.shape.hidden * network.element_bytes
    if layout.tensor > 1:
        sums = 2 * layers * (forwards + 1 if trains else 1)  # after attention and after the MLP
        busy += sums * (
            2 * states * (layout.tensor - 1) / layout.tensor / band + parts * 2 * rates.latency
        )
    if layout.context > 1:
        kv = own * 2 * network.shape.key * network.element_bytes
        busy += (
            layers
            * rounds
            * (kv * (layout.context - 1) / band + parts * layout.context * rates.latency)
        )
    if layout.fsdp > 1:
        gathered = (
            network.shape.parameters
            * network.element_bytes
            / (layout.tensor * layout.pipeline)
            * (layout.fsdp - 1)
            / layout.fsdp
        )
        busy += parts * (2 if trains else 1) * (gathered / band + layers * rates.latency)
        # Gradients are scattered after each micro-batch; `_estimate_update` counts the last one.
        if trains and not network.settings.sums_once:
            scattered = (
                network.num_trained
                * WIDE
                / (layout.tensor * layout.pipeline)
                * (layout.fsdp - 1)
                / layout.fsdp
            )
            busy += max(0, parts - load.num_updates) * (scattered / band + layers * rates.latency)
    if layout.pipeline > 1:
        busy *= 1 + (layout.pipeline - 1) / parts
        busy += (2 if trains else 1) * (states / band + (parts + layout.pipeline) * rates.latency)
    return busy


def _estimate_update(network: DecoderSizes, mesh: Mesh, rates: DeviceRates) -> float:
    """Return the time to sum gradients over devices and take one optimizer step, in seconds."""
    layout = mesh.layout
    band = rates.compute_bandwidth(mesh.ranks)
    # Bytes that a device exchanges: one share per shard, then sums over the copies.
    parts = layout.tensor * layout.pipeline
    gradients = network.num_trained * WIDE / parts
    own = network.num_trained / parts / layout.fsdp
    exchanged = gradients * (layout.fsdp - 1) / layout.fsdp
    copies = layout.data // layout.fsdp * layout.context
    exchanged += 2 * gradients / layout.fsdp * (copies - 1) / copies
    if layout.data * layout.context > 1:
        exchanges = network.shape.layers / layout.pipeline
    else:
        exchanges = 0
    return (
        exchanged / band
        + exchanges * rates.latency
        + own
        * WIDE
        * (2 + SLOTS[network.settings.optimizer])
        * STATE_READS
        / rates.memory_bandwidth
    )


def _estimate_generation(
    network: DecoderSizes, load: CallWorkload, mesh: Mesh, rates: DeviceRates
) -> float:
    """Return the time to prefill the prompts and decode all sequences, in seconds.

    The stages of a pipeline are assumed to run one after another.
    """
    # Prefill: a pass over the prompts.
    layout = mesh.layout
    band = rates.compute_bandwidth(mesh.ranks)
    prefill = _estimate_pass(network, replace(load, new_tokens=0), mesh, rates)
    # One decoding step reads all weights and the KV cache, or is bound by its products.
    own = math.ceil(load.num_sequences / (layout.data * layout.context))
    together = min(own, rates.most_sequences)
    weights = (
        (network.shape.layers * network.active + network.outputs)
        * network.element_bytes
        / layout.tensor
    )
    cache = (
        together
        * (load.prompt_tokens + load.new_tokens / 2)
        * 2
        * network.shape.layers
        * network.shape.key
        * network.element_bytes
        / layout.tensor
    )
    products = (
        network.count_operations(together, load.prompt_tokens + load.new_tokens / 2, together)
        / layout.tensor
        / rates.flops
    )
    step = (
        max(products, (weights + cache) / rates.memory_bandwidth)
        + network.shape.layers * rates.launch
    )
    # Add the messages: sums of tensor parallelism, gathered weights of sharding, pipeline stages.
    if layout.tensor > 1:
        states = together * network.shape.hidden * network.element_bytes
        step += (
            network.shape.layers
            * 2
            * (2 * states * (layout.tensor - 1) / layout.tensor / band + 2 * rates.latency)
        )
    if layout.fsdp > 1:
        step += (
            network.shape.parameters
            * network.element_bytes
            / layout.tensor
            * (layout.fsdp - 1)
            / layout.fsdp
            / band
        )
    step += (layout.pipeline - 1) * rates.latency * 2
    return prefill + load.new_tokens * step * math.ceil(own / together)


# -- memory


def estimate_role_memory(
    network: DecoderSizes,
    loads: Iterable[CallWorkload],
    layout: Layout,
    rates: DeviceRates,
    *,
    own: bool = True,
) -> RoleMemory:
    """Return the estimated memory in bytes that a role's weights and calls use on one device.

    `loads` are the workloads of the role's calls with this layout. With `own=False`, the device has
    only a copy of the weights of a trained role, and no optimizer state.
    """
    # Sizes of one device's shard of the network.
    whole = network.shape
    t = layout.tensor
    parts = t * layout.pipeline
    shape = replace(
        whole,
        parameters=math.ceil(whole.parameters / parts / layout.fsdp),
        trainable=math.ceil(whole.trainable / parts / layout.fsdp),
        layers=math.ceil(whole.layers / layout.pipeline),
        query=whole.query // t,
        key=max(whole.key // t, 1),
        inner=whole.inner // t,
        vocab=max(whole.vocab // t, 1),
        embedding=whole.embedding // t,
        row_ranks=t,
        shards=layout.fsdp,
    )
    settings = replace(network.settings, trained=own and network.settings.trained)
    return estimate(shape, settings, [_build_work(load, layout, rates) for load in loads])


def _build_work(load: CallWorkload, layout: Layout, rates: DeviceRates) -> CallDemand:
    own = math.ceil(load.num_sequences / layout.data)
    if load.method == "generate":
        together = min(own, rates.most_sequences)
        return CallDemand(
            cache_tokens=together * load.sequence_length,
            cache_limit=int(CACHE_SHARE * rates.capacity),
            sequences=together,
        )
    tokens = math.ceil(own * load.sequence_length / max(1, load.num_updates if load.trains else 1))
    most = max(min(load.microbatch, tokens), load.sequence_length)
    rows = math.ceil(most * load.new_tokens / load.sequence_length) if load.new_tokens else most
    size = layout.context
    return CallDemand(
        tokens=math.ceil(most / size),
        rows=math.ceil(rows / size),
        backward=load.trains,
        parts=math.ceil(tokens / most),
    )
