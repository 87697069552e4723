"""Memory in which a rank lays messages for ranks of its host, which then take them from there: no
copy through a socket.

It is a file without a name (`memfd_create`) that the others open through `/proc`: it leaves nothing
behind, whoever dies. Ranks that cannot see each other's (another host, another user, no Linux) send
instead.
"""

from __future__ import annotations

import mmap
import os
import secrets
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

TOKEN = 8  # bytes at the end, by which others know that they see the right memory


class Shelf:
    """`size` bytes, which take memory as they are written to.

    Others find it by `address` until `shown` is called; who has found it keeps it.
    """

    def __init__(self, size: int) -> None:
        self._file = os.memfd_create("weft")
        self._token = secrets.randbits(62)
        os.ftruncate(self._file, size + TOKEN)
        self.address = (os.getpid(), self._file, size, self._token)
        whole = _mapped(self._file, size)
        whole[size:].view(torch.int64)[0] = self._token
        self.memory = whole[:size]

    def shown(self) -> None:
        """Everyone who is to see it has."""
        os.close(self._file)


def laid_out(size: int) -> Shelf | None:
    """None where the system has no such memory."""
    return Shelf(size) if sys.platform == "linux" else None


def look(address: Sequence[int]) -> Tensor | None:
    """The memory of another rank's shelf; None where this one cannot see it."""
    pid, file, size, token = address
    try:
        opened = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR)
    except OSError:
        return None
    try:
        if os.fstat(opened).st_size != size + TOKEN:
            return None
        whole = _mapped(opened, size)
    finally:
        os.close(opened)
    if int(whole[size:].view(torch.int64)[0]) == token:
        return whole[:size]
    return None


def _mapped(file: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, size + TOKEN), dtype=torch.uint8)
