"""Micro-batch, as it is passed to a network."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.algorithms.base import Output
from weft.models.network.packed import Packed
from weft.models.network.support import SamplingSupport


@dataclass(frozen=True)
class Microbatch:
    """Micro-batch: the arguments of `Transformer.forward`, except the hidden states."""

    x: Packed
    want: frozenset[Output]
    temperature: float = 1.0
    support: SamplingSupport | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.x.tokens)


def connect_outputs(loss: Tensor, outputs: Iterable[Tensor]) -> Tensor:
    """Return the loss, connected to `outputs` so that the backward pass visits the whole network.

    The added gradients are zero. Used if no output contributes to the loss.
    """
    return loss + sum(
        torch.where(torch.zeros_like(each, dtype=torch.bool), each, 0).sum() for each in outputs
    )
