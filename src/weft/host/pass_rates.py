"""Host functions over a prompt's rewards: rates of solved prompts, and the filter dynamic_sampling."""

from __future__ import annotations

import numpy as np

from weft.algorithms.advantages import PassRates, Vector, compute_pass_at_k, find_zero_variance
from weft.algorithms.base import to_host_array
from weft.data.sample import SequenceSample
from weft.errors import ConfigError
from weft.host.base import ConfiguredHostFunction, HostContext
from weft.registry import register_filter, register_function


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


@register_filter("dynamic_sampling")
def dynamic_sampling(rewards: Vector) -> bool:
    """Return whether the completions of a prompt differ in reward (DAPO, section 3.2).

    Prompts whose completions all have the same reward are dropped, because the advantages are zero
    under a group baseline.

    `rewards` has the rewards of one prompt's completions, before any shaping. Raises `ConfigError`
    if there is only one completion, because the prompt would always be dropped.
    """
    if len(rewards) < 2:
        raise ConfigError(
            "dynamic_sampling compares the rewards of one prompt's completions, but a prompt "
            "has only one here; "
            "set group_size to 2 or more, or dynamic_sampling=false"
        )
    return not find_zero_variance(rewards, np.zeros(len(rewards), dtype=np.int64))[0]
