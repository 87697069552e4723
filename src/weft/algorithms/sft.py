"""Supervised fine-tuning: cross-entropy of the answer's tokens."""

from __future__ import annotations

import math
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
    masked_mean,
    masked_sum,
    trained_rows,
)
from weft.errors import unknown_name
from weft.registry import register_loss

AVERAGES = ("token", "sequence")
LOSS_TYPES = ("cross_entropy", "poly")


def negative_log_likelihood(
    logprobs: Float[Array, "N"], weights: Float[Array, "N"]
) -> Float[Array, ""]:
    """-sum over rows of weight * log p(label), nats."""
    return -masked_sum(logprobs, weights)


def poly(logprobs: Float[Array, "N"], weights: Float[Array, "N"], eps: float) -> Float[Array, ""]:
    """Sum over rows of weight * (-log p(label) + eps (1 - p(label))): PolyLoss's first coefficient
    (Leng et al. 2022, arXiv:2204.12511, eq. 7); eps = 0 is cross-entropy.
    """
    xp = array_api_compat.array_namespace(logprobs)
    return masked_sum(eps * (1.0 - xp.exp(logprobs)) - logprobs, weights)


@register_loss("sft")
@dataclass(frozen=True)
class SFTLoss(Loss):
    """Mean over the minibatch of -log p(token | what precedes it) of trained tokens, nats.

    `average`: "token", every trained token of the minibatch weighs the same (the definition of
    cross-entropy; TRL since 2025); "sequence", every answer weighs the same, however long.
    Averaging each micro-batch first and then the averages, as older trainers do, is neither and
    depends on the micro-batch size.

    `loss_type=poly` adds `poly_eps` (1 - p(token)) to every term; `nll` stays cross-entropy's.
    """

    average: str = "token"
    loss_type: str = "cross_entropy"
    poly_eps: float = 1.0

    outputs = frozenset({"logprobs", "top1"})
    unit = "sequence"
    by_row = True

    def __post_init__(self) -> None:
        if self.average not in AVERAGES:
            raise unknown_name("average", self.average, AVERAGES)
        if self.loss_type not in LOSS_TYPES:
            raise unknown_name("loss_type", self.loss_type, LOSS_TYPES)

    def denominators(self, minibatch: Sample) -> Mapping[str, float]:
        """`tokens`: trained tokens; `sequences`: completions with at least one of them."""
        rows = trained_rows(minibatch)
        return {"tokens": float(rows.sum()), "sequences": float(np.count_nonzero(rows))}

    def __call__(
        self, out: Mapping[str, Array], batch: RowBatch, total: Mapping[str, float]
    ) -> tuple[Array, Mapping[str, Stat]]:
        logprobs = out["logprobs"]
        mask = batch.mask
        weights = row_weights(batch, total, self.average)
        stats: dict[str, Stat] = {
            "nll": masked_mean(-logprobs, mask),
            "accuracy": masked_mean(out["top1"], mask),
        }
        if self.loss_type == "poly":
            return poly(logprobs, weights, self.poly_eps), stats
        return negative_log_likelihood(logprobs, weights), stats

    def summary(self, stats: Mapping[str, float]) -> dict[str, float]:
        """Adds `perplexity` = exp(mean nll over tokens); above e^20 it is given as e^20."""
        made = dict(stats)
        if "nll" in made:
            made["perplexity"] = math.exp(min(made["nll"], 20.0))
        return made


def row_weights(batch: RowBatch, total: Mapping[str, float], average: str) -> Float[Array, "N"]:
    """What each row counts, [N], so that the sum of weight * value over all micro-batches is the
    minibatch's mean.

    "token": mask / trained tokens. "sequence": mask / (trained rows of the sequence * sequences
    with any).
    """
    if average == "token":
        return batch.mask / max(total["tokens"], 1.0)
    xp = array_api_compat.array_namespace(batch.mask)
    per_sequence = 1.0 / xp.clip(batch.lengths, 1.0, None)
    return batch.mask * batch.spread(per_sequence) / max(total["sequences"], 1.0)
