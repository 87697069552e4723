"""Host function for policy-gradient distillation: advantages from a teacher's log-probs."""

from __future__ import annotations

import numpy as np

from weft.algorithms.advantages import compute_discounted_sums, compute_segment_sums
from weft.algorithms.distill import TeacherAdvantages
from weft.data.sample import SequenceSample
from weft.errors import ConfigError
from weft.host._rows import CompletionRows
from weft.host.base import ConfiguredHostFunction, HostContext
from weft.registry import register_function


@register_function("teacher_advantages")
class TeacherAdvantagesFunction(ConfiguredHostFunction):
    """Host function that computes advantages from a teacher's log-probs of the sampled tokens.

    The reward of a token is log pi_teacher(token) - log pi_student(token), where pi_teacher and
    pi_student are the probabilities of the token under the two models. Its negative is an estimate
    of KL(student || teacher) at the token's position. The advantage of a token is the sum of its
    own reward and the later rewards in the completion, discounted by `discount` per token. Only
    trained tokens count.

    - With `discount` 0, the advantage is the token's own reward. The expected gradient is the
      gradient of the KL at each position, with the preceding tokens held fixed. "On-Policy
      Distillation" (Thinking Machines Lab 2025) does this.
    - With `discount` 1, all later rewards count fully. The gradient is the gradient of the KL
      between whole completions, with a much larger variance. MiniLLM (Gu et al. 2023, arXiv
      2306.08543, section 2.2) does this. Its methods for reducing the variance are not implemented
      here.

    Input keys, with one value per completion token:

    - `logprobs`: the sampler's log-probs
    - `teacher_logprobs`: the teacher's log-probs
    - `teacher_top1` (optional): 1 if the token is the teacher's most likely
    - `loss_mask` (optional): 1 if the token is trained

    The batch must also have the key `completion`, and can have the key `prompt`. Only their numbers
    of tokens are used: to separate the completions, and to exclude the first token after an empty
    prompt, which cannot be trained.

    The output key `advantages` has one value per completion token, 0 for tokens that are not
    trained.

    Metrics over trained tokens:

    - `kl_k1`: mean of log pi_student - log pi_teacher, an unbiased estimate of the KL that can be
      negative
    - `kl_k1_per_completion`: sum of the same differences in a completion, averaged over completions
    - `teacher_agreement`: mean of `teacher_top1`
    - `advantage_std`: standard deviation of the advantages
    """

    options_class = TeacherAdvantages

    def __init__(self, options: TeacherAdvantages) -> None:
        if not 0.0 <= options.discount <= 1.0:
            raise ConfigError(f"discount={options.discount} must be at least 0 and at most 1")
        self.options = options

    def __call__(self, batch: SequenceSample, context: HostContext) -> SequenceSample:
        rows = CompletionRows(batch)
        trained = rows.mask != 0.0
        log_ratios = (rows.read_tokens("logprobs") - rows.read_tokens("teacher_logprobs"))[trained]
        # Trained tokens only: tokens that the policy did not write are skipped and take no time
        # step.
        counts = compute_segment_sums(trained.astype(np.float64), rows.lengths).astype(np.int64)
        trained_advantages = compute_discounted_sums(-log_ratios, counts, self.options.discount)
        if len(log_ratios):
            context.record("kl_k1", float(log_ratios.mean()))
            context.record(
                "kl_k1_per_completion", float(compute_segment_sums(log_ratios, counts).mean())
            )
            context.record("advantage_std", float(trained_advantages.std()))
            if "teacher_top1" in batch.data:
                context.record(
                    "teacher_agreement", float(rows.read_tokens("teacher_top1")[trained].mean())
                )
        advantages = np.zeros(len(trained))
        advantages[trained] = trained_advantages
        return rows.build_token_sample(advantages=advantages)
