"""Host functions that compute advantages over a whole batch, for PPO, GRPO and related algorithms.

The KL controller and the running statistics of values are part of the state of `gae_advantages`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.algorithms.advantages import (
    GAEAdvantages,
    GroupAdvantages,
    compute_decoupled_advantages,
    compute_discounted_sums,
    compute_gae,
    compute_informative_factor,
    compute_overlong_penalty,
    compute_pass_at_k,
    compute_pass_at_k_advantages,
    compute_segment_sums,
    compute_step_advantages,
    scale_advantages,
    subtract_baseline,
    whiten,
)
from weft.algorithms.base import to_host_array
from weft.algorithms.kl import (
    AdaptiveKLController,
    FixedKLController,
    KLController,
    ValueNormalizer,
    estimate_kl,
)
from weft.data.sample import SequenceSample
from weft.errors import ConfigError, DataError
from weft.host._rows import CompletionRows, Vector, compute_kl_rows, shape_rewards
from weft.host.base import ConfiguredHostFunction, HostContext
from weft.registry import register_function


@register_function("gae_advantages")
class GAEAdvantagesFunction(ConfiguredHostFunction):
    """Host function that computes PPO's `advantages` and `returns` for each completion token.

    The reward of token t is

        r_t = -kl_coef * KL_t (+ the completion's shaped reward at its last trained token)

    where KL_t is the estimated KL divergence from the reference model, and kl_coef is `kl_ctl`.
    With `use_adaptive_kl_ctl`, `kl_ctl` is only the initial value of kl_coef, which is adapted
    after each batch to keep the KL near a target. The advantages are computed from these rewards
    and the critic's values by generalised advantage estimation (GAE) over the trained tokens. They
    are then whitened over the whole batch if `adv_norm` is set.

    Input keys, with the number of values for a completion of L tokens:

    - `completion`, of which only the lengths are used
    - `rewards` [1], `finished` [1] and `values` [L + 1]
    - `logprobs` and `ref_logprobs`, if `kl_ctl` is above 0
    - `loss_mask` and `prompt`, if present
    - `token_rewards` [L], if present: the parts of the completion's reward that belong to single
      tokens, with NaN for tokens without a reward

    `truncated` determines the reward of a truncated completion. With "bootstrap", the critic's
    value of the next state replaces the reward, because the text is incomplete (ReaLHF). With
    "score", the completion gets its reward as if it had ended (TRL). The missing-eos penalty is
    subtracted in both cases.

    With `value_norm`, the critic predicts returns that are normalised by their running mean and
    standard deviation. The `values` are first converted to the units of rewards, and the `returns`
    are converted to the critic's units.
    """

    options_class = GAEAdvantages

    def __init__(self, options: GAEAdvantages) -> None:
        if options.truncated not in ("bootstrap", "score"):
            raise ConfigError(f"truncated={options.truncated!r} must be bootstrap or score")
        if options.truncated == "bootstrap" and options.missing_eos_reward is not None:
            raise ConfigError(
                f"missing_eos_reward={options.missing_eos_reward} and truncated=bootstrap both "
                f"replace the reward of a completion that hit the length limit; set one of them"
            )
        self.options = options
        adaptive = AdaptiveKLController(
            options.kl_ctl, options.adaptive_kl_target, options.adaptive_kl_horizon
        )
        self.controller: KLController
        if options.use_adaptive_kl_ctl:
            self.controller = adaptive
        else:
            self.controller = FixedKLController(options.kl_ctl)
        estimate_kl(np.zeros(0), np.zeros(0), options.kl_estimator)  # raises for an unknown name
        self.normalizer = ValueNormalizer(
            options.value_norm_type, options.value_norm_beta, options.value_norm_eps**0.5
        )

    def __call__(self, batch: SequenceSample, context: HostContext) -> SequenceSample:
        # Read the batch and compute the reward of each token.
        rows = CompletionRows(batch)
        mask = rows.mask
        finished = rows.read_sequences("finished")
        kl = self._compute_kl_penalty(rows, mask, context)
        values, final_values = self._read_values(rows)
        ended = (finished != 0.0) | (self.options.truncated == "score")
        rewards = self._compute_token_rewards(rows, mask, kl, ended, context)

        # Estimate advantages over the trained tokens only: tokens that the policy did not write are
        # skipped and take no time step.
        trained = mask != 0.0
        counts = compute_segment_sums(trained.astype(np.float64), rows.lengths).astype(np.int64)
        last_values = np.where(ended, 0.0, final_values)
        if self.options.whiten_rewards:
            rewards = whiten(rewards, trained.astype(np.float64), shift_mean=False)
        estimates = compute_gae(
            rewards[trained],
            values[trained],
            last_values,
            counts,
            discount=self.options.discount,
            lam=self.options.gae_lambda,
        )
        advantages = np.zeros(len(trained))
        advantages[trained] = estimates[0]
        returns = np.zeros(len(trained))
        returns[trained] = estimates[1]
        # Record metrics, and normalise returns and advantages.
        context.record("advantage_std", float(np.std(estimates[0])) if len(estimates[0]) else 0.0)
        context.record("return", float(np.mean(estimates[1])) if len(estimates[1]) else 0.0)
        if self.options.value_norm:
            self.normalizer.update(returns, mask)
            returns = self.normalizer.normalize(returns) * trained
        if self.options.adv_norm:
            advantages = whiten(advantages, trained.astype(np.float64))
        return rows.build_token_sample(advantages=advantages, returns=returns)

    def _compute_kl_penalty(
        self, rows: CompletionRows, mask: Vector, context: HostContext
    ) -> Vector:
        """Return the KL penalty of each token [T], and update the KL controller.

        The penalty of tokens that are not trained is 0. Raises `DataError` if `kl_ctl` is above 0
        and the reference's log-probs are missing.
        """
        if "ref_logprobs" not in rows.batch.data:
            if self.options.kl_ctl > 0:
                raise DataError(
                    f"kl_ctl={self.options.kl_ctl} needs the key ref_logprobs; add it to the node or set "
                    f"kl_ctl=0"
                )
            return np.zeros_like(mask)
        kl = compute_kl_rows(rows, mask, self.options.kl_estimator, context)
        by_completion = float(compute_segment_sums(kl, rows.lengths).mean())
        context.record("kl_coef", self.controller.value)
        penalty = kl * self.controller.value
        self.controller.update(by_completion, len(rows.lengths))
        return penalty

    def _read_values(self, rows: CompletionRows) -> tuple[Vector, Vector]:
        """Return the critic's values in the units of rewards, as two vectors.

        The first vector has the value before each completion token [T]. The second one has the
        value after the last token of each completion [S]. Raises `DataError` unless the key
        `values` has one value per token and one more per completion.
        """
        lengths = rows.lengths
        if not np.array_equal(rows.batch.lengths["values"], lengths + 1):
            raise DataError(
                "key 'values' must have one value per completion token and one after the last"
            )
        values = to_host_array(rows.batch.data["values"]).astype(np.float64)
        if self.options.value_norm:
            values = self.normalizer.denormalize(values)
        last = np.cumsum(lengths + 1) - 1
        return np.delete(values, last), values[last]

    def _compute_token_rewards(
        self,
        rows: CompletionRows,
        mask: Vector,
        penalty: Vector,
        ended: npt.NDArray[np.bool_],
        context: HostContext,
    ) -> Vector:
        """Return the reward of each token [T].

        A token's reward is its value in the key `token_rewards` (0 if it has none) times
        `reward_output_scaling`, minus its KL `penalty`. The last trained token of a completion also
        gets the remainder of the completion's reward: the reward minus the sum of the token
        rewards, shaped by `RewardShaping`.

        If `ended` is false for a completion, its last trained token does not get the remainder.
        Instead, `missing_eos_penalty` is subtracted from the reward of this token.
        """
        raw = rows.read_rewards()
        finished = rows.read_sequences("finished")
        by_token = np.zeros_like(mask)
        if "token_rewards" in rows.batch.data:
            by_token = np.nan_to_num(rows.read_tokens("token_rewards")) * mask
        outcome = shape_rewards(
            self.options, raw - compute_segment_sums(by_token, rows.lengths), finished, context
        )
        rewards = by_token * self.options.reward_output_scaling - penalty
        last = _find_last_trained(mask, rows.lengths)
        is_trained = last >= 0
        np.add.at(
            rewards,
            last[is_trained],
            np.where(ended, outcome, -self.options.missing_eos_penalty)[is_trained],
        )
        context.record("reward", float(raw.mean()))
        context.record("reward_after_kl", float(compute_segment_sums(rewards, rows.lengths).mean()))
        context.record("truncated_fraction", float((finished == 0.0).mean()))
        return rewards

    def state_dict(self) -> dict[str, Any]:
        return {
            "controller": self.controller.state_dict(),
            "normalizer": self.normalizer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.controller.load_state_dict(state["controller"])
        self.normalizer.load_state_dict(state["normalizer"])


def _find_last_trained(mask: Vector, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the position in `mask` of each completion's last trained token, int64 [S].

    The position is -1 for a completion without trained tokens.
    """
    last = np.full(len(lengths), -1, dtype=np.int64)
    rows = np.flatnonzero(mask != 0.0)
    owner = np.repeat(np.arange(len(lengths)), lengths)[rows]
    last[owner] = rows  # rows ascend, so the last assignment to an owner is its last row
    return last


@register_function("group_advantages")
class GroupAdvantagesFunction(ConfiguredHostFunction):
    """Host function that computes advantages within groups (GRPO and related algorithms).

    A group consists of the completions of one prompt. The function outputs the key `advantages`,
    with one value per completion token:

    1. The reward of each completion is shaped: bias, scale, clip, missing-eos penalty, and DAPO's
       soft overlong penalty.
    2. `baseline` is subtracted, and the difference is divided by `scale` (both are described in
       `weft.algorithms.advantages`). All trained tokens of the completion get the result.
    3. With `whiten`, the advantages are whitened over all trained tokens of the batch.

    Settings for known algorithms:

    - GRPO: baseline="group", scale="group"
    - Dr. GRPO: baseline="group", scale="none"
    - RLOO: baseline="leave_one_out", scale="none"
    - ReMax: baseline="given", scale="none"
    - REINFORCE++: baseline="none", scale="none", whiten=True (its variant with a baseline:
      baseline="group")
    - OPO: baseline="opo", scale="none"
    - GPG: baseline="group", scale="none", rescale_informative=True

    The KL penalty of a token is `kl_coef` times its KL to the reference. With a baseline, the sum
    of a completion's KL penalties is subtracted from its reward (verl, TRL's RLOO). Without one,
    the KL penalty of each token is subtracted from the advantages of this token and of all tokens
    before it (REINFORCE++).

    With `pass_k` = k, training with the advantages maximises pass@k, the probability that at least
    one of k completions of a prompt passes; `baseline` and `scale` are not used. A completion
    passes if its reward is above `pass_reward`. With `part_weights`, the rewards of each reward
    function are normalised separately and then added up with these weights (GDPO). With
    `mask_truncated`, the function also outputs a `loss_mask` that excludes truncated completions
    (DAPO's overlong filtering). `max_new_tokens` and `overlong_buffer` are in tokens; a buffer of 0
    disables the overlong penalty.

    Input keys, with the number of values for a completion of L tokens:

    - `completion` (only its length), `rewards` [1] and `finished` [1]
    - `logprobs` [L] and `ref_logprobs` [L], if `kl_coef` is not 0
    - `loss_mask` [L] and `prompt`, if present
    - `token_rewards` [L], if present: the reward of each reasoning step at the step's last token,
      and NaN at all other tokens. Each step then gets its own advantage.
    - `baseline_rewards` [1], `baseline_finished` [1] and `baseline_completion` (only its length),
      one per prompt, if `baseline` is "given". These rewards are shaped like `rewards`.
    - `reward_parts` [1, parts], if `part_weights` is set
    """

    options_class = GroupAdvantages

    def __init__(self, options: GroupAdvantages) -> None:
        if options.overlong_buffer and not options.overlong_buffer <= (options.max_new_tokens or 0):
            raise ConfigError(
                f"overlong_buffer={options.overlong_buffer} must be at most max_new_tokens "
                f"({options.max_new_tokens}), because the buffer is the end of a completion; set "
                f"max_new_tokens to the maximum number of tokens of a completion"
            )
        self.options = options
        self.scale = options.scale or "group"
        pair = np.arange(2.0)
        # Raise for unknown names
        subtract_baseline(pair, np.zeros(2, np.int64), options.baseline, pair, np.ones(2))
        scale_advantages(pair, pair, np.zeros(2, np.int64), self.scale)
        estimate_kl(np.zeros(0), np.zeros(0), options.kl_estimator)

    def __call__(self, batch: SequenceSample, context: HostContext) -> SequenceSample:
        rows = CompletionRows(batch)
        raw = rows.read_rewards()
        finished = rows.read_sequences("finished")
        mask = rows.mask
        context.record("reward", float(raw.mean()))
        # Select the trained tokens.
        trained = (mask != 0.0).astype(np.float64)
        if self.options.mask_truncated:
            trained = trained * np.repeat(finished != 0.0, rows.lengths)
        # Separate the rewards of steps from the rewards of completions.
        if "token_rewards" in batch.data:
            by_token = rows.read_tokens("token_rewards")
        else:
            by_token = None
        if by_token is not None:
            by_token = np.where(mask != 0.0, by_token, np.nan)
            raw = raw - compute_segment_sums(np.nan_to_num(by_token), rows.lengths)
        # Subtract the KL penalty, from completions or (without a baseline) from single tokens.
        if self.options.kl_coef:
            penalty = self.options.kl_coef * compute_kl_rows(
                rows, mask, self.options.kl_estimator, context
            )
        else:
            penalty = np.zeros_like(mask)
        if self.options.baseline == "none":
            completion_penalties = np.zeros(len(raw))
        else:
            completion_penalties = compute_segment_sums(penalty, rows.lengths)
        completion_advantages = self._compute_completion_advantages(
            rows, raw, finished, completion_penalties, context
        )
        context.record("advantage_std", float(completion_advantages.std()))
        advantages = np.repeat(completion_advantages, rows.lengths)
        if self.options.baseline == "none":
            advantages = advantages - compute_discounted_sums(penalty, rows.lengths, 1.0)
        if by_token is not None:
            advantages = advantages + compute_step_advantages(
                by_token, rows.lengths, rows.group, self.scale
            )
        if self.options.whiten:
            advantages = whiten(advantages, trained)
        else:
            advantages = advantages * trained
        keys = {"advantages": advantages}
        if self.options.mask_truncated:
            return rows.build_token_sample(**keys, loss_mask=mask * trained)
        return rows.build_token_sample(**keys)

    def _compute_completion_advantages(
        self,
        rows: CompletionRows,
        raw: Vector,
        finished: Vector,
        kl_penalties: Vector,
        context: HostContext,
    ) -> Vector:
        """Return one advantage per completion, [S].

        The three vectors also have one value per completion. `raw` is the reward before shaping,
        `finished` is 0 if the completion was truncated, and `kl_penalties` is the KL penalty to
        subtract.
        """
        overlong = self._compute_overlong_penalty(rows.lengths)
        group = rows.group
        if self.options.overlong_buffer:
            context.record("overlong_penalty", float(-overlong.mean()))
        if self.options.pass_k is not None:
            passed = (raw > self.options.pass_reward).astype(np.float64)
            context.record(
                f"pass@{self.options.pass_k}",
                float(compute_pass_at_k(passed, group, self.options.pass_k).mean()),
            )
            return compute_pass_at_k_advantages(passed, group, self.options.pass_k)
        if self.options.part_weights is not None:
            penalties = (
                overlong - kl_penalties - self.options.missing_eos_penalty * (finished == 0.0)
            )
            parts = to_host_array(rows.batch.data["reward_parts"]).astype(np.float64)
            return compute_decoupled_advantages(
                np.column_stack([parts, penalties]),
                np.array([*self.options.part_weights, 1.0]),
                group,
            )
        rewards = shape_rewards(self.options, raw, finished, context) + overlong - kl_penalties
        baseline_rewards = None
        if self.options.baseline == "given":
            baseline_rewards = self._compute_baseline_rewards(rows, context)
        lengths = compute_segment_sums((rows.mask != 0.0).astype(np.float64), rows.lengths)
        advantages = scale_advantages(
            subtract_baseline(rewards, group, self.options.baseline, baseline_rewards, lengths),
            rewards,
            group,
            self.scale,
        )
        if self.options.rescale_informative:
            return advantages * compute_informative_factor(rewards, group)
        return advantages

    def _compute_baseline_rewards(self, rows: CompletionRows, context: HostContext) -> Vector:
        """Return, for each completion, the shaped reward of its prompt's baseline completion, [S].

        All completions of a prompt share one baseline completion. The result includes the overlong
        penalty for the length of the baseline completion.
        """
        raw = rows.read_sequences("baseline_rewards")
        finished = rows.read_sequences("baseline_finished")
        context.record("baseline_reward", float(raw.mean()))
        lengths = rows.batch.lengths["baseline_completion"].astype(np.int64)
        shaped = shape_rewards(self.options, raw, finished, HostContext())
        return shaped + self._compute_overlong_penalty(lengths[rows.group])

    def _compute_overlong_penalty(self, lengths: npt.NDArray[np.int64]) -> Vector:
        """Return DAPO's soft overlong penalty (0 or negative) for the given lengths [S]."""
        if not (self.options.overlong_buffer and self.options.max_new_tokens):
            return np.zeros(len(lengths))
        return self.options.overlong_penalty * compute_overlong_penalty(
            lengths, self.options.max_new_tokens, self.options.overlong_buffer
        )
