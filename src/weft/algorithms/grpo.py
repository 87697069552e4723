"""GRPO and its variants: the clipped policy loss with other averages, ratios and KL terms.

Advantages are computed by comparing the completions of one prompt (`advantages.py`), so no critic
is trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import array_api_compat
import numpy as np
from jaxtyping import Float

from weft.algorithms.base import (
    Array,
    RowBatch,
    Sample,
    Stat,
    compute_masked_sum,
    count_trained_rows,
    exp_ratio,
    fixed,
    log_sigmoid,
    masked_mean,
)
from weft.algorithms.kl import ESTIMATORS, estimate_kl
from weft.algorithms.ppo import (
    PolicyLoss,
    RatioClip,
    compute_clipped_surrogate,
    compute_policy_stats,
    find_old_logprobs,
)
from weft.algorithms.sft import compute_row_weights
from weft.errors import ConfigError, build_unknown_name_error
from weft.options import option
from weft.registry import register_loss

CHOICES = {
    "loss_type": ("dapo", "grpo", "dr_grpo", "bnpo"),
    "importance_level": ("token", "sequence"),
    "surrogate": ("clip", "cispo", "sapo", "reinforce"),
    "kl_estimator": ESTIMATORS,
}

# Default (eps_clip, eps_clip_high) by surrogate and importance level: GSPO's range for ratios of
# whole sequences (Zheng et al. 2025, section 5.1); for CISPO an upper bound of 5 and no lower one
# (ScaleRL, Khatri et al. 2025; TRL).
RANGES: Mapping[tuple[str, str], tuple[float, float | None]] = {
    ("clip", "token"): (0.2, None),
    ("clip", "sequence"): (3e-4, 4e-4),
    ("cispo", "token"): (1.0, 4.0),
    ("cispo", "sequence"): (1.0, 4.0),
}


def compute_policy_gradient_loss(
    logprobs: Float[Array, "N"], advantages: Float[Array, "N"]
) -> Float[Array, "N"]:
    """Return -A log pi(token), [N]: REINFORCE (Williams 1992), without an importance ratio.

    This is the on-policy loss of RLOO, REINFORCE++ and GPG.
    """
    return -advantages * logprobs


def compute_cispo_loss(
    logprobs: Float[Array, "N"],
    log_ratio: Float[Array, "N"],
    advantages: Float[Array, "N"],
    clip: RatioClip,
) -> tuple[Float[Array, "N"], Float[Array, "N"]]:
    """Return each token's loss, and a mask that is 1 where the token's weight is clipped, both [N].

    The loss is -sg(clip(w, 1 - low, 1 + high)) A log pi(token), where w is the importance ratio and
    sg stops the gradient. Since the clipped ratio is only a weight, every token keeps its gradient
    (CISPO, MiniMax-M1 2025, arXiv:2506.13585, section 3.1). By default there is only an upper
    bound, as in the paper and in TRL.
    """
    xp = array_api_compat.array_namespace(logprobs)
    ratio = exp_ratio(fixed(log_ratio))
    weight = xp.clip(ratio, 1.0 - clip.low, clip.upper)
    return -weight * advantages * logprobs, xp.astype(weight != ratio, logprobs.dtype)


def compute_sapo_loss(
    log_ratio: Float[Array, "N"], advantages: Float[Array, "N"], positive: float, negative: float
) -> Float[Array, "N"]:
    """Return the SAPO loss of each token, -sigmoid(t (w - 1)) * 4 / t * A, [N].

    w is the importance ratio, A is the advantage, and t is `positive` if A > 0, else `negative`.
    SAPO (Gao et al. 2025, arXiv:2511.20347) replaces clipping of w by a soft gate. On-policy, its
    gradient equals the gradient of the loss -w A. The gradient fades as w moves away from 1, faster
    for larger t.
    """
    xp = array_api_compat.array_namespace(log_ratio, advantages)
    ones = xp.ones_like(advantages)
    temperature = xp.where(advantages > 0, positive * ones, negative * ones)
    gate = xp.exp(log_sigmoid(temperature * (exp_ratio(log_ratio) - 1.0)))
    return -gate * 4.0 / temperature * advantages


def compute_sequence_log_ratio(log_ratio: Float[Array, "N"], batch: RowBatch) -> Float[Array, "N"]:
    """Return, for each row, the mean log-ratio over the trained tokens of its completion, [N].

    Its exponential is the importance ratio of GSPO (Zheng et al. 2025, eq. 7).
    """
    xp = array_api_compat.array_namespace(log_ratio)
    masked_log_ratio = xp.where(batch.mask != 0, log_ratio, xp.zeros_like(log_ratio)) * batch.mask
    return batch.spread(batch.sum(masked_log_ratio) / xp.clip(batch.lengths, 1.0, None))


@register_loss("grpo")
@dataclass(frozen=True)
class GRPOLoss(PolicyLoss):
    """Policy loss + kl_coef * KL - entropy_coef * entropy, averaged over tokens.

    `loss_type` selects the average (names as in TRL):

        grpo      mean over a completion's tokens, then over the completions with trained tokens
                  (DeepSeekMath 2024, eq. 3); penalises long wrong answers less per token
        dapo      mean over all tokens of the minibatch (DAPO 2025, eq. 8)
        bnpo      same as dapo; other libraries take the mean over each micro-batch instead
        dr_grpo   sum / (all completions * max_completion_length) (Liu et al. 2025, eq. 4), which
                  has no length bias

    `surrogate` selects the policy loss:

        clip        PPO's loss (`compute_clipped_surrogate`)
        cispo       see `compute_cispo_loss`
        sapo        see `compute_sapo_loss`
        reinforce   no importance ratio; suits one update per batch

    `importance_level` is "token" for one importance ratio per token, or "sequence" for one per
    completion. The latter is GSPO, for which the paper and TRL use `loss_type=grpo`. If `eps_clip`
    and `eps_clip_high` are None, `RANGES` gives defaults that depend on the surrogate and the
    importance level.

    `kl_estimator` is k3 (as in DeepSeekMath and TRL), k2 (its gradient is the gradient of the true
    KL) or k1 (its gradient vanishes in expectation); see `estimate_kl`. As in the DeepSeekMath
    paper, the KL is not multiplied by the importance ratio, whereas TRL multiplies it by default.

    Batch keys:

        advantages, logprobs            required
        ref_logprobs                    required if `kl_coef` is above 0
        high_covariance                 required if `covariance` is "clip" or "kl"
        old_logprobs, sampler_weights   used if present
    """

    early_stop_imp_ratio: float | None = option(
        None,
        "skip the update of a minibatch whose mean importance ratio is above this; null: no bound",
        at_least=0.0,
    )
    eps_clip: float | None = option(
        None,
        "clip the importance ratio to 1 - eps_clip .. 1 + eps_clip; absent: 0.2, or for ratios of "
        "sequences GSPO's 3e-4 below and 4e-4 above; cispo has no lower bound",
    )
    eps_clip_high: float | None = option(
        None,
        "upper bound 1 + eps_clip_high in place of 1 + eps_clip (clip-higher); absent for cispo: 4",
    )
    loss_type: str = option(
        "dapo",
        "average of the loss: dapo (over all tokens), grpo (over the tokens of each completion, "
        "then over completions), dr_grpo (sum divided by the maximum completion length), bnpo "
        "(same as dapo)",
        choices=CHOICES["loss_type"],
    )
    importance_level: str = option(
        "token",
        "one importance ratio for each token, or for each sequence (GSPO)",
        choices=CHOICES["importance_level"],
    )
    surrogate: str = option(
        "clip",
        "clipped ratio (clip), truncated ratio as a weight (cispo), soft gate (sapo), or no ratio "
        "(reinforce; only for one update per batch)",
        choices=CHOICES["surrogate"],
    )
    sapo_positive: float = option(1.0, "temperature of sapo's gate for positive advantages")
    sapo_negative: float = option(1.05, "temperature of sapo's gate for negative advantages")
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    max_completion_length: int | None = None

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise build_unknown_name_error(f"grpo.{name}", getattr(self, name), choices)
        super().__post_init__()
        for name in ("sapo_positive", "sapo_negative"):
            if not getattr(self, name) > 0.0:
                raise ConfigError(f"grpo.{name}={getattr(self, name)} must be above 0")
        if self.kl_coef < 0.0:
            raise ConfigError(f"grpo.kl_coef={self.kl_coef} must be at least 0")
        if self.loss_type == "dr_grpo" and not self.max_completion_length:
            raise ConfigError(
                "grpo.loss_type=dr_grpo divides by max_completion_length; set it "
                "(gen.max_new_tokens)"
            )

    @property
    def clip(self) -> RatioClip:
        """Range to which importance ratios are clipped.

        Bounds that are not set come from `RANGES`. However, if only `eps_clip` is set, it bounds
        the ratio on both sides. This does not apply to CISPO, which keeps its default upper bound.
        """
        low, high = RANGES.get((self.surrogate, self.importance_level), (0.2, None))
        if self.eps_clip is not None:  # a single given bound applies to both sides
            low = self.eps_clip
            high = high if self.surrogate == "cispo" else None
        return RatioClip(
            low, high if self.eps_clip_high is None else self.eps_clip_high, self.dual_clip
        )

    @property
    def by_row(self) -> bool:
        return self.importance_level == "token"

    def denominators(self, minibatch: Sample) -> Mapping[str, float]:
        """Return a mapping with the keys `tokens`, `sequences` and `completions`.

        Their values are the number of trained tokens, the number of completions with trained
        tokens, and the number of all completions.
        """
        rows = count_trained_rows(minibatch)
        counts = {
            "tokens": rows.sum(),
            "sequences": np.count_nonzero(rows),
            "completions": len(rows),
        }
        return {name: float(count) for name, count in counts.items()}

    def __call__(
        self, out: Mapping[str, Array], batch: RowBatch, total: Mapping[str, float]
    ) -> tuple[Array, Mapping[str, Stat]]:
        logprobs = out["logprobs"]
        advantages = batch["advantages"]
        # Policy loss of each token.
        log_ratio = logprobs - find_old_logprobs(batch)
        if self.importance_level == "sequence":
            log_ratio = compute_sequence_log_ratio(log_ratio, batch)
        losses, clipped = self._compute_surrogate(logprobs, log_ratio, advantages)
        losses = self.weight(losses, log_ratio, batch)
        stats = compute_policy_stats(out, batch, fixed(clipped))
        stats["policy_loss"] = masked_mean(losses, batch.mask)
        # KL penalty and entropy bonus.
        if self.kl_coef:
            losses = losses + self.kl_coef * estimate_kl(
                logprobs, batch["ref_logprobs"], self.kl_estimator
            )
        if self.entropy_coef:
            losses = losses - self.entropy_coef * out["entropy"]
        return compute_masked_sum(losses, self._compute_weights(batch, total)), stats

    def _compute_surrogate(
        self,
        logprobs: Float[Array, "N"],
        log_ratio: Float[Array, "N"],
        advantages: Float[Array, "N"],
    ) -> tuple[Float[Array, "N"], Float[Array, "N"]]:
        """Return (losses, clipped), the policy loss and the clip mask of each token, both [N].

        The mask is 1 where the token's probability ratio is clipped, and 0 elsewhere.
        """
        xp = array_api_compat.array_namespace(logprobs)
        if self.surrogate == "clip":
            return compute_clipped_surrogate(log_ratio, advantages, self.clip)
        if self.surrogate == "cispo":
            return compute_cispo_loss(logprobs, log_ratio, advantages, self.clip)
        none = xp.zeros_like(advantages)
        if self.surrogate == "sapo":
            return compute_sapo_loss(
                log_ratio, advantages, self.sapo_positive, self.sapo_negative
            ), none
        return compute_policy_gradient_loss(logprobs, advantages), none

    def _compute_weights(self, batch: RowBatch, total: Mapping[str, float]) -> Float[Array, "N"]:
        if self.loss_type == "dr_grpo":
            return batch.mask / (
                max(total["completions"], 1.0) * float(self.max_completion_length or 1)
            )
        return compute_row_weights(
            batch, total, "sequence" if self.loss_type == "grpo" else "token"
        )
