"""Host function that makes preference pairs from the rewards of a prompt's sampled completions."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weft.algorithms.preferences import (
    PAIRS,
    PreferencesByReward,
    compare_best_and_worst,
    rank_by_reward,
)
from weft.data.sample import SequenceSample
from weft.errors import ConfigError, DataError, build_unknown_name_error
from weft.host._rows import CompletionRows, Vector, shape_rewards
from weft.host.base import ConfiguredHostFunction, HostContext
from weft.registry import register_function


@register_function("preferences_by_reward")
class PreferencesByRewardFunction(ConfiguredHostFunction):
    """Host function that ranks the sampled completions of each prompt by reward to form pairs.

    It outputs the keys `rank` and `comparison`, with one value per completion. `RowBatch.pairs`
    reads them: two completions of a prompt form a pair if they have the same `comparison` and
    different ranks. The option `pairs` determines which completions form pairs:

    - "best_worst": the best completion of a prompt and the worst one. If several completions are
      best, the first one is used; if several are worst, the last one.
    - "all": any two completions of a prompt.

    In both settings, completions with equal rewards form no pair. The rewards are first shaped by
    `RewardShaping`: bias, scale, clip, and a penalty for truncated completions.

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

    options_class = PreferencesByReward

    def __init__(self, options: PreferencesByReward) -> None:
        if options.pairs not in PAIRS:
            raise build_unknown_name_error("way to make pairs", options.pairs, PAIRS)
        self.options = options

    def __call__(self, batch: SequenceSample, context: HostContext) -> SequenceSample:
        rows = CompletionRows(batch)
        raw = rows.read_sequences("rewards")
        counts = np.diff(batch.offsets["completion"])
        _check_rewards(batch, rows, raw, counts)
        shaped = shape_rewards(self.options, raw, rows.read_sequences("finished"), context)
        rank_group = (
            compare_best_and_worst if self.options.pairs == "best_worst" else rank_by_reward
        )
        rankings = [rank_group(rewards) for rewards in np.split(shaped, np.cumsum(counts)[:-1])]
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


def _check_rewards(
    batch: SequenceSample, rows: CompletionRows, rewards: Vector, counts: npt.NDArray[np.int32]
) -> None:
    if (counts < 2).any():
        raise ConfigError(
            "preferences_by_reward compares the completions of one prompt, but a prompt has only "
            "one here; set "
            "samples_per_prompt to 2 or more"
        )
    invalid = np.flatnonzero(~np.isfinite(rewards))
    if len(invalid):
        raise DataError(
            f"{batch.ids[int(rows.group[invalid[0]])]}: a completion's reward is "
            f"{rewards[invalid[0]]}, which cannot be ranked; "
            "check the reward model"
        )
