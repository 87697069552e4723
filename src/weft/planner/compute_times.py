"""Times of a device's computation: passes, optimizer steps and decode steps of one device.

They are interpolated from a profile if one fits the network, and otherwise follow from the numbers
of operations and bytes and from the rates of the device. The functions are pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from weft.planner.decoder_sizes import DecoderSizes
from weft.planner.devices import DeviceRates
from weft.planner.gpu_kernels import (
    BACKWARD_ATTENTION,
    ELEMENTWISE_SECONDS,
    SUSTAINED_SHARE,
    GpuKernels,
    KernelTime,
)
from weft.planner.memory import SLOTS, WIDE
from weft.planner.profile import ShapeTimes
from weft.topology import Layout

STATE_READS = 3  # reads and writes of each optimizer value per optimizer step
# Reads and writes of elementwise operations in a block's forward pass: elements per token of the
# hidden states, and of the MLP
HIDDEN_TRAFFIC = 12
INNER_TRAFFIC = 4
ELEMENTWISE_KERNELS = 6  # norms, residual sums, rotation and activation of a layer
FUSED_KERNELS = 3  # if sums were fused into norms and the rotation into attention
LOGIT_TRAFFIC = 12  # bytes read and written of each logit, which is float32
STEP_SECONDS = 3e-4  # host time between two decode steps
BACKWARD_LAUNCHES = 2  # kernel launches of a backward pass, in forward passes
PARTS = ("products", "memory", "messages", "overhead", "bubble", "offload", "preemption")


class CallCost(NamedTuple):
    """Time of a computation in seconds, by cause.

    Attributes:
        products: Matrix products.
        memory: Reads and writes of a device's memory.
        messages: Messages between devices.
        overhead: Starting kernels, packing, and passing calls on.
        bubble: Time in which a pipeline stage has no work.
        offload: Copies to host memory and back, and updates there, as far as computation does not
            hide them.
        preemption: Computing the tokens of preempted sequences again.
    """

    products: float = 0.0
    memory: float = 0.0
    messages: float = 0.0
    overhead: float = 0.0
    bubble: float = 0.0
    offload: float = 0.0
    preemption: float = 0.0

    @property
    def seconds(self) -> float:
        """Sum of all parts."""
        return sum(self)

    def add(self, *others: CallCost) -> CallCost:
        """Return the sum of this cost and others."""
        return CallCost(*(sum(parts) for parts in zip(self, *others, strict=True)))

    def multiply(self, factor: float) -> CallCost:
        """Return `factor` times this cost."""
        return CallCost(*(factor * part for part in self))

    def split(self, seconds: float) -> CallCost:
        """Return a cost of `seconds` in total, with parts in the same proportion as this cost."""
        total = self.seconds
        return self.multiply(seconds / total) if total else CallCost(products=seconds)


@dataclass(frozen=True)
class PassSize:
    """Size of one micro-batch on one device.

    Attributes:
        tokens: Number of tokens that are computed.
        length: Mean number of tokens of a sequence, each token counted once.
        rows: Number of tokens for which outputs are computed.
        trains: True if a backward pass follows.
        repeats_head: True if the backward pass computes the logits again, since the gradient of a
            row depends on other rows.
    """

    tokens: float
    length: float
    rows: float
    trains: bool
    repeats_head: bool = False


class PassCost(NamedTuple):
    """Cost of one micro-batch: a layer's forward and backward pass, and all else (the ends)."""

    block: CallCost
    block_backward: CallCost
    ends: CallCost


class ComputeTimes:
    """Times of one network's computation on one rank of a layout."""

    def __init__(self, network: DecoderSizes, rates: DeviceRates, layout: Layout) -> None:
        self._network = network
        self._rates = rates
        self._tensor = layout.tensor
        self._expert = layout.expert
        # A network that is divided over ranks is decoded module by module.
        self._decoding = "modules" if layout.tensor * layout.pipeline > 1 else "plain"
        if network.has_adapters:
            self._decoding = "adapters"
        self._profile: ShapeTimes | None = None
        if rates.profile is not None:
            self._profile = rates.profile.find(
                network.profile_key, network.settings.dtype, layout.tensor, rates.threads_used
            )

    @property
    def is_measured(self) -> bool:
        """True if a profile fits the network."""
        return self._profile is not None

    def get_wait(self, kind: str) -> float:
        """Return the extra seconds of a message within a call: "shards", "tensor" or "decode"."""
        return 0.0 if self._profile is None else self._profile.waits.get(kind, 0.0)

    # -- passes

    def compute_pass(self, size: PassSize) -> PassCost:
        """Return the cost of a micro-batch."""
        rates = self._rates
        key = (self._network, self._tensor, size, rates.threads_used, rates.slowdown)
        if self._profile is None:
            if rates.kernels is not None:
                return self._estimate_kernels(rates.kernels, size)
            return self._estimate_pass(size)
        assert rates.profile is not None
        memo = rates.profile.memo
        if key not in memo:
            memo[key] = self._read_pass(self._profile, size)
        known_cost: PassCost = memo[key]
        return known_cost

    def _estimate_pass(self, size: PassSize) -> PassCost:
        """Return the cost of a micro-batch from the rates of the device."""
        network, rates = self._network, self._rates
        shape = network.shape
        share = 1.0 / self._tensor
        attention = 2 * shape.query * size.length * size.tokens * share
        weights = 2 * network.active * size.tokens * share
        products = CallCost(products=(weights + attention) / rates.flops)
        reads = CallCost(
            memory=network.active * share * network.element_bytes / rates.memory_bandwidth
        )
        slower = max(products, reads, key=lambda cost: cost.seconds)
        launch = CallCost(overhead=rates.launch)
        head = CallCost(products=2 * network.outputs * size.rows * share / rates.flops)
        if not size.trains:
            return PassCost(slower.add(launch), CallCost(), head)
        # The gradients of activations cost a forward pass, those of trained weights a share of one.
        gradients = network.gradient_share
        backward = slower.multiply(1.0 + gradients).add(launch.multiply(BACKWARD_LAUNCHES))
        backward = backward.multiply(self._trained_layers)
        return PassCost(
            slower.add(launch), backward, head.multiply(2.0 + gradients + size.repeats_head)
        )

    def _estimate_kernels(
        self, kernels: GpuKernels, size: PassSize, *, generates: bool = False
    ) -> PassCost:
        """Return the cost of a micro-batch from the times of a GPU's kernels.

        Passes of a generator over prompts are short.
        """
        network, rates = self._network, self._rates
        shape = network.shape
        width = network.element_bytes
        share = 1.0 / self._tensor
        reached = 1.0 if generates else SUSTAINED_SHARE
        products = self._time_products(kernels, size.tokens, generates=generates)
        attention = kernels.time_attention(size.tokens, size.length, shape.query * share)
        elements = HIDDEN_TRAFFIC * shape.hidden + INNER_TRAFFIC * shape.inner * share
        traffic = kernels.time_traffic(elements * width * size.tokens, ELEMENTWISE_KERNELS)
        forward = _sum_kernels(*products, attention, traffic, reached=reached)
        # The host starts kernels ahead, so only small passes wait for it.
        forward = forward.add(CallCost(overhead=max(0.0, rates.launch - forward.seconds)))
        head = _sum_kernels(
            kernels.time_product(size.rows, shape.hidden, self._head_width, width),
            kernels.time_traffic(LOGIT_TRAFFIC * size.rows * self._head_width, 1),
            reached=reached,
        )
        if not size.trains:
            return PassCost(forward, CallCost(), head)
        gradients = network.gradient_share
        backward = _sum_kernels(*products, reached=reached).multiply(1.0 + gradients)
        backward = backward.add(
            _sum_kernels(attention, reached=reached).multiply(BACKWARD_ATTENTION),
            _sum_kernels(traffic).multiply(2.0),
        )
        launch = BACKWARD_LAUNCHES * rates.launch
        backward = backward.add(CallCost(overhead=max(0.0, launch - backward.seconds)))
        backward = backward.multiply(self._trained_layers)
        return PassCost(forward, backward, head.multiply(2.0 + gradients + size.repeats_head))

    def _time_products(
        self, kernels: GpuKernels, rows: float, *, generates: bool = False
    ) -> list[KernelTime]:
        """Return the times of the matrix products of a layer for `rows` tokens.

        A generator has gathered the experts of other ranks.
        """
        network = self._network
        shape = network.shape
        width = network.element_bytes
        query, key = shape.query / self._tensor, shape.key / self._tensor
        inner, columns, experts = shape.inner / self._tensor, 2 if shape.gated else 1, 1.0
        if network.experts:
            # A few tokens do not reach all experts, so fewer matrices are read.
            chosen = network.chosen_experts
            inner, rows_inner = inner / chosen, rows * chosen
            experts = network.experts * (1.0 - (1.0 - chosen / network.experts) ** rows)
            # A rank has some of the experts, for the tokens of all ranks; the others wait for the
            # busiest one.
            if not generates:
                experts /= self._expert
                rows_inner *= compute_expert_imbalance(network, self._expert)
        else:
            rows_inner = rows
        return [
            kernels.time_product(rows, shape.hidden, query + 2 * key, width),
            kernels.time_product(rows, query, shape.hidden, width),
            kernels.time_product(rows_inner, shape.hidden, columns * inner, width, experts),
            kernels.time_product(rows_inner, inner, shape.hidden, width, experts),
        ]

    @property
    def _head_width(self) -> float:
        """Number of outputs of the output matrix on this rank."""
        return self._network.outputs / self._network.shape.hidden / self._tensor

    @property
    def _trained_layers(self) -> float:
        """Share of the layers through which the backward pass goes."""
        layers = self._network.shape.layers
        return (layers - self._network.frozen_layers) / max(1, layers)

    def _read_pass(self, times: ShapeTimes, size: PassSize) -> PassCost:
        """Return the cost of a micro-batch from a profile."""
        network = self._network
        kind = "score"
        if size.trains:
            kind = "adapters" if network.has_adapters else "full"
        seconds = times.passes[kind].compute_seconds(size.tokens, size.length, size.rows)
        slowdown = self._rates.slowdown
        head = seconds.head
        if size.repeats_head:
            scored = times.passes["score"]
            head += scored.compute_seconds(size.tokens, size.length, size.rows).head
        if network.shape.vocab == 1:
            head = 0.0
        embedding = 0.0 if network.frozen_layers else seconds.embedding_backward
        return PassCost(
            CallCost(products=slowdown * seconds.block),
            CallCost(products=slowdown * seconds.block_backward * self._trained_layers),
            CallCost(
                products=slowdown * head,
                memory=slowdown * embedding,
                overhead=slowdown * seconds.begin,
            ),
        )

    # -- the optimizer

    def compute_update(self, elements: float) -> CallCost:
        """Return the cost of an optimizer step with `elements` trained parameters on this device."""
        network, rates = self._network, self._rates
        values = 2 + SLOTS[network.settings.optimizer]
        if self._profile is not None:
            # AdamW was measured; other optimizers read and write fewer values.
            relative = values / (2 + SLOTS["adamw"])
            seconds = rates.slowdown * relative * self._profile.compute_update(elements)
            return CallCost(memory=seconds)
        traffic = elements * WIDE * values * STATE_READS
        return CallCost(memory=traffic / rates.memory_bandwidth)

    # -- decoding

    def compute_decode(self, batch: float, context: float) -> tuple[CallCost, CallCost]:
        """Return the cost of a decode step of `batch` sequences: of a layer, and of all else.

        `context` is the number of tokens before each new token.
        """
        network, rates = self._network, self._rates
        if rates.kernels is not None and self._profile is None:
            return self._estimate_decode_kernels(rates.kernels, batch, context)
        shape = network.shape
        width = network.element_bytes
        share = 1.0 / self._tensor
        # A step reads all weights and the KV cache, or is bound by its products.
        cache = batch * context * 2 * shape.key * width * share
        operations = batch * share * (2 * network.active + 2 * shape.query * context)
        products = CallCost(products=operations / rates.flops)
        reads = CallCost(memory=(network.active * width * share + cache) / rates.memory_bandwidth)
        block = max(products, reads, key=lambda cost: cost.seconds)
        block = block.add(CallCost(overhead=rates.launch))
        products = CallCost(products=batch * share * 2 * network.outputs / rates.flops)
        reads = CallCost(memory=network.outputs * width * share / rates.memory_bandwidth)
        rest = max(products, reads, key=lambda cost: cost.seconds)
        if self._profile is None:
            return block, rest
        times = self._profile.decoding[self._decoding].compute_step(batch, context)
        slowdown = rates.slowdown
        return block.split(slowdown * times[0]), rest.split(slowdown * times[1])

    def _estimate_decode_kernels(
        self, kernels: GpuKernels, batch: float, context: float
    ) -> tuple[CallCost, CallCost]:
        """Return the cost of a decode step from the times of a GPU's kernels.

        The kernels of a step are started together (CUDA graphs).
        """
        network = self._network
        shape = network.shape
        width = network.element_bytes
        share = 1.0 / self._tensor
        cache = batch * context * 2 * shape.key * width * share
        elements = HIDDEN_TRAFFIC * shape.hidden + INNER_TRAFFIC * shape.inner * share
        block = _sum_kernels(
            *self._time_products(kernels, batch, generates=True),
            kernels.time_cache_attention(cache, 4 * batch * context * shape.query * share),
            kernels.time_traffic(elements * width * batch, FUSED_KERNELS),
        ).add(CallCost(overhead=(ELEMENTWISE_KERNELS - FUSED_KERNELS) * ELEMENTWISE_SECONDS))
        rest = _sum_kernels(
            kernels.time_product(batch, shape.hidden, self._head_width, width),
            kernels.time_traffic(LOGIT_TRAFFIC * batch * self._head_width, 1),
        ).add(CallCost(overhead=STEP_SECONDS))
        return block, rest

    def compute_prefill(
        self, tokens: float, length: float, sequences: float
    ) -> tuple[CallCost, CallCost]:
        """Return the cost of computing prompts: of a layer, and of all else.

        `tokens` is the number of all prompt tokens, in `sequences` prompts of `length` tokens.
        """
        if self._profile is None:
            size = PassSize(tokens, length, sequences, trains=False)
            if self._rates.kernels is not None:
                cost = self._estimate_kernels(self._rates.kernels, size, generates=True)
            else:
                cost = self._estimate_pass(size)
            return cost.block, cost.ends
        block, rest = self._profile.decoding[self._decoding].compute_prefill(tokens)
        slowdown = self._rates.slowdown
        return CallCost(products=slowdown * block), CallCost(overhead=slowdown * rest)


def _sum_kernels(*times: KernelTime, reached: float = 1.0) -> CallCost:
    """Return the cost of kernels that run one after another.

    Kernels that are bound by operations reach the share `reached` of their rates.
    """
    products = sum(kernel.products for kernel in times)
    return CallCost(products / reached, sum(kernel.memory for kernel in times))


def compute_expert_imbalance(network: DecoderSizes, ranks: int) -> float:
    """Return the rows of the busiest of `ranks` expert-parallel ranks, relative to the mean.

    With n experts on a rank, the excess is that of a single expert divided by sqrt(n).
    """
    if ranks == 1:
        return 1.0
    return 1.0 + (network.expert_load - 1.0) / math.sqrt(network.experts / ranks)
