"""Copies between host and device beside what the device computes, and marks by which either waits
for them.

lane = lane_of(device)
lane.follow()                     # what is copied next comes after what the device was given so far
lane.copy(there, pinned)
mark = lane.mark()
mark.hold()                       # what the device is given from now on comes after the copy
mark.wait()                       # the host goes on after it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Mark(Protocol):
    """A place among a lane's copies."""

    def hold(self) -> None:
        """What the device is given from now on begins when the copies before the mark are done; the
        host does not wait.
        """
        ...

    def wait(self) -> None:
        """The host waits until they are done."""
        ...


class Lane(Protocol):
    """Copies that are done in the order in which they are asked for.

    `apart`: the device has memory of its own.
    """

    @property
    def apart(self) -> bool: ...

    def follow(self) -> None:
        """Copies that are asked for from now on begin when the device has done all that it was
        given until now.
        """
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """One of the two is in `buffer`'s memory.

        Neither may be written to, nor the target read, before a mark says so.
        """
        ...

    def mark(self) -> Mark: ...

    def buffer(self, count: int, dtype: torch.dtype) -> Tensor:
        """[count] in host memory from and to which copies are made; without values."""
        ...


@dataclass(frozen=True)
class SideStream:
    """Implements `Lane` for a GPU: a stream of copies from and to pinned memory."""

    device: torch.device
    stream: torch.cuda.Stream
    apart: bool = True

    def follow(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def copy(self, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        return _EventMark(self.device, self.stream.record_event())

    def buffer(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, pin_memory=True)


@dataclass(frozen=True)
class _EventMark:
    device: torch.device
    event: torch.cuda.Event

    def hold(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)

    def wait(self) -> None:
        self.event.synchronize()


@dataclass(frozen=True)
class AtOnce:
    """Implements `Lane` for a device that works in the host's memory: every copy is done when
    `copy` returns.
    """

    apart: bool = False

    def follow(self) -> None:
        """Nothing: the device has done all that it was given, or orders copies by itself."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def mark(self) -> Mark:
        return _Done()

    def buffer(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype)


class _Done:
    def hold(self) -> None:
        """Nothing: the copies are done."""

    def wait(self) -> None:
        """Nothing: the copies are done."""


def lane_of(device: torch.device) -> Lane:
    """A lane of its own for who asks."""
    if device.type == "cuda":
        return SideStream(device, torch.cuda.Stream(device))
    return AtOnce()
