"""Inputs of one layer's attention."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from weft.kernels import AttentionSpec
from weft.models.network.dropout import TokenDropout


@dataclass(frozen=True)
class AttentionInputs:
    """Inputs of one layer's attention; queries and keys are already rotated.

    The number of heads is a multiple of kv_heads. Query head h reads key-value head h // (heads /
    kv_heads).
    """

    q: Tensor  # [T, heads, dim]
    k: Tensor  # [T, kv_heads, dim]
    v: Tensor  # [T, kv_heads, dim]
    spec: AttentionSpec
    layer: int  # number in the whole network, from 0
    dropout: TokenDropout | None = None

    @property
    def has_dropout(self) -> bool:
        """True if attention weights are dropped in this pass."""
        return self.dropout is not None and self.spec.dropout > 0.0
