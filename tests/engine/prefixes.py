"""Batches whose sequences begin alike, and a network in float64 that goes over them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.engine.common import batch_of
from weft.data.sample import SequenceSample
from weft.models.network.config import Rope, TransformerConfig
from weft.models.network.transformer import Transformer

Groups = list[tuple[int, list[int]]]
CONFIG = TransformerConfig(
    family="llama",
    vocab_size=300,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    max_positions=512,
    rope=Rope(dim=8, theta=10000.0),
    tied=True,
)


def network_of(config: TransformerConfig, head: Any = "lm") -> Transformer:
    torch.manual_seed(0)
    network = Transformer(config, head).double()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return network


def templated(sizes: Groups, templates: list[int], seed: int = 0) -> SequenceSample:
    """As `batch_of`; prompts begin with one of two templates, which begin alike themselves, as far
    as they are long enough.
    """
    batch, random = batch_of(sizes, seed), np.random.default_rng(seed + 1)
    common = random.integers(8, 300, 20)
    made = [
        np.concatenate([common[:6], random.integers(8, 300, 14)]),
        np.concatenate([common, random.integers(8, 300, 9)]),
    ]
    for prompt, which in zip(batch.sequences("prompt"), templates, strict=False):
        size = min(len(prompt), len(made[which]))
        prompt[:size] = torch.from_numpy(made[which][:size])
    return batch
