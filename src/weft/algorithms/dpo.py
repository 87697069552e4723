"""Preference losses without a reward model: DPO variants on pairs, KTO and BCO.

KTO and BCO train on single labelled completions instead of pairs. The formulas of pairs are in
`preferences.py`, which this module applies to minibatches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import array_api_compat
import numpy as np
import numpy.typing as npt
from jaxtyping import Float

from weft.algorithms.base import (
    Array,
    Loss,
    RowBatch,
    Sample,
    Stat,
    Sum,
    count_trained_rows,
    fixed,
    log_sigmoid,
)
from weft.algorithms.preferences import (
    DIVERGENCES,
    KINDS,
    compute_completion_scores,
    compute_divergence_score,
    compute_pair_stats,
    compute_sigmoid_loss,
    divide_by_tokens,
    is_above,
)
from weft.algorithms.reward import count_pairs
from weft.errors import ConfigError, build_unknown_name_error
from weft.options import option
from weft.registry import register_loss


def compute_kto_loss(
    scores: Float[Array, "S"], labels: Float[Array, "S"], baseline: Float[Array, "S"], beta: float
) -> Float[Array, "S"]:
    """Return the KTO loss of each completion, [S].

        1 - sigmoid(beta (score - z0))     desirable completions (label 1)
        1 - sigmoid(beta (z0 - score))     undesirable completions

    The source is Ethayarajh et al. 2024, eq. 7 and 8. `baseline` is z0, a constant without a
    gradient: the mean score of mismatched completions (each paired with the prompt of another
    completion), or 0 if this mean is negative. The host functions `kto_mismatch` and `kto_baseline`
    compute z0 over the whole batch. (TRL estimates it in every micro-batch, so its gradient depends
    on the micro-batch size.)
    """
    xp = array_api_compat.array_namespace(scores)
    sign = xp.where(labels > 0.5, xp.ones_like(scores), -xp.ones_like(scores))
    return xp.exp(log_sigmoid(-beta * sign * (scores - baseline)))


def compute_bco_loss(
    scores: Float[Array, "S"], labels: Float[Array, "S"], shift: Float[Array, "S"], beta: float
) -> Float[Array, "S"]:
    """Return the BCO loss of each completion, [S].

        -log sigmoid(beta score - shift)     desirable completions (label 1)
        -log sigmoid(shift - beta score)     undesirable completions

    The source is Jung et al. 2024, "Binary Classifier Optimization", arXiv 2404.04656, eq. 10.
    `shift` is the paper's delta, a constant: the midpoint between the mean desirable and the mean
    undesirable reward. The host function `bco_shift` computes it over all completions seen so far.
    """
    xp = array_api_compat.array_namespace(scores)
    sign = xp.where(labels > 0.5, xp.ones_like(scores), -xp.ones_like(scores))
    return -log_sigmoid(sign * (beta * scores - shift))


# Loss type -> key of the batch-wide statistic that the loss reads.
LABELLED: Mapping[str, str] = {"kto": "kl_baseline", "bco": "reward_shift"}


@dataclass(frozen=True)
class LabelledLoss(Loss):
    """KTO or BCO loss, averaged over the completions that have trained tokens.

    The loss of a desirable completion is multiplied by `desirable_weight`, and the loss of an
    undesirable completion by `undesirable_weight`.

    The loss reads the keys `label` (1 for desirable, 0 for undesirable), `ref_logprobs`, and
    `kl_baseline` (z0, for KTO) or `reward_shift` (delta, for BCO). z0 and delta have one value for
    the whole batch, which is also logged under the name of the key.

    In the names of the other metrics, "chosen" means desirable completions and "rejected" means
    undesirable ones. The reward of a completion is beta times the sum of log pi - log ref over its
    trained tokens. `rewards/{chosen,rejected}` are mean rewards, `rewards/margins` is their
    difference, and `logps/{chosen,rejected}` are means of the summed log-probs.

    `rewards/accuracies` is the share of correctly classified completions. A desirable completion is
    classified correctly if its reward is above a threshold, and an undesirable one if its reward is
    below it. The threshold is beta * z0 for KTO and delta for BCO. Rewards that differ from it only
    by rounding errors count as incorrect.
    """

    loss_type: str
    beta: float
    desirable_weight: float
    undesirable_weight: float

    outputs = frozenset({"logprobs"})
    unit = "sequence"

    def denominators(self, minibatch: Sample) -> Mapping[str, float]:
        """Return the number of completions with trained tokens, under the key `sequences`."""
        return {"sequences": float(np.count_nonzero(count_trained_rows(minibatch)))}

    def __call__(
        self, out: Mapping[str, Array], batch: RowBatch, total: Mapping[str, float]
    ) -> tuple[Array, Mapping[str, Stat]]:
        xp = array_api_compat.array_namespace(out["logprobs"])
        scores, logps = compute_completion_scores(out["logprobs"], batch["ref_logprobs"], batch)
        key = LABELLED[self.loss_type]
        labels = batch["label"]
        baseline = batch[key]
        # Weights: 0 for completions without trained tokens.
        counted = xp.astype(batch.lengths > 0, scores.dtype)
        desirable = xp.astype(labels > 0.5, scores.dtype) * counted
        weights = self.desirable_weight * desirable + self.undesirable_weight * (
            counted - desirable
        )
        is_kto = self.loss_type == "kto"
        if is_kto:
            losses = compute_kto_loss(scores, labels, baseline, self.beta)
        else:
            losses = compute_bco_loss(scores, labels, baseline, self.beta)
        # Metrics: implicit rewards, and the share on the correct side of the threshold.
        threshold = self.beta * baseline if is_kto else baseline
        terms = self.beta * logps  # magnitude of the operands of `rewards`
        rewards = self.beta * fixed(scores)
        correct = xp.astype(is_above(rewards, threshold, terms), desirable.dtype) * desirable
        correct = correct + xp.astype(is_above(threshold, rewards, terms), desirable.dtype) * (
            counted - desirable
        )
        stats = _compute_label_stats(rewards, correct, logps, desirable, counted - desirable)
        stats[key] = Sum(xp.sum(baseline * counted), xp.sum(counted))
        return xp.sum(losses * weights) / max(total["sequences"], 1.0), stats

    def summary(self, stats: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics, with `rewards/margins` added if the minibatch has both labels.

        The margin is the mean desirable reward minus the mean undesirable reward.
        """
        metrics = dict(stats)
        if "rewards/chosen" in metrics and "rewards/rejected" in metrics:
            metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
        return metrics


def _compute_label_stats(
    rewards: Array, correct: Array, logps: Array, desirable: Array, undesirable: Array
) -> dict[str, Stat]:
    xp = array_api_compat.array_namespace(rewards)
    return {
        "rewards/chosen": Sum(xp.sum(rewards * desirable), xp.sum(desirable)),
        "rewards/rejected": Sum(xp.sum(rewards * undesirable), xp.sum(undesirable)),
        "rewards/accuracies": Sum(xp.sum(correct), xp.sum(desirable + undesirable)),
        "logps/chosen": Sum(xp.sum(logps * desirable), xp.sum(desirable)),
        "logps/rejected": Sum(xp.sum(logps * undesirable), xp.sum(undesirable)),
    }


TRANSPORTED = ("aot", "aot_unpaired")


def find_sorted_partners(
    values: npt.NDArray[np.float64], other: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Return, for each element of `values`, the element of `other` with the same rank, [P].

    Ties are ranked in their original order.
    """
    partners = np.empty_like(values)
    partners[np.argsort(values, kind="stable")] = np.sort(other, kind="stable")
    return partners


@dataclass(frozen=True)
class TransportLoss(Loss):
    """AOT loss: mean of -log sigmoid(beta (a - b)) over values a and b that are matched by sorting.

    `loss_type` determines these values:

        aot            a is log pi(better) - log pi(worse) of a pair under the policy, and b is the
                       same difference under the reference
        aot_unpaired   a is the log-ratio of policy to reference for a better completion, and b is
                       the log-ratio for a worse completion

    Before the model is updated, the host function `optimal_transport` sorts all a and all b of the
    batch. Values at the same position are matched. The function outputs the key `partner`, with one
    number per completion:

        aot            for the better completion of a pair: the b that is matched with the pair's a
        aot_unpaired   for a better completion: the b that is matched with its a;
                       for a worse completion: the a that is matched with its b

    No gradient flows through `partner`.

    The loss reads the keys `rank`, `ref_logprobs`, `partner` and, if present, `comparison`.
    `label_smoothing` has the same meaning as in cDPO. The metrics are the same as for
    `PairwiseLoss`.
    """

    loss_type: str
    beta: float
    label_smoothing: float

    outputs = frozenset({"logprobs"})
    unit = "group"

    def denominators(self, minibatch: Sample) -> Mapping[str, float]:
        """Return the number of pairs in the minibatch, under the key `pairs`."""
        return {"pairs": float(count_pairs(minibatch).sum())}

    def __call__(
        self, out: Mapping[str, Array], batch: RowBatch, total: Mapping[str, float]
    ) -> tuple[Array, Mapping[str, Stat]]:
        xp = array_api_compat.array_namespace(out["logprobs"])
        ratios, logps = compute_completion_scores(out["logprobs"], batch["ref_logprobs"], batch)
        better, worse = batch.pairs()
        partner = batch["partner"]
        if self.loss_type == "aot":
            sums = compute_completion_scores(out["logprobs"], None, batch)[0]
            losses = self._compute_losses(
                xp.take(sums, better) - xp.take(sums, worse) - xp.take(partner, better)
            )
        else:
            losses = self._average_both_sides(
                self._compute_losses(xp.take(ratios, better) - xp.take(partner, better)),
                self._compute_losses(xp.take(partner, worse) - xp.take(ratios, worse)),
            )
        stats = compute_pair_stats(ratios, logps, (better, worse), self.beta, logps)
        return xp.sum(losses) / max(total["pairs"], 1.0), stats

    def _compute_losses(self, delta: Float[Array, "P"]) -> Float[Array, "P"]:
        return compute_sigmoid_loss(delta, self.beta, self.label_smoothing)

    def _average_both_sides(
        self, better_loss: Float[Array, "P"], worse_loss: Float[Array, "P"]
    ) -> Float[Array, "P"]:
        """Return the mean of two losses, but with the gradient of their sum.

        The arguments are the losses of the better and of the worse completions. Each is computed
        over all comparisons, so the mean of both is reported. However, the gradient of each flows
        only through the completions on its own side, so the gradients are added.
        """
        total = better_loss + worse_loss
        return total - 0.5 * fixed(total)


LOSS_TYPES = (*KINDS, *TRANSPORTED, *LABELLED)
REFERENCE_FREE = tuple(name for name, kind in KINDS.items() if kind.score == "free")


@dataclass(frozen=True)
class PairLossOptions:
    """Options of the losses on pairs of completions, for online DPO."""

    loss_type: str = option(
        "sigmoid",
        "loss of a pair, as in dpo.loss_type; simpo and orpo have no reference model",
        choices=tuple(KINDS),
    )
    beta: float | None = option(
        None,
        "strength of the pull towards the reference (orpo: weight of the odds ratio); absent: "
        "0.1, or 2 for simpo",
    )
    label_smoothing: float = option(
        0.0,
        "share of labels assumed to be wrong; cDPO if set with sigmoid; required by robust; "
        "exo_pair replaces 0 by 0.001",
    )
    simpo_gamma: float = option(1.0, "target margin of simpo, in units of beta times the score")
    discopop_tau: float = option(
        0.05, "discopop: temperature of the switch from one loss to the other"
    )
    rpo_alpha: float = option(
        0.0, "weight of the chosen answer's cross-entropy, added to the loss (RPO)", at_least=0.0
    )
    f_divergence: str = option(
        "reverse_kl",
        "divergence between actor and reference (f-DPO); only for losses of the difference of two "
        "scores",
        choices=DIVERGENCES,
    )
    f_alpha: float = option(0.5, "alpha of f_divergence=alpha; 1 is reverse_kl")

    def build_args(self) -> dict[str, Any]:
        """Return the arguments of the loss `dpo`, with the loss type's own beta if none is set."""
        beta = find_default_beta(self.loss_type) if self.beta is None else self.beta
        return {**asdict(self), "beta": beta}


@dataclass(frozen=True)
class PreferenceLossOptions(PairLossOptions):
    """Options of all preference losses, for DPO."""

    loss_type: str = option(
        "sigmoid",
        "the loss; simpo and orpo have no reference model, kto and bco treat each answer of a "
        "pair as one labelled answer, aot and aot_unpaired compare the sorted scores of a whole "
        "batch",
        choices=LOSS_TYPES,
    )
    desirable_weight: float = option(1.0, "kto, bco: weight of desirable completions", at_least=0.0)
    undesirable_weight: float = option(
        1.0, "kto, bco: weight of undesirable completions", at_least=0.0
    )


@dataclass(frozen=True)
class PairwiseLoss(Loss):
    """Preference loss on pairs of completions: DPO and its variants.

    Two completions with the same sample id form a pair if their ranks (key `rank`) differ. The one
    with the lower rank is the better one. If the batch has the key `comparison`, completions form a
    pair only if their values of this key are equal.

    The loss of a pair is the preference loss selected by `loss_type` (a key of
    `preferences.KINDS`), plus `rpo_alpha` times the cross-entropy of the better completion. It is
    averaged over all pairs. The cross-entropy is the mean over the tokens of the completion (Pang
    et al. 2024, "Iterative Reasoning Preference Optimization", arXiv 2404.19733, eq. 1), whereas
    TRL's loss type `sft` averages over all tokens of a micro-batch.

    The key `ref_logprobs` is required unless the loss type works without a reference model.

    All metrics are means over pairs. `rewards/{chosen,rejected,margins,accuracies}` are computed
    from the implicit rewards, as in TRL. The implicit reward of a completion is beta times the sum
    of log pi - log ref for loss types with a reference model, and beta times the mean log-prob for
    the others. `logps/{chosen,rejected}` are the summed log-probs, and `nll` is the cross-entropy
    without the factor `rpo_alpha`.
    """

    loss_type: str
    beta: float
    label_smoothing: float
    simpo_gamma: float
    discopop_tau: float
    rpo_alpha: float
    f_divergence: str
    f_alpha: float

    outputs = frozenset({"logprobs"})
    unit = "group"

    def denominators(self, minibatch: Sample) -> Mapping[str, float]:
        """Return the number of pairs in the minibatch, under the key `pairs`."""
        return {"pairs": float(count_pairs(minibatch).sum())}

    def __call__(
        self, out: Mapping[str, Array], batch: RowBatch, total: Mapping[str, float]
    ) -> tuple[Array, Mapping[str, Stat]]:
        kind = KINDS[self.loss_type]
        logprobs = out["logprobs"]
        xp = array_api_compat.array_namespace(logprobs)
        # Scores of completions, and the loss of each pair.
        sums, logps = compute_completion_scores(
            logprobs, None if kind.score == "free" else batch["ref_logprobs"], batch
        )
        metric_scores = divide_by_tokens(sums, batch) if kind.score == "free" else sums
        scores = compute_divergence_score(sums, self.f_divergence, self.f_alpha)
        scores = scores if kind.score == "sum" else divide_by_tokens(scores, batch)
        better, worse = batch.pairs()
        losses = kind.loss(xp.take(scores, better), xp.take(scores, worse), self)
        # Metrics: implicit rewards and summed log-probs.
        terms = metric_scores if kind.score == "free" else logps
        stats = compute_pair_stats(metric_scores, logps, (better, worse), self.beta, terms)
        # Cross-entropy of the better completions.
        if self.rpo_alpha:
            nll = -xp.take(
                divide_by_tokens(compute_completion_scores(logprobs, None, batch)[0], batch), better
            )
            losses = losses + self.rpo_alpha * nll
            stats["nll"] = Sum(xp.sum(fixed(nll)), float(nll.shape[0]))
        return xp.sum(losses) / max(total["pairs"], 1.0), stats


DEFAULTS: Mapping[str, Any] = {
    spec.name: spec.default
    for spec in fields(PreferenceLossOptions)
    if spec.name not in ("loss_type", "beta")
}
BETA = 0.1


def find_default_beta(loss_type: str) -> float:
    """Return the default beta of a loss type: 0.1, unless the loss type defines its own default.

    Only `simpo` does, because its beta has a different scale.
    """
    if loss_type in KINDS:
        return KINDS[loss_type].defaults.get("beta", BETA)
    return BETA


def list_options(loss_type: str) -> set[str]:
    """Return the names of the options that a loss type reads in addition to beta."""
    if loss_type in LABELLED:
        return {"desirable_weight", "undesirable_weight"}
    if loss_type in TRANSPORTED:
        return {"label_smoothing"}
    kind = KINDS[loss_type]
    return {*kind.options, "rpo_alpha", *(("f_divergence", "f_alpha") if kind.divergences else ())}


@register_loss("dpo")
def build_preference_loss(
    loss_type: str = PreferenceLossOptions.loss_type,
    beta: float | None = PreferenceLossOptions.beta,
    **options: Any,
) -> PairwiseLoss | TransportLoss | LabelledLoss:
    """Return the preference loss `loss_type`, one of `LOSS_TYPES`.

    If `beta` is None, the default of the loss type is used. `options` can be any of the options in
    `DEFAULTS`. Raises `ConfigError` if an option that the loss type does not read differs from its
    default, or if a value is out of range.
    """
    if loss_type not in LOSS_TYPES:
        raise build_unknown_name_error("dpo.loss_type", loss_type, LOSS_TYPES)
    accepted = list_options(loss_type)
    for name, value in options.items():
        if name not in DEFAULTS:
            raise build_unknown_name_error("option of dpo", name, DEFAULTS)
        if name not in accepted and value != DEFAULTS[name]:
            raise ConfigError(
                f"dpo.{name}={value} has no meaning for dpo.loss_type={loss_type}; leave it out"
            )
    # A value equal to the general default is replaced by the loss type's own default.
    chosen = {**DEFAULTS, **options}
    if loss_type in KINDS:
        for name, default in KINDS[loss_type].defaults.items():
            if name in accepted and chosen[name] == DEFAULTS[name]:
                chosen[name] = default
    beta = find_default_beta(loss_type) if beta is None else beta
    _check_values(beta, chosen)
    kind: type[PairwiseLoss | TransportLoss | LabelledLoss] = PairwiseLoss
    if loss_type in LABELLED:
        kind = LabelledLoss
    elif loss_type in TRANSPORTED:
        kind = TransportLoss
    kind_options = {spec.name: chosen[spec.name] for spec in fields(kind) if spec.name in chosen}
    return kind(loss_type=loss_type, beta=beta, **kind_options)


def _check_values(beta: float, options: Mapping[str, Any]) -> None:
    if not beta > 0:
        raise ConfigError(f"dpo.beta={beta} must be above 0")
    if not 0.0 <= options["label_smoothing"] < 0.5:
        raise ConfigError(
            f"dpo.label_smoothing={options['label_smoothing']} must be at least 0 and below 0.5"
        )
    if options["f_divergence"] not in DIVERGENCES:
        raise build_unknown_name_error("dpo.f_divergence", options["f_divergence"], DIVERGENCES)
    if not options["discopop_tau"] > 0:
        raise ConfigError(f"dpo.discopop_tau={options['discopop_tau']} must be above 0")
    if not options["rpo_alpha"] >= 0:
        raise ConfigError(f"dpo.rpo_alpha={options['rpo_alpha']} must be at least 0")
