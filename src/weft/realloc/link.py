"""Communication between the ranks of a reallocation, over a process group that spans both layouts.

Ranks on the same host exchange messages through shared memory, without a socket. The memory is an
anonymous file (`memfd_create`), which other ranks open through `/proc`, so nothing is left behind
if a process dies. Ranks that cannot open each other's memory (on another host, as another user, or
not on Linux) send the messages instead.
"""

from __future__ import annotations

import mmap
import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup, Work

from weft.errors import RunError

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


Mail = Sequence[tuple[int, Tensor]]  # (the other rank, tensor to send or receive)


@dataclass(frozen=True)
class PendingMessage:
    """Handle of a message that is being sent or received.

    With NCCL, one handle represents all messages of one `post_messages` call. `rank` is this rank,
    and `others` describes the other ranks for error messages, such as "from rank 3".
    """

    work: Work
    rank: int
    others: str

    def wait(self) -> None:
        """Wait until the message has been sent or received.

        Raises `RunError` naming the other rank if that rank is lost or exceeds the group's timeout.
        """
        try:
            self.work.wait()
        except RuntimeError as error:
            raise _build_lost_error(self.rank, self.others, error) from error


class ReallocationLink:
    """Connection of this rank to the other ranks of a reallocation.

    Ranks are numbered as in the run, not as in the process group. If `group` is None, this rank
    communicates with no other rank.
    """

    def __init__(self, rank: int, group: ProcessGroup | None) -> None:
        self.rank = rank
        self._group = group
        cuda = group is not None and dist.get_backend(group) == "nccl"
        if cuda:
            self.device = torch.device("cuda", torch.cuda.current_device())
        else:
            self.device = torch.device("cpu")
        self.shared_memory: Tensor | None = None  # this rank's shared memory
        self.peer_memory: dict[int, Tensor] = {}  # mapped memory of other ranks
        self.mapped_by: frozenset[int] = frozenset()  # ranks that mapped `shared_memory`

    def all_gather(self, facts: Sequence[int]) -> dict[int, list[int]]:
        """Return the integers `facts` of every rank, keyed by rank.

        All ranks must pass the same number of integers. The first communication over the group must
        be a call of this method, because NCCL requires that every rank takes part in it.
        """
        values_by_rank = {self.rank: list(facts)}
        if self._group is None:
            return values_by_rank
        others = []
        for rank in dist.get_process_group_ranks(self._group):
            if rank != self.rank:
                others.append(rank)
        ours = torch.tensor(facts, dtype=torch.int64, device=self.device)
        theirs = [(rank, torch.empty_like(ours)) for rank in others]
        for pending in self.post_messages(theirs, [(rank, ours) for rank in others]):
            pending.wait()
        return values_by_rank | {rank: values.tolist() for rank, values in theirs}

    def share_memory(self, size: int) -> None:
        """Set up shared memory of `size` bytes per rank among the ranks of this host.

        Does nothing after the first call, or on GPUs, where NCCL has its own transports.
        """
        if self._group is None or self.device.type != "cpu" or self.shared_memory is not None:
            return
        shelf = create_buffer(size)
        addresses = self.all_gather(shelf.address if shelf is not None else (0, 0, 0, 0))
        others = sorted(set(addresses) - {self.rank})
        for rank in others:
            memory = map_buffer(addresses[rank]) if addresses[rank][2] else None
            if memory is not None:
                self.peer_memory[rank] = memory
        seen = self.all_gather([rank in self.peer_memory for rank in sorted(addresses)])
        own = sorted(addresses).index(self.rank)
        self.mapped_by = frozenset(rank for rank in others if seen[rank][own])
        if shelf is not None:
            shelf.close_descriptor()
            self.shared_memory = shelf.memory

    def post_messages(self, receives: Mail, sends: Mail, tag: int = 0) -> list[PendingMessage]:
        """Start receiving and sending messages, and return their handles.

        `receives` and `sends` list the messages as pairs (other rank, tensor). They are started
        together, because NCCL would otherwise finish one direction before it starts the other.
        """
        pairs = [
            *((dist.irecv, *each) for each in receives),
            *((dist.isend, *each) for each in sends),
        ]
        if not pairs:
            return []
        others = []
        for way, rank, _ in pairs:
            others.append(("from" if way is dist.irecv else "to") + f" rank {rank}")
        try:
            works = dist.batch_isend_irecv(
                [P2POp(way, x, peer=rank, group=self._group, tag=tag) for way, rank, x in pairs]
            )
        except RuntimeError as error:
            raise _build_lost_error(self.rank, ", ".join(others), error) from error
        if len(works) != len(pairs):  # NCCL returns one handle for all messages
            others = [", ".join(others)] * len(works)
        messages: list[PendingMessage] = []
        for work, what in zip(works, others, strict=True):
            messages.append(PendingMessage(work, self.rank, what))
        return messages


def _build_lost_error(rank: int, others: str, error: RuntimeError) -> RunError:
    return RunError(
        f"reallocation: rank {rank} lost a message {others}: {str(error).splitlines()[0]}"
    )
