"""Decode steps in one call, each on the tokens that the one before drew."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from weft.models.native import library
from weft.models.native.block import pointer
from weft.models.native.forward import Prepared, failure
from weft.models.packed import Cached, Packed


class _Draws(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("head", "bias", "uniforms", "is_stop", "early", "ids", "logprobs")),
        ("temperature", ctypes.c_double),
        ("steps", ctypes.c_long),
    )


def run_ahead(
    at: Prepared, x: Packed, uniforms: Tensor, is_stop: Tensor, early: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Tokens int64 and log-probs float32, each [n, R]: of the decode step `x` of slots 0 .. R - 1, and of those that follow it,
    each on the tokens that the one before drew. They are drawn as `weft.models.native.logits.draw` does, from logits /
    `temperature`, by `uniforms` [steps, R], float64. n is `steps`, or fewer: a step that draws one of `is_stop`, bool [V], or
    has a log-prob that is not finite is the last. In its first `early` steps, int64 [R], a row draws none of `is_stop`, which
    count for its log-probs all the same. The cache has room for all, and counts the tokens of the first.

    Raises `IndexError` for a token outside the vocabulary, `MemoryError` where there is too little.
    """
    projection, (steps, rows) = at.network.projection, uniforms.shape
    ids, logprobs = torch.empty(steps, rows, dtype=torch.int64), torch.empty(steps, rows)
    given = projection.weight, projection.bias, uniforms, is_stop, early, ids, logprobs
    assert isinstance(x.attention, Cached)
    _, _kept = at.begin(x, x.attention, None, steps)
    count = library.call("weft_decode_ahead", at.blocks, _Draws(*map(pointer, given), temperature, steps), at.step)
    if count < 0:
        raise failure(count, x, None, at.step)
    return ids[:count], logprobs[:count]
