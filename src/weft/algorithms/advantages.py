"""Advantages: how much better a token, or a whole completion, was than expected. Host-side, numpy, float64.

Ragged rows: T values of S completions one after another, `lengths` [S] of them each.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from jaxtyping import Float, Int

from weft.errors import ConfigError, unknown_name

Vector = npt.NDArray[np.float64]
Index = npt.NDArray[np.int64]

BASELINES = ("group", "leave_one_out", "given", "none")
SCALES = ("group", "batch", "none")


def starts_of(lengths: Int[Index, "S"]) -> Int[Index, "S"]:
    """Where each completion begins among the rows."""
    return np.cumsum(lengths) - lengths


def segment_sums(rows: Float[Vector, "T"], lengths: Int[Index, "S"]) -> Float[Vector, "S"]:
    """The sum of each completion's rows; 0 for an empty one."""
    owner = np.repeat(np.arange(len(lengths)), lengths)
    return np.bincount(owner, weights=rows, minlength=len(lengths)).astype(np.float64)


def reversed_discounted_sums(rows: Float[Vector, "T"], lengths: Int[Index, "S"], factor: float) -> Float[Vector, "T"]:
    """y_t = x_t + factor * y_{t+1} within each completion, y after its last row = 0.

    One vector operation a time step over the completions that are long enough: longest first, these are a prefix.
    """
    sums = np.array(rows, dtype=np.float64)
    order = np.argsort(-lengths, kind="stable")
    last = (starts_of(lengths) + lengths - 1)[order]
    long_enough = lengths[order]
    for back in range(1, int(lengths.max(initial=0))):
        active = int(np.searchsorted(-long_enough, -back, side="left"))  # completions of more than `back` rows
        here = last[:active] - back
        sums[here] += factor * sums[here + 1]
    return sums


def gae(
    rewards: Float[Vector, "T"],
    values: Float[Vector, "T"],
    last_values: Float[Vector, "S"],
    lengths: Int[Index, "S"],
    *,
    discount: float = 1.0,
    lam: float = 1.0,
) -> tuple[Float[Vector, "T"], Float[Vector, "T"]]:
    """(advantages, returns): generalised advantage estimation (Schulman et al. 2015, eq. 16) over ragged completions.

        delta_t = r_t + discount V_{t+1} - V_t,    A_t = sum_l (discount lam)^l delta_{t+l},    R_t = A_t + V_t

    `values` are V of the state before each token; `last_values` V after the last one: 0 where the completion has ended, the
    critic's value where it was cut off (it would have gone on). Trained tokens only: drop the others first
    (`weft.host.advantages` does), so that what a tool wrote is passed over and not discounted.
    """
    following = np.empty_like(values)
    following[:-1] = values[1:]
    held = lengths > 0
    following[(starts_of(lengths) + lengths - 1)[held]] = last_values[held]
    advantages = reversed_discounted_sums(rewards + discount * following - values, lengths, discount * lam)
    return advantages, advantages + values


def whiten(
    values: Float[Vector, "T"], mask: Float[Vector, "T"], *, shift_mean: bool = True, eps: float = 1e-5
) -> Float[Vector, "T"]:
    """(x - mean) / (std + eps) over the entries with mask 1; 0 elsewhere. `shift_mean` False puts the mean back.

    Over the whole batch, with the population's standard deviation (ReaLHF, verl). TRL's and trlX's divide the sum of squares
    by n - 1, and whiten each minibatch, which makes the gradient depend on how it was cut.
    """
    count = mask.sum()
    if count == 0:
        return np.zeros_like(values)
    mean = (values * mask).sum() / count
    std = np.sqrt((np.square(values - mean) * mask).sum() / count)
    return ((values - mean) / (std + eps) + (0.0 if shift_mean else mean)) * mask


def group_means(rewards: Float[Vector, "S"], group: Int[Index, "S"]) -> tuple[Float[Vector, "S"], Int[Index, "S"]]:
    """(mean reward of the completion's group, size of its group); `group` holds indices counted from 0."""
    size = np.bincount(group)
    sums = np.bincount(group, weights=rewards)
    return (sums / np.maximum(size, 1))[group], size[group].astype(np.int64)


def group_stds(rewards: Float[Vector, "S"], group: Int[Index, "S"]) -> Float[Vector, "S"]:
    """The sample standard deviation (divided by K - 1, as torch's, so TRL's and verl's) of the completion's group."""
    mean, size = group_means(rewards, group)
    squares = np.bincount(group, weights=np.square(rewards - mean))
    return np.sqrt(squares[group] / np.maximum(size - 1, 1))


def baselined(
    rewards: Float[Vector, "S"],
    group: Int[Index, "S"],
    baseline: str,
    given: Float[Vector, "S"] | None = None,
) -> Float[Vector, "S"]:
    """Reward less its baseline, one a completion.

    group          mean of the group (GRPO, DeepSeekMath 2024, section 4.1.2)
    leave_one_out  mean of the others of the group (RLOO, Ahmadian et al. 2024, eq. 4) = K / (K - 1) times the above
    given          a value from elsewhere: the reward of the greedy completion (ReMax, Li et al. 2023, eq. 5)
    none           0 (REINFORCE; REINFORCE++ of Hu 2025, which whitens over the batch instead)
    Raises `ConfigError` where a group baseline meets a group of 1: its advantages would all be 0.
    """
    if baseline in ("group", "leave_one_out"):
        mean, size = group_means(rewards, group)
        if (size < 2).any():
            raise ConfigError(
                f"baseline={baseline!r} compares the completions of one prompt, and a prompt has only one here: every "
                "advantage would be 0; set group_size (samples_per_prompt) to 2 or more"
            )
        scale = size / (size - 1) if baseline == "leave_one_out" else np.ones_like(mean)
        return (rewards - mean) * scale
    if baseline == "given":
        if given is None:
            raise ConfigError(
                "baseline='given' needs the key baseline_rewards: the reward of each prompt's greedy completion"
            )
        return rewards - given
    if baseline == "none":
        return rewards.copy()
    raise unknown_name("baseline", baseline, BASELINES)


def scaled(
    advantages: Float[Vector, "S"],
    rewards: Float[Vector, "S"],
    group: Int[Index, "S"],
    scale: str,
    eps: float = 1e-4,
) -> Float[Vector, "S"]:
    """Advantages divided by a standard deviation of rewards + eps.

    group  of the completion's group (GRPO); a group whose rewards are all alike gives 0
    batch  of all completions (TRL's scale_rewards=batch; Lite PPO, Liu et al. 2025)
    none   1 (Dr. GRPO, Liu et al. 2025: the division weighs easy and hard prompts up)
    `eps` is TRL's; verl has 1e-6.
    """
    if scale == "none":
        return advantages
    if scale == "group":
        if (group_means(rewards, group)[1] < 2).any():
            raise ConfigError(
                "scale='group' divides by the deviation among the completions of one prompt, and a prompt has only one here; "
                "set group_size (samples_per_prompt) to 2 or more, or scale to batch or none"
            )
        return advantages / (group_stds(rewards, group) + eps)
    if scale == "batch":
        return advantages / (rewards.std(ddof=1 if len(rewards) > 1 else 0) + eps)
    raise unknown_name("scale", scale, SCALES)


def zero_variance(rewards: Float[Vector, "S"], group: Int[Index, "S"]) -> npt.NDArray[np.bool_]:
    """bool [G]: groups whose rewards are all alike, which teach nothing under a group baseline."""
    groups = int(group.max(initial=-1)) + 1
    low, high = np.full(groups, np.inf), np.full(groups, -np.inf)
    np.minimum.at(low, group, rewards)
    np.maximum.at(high, group, rewards)
    return high == low


def soft_overlong(lengths: Int[Index, "S"], max_length: int, buffer: int) -> Float[Vector, "S"]:
    """What a completion's length takes off its reward, in [-1, 0] (DAPO, Yu et al. 2025, eq. 13).

    0 up to max_length - buffer tokens, then falling in a line to -1 at max_length and beyond.
    """
    over = (lengths - (max_length - buffer)) / buffer
    return -np.clip(over, 0.0, 1.0)
