"""What training saw of a few samples: the network's own outputs of them, kept for whoever looks at the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from weft.data.groups import PART
from weft.data.sample import SequenceSample

IDS, TOKENS = 4, 2048  # ids of a micro-batch that are kept, and their completion tokens together, but for the first id
KEPT = ("logprobs", "scores")


def first_ids(part: SequenceSample, out: Mapping[Any, Tensor]) -> SequenceSample | None:
    """The outputs `logprobs` [L] and `scores` [1] by completion of the first ids of a micro-batch, without their gradient and
    where they are; None where a group was cut, or the loss reads neither."""
    names = [name for name in KEPT if name in out]
    if not names or not part.num_ids or any(name in part.metadata for name in (PART, "completion_of")):
        return None
    tokens = part.starts["completion"][part.offsets["completion"]]  # [num_ids + 1]
    count = max(1, min(IDS, int(np.searchsorted(tokens, TOKENS, side="right")) - 1))
    of = part.seqlens["completion"][:count]
    lengths = {"logprobs": [each.tolist() for each in of], "scores": [[1] * len(each) for each in of]}
    sizes = {"logprobs": int(tokens[count]), "scores": int(part.offsets["completion"][count])}
    data = {name: out[name].detach()[: sizes[name]] for name in names}
    return SequenceSample.from_groups(part.ids[:count], {name: lengths[name] for name in names}, data)
