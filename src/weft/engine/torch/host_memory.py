"""Offloading of device tensors to host memory, and copies of gradients and master weights.

    memory = HostMemory([[embedding], [weights of block 0], ...], lane)
    memory.offload()            # copies all groups to the host and frees the device memory
    memory.fetch()              # starts copies to the device, in order of the groups
    memory.make_device_wait(0)  # later work on the current stream waits for group 0

Each group of tensors, such as the weights of one block, is fetched and waited for separately.

Gradients are copied to the host during the backward pass, and masters to the device while other
masters are updated. These copies go through a few pinned buffers of equal size, so that pinned
memory is bounded: masters and gradients themselves needn't be pinned. A buffer isn't reused before
its copy is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from weft.kernels import CopyMark, CopyQueue, get_storage, resize_storage

SLOTS = 4
SLOT_BYTES = 2**25  # bytes of a pinned buffer: SLOTS buffers are 128 MiB in each direction


@dataclass
class _TensorStorage:
    """Device storage that one or more tensors share, with its copy in host memory.

    The storage is read and resized through `tensor`, which can be any of these tensors.
    """

    tensor: Tensor
    group: int
    size: int  # bytes
    constant: bool
    host: Tensor | None = None  # flat; allocated on first use, then kept

    @property
    def flat(self) -> Tensor:
        """The whole storage on the device as a flat tensor, padding included."""
        return self.tensor.detach().as_strided((self.size // self.tensor.itemsize,), (1,), 0)

    def resize(self, size: int) -> None:
        resize_storage(self.tensor, size)


class HostMemory:
    """Pinned host memory to which groups of device tensors are offloaded.

    `offload` copies all groups to the host, and `fetch` copies selected groups back. After `fetch`,
    call `make_device_wait` or `wait` for a group before its tensors are read on the device.

    While a tensor is offloaded, its device storage is empty (resized to 0 bytes). The tensor object
    stays the same, so views, optimizers and hooks stay valid. Host memory is allocated once and
    kept.

    Tensors in `constant` are assumed not to change, so only the first `offload` copies them. After
    `mark_changed`, every `offload` copies them.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Tensor]],
        lane: CopyQueue,
        constant: Collection[Tensor] = frozenset(),
    ) -> None:
        self._lane = lane
        self._blocks: dict[int, _TensorStorage] = {}  # by the tensor's identity
        blocks_by_address: dict[int, _TensorStorage] = {}  # by the storage's address
        self._groups: list[list[_TensorStorage]] = [[] for _ in groups]
        constant_ids = {id(tensor) for tensor in constant}
        for number, tensors in enumerate(groups):
            for tensor in tensors:
                address, size = get_storage(tensor)
                if not size:
                    continue
                block = blocks_by_address.get(address)
                if block is None:
                    block = blocks_by_address[address] = _TensorStorage(tensor, number, size, True)
                    self._groups[number].append(block)
                block.constant &= id(tensor) in constant_ids
                self._blocks[id(tensor)] = block
        self._away: set[int] = set()
        self._arriving: dict[int, CopyMark] = {}
        self._offload_end: CopyMark | None = None  # end of the last copy to the host

    @property
    def is_offloaded(self) -> bool:
        """True if any group of tensors is offloaded."""
        return bool(self._away)

    def mark_changed(self) -> None:
        """Record that tensors that were assumed to be constant may have changed.

        Every later call of `offload` then copies all tensors to the host.
        """
        for group in self._groups:
            for block in group:
                block.constant = False

    def offload(self) -> None:
        """Copy all groups of tensors on the device to the host, and free their device memory.

        The host doesn't wait for the copies.
        """
        on_device = []
        for number in range(len(self._groups)):
            if number not in self._away:
                on_device.append(number)
        if not on_device:
            return
        blocks = []
        for number in on_device:
            blocks.extend(self._groups[number])
        self._lane.follow_device()
        for block in blocks:
            if block.host is None or not block.constant:
                if block.host is None:
                    block.host = self._lane.allocate_buffer(
                        block.size // block.tensor.itemsize, block.tensor.dtype
                    )
                self._lane.copy(block.host, block.flat)
        self._offload_end = self._lane.mark()
        # Later work may reuse the freed memory only after the copies.
        self._offload_end.make_device_wait()
        for block in blocks:
            block.resize(0)
        self._away.update(on_device)
        self._arriving.clear()

    def fetch(self, *numbers: int) -> None:
        """Start copying groups of tensors to the device.

        `numbers` are the indices of the groups (default: all groups). Groups that are already on
        the device are skipped.
        """
        offloaded = []
        for number in numbers or range(len(self._groups)):
            if number in self._away:
                offloaded.append(number)
        if not offloaded:
            return
        for number in offloaded:
            for block in self._groups[number]:
                block.resize(block.size)
        self._lane.follow_device()  # earlier work on the device may still use this memory
        for number in offloaded:
            for block in self._groups[number]:
                assert block.host is not None, "offloaded tensors have a copy in host memory"
                self._lane.copy(block.flat, block.host)
            self._arriving[number] = self._lane.mark()
        self._away.difference_update(offloaded)

    def make_device_wait(self, *numbers: int) -> None:
        """Make later work on the current stream wait until groups of tensors have been fetched.

        `numbers` are the indices of the groups (default: all groups that are being fetched).
        """
        for number in numbers or list(self._arriving):
            if (mark := self._arriving.pop(number, None)) is not None:
                mark.make_device_wait()

    def wait(self, number: int) -> None:
        """Block the host until the group of tensors with index `number` has been fetched.

        Afterwards, any stream can use these tensors.
        """
        if (mark := self._arriving.pop(number, None)) is not None:
            mark.wait()

    def on_host(self, tensor: Tensor) -> Tensor | None:
        """Return the host copy of an offloaded tensor.

        Returns None if the tensor is on the device, is empty, or doesn't belong to this object.
        """
        block = self._blocks.get(id(tensor))
        if block is None or block.group not in self._away:
            return None
        if self._offload_end is not None:
            self._offload_end.wait()
            self._offload_end = None
        assert block.host is not None, "offloaded tensors have a copy in host memory"
        return block.host.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


class BlockFetcher:
    """Prefetcher that copies a network's offloaded tensors back to the device for a forward pass.

    The pass can start before all tensors are copied, because each block waits only for its own
    group of tensors. `memory` has one group of tensors that are needed before the first block, then
    one group for each block, and then one group for all other tensors.

    `gathered` must be True if FSDP2 shards the parameters, because FSDP2 reads them on a separate
    stream. The host then waits for each group, so that any stream can use it. If `gathered` is
    False, only the device's current stream waits.
    """

    def __init__(self, memory: HostMemory, blocks: Sequence[nn.Module], *, gathered: bool) -> None:
        self.memory = memory
        self._blocks = blocks
        self._gathered = gathered
        self._hooks: list[RemovableHandle] = []

    def fetch(self) -> None:
        """Start fetching all groups of tensors, and let each block wait for its own group.

        Does nothing if all tensors are on the device.
        """
        if not self.memory.is_offloaded:
            return
        self.memory.fetch()
        self._needs(0)
        for number, block in enumerate(self._blocks, 1):
            self._hooks.append(
                block.register_forward_pre_hook(partial(self._on_block_start, number), prepend=True)
            )

    def wait_for_all(self) -> None:
        """Make later work on the current stream wait until all tensors have been fetched."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.memory.make_device_wait()

    def _on_block_start(self, number: int, *_: object) -> None:
        self._hooks[number - 1].remove()
        self._needs(number)

    def _needs(self, number: int) -> None:
        if self._gathered:
            self.memory.wait(number)
        else:
            self.memory.make_device_wait(number)


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
        """Wait until all gradients passed to `add` are in their target tensors."""
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
    the device after a call of `make_device_wait` waits for the copies.
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
        flat_target = target.view(-1)
        values = source.view(-1)
        for low, high in _iterate_pieces(flat_target, self._slot_bytes):
            buffer = self._take_buffer()
            rounded = buffer.view(flat_target.dtype)[: high - low]
            rounded.copy_(values[low:high])
            self._lane.copy(flat_target[low:high], rounded)
            self._going.append((self._lane.mark(), buffer))

    def make_device_wait(self) -> None:
        """Make later work on the current stream wait for the copies that `put` has started."""
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
