"""A micro-batch, as a network is called with it."""

from __future__ import annotations

from dataclasses import dataclass

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
