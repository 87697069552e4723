"""Preference losses without a reward model: DPO variants on pairs, KTO and BCO.

The formulas are in `preferences.py` and `labelled.py`; this module applies them to minibatches. KTO
and BCO train on single labelled completions instead of pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import array_api_compat

from weft.algorithms.base import Array, Loss, RowBatch, Sample, Stat, Sum, fixed
from weft.algorithms.labelled import LABELLED, LabelledLoss
from weft.algorithms.preferences import DIVERGENCES, KINDS, compute_divergence_score
from weft.algorithms.reward import count_pairs
from weft.algorithms.scores import compute_completion_scores, compute_pair_stats, divide_by_tokens
from weft.algorithms.transport import TRANSPORTED, TransportLoss
from weft.errors import ConfigError, build_unknown_name_error
from weft.registry import register_loss

LOSS_TYPES = (*KINDS, *TRANSPORTED, *LABELLED)
REFERENCE_FREE = tuple(name for name, kind in KINDS.items() if kind.score == "free")


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

    loss_type: str = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    simpo_gamma: float = 1.0
    discopop_tau: float = 0.05
    rpo_alpha: float = 0.0
    f_divergence: str = "reverse_kl"
    f_alpha: float = 0.5

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
        each = kind.loss(xp.take(scores, better), xp.take(scores, worse), self)
        # Metrics: implicit rewards and summed log-probs.
        rewards = (
            self.beta * fixed(xp.take(metric_scores, better)),
            self.beta * fixed(xp.take(metric_scores, worse)),
        )
        both = xp.take(logps, better), xp.take(logps, worse)
        if kind.score == "free":
            terms = rewards
        else:
            terms = (self.beta * both[0], self.beta * both[1])
        stats = compute_pair_stats(rewards, both, terms)
        # Cross-entropy of the better completions.
        if self.rpo_alpha:
            nll = -xp.take(
                divide_by_tokens(compute_completion_scores(logprobs, None, batch)[0], batch), better
            )
            each = each + self.rpo_alpha * nll
            stats["nll"] = Sum(xp.sum(fixed(nll)), float(nll.shape[0]))
        return xp.sum(each) / max(total["pairs"], 1.0), stats


DEFAULTS: Mapping[str, Any] = {
    "label_smoothing": 0.0,
    "simpo_gamma": 1.0,
    "discopop_tau": 0.05,
    "rpo_alpha": 0.0,
    "f_divergence": "reverse_kl",
    "f_alpha": 0.5,
    "desirable_weight": 1.0,
    "undesirable_weight": 1.0,
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
    loss_type: str = "sigmoid", beta: float | None = None, **options: Any
) -> PairwiseLoss | TransportLoss | LabelledLoss:
    """Return the preference loss `loss_type`, one of `LOSS_TYPES`.

    If `beta` is None, the default of the loss type is used. `options` can be any of the options in
    `DEFAULTS`. Raises `ConfigError` if an option that the loss type does not read differs from its
    default, or if a value is out of range.
    """
    if loss_type not in LOSS_TYPES:
        raise build_unknown_name_error("dpo.loss_type", loss_type, LOSS_TYPES)
    read = list_options(loss_type)
    for name, value in options.items():
        if name not in DEFAULTS:
            raise build_unknown_name_error("option of dpo", name, DEFAULTS)
        if name not in read and value != DEFAULTS[name]:
            raise ConfigError(
                f"dpo.{name}={value} has no meaning for dpo.loss_type={loss_type}; leave it out"
            )
    # A value equal to the general default is replaced by the loss type's own default.
    own = KINDS[loss_type].defaults if loss_type in KINDS else {}
    given = {}
    for name, default in DEFAULTS.items():
        if name in read:
            given[name] = options.get(name, default)
    chosen = {}
    for name, value in given.items():
        chosen[name] = own.get(name, value) if value == DEFAULTS[name] else value
    beta = find_default_beta(loss_type) if beta is None else beta
    _check_values(beta, chosen)
    if loss_type in LABELLED:
        return LabelledLoss(loss_type=loss_type, beta=beta, **chosen)
    if loss_type in TRANSPORTED:
        return TransportLoss(loss_type=loss_type, beta=beta, **chosen)
    return PairwiseLoss(loss_type=loss_type, beta=beta, **chosen)


def _check_values(beta: float, options: Mapping[str, Any]) -> None:
    if not beta > 0:
        raise ConfigError(f"dpo.beta={beta} must be above 0")
    if not 0.0 <= options.get("label_smoothing", 0.0) < 0.5:
        raise ConfigError(
            f"dpo.label_smoothing={options['label_smoothing']} must be at least 0 and below 0.5"
        )
    if options.get("f_divergence", "reverse_kl") not in DIVERGENCES:
        raise build_unknown_name_error("dpo.f_divergence", options["f_divergence"], DIVERGENCES)
    if not options.get("discopop_tau", 1.0) > 0:
        raise ConfigError(f"dpo.discopop_tau={options['discopop_tau']} must be above 0")
    if not options.get("rpo_alpha", 0.0) >= 0:
        raise ConfigError(f"dpo.rpo_alpha={options['rpo_alpha']} must be at least 0")
