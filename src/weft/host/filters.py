"""Filters: host functions that keep some ids and drop the others.

Dropped ids leave the run's buffer, and the loader supplies new ids in their place.
"""

from __future__ import annotations

import numpy as np

from weft.algorithms.advantages import Vector, find_zero_variance
from weft.errors import ConfigError
from weft.registry import register_filter


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
