"""BCO's reward shift: a running midpoint of desirable and undesirable rewards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weft.data.sample import SequenceSample
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
        for side in range(2):
            own = rewards[desirable == bool(side)]
            self.sums[side] += float(own.sum())
            self.counts[side] += len(own)
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
