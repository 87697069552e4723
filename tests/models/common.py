"""Small networks for the tests of this folder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.models import hf_io
from weft.models.config import TransformerConfig
from weft.models.packed import pack
from weft.models.transformer import Head, Transformer
from weft.registry import families


def tiny_config(name: str = "llama", **changes: Any) -> TransformerConfig:
    family = families.get(name)
    config: TransformerConfig = family.config({**family.tiny, **changes})
    return config


def tiny(
    name: str = "llama", head: Head = "lm", *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> Transformer:
    """A network with random values in every parameter, norms and biases included."""
    network = hf_io.init_random(tiny_config(name, **changes), head, seed=seed, dtype=dtype)
    generator = torch.Generator().manual_seed(seed + 100)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=dtype) * 0.1)
    return network


def sequences(lengths: list[int], *, vocab: int = 131, seed: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (n,), generator=generator) for n in lengths]


def last_states(network: torch.nn.Module, rows: list[torch.Tensor]) -> torch.Tensor:
    """The hidden state of each row's last token, computed whole and alone."""
    return torch.stack([network.hidden(pack([row]))[-1] for row in rows])
