"""Gradients that go to host memory while the backward pass goes on, and masters that go back while
the next are updated.

Both go through a few pinned buffers of one size, used in turn, so that neither masters nor
gradients need be pinned: pinned memory is bounded, and a copy that is on its way keeps its buffer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.kernels import Lane, Mark

SLOTS = 4
SLOT_BYTES = 2**25  # of pinned memory: 128 MiB in each direction


@dataclass(frozen=True)
class _Sum:
    """A piece of a gradient on its way.

    `kept` is what it is copied from, which stays in the device's memory so long.
    """

    mark: Mark
    arrived: Tensor
    into: Tensor
    fresh: bool
    kept: Tensor


class GradientsToHost:
    """`add` begins to bring a gradient; after `finish` all are there.

    Sums are made in the dtype of what they go into.
    """

    def __init__(self, lane: Lane, slots: int = SLOTS, slot_bytes: int = SLOT_BYTES) -> None:
        self._lane = lane
        self._slots = slots
        self._slot_bytes = slot_bytes
        self._free: list[Tensor] = []  # buffers, taken when first needed
        self._taken = 0
        self._coming: deque[tuple[_Sum, Tensor]] = deque()  # with the buffer

    @torch.no_grad()
    def add(self, gradient: Tensor, into: Tensor, *, fresh: bool) -> None:
        """into <- gradient where it is `fresh`, else into <- into + gradient; both have one shape.

        The gradient must not be written to any more.
        """
        flat = gradient.reshape(-1)
        sums = into.view(-1)
        self._lane.follow()
        for low, high in _pieces(flat, self._slot_bytes):
            buffer = self._buffer()
            arrived = buffer.view(flat.dtype)[: high - low]
            self._lane.copy(arrived, flat[low:high])
            self._coming.append(
                (_Sum(self._lane.mark(), arrived, sums[low:high], fresh, flat), buffer)
            )

    def finish(self) -> None:
        while self._coming:
            self._take()

    def _buffer(self) -> Tensor:
        if not self._free and self._taken < self._slots:
            self._taken += 1
            return self._lane.buffer(self._slot_bytes, torch.uint8)
        if not self._free:
            self._take()
        return self._free.pop()

    @torch.no_grad()
    def _take(self) -> None:
        """Add what has been on its way longest."""
        piece, buffer = self._coming.popleft()
        piece.mark.wait()
        if piece.fresh:
            piece.into.copy_(piece.arrived)
        else:
            piece.into.add_(piece.arrived)
        self._free.append(buffer)


class MastersToDevice:
    """`put` begins to bring values, rounded on the host to the dtype they get, and returns when a
    buffer holds the last of them; `hold` has the device's next work find them.
    """

    def __init__(self, lane: Lane, slots: int = SLOTS, slot_bytes: int = SLOT_BYTES) -> None:
        self._lane = lane
        self._slots = slots
        self._slot_bytes = slot_bytes
        self._going: deque[tuple[Mark, Tensor]] = deque()  # with the buffer
        self._begun = False

    @torch.no_grad()
    def put(self, target: Tensor, source: Tensor) -> None:
        """The device's memory <- the host's, where the device's work so far is done with it."""
        if not self._begun:
            self._lane.follow()
            self._begun = True
        to = target.view(-1)
        values = source.view(-1)
        for low, high in _pieces(to, self._slot_bytes):
            buffer = self._buffer()
            rounded = buffer.view(to.dtype)[: high - low]
            rounded.copy_(values[low:high])
            self._lane.copy(to[low:high], rounded)
            self._going.append((self._lane.mark(), buffer))

    def hold(self) -> None:
        if self._begun:
            self._lane.mark().hold()
            self._begun = False

    def _buffer(self) -> Tensor:
        if len(self._going) < self._slots:
            return self._lane.buffer(self._slot_bytes, torch.uint8)
        mark, buffer = self._going.popleft()
        mark.wait()
        return buffer


def _pieces(flat: Tensor, most: int) -> Iterator[tuple[int, int]]:
    """(first, end) of elements, `most` bytes at once."""
    step = most // flat.itemsize
    for low in range(0, flat.numel(), step):
        yield low, min(low + step, flat.numel())
