"""Copies between host and device in parallel with the device's computation, with marks to wait for.

    lane = lane_of(device)
    lane.follow()                     # later copies start after the device's queued work
    lane.copy(there, pinned)
    mark = lane.mark()
    mark.hold()                       # work queued on the device from now on starts after the copy

`mark.wait()` makes the host wait for the copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class CopyMark(Protocol):
    """A position in a lane's sequence of copies."""

    def make_device_wait(self) -> None:
        """Make work queued on the device from now on wait for the copies before the mark.

        The host does not wait.
        """
        ...

    def wait(self) -> None:
        """Block the host until the copies before the mark are done."""
        ...


class CopyQueue(Protocol):
    """Queue of copies, which are done in the order of the calls.

    `has_separate_memory`: True if the device has memory separate from the host's.
    """

    @property
    def has_separate_memory(self) -> bool: ...

    def follow_device(self) -> None:
        """Make later copies wait for all work queued on the device so far."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy; one of the two tensors must be in memory from `allocate_buffer`.

        Until a mark confirms the copy, neither tensor can be written, and `target` cannot be read.
        """
        ...

    def mark(self) -> CopyMark: ...

    def allocate_buffer(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized host tensor [count] that can take part in copies."""
        ...


@dataclass(frozen=True)
class SideStreamCopyQueue:
    """Implements `CopyQueue` for a GPU: a stream of copies from and to pinned memory."""

    device: torch.device
    stream: torch.cuda.Stream
    has_separate_memory: bool = True

    def follow_device(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def copy(self, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)

    def mark(self) -> CopyMark:
        return _EventMark(self.device, self.stream.record_event())

    def allocate_buffer(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, pin_memory=True)


@dataclass(frozen=True)
class _EventMark:
    device: torch.device
    event: torch.cuda.Event

    def make_device_wait(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)

    def wait(self) -> None:
        self.event.synchronize()


@dataclass(frozen=True)
class ImmediateCopyQueue:
    """Implements `CopyQueue` for devices that use host memory: `copy` returns when the copy is done."""

    has_separate_memory: bool = False

    def follow_device(self) -> None:
        """Do nothing: the device has finished its work, or orders copies itself."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def mark(self) -> CopyMark:
        return _DoneMark()

    def allocate_buffer(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype)


class _DoneMark:
    def make_device_wait(self) -> None:
        """Do nothing: the copies are done."""

    def wait(self) -> None:
        """Do nothing: the copies are done."""


def build_copy_queue(device: torch.device) -> CopyQueue:
    """Return a new lane for the device."""
    if device.type == "cuda":
        return SideStreamCopyQueue(device, torch.cuda.Stream(device))
    return ImmediateCopyQueue()
