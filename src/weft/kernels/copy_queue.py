"""Copies between host and device that overlap with computation, and access to tensor storage.

    queue = build_copy_queue(device)
    queue.follow_device()             # later copies start after the device's queued work
    queue.copy(target, source)
    mark = queue.mark()
    mark.make_device_wait()           # work queued on the device from now on starts after the copy

`mark.wait()` makes the host wait for the copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def put(values: npt.NDArray[Any] | Tensor, device: torch.device) -> Tensor:
    """Return `values` as a tensor on the device.

    A copy from ordinary host memory would wait until the device has finished its queued work, so
    copies to a GPU are made from pinned memory. On a CPU, the result shares the memory of `values`.
    """
    if isinstance(values, np.ndarray):
        tensor = torch.from_numpy(values)
    else:
        tensor = values
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def get_address(tensor: Tensor) -> int:
    """Return the memory address of a tensor's values, which changes if the tensor is moved."""
    return tensor.data_ptr()


def get_storage(tensor: Tensor) -> tuple[int, int]:
    """Return the address and the size in bytes of a tensor's storage, which its views share."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def resize_storage(tensor: Tensor, size: int) -> None:
    """Resize a tensor's storage to `size` bytes, where 0 frees it.

    This affects all tensors that share the storage. New storage is uninitialized.
    """
    tensor.untyped_storage().resize_(size)


class CopyMark(Protocol):
    """Interface of a marker in a `CopyQueue`, used to wait for the copies queued before it."""

    def make_device_wait(self) -> None:
        """Make the device wait for the copies before the mark, without blocking the host.

        Only work that is queued on the device after this call waits.
        """
        ...

    def wait(self) -> None:
        """Block the host until the copies before the mark are done."""
        ...


class CopyQueue(Protocol):
    """Interface of a queue of copies between host and device, which are executed in order.

    `has_separate_memory` is True if the device's memory is separate from the host's.
    """

    @property
    def has_separate_memory(self) -> bool: ...

    def follow_device(self) -> None:
        """Make later copies wait for all work that is queued on the device so far."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy of `source` to `target`; one of them must come from `allocate_buffer`.

        Until a mark confirms that the copy is done, neither tensor may be written, and `target` may
        not be read.
        """
        ...

    def mark(self) -> CopyMark:
        """Return a marker of the copies queued so far."""
        ...

    def allocate_buffer(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized host tensor [count], as the source or target of copies."""
        ...


@dataclass(frozen=True)
class SideStreamCopyQueue:
    """`CopyQueue` for a GPU, which copies from and to pinned memory on a separate stream."""

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
    """`CopyMark` of a `SideStreamCopyQueue`: a CUDA event after the copies."""

    device: torch.device
    event: torch.cuda.Event

    def make_device_wait(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)

    def wait(self) -> None:
        self.event.synchronize()


@dataclass(frozen=True)
class ImmediateCopyQueue:
    """`CopyQueue` for devices that use host memory; `copy` returns after the copy is done."""

    has_separate_memory: bool = False

    def follow_device(self) -> None:
        """Do nothing, because no copy can overtake the device's work.

        Either the device's earlier work is already done, as on a CPU, or the device runs copies and
        other work in the order in which they were queued.
        """

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def mark(self) -> CopyMark:
        return _DoneMark()

    def allocate_buffer(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype)


class _DoneMark:
    def make_device_wait(self) -> None:
        """Do nothing: the copies are already done."""

    def wait(self) -> None:
        """Do nothing: the copies are already done."""


def build_copy_queue(device: torch.device) -> CopyQueue:
    """Return a new queue of copies from and to the device."""
    if device.type == "cuda":
        return SideStreamCopyQueue(device, torch.cuda.Stream(device))
    return ImmediateCopyQueue()
