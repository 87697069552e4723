"""Micro-batch, as the pipeline passes it to a network."""

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
    """Arguments of `Transformer.forward` for one micro-batch, except the hidden states."""

    x: Packed
    want: frozenset[Output]
    temperature: float = 1.0
    support: SamplingSupport | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.x.tokens)


def connect_outputs(loss: Tensor, outputs: Iterable[Tensor]) -> Tensor:
    """Return a loss with the value of `loss` whose backward pass also runs through `outputs`.

    The gradients of the outputs are zero. Used if the loss does not depend on the outputs: the
    backward pass must run through the whole network nevertheless, because other ranks wait for this
    rank's gradients.
    """
    return loss + sum(
        torch.where(torch.zeros_like(each, dtype=torch.bool), each, 0).sum() for each in outputs
    )
