"""Tensors leave the device and come back group by group; the lane shows who does not wait."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.engine.torch.lanes import Late, held
from weft.engine.torch.host_memory import HostMemory


def tensors() -> list[list[Tensor]]:
    """Two groups; in the second one of two views of a storage with padding, and one without
    elements.
    """
    padded = torch.arange(12.0)
    return [[torch.arange(6.0).view(2, 3)], [padded[:8].view(2, 4), padded[2:6], torch.empty(0)]]


def test_values_go_and_come_back_in_order() -> None:
    lane, groups = Late(), tensors()
    before = [each.clone() for group in groups for each in group]
    every = [each for group in groups for each in group]
    memory = HostMemory(groups, lane)
    memory.offload()
    left = held(every)
    assert (
        lane.log == ["follow", "down 24", "down 48", "hold"] and left == 0 and memory.is_offloaded
    )
    memory.fetch()
    assert lane.log[4:] == ["follow", "up 24", "up 48"] and not memory.is_offloaded
    assert every[0].isnan().all() and every[1].isnan().all(), "on their way"
    memory.make_device_wait(0)
    assert torch.equal(every[0], before[0]) and every[1].isnan().all()
    memory.make_device_wait()
    assert all(torch.equal(now, was) for now, was in zip(every, before, strict=True))
    memory.make_device_wait()
    memory.wait(1)
    assert lane.log[7:] == ["hold", "hold"], "what is there is not waited for again"


def test_the_host_reads_and_writes_what_is_away() -> None:
    lane, groups = Late(), tensors()
    memory = HostMemory(groups, lane)
    assert memory.on_host(groups[0][0]) is None
    memory.offload()
    host = memory.on_host(groups[1][1])
    assert host is not None and host.tolist() == [2.0, 3.0, 4.0, 5.0] and lane.log[-1] == "wait"
    host += 10.0
    assert memory.on_host(torch.ones(2)) is None and memory.on_host(groups[1][2]) is None
    memory.fetch(1)
    memory.make_device_wait(1)
    assert groups[1][0].flatten().tolist() == [0.0, 1.0, 12.0, 13.0, 14.0, 15.0, 6.0, 7.0]
    assert (
        memory.is_offloaded
        and memory.on_host(groups[1][1]) is None
        and memory.on_host(groups[0][0]) is not None
    )


def test_what_is_constant_is_copied_once_and_host_memory_taken_once() -> None:
    lane, groups = Late(), tensors()
    # the other view of its storage is not
    memory = HostMemory(groups, lane, constant=[groups[0][0], groups[1][0]])
    for _ in range(3):
        memory.offload()
        memory.fetch()
    memory.make_device_wait()
    assert [word for word in lane.log if word.startswith("down")] == ["down 24", *["down 48"] * 3]
    assert lane.pinned == 24 + 48
    groups[0][0].fill_(7.0)
    memory.mark_changed()
    memory.offload()
    memory.fetch()
    memory.make_device_wait()
    assert groups[0][0].eq(7.0).all()


def test_leaving_again_on_the_way_back_loses_nothing() -> None:
    lane, groups = Late(), tensors()
    before = [each.clone() for group in groups for each in group]
    memory = HostMemory(groups, lane)
    memory.offload()
    memory.offload()
    assert lane.log.count("follow") == 1
    memory.fetch(0)
    memory.offload()
    left = held([each for group in groups for each in group])
    assert left == 0
    memory.fetch()
    memory.wait(0)
    memory.wait(1)
    assert all(
        torch.equal(a, b) for a, b in zip([each for g in groups for each in g], before, strict=True)
    )


@pytest.mark.parametrize("broken", ["written", "freed"])
def test_the_lane_tells_who_does_not_wait(broken: str) -> None:
    lane = Late()
    source, target = torch.ones(3), lane.allocate_buffer(3, torch.float32)
    lane.copy(target, source)
    if broken == "written":
        source.add_(1.0)
    else:
        source.untyped_storage().resize_(0)
    with pytest.raises(AssertionError, match=broken):
        lane.mark().make_device_wait()
