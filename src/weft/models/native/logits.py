"""Softmax over rows of logits by weft's own kernels: each row is read from the cache, and no copy of it is made."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.models.native import library


@dataclass(frozen=True)
class Statistics:
    """Of the softmax over each row."""

    lse: Tensor  # float32 [R]: log of the sum of exp
    entropy: Tensor | None  # float32 [R], in nats
    best: Tensor | None  # int64 [R]: the first of the likeliest ids


def statistics(logits: Tensor, *, entropy: bool = False, best: bool = False) -> Statistics:
    """Of float32 logits [R, V]."""
    logits, (rows, size) = logits.contiguous(), logits.shape
    lse = logits.new_empty(rows)
    entropies = logits.new_empty(rows) if entropy else None
    ids = logits.new_empty(rows, dtype=torch.int64) if best else None
    library.call("weft_statistics", logits, lse, entropies, ids, rows, size)
    return Statistics(lse, entropies, ids)


def draw(logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """(ids int64 [R], their log-probs float32 [R]) of float32 logits [R, V]: each row's first id, in vocabulary order, whose
    cumulative probability exceeds the row's number of `uniforms` [R]; sums over blocks of ids are float64."""
    x, (rows, size) = logits.contiguous(), logits.shape
    ids, logprobs = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    library.call("weft_draw", x, uniforms.double().contiguous(), ids, logprobs, rows, size)
    return ids, logprobs


def to_gradients(
    logits: Tensor, found: Statistics, labels: Tensor, by_logprob: Tensor, by_entropy: Tensor | None
) -> None:
    """Make logits [R, V] their gradients, in their place, given those of each row's log-prob of its label and of its entropy,
    each [R]."""
    assert by_entropy is None or found.entropy is not None
    assert all(x is None or x.dtype == logits.dtype for x in (by_logprob, by_entropy)) and labels.dtype == torch.int64
    given = (labels.contiguous(), by_logprob.contiguous(), None if by_entropy is None else by_entropy.contiguous())
    library.call("weft_logit_gradients", logits, found.lse, found.entropy, *given, *logits.shape)
