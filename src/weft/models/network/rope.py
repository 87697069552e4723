"""Angles of rotary positions for each scaling scheme.

Angles are always computed in float32; their cosines and sines are returned in the requested dtype.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from weft.models.network.config import Rope

# Schemes in which a position's angles depend on the length of its sequence.
LENGTH_DEPENDENT_SCALINGS = ("dynamic", "longrope")


def compute_rotation(
    rope: Rope, positions: Tensor, lengths: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return (cos, sin), each [T, 1, dim / 2] in `dtype`, for `positions` int64 [T].

    `lengths`, int64 [T], is the length of each token's sequence. The schemes that depend on this
    length (dynamic and longrope) use the length of each sequence separately, so the results are the
    same whether sequences are packed or not.
    """
    frequencies, factor = _compute_frequencies(rope, lengths)
    angles = (positions[:, None].float() * frequencies)[:, None]
    cos = angles.cos()
    sin = angles.sin()
    if factor != 1.0:
        cos = cos * factor
        sin = sin * factor
    return cos.to(dtype), sin.to(dtype)


def _compute_frequencies(rope: Rope, lengths: Tensor) -> tuple[Tensor, float]:
    """Return the rotary frequencies in float32, and the factor by which cos and sin are multiplied.

    The frequencies are [dim / 2], or [T, dim / 2] if they depend on the `lengths` of the sequences.
    """
    exponents, unscaled = _compute_unscaled_frequencies(rope.theta, rope.dim, lengths.device)
    values = rope.values
    if rope.scaling == "none":
        return unscaled, 1.0
    if rope.scaling == "linear":
        return unscaled / values["factor"], 1.0
    if rope.scaling == "dynamic":
        return _scale_dynamic(rope, exponents, lengths), 1.0
    if rope.scaling == "llama3":
        return _scale_llama3(unscaled, values), 1.0
    if rope.scaling == "yarn":
        return _scale_yarn(rope, unscaled), values["attention_factor"]
    assert rope.scaling == "longrope", rope.scaling
    factors = torch.tensor([values["short_factor"], values["long_factor"]], device=lengths.device)
    is_long = (lengths > values["original"]).long()
    return unscaled / factors[is_long], values["attention_factor"]


@functools.lru_cache(maxsize=16)
def _compute_unscaled_frequencies(
    theta: float, dim: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the exponents 2 i / dim and the unscaled frequencies theta ** -(2 i / dim).

    Both are float32 [dim / 2]. The results are cached, because every decode step needs them.
    """
    exponents = torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim
    return exponents, 1.0 / theta**exponents


def _scale_dynamic(rope: Rope, exponents: Tensor, lengths: Tensor) -> Tensor:
    """Return the frequencies [T, dim / 2] of dynamic NTK-aware scaling (bloc97, 2023).

    If a sequence is longer than the trained length, the base of the frequencies increases with the
    length of the sequence.
    """
    factor = rope.values["factor"]
    original = rope.values["original"]
    ratio = lengths.clamp_min(original).float() / original
    base = rope.theta * (factor * ratio - (factor - 1)) ** (rope.dim / (rope.dim - 2))
    return 1.0 / base[:, None] ** exponents


def _scale_llama3(unscaled: Tensor, values: Mapping[str, Any]) -> Tensor:
    """Return the frequencies of Llama 3.1.

    Low frequencies are divided by `factor`, high frequencies are unchanged, and the transition
    between them is smooth.
    """
    low = values["low_freq_factor"]
    high = values["high_freq_factor"]
    factor = values["factor"]
    rotations = values["original"] * unscaled / (2 * math.pi)  # within the trained length
    smooth = ((rotations - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * unscaled / factor + smooth * unscaled


def _scale_yarn(rope: Rope, unscaled: Tensor) -> Tensor:
    """Return the frequencies of YaRN (Peng et al. 2023, section 3.2).

    High frequencies are unchanged, low frequencies are divided by `factor`, and the transition
    between them is linear.
    """
    values = rope.values

    def find_dimension(rotations: float) -> float:
        """Return the dimension pair that makes this many full turns within the trained length."""
        return (
            rope.dim
            * math.log(values["original"] / (rotations * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low = find_dimension(values["beta_fast"])
    high = find_dimension(values["beta_slow"])
    if values["truncate"]:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, rope.dim - 1)
    width = high - low if high != low else 0.001
    ramp = (
        (torch.arange(rope.dim // 2, device=unscaled.device, dtype=torch.float32) - low) / width
    ).clamp(0, 1)
    return unscaled / values["factor"] * ramp + unscaled * (1 - ramp)
