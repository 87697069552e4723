"""Scores of completions for preference losses, computed from the log-probs of trained tokens."""

from __future__ import annotations

import array_api_compat
from jaxtyping import Float

from weft.algorithms.base import Array, RowBatch, Stat, Sum, fixed

# Tolerance of sums of log-probs, in units of the last place: layouts sum in different orders.
ROUNDING = 8.0


def compute_completion_scores(
    logprobs: Float[Array, "N"], reference: Float[Array, "N"] | None, batch: RowBatch
) -> tuple[Float[Array, "S"], Float[Array, "S"]]:
    """Return (scores, summed log-probs) of completions over their trained tokens, [S] each.

    A score is the sum of log pi - log ref or, without a reference, of log pi. The summed log-probs
    have no gradient. The reference is subtracted from each token's log-prob rather than from the
    sum, which reduces rounding errors.
    """
    xp = array_api_compat.array_namespace(logprobs)
    each = logprobs if reference is None else logprobs - reference
    sums = batch.sum(xp.where(batch.mask != 0, each, xp.zeros_like(each)) * batch.mask)
    return sums, batch.sum(fixed(logprobs) * batch.mask)


def divide_by_tokens(sums: Float[Array, "S"], batch: RowBatch) -> Float[Array, "S"]:
    """Return the sums divided by each completion's number of trained tokens, [S]."""
    xp = array_api_compat.array_namespace(sums)
    return sums / xp.clip(batch.lengths, 1.0, None)


def is_above(one: Array, other: Array, terms: Array) -> Array:
    """Return whether `one` exceeds `other` by more than rounding error, elementwise.

    The rounding error depends on the magnitude of the values from which `one` and `other` were
    computed. `terms` has values of this magnitude. The tolerance is 8 eps |terms|, where eps is the
    machine epsilon of the dtype. It is needed at the first step, when the policy equals its
    reference: the difference of their log-probs is then only rounding error, and says nothing about
    which answer is preferred.
    """
    xp = array_api_compat.array_namespace(one, other, terms)
    return one - other > ROUNDING * float(xp.finfo(terms.dtype).eps) * xp.abs(terms)


def compute_pair_stats(
    rewards: tuple[Array, Array], logps: tuple[Array, Array], terms: tuple[Array, Array]
) -> dict[str, Stat]:
    """Return the metrics of P pairs of completions.

    `rewards`, `logps` and `terms` each consist of two arrays [P], the first for the better and the
    second for the worse completions. A pair counts as correctly ordered if the better completion's
    reward is higher by more than rounding error (see `is_above`). The rounding error is estimated
    from the magnitude of `terms`, the values from which the rewards were computed, such as beta *
    log pi.
    """
    xp = array_api_compat.array_namespace(*rewards)
    count = float(rewards[0].shape[0])
    right = xp.astype(is_above(*rewards, xp.abs(terms[0]) + xp.abs(terms[1])), rewards[0].dtype)
    return {
        "rewards/chosen": Sum(xp.sum(rewards[0]), count),
        "rewards/rejected": Sum(xp.sum(rewards[1]), count),
        "rewards/margins": Sum(xp.sum(rewards[0] - rewards[1]), count),
        "rewards/accuracies": Sum(xp.sum(right), count),
        "logps/chosen": Sum(xp.sum(logps[0]), count),
        "logps/rejected": Sum(xp.sum(logps[1]), count),
    }
