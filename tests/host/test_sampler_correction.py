"""The host function that corrects for the sampler, and the metrics of its weights."""

from __future__ import annotations

import math

import pytest
import torch

from weft.algorithms.ppo import SamplerCorrection
from weft.data.sample import SequenceSample
from weft.host.base import HostContext
from weft.host.sampler_correction import SamplerCorrectionFunction


def test_metrics_tell_weights_as_they_were_before_the_bound() -> None:
    """Ratios of 4, 1/2 and 1, bounded to 2; a fourth token is not trained."""
    ratios = [4.0, 0.5, 1.0, 9.0]
    batch = SequenceSample.from_groups(
        ["a", "b"],
        {key: [[3], [1]] for key in ("completion", "logprobs", "old_logprobs", "loss_mask")},
        {
            "completion": torch.zeros(4, dtype=torch.int64),
            "logprobs": torch.full((4,), -3.0),
            "old_logprobs": torch.tensor([-3.0 + math.log(ratio) for ratio in ratios]),
            "loss_mask": torch.tensor([1.0, 1.0, 1.0, 0.0]),
        },
    )
    context = HostContext()
    function = SamplerCorrectionFunction(SamplerCorrection("token_truncate", high=2.0))
    made = function(batch, context)
    assert made.data["sampler_weights"].tolist() == pytest.approx([2.0, 0.5, 1.0, 1.0])
    assert context.metrics == pytest.approx(
        {
            "weight": 5.5 / 3,
            "weight_max": 4.0,
            "bounded_fraction": 1 / 3,
            "effective_fraction": 3.5**2 / (3 * 5.25),
        }
    )
