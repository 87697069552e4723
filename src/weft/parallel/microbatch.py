"""A micro-batch, as a network is called with it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.algorithms.base import Output
from weft.models.network.packed import Packed
from weft.models.network.support import Support


@dataclass(frozen=True)
class Microbatch:
    """What `Transformer.forward` is called with, beside the states."""

    x: Packed
    want: frozenset[Output]
    temperature: float = 1.0
    support: Support | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.x.tokens)


def connected(loss: Tensor, outputs: Iterable[Tensor]) -> Tensor:
    """The loss, whose backward pass goes through the whole network, with gradients of zero, though
    no output counts in it.
    """
    return loss + sum(
        torch.where(torch.zeros_like(each, dtype=torch.bool), each, 0).sum() for each in outputs
    )
