"""Selection of the tokens whose log-prob and advantage covary most (Cui et al. 2025).

The entropy of a softmax policy falls with the covariance of log pi(token) and advantage ("The
Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", arXiv:2505.22617), and a
few tokens account for most of it. Clip-Cov removes some of these tokens from the loss, KL-Cov adds
a penalty to them. The selection is a statistic of the whole batch, so it is made before the first
update, from the log-probs of the policy that sampled. (The implementations of the authors and of
verl select within each micro-batch.)
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from jaxtyping import Bool, Float

Vector = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

METHODS = ("none", "clip", "kl")


def compute_covariances(
    logprobs: Float[Vector, "T"], advantages: Float[Vector, "T"], mask: Float[Vector, "T"]
) -> Float[Vector, "T"]:
    """Return (log pi - mean) * (advantage - mean) of each token with mask 1, -inf elsewhere."""
    count = max(float(mask.sum()), 1.0)
    means = [(values * mask).sum() / count for values in (logprobs, advantages)]
    return np.where(mask != 0, (logprobs - means[0]) * (advantages - means[1]), -np.inf)


def select_clip_cov_rows(
    covariance: Float[Vector, "T"], share: float, low: float, high: float, order: Float[Vector, "T"]
) -> Bool[Flags, "T"]:
    """Return the tokens that Clip-Cov removes from the loss, bool [T].

    Selects `share` of all trained tokens, at least one, from those with covariance in [low, high].
    `order` has one random number per token; candidates with the smallest numbers are selected.
    """
    chosen = np.zeros(len(covariance), dtype=np.bool_)
    able = np.flatnonzero((covariance >= low) & (covariance <= high))
    count = max(int(share * np.isfinite(covariance).sum()), 1)
    chosen[able[np.argsort(order[able], kind="stable")[:count]]] = True
    return chosen


def select_kl_cov_rows(covariance: Float[Vector, "T"], share: float) -> Bool[Flags, "T"]:
    """Return the tokens that KL-Cov penalises, bool [T].

    Selects the `share` of all trained tokens, at least one, with the largest covariance.
    """
    chosen = np.zeros(len(covariance), dtype=np.bool_)
    trained = int(np.isfinite(covariance).sum())
    if trained:
        chosen[np.argsort(-covariance, kind="stable")[: max(int(share * trained), 1)]] = True
    return chosen
