"""Host function for the metrics of solved prompts, avg@k and pass@k."""

from __future__ import annotations

import numpy as np

from weft.algorithms.advantages import PassRates, compute_pass_at_k
from weft.algorithms.base import to_host_array
from weft.data.sample import SequenceSample
from weft.host.base import ConfiguredHostFunction, HostContext
from weft.registry import register_function


@register_function("pass_rates")
class PassRatesFunction(ConfiguredHostFunction):
    """Host function that records avg@k and pass@k as metrics, and outputs no keys.

    The metrics are computed over prompts with `count` = k completions each. `avg@k` is the mean
    reward of the completions. `pass@k` is the fraction of prompts for which at least one completion
    passes, which means that its reward is above `pass_reward`. If k is more than 1, `pass@1`, the
    fraction of completions that pass, is also recorded.

    Input key: `rewards` [1] of each completion.
    """

    options_class = PassRates

    def __call__(self, batch: SequenceSample, context: HostContext) -> None:
        rewards = to_host_array(batch.data["rewards"]).astype(np.float64)
        group = batch.group_of("rewards")
        passed = (rewards > self.options.pass_reward).astype(np.float64)
        first = np.unique(group, return_index=True)[1]
        context.record(f"avg@{self.options.count}", float(rewards.mean()))
        for k in {1, self.options.count}:
            context.record(f"pass@{k}", float(compute_pass_at_k(passed, group, k)[first].mean()))
