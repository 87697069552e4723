"""Backend `torch`, which runs weft's own decoder for packed sequences on one device."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from weft import kernels
from weft.checkpoints import hf_io, peft_io, prefix_io
from weft.checkpoints.config_file import read_prefix
from weft.data.tokenizer import Tokenizer
from weft.engine.backends import common
from weft.engine.device import TokenCost
from weft.engine.spec import ModelSpec
from weft.engine.torch import network_source
from weft.engine.torch.engine import DTYPES, BuiltNetwork, TorchEngine, choose_dtype
from weft.engine.torch.network_source import NetworkSource, RankCoordinates, check_layout
from weft.engine.torch.step import AuxLoss
from weft.models.network import lora, quantized
from weft.models.network.block import MLP, Block
from weft.models.network.config import TransformerConfig
from weft.models.network.linear import Linear, find_canonical_parameters
from weft.models.network.moe import ExpertStack, choose_aux_loss_weight
from weft.models.network.transformer import Transformer, compile_blocks
from weft.parallel.mesh import RankMesh
from weft.registry import families, register_backend
from weft.topology import Layout, Mesh, compute_holdings


@register_backend("torch")
def torch_backend(
    spec: ModelSpec,
    layout: Layout,
    mesh: RankMesh | None = None,
    tokenizer: Tokenizer | None = None,
) -> TorchEngine:
    """Build an engine that runs the model directory `spec.path` on one device.

    With a `mesh`, only this rank's part of the weights is read. `tokenizer` is the role's
    tokenizer, which is loaded if it is not given. Raises `UserError` for a model that cannot be
    read or run.
    """
    # Check the options against the device and the model's configuration.
    path = common.check_spec(spec)
    device = common.choose_role_device(spec)
    spec = common.with_dtype(spec, path, on_cpu=device.type != "cuda")
    family, config = hf_io.read_config(path, spec.type)
    if tokenizer is None:
        tokenizer = Tokenizer.load(spec.tokenizer, spec.path, spec.trust_remote_code)
    config = network_source.adapt_config(spec, config, tokenizer)
    check_layout(spec, layout, config)
    common.check_recomputation(spec, config.num_layers)
    common.check_compile(spec, layout, device)
    fp8 = common.build_fp8_product(spec, device)
    common.check_quantized(spec, layout, has_experts=config.experts is not None)
    # Build the whole network and this rank's part on the meta device.
    source = NetworkSource(spec, path, config, tokenizer.added_from)
    whole = source.build_network(None)
    network = whole if mesh is None else source.build_network(mesh)
    if spec.compile:
        compile_blocks(network, fp8=fp8)
    padding = common.find_skipped_padding(tokenizer, spec)
    whole.padding = padding
    network.padding = padding
    cost = compute_cost(network, frozen=spec.has_adapters).split_over_ranks(layout.context)
    # Allocate and fill the weights.
    part = None
    if mesh is None:
        common.check_memory(network, path, device)
        quantized.allocate_memory(network, device)
        source.fill(find_canonical_parameters(network), {})
    else:
        from weft.engine.torch import rank_shards  # FSDP2 takes a second to import

        part = rank_shards.build_rank_shard(source, network, whole, mesh, device)
    num_expert_layers = sum(config.has_experts(layer) for layer in range(config.num_layers))
    aux_loss_weight = choose_aux_loss_weight(config, spec.router_aux_loss_coef)
    aux_loss = AuxLoss(aux_loss_weight, layout.tensor, num_expert_layers)

    def save(directory: Path, tensors: Mapping[str, Tensor], tokenizer: Tokenizer) -> None:
        saved_tokenizer = common.choose_padding(tokenizer, spec, network.pooling)
        saved_tokenizer.save(directory)
        save_model(directory, tensors, whole, spec, config, saved_tokenizer)

    built = BuiltNetwork(
        network=network,
        save=save,
        cost=cost,
        facts={"family": family.name, **_describe_network(network, config, spec, layout, device)},
        aux_loss=aux_loss,
        dropout=uses_dropout(network, spec),
        adapters_off=(lambda: lora.disable_adapters(network)) if spec.has_adapters else None,
        notes=common.list_padding_notes(tokenizer, spec, network.pooling),
        part=part,
        blocks=tuple(network.blocks),
    )
    return TorchEngine(built, spec, layout, device)


def planned(
    spec: ModelSpec, mesh: Mesh, device: torch.device, tokenizer: Tokenizer | None = None
) -> Mapping[str, Any]:
    """Return a description of the engine on the mesh's first rank, computed from config.json.

    No weights are read, and the device need not exist. Without a tokenizer, the vocabulary does not
    include added tokens. Raises the same `UserError`s as `torch_backend`.
    """
    path = common.check_spec(spec)
    layout = mesh.layout
    family, config = hf_io.read_config(path, spec.type)
    if tokenizer is not None:
        config = network_source.adapt_config(spec, config, tokenizer)
    check_layout(spec, layout, config)
    common.check_recomputation(spec, config.num_layers)
    common.check_compilable(spec, layout)
    common.check_fp8(spec)
    source = NetworkSource(spec, path, config)
    coordinates = mesh.get_coordinates(mesh.ranks[0])
    network = source.build_network(RankCoordinates(layout, coordinates))
    whole = network if layout.num_devices == 1 else source.build_network(None)
    network.repeats_prefixes = layout.context > 1
    shapes = network_source.read_shapes(whole)
    # Count the elements of each parameter that the rank holds.
    slices = compute_holdings(shapes, config, layout, coordinates, tied=source.is_tied)
    held = {}
    for name, where in slices.items():
        held[name] = math.prod(part.stop - part.start for part in where)
    parameters = find_canonical_parameters(whole)
    trained = {name for name, stored in parameters.items() if stored.requires_grad}
    return {
        "family": family.name,
        **_describe_network(network, config, spec, layout, device),
        "num_parameters": sum(math.prod(shape) for shape in shapes.values()),
        "num_trainable": sum(math.prod(shapes[name]) for name in trained),
        "held_parameters": sum(held.values()),
        "held_trainable": sum(size for name, size in held.items() if name in trained),
        "dtype": spec.dtype,
        "notes": [],
    }


def _describe_network(
    network: Transformer,
    config: TransformerConfig,
    spec: ModelSpec,
    layout: Layout,
    device: torch.device,
) -> dict[str, Any]:
    """Return facts about one rank's part of the network.

    The keys are `vocab_size`, `num_layers`, `sizes` (most fields of
    `weft.planner.memory.NetworkShape`) and `shared_prompts`. The last contains `longest`, the
    maximum length in tokens of sequences that can share a prefix, and `in_training`, which is True
    if training can share prefixes too.
    """
    sizes = compute_sizes(network) | {
        "row_ranks": layout.tensor if spec.sequence_parallel else 1,
        "shards": layout.fsdp,
        "copies_attention": _is_attention_copied(network, spec, device),
    }
    aux_loss_weight = choose_aux_loss_weight(config, spec.router_aux_loss_coef)
    in_training = not uses_dropout(network, spec) and not aux_loss_weight
    return {
        "vocab_size": config.vocab_size,
        "num_layers": config.num_layers,
        "sizes": sizes,
        "shared_prompts": {
            "longest": _find_longest_shared(network, device),
            "in_training": in_training,
        },
    }


def _is_attention_copied(network: Transformer, spec: ModelSpec, device: torch.device) -> bool:
    """Return whether a layer keeps the output of attention both with and without padding.

    This happens only on CPUs, for attention that weft's kernels do not support, which is computed
    in padded rectangles (`weft.models.attention.rectangles`). Torch's fused attention then keeps
    its padded output, and the output projection keeps a copy without padding, unless all its
    adapters have dropout and keep a copy after dropout instead. With a soft cap or dropout of
    attention weights, torch's fused attention is not used, and the padded output is not kept.
    """
    config = network.config
    if device.type != "cpu" or config.attention_softcap is not None or config.attention_dropout:
        return False
    heads = torch.empty(0, 1, config.head_dim, dtype=DTYPES[choose_dtype(spec)])
    if kernels.serves_attention(heads, heads, heads):
        return False
    for block in network.blocks:
        projection = cast(Block, block).attention.o
        rates = [adapter.rate for adapter in lora.list_adapters(projection)]
        if projection.weight.requires_grad or not all(rates):
            return True
    return False


def uses_dropout(network: Transformer, spec: ModelSpec) -> bool:
    """Return whether training uses dropout."""
    rates = (
        network.config.embed_dropout,
        network.config.hidden_dropout,
        network.config.attention_dropout,
    )
    return (
        any(rates) or spec.residual_dropout > 0.0 or (spec.has_adapters and spec.lora.dropout > 0.0)
    )


def _find_longest_shared(network: Transformer, device: torch.device) -> int:
    """Return the maximum length in tokens of a sequence that can share its prefix with others.

    A shared prefix is computed only once. Returns 0 if the network cannot share prefixes.
    """
    windows = (window for window in network.config.windows if window is not None)
    longest = min(windows, default=sys.maxsize)
    return longest if network.can_share_prefixes(longest, device) else 0


def _count_adapter_elements(network: Transformer) -> int:
    """Return the number of elements per token that a layer's adapters keep for the backward pass.

    The result is an average over layers, rounded up. It includes:

    - the low-rank product of each adapter
    - for an adapter with dropout, its input after dropout, and a dropout mask (1 byte per element)
    - for an adapter without dropout on the last matrix of an MLP, the input of this matrix, which
      would otherwise be recomputed

    Norm outputs that are not kept because of the adapters' dropout are subtracted
    (`_count_dropped_elements`).
    """
    experts = network.config.experts
    num_elements = sum(
        _count_read_elements(block) - _count_dropped_elements(block) for block in network.blocks
    )
    for adapter in lora.find_adapters(network).values():
        rank, inputs = adapter.lora_a.shape[-2:]
        per_row = rank
        if adapter.rate:
            per_row += inputs + inputs // 4
        rows_per_token = 1
        if experts is not None and adapter.lora_a.dim() > 2:
            rows_per_token = experts.top_k
        num_elements += rows_per_token * per_row
    return -(-num_elements // len(network.blocks))


def _is_fused(block: torch.nn.Module) -> bool:
    """Return whether the block has a fused MLP.

    A fused MLP recomputes its activation in the backward pass. Experts store the activation
    instead, so a block with experts is not fused.
    """
    return isinstance(block, Block) and isinstance(block.mlp, MLP)


def _count_read_elements(block: torch.nn.Module) -> int:
    """Return the number of elements per token that adapters on an MLP's last matrix save as input.

    Adapters with dropout are not counted here, because they save the input after dropout instead.
    The result is 0 for a block without an MLP, such as a block with experts.
    """
    if not isinstance(block, Block) or not isinstance(block.mlp, MLP):
        return 0
    adapters = lora.list_adapters(block.mlp.down)
    return sum(int(adapter.lora_a.shape[-1]) for adapter in adapters if not adapter.rate)


def _count_dropped_elements(block: torch.nn.Module) -> int:
    """Return the number of elements per token that `block` need not keep for the backward pass.

    These are the elements of its norm outputs. A norm output need not be kept if all layers that
    read it have adapters with dropout, because each of these adapters keeps its own copy after
    dropout.
    """
    if not isinstance(block, Block) or not isinstance(block.mlp, MLP):
        return 0
    readers: list[Linear] = [
        block.attention.qkv,
        block.mlp.gate_up if block.mlp.down.gated else block.mlp.up,
    ]
    num_elements = 0
    for layer in readers:
        rates = [adapter.rate for adapter in lora.list_adapters(layer)]
        if len(rates) == len(layer.parts) and all(rates):
            num_elements += layer.weight.shape[1]
    return num_elements


def compute_sizes(network: Transformer) -> dict[str, int]:
    """Return fields of `weft.planner.memory.NetworkShape` for the network, by name.

    All fields except `parameters`, `trainable`, `row_ranks`, `shards` and `copies_attention` are
    included.
    """
    config = network.config
    is_lm = network.kind == "lm"
    if config.experts is None:
        inner = config.intermediate_size
    else:
        inner = config.experts.top_k * config.experts.intermediate_size
    rounded, rounded_bytes = quantized.count_bytes(network)
    return {
        "layers": len(network.blocks),
        "hidden": config.hidden_size,
        "query": config.num_heads * config.head_dim,
        "key": config.num_kv_heads * config.head_dim,
        "inner": inner,
        "vocab": config.vocab_size if is_lm and network.is_last_stage else 1,
        "embedding": network.embed.weight.numel() if network.is_first_stage else 0,
        "gated": config.gated,
        "tied": config.tied and is_lm and network.is_first_stage and network.is_last_stage,
        "adapters": _count_adapter_elements(network),
        "fused": all(_is_fused(block) for block in network.blocks),
        "capped": is_lm and config.final_softcap is not None,
        "rounded": rounded,
        "rounded_bytes": rounded_bytes,
    }


def compute_cost(network: Transformer, *, frozen: bool) -> TokenCost:
    """Return the `TokenCost` of this rank's part of the network.

    With `frozen`, the matrices need no gradient, so a backward pass costs only as much as a forward
    pass. A load-balancing loss makes the last layer process more tokens; this additional work is
    not counted.
    """
    config = network.config
    is_lm = network.kind == "lm"
    tied = config.tied and is_lm and network.is_last_stage
    matrices = common.count_product_parameters(
        network, network.embed if tied else network, tied=tied
    )
    matrices -= _count_idle_parameters(network, config)
    # Count the matrices that process only the rows of the outputs: the head, and the part of the
    # last layer after attention. With mean pooling, the outputs need all tokens.
    late = 0
    if network.is_last_stage:
        late += network.projection.weight.numel() if is_lm else network.score.weight.numel()
    if network.is_last_stage and network.pooling == "last":
        last = cast(Block, network.blocks[-1])
        late += cast(int, cast(Any, last.attention.o.weight).numel())
        late += sum(p.numel() for p in last.mlp.parameters() if p.dim() >= 2)
        late -= _count_idle_parameters(last, config)
    attention = len(network.blocks) * config.num_heads * config.head_dim
    return TokenCost(matrices, attention, backward=1 if frozen else 2, late=late)


def save_model(
    directory: Path,
    tensors: Mapping[str, Tensor],
    network: Transformer,
    spec: ModelSpec,
    config: TransformerConfig,
    tokenizer: Tokenizer,
) -> None:
    """Write the model with merged adapters, and the adapters alone in the subdirectory `adapter/`.

    The adapter's files contain the name of the base model. With prefix tuning, only the prefix and
    a value or score head are written, with the name of the base model.
    """
    config = hf_io.with_ids(config, **common.list_special_ids(tokenizer, network.kind))
    dtype = DTYPES[choose_dtype(spec)]
    head = network.kind
    if config.prefix_tokens:
        prefix_io.save_prefix(
            directory,
            tensors,
            config,
            head,
            base=_resolve_base_path(str(spec.path)),
            score=families.get(config.family).score,
        )
        hf_io.write_generation(directory, common.read_generation_config(spec))
        hf_io.save_config(directory, config, head, dtype=dtype, pooling=network.pooling)
        return
    if spec.has_adapters:
        scales = lora.collect_scales(network)
        peft_io.save_adapter(
            directory / "adapter",
            tensors,
            scales,
            config,
            head,
            base=str(spec.path),
            dropout=spec.lora.dropout,
            save_embeddings=spec.trains_embeddings,
        )
        tensors = lora.merge(tensors, scales)
    hf_io.write_generation(directory, common.read_generation_config(spec))
    hf_io.save(directory, tensors, config, head, dtype=dtype, pooling=network.pooling)


def _resolve_base_path(path: str) -> str:
    """Return the location of a model or, if `path` is a trained prefix, of its base model.

    The result is a hub name or an absolute path, so it is valid in any working directory.
    """
    prefix = read_prefix(path)
    base = path if prefix is None else prefix.base
    if Path(base).expanduser().is_dir():
        return str(Path(base).expanduser().resolve())
    return base


def _count_idle_parameters(module: nn.Module, config: TransformerConfig) -> int:
    """Return the number of expert parameters that are not used for a token.

    A token uses `top_k` experts. With expert parallelism, the token's experts can be on other
    ranks. However, this rank receives about as many tokens from other ranks as it sends to them, so
    `top_k` of its experts are counted as used.
    """
    if config.experts is None:
        return 0
    num_idle = 0
    for stack in module.modules():
        if isinstance(stack, ExpertStack):
            num_parameters = sum(p.numel() for p in stack.parameters())
            num_idle += num_parameters - num_parameters * config.experts.top_k // len(stack.weight)
    return num_idle
