"""Estimates of the seconds and device memory of a call on a layout, from sizes alone.

Seconds add up matrix products, memory reads and messages; nothing overlaps within a call. Parts
that are left out (data between devices, host functions, the softmax of the head) are small in
comparison, or equal for all layouts. The functions are pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from weft.engine import memory
from weft.engine.memory import BYTES, SLOTS, WIDE, NetworkShape, RoleMemory, Settings, Work
from weft.experiments._rates import Rates
from weft.topology import Layout, Mesh

CHUNK_ROWS = 1024  # tokens whose logits are in memory at once
CACHE_SHARE = 0.25  # maximum share of a device's memory for the KV cache
STATE_READS = 3  # reads and writes of each optimizer value per optimizer step


@dataclass(frozen=True)
class Network:
    """Sizes of a decoder, and the settings of its role that affect cost.

    `inner` is the width of the MLP, summed over the experts that a token is routed to. `active` is
    the number of elements of a layer that a token passes through, `whole` the number of all its
    elements. `outputs` is the number of elements of the output matrix, `embedding` that of the
    input embedding.
    """

    layers: int
    hidden: int
    query: int
    key: int
    inner: int
    vocab: int
    active: int
    whole: int
    embedding: int
    outputs: int
    gated: bool = True
    tied: bool = False
    dtype: str = "bfloat16"
    trained: bool = False
    trainable: int | None = None  # number of adapter elements, if only adapters are trained
    optimizer: str = "adamw"
    recompute: int = 0
    offload_weights: bool = False
    offload_optimizer: bool = False
    state_dtype: str = "float32"
    fp8: bool = False
    reshards: bool = True
    sums_once: bool = False
    fused: bool = True
    capped: bool = False
    adapters: int = 0  # activation elements per token saved for a layer's adapters
    on_gpu: bool = True

    @property
    def width(self) -> int:
        """Bytes per element in the dtype of the computation."""
        return BYTES[self.dtype]

    @property
    def parameters(self) -> int:
        """Number of all parameters."""
        return self.layers * self.whole + self.embedding + (0 if self.tied else self.outputs)

    @property
    def num_trained(self) -> int:
        """Number of trained parameters; 0 for a frozen role."""
        if self.trained:
            if self.trainable is None:
                return self.parameters
            return self.trainable
        return 0

    def operations(self, tokens: float, length: float, rows: float) -> float:
        """Return the floating-point operations of a forward pass.

        `tokens` are in sequences of `length`; logits are computed for `rows` of them.
        """
        return (
            tokens * self.layers * 2 * (self.active + self.query * length) + rows * 2 * self.outputs
        )


@dataclass(frozen=True)
class Load:
    """The work of a call in one step.

    `sequences` have `prompt` + `new` tokens each. A call that trains makes `updates` optimizer
    steps per epoch; `microbatch` is the maximum number of tokens on a device at a time.
    """

    method: str
    sequences: int
    prompt: int
    new: int
    updates: int = 1
    epochs: int = 1
    microbatch: int = 16384

    @property
    def length(self) -> int:
        """Tokens per sequence."""
        return self.prompt + self.new

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return self.sequences * self.length

    @property
    def trains(self) -> bool:
        """True if the call trains."""
        return self.method == "train_step"


# -- seconds


def call_seconds(network: Network, load: Load, mesh: Mesh, rates: Rates) -> float:
    """Return the seconds of a call in one step on this mesh, without the transfer of parameters."""
    if load.method == "generate":
        return _generation(network, load, mesh, rates)
    once = _forward(network, load, mesh, rates)
    if not load.trains:
        return once
    return load.epochs * (once + load.updates * _update(network, mesh, rates))


def moving_seconds(network: Network, source: Mesh, target: Mesh, rates: Rates) -> float:
    """Return the seconds to copy the weights trained on `source` to `target`.

    The device that sends or receives the most bytes determines the time.
    """
    size = float(
        (network.parameters if network.trainable is None else network.trainable) * network.width
    )
    wanted = {
        rank: size * _held(target.layout) * (1.0 - _there(source, target, rank))
        for rank in target.ranks
    }
    most = max(max(wanted.values()), sum(wanted.values()) / len(source.ranks))
    return most / rates.bandwidth({*source.ranks, *target.ranks}) + (rates.latency if most else 0.0)


def _held(layout: Layout) -> float:
    """Return the fraction of a network that one device stores."""
    return 1.0 / (layout.tensor * layout.pipeline * layout.fsdp)


def _there(source: Mesh, target: Mesh, rank: int) -> float:
    """Return the fraction of a device's share on `target` that it already has from `source`.

    It is 1 for the same position in the same layout.
    """
    if rank not in source.ranks:
        return 0.0
    a = source.layout
    b = target.layout
    here = source.coordinates(rank)
    there = target.coordinates(rank)
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


def _forward(network: Network, load: Load, mesh: Mesh, rates: Rates) -> float:
    """Return the seconds of one pass over all tokens, with the backward pass if the call trains."""
    layout = mesh.layout
    trains = load.trains
    forwards = 2 if trains and network.recompute else 1
    # Cost in forward passes: the gradients of activations cost one, those of trained weights a
    # fraction of one.
    passes = forwards + (1.0 + network.num_trained / network.parameters if trains else 0.0)
    own = load.tokens / (layout.data * layout.context)  # tokens per device
    parts = max(1, math.ceil(own / load.microbatch))
    rows = load.sequences * (load.new or load.prompt)
    products = (
        passes
        * network.operations(load.tokens, load.length, rows)
        / len(mesh.ranks)
        / rates.products
    )
    # Matrix products, and the minimum time of each layer
    layers = network.layers / layout.pipeline
    rounds = 3 if trains else 1
    busy = products + layers * parts * rounds * rates.launch
    band = rates.bandwidth(mesh.ranks)
    # Messages between the devices: sums of tensor parallelism, keys and values of context
    # parallelism, gathered weights of sharding, hidden states of pipelines
    states = own * network.hidden * network.width
    if layout.tensor > 1:
        sums = 2 * layers * (forwards + 1 if trains else 1)  # after attention and after the MLP
        busy += sums * (
            2 * states * (layout.tensor - 1) / layout.tensor / band + parts * 2 * rates.latency
        )
    if layout.context > 1:
        kv = own * 2 * network.key * network.width
        busy += (
            layers
            * rounds
            * (kv * (layout.context - 1) / band + parts * layout.context * rates.latency)
        )
    if layout.fsdp > 1:
        gathered = (
            network.parameters
            * network.width
            / (layout.tensor * layout.pipeline)
            * (layout.fsdp - 1)
            / layout.fsdp
        )
        busy += parts * (2 if trains else 1) * (gathered / band + layers * rates.latency)
        # Gradients are scattered after each micro-batch; `_update` counts the last one.
        if trains and not network.sums_once:
            scattered = (
                network.num_trained
                * WIDE
                / (layout.tensor * layout.pipeline)
                * (layout.fsdp - 1)
                / layout.fsdp
            )
            busy += max(0, parts - load.updates) * (scattered / band + layers * rates.latency)
    if layout.pipeline > 1:
        busy *= 1 + (layout.pipeline - 1) / parts
        busy += (2 if trains else 1) * (states / band + (parts + layout.pipeline) * rates.latency)
    return busy


def _update(network: Network, mesh: Mesh, rates: Rates) -> float:
    """Return the seconds of summing the gradients and of one optimizer step."""
    layout = mesh.layout
    band = rates.bandwidth(mesh.ranks)
    parts = layout.tensor * layout.pipeline
    gradients = network.num_trained * WIDE / parts
    own = network.num_trained / parts / layout.fsdp
    exchanged = gradients * (layout.fsdp - 1) / layout.fsdp
    copies = layout.data // layout.fsdp * layout.context
    exchanged += 2 * gradients / layout.fsdp * (copies - 1) / copies
    if layout.data * layout.context > 1:
        exchanges = network.layers / layout.pipeline
    else:
        exchanges = 0
    return (
        exchanged / band
        + exchanges * rates.latency
        + own * WIDE * (2 + SLOTS[network.optimizer]) * STATE_READS / rates.memory
    )


def _generation(network: Network, load: Load, mesh: Mesh, rates: Rates) -> float:
    """Return the seconds of prefilling the prompts and decoding all sequences token by token.

    Pipeline stages are assumed to wait for each other.
    """
    layout = mesh.layout
    band = rates.bandwidth(mesh.ranks)
    prefill = _forward(network, replace(load, new=0), mesh, rates)
    # One decoding step reads all weights and the KV cache, or is bound by its products.
    own = math.ceil(load.sequences / (layout.data * layout.context))
    together = min(own, rates.most_sequences)
    weights = (network.layers * network.active + network.outputs) * network.width / layout.tensor
    cache = (
        together
        * (load.prompt + load.new / 2)
        * 2
        * network.layers
        * network.key
        * network.width
        / layout.tensor
    )
    products = (
        network.operations(together, load.prompt + load.new / 2, together)
        / layout.tensor
        / rates.products
    )
    step = max(products, (weights + cache) / rates.memory) + network.layers * rates.launch
    if layout.tensor > 1:
        states = together * network.hidden * network.width
        step += (
            network.layers
            * 2
            * (2 * states * (layout.tensor - 1) / layout.tensor / band + 2 * rates.latency)
        )
    if layout.fsdp > 1:
        step += (
            network.parameters
            * network.width
            / layout.tensor
            * (layout.fsdp - 1)
            / layout.fsdp
            / band
        )
    step += (layout.pipeline - 1) * rates.latency * 2
    return prefill + load.new * step * math.ceil(own / together)


# -- memory


def role_memory(
    network: Network, loads: Iterable[Load], layout: Layout, rates: Rates, *, own: bool = True
) -> RoleMemory:
    """Estimate the bytes on one device for a role's weights and for these calls.

    With `own=False` the device has a copy of a trained role, without an optimizer.
    """
    parts = layout.tensor * layout.pipeline
    t = layout.tensor
    layers = math.ceil(network.layers / layout.pipeline)
    trained = own and network.trained
    shape = NetworkShape(
        parameters=math.ceil(network.parameters / parts / layout.fsdp),
        trainable=math.ceil(network.num_trained / parts / layout.fsdp) if trained else 0,
        layers=layers,
        hidden=network.hidden,
        query=network.query // t,
        key=max(network.key // t, 1),
        inner=network.inner // t,
        vocab=max(network.vocab // t, 1),
        embedding=network.embedding // t,
        gated=network.gated,
        tied=network.tied,
        adapters=network.adapters,
        fused=network.fused,
        capped=network.capped,
        row_ranks=t,
        shards=layout.fsdp,
    )
    settings = Settings(
        dtype=network.dtype,
        trained=trained,
        optimizer=network.optimizer,
        recompute=network.recompute,
        offload_optimizer=network.offload_optimizer,
        chunk_rows=CHUNK_ROWS,
        weights_leave=network.offload_weights,
        keeps_cache=network.on_gpu,
        state_dtype=network.state_dtype,
        fp8=network.fp8,
        reshards=network.reshards,
        sums_once=network.sums_once,
    )
    return memory.estimate(shape, settings, [_work(load, layout, rates) for load in loads])


def _work(load: Load, layout: Layout, rates: Rates) -> Work:
    own = math.ceil(load.sequences / layout.data)
    if load.method == "generate":
        together = min(own, rates.most_sequences)
        return Work(
            cache_tokens=together * load.length,
            cache_limit=int(CACHE_SHARE * rates.capacity),
            sequences=together,
        )
    tokens = math.ceil(own * load.length / max(1, load.updates if load.trains else 1))
    most = max(min(load.microbatch, tokens), load.length)
    rows = math.ceil(most * load.new / load.length) if load.new else most
    size = layout.context
    return Work(
        tokens=math.ceil(most / size),
        rows=math.ceil(rows / size),
        backward=load.trains,
        parts=math.ceil(tokens / most),
    )
