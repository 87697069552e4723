"""Partial training of a network: freezing of first layers, training of embeddings with adapters.

Also dropout of the layers' outputs that increases with depth.
"""

from __future__ import annotations

import torch
from torch import nn

from weft.errors import ConfigError
from weft.models.network.block import Block
from weft.models.network.transformer import Transformer

EMBEDDINGS = ("embed", "positions", "embed_in")  # modules before the first block


def freeze(network: Transformer, first: int, dtype: torch.dtype | None = None) -> None:
    """Freeze the embeddings and the first `first` blocks, by their numbers in the whole network.

    They are converted to `dtype`, since they have no master weights. A tied output matrix is the
    embedding, so it is frozen too.
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
    """Train the whole embedding and output matrix in addition to adapters, for added tokens."""
    for name in ("embed", "head"):
        module = getattr(network, name, None)
        if isinstance(module, nn.Module):
            module.requires_grad_(True)


def count_frozen_layers(first: int | None, last: int | None, num_layers: int) -> int | None:
    """Return the number of first blocks that are frozen: `first`, or all but `last`; None for none.

    Raises `ConfigError` if the network has fewer layers.
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
    """Set the dropout of the outputs of attention and MLP to `rate` in every layer.

    With `ramp`, layer i of L has i / (L - 1) * rate (Zhou et al. 2023, "LIMA", section 3): 0 in the
    first layer, `rate` in the last.
    """
    last = network.config.num_layers - 1
    for block in network.blocks:
        assert isinstance(block, Block)
        block.dropout = rate * block.layer / last if ramp and last else rate
