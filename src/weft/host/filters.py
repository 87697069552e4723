"""Host functions that let ids pass or not.

What is left out leaves the run's buffer, and the loader brings others.
"""

from __future__ import annotations

import numpy as np

from weft.algorithms.advantages import Vector, zero_variance
from weft.errors import ConfigError
from weft.registry import register_filter


@register_filter("dynamic_sampling")
def dynamic_sampling(rewards: Vector) -> bool:
    """Whether a prompt's completions differ in reward: under a group baseline others teach nothing
    (DAPO, section 3.2).

    `rewards`: one of each completion of one prompt, before any shaping. Raises `ConfigError` where
    there is one completion (it would always be dropped).
    """
    if len(rewards) < 2:
        raise ConfigError(
            "dynamic_sampling compares the rewards of one prompt's completions, and a prompt has "
            "only one here; "
            "set group_size to 2 or more, or dynamic_sampling=false"
        )
    return not zero_variance(rewards, np.zeros(len(rewards), dtype=np.int64))[0]
