"""Host function that makes preference pairs from the rewards of a prompt's sampled completions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.data.sample import SequenceSample
from weft.errors import ConfigError, DataError, build_unknown_name_error
from weft.host._rows import CompletionRows, RewardShape, Vector
from weft.host.base import HostContext, StatelessHostFunction
from weft.registry import register_function

PAIRS = ("best_worst", "all")
Index = npt.NDArray[np.int64]


@register_function("preferences_by_reward")
@dataclass
class PreferencesByReward(StatelessHostFunction):
    """Host function that ranks the sampled completions of each prompt by reward to form pairs.

    It outputs the keys `rank` and `comparison`, with one value per completion. `RowBatch.pairs`
    reads them: two completions of a prompt form a pair if they have the same `comparison` and
    different ranks. The option `pairs` determines which completions form pairs:

    - "best_worst": the best completion of a prompt and the worst one. If several completions are
      best, the first one is used; if several are worst, the last one.
    - "all": any two completions of a prompt.

    In both settings, completions with equal rewards form no pair. The rewards are first shaped by
    `RewardShape`: bias, scale, clip, and a penalty for truncated completions.

    Guo et al. 2024, "Direct Language Model Alignment from Online AI Feedback", arXiv 2402.04792,
    use two completions; Dong et al. 2024, "RLHF Workflow", arXiv 2405.07863, compare the best of 8
    with the worst. TRL's OnlineDPOTrainer uses two completions and treats the first as better if
    rewards are equal.

    The batch must have the keys `completion`, `rewards` and `finished`. Raises `ConfigError` if a
    prompt has only one completion, and `DataError` for a reward that is not finite.

    Metrics:

    - `reward`: mean reward before shaping
    - `reward_margin`: mean difference of the shaped rewards in a pair
    - `tied_fraction`: fraction of the possible pairs that are not formed because their rewards are
      equal
    """

    pairs: str = "best_worst"
    max_reward_clip: float | None = None
    reward_output_scaling: float = 1.0
    reward_output_bias: float = 0.0
    missing_eos_penalty: float = 0.0

    def __post_init__(self) -> None:
        if self.pairs not in PAIRS:
            raise build_unknown_name_error("way to make pairs", self.pairs, PAIRS)

    def __call__(self, batch: SequenceSample, context: HostContext) -> SequenceSample:
        rows = CompletionRows(batch)
        raw = rows.read_sequences("rewards")
        counts = np.diff(batch.offsets["completion"])
        _check_rewards(batch, rows, raw, counts)
        shape = RewardShape(
            self.max_reward_clip,
            self.reward_output_scaling,
            self.reward_output_bias,
            self.missing_eos_penalty,
        )
        groups = np.split(
            shape(raw, rows.read_sequences("finished"), context), np.cumsum(counts)[:-1]
        )
        rankings = []
        for rewards in groups:
            rankings.append(
                (compare_best_and_worst if self.pairs == "best_worst" else rank_by_reward)(rewards)
            )
        margins = np.concatenate([margins for _, _, margins in rankings])
        context.record("reward", float(raw.mean()))
        context.record("tied_fraction", float((margins == 0.0).mean()))
        if margins.any():
            context.record("reward_margin", float(margins[margins > 0.0].mean()))
        return batch.one_per(
            "completion",
            rank=np.concatenate([rank for rank, _, _ in rankings]),
            comparison=np.concatenate([comparison for _, comparison, _ in rankings]),
        )


def compare_best_and_worst(rewards: Vector) -> tuple[Index, Index, Vector]:
    """Return ranks [n], comparison indices [n] and the margin [1] of one prompt's completions.

    This implements the setting "best_worst". The best completion has rank 0, and the worst one has
    rank 1. Both have comparison index 0, so that they form a pair. Every other completion has a
    comparison index of its own, so it belongs to no pair. The margin is the reward of the best
    completion minus that of the worst. If all rewards are equal, the margin and all ranks are 0,
    and there is no pair.
    """
    rank = np.zeros(len(rewards), np.int64)
    comparison = np.arange(1, len(rewards) + 1)
    best = int(rewards.argmax())
    worst = len(rewards) - 1 - int(rewards[::-1].argmin())
    comparison[[best, worst]] = 0
    rank[worst] = int(rewards[best] > rewards[worst])
    return rank, comparison, rewards[[best]] - rewards[[worst]]


def rank_by_reward(rewards: Vector) -> tuple[Index, Index, Vector]:
    """Return ranks [n], comparison indices [n] and margins [C(n, 2)] of one prompt's completions.

    This implements the setting "all". All completions have comparison index 0, so that any two of
    them with different ranks form a pair. The completion with the highest reward has rank 0, and
    equal rewards have equal ranks. The margins are the absolute differences of the rewards of any
    two completions, including those with equal rewards.
    """
    rank = np.unique(-rewards, return_inverse=True)[1].astype(np.int64)
    one, other = np.triu_indices(len(rewards), 1)
    return rank, np.zeros_like(rank), np.abs(rewards[one] - rewards[other])


def _check_rewards(
    batch: SequenceSample, rows: CompletionRows, rewards: Vector, counts: npt.NDArray[np.int32]
) -> None:
    if (counts < 2).any():
        raise ConfigError(
            "preferences_by_reward compares the completions of one prompt, but a prompt has only "
            "one here; set "
            "samples_per_prompt to 2 or more"
        )
    wrong = np.flatnonzero(~np.isfinite(rewards))
    if len(wrong):
        raise DataError(
            f"{batch.ids[int(rows.group[wrong[0]])]}: a completion's reward is "
            f"{rewards[wrong[0]]}, which cannot be ranked; "
            "check the reward model"
        )
