"""Supervised fine-tuning: cross-entropy of the tokens of answers."""

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
    compute_masked_sum,
    count_trained_rows,
    masked_mean,
)
from weft.errors import build_unknown_name_error
from weft.options import option
from weft.registry import register_loss

AVERAGES = ("token", "sequence")
LOSS_TYPES = ("cross_entropy", "poly")


def compute_nll(logprobs: Float[Array, "N"], weights: Float[Array, "N"]) -> Float[Array, ""]:
    """Return the sum over rows of weight * -log p(label), in nats."""
    return -compute_masked_sum(logprobs, weights)


def compute_poly_loss(
    logprobs: Float[Array, "N"], weights: Float[Array, "N"], eps: float
) -> Float[Array, ""]:
    """Return the sum over rows of weight * (-log p(label) + eps (1 - p(label))).

    This is PolyLoss with only its first coefficient (Leng et al. 2022, arXiv:2204.12511, eq. 7).
    With eps = 0, it is the cross-entropy.
    """
    xp = array_api_compat.array_namespace(logprobs)
    return compute_masked_sum(eps * (1.0 - xp.exp(logprobs)) - logprobs, weights)


@register_loss("sft")
@dataclass(frozen=True)
class SFTLoss(Loss):
    """Mean over trained tokens of -log p(token | preceding tokens), in nats.

    If `average` is "token", all trained tokens of the minibatch have the same weight, as in TRL
    since 2025. If it is "sequence", all answers have the same weight, regardless of their length.
    Older trainers do neither: they average within each micro-batch and then over micro-batches,
    which makes the result depend on the micro-batch size.

    With `loss_type=poly`, the loss of each token also has the term `poly_eps` * (1 - p(token)). The
    metric `nll` remains the cross-entropy.
    """

    average: str = option(
        "token",
        "unit of equal weight in the loss: every trained token, or every answer",
        choices=AVERAGES,
    )
    loss_type: str = option(
        "cross_entropy",
        "cross_entropy, or poly: cross-entropy plus poly_eps times 1 less the token's probability",
        choices=LOSS_TYPES,
    )
    poly_eps: float = option(1.0, "weight of the additional term of loss_type=poly", at_least=0.0)

    outputs = frozenset({"logprobs", "top1"})
    unit = "sequence"
    by_row = True

    def __post_init__(self) -> None:
        if self.average not in AVERAGES:
            raise build_unknown_name_error("average", self.average, AVERAGES)
        if self.loss_type not in LOSS_TYPES:
            raise build_unknown_name_error("loss_type", self.loss_type, LOSS_TYPES)

    def denominators(self, minibatch: Sample) -> Mapping[str, float]:
        """Return the number of trained tokens and the number of sequences with trained tokens.

        The keys are `tokens` and `sequences`.
        """
        rows = count_trained_rows(minibatch)
        return {"tokens": float(rows.sum()), "sequences": float(np.count_nonzero(rows))}

    def __call__(
        self, out: Mapping[str, Array], batch: RowBatch, total: Mapping[str, float]
    ) -> tuple[Array, Mapping[str, Stat]]:
        logprobs = out["logprobs"]
        mask = batch.mask
        weights = compute_row_weights(batch, total, self.average)
        stats: dict[str, Stat] = {
            "nll": masked_mean(-logprobs, mask),
            "accuracy": masked_mean(out["top1"], mask),
        }
        if self.loss_type == "poly":
            return compute_poly_loss(logprobs, weights, self.poly_eps), stats
        return compute_nll(logprobs, weights), stats

    def summary(self, stats: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics, with `perplexity` added: exp(mean nll over tokens), at most e^20."""
        metrics = dict(stats)
        if "nll" in metrics:
            metrics["perplexity"] = math.exp(min(metrics["nll"], 20.0))
        return metrics


def compute_row_weights(
    batch: RowBatch, total: Mapping[str, float], average: str
) -> Float[Array, "N"]:
    """Return the weight of each row in the average over the minibatch, [N].

    The average is the sum of weight * value over the rows of all micro-batches. With `average`
    "token", a weight is mask / (number of trained tokens). With "sequence", it is mask / (number of
    trained rows of the sequence * number of sequences with trained rows). `total` has the number of
    trained tokens and the number of sequences with trained rows in the whole minibatch, under the
    keys `tokens` and `sequences`.
    """
    if average == "token":
        return batch.mask / max(total["tokens"], 1.0)
    xp = array_api_compat.array_namespace(batch.mask)
    per_sequence = 1.0 / xp.clip(batch.lengths, 1.0, None)
    return batch.mask * batch.spread(per_sequence) / max(total["sequences"], 1.0)
