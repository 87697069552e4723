"""Losses on single completions that are labelled desirable or undesirable: KTO and BCO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import array_api_compat
import numpy as np
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
from weft.algorithms.scores import compute_completion_scores, is_above


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

    In the names of the other metrics, "chosen" stands for desirable completions and "rejected" for
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
        taken = xp.astype(batch.lengths > 0, scores.dtype)
        good = xp.astype(labels > 0.5, scores.dtype) * taken
        weights = self.desirable_weight * good + self.undesirable_weight * (taken - good)
        kto = self.loss_type == "kto"
        each = (compute_kto_loss if kto else compute_bco_loss)(scores, labels, baseline, self.beta)
        # Metrics: implicit rewards, and the share on the correct side of the threshold.
        threshold = self.beta * baseline if kto else baseline
        terms = self.beta * logps  # magnitude of the operands of `rewards`
        rewards = self.beta * fixed(scores)
        right = xp.astype(is_above(rewards, threshold, terms), good.dtype) * good
        right = right + xp.astype(is_above(threshold, rewards, terms), good.dtype) * (taken - good)
        stats = _compute_label_stats(rewards, right, logps, good, taken - good)
        stats[key] = Sum(xp.sum(baseline * taken), xp.sum(taken))
        return xp.sum(each * weights) / max(total["sequences"], 1.0), stats

    def summary(self, stats: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics, with `rewards/margins` added if the minibatch has both labels.

        The margin is the mean desirable reward minus the mean undesirable reward.
        """
        metrics = dict(stats)
        if "rewards/chosen" in metrics and "rewards/rejected" in metrics:
            metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
        return metrics


def _compute_label_stats(
    rewards: Array, right: Array, logps: Array, good: Array, bad: Array
) -> dict[str, Stat]:
    xp = array_api_compat.array_namespace(rewards)
    return {
        "rewards/chosen": Sum(xp.sum(rewards * good), xp.sum(good)),
        "rewards/rejected": Sum(xp.sum(rewards * bad), xp.sum(bad)),
        "rewards/accuracies": Sum(xp.sum(right), xp.sum(good + bad)),
        "logps/chosen": Sum(xp.sum(logps * good), xp.sum(good)),
        "logps/rejected": Sum(xp.sum(logps * bad), xp.sum(bad)),
    }
