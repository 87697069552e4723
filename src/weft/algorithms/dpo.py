"""Preference losses without a reward model: DPO variants on pairs, KTO and BCO.

The formulas are in `preferences.py` and `labelled.py`; this module applies them to minibatches. KTO
and BCO train on single labelled completions instead of pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import array_api_compat

from weft.algorithms.base import Array, Loss, RowBatch, Sample, Stat, Sum, fixed
from weft.algorithms.labelled import LABELLED, LabelledLoss
from weft.algorithms.preferences import DIVERGENCES, KINDS, compute_divergence_score
from weft.algorithms.reward import count_pairs
from weft.algorithms.scores import compute_completion_scores, compute_pair_stats, divide_by_tokens
from weft.algorithms.transport import TRANSPORTED, TransportLoss
from weft.errors import ConfigError, build_unknown_name_error
from weft.options import option
from weft.registry import register_loss

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
    read = list_options(loss_type)
    for name, value in options.items():
        if name not in DEFAULTS:
            raise build_unknown_name_error("option of dpo", name, DEFAULTS)
        if name not in read and value != DEFAULTS[name]:
            raise ConfigError(
                f"dpo.{name}={value} has no meaning for dpo.loss_type={loss_type}; leave it out"
            )
    # A value equal to the general default is replaced by the loss type's own default.
    chosen = {**DEFAULTS, **options}
    for name, default in KINDS[loss_type].defaults.items() if loss_type in KINDS else ():
        if name in read and chosen[name] == DEFAULTS[name]:
            chosen[name] = default
    beta = find_default_beta(loss_type) if beta is None else beta
    _check_values(beta, chosen)
    kind: type[PairwiseLoss | TransportLoss | LabelledLoss] = PairwiseLoss
    if loss_type in LABELLED:
        kind = LabelledLoss
    elif loss_type in TRANSPORTED:
        kind = TransportLoss
    own = {spec.name: chosen[spec.name] for spec in fields(kind) if spec.name in chosen}
    return kind(loss_type=loss_type, beta=beta, **own)


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
