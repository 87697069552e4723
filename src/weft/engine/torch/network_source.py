"""A role's network: its configuration, its construction, and the source of its parameters' values.

The configuration is that of config.json, changed by the role's options. Values are slices of the
weights in a model directory, or slices of random values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from weft import topology
from weft.checkpoints import hf_io
from weft.data.tokenizer import Tokenizer
from weft.engine.backends import common
from weft.engine.spec import ModelSpec
from weft.engine.spec_parts import compute_scaled_context, read_rope_factor
from weft.engine.torch.engine import DTYPES, choose_dtype
from weft.engine.torch.master_weights import HALF
from weft.errors import ConfigError
from weft.models.network import lora, prefix, quantized, transformer
from weft.models.network.block import Block
from weft.models.network.config import TransformerConfig
from weft.models.network.linear import Linear, StoredParameter, find_canonical_parameters
from weft.models.network.quantized import Kind
from weft.models.network.transformer import Head, Pooling, Transformer
from weft.parallel import context, experts, tensor
from weft.parallel.mesh import RankMesh
from weft.parallel.schedule import SPLIT_BACKWARD_KINDS
from weft.topology import Layout, MeshCoordinates, Slice, build_whole_slice

NO_PREFIX = ("gpt_bigcode",)  # families whose KV cache has a special layout in PEFT
MULTIPLE = 16  # an extended vocabulary is padded to a multiple of this
# parameters with a row for each token of the vocabulary
GROWN = ("embed.weight", "head.weight", "head.bias")


def adapt_config(
    spec: ModelSpec, config: TransformerConfig, tokenizer: Tokenizer
) -> TransformerConfig:
    """Return the configuration with the vocabulary, prefix and `rope_scaling` of the role.

    The vocabulary is extended by the tokens that `tokenizer.add_tokens` created. Raises
    `CheckpointError` if the tokenizer already had ids without an embedding. Raises `ConfigError` if
    the prefix doesn't fit or `rope_scaling` can't be applied.
    """
    if tokenizer.added_from is None:
        original_size = tokenizer.vocab_size
    else:
        original_size = tokenizer.added_from
    hf_io.check_vocabulary(
        config, original_size, str(spec.path), spec.tokenizer.path or str(spec.path)
    )
    if tokenizer.vocab_size > config.vocab_size:
        config = replace(config, vocab_size=-(-tokenizer.vocab_size // MULTIPLE) * MULTIPLE)
    config = _with_prefix(spec, config)
    return config if spec.rope_scaling is None else _apply_rope_scaling(spec, config)


def _with_prefix(spec: ModelSpec, config: TransformerConfig) -> TransformerConfig:
    """Return the configuration with `prefix_tokens` set to the length of the role's trained prefix.

    If the role does not train a prefix (prefix tuning), the configuration is returned unchanged.
    Raises `ConfigError` if the role's prefix conflicts with that of the model directory or does not
    fit the model.
    """
    existing = config.prefix_tokens
    num_tokens = spec.prefix.num_tokens
    trains = spec.trained or spec.mirrors
    if num_tokens and config.family in NO_PREFIX:
        raise ConfigError(
            f"prefix.num_tokens={num_tokens}: PEFT cannot save a prefix of a {config.family} "
            f"model in; use lora.r"
        )
    if existing and trains and num_tokens != existing:
        raise ConfigError(
            f"{spec.path} is a prefix of {existing} tokens, and prefix.num_tokens={num_tokens}; "
            f"write prefix.num_tokens={existing} to train it further, or give the path of the "
            "model it belongs to"
        )
    if num_tokens and trains and config.learned_positions is not None:
        num_positions = config.learned_positions - config.position_offset
        if num_tokens >= num_positions:
            raise ConfigError(
                f"prefix.num_tokens={num_tokens}: leaves no room in the {num_positions} "
                f"positions of {spec.path}"
            )
    return replace(config, prefix_tokens=num_tokens) if trains and num_tokens else config


def _apply_rope_scaling(spec: ModelSpec, config: TransformerConfig) -> TransformerConfig:
    """Return the configuration with `rope_scaling` applied.

    `linear` divides positions by the factor (Chen et al. 2023, "Position interpolation"). `ntk`
    multiplies the rotary base by alpha^(d / (d - 2)), where alpha is the factor and d is the number
    of rotated dimensions of a head. `dynamic` increases the base only for sequences that are longer
    than those in training, depending on their length (bloc97 2023).
    """
    rope = config.rope
    value = spec.rope_scaling
    if rope is None or rope.scaling != "none":
        if rope is None:
            problem = "positions that are not rotated"
        else:
            problem = f"rope_scaling of type {rope.scaling} already"
        raise ConfigError(
            f"rope_scaling={value!r}: {spec.path} has {problem}; leave the option out"
        )
    factor = read_rope_factor(value)
    positions = config.max_positions
    match value["type"]:
        case "linear":
            rope = replace(rope, scaling="linear", values={"factor": factor})
        # max_positions of config.json is the trained length, so it doesn't change
        case "dynamic":
            return replace(
                config,
                rope=replace(
                    rope, scaling="dynamic", values={"factor": factor, "original": positions}
                ),
            )
        case _:
            rope = replace(rope, theta=rope.theta * factor ** (rope.dim / (rope.dim - 2)))
    return replace(config, rope=rope, max_positions=compute_scaled_context(value, positions))


@dataclass(frozen=True)
class RankCoordinates:
    """Coordinates of one rank in a layout, for building its part of a network in any process.

    They are used instead of a `RankMesh` to describe a planned engine, whose processes do not exist
    yet. A network that is built from them is not connected to other ranks.
    """

    layout: Layout
    coordinates: MeshCoordinates


def read_shapes(network: Transformer) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter of a network, by its canonical name."""
    stored = find_canonical_parameters(network)
    return {name: tuple(part.data.shape) for name, part in stored.items()}


class NetworkSource:
    """Builder of one role's network, which also provides the initial values of the parameters.

    The network is built on the meta device. The initial values are either read from a model
    directory or random.
    """

    def __init__(
        self, spec: ModelSpec, path: str, config: TransformerConfig, added_from: int | None = None
    ) -> None:
        self.spec, self.config, self.head = spec, config, cast(Head, spec.head)
        # first added token; rows from here on are new
        self._added_from = added_from
        if spec.init_from_scratch or spec.planned:
            self._reader = None
        else:
            self._reader = hf_io.ParameterReader(path, self.head, spec.type)
        # pooling named by the model directory, used if the role asks for no other
        unasked: Pooling = "last" if self._reader is None else self._reader.pooling
        self.pooling: Pooling = "mean" if spec.pooling == "mean" else unasked

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter of the whole network, by its canonical name."""
        return read_shapes(self.build_network(None))

    @property
    def is_tied(self) -> bool:
        """True if the embedding matrix is also the output matrix."""
        return self.config.tied and self.head == "lm"

    def build_network(
        self, mesh: RankMesh | RankCoordinates | None, *, experts_apart: bool = True
    ) -> Transformer:
        """Build the whole network or, with a `mesh`, one rank's part of it, on the meta device.

        Adapters are included. Communication with the other ranks is set up only if `mesh` is a
        `RankMesh`. If `experts_apart` is False, every rank has all experts, whatever the layout.
        """
        config = self.config
        layers = cast("list[int] | None", None)
        if mesh is not None:
            layout = mesh.layout
            coordinates = mesh.coordinates
            if layout.tensor > 1:
                config = tensor.narrow_config(config, layout.tensor, coordinates.tensor)
            if layout.pipeline > 1:
                layers = []
                for run in self.list_stages(mesh).values():
                    layers.extend(run)
        spec = self.spec
        # Build the network, and set what depends on training.
        with torch.device("meta"):
            network = Transformer(config, self.head, self.pooling, layers=layers)
        if isinstance(mesh, RankMesh) and mesh.layout.expert > 1 and experts_apart:
            experts.join(network, mesh.experts_group)
        network.to(common.choose_reading_dtype(spec))
        if spec.dropout is not None:
            _set_dropout(network, spec.dropout)
        if spec.residual_dropout:
            transformer.set_residual_dropout(
                network, spec.residual_dropout, ramp=spec.residual_dropout_lima
            )
        network.recompute_every = spec.recomputed_layers
        network.requires_grad_(spec.trained)
        first = transformer.count_frozen_layers(
            spec.freeze_layers, spec.train_last_layers, config.num_layers
        )
        if first is not None:
            dtype = DTYPES[choose_dtype(spec)]
            transformer.freeze(network, first, dtype if dtype in HALF else None)
        # Add adapters or a prefix on frozen weights.
        if spec.has_adapters:
            settings = spec.lora
            if settings.r:
                lora.add(
                    network,
                    r=settings.r,
                    alpha=settings.alpha,
                    dropout=settings.dropout,
                    targets=settings.targets,
                )
            else:
                prefix.freeze_all_but_prefix(network)
            if spec.trains_embeddings:
                transformer.train_embeddings(network)
            if spec.mirrors:
                network.requires_grad_(False)
        if spec.quantize is not None:
            matrices = []
            for module in network.blocks.modules():
                if isinstance(module, Linear):
                    matrices.append(module)
            quantized.quantize_matrices(
                matrices, cast(Kind, spec.quantize), common.choose_reading_dtype(spec)
            )
        # Connect the part to the parts of other ranks.
        if isinstance(mesh, RankMesh) and mesh.count_ranks("tensor") > 1:
            tensor.join(
                network, self.config, mesh.get_group("tensor"), shares_rows=spec.sequence_parallel
            )
        if isinstance(mesh, RankMesh) and mesh.count_ranks("context") > 1:
            context.join(network, mesh.get_group("context"))
        return network.eval()

    def list_stages(self, mesh: RankMesh | RankCoordinates) -> dict[int, range]:
        """Return the range of blocks in each pipeline stage of a rank, by stage index."""
        placement = mesh.layout.placement
        config = self.config
        stages: dict[int, range] = {}
        for stage in placement.list_stages(mesh.coordinates.pipeline):
            stages[stage] = topology.compute_stage(
                config.num_layers, placement.num_stages, stage, config.head_layers
            )
        return stages

    def fill(self, stored: Mapping[str, StoredParameter], places: Mapping[str, Slice]) -> None:
        """Set the parameters `stored` to their initial values.

        `places` maps the names of parameters to the slices that this rank stores. Parameters that
        are not in `places` are stored whole.
        """
        with torch.no_grad():
            for name, part in stored.items():
                part.data.copy_(self.read_values(name, places.get(name)))

    def read_values(self, name: str, where: Slice | None = None) -> Tensor:
        """Return the initial values of a parameter, or a slice of them."""
        shape = self.shapes[name]
        if lora.is_adapter(name):
            values = lora.draw_initial_values(name, shape, self.spec.seed)
        elif (
            self._reader is None
            or name in self._reader.missing_names
            or name not in self._reader.shapes
        ):
            values = hf_io.compute_initial_values(
                name, shape, self.config, self.head, self.spec.seed
            )
        elif name in GROWN and self._added_from is not None:
            return self._with_new_rows(
                self._reader,
                name,
                build_whole_slice(shape) if where is None else where,
                self._added_from,
            )
        else:
            return self._reader.read(name, where)
        return values if where is None else values[where]

    def _with_new_rows(
        self, reader: hf_io.ParameterReader, name: str, where: Slice, added_from: int
    ) -> Tensor:
        """Return rows of a vocabulary matrix, including rows for added tokens.

        Each added row, from index `added_from`, is the mean of the rows in the model directory.
        This leaves the probabilities of the other tokens nearly unchanged (Hewitt 2021,
        "Initializing new word embeddings for pretrained language models").
        """
        rows, *rest = where
        old_rows = slice(rows.start, min(max(added_from, rows.start), rows.stop))
        old = reader.read(name, (old_rows, *rest))
        new = rows.stop - old_rows.stop
        if not new:
            return old
        mean = reader.read(name, (slice(0, added_from), *rest)).double().mean(0, keepdim=True)
        return torch.cat([old, mean.to(old.dtype).expand(new, *old.shape[1:])])


def check_layout(spec: ModelSpec, layout: Layout, config: TransformerConfig) -> None:
    """Raise `ConfigError` for a layout that the network or this version of weft doesn't support."""
    try:
        _check_layout(spec, layout, config)
    except ConfigError as error:
        if not spec.allocated_by or layout != spec.resolve_layout():
            raise
        raise ConfigError(f"{error} (this layout comes from {spec.allocated_by})") from None


def _check_layout(spec: ModelSpec, layout: Layout, config: TransformerConfig) -> None:
    if layout.context > 1 and config.prefix_tokens:
        raise ConfigError(
            f"layout={layout}: ranks that share the tokens of a sequence (c) have no prefix, and "
            f"{spec.path} has a prefix of "
            f"{config.prefix_tokens} tokens; write c1, or use lora.r instead"
        )
    if layout.expert > 1:
        _check_experts(layout, config)
    divided = layout.fsdp * layout.tensor * layout.expert > 1
    if spec.trained and spec.optimizer.type == "palm" and divided:
        raise ConfigError(
            f"layout={layout}: optimizer.type=palm measures whole parameters, which f, t and e "
            f"divide; write d{layout.data}f1, use backend=jax, or another optimizer"
        )
    if layout.pipeline > 1 and spec.trained and spec.freezes:
        raise ConfigError(
            f"layout={layout}: every pipeline stage must have parameters to train, which "
            f"freeze_layers and train_last_layers "
            "do not guarantee; write p1, or leave these out"
        )
    if (
        layout.pipeline > 1
        and spec.trained
        and spec.pipeline_schedule in SPLIT_BACKWARD_KINDS
        and torch.__version__ < "2.13"  # compares versions, not texts
    ):
        raise ConfigError(
            f"layout={layout}: pipeline_schedule={spec.pipeline_schedule} needs torch 2.13, and "
            f"{torch.__version__} is installed; write 1f1b or interleaved_1f1b"
        )
    tensor.narrow_config(config, layout.tensor, 0)
    topology.compute_stage(config.num_layers, layout.pipeline, 0)
    count = layout.placement.num_stages
    kind = spec.pipeline_schedule
    if count > config.num_layers:
        raise ConfigError(
            f"layout={layout}: pipeline_schedule={kind} with {layout.stages_per_rank} stages a rank "
            f"makes {count} stages of a "
            f"model with {config.num_layers} layers; every stage needs at least one: lower p, or "
            f"pipeline_stages_per_rank"
        )


def _check_experts(layout: Layout, config: TransformerConfig) -> None:
    if config.experts is None:
        raise ConfigError(
            f"layout={layout}: a {config.family} model has no experts to share; write e1"
        )
    if config.experts.num % layout.expert:
        raise ConfigError(
            f"layout={layout}: e={layout.expert} does not divide the model's {config.experts.num} "
            f"experts; write an e that does"
        )


def _set_dropout(network: Transformer, rate: float) -> None:
    """Set all dropout rates of the network to `rate`, which replaces the configuration's rates."""
    network.config = network.config.with_dropout(rate)
    for block in network.blocks:
        assert isinstance(block, Block)
        block.dropout = rate
        block.attention.spec = replace(block.attention.spec, dropout=rate)
