"""The lane of a device that works in the host's memory; a GPU's is seen on a stand-in (tests/cuda)."""

from __future__ import annotations

import torch

from weft.kernels import build_copy_queue


def test_on_a_cpu_copies_are_done_at_once() -> None:
    lane = build_copy_queue(torch.device("cpu"))
    buffer, values = (
        lane.allocate_buffer(3, torch.bfloat16),
        torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16),
    )
    assert not lane.has_separate_memory and buffer.shape == (3,) and buffer.dtype == torch.bfloat16
    lane.follow_device()
    lane.copy(buffer, values)
    assert torch.equal(buffer, values)
    lane.mark().make_device_wait()
    lane.mark().wait()
