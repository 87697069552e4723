"""Weights that make up for a sampler whose log-probs are not those of the network that is trained.

Another kernel, dtype or engine samples from a slightly different policy. With w = pi_trainer(token)
/ pi_sampler(token), both of the same weights, the policy loss of a token is multiplied by

    token_truncate      min(w, high)                                      Yao et al. 2025, "Your Efficient RL Framework Secretly
                                                                          Brings You Off-Policy RL Training": TIS
    token_mask          w where low <= w <= high, else 0                  IcePop (Ling team 2025)
    sequence_truncate   min(W, high), W the product of w over a completion
    sequence_mask       W where low <= W <= high, else 0                  Liu et al. 2025, "When Speed Kills Stability": MIS

The names are TRL's (`vllm_importance_sampling_mode`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from jaxtyping import Float, Int

from weft.algorithms.advantages import segment_sums
from weft.algorithms.base import LOG_RATIO_BOUND
from weft.errors import unknown_name

Vector = npt.NDArray[np.float64]
Index = npt.NDArray[np.int64]

CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def sampler_weights(
    trainer: Float[Vector, "T"],
    sampler: Float[Vector, "T"],
    mask: Float[Vector, "T"],
    lengths: Int[Index, "S"],
    correction: str,
    high: float,
    low: float | None = None,
) -> tuple[Float[Vector, "T"], Float[Vector, "T"]]:
    """(weight, ratio before any bound) of each token from its two log-probs, nats; tokens with mask
    0 count nowhere and weigh 1.

    `low` None is no lower bound. Truncation has none: a small weight is right as it is. Log-ratios
    are cut to +-20 before `exp`.
    """
    if correction not in CORRECTIONS:
        raise unknown_name("sampler correction", correction, CORRECTIONS)
    gap = np.where(mask != 0, trainer - sampler, 0.0)
    if correction.startswith("sequence"):
        gap = np.repeat(segment_sums(gap, lengths), lengths)
    ratio = np.exp(np.clip(gap, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    if correction.endswith("truncate"):
        weight = np.minimum(ratio, high)
    else:
        weight = np.where((ratio <= high) & (ratio >= (0.0 if low is None else low)), ratio, 0.0)
    return np.where(mask != 0, weight, 1.0), ratio
