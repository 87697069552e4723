"""Reward models: one score per completion, trained on pairwise preferences (Bradley-Terry)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import array_api_compat
import numpy as np
import numpy.typing as npt
from jaxtyping import Float, Int

from weft.algorithms.base import (
    Array,
    Loss,
    RowBatch,
    Sample,
    Stat,
    Sum,
    fixed,
    log_sigmoid,
    to_host_array,
)
from weft.errors import ConfigError, build_unknown_name_error
from weft.options import option
from weft.registry import register_loss

LOSS_TYPES = ("ranking", "classification")


def compute_pair_loss(
    better: Float[Array, "P"], worse: Float[Array, "P"], margin: Float[Array, "P"]
) -> Float[Array, "P"]:
    """Return -log sigmoid(better - worse - margin) of each pair of scores, [P].

    This is the Bradley-Terry loss (Ouyang et al. 2022, eq. 1), with the margin of Llama 2 (Touvron
    et al. 2023, eq. 2).
    """
    return -log_sigmoid(better - worse - margin)


def compute_pair_shares(group: Int[Array, "P"], dtype: Any) -> Float[Array, "P"]:
    """Return 1 / (number of pairs of the same group) for each pair, [P], in `dtype`.

    With these weights, all groups count equally, however many pairs their ranking has. This is
    InstructGPT's 1 / C(K, 2), and Open-Assistant's mean over the means of groups. TRL supports only
    single pairs, which have the weight 1.
    """
    xp = array_api_compat.array_namespace(group)
    # `unique_counts` has a data-dependent output size, which cannot be compiled
    ordered = xp.sort(group)
    counts = xp.searchsorted(ordered, group, side="right") - xp.searchsorted(
        ordered, group, side="left"
    )
    return 1.0 / xp.astype(counts, dtype)


def count_pairs(minibatch: Sample) -> npt.NDArray[np.int64]:
    """Return the number of (better, worse) pairs of each sample id, int64 [num_ids].

    These are the pairs that `RowBatch.pairs` lists. To count them, only the data's `rank` and
    `comparison` are needed.
    """
    rank = to_host_array(minibatch.data["rank"])
    if "comparison" in minibatch.data:
        comparison = to_host_array(minibatch.data["comparison"])
    else:
        comparison = np.zeros_like(rank)
    group = minibatch.group_of("rank")
    # A comparison has C(n, 2) pairs, minus the pairs of equal rank.
    pairs = np.zeros(minibatch.num_ids, dtype=np.int64)
    for columns, sign in (((group, comparison), 1), ((group, comparison, rank), -1)):
        rows, counts = np.unique(np.stack(columns, axis=-1), axis=0, return_counts=True)
        np.add.at(pairs, rows[:, 0], sign * (counts * (counts - 1) // 2))
    return pairs


@register_loss("rw")
@dataclass(frozen=True)
class RewardLoss(Loss):
    """Pairwise loss of a reward model, averaged over each group's pairs and then over groups.

    A group that ranks k completions has C(k, 2) pairs. The loss of a pair is

        -log sigmoid(s_better - s_worse - margin)
            + score_l2 (s_better^2 + s_worse^2) / 2 + center (s_better + s_worse)^2

    The margin is the batch's key `margin`, or 0 without this key. `score_l2` keeps scores small; it
    is Open-Assistant's `score_l2_reg` (0.001 there). `center` keeps the two scores of a pair
    centered around 0; it is TRL's `center_rewards_coefficient` (Eisenstein et al. 2023; 0.01
    recommended).

    With `loss_type=classification`, all pairs of the minibatch have the same weight, so that a
    ranking of k completions counts C(k, 2) times. This is Open-Assistant's `RMCLSLoss`: the
    cross-entropy of choosing the better of two completions, where the softmax over two scores is
    the sigmoid of their difference.

    Metrics:

        accuracy     share of pairs in the right order; a tie is wrong
        margin       mean over pairs of the better score minus the worse score
        kendalltau   mean over groups of (right pairs - wrong pairs) / pairs; without ties, this is
                     Kendall's tau
        score        mean score of all completions
    """

    score_l2: float = option(
        0.0, "weight of the squared scores, which keeps them small", at_least=0.0
    )
    center: float = option(
        0.0,
        "weight of the squared sum of a pair's scores, which keeps their mean at 0",
        at_least=0.0,
    )
    loss_type: str = option(
        "ranking",
        "ranking: equal weight for every ranking, of any length; classification: equal weight for "
        "every pair",
        choices=LOSS_TYPES,
    )

    outputs = frozenset({"scores"})
    unit = "group"

    def __post_init__(self) -> None:
        for name in ("score_l2", "center"):
            if getattr(self, name) < 0:
                raise ConfigError(f"rw.{name}={getattr(self, name)} must be at least 0")
        if self.loss_type not in LOSS_TYPES:
            raise build_unknown_name_error("loss_type", self.loss_type, LOSS_TYPES)

    def denominators(self, minibatch: Sample) -> Mapping[str, float]:
        """Return the number of groups and the number of pairs, under the keys `groups` and `pairs`.

        A group consists of the completions of one sample id. Only groups with at least one pair are
        counted.
        """
        pairs = count_pairs(minibatch)
        return {"groups": float(np.count_nonzero(pairs)), "pairs": float(pairs.sum())}

    def __call__(
        self, out: Mapping[str, Array], batch: RowBatch, total: Mapping[str, float]
    ) -> tuple[Array, Mapping[str, Stat]]:
        scores = out["scores"]
        xp = array_api_compat.array_namespace(scores)
        better, worse = batch.pairs()
        high = xp.take(scores, better)
        low = xp.take(scores, worse)
        if "margin" in batch:
            margin = xp.take(batch["margin"], better)
        else:
            margin = xp.zeros_like(high)
        losses = compute_pair_loss(high, low, margin)
        if self.score_l2:
            losses = losses + self.score_l2 * (xp.square(high) + xp.square(low)) / 2
        if self.center:
            losses = losses + self.center * xp.square(high + low)
        shares = compute_pair_shares(xp.take(batch.group, better), scores.dtype)
        stats = _compute_stats(fixed(scores), fixed(high - low), shares)
        if self.loss_type == "classification":
            return xp.sum(losses) / max(total["pairs"], 1.0), stats
        return xp.sum(losses * shares) / max(total["groups"], 1.0), stats


def _compute_stats(
    scores: Float[Array, "S"], gap: Float[Array, "P"], shares: Float[Array, "P"]
) -> Mapping[str, Stat]:
    xp = array_api_compat.array_namespace(scores)
    correct = xp.astype(gap > 0, scores.dtype)
    incorrect = xp.astype(gap < 0, scores.dtype)
    return {
        "accuracy": Sum(xp.sum(correct), float(gap.shape[0])),
        "margin": Sum(xp.sum(gap), float(gap.shape[0])),
        "kendalltau": Sum(xp.sum((correct - incorrect) * shares), xp.sum(shares)),
        "score": Sum(xp.sum(scores), float(scores.shape[0])),
    }
