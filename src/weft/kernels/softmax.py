"""Statistics of the softmax over rows of logits, and the gradient computed from them."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.kernels.cpu import library
from weft.kernels.cpu import rows as native
from weft.kernels.types import SoftmaxStatistics


def statistics(logits: Tensor, *, entropy: bool = False, best: bool = False) -> SoftmaxStatistics:
    """Return the softmax statistics of logits [R, V].

    The entropy of each row is computed only if `entropy` is True, and the most likely id only if
    `best` is True. If all logits of a row are minus infinity, the row's log-sum-exp is minus
    infinity and its entropy is 0.
    """
    if library.serves(logits):
        return native.statistics(logits, entropy=entropy, best=best)
    lse = torch.logsumexp(logits, dim=-1)
    entropies = None
    if entropy:
        z = torch.where(logits > -torch.inf, logits - lse[:, None], 0.0)
        entropies = -(torch.where(logits > -torch.inf, z.exp(), 0.0) * z).sum(-1)
    return SoftmaxStatistics(lse, entropies, logits.argmax(-1) if best else None)


def to_gradients(
    logits: Tensor,
    stats: SoftmaxStatistics,
    labels: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
) -> None:
    """Overwrite `logits` [R, V] with the gradient with respect to the logits.

    `grad_logprob` and `grad_entropy`, each [R], are the gradients with respect to the log-prob of
    each row's label and to each row's entropy. With p = softmax(logits), the result is grad_logprob
    * (onehot(label) - p) - grad_entropy * p * (log p + entropy).

    If the vocabulary is split over ranks, `logits` are those of this rank's ids, `stats` are those
    of the whole vocabulary, and a label below 0 is an id of another rank.
    """
    floats = [
        x for x in (logits, stats.lse, stats.entropy, grad_logprob, grad_entropy) if x is not None
    ]
    # The kernel writes to the logits, so they must be contiguous.
    if library.serves(*floats) and library.is_plain(labels) and logits.is_contiguous():
        native.to_gradients(logits, stats, labels, grad_logprob, grad_entropy)
        return
    z = logits - stats.lse[:, None]
    p = z.exp()
    grad_logits = p * -grad_logprob[:, None]
    if grad_entropy is not None:
        assert stats.entropy is not None
        grad_logits -= torch.where(
            p > 0.0, p * (grad_entropy[:, None] * (z + stats.entropy[:, None])), 0.0
        )
    own = torch.where(labels >= 0, grad_logprob, torch.zeros_like(grad_logprob))
    logits.copy_(grad_logits.scatter_add_(1, labels.clamp_min(0)[:, None], own[:, None]))
