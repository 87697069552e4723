"""Advantages: how much better a token or a completion was than expected.

They are computed on the host with numpy in float64. Values per token are stored as rows: the T rows
of S completions one after another, with the number of each completion's rows in `lengths` [S].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from jaxtyping import Float, Int

from weft.algorithms.kl import ESTIMATORS, NORMALIZERS
from weft.errors import ConfigError, build_unknown_name_error
from weft.options import option

Vector = npt.NDArray[np.float64]
Index = npt.NDArray[np.int64]

BASELINES = ("group", "leave_one_out", "opo", "given", "none")
SCALES = ("group", "batch", "none")


@dataclass(frozen=True)
class RewardShaping:
    """Options of the shaping of rewards before advantages or preferences are computed.

        clip((reward - bias) * scaling, -clip, clip) - missing_eos_penalty

    The penalty is subtracted only from the rewards of truncated completions. If
    `missing_eos_reward` is set, it first replaces their rewards. If the bound is None, the rewards
    are not clipped.
    """

    max_reward_clip: float | None = option(
        None, "bound of the absolute reward, after scaling and bias; null: no bound", at_least=0.0
    )
    reward_output_scaling: float = option(
        1.0, "factor for rewards, applied after the bias is subtracted"
    )
    reward_output_bias: float = option(0.0, "subtracted from rewards first")
    missing_eos_penalty: float = option(
        0.0, "subtracted from the reward of a completion that hit the length limit"
    )
    missing_eos_reward: float | None = option(
        None,
        "reward of a completion that hit the length limit, in place of its own; bias and scaling "
        "apply to it; null: its own reward",
    )


def compute_starts(lengths: Int[Index, "S"]) -> Int[Index, "S"]:
    """Return the index of each completion's first row, [S].

    The rows of all completions are stored one after another in one array.
    """
    return np.cumsum(lengths) - lengths


def compute_segment_sums(rows: Float[Vector, "T"], lengths: Int[Index, "S"]) -> Float[Vector, "S"]:
    """Return the sum of each completion's rows, [S]. The sum of an empty completion is 0."""
    owner = np.repeat(np.arange(len(lengths)), lengths)
    return np.bincount(owner, weights=rows, minlength=len(lengths)).astype(np.float64)


def compute_discounted_sums(
    rows: Float[Vector, "T"], lengths: Int[Index, "S"], factor: float
) -> Float[Vector, "T"]:
    """Return y [T] with y_t = x_t + factor * y_{t+1} within each completion.

    x is `rows`, the concatenated values of all completions, and `lengths` has the number of values
    of each completion. At the last value of a completion, y_t = x_t.
    """
    sums = np.array(rows, dtype=np.float64)
    order = np.argsort(-lengths, kind="stable")
    last = (compute_starts(lengths) + lengths - 1)[order]
    sorted_lengths = lengths[order]
    for offset in range(1, int(lengths.max(initial=0))):
        # Select the completions of more than `offset` rows.
        num_active = int(np.searchsorted(-sorted_lengths, -offset, side="left"))
        positions = last[:num_active] - offset
        sums[positions] += factor * sums[positions + 1]
    return sums


@dataclass(frozen=True)
class GAEAdvantages(RewardShaping):
    """Options of PPO's advantages: the KL penalty, GAE, and the scale of values.

    The host function `gae_advantages` computes the advantages, and describes the options in full.
    """

    max_reward_clip: float | None = option(
        20.0, "bound of the absolute reward, after scaling and bias; null: no bound", at_least=0.0
    )
    kl_ctl: float = option(
        0.05,
        "weight of the KL penalty in the reward; 0: no penalty and no reference model",
        at_least=0.0,
    )
    kl_estimator: str = option("k1", "estimator of the KL in the reward", choices=ESTIMATORS)
    use_adaptive_kl_ctl: bool = option(
        False, "adapt kl_ctl so that the KL of a completion approaches adaptive_kl_target"
    )
    adaptive_kl_target: float = option(
        6.0, "target of the adaptive kl_ctl, in nats per completion", at_least=0.0
    )
    adaptive_kl_horizon: float = option(
        10_000.0,
        "time constant of the adaptive kl_ctl, in completions; larger is slower",
        at_least=1.0,
    )
    discount: float = option(1.0, "discount per token (gamma)", at_least=0.0, at_most=1.0)
    gae_lambda: float = option(
        0.95, "lambda of generalised advantage estimation", at_least=0.0, at_most=1.0
    )
    adv_norm: bool = option(True, "whiten advantages over the whole batch")
    whiten_rewards: bool = option(
        False, "scale token rewards, with the KL penalty, to deviation 1 over the batch; same mean"
    )
    value_norm: bool = option(
        True, "train the critic on returns normalised by their running mean and standard deviation"
    )
    value_norm_type: str = option(
        "exp",
        "running statistics of returns: exponential average (exp) or mean over all so far (ma)",
        choices=NORMALIZERS,
    )
    value_norm_beta: float = option(
        0.99995, "decay of the exponential average", at_least=0.0, at_most=1.0
    )
    value_norm_eps: float = option(
        1e-5, "minimum variance of returns in the division", at_least=0.0
    )
    truncated: str = option(
        "score",
        "for completions that hit the length limit: use their reward (score), or no reward but "
        "the critic's value of the missing rest (bootstrap)",
        choices=("score", "bootstrap"),
    )


def compute_gae(
    rewards: Float[Vector, "T"],
    values: Float[Vector, "T"],
    last_values: Float[Vector, "S"],
    lengths: Int[Index, "S"],
    *,
    discount: float = 1.0,
    lam: float = 1.0,
) -> tuple[Float[Vector, "T"], Float[Vector, "T"]]:
    """Return (advantages, returns), both [T], computed by generalised advantage estimation.

        delta_t = r_t + discount V_{t+1} - V_t
        A_t = sum_l (discount lam)^l delta_{t+l}         Schulman et al. 2015, eq. 16
        R_t = A_t + V_t

    The T tokens belong to S completions, with `lengths` tokens each. `values` has V_t, the value
    of the state before each token. `last_values` has the value of the state after the last token of
    each completion: 0 if the completion ended, and the critic's value if it was truncated. Only
    trained tokens should be passed (as `weft.host.advantages` does), so that tokens written by
    tools are skipped and not discounted.
    """
    next_values = np.empty_like(values)
    next_values[:-1] = values[1:]
    has_tokens = lengths > 0
    next_values[(compute_starts(lengths) + lengths - 1)[has_tokens]] = last_values[has_tokens]
    advantages = compute_discounted_sums(
        rewards + discount * next_values - values, lengths, discount * lam
    )
    return advantages, advantages + values


def whiten(
    values: Float[Vector, "T"],
    mask: Float[Vector, "T"],
    *,
    shift_mean: bool = True,
    eps: float = 1e-8,
) -> Float[Vector, "T"]:
    """Return (x - mean) / sqrt(variance + eps) for values with mask 1, and 0 for all other values.

    With `shift_mean=False`, the mean is added back. Mean and variance are over all values with mask
    1. As in verl (`masked_whiten`) and TRL, the sum of squares is divided by n - 1; ReaLHF divides
    it by n. The variance of a single value is taken to be 0.
    """
    count = mask.sum()
    if count == 0:
        return np.zeros_like(values)
    mean = (values * mask).sum() / count
    variance = (np.square(values - mean) * mask).sum() / max(count - 1.0, 1.0)
    return ((values - mean) / np.sqrt(variance + eps) + (0.0 if shift_mean else mean)) * mask


@dataclass(frozen=True)
class PassThreshold:
    """Option of pass@k: the reward above which a completion passes."""

    pass_reward: float = option(0.5, "a completion passes if its reward is above this (pass@k)")


@dataclass(frozen=True)
class GroupAdvantages(RewardShaping, PassThreshold):
    """Options of advantages within groups of completions of one prompt (GRPO and others).

    The host function `group_advantages` computes the advantages, and describes the options in full.
    The fields without a help text are set by the experiment.
    """

    baseline: str = option(
        "group",
        "subtracted from each reward: mean of the group (group: GRPO), mean of the other "
        "completions (leave_one_out: RLOO), mean weighted by length (opo: OPO), reward of the "
        "greedy completion (greedy: ReMax), or nothing (none: REINFORCE++, with adv_norm)",
        choices=("group", "leave_one_out", "opo", "greedy", "none"),
    )
    scale: str | None = option(
        None,
        "divide advantages by the standard deviation of the rewards in the group or batch, or do "
        "not divide (none); absent: group, or none for dr_grpo",
        choices=SCALES,
    )
    whiten: bool = option(False, "whiten advantages over the whole batch (REINFORCE++)")
    rescale_informative: bool = option(
        False,
        "multiply advantages by prompts / prompts whose rewards differ, to compensate for those "
        "whose advantages are 0 (GPG)",
    )
    pass_k: int | None = option(
        None,
        "train for pass@k: at least one of k completions passes; replaces baseline and "
        "scale_rewards",
        at_least=1,
    )
    mask_truncated: bool = option(
        False, "exclude completions that hit the length limit from the loss"
    )
    overlong_buffer: int = option(
        0,
        "number of tokens before gen.max_new_tokens over which the overlong penalty grows (DAPO); "
        "0: no penalty",
        at_least=0,
    )
    overlong_penalty: float = option(1.0, "penalty of a completion of full length", at_least=0.0)
    max_new_tokens: int | None = None
    kl_coef: float = 0.0
    kl_estimator: str = "k1"
    part_weights: Sequence[float] | None = None


def compute_group_means(
    rewards: Float[Vector, "S"], group: Int[Index, "S"]
) -> tuple[Float[Vector, "S"], Int[Index, "S"]]:
    """Return the mean reward and the size of each completion's group, [S] each.

    `group` is the index of each completion's group, from 0.
    """
    size = np.bincount(group)
    sums = np.bincount(group, weights=rewards)
    return (sums / np.maximum(size, 1))[group], size[group].astype(np.int64)


def compute_weighted_means(
    values: Float[Vector, "S"], weights: Float[Vector, "S"], group: Int[Index, "S"]
) -> Float[Vector, "S"]:
    """Return the weighted mean of the values in each completion's group, [S].

    The mean is 0 for a group whose weights sum to 0.
    """
    sums = np.bincount(group, weights=values * weights)
    total = np.bincount(group, weights=weights)
    return np.divide(sums, total, out=np.zeros_like(sums), where=total > 0)[group]


def compute_group_stds(rewards: Float[Vector, "S"], group: Int[Index, "S"]) -> Float[Vector, "S"]:
    """Return the standard deviation of the rewards in each completion's group, [S].

    In a group of K completions, the sum of squared deviations is divided by K - 1, as in torch, TRL
    and verl.
    """
    mean, size = compute_group_means(rewards, group)
    squares = np.bincount(group, weights=np.square(rewards - mean))
    return np.sqrt(squares[group] / np.maximum(size - 1, 1))


def subtract_baseline(
    rewards: Float[Vector, "S"],
    group: Int[Index, "S"],
    baseline: str,
    given: Float[Vector, "S"] | None = None,
    lengths: Float[Vector, "S"] | None = None,
) -> Float[Vector, "S"]:
    """Return each completion's reward minus the chosen `baseline`, [S].

        group          mean reward of the group (GRPO, DeepSeekMath 2024, section 4.1.2)
        leave_one_out  mean reward of the other completions of the group (RLOO, Ahmadian et al.
                       2024, eq. 4); with K completions, the result is K / (K - 1) times the
                       result of `group`
        opo            sum of length * reward / sum of lengths over the group (OPO, Hao et al. 2025,
                       arXiv:2505.23585): the baseline of least variance if the gradients of tokens
                       are independent; `lengths` are numbers of trained tokens
        given          the values `given`, such as the reward of the greedy completion (ReMax, Li et
                       al. 2023, eq. 5)
        none           0 (REINFORCE; also REINFORCE++, Hu 2025, which whitens over the batch)

    The first three baselines need groups of at least two completions. Raises `ConfigError` for a
    smaller group, for the baseline `given` without values, and for an unknown baseline.
    """
    if baseline in ("group", "leave_one_out", "opo"):
        mean, size = compute_group_means(rewards, group)
        if (size < 2).any():
            raise ConfigError(
                f"baseline={baseline!r} compares the completions of one prompt, and a prompt has "
                f"only one here: every "
                "advantage would be 0; set group_size (samples_per_prompt) to 2 or more"
            )
        if baseline == "opo":
            assert lengths is not None, "opo weighs rewards by lengths"
            return rewards - compute_weighted_means(rewards, lengths, group)
        if baseline == "leave_one_out":
            scale = size / (size - 1)
        else:
            scale = np.ones_like(mean)
        return (rewards - mean) * scale
    if baseline == "given":
        if given is None:
            raise ConfigError(
                "baseline='given' needs the key baseline_rewards: the reward of each prompt's "
                "greedy completion"
            )
        return rewards - given
    if baseline == "none":
        return rewards.copy()
    raise build_unknown_name_error("baseline", baseline, BASELINES)


def scale_advantages(
    advantages: Float[Vector, "S"],
    rewards: Float[Vector, "S"],
    group: Int[Index, "S"],
    scale: str,
    eps: float = 1e-4,
) -> Float[Vector, "S"]:
    """Return the advantages divided by (standard deviation of the rewards + eps), [S].

    `scale` selects the standard deviation:

        group  over the completion's group (GRPO); 0 if all rewards of the group are equal
        batch  over all completions (TRL's scale_rewards=batch; Lite PPO, Liu et al. 2025)
        none   no division (Dr. GRPO, Liu et al. 2025: the division puts more weight on easy and on
               hard prompts)

    The default of `eps` is TRL's; verl uses 1e-6. For `scale="group"`, raises `ConfigError` if a
    group has only one completion.
    """
    if scale == "none":
        return advantages
    if scale == "group":
        if (compute_group_means(rewards, group)[1] < 2).any():
            raise ConfigError(
                "scale='group' divides by the deviation among the completions of one prompt, and "
                "each prompt has only one; "
                "set group_size (samples_per_prompt) to 2 or more, or scale to batch or none"
            )
        return advantages / (compute_group_stds(rewards, group) + eps)
    if scale == "batch":
        return advantages / (rewards.std(ddof=1 if len(rewards) > 1 else 0) + eps)
    raise build_unknown_name_error("scale", scale, SCALES)


def find_zero_variance(
    rewards: Float[Vector, "S"], group: Int[Index, "S"]
) -> npt.NDArray[np.bool_]:
    """Return a mask of the groups whose rewards are all equal, bool [G] for G groups.

    The advantages in such a group are 0 if the baseline is computed from the group.
    """
    groups = int(group.max(initial=-1)) + 1
    low = np.full(groups, np.inf)
    high = np.full(groups, -np.inf)
    np.minimum.at(low, group, rewards)
    np.maximum.at(high, group, rewards)
    return high == low


def compute_overlong_penalty(
    lengths: Int[Index, "S"], max_length: int, buffer: int
) -> Float[Vector, "S"]:
    """Return the length penalty of each completion, in [-1, 0] (DAPO, Yu et al. 2025, eq. 13).

    The penalty is added to the reward. It is 0 up to a length of `max_length` - `buffer` tokens,
    and decreases linearly to -1 at `max_length` and beyond.
    """
    over = (lengths - (max_length - buffer)) / buffer
    return -np.clip(over, 0.0, 1.0)


def compute_pass_at_k(
    passed: Float[Vector, "S"], group: Int[Index, "S"], k: int
) -> Float[Vector, "S"]:
    """Return pass@k of each completion's group, [S].

        1 - C(N - c, k) / C(N, k)         Chen et al. 2021 (Codex), eq. 1

    This is the probability that at least one of k completions passed, if the k are drawn without
    replacement from the N completions of the group, c of which passed. `passed` is 1 for
    completions that passed and 0 for others. `group` is the index of each completion's group.
    Raises `ConfigError` if a group has fewer than k completions.
    """
    size = np.bincount(group).astype(np.float64)
    if (size[size > 0] < k).any():
        raise ConfigError(
            f"pass@{k} needs {k} completions of each prompt, and one has "
            f"{int(size[size > 0].min())}"
        )
    num_failed = np.bincount(group, weights=1.0 - passed).astype(np.float64)
    return (1.0 - _choose_ratio(num_failed, size, k))[group]


@dataclass(frozen=True, kw_only=True)
class PassRates(PassThreshold):
    """Options of the metrics avg@k and pass@k; `count` is k."""

    count: int


def compute_pass_at_k_advantages(
    passed: Float[Vector, "S"], group: Int[Index, "S"], k: int
) -> Float[Vector, "S"]:
    """Return advantages for the reward "one of k completions passes", [S].

    They follow the analytical derivation of Chen et al. 2025, "Pass@k Training", arXiv:2508.10751.
    For N completions of a prompt, c of which passed, R = pass@k and s = sqrt(R (1 - R)) are the
    mean and the standard deviation of the reward over all subsets of k. A completion that passed
    has the advantage (1 - R) / s, since every subset that contains it passes. A completion that
    failed has (1 - R - C(N - c - 1, k - 1) / C(N - 1, k - 1)) / s. All advantages are 0 in a group
    that always or never passes. For k = 1, this is GRPO's advantage for rewards 0 and 1, with the
    standard deviation of the population.
    """
    rate = compute_pass_at_k(passed, group, k)
    size: Vector = np.bincount(group).astype(np.float64)[group]
    num_failed = np.bincount(group, weights=1.0 - passed)[group]
    missed = np.where(
        num_failed > 0, _choose_ratio(np.maximum(num_failed - 1.0, 0.0), size - 1.0, k - 1), 0.0
    )
    deviation = np.sqrt(rate * (1.0 - rate))
    gain = np.where(passed > 0, 1.0 - rate, 1.0 - rate - missed)
    return np.divide(gain, deviation, out=np.zeros_like(gain), where=deviation > 1e-12)


def _choose_ratio(part: Vector, whole: Vector, k: int) -> Vector:
    """Return the ratio of binomial coefficients C(part, k) / C(whole, k), elementwise.

    It is computed as a product of k factors, and is 0 where `part` < k.
    """
    ratio = np.ones_like(part)
    for taken in range(k):
        ratio = ratio * np.maximum(part - taken, 0.0) / np.maximum(whole - taken, 1.0)
    return ratio


def compute_informative_factor(rewards: Float[Vector, "S"], group: Int[Index, "S"]) -> float:
    """Return the number of groups divided by the number of groups with differing rewards.

    The factor compensates for groups whose advantages are all 0 (GPG, Chu et al. 2025,
    arXiv:2504.02546). It is 1 if no group has differing rewards. verl's `gpg` divides by the number
    of nonzero rewards instead.
    """
    same = find_zero_variance(rewards, group)
    return len(same) / max(int((~same).sum()), 1) if (~same).any() else 1.0


def compute_decoupled_advantages(
    parts: Float[Vector, "S P"],
    weights: Float[Vector, "P"],
    group: Int[Index, "S"],
    eps: float = 1e-4,
) -> Float[Vector, "S"]:
    """Return advantages computed from several rewards that are normalised separately, [S].

    This is GDPO (Liu et al. 2026, arXiv:2601.05242), or TRL's `normalize_then_sum`. Each column of
    `parts` is one reward, and is normalised to (r - group mean) / (group deviation + eps). The
    weighted sum of the columns is then normalised to mean 0 and deviation 1 over the batch. A
    reward that does not apply to a completion is NaN in `parts`, and counts as the mean of its
    group.
    """
    total = np.zeros(len(parts))
    for column, weight in zip(parts.T, weights, strict=True):
        applies = (~np.isnan(column)).astype(np.float64)
        values = np.nan_to_num(column)
        mean = compute_weighted_means(values, applies, group)
        count = np.bincount(group, weights=applies)[group]
        squares = np.bincount(group, weights=np.square(values - mean) * applies)[group]
        deviation = np.sqrt(squares / np.maximum(count - 1.0, 1.0))
        total += weight * applies * (values - mean) / (deviation + eps)
    deviation_of_all = total.std(ddof=1 if len(total) > 1 else 0)
    return (total - total.mean()) / (deviation_of_all + eps)


def compute_step_advantages(
    rewards: Float[Vector, "T"],
    lengths: Int[Index, "S"],
    group: Int[Index, "S"],
    scale: str,
    eps: float = 1e-4,
) -> Float[Vector, "T"]:
    """Return the advantage of each token, computed from one reward per reasoning step, [T].

    This is process supervision (DeepSeekMath 2024, section 4.1.3). `rewards` has the reward of a
    step at the step's last token, and NaN at all other tokens. The mean reward of all steps in the
    group is subtracted from each reward. If `scale` is "group" or "batch", the result is divided by
    the standard deviation of the rewards in the group or in the whole batch; if it is "none", there
    is no division. The advantage of a token is the sum of these normalized rewards over all steps
    of its completion that end at this token or later.
    """
    owner = np.repeat(np.arange(len(lengths)), lengths)
    steps = np.flatnonzero(~np.isnan(rewards))
    step_rewards = rewards[steps]
    step_groups = group[owner[steps]]
    if len(step_rewards):
        mean, size = compute_group_means(step_rewards, step_groups)
    else:
        mean, size = step_rewards, np.zeros(0, np.int64)
    centred = step_rewards - mean
    if scale == "group" and len(step_rewards):
        centred = centred / (compute_group_stds(step_rewards, step_groups) + eps)
    elif scale == "batch" and len(step_rewards) > 1:
        centred = centred / (step_rewards.std(ddof=1) + eps)
    rows = np.zeros(len(rewards))
    rows[steps] = np.where(size > 1, centred, 0.0)
    return compute_discounted_sums(rows, lengths, 1.0)
