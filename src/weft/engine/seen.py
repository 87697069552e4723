"""Selection of a few samples of each minibatch whose network outputs are kept for inspection.

The selection doesn't depend on ranks or micro-batches: it is the same in every layout.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from weft.data.groups import PART
from weft.data.sample import SequenceSample

IDS = 3  # ids of a minibatch that are kept
TOKENS = 65_536  # maximum tokens of all completions of an id; ids with more are not kept
KEPT = ("logprobs", "scores")


def choose_ids(ids: Iterable[str]) -> list[str]:
    """Choose at most `IDS` ids whose outputs are kept for inspection.

    These are the ids with the smallest hashes. Each rank may first choose among its own ids:
    choosing among the results of all ranks then gives the same ids as choosing among all ids.
    """
    return sorted(ids, key=lambda id: (zlib.crc32(id.encode("utf-8", "surrogatepass")), id))[:IDS]


def keep_outputs(
    part: SequenceSample, out: Mapping[Any, Tensor], chosen: Collection[str]
) -> SequenceSample | None:
    """Return a micro-batch's outputs for the ids in `chosen`, to be kept for inspection.

    Each completion of L tokens has `logprobs` [L] or `scores` [1], without gradients, on the device
    of `out`. Ids whose completions have more than `TOKENS` tokens in total are left out. Returns
    None if no id is left, if some ids may have completions outside this micro-batch, or if the loss
    uses neither log-probs nor scores.
    """
    names = [name for name in KEPT if name in out]
    if not names or any(name in part.metadata for name in (PART, "completion_of")):
        return None
    offsets = part.offsets["completion"]  # [num_ids + 1], in completions
    tokens = part.starts["completion"][offsets]  # [num_ids + 1]
    indices = []
    for index, id in enumerate(part.ids):
        if id in chosen and tokens[index + 1] - tokens[index] <= TOKENS:
            indices.append(index)
    if not indices:
        return None
    groups = [part.seqlens["completion"][index] for index in indices]
    lengths = {
        "logprobs": [group.tolist() for group in groups],
        "scores": [[1] * len(group) for group in groups],
    }
    ends: dict[str, Any] = {"logprobs": tokens, "scores": offsets}
    data = {}
    for name in names:
        data[name] = torch.cat(
            [
                out[name].detach()[int(ends[name][index]) : int(ends[name][index + 1])]
                for index in indices
            ]
        )
    return SequenceSample.from_groups(
        [part.ids[index] for index in indices], {name: lengths[name] for name in names}, data
    )
