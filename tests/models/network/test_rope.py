"""Rotary positions whose frequencies depend on a sequence's length."""

from __future__ import annotations

import torch

from weft.models.attention.contexts import Dense
from weft.models.network.config import Rope
from weft.models.network.rope import compute_rotation


def test_scalings_that_depend_on_length_choose_for_each_sequence() -> None:
    rope = Rope(
        100.0,
        4,
        "longrope",
        {
            "short_factor": [1.0, 1.0],
            "long_factor": [2.0, 4.0],
            "original": 5,
            "attention_factor": 1.0,
        },
    )
    context = Dense(torch.tensor([0, 5, 11], dtype=torch.int32), 6)
    positions = torch.cat([torch.arange(5), torch.arange(6)])
    cos, _ = compute_rotation(rope, positions, context.token_lengths, torch.float32)
    short, _ = compute_rotation(rope, torch.arange(5), torch.full((5,), 5), torch.float32)
    long, _ = compute_rotation(rope, torch.arange(6), torch.full((6,), 6), torch.float32)
    assert torch.equal(cos, torch.cat([short, long])) and not torch.equal(short, long[:5])
