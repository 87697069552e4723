"""Selection of tokens whose log-prob and advantage have a high covariance (Cui et al. 2025).

The higher the covariance of log pi(token) and advantage, the faster the entropy of a softmax policy
falls ("The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models",
arXiv:2505.22617), and a few tokens account for most of the covariance. Clip-Cov removes some of
these tokens from the loss, and KL-Cov adds a penalty to their loss. Since the covariance is a
statistic of the whole batch, the tokens are selected before the first update, from the log-probs of
the policy that sampled them. (The implementations of the authors and of verl select within each
micro-batch.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from jaxtyping import Bool, Float

from weft.options import option

Vector = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

METHODS = ("none", "clip", "kl")


@dataclass(frozen=True, kw_only=True)
class HighCovariance:
    """Options of the selection of tokens; `method` is "clip" for Clip-Cov or "kl" for KL-Cov."""

    method: str
    share: float = option(
        2e-4, "share of all tokens that covariance applies to", at_least=0.0, at_most=1.0
    )
    low: float = option(1.0, "smallest covariance for clip")
    high: float = option(5.0, "largest covariance for clip")


def compute_covariances(
    logprobs: Float[Vector, "T"], advantages: Float[Vector, "T"], mask: Float[Vector, "T"]
) -> Float[Vector, "T"]:
    """Return each token's contribution to the covariance of log-prob and advantage, [T].

    The contribution is (log pi - mean) * (advantage - mean), where the means are over tokens with
    mask 1. It is -inf for tokens with mask 0.
    """
    count = max(float(mask.sum()), 1.0)
    means = [(values * mask).sum() / count for values in (logprobs, advantages)]
    return np.where(mask != 0, (logprobs - means[0]) * (advantages - means[1]), -np.inf)


def select_clip_cov_rows(
    covariance: Float[Vector, "T"], share: float, low: float, high: float, order: Float[Vector, "T"]
) -> Bool[Flags, "T"]:
    """Return the mask of the tokens that Clip-Cov removes from the loss, bool [T].

    Candidates are the tokens with a covariance in [`low`, `high`]. The number of removed tokens is
    at most `share` times the number of trained tokens, or 1 if this product is below 1. If there
    are more candidates, the choice is random: `order` has one random number per token, and the
    candidates with the smallest numbers are removed.
    """
    chosen = np.zeros(len(covariance), dtype=np.bool_)
    able = np.flatnonzero((covariance >= low) & (covariance <= high))
    count = max(int(share * np.isfinite(covariance).sum()), 1)
    chosen[able[np.argsort(order[able], kind="stable")[:count]]] = True
    return chosen


def select_kl_cov_rows(covariance: Float[Vector, "T"], share: float) -> Bool[Flags, "T"]:
    """Return the mask of the tokens that KL-Cov penalises, bool [T].

    These are the tokens with the largest covariance: a fraction `share` of all trained tokens, at
    least one.
    """
    chosen = np.zeros(len(covariance), dtype=np.bool_)
    trained = int(np.isfinite(covariance).sum())
    if trained:
        chosen[np.argsort(-covariance, kind="stable")[: max(int(share * trained), 1)]] = True
    return chosen
