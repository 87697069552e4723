"""Host function for policy-gradient distillation: advantages from a teacher's log-probs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.algorithms.advantages import compute_discounted_sums, compute_segment_sums
from weft.data.sample import SequenceSample
from weft.errors import ConfigError
from weft.host._rows import CompletionRows
from weft.host.base import HostContext, StatelessHostFunction
from weft.registry import register_function


@register_function("teacher_advantages")
@dataclass
class TeacherAdvantages(StatelessHostFunction):
    """Host function that computes advantages from a teacher's log-probs of the sampled tokens.

    The key `advantages` has one value per completion token. For token t, it is the sum over trained
    tokens s >= t of discount^(s - t) (log pi_teacher - log pi_student)(token s), where pi_teacher
    and pi_student are the probabilities under teacher and student.

    The reward of a token is thus log pi_teacher - log pi_student. Its negative is an estimate of
    KL(student || teacher) at the token's position. With `discount` 0, as in "On-Policy
    Distillation" (Thinking Machines Lab 2025), only a token's own reward counts, and the expected
    gradient is that of the KL at each position, with the preceding tokens held fixed. With
    `discount` 1, all later rewards count too, and the gradient is that of the KL between whole
    completions, with a much larger variance. MiniLLM (Gu et al. 2023, arXiv 2306.08543, section
    2.2) does this, and reduces the variance by methods that are not implemented here (length
    normalisation, a separate first step, samples mixed with the teacher's).

    Input keys, with one value per completion token: `logprobs` of the sampler, `teacher_logprobs`
    and, if present, `teacher_top1` (1 if the token is the teacher's most likely) and `loss_mask`;
    also the lengths of `completion`, and `prompt` if present.

    Metrics over trained tokens:

    - `kl_k1`: mean of log pi_student - log pi_teacher, an unbiased estimate of the KL that can be
      negative
    - `kl_k1_per_completion`: sum of the same differences in a completion, averaged over completions
    - `teacher_agreement`: mean of `teacher_top1`
    - `advantage_std`: standard deviation of the advantages
    """

    discount: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.discount <= 1.0:
            raise ConfigError(f"discount={self.discount} must be at least 0 and at most 1")

    def __call__(self, batch: SequenceSample, context: HostContext) -> SequenceSample:
        rows = CompletionRows(batch)
        trained = rows.mask != 0.0
        apart = (rows.read_tokens("logprobs") - rows.read_tokens("teacher_logprobs"))[trained]
        # Trained tokens only: tokens that the policy did not write are skipped and take no time
        # step.
        counts = compute_segment_sums(trained.astype(np.float64), rows.lengths).astype(np.int64)
        trained_advantages = compute_discounted_sums(-apart, counts, self.discount)
        if len(apart):
            context.record("kl_k1", float(apart.mean()))
            context.record(
                "kl_k1_per_completion", float(compute_segment_sums(apart, counts).mean())
            )
            context.record("advantage_std", float(trained_advantages.std()))
            if "teacher_top1" in batch.data:
                context.record(
                    "teacher_agreement", float(rows.read_tokens("teacher_top1")[trained].mean())
                )
        advantages = np.zeros(len(trained))
        advantages[trained] = trained_advantages
        return rows.build_token_sample(advantages=advantages)
