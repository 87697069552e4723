"""Softmax over rows of logits by weft's own CPU kernels, without a copy of the logits."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.kernels.cpu import library
from weft.kernels.types import SoftmaxStatistics


def statistics(logits: Tensor, *, entropy: bool = False, best: bool = False) -> SoftmaxStatistics:
    """Return the softmax statistics of float32 logits [R, V].

    The entropy of each row is computed only if `entropy` is True, and the most likely id only if
    `best` is True.
    """
    logits, (rows, size) = logits.contiguous(), logits.shape
    lse = logits.new_empty(rows)
    entropies = logits.new_empty(rows) if entropy else None
    ids = logits.new_empty(rows, dtype=torch.int64) if best else None
    library.call("weft_statistics", logits, lse, entropies, ids, rows, size)
    return SoftmaxStatistics(lse, entropies, ids)


def draw(logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one id per row of float32 logits [R, V]; return ids int64 [R] and log-probs float32 [R].

    The id is the first, in vocabulary order, whose cumulative probability exceeds the row's random
    number in `uniforms` [R]. To limit rounding errors, the sums of blocks of consecutive ids are
    added in float64.
    """
    x, (rows, size) = logits.contiguous(), logits.shape
    ids = torch.empty(rows, dtype=torch.int64)
    logprobs = torch.empty(rows)
    library.call("weft_draw", x, uniforms.double().contiguous(), ids, logprobs, rows, size)
    return ids, logprobs


def to_gradients(
    logits: Tensor,
    stats: SoftmaxStatistics,
    labels: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
) -> None:
    """Overwrite `logits` [R, V] with the gradient with respect to the logits.

    `grad_logprob` and `grad_entropy`, each [R], are the gradients with respect to the log-prob of
    each row's label and to each row's entropy.
    """
    assert grad_entropy is None or stats.entropy is not None
    assert (
        all(x is None or x.dtype == logits.dtype for x in (grad_logprob, grad_entropy))
        and labels.dtype == torch.int64
    )
    given = (
        labels.contiguous(),
        grad_logprob.contiguous(),
        None if grad_entropy is None else grad_entropy.contiguous(),
    )
    library.call("weft_logit_gradients", logits, stats.lse, stats.entropy, *given, *logits.shape)
