"""Preparation of a network for training, in the order in which it is applied.

- dropout of the outputs of attention and MLP, which can increase with the depth of the layer
- frozen layers, and embeddings that are trained in addition to adapters
- blocks that torch compiles, without their attention
- gradients of linear layers that are added directly to the `grad` of float32 master weights
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from weft import kernels
from weft.errors import ConfigError
from weft.kernels import GradientSum
from weft.models.network.block import Block, CompiledParts
from weft.models.network.linear import Linear
from weft.models.network.lora import list_adapters
from weft.models.network.moe import MoE
from weft.models.network.transformer import Transformer

EMBEDDINGS = ("embed", "positions", "embed_in")  # modules before the first block


def set_residual_dropout(network: Transformer, rate: float, *, ramp: bool) -> None:
    """Set the dropout rate of the outputs of attention and MLP to `rate` in every layer.

    With `ramp`, the rate of layer i of L is i / (L - 1) * rate: it increases from 0 in the first
    layer to `rate` in the last (Zhou et al. 2023, "LIMA", section 3).
    """
    last = network.config.num_layers - 1
    for block in network.blocks:
        assert isinstance(block, Block)
        block.dropout = rate * block.layer / last if ramp and last else rate


def freeze(network: Transformer, first: int, dtype: torch.dtype | None = None) -> None:
    """Freeze the embeddings and the first `first` blocks of the whole network.

    If `dtype` is set, the frozen weights are converted to it, because frozen weights need no
    float32 copy for the optimizer. A tied output matrix is frozen together with the embedding.
    """
    blocks = []
    for block in network.blocks:
        if isinstance(block, Block) and block.layer < first:
            blocks.append(block)
    for module in (*(getattr(network, name, None) for name in EMBEDDINGS), *blocks):
        if isinstance(module, nn.Module):
            module.requires_grad_(False)
            if dtype is not None:
                module.to(dtype)


def train_embeddings(network: Transformer) -> None:
    """Make the embedding and output matrices trainable in addition to adapters.

    This is needed for newly added tokens.
    """
    for name in ("embed", "head"):
        module = getattr(network, name, None)
        if isinstance(module, nn.Module):
            module.requires_grad_(True)


def count_frozen_layers(first: int | None, last: int | None, num_layers: int) -> int | None:
    """Return how many of the first layers are frozen: `first`, or all but the last `last` layers.

    Returns None if `first` and `last` are both None. Raises `ConfigError` if `first` or `last` is
    larger than `num_layers`.
    """
    if first is not None and first > num_layers:
        raise ConfigError(
            f"freeze_layers={first}: the network has {num_layers} layers; write 0 to {num_layers}"
        )
    if last is not None and last > num_layers:
        raise ConfigError(
            f"train_last_layers={last}: the network has {num_layers} layers; write 0 to "
            f"{num_layers}"
        )
    return num_layers - last if last is not None else first


def compile_blocks(
    network: Transformer, backend: Any = "inductor", fp8: kernels.Fp8Product | None = None
) -> None:
    """Compile the parts of each block before and after attention.

    The compiled parts are used in passes without cached keys. They are compiled at the first use,
    once for all blocks of the same structure and for any number of tokens. Attention and experts
    keep their own kernels, so only the part before attention is compiled in a block with experts.
    For matrices in compiled parts, autograd computes the gradients as usual. These gradients are
    not added directly to master weights.

    Hooks on modules of a block may call code that cannot be compiled; it then runs between the
    compiled parts. With `fp8`, compiled products use fp8 if the sizes of the matrix allow this.
    """
    for block in network.blocks:
        assert isinstance(block, Block)
        whole = not any(part._forward_pre_hooks or part._forward_hooks for part in block.modules())
        into, out = (
            kernels.compiled_by_rows(part, backend, whole=whole)
            for part in (Block.compute_heads, Block.compute_output)
        )
        experts = isinstance(block.mlp, MoE)
        block.compiled = CompiledParts(into, Block.compute_output if experts else out)
        for layer in [block.attention.qkv] if experts else block.modules():
            if fp8 is not None and isinstance(layer, Linear) and fp8.supports(layer.weight):
                layer.narrow = fp8


def add_gradients_to(network: nn.Module, masters: Mapping[str, nn.Parameter]) -> None:
    """Make layers add their weight gradients to the `grad` of the float32 master weights `masters`.

    This applies to linear layers, their adapters and the output layer. `masters` maps the names of
    the network's parameters to the master weights. All other gradients are added to the `grad` of
    the network's own parameters as usual. For example, a tied matrix has two gradients: that of the
    output layer is added to the master weight, and that of the embedding to the parameter.

    In the compiled parts of blocks, autograd still computes the gradients. Do not use this if a
    backward pass visits a layer twice, as in a pipeline that splits the backward pass, because each
    visit would add the gradient.
    """
    sums: dict[Tensor, GradientSum] = {}
    for name, p in network.named_parameters():
        if name in masters:
            sums[p] = GradientSum(masters[name])
    compiled = set()
    for block in network.modules():
        if isinstance(block, Block) and block.compiled is not None:
            for part in block.modules():
                compiled.add(part)
    for module in network.modules():
        if isinstance(module, Linear) and module not in compiled:
            module.gradient_sum = sums.get(module.weight)
            for adapter in list_adapters(module):
                adapter.gradient_sums = sums.get(adapter.lora_a), sums.get(adapter.lora_b)
        elif isinstance(module, Transformer) and module.is_last_stage and module.kind == "lm":
            module.head.gradient_sum = sums.get(module.projection.weight)
