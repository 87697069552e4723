"""Importance weights that correct for differences between the sampler and the trained network.

A sampler with another kernel, dtype or engine than the trainer samples from a slightly different
policy. To correct for this, the policy loss of each token is multiplied by a weight. With w =
pi_trainer(token) / pi_sampler(token), computed from the same parameters, the weight is

    token_truncate      min(w, high)
                        TIS: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
                        Off-Policy RL Training"
    token_mask          w if low <= w <= high, else 0
                        IcePop (Ling team 2025)
    sequence_truncate   min(W, high), W the product of w over a completion
    sequence_mask       W if low <= W <= high, else 0
                        MIS: Liu et al. 2025, "When Speed Kills Stability"

The names are TRL's (`vllm_importance_sampling_mode`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from jaxtyping import Float, Int

from weft.algorithms.advantages import compute_segment_sums
from weft.algorithms.base import LOG_RATIO_BOUND
from weft.errors import build_unknown_name_error
from weft.options import option

Vector = npt.NDArray[np.float64]
Index = npt.NDArray[np.int64]

CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


@dataclass(frozen=True)
class SamplerCorrection:
    """Options of the weights; `correction` is one of `CORRECTIONS`."""

    correction: str = "token_truncate"
    high: float = option(
        2.0,
        "larger weights are truncated (truncate), or exclude their token or sequence (mask)",
        at_least=1.0,
    )
    low: float | None = option(
        None,
        "smaller weights exclude their token or sequence (mask only); null: no bound",
        at_least=0.0,
        at_most=1.0,
    )


def compute_sampler_weights(
    trainer: Float[Vector, "T"],
    sampler: Float[Vector, "T"],
    mask: Float[Vector, "T"],
    lengths: Int[Index, "S"],
    correction: str,
    high: float,
    low: float | None = None,
) -> tuple[Float[Vector, "T"], Float[Vector, "T"]]:
    """Return each token's weight in the policy loss, and its importance ratio, [T] each.

    `correction` is one of `CORRECTIONS` (see the module's docstring). If its name begins with
    `sequence`, the ratio of a token is that of its whole completion. A truncating correction limits
    the weight to at most `high` and ignores `low`. A masking correction sets the weight to 0 if the
    ratio is above `high`, or below `low` if `low` is not None.

    `trainer` and `sampler` are the log-probs of the tokens under the two policies, in nats.
    `lengths` has the number of tokens of each completion. Tokens with mask 0 are ignored and have
    weight 1. Log-ratios are clipped to +-20 before `exp`. Raises `ConfigError` for an unknown
    correction.
    """
    if correction not in CORRECTIONS:
        raise build_unknown_name_error("sampler correction", correction, CORRECTIONS)
    gap = np.where(mask != 0, trainer - sampler, 0.0)
    if correction.startswith("sequence"):
        gap = np.repeat(compute_segment_sums(gap, lengths), lengths)
    ratio = np.exp(np.clip(gap, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    if correction.endswith("truncate"):
        weight = np.minimum(ratio, high)
    else:
        weight = np.where((ratio <= high) & (ratio >= (0.0 if low is None else low)), ratio, 0.0)
    return np.where(mask != 0, weight, 1.0), ratio
