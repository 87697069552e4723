"""Sizes of a role's decoder, from which the time and the memory of its calls are estimated."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from weft.engine.spec import ModelSpec
from weft.parallel.schedule import SPLIT_BACKWARD_KINDS
from weft.planner.memory import (
    BYTES,
    MemorySettings,
    NetworkShape,
    build_settings,
    list_adapted_sizes,
)
from weft.planner.profile import ShapeKey
from weft.topology import Layout, compute_stage

if TYPE_CHECKING:
    from weft.models.network.config import TransformerConfig

CHUNK_ROWS = 1024  # tokens whose logits are in memory at once
# Tokens of the busiest expert relative to the mean, where a loss balances the experts: an assumption,
# in the range that Wang et al. 2024 report (arXiv:2408.15664)
EXPERT_LOAD = 1.6


@lru_cache(maxsize=4096)
def list_stage_layers(layers: int, head: float, layout: Layout) -> tuple[tuple[range, ...], ...]:
    """Return the runs of adjacent layers that each pipeline rank has.

    `head` is the cost of the output matrix, in layers.
    """
    stages = min(layout.placement.num_stages, layers)
    runs: list[list[range]] = [[] for _ in range(layout.pipeline)]
    for stage in range(stages):
        runs[layout.placement.get_rank(stage)].append(compute_stage(layers, stages, stage, head))
    return tuple(tuple(each) for each in runs)


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
        experts: Number of experts of a layer; 0 without experts.
        chosen_experts: Number of experts that process a token.
        expert_load: Tokens of the busiest expert of a layer, relative to the mean.
        frozen_layers: Number of the first layers that are frozen; the backward pass ends before
            them. The embedding is then frozen too.
        scores: True if only one row of each sequence is read, as by a reward model.
        splits_backward: True if pipeline stages compute the gradients of weights apart from those of
            activations, to fill the time in which they would wait.
        shares_prefixes: True if the network computes a prefix once that several sequences share.
        shares_rows: True if tensor-parallel ranks divide the tokens of the residual stream.
        held: Sizes of the whole network with what `shape` leaves out, such as norms, biases and
            quantized weights, from which memory is estimated; None: those of `shape`.
    """

    shape: NetworkShape
    settings: MemorySettings
    active: int
    outputs: int
    experts: int = 0
    chosen_experts: int = 1
    frozen_layers: int = 0
    scores: bool = False
    shares_prefixes: bool = True
    splits_backward: bool = False
    shares_rows: bool = True
    held: NetworkShape | None = None
    expert_load: float = EXPERT_LOAD

    @property
    def element_bytes(self) -> int:
        """Size of an element in bytes, in the dtype of the computation."""
        return BYTES[self.settings.dtype]

    @property
    def num_trained(self) -> int:
        """Number of trained parameters; 0 for a frozen role."""
        return self.shape.trainable if self.settings.trained else 0

    @property
    def has_adapters(self) -> bool:
        """True if the role has adapters or a prefix on frozen weights."""
        return self.shape.trainable < self.shape.parameters and not self.frozen_layers

    @property
    def gradient_share(self) -> float:
        """Share of the weights that have gradients, in layers through which the backward pass goes."""
        if self.frozen_layers or not self.has_adapters:
            return 1.0
        return self.num_trained / self.shape.parameters

    @property
    def expert_elements(self) -> int:
        """Number of weights of all experts of a layer."""
        if not self.experts:
            return 0
        columns = 3 if self.shape.gated else 2
        return columns * self.shape.hidden * self.shape.inner // self.chosen_experts * self.experts

    def count_stored_parameters(self, layout: Layout, *, trainable: bool = False) -> float:
        """Return the number of parameters that a device stores, or those of them that are trained.

        The device is one of the pipeline rank that stores the most. Experts are divided over other
        ranks than the rest of a network. Trained adapters count as if they were divided like the
        rest.
        """
        shape = self.shape
        whole = shape.trainable if trainable else shape.parameters
        experts = shape.layers * self.expert_elements * whole / shape.parameters
        if trainable and self.has_adapters:
            experts = 0.0
        copies = layout.expert * layout.expert_shards
        most = 0.0
        for layers, ends in self.count_stage_parts(layout, trainable=trainable):
            share = layers / max(1, shape.layers - (self.frozen_layers if trainable else 0))
            own = (whole - experts - self.count_ends(trainable=trainable)) * share + ends
            own_experts = experts * share
            most = max(most, (own / layout.fsdp + own_experts / copies) / layout.tensor)
        return most

    def count_ends(self, *, trainable: bool = False) -> int:
        """Return the number of elements of the embedding, and of the output matrix if it is separate.

        With `trainable`, return the trained ones: none with adapters, and without the embedding if
        the first layers are frozen.
        """
        shape = self.shape
        outputs = 0 if shape.tied else self.outputs
        if not trainable or shape.trainable == shape.parameters:
            return shape.embedding + outputs
        return 0 if self.has_adapters else outputs

    def count_stage_parts(
        self, layout: Layout, *, trainable: bool = False
    ) -> list[tuple[int, int]]:
        """Return the numbers of layers and of elements at the ends of each pipeline rank.

        With `trainable`, these are the layers that are not frozen, and trained elements. The first
        stage has the embedding, and the last one the output matrix or, if both are one, a
        copy of it.
        """
        shape = self.shape
        ends = self.count_ends(trainable=trainable)
        frozen = self.frozen_layers if trainable else 0
        if layout.pipeline == 1:
            return [(shape.layers - frozen, ends)]
        outputs = ends if shape.tied else min(ends, self.outputs)
        embedding = ends if shape.tied else ends - outputs
        head = self.outputs / max(1, self.active) if shape.vocab > 1 else 0.0
        parts = []
        for rank, runs in enumerate(list_stage_layers(shape.layers, head, layout)):
            layers = sum(max(0, run.stop - max(run.start, frozen)) for run in runs)
            first = embedding if rank == layout.placement.get_rank(0) else 0
            last = outputs if rank == layout.placement.last_rank else 0
            both = max(first, last) if shape.tied else first + last
            parts.append((layers, both))
        return parts

    def divide_shape(self, layout: Layout) -> NetworkShape:
        """Return the sizes of a device's part of the network, of the largest pipeline stage."""
        whole = self.held or self.shape
        t = layout.tensor
        scale = whole.parameters / self.shape.parameters
        stored = math.ceil(scale * self.count_stored_parameters(layout))
        scale = whole.trainable / max(1, self.shape.trainable)
        trainable = math.ceil(scale * self.count_stored_parameters(layout, trainable=True))
        # Of what adapters keep, the input of the last matrix is as wide as the rank's MLP.
        adapters = whole.adapters
        if adapters > whole.inner:
            adapters -= whole.inner - whole.inner // t
        return replace(
            whole,
            parameters=stored,
            trainable=trainable,
            layers=max(layers for layers, _ in self.count_stage_parts(layout)),
            query=whole.query // t,
            key=max(whole.key // t, 1),
            inner=whole.inner // t,
            vocab=max(whole.vocab // t, 1),
            embedding=whole.embedding // t,
            adapters=adapters,
            row_ranks=t if self.shares_rows else 1,
            rounded=whole.rounded * stored // whole.parameters,
            rounded_bytes=whole.rounded_bytes * stored // whole.parameters,
            shards=layout.fsdp,
        )

    @property
    def late(self) -> int:
        """Number of weights per layer that the last layer applies only to rows that are read."""
        return max(0, self.active - self.shape.hidden * (self.shape.query + 2 * self.shape.key))

    @cached_property
    def profile_key(self) -> ShapeKey:
        """Sizes by which a profile of this network is found."""
        shape = self.shape
        return ShapeKey(
            hidden=shape.hidden,
            query=shape.query,
            key=shape.key,
            inner=shape.inner,
            embedding=shape.embedding,
            gated=shape.gated,
            experts=not shape.fused,
        )


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
    frozen = spec.freeze_layers or 0
    if spec.train_last_layers is not None:
        frozen = max(0, config.num_layers - spec.train_last_layers)
    if frozen and spec.trained and not spec.has_adapters:
        # The embeddings are frozen too, and with them a tied output matrix.
        per_layer = attention + matrices * config.hidden_size * whole
        trained = (config.num_layers - frozen) * per_layer + (0 if tied else outputs)
        shape = replace(shape, trainable=max(1, trained))
    device = "cuda" if on_gpu else "cpu"
    dtype = spec.dtype or ("bfloat16" if on_gpu else "float32")
    settings = build_settings(spec, dtype, device, CHUNK_ROWS)
    return DecoderSizes(
        shape,
        replace(settings, weights_leave=spec.offload and on_gpu),
        active=attention + matrices * config.hidden_size * inner,
        outputs=outputs,
        experts=0 if experts is None else experts.num,
        chosen_experts=1 if experts is None else experts.top_k,
        frozen_layers=frozen if spec.trained and not spec.has_adapters else 0,
        scores=spec.head == "score",
        splits_backward=spec.pipeline_schedule in SPLIT_BACKWARD_KINDS,
        shares_prefixes=_can_share_prefixes(spec, config, on_gpu=on_gpu),
        shares_rows=spec.sequence_parallel,
    )


def _can_share_prefixes(spec: ModelSpec, config: TransformerConfig, *, on_gpu: bool) -> bool:
    """Return whether training and scoring compute a prefix once that several sequences share."""
    layout = spec.resolve_layout()
    windowed = any(window is not None for window in config.windows)
    capped = config.attention_softcap is not None and not on_gpu
    return not (windowed or capped or layout.context > 1 or spec.dropout)


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
