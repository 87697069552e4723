"""GRPO and its kin: a clipped policy loss with another average, another ratio, or the KL in the loss.

The advantage comes from a group of completions of one prompt (`advantages.py`), so no critic is trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import array_api_compat
import numpy as np
from jaxtyping import Float

from weft.algorithms.base import Array, Loss, RowBatch, Sample, Stat, fixed, masked_mean, masked_sum, trained_rows
from weft.algorithms.kl import ESTIMATORS, kl_estimate
from weft.algorithms.ppo import Clip, EarlyStop, clipped_surrogate, policy_stats
from weft.algorithms.sft import row_weights
from weft.errors import ConfigError, unknown_name
from weft.registry import register_loss

CHOICES = {
    "loss_type": ("grpo", "dr_grpo", "dapo", "bnpo"),
    "importance_level": ("token", "sequence"),
    "surrogate": ("clip", "reinforce"),
    "kl_estimator": ESTIMATORS,
}


def policy_gradient(logprobs: Float[Array, "N"], advantages: Float[Array, "N"]) -> Float[Array, "N"]:
    """-A log pi(token): REINFORCE (Williams 1992), the loss of RLOO and REINFORCE++ on-policy, without a ratio."""
    return -advantages * logprobs


def sequence_log_ratio(log_ratio: Float[Array, "N"], batch: RowBatch) -> Float[Array, "N"]:
    """The mean log-ratio over a completion's trained tokens, at each of its rows: GSPO (Zheng et al. 2025, eq. 7)."""
    xp = array_api_compat.array_namespace(log_ratio)
    kept = xp.where(batch.mask != 0, log_ratio, xp.zeros_like(log_ratio)) * batch.mask
    return batch.spread(batch.sum(kept) / xp.clip(batch.lengths, 1.0, None))


@register_loss("grpo")
@dataclass(frozen=True)
class GRPOLoss(Loss):
    """Average over the minibatch of: surrogate + kl_coef * KL - entropy_coef * entropy, each of one token.

    `loss_type` is the average (names as in TRL):
      grpo      mean over a completion's tokens, then over completions with any (DeepSeekMath 2024, eq. 3); long wrong answers
                are punished less per token
      dapo      mean over all tokens of the minibatch (DAPO 2025, eq. 8)
      bnpo      the same here: elsewhere a mean over each micro-batch, which depends on the micro-batch size
      dr_grpo   sum / (all completions * max_completion_length) (Liu et al. 2025, eq. 4): no length bias
    `importance_level`: "token", each token its own ratio; "sequence", GSPO's one ratio a completion (its clip range is of the
    order of 3e-4, so `eps_clip` must be set too; TRL and the paper pair it with `grpo`).
    `surrogate`: "clip", or "reinforce", which has no ratio and so is for one update a batch.
    `kl_estimator`: k3 as DeepSeekMath and TRL; k2 has the true gradient; k1's vanishes in expectation (`kl_estimate`). TRL
    multiplies the KL by the ratio by default; here, as in the paper, it is not.
    Keys: `advantages`, `logprobs`, and `ref_logprobs` where `kl_coef` is above 0.
    """

    loss_type: str = "dapo"
    importance_level: str = "token"
    surrogate: str = "clip"
    eps_clip: float = 0.2
    eps_clip_high: float | None = None
    dual_clip: float | None = None
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0
    max_completion_length: int | None = None
    early_stop_imp_ratio: float | None = None
    early_stop_kl: float | None = None

    outputs = frozenset({"logprobs", "entropy"})
    unit = "sequence"

    def __post_init__(self) -> None:
        _ = self.clip  # checks the bounds
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise unknown_name(f"grpo.{name}", getattr(self, name), choices)
        if self.kl_coef < 0.0:
            raise ConfigError(f"grpo.kl_coef={self.kl_coef} must be at least 0")
        if self.loss_type == "dr_grpo" and not self.max_completion_length:
            raise ConfigError("grpo.loss_type=dr_grpo divides by max_completion_length; set it (gen.max_new_tokens)")

    @property
    def clip(self) -> Clip:
        return Clip(self.eps_clip, self.eps_clip_high, self.dual_clip)

    @property
    def by_row(self) -> bool:
        return self.importance_level == "token"

    def denominators(self, minibatch: Sample) -> Mapping[str, float]:
        """`tokens`: trained tokens; `sequences`: completions with any; `completions`: all."""
        rows = trained_rows(minibatch)
        counts = {"tokens": rows.sum(), "sequences": np.count_nonzero(rows), "completions": len(rows)}
        return {name: float(count) for name, count in counts.items()}

    def __call__(
        self, out: Mapping[str, Array], batch: RowBatch, total: Mapping[str, float]
    ) -> tuple[Array, Mapping[str, Stat]]:
        logprobs, advantages = out["logprobs"], batch["advantages"]
        xp = array_api_compat.array_namespace(logprobs)
        if self.surrogate == "reinforce":
            each, clipped = policy_gradient(logprobs, advantages), xp.zeros_like(advantages)
        else:
            log_ratio = logprobs - batch["logprobs"]
            if self.importance_level == "sequence":
                log_ratio = sequence_log_ratio(log_ratio, batch)
            each, clipped = clipped_surrogate(log_ratio, advantages, self.clip)
        stats = policy_stats(out, batch, fixed(clipped))
        stats["policy_loss"] = masked_mean(each, batch.mask)
        if self.kl_coef:
            each = each + self.kl_coef * kl_estimate(logprobs, batch["ref_logprobs"], self.kl_estimator)
        if self.entropy_coef:
            each = each - self.entropy_coef * out["entropy"]
        return masked_sum(each, self._weights(batch, total)), stats

    def _weights(self, batch: RowBatch, total: Mapping[str, float]) -> Float[Array, "N"]:
        if self.loss_type == "dr_grpo":
            return batch.mask / (max(total["completions"], 1.0) * float(self.max_completion_length or 1))
        return row_weights(batch, total, "sequence" if self.loss_type == "grpo" else "token")

    def veto(self, stats: Mapping[str, float]) -> str | None:
        return EarlyStop(self.early_stop_imp_ratio, self.early_stop_kl)(stats)
