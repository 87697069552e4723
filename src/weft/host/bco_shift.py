"""Host functions of losses on labelled completions: BCO's reward shift, and KTO's z0.

The shift is a running midpoint of desirable and undesirable rewards. z0 is the KL divergence from
the reference on mismatched completions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from weft.algorithms.advantages import compute_segment_sums
from weft.algorithms.base import to_host_array
from weft.data.sample import SequenceSample
from weft.errors import DataError
from weft.host._rows import CompletionRows
from weft.host.base import HostContext
from weft.registry import register_function


@register_function("bco_shift")
@dataclass
class BCOShift:
    """Host function that computes BCO's `reward_shift`, a running midpoint of rewards.

    The shift is (mean desirable reward + mean undesirable reward) / 2 over all completions so far,
    including those of this batch. Until completions of both labels have been seen, it is the mean
    reward of the label seen so far. The reward of a completion is beta times the sum of log
    pi(token) - log ref(token) over its trained tokens, where pi is the policy and ref the reference
    model.

    Jung et al. 2024, "Binary Classifier Optimization", arXiv 2404.04656, section 3.3.

    Input keys, with the shapes for a completion of L tokens:

    - `completion` [L], of which only the length is used
    - `old_logprobs` [L]: log-probs under the policy before its update
    - `ref_logprobs` [L]: log-probs under the reference model
    - `label` [1]: 1 if the completion is desirable, otherwise 0
    - `loss_mask` and `prompt`, if present
    """

    beta: float
    # sums and counts of the undesirable and the desirable rewards
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0], init=False)
    counts: list[float] = field(default_factory=lambda: [0.0, 0.0], init=False)

    def __call__(self, batch: SequenceSample, context: HostContext) -> SequenceSample:
        rows = CompletionRows(batch)
        rewards = self.beta * (rows.sum_tokens("old_logprobs") - rows.sum_tokens("ref_logprobs"))
        desirable = rows.read_sequences("label") > 0.5
        for label in range(2):
            label_rewards = rewards[desirable == bool(label)]
            self.sums[label] += float(label_rewards.sum())
            self.counts[label] += len(label_rewards)
        means = []
        for total, count in zip(self.sums, self.counts, strict=True):
            if count:
                means.append(total / count)
        shift = sum(means) / len(means) if means else 0.0
        context.record("reward_shift", shift)
        return rows.build_sequence_sample(reward_shift=np.full(len(rewards), shift))

    def state_dict(self) -> dict[str, Any]:
        return {"sums": list(self.sums), "counts": list(self.counts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sums = list(state["sums"])
        self.counts = list(state["counts"])


@register_function("kto_mismatch")
def kto_mismatch(batch: SequenceSample, context: HostContext) -> SequenceSample:
    """Pair each prompt with the completions of the next prompt.

    The last prompt is paired with the completions of the first. The completions are returned as
    `kl_completion`, and their `loss_mask` as `kl_mask` (ones if there is no `loss_mask`). The KTO
    paper (section 4.1) estimates z0 from such mismatched pairs. TRL forms the pairs in the same
    way, but within each micro-batch; weft forms them over the whole batch. A batch of one prompt,
    such as the last batch of an epoch, has no mismatched completions, so the mask and z0 are 0.
    """
    keys = {"completion": "kl_completion"}
    if "loss_mask" in batch.data:
        keys["loss_mask"] = "kl_mask"
    rolled = batch.select(ids=[*batch.ids[1:], batch.ids[0]], keys=keys).remap_keys(keys)
    mask = torch.ones(rolled.num_tokens("kl_completion"))
    if "kl_mask" in rolled.data:
        mask = rolled.data["kl_mask"]
    if batch.num_ids == 1:
        mask = torch.zeros_like(mask)
    sample = rolled.like("kl_completion", kl_completion=rolled.data["kl_completion"], kl_mask=mask)
    return replace(sample, ids=batch.ids)


@register_function("kto_baseline")
def kto_baseline(batch: SequenceSample, context: HostContext) -> SequenceSample:
    """Return KTO's z0 in nats as the key `kl_baseline`, which has the same value for every id.

    The log-ratio of a mismatched completion is the sum of `kl_logprobs` - `kl_ref_logprobs` over
    its tokens in `kl_mask`. z0 is the mean log-ratio, or 0 if the mean is negative. Raises
    `DataError` if `kl_logprobs` and `kl_ref_logprobs` have different lengths.
    """
    lengths = batch.lengths["kl_logprobs"].astype(np.int64)
    if not np.array_equal(lengths, batch.lengths["kl_ref_logprobs"]):
        raise DataError(
            "keys 'kl_logprobs' and 'kl_ref_logprobs' differ in lengths; both must score "
            "kl_completion"
        )
    ratio = to_host_array(batch.data["kl_logprobs"]).astype(np.float64) - to_host_array(
        batch.data["kl_ref_logprobs"]
    )
    sums = compute_segment_sums(ratio * to_host_array(batch.data["kl_mask"]), lengths)
    baseline = max(0.0, float(sums.mean()))
    context.record("kl_baseline", baseline)
    values = torch.full((batch.num_ids,), baseline, dtype=torch.float32)
    return SequenceSample.from_default(batch.ids, [1] * batch.num_ids, {"kl_baseline": values})
