"""Settings of a network before training: frozen layers, trainable embeddings, and dropout.

Dropout of the outputs of attention and MLP can increase with the depth of the layer.
"""

from __future__ import annotations

import torch
from torch import nn

from weft.errors import ConfigError
from weft.models.network.block import Block
from weft.models.network.transformer import Transformer

EMBEDDINGS = ("embed", "positions", "embed_in")  # modules before the first block


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


def set_residual_dropout(network: Transformer, rate: float, *, ramp: bool) -> None:
    """Set the dropout rate of the outputs of attention and MLP to `rate` in every layer.

    With `ramp`, the rate of layer i of L is i / (L - 1) * rate: it increases from 0 in the first
    layer to `rate` in the last (Zhou et al. 2023, "LIMA", section 3).
    """
    last = network.config.num_layers - 1
    for block in network.blocks:
        assert isinstance(block, Block)
        block.dropout = rate * block.layer / last if ramp and last else rate
