"""Losses of pairs of completions, as functions of their scores.

`delta` is score(better) - score(worse). There are three kinds of scores, computed from the
log-probs of a completion's L trained tokens under the policy and the reference:

    sum     g(sum of log pi(y_t) - log ref(y_t)), where g is `compute_divergence_score`
    mean    the score `sum`, divided by L                         IPO, sigmoid_norm
    free    sum of log pi(y_t) / L, without a reference           SimPO, ORPO

For online DPO, the module also forms pairs of sampled completions by their rewards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import array_api_compat
import numpy as np
from jaxtyping import Float

from weft.algorithms.advantages import Index, RewardShaping, Vector
from weft.algorithms.base import Array, RowBatch, Stat, Sum, fixed, log_sigmoid
from weft.errors import build_unknown_name_error
from weft.options import option

DIVERGENCES = ("reverse_kl", "forward_kl", "js", "alpha")
PAIRS = ("best_worst", "all")
EXPONENT_BOUND = 20.0  # Upper bound of exponents, so that no pair outweighs all others.


def compute_divergence_score(
    log_ratio: Float[Array, "S"], divergence: str, alpha: float = 0.5
) -> Float[Array, "S"]:
    """Return f'(t) of each completion, [S], where t = pi / ref and f defines the f-divergence.

    `log_ratio` is log t. The result is correct up to a constant, which cancels in the difference
    between two completions. The formulas are from Wang et al. 2023 ("Beyond Reverse KL", arXiv
    2309.16240, table 1); a is `alpha`:

        reverse_kl   log t                       as in DPO
        forward_kl   1 - 1 / t                   as in TRL; -1 / t in the paper
        js           log(2 t / (1 + t))
        alpha        (t^(a - 1) - 1) / (a - 1)   as in TRL; the paper's alpha is 1 - a;
                                                 log t if a = 1

    Exponents are limited to at most `EXPONENT_BOUND`. TRL uses a limit of 80, or none. Raises
    `ConfigError` for an unknown divergence.
    """
    xp = array_api_compat.array_namespace(log_ratio)
    if divergence == "reverse_kl" or (divergence == "alpha" and abs(alpha - 1.0) < 1e-6):
        return log_ratio
    if divergence == "forward_kl":
        return 1.0 - xp.exp(xp.clip(-log_ratio, None, EXPONENT_BOUND))
    if divergence == "js":
        return math.log(2.0) + log_sigmoid(log_ratio)
    if divergence == "alpha":
        return (xp.exp(xp.clip((alpha - 1.0) * log_ratio, None, EXPONENT_BOUND)) - 1.0) / (
            alpha - 1.0
        )
    raise build_unknown_name_error("dpo.f_divergence", divergence, DIVERGENCES)


def compute_sigmoid_loss(
    delta: Float[Array, "P"], beta: float, smoothing: float = 0.0
) -> Float[Array, "P"]:
    """Return -(1 - e) log sigmoid(beta delta) - e log sigmoid(-beta delta), e = `smoothing`.

    `delta` is the score of the better answer minus the score of the worse answer. With e = 0, this
    is DPO (Rafailov et al. 2023, eq. 7). With 0 < e < 1/2, it is cDPO (Mitchell 2023), for labels
    that are wrong with probability e.

    TRL 1.16 has no label smoothing in its loss type `sigmoid`, but its CPO trainer uses this
    formula. If each score is divided by the number of trained tokens of its answer, the loss is
    TRL's `sigmoid_norm`.
    """
    return -(1.0 - smoothing) * log_sigmoid(beta * delta) - smoothing * log_sigmoid(-beta * delta)


def compute_robust_loss(
    delta: Float[Array, "P"], beta: float, smoothing: float
) -> Float[Array, "P"]:
    """Return the DPO loss corrected for labels that are flipped with probability e = `smoothing`.

        [-(1 - e) log sigmoid(beta delta) + e log sigmoid(-beta delta)] / (1 - 2 e)

    `delta` is the score of the better answer minus the score of the worse answer. This is eq. 12 of
    Chowdhury et al. 2024, an unbiased estimate of the loss on clean labels. It can be negative.
    """
    unflipped = log_sigmoid(beta * delta)
    flipped = log_sigmoid(-beta * delta)
    return (-(1.0 - smoothing) * unflipped + smoothing * flipped) / (1.0 - 2.0 * smoothing)


def compute_hinge_loss(delta: Float[Array, "P"], beta: float) -> Float[Array, "P"]:
    """Return the SLiC hinge loss max(0, 1 - beta delta), as in table 1 of Liu et al. 2023 (RSO).

    `delta` is the score of the better answer minus the score of the worse answer.
    """
    xp = array_api_compat.array_namespace(delta)
    return xp.clip(1.0 - beta * delta, 0.0, None)


def compute_ipo_loss(delta: Float[Array, "P"], beta: float) -> Float[Array, "P"]:
    """Return (delta - 1 / (2 beta))^2 (Azar et al. 2023, eq. 17, where beta is called tau).

    `delta` is the score of the better answer minus the score of the worse answer. Scores of `ipo`
    are means over tokens: the authors confirmed to TRL that their own experiments used means.
    Scores of `ipo_sum` are sums, as in the equation and in EasyLM; the target gap then depends on
    the length.
    """
    xp = array_api_compat.array_namespace(delta)
    return xp.square(delta - 1.0 / (2.0 * beta))


def compute_simpo_loss(
    delta: Float[Array, "P"], beta: float, gamma: float, smoothing: float = 0.0
) -> Float[Array, "P"]:
    """Return the SimPO loss -log sigmoid(beta delta - gamma) (Meng et al. 2024, eq. 6), [P].

    `delta` is the difference of the two completions' mean log-probs per token. Labels are smoothed
    as in `compute_sigmoid_loss`.
    """
    return compute_sigmoid_loss(delta - gamma / beta, beta, smoothing)


def compute_log_odds(mean_logprob: Float[Array, "S"]) -> Float[Array, "S"]:
    """Return log(p / (1 - p)) of each completion, [S].

    p is exp(`mean_logprob`), clipped to at most exp(-1e-6) so that 1 - p is not 0.
    """
    xp = array_api_compat.array_namespace(mean_logprob)
    x = xp.clip(mean_logprob, None, -1e-6)
    near = x > -math.log(2.0)  # log(1 - e^x): expm1 near 0, log1p elsewhere (Maechler 2012)
    by_expm1 = xp.log(-xp.expm1(xp.where(near, x, -xp.ones_like(x))))
    by_log1p = xp.log1p(-xp.exp(xp.where(near, -xp.ones_like(x), x)))
    return x - xp.where(near, by_expm1, by_log1p)


def compute_orpo_loss(
    better: Float[Array, "P"], worse: Float[Array, "P"], beta: float
) -> Float[Array, "P"]:
    """Return -better - beta log sigmoid(log_odds(better) - log_odds(worse)) of each pair, [P].

    `better` and `worse` are mean log-probs per token. The source is Hong et al. 2024, eq. 6 and 7;
    `beta` is the paper's lambda. The first term is the cross-entropy of the better answer, averaged
    over its tokens as in the paper; TRL averages over all tokens of a micro-batch, prompts
    included.
    """
    return -better - beta * log_sigmoid(compute_log_odds(better) - compute_log_odds(worse))


def compute_exo_loss(delta: Float[Array, "P"], beta: float, smoothing: float) -> Float[Array, "P"]:
    """Return the EXO loss of each pair of answers, KL(q || p), [P].

    The distributions are q = (sigmoid(beta delta), sigmoid(-beta delta)) and p = (1 - e, e), with e
    = `smoothing` > 0 (Ji et al. 2024, "Towards Efficient Exact Optimization of Language Model
    Alignment", arXiv 2402.00856, eq. 16). `delta` is the score of the better answer minus the score
    of the worse answer.
    """
    xp = array_api_compat.array_namespace(delta)
    log_q = log_sigmoid(beta * delta)
    log_other = log_sigmoid(-beta * delta)
    return xp.exp(log_q) * (log_q - math.log1p(-smoothing)) + xp.exp(log_other) * (
        log_other - math.log(smoothing)
    )


def compute_nca_loss(
    better: Float[Array, "P"], worse: Float[Array, "P"], beta: float
) -> Float[Array, "P"]:
    """Return the NCA loss of pairs of answers, [P].

        -log sigmoid(beta better) - 1/2 log sigmoid(-beta better) - 1/2 log sigmoid(-beta worse)

    `better` and `worse` are the scores of the two answers. The source is Chen et al. 2024, "Noise
    Contrastive Alignment", arXiv 2402.05369, eq. 11.
    """
    return -log_sigmoid(beta * better) - 0.5 * (
        log_sigmoid(-beta * better) + log_sigmoid(-beta * worse)
    )


def compute_sppo_loss(
    better: Float[Array, "P"], worse: Float[Array, "P"], beta: float
) -> Float[Array, "P"]:
    """Return (better - 1 / (2 beta))^2 + (worse + 1 / (2 beta))^2 for each pair, [P].

    `better` and `worse` are the scores of the two answers. The source is Wu et al. 2024, "Self-Play
    Preference Optimization", arXiv 2405.00675, eq. 4.7, with the win probabilities P = 1 for the
    better answer and P = 0 for the worse answer; beta is 1 / eta.
    """
    xp = array_api_compat.array_namespace(better)
    return xp.square(better - 0.5 / beta) + xp.square(worse + 0.5 / beta)


def compute_bco_pair_loss(
    better: Float[Array, "P"], worse: Float[Array, "P"], beta: float
) -> Float[Array, "P"]:
    """Return -log sigmoid(beta better) - log sigmoid(-beta worse).

    `better` and `worse` are the scores of the two answers. This is BCO on pairs without its reward
    shift, as in TRL (Jung et al. 2024, "Binary Classifier Optimization", arXiv 2404.04656); the
    loss type `bco` has the shift.
    """
    return -log_sigmoid(beta * better) - log_sigmoid(-beta * worse)


def compute_apo_zero_loss(
    better: Float[Array, "P"], worse: Float[Array, "P"], beta: float
) -> Float[Array, "P"]:
    """Return 1 - sigmoid(beta better) + sigmoid(beta worse).

    `better` and `worse` are the scores of the two answers. The loss raises the likelihood of the
    better answer and lowers the likelihood of the worse answer. It suits data whose better answers
    are better than the model's own (D'Oosterlinck et al. 2024, "Anchored Preference Optimization",
    arXiv 2408.06266, eq. 7).
    """
    xp = array_api_compat.array_namespace(better)
    return xp.exp(log_sigmoid(-beta * better)) + xp.exp(log_sigmoid(beta * worse))


def compute_apo_down_loss(
    better: Float[Array, "P"], worse: Float[Array, "P"], beta: float
) -> Float[Array, "P"]:
    """Return sigmoid(beta better) + 1 - sigmoid(beta (better - worse)).

    `better` and `worse` are the scores of the two answers. The loss lowers the likelihood of both
    answers, but more so for the worse answer. It suits data whose answers are worse than the
    model's own (D'Oosterlinck et al. 2024, eq. 8).
    """
    xp = array_api_compat.array_namespace(better)
    return xp.exp(log_sigmoid(beta * better)) + xp.exp(log_sigmoid(-beta * (better - worse)))


def compute_discopop_loss(delta: Float[Array, "P"], beta: float, tau: float) -> Float[Array, "P"]:
    """Return (1 - m) * -log sigmoid(beta delta) + m exp(-beta delta).

    `delta` is the score of the better answer minus the score of the worse answer. The weight is m =
    sigmoid(beta delta / tau). The source is Lu et al. 2024, "Discovering Preference Optimization
    Algorithms", arXiv 2406.08414, eq. 5. The exponent is clipped to at most `EXPONENT_BOUND`; this
    has little effect, because m is close to 0 for large exponents.
    """
    xp = array_api_compat.array_namespace(delta)
    weight = xp.exp(log_sigmoid(beta * delta / tau))
    other_weight = xp.exp(log_sigmoid(-beta * delta / tau))
    return other_weight * -log_sigmoid(beta * delta) + weight * xp.exp(
        xp.clip(-beta * delta, None, EXPONENT_BOUND)
    )


@dataclass(frozen=True)
class PreferenceLossKind:
    """Preference loss for pairs of completions, with the scores and options that it needs.

    Attributes:
        loss: function that returns the loss of each pair, called with the better scores, the worse
            scores and the options
        score: kind of score that the loss compares: "sum", "mean" or "free"
        options: names of the options that the loss reads, besides beta
        defaults: values to use instead of the general defaults, by option name
        divergences: True if the user can choose an f-divergence
    """

    loss: Callable[[Array, Array, Any], Array]
    score: str = "sum"
    options: frozenset[str] = frozenset()
    defaults: Mapping[str, float] = field(default_factory=dict)
    divergences: bool = False


def _build_delta_kind(
    loss: Callable[[Array, Any], Array], *options: str, score: str = "sum"
) -> PreferenceLossKind:
    """Return the `PreferenceLossKind` of a loss that depends only on the difference of two scores.

    `loss` takes the better score minus the worse score, and the values of the options. `options`
    are the names of the options that the loss reads besides beta. `score` is the kind of score:
    "sum", "mean" or "free". Such a loss can be combined with every f-divergence.
    """
    return PreferenceLossKind(
        lambda b, w, o: loss(b - w, o), score, frozenset(options), divergences=True
    )


SMOOTHED = "label_smoothing"
KINDS: Mapping[str, PreferenceLossKind] = {
    "sigmoid": _build_delta_kind(
        lambda d, o: compute_sigmoid_loss(d, o.beta, o.label_smoothing), SMOOTHED
    ),
    "sigmoid_norm": _build_delta_kind(
        lambda d, o: compute_sigmoid_loss(d, o.beta, o.label_smoothing), SMOOTHED, score="mean"
    ),
    "robust": _build_delta_kind(
        lambda d, o: compute_robust_loss(d, o.beta, o.label_smoothing), SMOOTHED
    ),
    "hinge": _build_delta_kind(lambda d, o: compute_hinge_loss(d, o.beta)),
    "ipo": _build_delta_kind(lambda d, o: compute_ipo_loss(d, o.beta), score="mean"),
    "ipo_sum": _build_delta_kind(lambda d, o: compute_ipo_loss(d, o.beta)),
    "exo_pair": PreferenceLossKind(
        lambda b, w, o: compute_exo_loss(b - w, o.beta, o.label_smoothing),
        options=frozenset({SMOOTHED}),
        defaults={SMOOTHED: 1e-3},
        divergences=True,
    ),
    "discopop": _build_delta_kind(
        lambda d, o: compute_discopop_loss(d, o.beta, o.discopop_tau), "discopop_tau"
    ),
    "nca_pair": PreferenceLossKind(lambda b, w, o: compute_nca_loss(b, w, o.beta)),
    "sppo_hard": PreferenceLossKind(lambda b, w, o: compute_sppo_loss(b, w, o.beta)),
    "bco_pair": PreferenceLossKind(lambda b, w, o: compute_bco_pair_loss(b, w, o.beta)),
    "apo_zero": PreferenceLossKind(lambda b, w, o: compute_apo_zero_loss(b, w, o.beta)),
    "apo_down": PreferenceLossKind(lambda b, w, o: compute_apo_down_loss(b, w, o.beta)),
    "simpo": PreferenceLossKind(
        lambda b, w, o: compute_simpo_loss(b - w, o.beta, o.simpo_gamma, o.label_smoothing),
        "free",
        frozenset({SMOOTHED, "simpo_gamma"}),
        {"beta": 2.0},
    ),
    "orpo": PreferenceLossKind(lambda b, w, o: compute_orpo_loss(b, w, o.beta), "free"),
}


# -- pairs of sampled completions, for online DPO


@dataclass(frozen=True)
class PreferencesByReward(RewardShaping):
    """Options of the host function `preferences_by_reward`, which ranks completions by reward."""

    pairs: str = option(
        "best_worst",
        "pairs of a prompt's completions: only the best and the worst (best_worst), or all pairs "
        "(all); completions of equal reward form no pair",
        choices=PAIRS,
    )


def compare_best_and_worst(rewards: Vector) -> tuple[Index, Index, Vector]:
    """Return ranks [n], comparison indices [n] and the margin [1] of one prompt's completions.

    This implements the setting "best_worst". The best completion has rank 0, and the worst one has
    rank 1. Both have comparison index 0, so that they form a pair. Every other completion has a
    comparison index that no other completion has, so it belongs to no pair. The margin is the
    reward of the best completion minus the reward of the worst one. If all rewards are equal, the
    margin and all ranks are 0, and there is no pair.
    """
    rank = np.zeros(len(rewards), np.int64)
    comparison = np.arange(1, len(rewards) + 1)
    best = int(rewards.argmax())
    worst = len(rewards) - 1 - int(rewards[::-1].argmin())
    comparison[[best, worst]] = 0
    rank[worst] = int(rewards[best] > rewards[worst])
    return rank, comparison, rewards[[best]] - rewards[[worst]]


def rank_by_reward(rewards: Vector) -> tuple[Index, Index, Vector]:
    """Return ranks [n], comparison indices [n] and margins [C(n, 2)] of one prompt's completions.

    This implements the setting "all". All completions have comparison index 0, so that any two of
    them with different ranks form a pair. The completion with the highest reward has rank 0, and
    equal rewards have equal ranks. The margins are the absolute differences of the rewards of any
    two completions, including those with equal rewards.
    """
    rank = np.unique(-rewards, return_inverse=True)[1].astype(np.int64)
    first, second = np.triu_indices(len(rewards), 1)
    return rank, np.zeros_like(rank), np.abs(rewards[first] - rewards[second])


# Tolerance of sums of log-probs, in units of the last place: layouts sum in different orders.
ROUNDING = 8.0


def compute_completion_scores(
    logprobs: Float[Array, "N"], reference: Float[Array, "N"] | None, batch: RowBatch
) -> tuple[Float[Array, "S"], Float[Array, "S"]]:
    """Return (scores, summed log-probs) of completions over their trained tokens, [S] each.

    A score is the sum of log pi - log ref or, without a reference, of log pi. The summed log-probs
    have no gradient. The reference is subtracted from each token's log-prob rather than from the
    sum, which reduces rounding errors.
    """
    xp = array_api_compat.array_namespace(logprobs)
    token_scores = logprobs if reference is None else logprobs - reference
    sums = batch.sum(
        xp.where(batch.mask != 0, token_scores, xp.zeros_like(token_scores)) * batch.mask
    )
    return sums, batch.sum(fixed(logprobs) * batch.mask)


def divide_by_tokens(sums: Float[Array, "S"], batch: RowBatch) -> Float[Array, "S"]:
    """Return the sums divided by each completion's number of trained tokens, [S]."""
    xp = array_api_compat.array_namespace(sums)
    return sums / xp.clip(batch.lengths, 1.0, None)


def is_above(value: Array, other: Array, terms: Array) -> Array:
    """Return whether `value` exceeds `other` by more than rounding error, elementwise.

    The rounding error depends on the magnitude of the values from which `value` and `other` were
    computed. `terms` has values of this magnitude. The tolerance is 8 eps |terms|, where eps is the
    machine epsilon of the dtype. It is needed at the first step, when the policy equals its
    reference: the difference of their log-probs is then only rounding error, and says nothing about
    which answer is preferred.
    """
    xp = array_api_compat.array_namespace(value, other, terms)
    return value - other > ROUNDING * float(xp.finfo(terms.dtype).eps) * xp.abs(terms)


def compute_pair_stats(
    scores: Array, logps: Array, pairs: tuple[Array, Array], beta: float, terms: Array
) -> dict[str, Stat]:
    """Return the metrics of P pairs of completions, whose rewards are beta times their scores.

    `scores`, `logps` and `terms` are [S]; only `scores` can have a gradient. `pairs` are the
    indices [P] of the better and of the worse completions. A pair counts as correctly ordered if
    the better completion's reward is higher by more than rounding error (see `is_above`). The
    rounding error is estimated from the magnitude of beta * `terms`, the values from which the
    rewards were computed, such as log pi.
    """
    xp = array_api_compat.array_namespace(scores)
    better, worse = (beta * fixed(xp.take(scores, side)) for side in pairs)
    sizes = [xp.abs(beta * fixed(xp.take(terms, side))) for side in pairs]
    correct = xp.astype(is_above(better, worse, sizes[0] + sizes[1]), better.dtype)
    count = float(better.shape[0])
    return {
        "rewards/chosen": Sum(xp.sum(better), count),
        "rewards/rejected": Sum(xp.sum(worse), count),
        "rewards/margins": Sum(xp.sum(better - worse), count),
        "rewards/accuracies": Sum(xp.sum(correct), count),
        "logps/chosen": Sum(xp.sum(xp.take(logps, pairs[0])), count),
        "logps/rejected": Sum(xp.sum(xp.take(logps, pairs[1])), count),
    }
