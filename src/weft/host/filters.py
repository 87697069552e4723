"""Host functions that let ids pass or not. What is left out leaves the run's buffer, and the loader brings others."""

from __future__ import annotations

import numpy as np

from weft.algorithms.advantages import zero_variance
from weft.algorithms.base import host_array
from weft.data.sample import SequenceSample
from weft.errors import ConfigError
from weft.host.base import HostContext
from weft.registry import register_function


@register_function("dynamic_sampling")
def dynamic_sampling(batch: SequenceSample, context: HostContext) -> SequenceSample:
    """Drop ids whose completions all have one reward: under a group baseline they teach nothing (DAPO, section 3.2).

    Reads `rewards` [1] of each completion, before any shaping. Makes `kept` [1], 1 for every id that passes: calls that must
    wait for the filter read it. Raises `ConfigError` where a group holds one completion (it would always be dropped).
    """
    group = batch.group_of("rewards")
    if (np.bincount(group, minlength=batch.num_ids) < 2).any():
        raise ConfigError(
            "dynamic_sampling compares the rewards of one prompt's completions, and a prompt has only one here; "
            "set group_size to 2 or more, or dynamic_sampling=false"
        )
    dull = zero_variance(host_array(batch.data["rewards"]).astype(np.float64), group)
    kept = [id for id, drop in zip(batch.ids, dull, strict=True) if not drop]
    context.record("kept_fraction", len(kept) / max(batch.num_ids, 1))
    return SequenceSample.from_default(kept, [1] * len(kept), {"kept": np.ones(len(kept), dtype=np.float32)})
