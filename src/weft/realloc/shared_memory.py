"""Shared memory through which ranks on the same host exchange messages without a socket.

The memory is an anonymous file (`memfd_create`), which other ranks open through `/proc`, so nothing
is left behind if a process dies. Ranks that cannot open each other's memory (on another host, as
another user, or not on Linux) send the messages instead.
"""

from __future__ import annotations

import mmap
import os
import secrets
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

TOKEN = 8  # bytes at the end, which prove to readers that they mapped the right memory


class SharedMemoryBuffer:
    """Buffer of `size` bytes that other ranks can map into their memory.

    The buffer can be mapped by its `address` until `close_descriptor` is called. Existing mappings
    stay valid after that. Physical memory is allocated only when it is first written.
    """

    def __init__(self, size: int) -> None:
        self._file = os.memfd_create("weft")
        self._token = secrets.randbits(62)
        os.ftruncate(self._file, size + TOKEN)
        self.address = (os.getpid(), self._file, size, self._token)
        whole = _map_memory(self._file, size)
        whole[size:].view(torch.int64)[0] = self._token
        self.memory = whole[:size]

    def close_descriptor(self) -> None:
        """Close the file descriptor. Call this only after all readers have mapped the memory."""
        os.close(self._file)


def create_buffer(size: int) -> SharedMemoryBuffer | None:
    """Return a new shared buffer of `size` bytes, or None if the system is not Linux."""
    return SharedMemoryBuffer(size) if sys.platform == "linux" else None


def map_buffer(address: Sequence[int]) -> Tensor | None:
    """Map another rank's buffer and return it as a byte tensor, or None if it cannot be opened."""
    pid, file, size, token = address
    try:
        opened = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR)
    except OSError:
        return None
    try:
        if os.fstat(opened).st_size != size + TOKEN:
            return None
        whole = _map_memory(opened, size)
    finally:
        os.close(opened)
    if int(whole[size:].view(torch.int64)[0]) == token:
        return whole[:size]
    return None


def _map_memory(file: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, size + TOKEN), dtype=torch.uint8)
