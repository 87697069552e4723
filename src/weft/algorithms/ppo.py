"""PPO: the clipped policy loss, which GRPO shares, and the clipped value loss.

The source is Schulman et al. 2017. Tokens with a high covariance of log-prob and advantage can be
clipped (Clip-Cov) or penalised (KL-Cov). Samples from other weights than the trained ones can be
reweighted to correct for the difference.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import array_api_compat
import numpy as np
import numpy.typing as npt
from jaxtyping import Bool, Float, Int

from weft.algorithms.advantages import compute_segment_sums
from weft.algorithms.base import (
    LOG_RATIO_BOUND,
    Array,
    Loss,
    Max,
    RowBatch,
    Sample,
    Stat,
    compute_masked_sum,
    count_trained_rows,
    exp_ratio,
    fixed,
    masked_mean,
)
from weft.algorithms.kl import estimate_kl
from weft.errors import ConfigError, build_unknown_name_error
from weft.options import option
from weft.registry import register_loss

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
    candidates = np.flatnonzero((covariance >= low) & (covariance <= high))
    count = max(int(share * np.isfinite(covariance).sum()), 1)
    chosen[candidates[np.argsort(order[candidates], kind="stable")[:count]]] = True
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


@dataclass(frozen=True)
class RatioClip:
    """Range [1 - low, 1 + high] to which a policy loss clips the importance ratio.

    With `high` above `low`, this is the "clip-higher" of DAPO (Yu et al. 2025, section 3.1). `dual`
    is the bound c of dual-clip PPO (Ye et al. 2020, eq. 5).

    Attributes:
        low: distance from 1 to the lower bound
        high: distance from 1 to the upper bound; None means the same as `low`
        dual: tokens with a negative advantage have a loss of at most `dual` * |advantage|; must be
            above 1; None means no bound
    """

    low: float
    high: float | None = None
    dual: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.low <= 1.0:
            raise ConfigError(
                f"eps_clip={self.low} must be at least 0 and at most 1 (1 means no lower bound)"
            )
        if self.high is not None and self.high < 0.0:
            raise ConfigError(
                f"eps_clip_high={self.high} must be at least 0; leave it out to use eps_clip on "
                f"both sides"
            )
        if self.dual is not None and self.dual <= 1.0:
            raise ConfigError(
                f"dual_clip={self.dual} must be above 1, or 1 would bind on-policy; leave it out "
                f"to turn it off"
            )

    @property
    def upper(self) -> float:
        return 1.0 + (self.low if self.high is None else self.high)


def compute_clipped_surrogate(
    log_ratio: Float[Array, "N"], advantages: Float[Array, "N"], clip: RatioClip
) -> tuple[Float[Array, "N"], Float[Array, "N"]]:
    """Return each token's loss [N], and a mask [N] that is 1 where a bound sets the gradient to 0.

    With w = exp(log pi_new - log pi_old) and the advantage A, the loss to minimise is

        -min(w A, clip(w, 1 - low, 1 + high) A)          Schulman et al. 2017, eq. 7
        and, if A < 0, at most -dual * A                 dual clip

    where `low`, `high` and `dual` are fields of `clip`. `log_ratio` is clipped before `exp`
    (`exp_ratio`).
    """
    xp = array_api_compat.array_namespace(log_ratio, advantages)
    ratio = exp_ratio(log_ratio)
    plain = -ratio * advantages
    bounded = -xp.clip(ratio, 1.0 - clip.low, clip.upper) * advantages
    loss = xp.maximum(plain, bounded)
    is_clipped = bounded > plain
    if clip.dual is not None:
        bound = -clip.dual * advantages
        binds = (advantages < 0) & (loss > bound)
        loss = xp.where(binds, bound, loss)
        is_clipped = is_clipped | binds
    return loss, xp.astype(is_clipped, log_ratio.dtype)


def find_old_logprobs(batch: RowBatch) -> Float[Array, "N"]:
    """Return the log-probs in the denominator of the importance ratio, [N].

    These are the batch's `old_logprobs`, which the trained network computed before its first update
    on the batch. If the batch has no such key, they are `logprobs`, which were recorded while
    sampling.
    """
    if "old_logprobs" in batch:
        old_logprobs: Array = batch["old_logprobs"]
    else:
        old_logprobs = batch["logprobs"]
    return old_logprobs


def compute_policy_stats(
    out: Mapping[str, Array], batch: RowBatch, clipped: Float[Array, "N"]
) -> dict[str, Stat]:
    """Return the statistics that all policy losses log.

    `clipped` is 1 for tokens whose gradient is blocked by a bound, and otherwise 0. "Old policy"
    means the policy before the first update on the batch. Unless stated otherwise, the statistics
    are means over trained tokens:

        entropy                   in nats
        clip_ratio                share of tokens for which `clipped` is 1
        approx_kl                 estimator k3 of the KL between the old and the trained policy
        importance_ratio          ratio of the trained policy to the old policy
        importance_ratio_max      maximum of this ratio
        sampler_logprob_diff      |log-prob while sampling - current log-prob|; before the first
                                  update on a batch, the gap between sampler and trainer
        sampler_logprob_diff_max  maximum of this difference
        kl                        estimator k3 of the KL to the reference; equal to `approx_kl` if
                                  the batch has no `ref_logprobs`
    """
    current = fixed(out["logprobs"])
    sampled = batch["logprobs"]
    mask = batch.mask
    xp = array_api_compat.array_namespace(current)
    gap = xp.where(mask != 0, current - find_old_logprobs(batch), xp.zeros_like(current))
    ratio = exp_ratio(gap)
    sampler_gap = xp.abs(xp.where(mask != 0, current - sampled, xp.zeros_like(current)))
    stats: dict[str, Stat] = {
        "entropy": masked_mean(out["entropy"], mask),
        "clip_ratio": masked_mean(clipped, mask),
        "approx_kl": masked_mean(ratio - 1 - gap, mask),
        "importance_ratio": masked_mean(ratio, mask),
        "importance_ratio_max": Max(xp.max(xp.where(mask != 0, ratio, xp.zeros_like(ratio)))),
        "sampler_logprob_diff": masked_mean(sampler_gap, mask),
        "sampler_logprob_diff_max": Max(xp.max(sampler_gap)),
    }
    if "ref_logprobs" in batch:
        stats["kl"] = masked_mean(estimate_kl(current, batch["ref_logprobs"], "k3"), mask)
    else:
        stats["kl"] = stats["approx_kl"]
    return stats


@dataclass(frozen=True)
class PolicyLoss(Loss):
    """Base class of the policy losses of PPO and GRPO: the options and the rules that they share.

    With `covariance` "clip", the loss of the tokens marked by the key `high_covariance` is set to
    0; with "kl", the penalty `kl_cov_coef` * |log-ratio| is added to it.
    """

    dual_clip: float | None = option(
        None, "bound on the loss of tokens with a negative advantage; must be above 1 (dual clip)"
    )
    entropy_coef: float = option(0.0, "weight of the entropy bonus")
    early_stop_imp_ratio: float | None = option(
        5.0,
        "skip the update of a minibatch whose mean importance ratio is above this; null: no bound",
        at_least=0.0,
    )
    early_stop_kl: float | None = option(
        None, "skip the update of a minibatch whose approx_kl is above this; null: no bound"
    )
    covariance: str = option(
        "none",
        "preserve entropy by treating the few tokens with the highest covariance of log-prob and "
        "advantage: no loss on some of them (clip, Clip-Cov), or a penalty (kl, KL-Cov)",
        choices=METHODS,
    )
    kl_cov_coef: float = option(1.0, "weight of the penalty for covariance=kl", at_least=0.0)

    outputs = frozenset({"logprobs", "entropy"})
    unit = "sequence"

    def __post_init__(self) -> None:
        _ = self.clip  # checks the values
        if self.covariance not in METHODS:
            raise build_unknown_name_error("covariance control", self.covariance, METHODS)

    @property
    @abstractmethod
    def clip(self) -> RatioClip:
        """Range to which importance ratios are clipped."""

    def weight(
        self, losses: Float[Array, "N"], log_ratio: Float[Array, "N"], batch: RowBatch
    ) -> Float[Array, "N"]:
        """Return the policy loss of each token after covariance control and `sampler_weights`, [N].

        `losses` are the policy losses of the tokens before these changes. First, the loss of
        high-covariance tokens is changed (`select_clip_cov_rows`, `select_kl_cov_rows`). Then all
        losses are multiplied by the batch's `sampler_weights`, if present.
        """
        xp = array_api_compat.array_namespace(losses)
        if self.covariance != "none":
            chosen = batch["high_covariance"] != 0
            if self.covariance == "clip":
                changed = xp.zeros_like(losses)
            else:
                changed = losses + self.kl_cov_coef * xp.abs(log_ratio)
            losses = xp.where(chosen, changed, losses)
        if "sampler_weights" in batch:
            return losses * batch["sampler_weights"]
        return losses

    def veto(self, stats: Mapping[str, float]) -> str | None:
        """Return the reason to skip the step if a bound on policy drift is exceeded, else None."""
        ratio = stats.get("importance_ratio")
        kl = stats.get("approx_kl")
        if (
            self.early_stop_imp_ratio is not None
            and ratio is not None
            and ratio > self.early_stop_imp_ratio
        ):
            return (
                f"mean importance ratio {ratio:.3g} is above "
                f"early_stop_imp_ratio={self.early_stop_imp_ratio}"
            )
        if self.early_stop_kl is not None and kl is not None and kl > self.early_stop_kl:
            return f"approx_kl {kl:.3g} is above early_stop_kl={self.early_stop_kl}"
        return None


@register_loss("ppo_actor")
@dataclass(frozen=True)
class PPOActorLoss(PolicyLoss):
    """Clipped policy loss of PPO minus `entropy_coef` * entropy, averaged over trained tokens.

    The policy loss is computed by `compute_clipped_surrogate`. The denominator of the importance
    ratio is `old_logprobs` or, if the batch has no such key, the sampler's `logprobs`. If the batch
    has `sampler_weights`, each token's policy loss is multiplied by its weight.

    The mean is over tokens, as in ReaLHF, OpenRLHF and verl; the GRPO paper averages over
    sequences. If the mean importance ratio of a minibatch exceeds `early_stop_imp_ratio`, its
    optimizer step is skipped. (ReaLHF multiplies the loss of such a minibatch by 0, so that
    momentum and weight decay still change the parameters.)
    """

    eps_clip: float = option(0.2, "clip the importance ratio to 1 - eps_clip .. 1 + eps_clip")
    eps_clip_high: float | None = option(
        None, "upper bound 1 + eps_clip_high in place of 1 + eps_clip (clip-higher)"
    )

    by_row = True

    @property
    def clip(self) -> RatioClip:
        return RatioClip(self.eps_clip, self.eps_clip_high, self.dual_clip)

    def denominators(self, minibatch: Sample) -> Mapping[str, float]:
        """Return the number of trained tokens, under the key `tokens`."""
        return {"tokens": float(count_trained_rows(minibatch).sum())}

    def __call__(
        self, out: Mapping[str, Array], batch: RowBatch, total: Mapping[str, float]
    ) -> tuple[Array, Mapping[str, Stat]]:
        log_ratio = out["logprobs"] - find_old_logprobs(batch)
        losses, clipped = compute_clipped_surrogate(log_ratio, batch["advantages"], self.clip)
        losses = self.weight(losses, log_ratio, batch)
        stats = compute_policy_stats(out, batch, fixed(clipped))
        stats["policy_loss"] = masked_mean(losses, batch.mask)
        if self.entropy_coef:
            losses = losses - self.entropy_coef * out["entropy"]
        return compute_masked_sum(losses, batch.mask) / max(total["tokens"], 1.0), stats


def compute_clipped_value_loss(
    values: Float[Array, "N"], old: Float[Array, "N"], returns: Float[Array, "N"], eps: float | None
) -> tuple[Float[Array, "N"], Float[Array, "N"]]:
    """Return the loss of each token, and a mask of the clipped tokens, both [N].

        max((V - R)^2, (clip(V, V_old - eps, V_old + eps) - R)^2) / 2

    The mask is 1 for tokens whose loss has no gradient because of the clipping, and 0 for all
    others. If `eps` is None, the loss is half the squared error, and no token is clipped.

    This is the value clipping of OpenAI baselines. Baselines, trlX, ReaLHF, verl and OpenRLHF also
    have the factor 1/2. V, V_old and R have the same scale: if values are normalised, all three are
    normalised by the running moments.
    """
    xp = array_api_compat.array_namespace(values, old, returns)
    plain = xp.square(values - returns) / 2
    if eps is None:
        return plain, xp.zeros_like(plain)
    bounded = xp.square(old + xp.clip(values - old, -eps, eps) - returns) / 2
    return xp.maximum(plain, bounded), xp.astype(bounded > plain, values.dtype)


@register_loss("ppo_critic")
@dataclass(frozen=True)
class PPOCriticLoss(Loss):
    """Clipped value loss of PPO, averaged over trained tokens.

    The loss of each token is computed by `compute_clipped_value_loss`. The loss reads the keys
    `values`, which the critic predicted when the batch was generated, and `returns`.

    The loss is multiplied by `vf_coef`; the metrics are not. The metrics `value_loss`,
    `value_clip_ratio`, `value` and `return` are means over tokens.
    `explained_variance` is 1 - Var(R - V) / Var(R) over the tokens of the minibatch, for predicted
    values V and returns R.
    """

    value_eps_clip: float | None = option(
        0.2, "maximum difference of a new value from the old one; null: no bound"
    )
    vf_coef: float = option(
        1.0, "factor of the value loss; adamw notices it only where gradients are clipped"
    )

    outputs = frozenset({"values"})
    unit = "sequence"

    def __post_init__(self) -> None:
        if self.value_eps_clip is not None and self.value_eps_clip <= 0.0:
            raise ConfigError(
                f"value_eps_clip={self.value_eps_clip} must be above 0; null turns value clipping "
                f"off"
            )

    def denominators(self, minibatch: Sample) -> Mapping[str, float]:
        """Return the number of trained tokens, under the key `tokens`."""
        return {"tokens": float(count_trained_rows(minibatch).sum())}

    def __call__(
        self, out: Mapping[str, Array], batch: RowBatch, total: Mapping[str, float]
    ) -> tuple[Array, Mapping[str, Stat]]:
        returns = batch["returns"]
        mask = batch.mask
        losses, clipped = compute_clipped_value_loss(
            out["values"], batch["values"], returns, self.value_eps_clip
        )
        xp = array_api_compat.array_namespace(returns)
        current = fixed(out["values"])
        stats = {
            "value_loss": masked_mean(losses, mask),
            "value_clip_ratio": masked_mean(clipped, mask),
            "value": masked_mean(current, mask),
            "return": masked_mean(returns, mask),
            "return_square": masked_mean(xp.square(returns), mask),
            "error_square": masked_mean(xp.square(returns - current), mask),
        }
        return self.vf_coef * compute_masked_sum(losses, mask) / max(total["tokens"], 1.0), stats

    def summary(self, stats: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics to log, with `explained_variance` added.

        `explained_variance` is computed from the statistics `return_square` and `error_square`,
        which are not logged themselves. It is omitted if all returns are equal.
        """
        metrics = dict(stats)
        square = metrics.pop("return_square", None)
        error = metrics.pop("error_square", None)
        if square is not None and error is not None:
            variance = square - metrics["return"] ** 2
            bias = metrics["return"] - metrics["value"]
            if variance > 1e-12:
                metrics["explained_variance"] = 1.0 - (error - bias**2) / variance
        return metrics


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

    `correction` is one of `CORRECTIONS`. If its name begins with `sequence`, the ratio of a token
    is the ratio of its whole completion. A truncating correction limits
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
