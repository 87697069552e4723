"""How q k^T becomes attention weights: what every form of attention is told beside queries and keys."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scores:
    """softmax(softcap * tanh(scale * q k^T / softcap)) over the keys in sight; without `softcap` softmax(scale * q k^T)."""

    scale: float
    window: int | None = None  # keys a position sees, itself included
    softcap: float | None = None
    dropout: float = 0.0  # of the weights, where a pass has noise
