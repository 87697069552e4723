"""Learning from preferences without a reward model: DPO and its kin on pairs, KTO on single labelled completions.

All start from a score of each completion y for its prompt x; L is the number of its trained tokens:

    sum     sum over y of log pi(y_t) - log ref(y_t)          DPO, hinge, robust, KTO
    mean    sum / L                                           IPO, sigmoid_norm
    free    sum over y of log pi(y_t) / L, no reference       SimPO, ORPO
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import array_api_compat
import numpy as np
from jaxtyping import Float

from weft.algorithms.base import Array, Loss, RowBatch, Sample, Stat, Sum, fixed, log_sigmoid, trained_rows
from weft.algorithms.reward import num_pairs
from weft.errors import ConfigError, unknown_name
from weft.registry import register_loss

# -- the losses of one pair; `delta` is score(better) - score(worse)


def sigmoid_loss(delta: Float[Array, "P"], beta: float, smoothing: float = 0.0) -> Float[Array, "P"]:
    """-(1 - e) log sigmoid(beta delta) - e log sigmoid(-beta delta).

    DPO (Rafailov et al. 2023, eq. 7) at e = 0; cDPO (Mitchell 2023) where labels are wrong with probability e < 1/2. TRL's
    `sigmoid` has lost its label smoothing (1.16); its CPO trainer still has it, in this form. With the scores of `mean` this
    is TRL's `sigmoid_norm`.
    """
    return -(1.0 - smoothing) * log_sigmoid(beta * delta) - smoothing * log_sigmoid(-beta * delta)


def robust_loss(delta: Float[Array, "P"], beta: float, smoothing: float) -> Float[Array, "P"]:
    """[-(1 - e) log sigmoid(beta delta) + e log sigmoid(-beta delta)] / (1 - 2 e), Chowdhury et al. 2024, eq. 12.

    Unbiased for the clean loss where labels are flipped with probability e; may be negative.
    """
    kept, flipped = log_sigmoid(beta * delta), log_sigmoid(-beta * delta)
    return (-(1.0 - smoothing) * kept + smoothing * flipped) / (1.0 - 2.0 * smoothing)


def hinge_loss(delta: Float[Array, "P"], beta: float) -> Float[Array, "P"]:
    """max(0, 1 - beta delta), SLiC as in Liu et al. 2023 (RSO), table 1."""
    xp = array_api_compat.array_namespace(delta)
    return xp.clip(1.0 - beta * delta, 0.0, None)


def ipo_loss(delta: Float[Array, "P"], beta: float) -> Float[Array, "P"]:
    """(delta - 1 / (2 beta))^2, Azar et al. 2023, eq. 17, where beta is called tau.

    On means over tokens, not on sums as the equation reads: the authors' own experiments did so (they told TRL), and a sum
    would make the target gap depend on length.
    """
    xp = array_api_compat.array_namespace(delta)
    return xp.square(delta - 1.0 / (2.0 * beta))


def simpo_loss(delta: Float[Array, "P"], beta: float, gamma: float, smoothing: float = 0.0) -> Float[Array, "P"]:
    """-log sigmoid(beta delta - gamma) (smoothed as `sigmoid_loss`), Meng et al. 2024, eq. 6; delta of mean log-probs."""
    return sigmoid_loss(delta - gamma / beta, beta, smoothing)


def log_odds(mean_logprob: Float[Array, "S"]) -> Float[Array, "S"]:
    """log(p / (1 - p)) with p = exp(mean log-prob); a p above 1 - 1e-6 counts as that."""
    xp = array_api_compat.array_namespace(mean_logprob)
    x = xp.clip(mean_logprob, None, -1e-6)
    near = x > -math.log(2.0)  # log(1 - e^x): expm1 near 0, log1p elsewhere (Maechler 2012)
    by_expm1 = xp.log(-xp.expm1(xp.where(near, x, -xp.ones_like(x))))
    by_log1p = xp.log1p(-xp.exp(xp.where(near, -xp.ones_like(x), x)))
    return x - xp.where(near, by_expm1, by_log1p)


def orpo_loss(better: Float[Array, "P"], worse: Float[Array, "P"], beta: float) -> Float[Array, "P"]:
    """-better - beta log sigmoid(log_odds(better) - log_odds(worse)) of mean log-probs, Hong et al. 2024, eq. 6 and 7.

    `beta` is the paper's lambda. The first term is the cross-entropy of the better answer, a mean over its tokens as in the
    paper; TRL's takes the mean over all tokens of a micro-batch, prompts included.
    """
    return -better - beta * log_sigmoid(log_odds(better) - log_odds(worse))


def kto_loss(
    scores: Float[Array, "S"], labels: Float[Array, "S"], baseline: Float[Array, "S"], beta: float
) -> Float[Array, "S"]:
    """1 - sigmoid(beta (score - z0)) for desirable completions (label 1), 1 - sigmoid(beta (z0 - score)) for the others.

    Ethayarajh et al. 2024, eq. 7 and 8. `baseline` is z0 = max(0, mean over the batch of the mismatched completions' scores),
    a constant; it is made by the host functions `kto_mismatch` and `kto_baseline` over the whole batch. (TRL estimates it in
    every micro-batch, so that its gradient depends on the micro-batch size.)
    """
    xp = array_api_compat.array_namespace(scores)
    sign = xp.where(labels > 0.5, xp.ones_like(scores), -xp.ones_like(scores))
    return xp.exp(log_sigmoid(-beta * sign * (scores - baseline)))


@dataclass(frozen=True)
class Kind:
    """A pairwise loss: the scores it compares, the options it reads, and itself on (better, worse, options)."""

    score: str  # sum, mean or free
    options: frozenset[str]
    loss: Callable[[Array, Array, PairwiseLoss], Array]


KINDS: Mapping[str, Kind] = {
    "sigmoid": Kind(
        "sum", frozenset({"label_smoothing"}), lambda b, w, o: sigmoid_loss(b - w, o.beta, o.label_smoothing)
    ),
    "sigmoid_norm": Kind(
        "mean", frozenset({"label_smoothing"}), lambda b, w, o: sigmoid_loss(b - w, o.beta, o.label_smoothing)
    ),
    "robust": Kind(
        "sum", frozenset({"label_smoothing"}), lambda b, w, o: robust_loss(b - w, o.beta, o.label_smoothing)
    ),
    "hinge": Kind("sum", frozenset(), lambda b, w, o: hinge_loss(b - w, o.beta)),
    "ipo": Kind("mean", frozenset(), lambda b, w, o: ipo_loss(b - w, o.beta)),
    "simpo": Kind(
        "free",
        frozenset({"label_smoothing", "simpo_gamma"}),
        lambda b, w, o: simpo_loss(b - w, o.beta, o.simpo_gamma, o.label_smoothing),
    ),
    "orpo": Kind("free", frozenset(), lambda b, w, o: orpo_loss(b, w, o.beta)),
}
LOSS_TYPES = (*KINDS, "kto")
REFERENCE_FREE = tuple(name for name, kind in KINDS.items() if kind.score == "free")


def completion_scores(
    logprobs: Float[Array, "N"], reference: Float[Array, "N"] | None, batch: RowBatch, score: str
) -> tuple[Float[Array, "S"], Float[Array, "S"]]:
    """(scores, summed log-probs) of each completion over its trained tokens; see the module's docstring for `score`.

    The difference to the reference is taken per token, where it is small, and then summed.
    """
    xp = array_api_compat.array_namespace(logprobs)
    each = logprobs if reference is None else logprobs - reference
    sums = batch.sum(xp.where(batch.mask != 0, each, xp.zeros_like(each)) * batch.mask)
    scores = sums if score == "sum" else sums / xp.clip(batch.lengths, 1.0, None)
    return scores, batch.sum(fixed(logprobs) * batch.mask)


@dataclass(frozen=True)
class PairwiseLoss(Loss):
    """Mean over the minibatch's pairs of one of `KINDS`; a pair is two completions of one comparison, the better first.

    Keys: `rank` (and `comparison`), and `ref_logprobs` unless the kind needs no reference. Metrics, over pairs: the implicit
    rewards beta * score as `rewards/{chosen,rejected,margins,accuracies}`, summed log-probs as `logps/{chosen,rejected}`.
    """

    loss_type: str = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    simpo_gamma: float = 0.5

    outputs = frozenset({"logprobs"})
    unit = "group"

    def denominators(self, minibatch: Sample) -> Mapping[str, float]:
        """`pairs`: pairs of all ids."""
        return {"pairs": float(num_pairs(minibatch).sum())}

    def __call__(
        self, out: Mapping[str, Array], batch: RowBatch, total: Mapping[str, float]
    ) -> tuple[Array, Mapping[str, Stat]]:
        kind, logprobs = KINDS[self.loss_type], out["logprobs"]
        xp = array_api_compat.array_namespace(logprobs)
        reference = None if kind.score == "free" else batch["ref_logprobs"]
        scores, logps = completion_scores(logprobs, reference, batch, kind.score)
        better, worse = batch.pairs()
        high, low = xp.take(scores, better), xp.take(scores, worse)
        each = kind.loss(high, low, self)
        rewards = self.beta * fixed(high), self.beta * fixed(low)
        stats = _pair_stats(rewards, (xp.take(logps, better), xp.take(logps, worse)))
        return xp.sum(each) / max(total["pairs"], 1.0), stats


def _pair_stats(rewards: tuple[Array, Array], logps: tuple[Array, Array]) -> dict[str, Stat]:
    xp = array_api_compat.array_namespace(*rewards)
    count = float(rewards[0].shape[0])
    right = xp.astype(rewards[0] > rewards[1], rewards[0].dtype)
    return {
        "rewards/chosen": Sum(xp.sum(rewards[0]), count),
        "rewards/rejected": Sum(xp.sum(rewards[1]), count),
        "rewards/margins": Sum(xp.sum(rewards[0] - rewards[1]), count),
        "rewards/accuracies": Sum(xp.sum(right), count),
        "logps/chosen": Sum(xp.sum(logps[0]), count),
        "logps/rejected": Sum(xp.sum(logps[1]), count),
    }


@dataclass(frozen=True)
class KTOLoss(Loss):
    """Mean over the minibatch's completions of weight * `kto_loss`.

    Keys: `label` (1 desirable, 0 undesirable), `ref_logprobs`, and `kl_baseline` (z0, one value an id or a completion).
    Metrics: `rewards/{chosen,rejected,margins}` = beta * score and `logps/{chosen,rejected}` over desirable and undesirable
    ones, `rewards/accuracies` = share of scores on their label's side of z0, `kl_baseline` = z0.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    outputs = frozenset({"logprobs"})
    unit = "sequence"

    def denominators(self, minibatch: Sample) -> Mapping[str, float]:
        """`sequences`: completions with at least one trained token."""
        return {"sequences": float(np.count_nonzero(trained_rows(minibatch)))}

    def __call__(
        self, out: Mapping[str, Array], batch: RowBatch, total: Mapping[str, float]
    ) -> tuple[Array, Mapping[str, Stat]]:
        xp = array_api_compat.array_namespace(out["logprobs"])
        scores, logps = completion_scores(out["logprobs"], batch["ref_logprobs"], batch, "sum")
        labels, baseline = batch["label"], batch["kl_baseline"]
        taken = xp.astype(batch.lengths > 0, scores.dtype)
        good = xp.astype(labels > 0.5, scores.dtype) * taken
        weights = self.desirable_weight * good + self.undesirable_weight * (taken - good)
        each = kto_loss(scores, labels, baseline, self.beta)
        stats = _label_stats(self.beta * fixed(scores), self.beta * baseline, logps, good, taken - good)
        stats["kl_baseline"] = Sum(xp.sum(baseline * taken), xp.sum(taken))
        return xp.sum(each * weights) / max(total["sequences"], 1.0), stats

    def summary(self, stats: Mapping[str, float]) -> dict[str, float]:
        """Adds `rewards/margins`: mean reward of desirable less that of undesirable ones, where there are both."""
        made = dict(stats)
        if "rewards/chosen" in made and "rewards/rejected" in made:
            made["rewards/margins"] = made["rewards/chosen"] - made["rewards/rejected"]
        return made


def _label_stats(rewards: Array, baseline: Array, logps: Array, good: Array, bad: Array) -> dict[str, Stat]:
    xp = array_api_compat.array_namespace(rewards)
    right = xp.astype(rewards > baseline, good.dtype) * good + xp.astype(rewards < baseline, bad.dtype) * bad
    return {
        "rewards/chosen": Sum(xp.sum(rewards * good), xp.sum(good)),
        "rewards/rejected": Sum(xp.sum(rewards * bad), xp.sum(bad)),
        "rewards/accuracies": Sum(xp.sum(right), xp.sum(good + bad)),
        "logps/chosen": Sum(xp.sum(logps * good), xp.sum(good)),
        "logps/rejected": Sum(xp.sum(logps * bad), xp.sum(bad)),
    }


DEFAULTS: Mapping[str, Any] = {
    "label_smoothing": 0.0,
    "simpo_gamma": 0.5,
    "desirable_weight": 1.0,
    "undesirable_weight": 1.0,
}


@register_loss("dpo")
def dpo_loss(loss_type: str = "sigmoid", beta: float = 0.1, **options: float) -> PairwiseLoss | KTOLoss:
    """The loss `loss_type` (one of `LOSS_TYPES`). `options` are those of `DEFAULTS`; one that the type does not read may be
    given at its default only. Raises `ConfigError` otherwise, and for values outside their range."""
    if loss_type not in LOSS_TYPES:
        raise unknown_name("dpo.loss_type", loss_type, LOSS_TYPES)
    read = {"desirable_weight", "undesirable_weight"} if loss_type == "kto" else set(KINDS[loss_type].options)
    for name, value in options.items():
        if name not in DEFAULTS:
            raise unknown_name("option of dpo", name, DEFAULTS)
        if name not in read and value != DEFAULTS[name]:
            raise ConfigError(f"dpo.{name}={value} has no meaning for dpo.loss_type={loss_type}; leave it out")
    if not beta > 0:
        raise ConfigError(f"dpo.beta={beta} must be above 0")
    if not 0.0 <= options.get("label_smoothing", 0.0) < 0.5:
        raise ConfigError(f"dpo.label_smoothing={options['label_smoothing']} must be at least 0 and below 0.5")
    chosen = {name: value for name, value in options.items() if name in read}
    return (
        KTOLoss(beta=beta, **chosen) if loss_type == "kto" else PairwiseLoss(loss_type=loss_type, beta=beta, **chosen)
    )
