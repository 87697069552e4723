"""What a call takes on a layout, from sizes alone: seconds, and bytes of a device's memory.

Estimates. Pure.

Seconds are products, reads of memory, and messages, added up: nothing is taken to overlap within a
call. What is left out (data between devices, host functions, the head's softmax) is small beside
them or the same everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from weft.engine import memory
from weft.engine.memory import BYTES, SLOTS, WIDE, NetworkShape, RoleMemory, Settings, Work
from weft.experiments._rates import Rates
from weft.topology import Layout, Mesh

CHUNK_ROWS = 1024  # tokens whose logits are held at once
CACHE_SHARE = 0.25  # of a device's memory that keys and values may take
STATE_READS = 3  # times that an optimizer step reads or writes each of its values


@dataclass(frozen=True)
class Network:
    """Sizes of a decoder, and what its role does with it.

    `inner`: width of an MLP, of all experts that a token is routed to; `active`, `whole`: elements
    of one layer that a token meets, and that there are; `outputs`: elements of the output matrix,
    `embedding` of the other one.
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
    trainable: int | None = None  # where adapters alone are trained
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
    adapters: int = 0  # elements that a layer's adapters keep of a token
    on_gpu: bool = True

    @property
    def width(self) -> int:
        """Bytes of an element that is computed with."""
        return BYTES[self.dtype]

    @property
    def parameters(self) -> int:
        return self.layers * self.whole + self.embedding + (0 if self.tied else self.outputs)

    @property
    def num_trained(self) -> int:
        if self.trained:
            if self.trainable is None:
                return self.parameters
            return self.trainable
        return 0

    def operations(self, tokens: float, length: float, rows: float) -> float:
        """Of a forward pass over `tokens` in sequences of `length`; the output matrix is computed
        for `rows` of them.
        """
        return (
            tokens * self.layers * 2 * (self.active + self.query * length) + rows * 2 * self.outputs
        )


@dataclass(frozen=True)
class Load:
    """What a call is asked for in one step: `sequences` of a prompt and `new` tokens, in `updates`
    optimizer steps where it trains, with at most `microbatch` tokens of a device at a time.
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
        return self.prompt + self.new

    @property
    def tokens(self) -> int:
        return self.sequences * self.length

    @property
    def trains(self) -> bool:
        return self.method == "train_step"


# -- seconds


def call_seconds(network: Network, load: Load, mesh: Mesh, rates: Rates) -> float:
    """One step's share of a call on this mesh, without what moves parameters there."""
    if load.method == "generate":
        return _generation(network, load, mesh, rates)
    once = _forward(network, load, mesh, rates)
    if not load.trains:
        return once
    return load.epochs * (once + load.updates * _update(network, mesh, rates))


def moving_seconds(network: Network, source: Mesh, target: Mesh, rates: Rates) -> float:
    """For a copy on `target` to get the weights that were trained on `source`: the busiest device's
    bytes.
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
    """The share of a network that one device holds."""
    return 1.0 / (layout.tensor * layout.pipeline * layout.fsdp)


def _there(source: Mesh, target: Mesh, rank: int) -> float:
    """The share of what a device is to hold that it has: the whole of it at the same place of the
    same layout.
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
    """Over all tokens once, and back where it trains."""
    layout = mesh.layout
    trains = load.trains
    forwards = 2 if trains and network.recompute else 1
    # In products of one forward pass: one for gradients of activations, and a share of one for
    # those of trained weights.
    passes = forwards + (1.0 + network.num_trained / network.parameters if trains else 0.0)
    own = load.tokens / (layout.data * layout.context)  # that go by one device
    parts = max(1, math.ceil(own / load.microbatch))
    rows = load.sequences * (load.new or load.prompt)
    products = (
        passes
        * network.operations(load.tokens, load.length, rows)
        / len(mesh.ranks)
        / rates.products
    )
    layers = network.layers / layout.pipeline
    rounds = 3 if trains else 1
    busy = products + layers * parts * rounds * rates.launch
    band = rates.bandwidth(mesh.ranks)
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
        # gradients after each micro-batch; `_update` counts the last of each
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
    """Sum the gradients, and one optimizer step."""
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
    """Prompts, then a token of all sequences after another; stages of a pipeline wait for each
    other.
    """
    layout = mesh.layout
    band = rates.bandwidth(mesh.ranks)
    prefill = _forward(network, replace(load, new=0), mesh, rates)
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
    """Bytes on one device of the role's weights and what these calls need beside them; not `own`:
    of a copy of a trained role, which has no optimizer.
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
