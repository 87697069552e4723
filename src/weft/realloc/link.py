"""Communication between the ranks of a reallocation, over a process group that spans both layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup, Work

from weft.errors import RunError
from weft.realloc.shared_memory import create_buffer, map_buffer

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
