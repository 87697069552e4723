"""Copies of gradients to host memory and of masters to the device, overlapped with computation.

Gradients are copied during the backward pass, and masters while other masters are updated. All
copies go through a few pinned buffers of equal size, so that pinned memory is bounded: masters and
gradients themselves needn't be pinned. A buffer isn't reused before its copy is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.kernels import CopyMark, CopyQueue

SLOTS = 4
SLOT_BYTES = 2**25  # bytes of a pinned buffer: SLOTS buffers are 128 MiB in each direction


@dataclass(frozen=True)
class _PendingGradient:
    """Piece of a gradient that is being copied to the host.

    `source` references the source of the copy, so that its device memory isn't freed before the
    copy is complete.
    """

    mark: CopyMark
    arrived: Tensor
    into: Tensor
    fresh: bool
    source: Tensor


class HostGradientAccumulator:
    """Accumulator of gradients in host memory.

    `add` starts copying a gradient from the device, and `finish` waits until all gradients have
    been added to their target tensors on the host. Sums are computed in the dtype of the target.
    """

    def __init__(self, lane: CopyQueue, slots: int = SLOTS, slot_bytes: int = SLOT_BYTES) -> None:
        self._lane = lane
        self._slots = slots
        self._slot_bytes = slot_bytes
        self._free: list[Tensor] = []  # buffers, allocated on first use
        self._taken = 0
        self._coming: deque[tuple[_PendingGradient, Tensor]] = deque()  # (piece, its buffer)

    @torch.no_grad()
    def add(self, gradient: Tensor, into: Tensor, *, fresh: bool) -> None:
        """Copy `gradient` to `into` if `fresh`, otherwise add it to `into`, in the background.

        Both tensors have the same shape. The gradient must not be written to afterwards.
        """
        flat = gradient.reshape(-1)
        sums = into.view(-1)
        self._lane.follow_device()
        for low, high in _iterate_pieces(flat, self._slot_bytes):
            buffer = self._take_buffer()
            arrived = buffer.view(flat.dtype)[: high - low]
            self._lane.copy(arrived, flat[low:high])
            self._coming.append(
                (_PendingGradient(self._lane.mark(), arrived, sums[low:high], fresh, flat), buffer)
            )

    def finish(self) -> None:
        while self._coming:
            self._take()

    def _take_buffer(self) -> Tensor:
        if not self._free and self._taken < self._slots:
            self._taken += 1
            return self._lane.allocate_buffer(self._slot_bytes, torch.uint8)
        if not self._free:
            self._take()
        return self._free.pop()

    @torch.no_grad()
    def _take(self) -> None:
        """Wait for the oldest pending copy, and store it in its target or add it to its target."""
        piece, buffer = self._coming.popleft()
        piece.mark.wait()
        if piece.fresh:
            piece.into.copy_(piece.arrived)
        else:
            piece.into.add_(piece.arrived)
        self._free.append(buffer)


class MasterUploader:
    """Uploader of master weights from the host to the device.

    `put` rounds the values to the device tensor's dtype on the host, and copies them to the device
    in the background. The source may be changed as soon as `put` returns. Work that is submitted to
    the device after a call of `hold` waits for the copies.
    """

    def __init__(self, lane: CopyQueue, slots: int = SLOTS, slot_bytes: int = SLOT_BYTES) -> None:
        self._lane = lane
        self._slots = slots
        self._slot_bytes = slot_bytes
        self._going: deque[tuple[CopyMark, Tensor]] = deque()  # (end of the copy, its buffer)
        self._begun = False

    @torch.no_grad()
    def put(self, target: Tensor, source: Tensor) -> None:
        """Start copying `source` to `target`, after the work already submitted to the device."""
        if not self._begun:
            self._lane.follow_device()
            self._begun = True
        to = target.view(-1)
        values = source.view(-1)
        for low, high in _iterate_pieces(to, self._slot_bytes):
            buffer = self._take_buffer()
            rounded = buffer.view(to.dtype)[: high - low]
            rounded.copy_(values[low:high])
            self._lane.copy(to[low:high], rounded)
            self._going.append((self._lane.mark(), buffer))

    def hold(self) -> None:
        if self._begun:
            self._lane.mark().make_device_wait()
            self._begun = False

    def _take_buffer(self) -> Tensor:
        if len(self._going) < self._slots:
            return self._lane.allocate_buffer(self._slot_bytes, torch.uint8)
        mark, buffer = self._going.popleft()
        mark.wait()
        return buffer


def _iterate_pieces(flat: Tensor, most: int) -> Iterator[tuple[int, int]]:
    """Iterate over the (start, end) indices of consecutive pieces of `flat`.

    Each piece has at most `most` bytes.
    """
    step = most // flat.itemsize
    for low in range(0, flat.numel(), step):
        yield low, min(low + step, flat.numel())
