"""Gradients and masters through a few buffers: values, order, and a bound on memory."""

from __future__ import annotations

import weakref

import torch

from tests.engine.torch.lanes import Late
from weft.engine.torch.host_memory import HostGradientAccumulator, MasterUploader


def test_gradients_are_summed_on_the_host_in_float32() -> None:
    lane = Late()
    bring = HostGradientAccumulator(lane, slots=2, slot_bytes=16)  # eight elements of two bytes
    wanted, sums = torch.zeros(5, 4), torch.full((5, 4), float("nan"))
    for number in range(4):
        gradient = torch.randn(5, 4).bfloat16()
        wanted += gradient.float()
        bring.add(gradient, sums, fresh=number == 0)
    assert not torch.equal(sums, wanted)
    bring.finish()
    assert torch.equal(sums, wanted)
    assert lane.pinned == 32 and lane.log.count("down 16") == 8 and lane.log.count("down 8") == 4
    assert lane.log.index("wait") > lane.log.index("down 16") + 1, (
        "two are on their way before the host waits"
    )
    assert lane.log.count("follow") == 4, "each copy comes after the gradient was made"
    bring.add(torch.ones(5, 4), sums, fresh=True)
    bring.finish()
    assert sums.eq(1.0).all() and lane.pinned == 32


class Forgetful:
    """Implements `Lane` without keeping what it copies, as a stream."""

    has_separate_memory = True

    def follow_device(self) -> None: ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def mark(self) -> Late:
        return self  # type: ignore[return-value]

    def wait(self) -> None: ...

    def allocate_buffer(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=dtype)


def test_a_gradient_stays_until_it_is_copied() -> None:
    """Its memory would be given to others otherwise."""
    bring = HostGradientAccumulator(Forgetful(), slots=4, slot_bytes=64)  # type: ignore[arg-type]
    gradient, sums = torch.arange(8.0), torch.empty(8)
    there = weakref.ref(gradient)
    bring.add(gradient, sums, fresh=True)
    del gradient
    assert there() is not None
    bring.finish()
    assert there() is None and sums.tolist() == list(range(8))


def test_masters_are_rounded_on_the_host_and_no_buffer_is_overwritten_on_its_way() -> None:
    lane = Late()
    put = MasterUploader(lane, slots=2, slot_bytes=16)
    masters = [torch.randn(5, 4), torch.randn(3)]
    copies = [torch.zeros(5, 4, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16)]
    for copy, master in zip(copies, masters, strict=True):
        put.put(copy, master)
        master.fill_(0.0)  # it is the host's again
    assert copies[1].isnan().all(), "on its way"
    put.make_device_wait()
    assert lane.log.count("follow") == 1 and lane.log[0] == "follow" and lane.pinned == 32
    assert not any(copy.isnan().any() for copy in copies)
    again = torch.randn(5, 4)
    put.put(copies[0], again)
    put.make_device_wait()
    assert (
        torch.equal(copies[0], again.bfloat16())
        and lane.log.count("follow") == 2
        and lane.pinned == 32
    )
    put.make_device_wait()
    assert lane.log.count("hold") == 2
