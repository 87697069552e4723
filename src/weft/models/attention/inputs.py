"""Inputs of one layer's attention."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from weft.kernels import AttentionSpec
from weft.models.network.dropout import TokenDropout


@dataclass(frozen=True)
class AttentionInputs:
    """Inputs of one layer's attention: queries, keys and values, and the parameters of attention.

    `q` is [T, heads, dim]; `k` and `v` are [T, kv_heads, dim], and heads is a multiple of kv_heads.
    Query head h uses key-value head h // (heads / kv_heads). Rotary positions are already applied
    to `q` and `k`. `layer` is the index of the layer in the whole network.
    """

    q: Tensor  # [T, heads, dim]
    k: Tensor  # [T, kv_heads, dim]
    v: Tensor  # [T, kv_heads, dim]
    spec: AttentionSpec
    layer: int  # number in the whole network, from 0
    dropout: TokenDropout | None = None

    @property
    def has_dropout(self) -> bool:
        """True if dropout is applied to attention weights in this pass."""
        return self.dropout is not None and self.spec.dropout > 0.0
