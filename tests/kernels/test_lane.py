"""The lane of a device that works in the host's memory; a GPU's is seen on a stand-in (tests/cuda)."""

from __future__ import annotations

import torch

from weft.kernels import lane_of


def test_on_a_cpu_copies_are_done_at_once() -> None:
    lane = lane_of(torch.device("cpu"))
    buffer, values = (
        lane.buffer(3, torch.bfloat16),
        torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16),
    )
    assert not lane.apart and buffer.shape == (3,) and buffer.dtype == torch.bfloat16
    lane.follow()
    lane.copy(buffer, values)
    assert torch.equal(buffer, values)
    lane.mark().hold()
    lane.mark().wait()
