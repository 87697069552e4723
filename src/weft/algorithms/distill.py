"""Distillation: training a student on a teacher's next-token distributions.

Completions come from the student or from the data. Each distribution has K + 1 events per position:
the teacher's K most likely ids, and "any other id". Merging events never increases a divergence
(the data-processing inequality). The divergences in this module are therefore lower bounds of the
divergences over the whole vocabulary, and equal to these if K is the vocabulary size.
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
    compute_masked_sum,
    count_trained_rows,
    fixed,
    masked_mean,
)
from weft.errors import ConfigError
from weft.options import option
from weft.registry import register_loss

# Lower bound of log-probs, in nats: its exp is 0, and unlike -inf it can be subtracted.
MIN_LOGPROB = -1e4


def compute_kl_divergence(p: Float[Array, "N E"], q: Float[Array, "N E"]) -> Float[Array, "N"]:
    """Return KL(p || q) of each row in nats, [N].

    `p` and `q` are the log-probs of the same E events. An event is a single token id or "any
    other id".
    """
    xp = array_api_compat.array_namespace(p, q)
    return xp.sum(xp.exp(p) * (p - q), axis=-1)


def compute_generalised_jsd(
    student: Float[Array, "N E"], teacher: Float[Array, "N E"], beta: float
) -> Float[Array, "N"]:
    """Return the generalised Jensen-Shannon divergence of each row in nats, [N].

        beta KL(teacher || M) + (1 - beta) KL(student || M),   M = beta teacher + (1 - beta) student

    This is eq. 1 of GKD (Agarwal et al. 2023, arXiv 2306.13649), and is at most log 2. `student`
    and `teacher` are finite log-probs of E events, which are single ids or "any other id".

    The expression is 0 for beta = 0 and for beta = 1. In these two cases, the function returns
    KL(teacher || student) and KL(student || teacher) instead, as in TRL
    (`GKDTrainer.generalized_jsd_loss`). There is thus a jump at both ends: for a small beta > 0,
    the result is close to beta * KL(teacher || student).
    """
    xp = array_api_compat.array_namespace(student, teacher)
    if beta == 0.0:
        return compute_kl_divergence(teacher, student)
    if beta == 1.0:
        return compute_kl_divergence(student, teacher)
    mixture = xp.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
    return beta * compute_kl_divergence(teacher, mixture) + (1.0 - beta) * compute_kl_divergence(
        student, mixture
    )


@register_loss("gkd")
@dataclass(frozen=True)
class GKDLoss(Loss):
    """Generalised JSD between teacher and student, averaged over trained tokens.

    At each position, both models' next-token distributions are reduced to K + 1 probabilities:
    one for each of the teacher's K most likely ids, and the total probability of all other ids.
    `compute_generalised_jsd` computes the divergence. For tokens from the data, `sft_coef` * -log
    p(token) is added to the loss.

    The loss reads these keys, for N completion tokens of S sequences:

        given_ids [N, K]             the teacher's most likely ids, most likely first
        teacher_logprobs [N, K + 1]  the teacher's log-probs of these ids; the last column is the
                                     log-prob of all other ids together
        completion [N]               token ids of the completions
        sampled [S]                  1 if the student wrote the completion, 0 if it is from the
                                     data; without this key, all completions are from the data

    Metrics are means over trained tokens, computed from the K + 1 probabilities:

        kl_exact               KL(student || teacher)
        forward_kl             KL(teacher || student)
        entropy_bound          lower bound of the student's entropy
        teacher_entropy_bound  lower bound of the teacher's entropy
        teacher_mass           total probability that the teacher assigns to its K most likely ids
        teacher_agreement      fraction of tokens that equal the teacher's most likely id
        nll                    -log p(token) of tokens from the data, if `sft_coef` is not 0

    Differences from other implementations:

    - TRL's GKDTrainer compares distributions over the whole vocabulary, at temperature 1. weft uses
      the sampler's temperature for both models. TRL's trainer for a teacher on a server also merges
      other ids into one probability.
    - NeMo RL uses the teacher's 64 most likely ids. It either normalises both models over these ids
      or sets the teacher's log-prob of every other id to -100.
    - The GKD paper first averages over the tokens of each completion. weft and TRL average over all
      tokens.
    """

    divergence_beta: float = option(
        0.5,
        "gkd: 0 is forward KL (teacher to student), 1 is reverse KL, values between them are "
        "generalised Jensen-Shannon",
        at_least=0.0,
        at_most=1.0,
    )
    sft_coef: float = option(
        0.0, "gkd: weight of the cross-entropy of the rows' own completions", at_least=0.0
    )

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
        """Return the number of trained tokens, under the key `tokens`."""
        return {"tokens": float(count_trained_rows(minibatch).sum())}

    def __call__(
        self, out: Mapping[str, Array], batch: RowBatch, total: Mapping[str, float]
    ) -> tuple[Array, Mapping[str, Stat]]:
        xp = array_api_compat.array_namespace(out["given_logprobs"])
        student, teacher = (
            xp.clip(log_probs, MIN_LOGPROB, None)
            for log_probs in (out["given_logprobs"], batch["teacher_logprobs"])
        )
        losses = compute_generalised_jsd(student, teacher, self.divergence_beta)
        stats = self._compute_stats(fixed(student), teacher, batch)
        if self.sft_coef:
            data_mask = batch.mask
            if "sampled" in batch:
                data_mask = data_mask * (1.0 - batch.spread(batch["sampled"]))
            stats["nll"] = masked_mean(-out["logprobs"], data_mask)
            losses = losses - self.sft_coef * xp.where(
                data_mask != 0, out["logprobs"], xp.zeros_like(losses)
            )
        return compute_masked_sum(losses, batch.mask) / max(total["tokens"], 1.0), stats

    def _compute_stats(
        self, student: Float[Array, "N E"], teacher: Float[Array, "N E"], batch: RowBatch
    ) -> dict[str, Stat]:
        xp = array_api_compat.array_namespace(student, teacher)
        agrees = batch["completion"] == batch["given_ids"][:, 0]
        row_values = {
            "kl_exact": compute_kl_divergence(student, teacher),
            "forward_kl": compute_kl_divergence(teacher, student),
            "entropy_bound": -xp.sum(xp.exp(student) * student, axis=-1),
            "teacher_entropy_bound": -xp.sum(xp.exp(teacher) * teacher, axis=-1),
            "teacher_mass": 1.0 - xp.exp(teacher[:, -1]),
            "teacher_agreement": xp.astype(agrees, student.dtype),
        }
        return {name: masked_mean(values, batch.mask) for name, values in row_values.items()}


@dataclass(frozen=True)
class TeacherAdvantages:
    """Options of the host function `teacher_advantages`, for a policy gradient on reverse KL."""

    discount: float = option(
        0.0,
        "reverse_kl: discount of the rewards of later tokens; 0: only the token's own reward",
        at_least=0.0,
        at_most=1.0,
    )
