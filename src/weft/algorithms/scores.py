"""What a preference loss compares: one score a completion, from the log-probs of its trained
tokens.
"""

from __future__ import annotations

import array_api_compat
from jaxtyping import Float

from weft.algorithms.base import Array, RowBatch, Stat, Sum, fixed

# units of the last place that a sum of log-probs may be off, as where another layout has added them
# up
ROUNDING = 8.0


def completion_scores(
    logprobs: Float[Array, "N"], reference: Float[Array, "N"] | None, batch: RowBatch
) -> tuple[Float[Array, "S"], Float[Array, "S"]]:
    """(sum of log pi - log ref, or of log pi without a reference, and the constant sum of log pi)
    over each completion's trained tokens.

    The difference to the reference is taken per token, where it is small, and then summed.
    """
    xp = array_api_compat.array_namespace(logprobs)
    each = logprobs if reference is None else logprobs - reference
    sums = batch.sum(xp.where(batch.mask != 0, each, xp.zeros_like(each)) * batch.mask)
    return sums, batch.sum(fixed(logprobs) * batch.mask)


def per_token(sums: Float[Array, "S"], batch: RowBatch) -> Float[Array, "S"]:
    """The sums divided by each completion's number of trained tokens."""
    xp = array_api_compat.array_namespace(sums)
    return sums / xp.clip(batch.lengths, 1.0, None)


def above(one: Array, other: Array, terms: Array) -> Array:
    """Whether `one` is above `other` by more than what rounding makes of two equal numbers, each a
    sum and difference of numbers as large as `terms` together: 8 units of their last place. At the
    first step a policy is its reference, and what is left of the difference of their log-probs says
    how ranks added up, not which answer is preferred.
    """
    xp = array_api_compat.array_namespace(one, other, terms)
    return one - other > ROUNDING * float(xp.finfo(terms.dtype).eps) * xp.abs(terms)


def pair_stats(
    rewards: tuple[Array, Array], logps: tuple[Array, Array], terms: tuple[Array, Array]
) -> dict[str, Stat]:
    """The metrics of pairs from (better, worse) rewards and log-probs, each [P].

    `terms` are as large as the numbers that the rewards are sums and differences of: a pair whose
    rewards are equal but for rounding (`above`) is not in order.
    """
    xp = array_api_compat.array_namespace(*rewards)
    count = float(rewards[0].shape[0])
    right = xp.astype(above(*rewards, xp.abs(terms[0]) + xp.abs(terms[1])), rewards[0].dtype)
    return {
        "rewards/chosen": Sum(xp.sum(rewards[0]), count),
        "rewards/rejected": Sum(xp.sum(rewards[1]), count),
        "rewards/margins": Sum(xp.sum(rewards[0] - rewards[1]), count),
        "rewards/accuracies": Sum(xp.sum(right), count),
        "logps/chosen": Sum(xp.sum(logps[0]), count),
        "logps/rejected": Sum(xp.sum(logps[1]), count),
    }
