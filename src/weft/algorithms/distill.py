"""Distillation: a student learns a teacher's next-token distributions, on its own completions or on
given ones.

Distributions are those of K + 1 events a position: the teacher's K likeliest ids, and any other id.
To join events never moves two distributions apart (the data-processing inequality), so what is
measured here is a lower bound of the divergence over the whole vocabulary, and that divergence
itself where K is the vocabulary's size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import array_api_compat
from jaxtyping import Float

from weft.algorithms.base import (
    Array,
    Loss,
    Output,
    RowBatch,
    Sample,
    Stat,
    fixed,
    masked_mean,
    masked_sum,
    trained_rows,
)
from weft.errors import ConfigError
from weft.registry import register_loss

# Nats; what is less, minus infinity too, counts as this: its probability is 0, and it can be
# subtracted.
LEAST_LOGPROB = -1e4


def kl_divergence(one: Float[Array, "N E"], other: Float[Array, "N E"]) -> Float[Array, "N"]:
    """KL(one || other) of each row, nats, from the log-probs of E events."""
    xp = array_api_compat.array_namespace(one, other)
    return xp.sum(xp.exp(one) * (one - other), axis=-1)


def generalised_jsd(
    student: Float[Array, "N E"], teacher: Float[Array, "N E"], beta: float
) -> Float[Array, "N"]:
    """The generalised Jensen-Shannon divergence of each row, nats, from finite log-probs of E
    events:

        beta KL(teacher || M) + (1 - beta) KL(student || M),   M = beta teacher + (1 - beta) student

    (GKD, Agarwal et al. 2023, arXiv 2306.13649, eq. 1), at most log 2. At 0 and at 1, where this
    would be 0, it is what the divergence divided by beta, and by 1 - beta, comes near there:
    KL(teacher || student) and KL(student || teacher), as in TRL
    (`GKDTrainer.generalized_jsd_loss`). So a beta near 0 is nearly beta times the forward KL, and
    not that KL itself.
    """
    xp = array_api_compat.array_namespace(student, teacher)
    if beta == 0.0:
        return kl_divergence(teacher, student)
    if beta == 1.0:
        return kl_divergence(student, teacher)
    mixture = xp.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
    return beta * kl_divergence(teacher, mixture) + (1.0 - beta) * kl_divergence(student, mixture)


@register_loss("gkd")
@dataclass(frozen=True)
class GKDLoss(Loss):
    """Mean over the minibatch's trained tokens of `generalised_jsd`, plus `sft_coef` times -log
    p(token) of those tokens that the data wrote.

    Keys: `given_ids` [N, K], the teacher's likeliest ids, the first the likeliest;
    `teacher_logprobs` [N, K + 1], theirs and that of any other id; `sampled` [S], 1 where the
    student wrote the completion (without the key none is). Where implementations differ: TRL's
    GKDTrainer compares whole logits, at temperature 1 whatever the sampler's (here both have the
    sampler's), and its trainer for a teacher on a server has the event "any other id" too. NeMo RL
    takes the teacher's 64 likeliest ids and normalises both models over these, or calls all others
    of the teacher e^-100. Token mean, as TRL's; the paper divides by a completion's length first.

    Metrics, means over trained tokens, of the K + 1 events: `kl_exact` KL(student || teacher) and
    `forward_kl` KL(teacher || student); `entropy_bound` and `teacher_entropy_bound`, which the
    entropies reach at least; `teacher_mass`, the share of the teacher's probability that its K ids
    hold; `teacher_agreement`, how often the token is the teacher's likeliest; `nll`, where it
    counts, of the tokens that the data wrote.
    """

    divergence_beta: float = 0.5
    sft_coef: float = 0.0

    unit = "sequence"
    by_row = True

    def __post_init__(self) -> None:
        if not 0.0 <= self.divergence_beta <= 1.0:
            raise ConfigError(
                f"divergence_beta={self.divergence_beta} must be at least 0 (forward KL) and at "
                f"most 1 (reverse KL)"
            )
        if not self.sft_coef >= 0.0:
            raise ConfigError(f"sft_coef={self.sft_coef} must be at least 0")

    @property
    def outputs(self) -> frozenset[Output]:  # type: ignore[override]
        if self.sft_coef:
            return frozenset({"given_logprobs", "logprobs"})
        return frozenset({"given_logprobs"})

    def denominators(self, minibatch: Sample) -> Mapping[str, float]:
        """`tokens`: trained tokens."""
        return {"tokens": float(trained_rows(minibatch).sum())}

    def __call__(
        self, out: Mapping[str, Array], batch: RowBatch, total: Mapping[str, float]
    ) -> tuple[Array, Mapping[str, Stat]]:
        xp = array_api_compat.array_namespace(out["given_logprobs"])
        student, teacher = (
            xp.clip(each, LEAST_LOGPROB, None)
            for each in (out["given_logprobs"], batch["teacher_logprobs"])
        )
        each = generalised_jsd(student, teacher, self.divergence_beta)
        stats = self._stats(fixed(student), teacher, batch)
        if self.sft_coef:
            written = batch.mask
            if "sampled" in batch:
                written = written * (1.0 - batch.spread(batch["sampled"]))
            stats["nll"] = masked_mean(-out["logprobs"], written)
            each = each - self.sft_coef * xp.where(
                written != 0, out["logprobs"], xp.zeros_like(each)
            )
        return masked_sum(each, batch.mask) / max(total["tokens"], 1.0), stats

    def _stats(
        self, student: Float[Array, "N E"], teacher: Float[Array, "N E"], batch: RowBatch
    ) -> dict[str, Stat]:
        xp = array_api_compat.array_namespace(student, teacher)
        agrees = batch["completion"] == batch["given_ids"][:, 0]
        each = {
            "kl_exact": kl_divergence(student, teacher),
            "forward_kl": kl_divergence(teacher, student),
            "entropy_bound": -xp.sum(xp.exp(student) * student, axis=-1),
            "teacher_entropy_bound": -xp.sum(xp.exp(teacher) * teacher, axis=-1),
            "teacher_mass": 1.0 - xp.exp(teacher[:, -1]),
            "teacher_agreement": xp.astype(agrees, student.dtype),
        }
        return {name: masked_mean(values, batch.mask) for name, values in each.items()}
