"""Messages of one rank in a reallocation, and the process group over which they are sent.

While the messages of one round are in flight, those of the next round are packed; a rank uses at
most two buckets (message buffers) in each direction. If the receiver has mapped the sender's shared
memory, only the offset of the message is sent, and the receiver acknowledges that it has read the
message. Every message ends with a seal: the version of the weights when they were packed, the
round, and a checksum.
"""

from __future__ import annotations

import mmap
import os
import secrets
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup, Work

from weft.errors import RunError
from weft.realloc.plan import SEAL, BucketMessage, MessagePiece, ParameterTransfer
from weft.topology import Slice

TOKEN = 8  # bytes at the end, by which readers check that they have mapped the right memory


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
        mapped = _map_memory(self._file, size)
        mapped[size:].view(torch.int64)[0] = self._token
        self.memory = mapped[:size]

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
        descriptor = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR)
    except OSError:
        return None
    try:
        if os.fstat(descriptor).st_size != size + TOKEN:
            return None
        mapped = _map_memory(descriptor, size)
    finally:
        os.close(descriptor)
    if int(mapped[size:].view(torch.int64)[0]) == token:
        return mapped[:size]
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
        sent = torch.tensor(facts, dtype=torch.int64, device=self.device)
        received = [(rank, torch.empty_like(sent)) for rank in others]
        for pending in self.post_messages(received, [(rank, sent) for rank in others]):
            pending.wait()
        return values_by_rank | {rank: values.tolist() for rank, values in received}

    def share_memory(self, size: int) -> None:
        """Set up shared memory of `size` bytes per rank among the ranks of this host.

        Does nothing after the first call, or on GPUs, where NCCL has its own transports.
        """
        if self._group is None or self.device.type != "cpu" or self.shared_memory is not None:
            return
        buffer = create_buffer(size)
        addresses = self.all_gather(buffer.address if buffer is not None else (0, 0, 0, 0))
        others = sorted(set(addresses) - {self.rank})
        for rank in others:
            memory = map_buffer(addresses[rank]) if addresses[rank][2] else None
            if memory is not None:
                self.peer_memory[rank] = memory
        mapped = self.all_gather([rank in self.peer_memory for rank in sorted(addresses)])
        own_index = sorted(addresses).index(self.rank)
        self.mapped_by = frozenset(rank for rank in others if mapped[rank][own_index])
        if buffer is not None:
            buffer.close_descriptor()
            self.shared_memory = buffer.memory

    def post_messages(self, receives: Mail, sends: Mail, tag: int = 0) -> list[PendingMessage]:
        """Start receiving and sending messages, and return their handles.

        `receives` and `sends` list the messages as pairs (other rank, tensor). They are started
        together, because NCCL would otherwise finish one direction before it starts the other.
        """
        pairs = [
            *((dist.irecv, rank, tensor) for rank, tensor in receives),
            *((dist.isend, rank, tensor) for rank, tensor in sends),
        ]
        if not pairs:
            return []
        others = []
        for operation, rank, _ in pairs:
            others.append(("from" if operation is dist.irecv else "to") + f" rank {rank}")
        try:
            works = dist.batch_isend_irecv(
                [
                    P2POp(operation, x, peer=rank, group=self._group, tag=tag)
                    for operation, rank, x in pairs
                ]
            )
        except RuntimeError as error:
            raise _build_lost_error(self.rank, ", ".join(others), error) from error
        if len(works) != len(pairs):  # NCCL returns one handle for all messages
            others = [", ".join(others)] * len(works)
        messages: list[PendingMessage] = []
        for work, other in zip(works, others, strict=True):
            messages.append(PendingMessage(work, self.rank, other))
        return messages


def _build_lost_error(rank: int, others: str, error: RuntimeError) -> RunError:
    return RunError(
        f"reallocation: rank {rank} lost a message {others}: {str(error).splitlines()[0]}"
    )


Values = tuple[str, Slice, Tensor]
ACKNOWLEDGEMENT_TAG = 1  # tag of the acknowledgement that frees the sender's shared memory


class VersionedWeights(Protocol):
    """Engine whose weights have a version number."""

    version: int


@dataclass(frozen=True)
class ReallocationStep:
    """Messages that one rank sends and receives in one round of a reallocation.

    `index` is the index of the round.
    """

    index: int
    sends: Sequence[BucketMessage]
    receives: Sequence[BucketMessage]


@dataclass(frozen=True)
class SourcePieces:
    """Parameters of this rank's source engine, from which pieces are sent to other ranks.

    Attributes:
        engine: Source engine, or None if this rank has none.
        rectangles: For each parameter, a pair (slices, values): the part of the parameter that this
            rank has, given by one slice per dimension of the whole parameter, and its values.
    """

    engine: VersionedWeights | None
    rectangles: Mapping[str, tuple[Slice, Tensor]]

    @property
    def version(self) -> int:
        """Current version of the source engine's weights."""
        assert self.engine is not None
        return self.engine.version

    def select_piece(self, name: str, piece: Slice) -> Tensor:
        """Return the values of one piece of a parameter.

        `piece` has one slice per dimension, in coordinates of the whole parameter.
        """
        where, values = self.rectangles[name]
        return values[
            tuple(
                [
                    slice(p.start - w.start, p.stop - w.start)
                    for p, w in zip(piece, where, strict=True)
                ]
            )
        ]


@dataclass(frozen=True)
class _StepInFlight:
    """Messages of one round of a reallocation while they are being sent and received.

    Attributes:
        step: Messages that this rank sends and receives in the round.
        mail: Messages to receive, each with its buffer.
        offsets: Messages to read from the sender's shared memory, each with a tensor for its offset
            in that memory. For these messages, the sender sends only the offset.
        pending: Handles of all messages that are being sent or received.
        acknowledgements: Handles of the acknowledgements from the ranks that read this rank's
            shared memory.
    """

    step: ReallocationStep
    mail: Sequence[tuple[BucketMessage, Tensor]]
    offsets: Sequence[tuple[BucketMessage, Tensor]]
    pending: Sequence[PendingMessage]
    acknowledgements: Sequence[PendingMessage]


class MessageExchange:
    """Sender and receiver of one rank's messages in a reallocation (a transfer of parameters).

    Messages are exchanged in rounds. `steps` are the rounds in which this rank has messages, and
    `dtypes` maps each parameter to the dtype in which it is sent. `version` is the version of the
    source's weights, which every received message must have.
    """

    def __init__(
        self,
        link: ReallocationLink,
        source: SourcePieces,
        dtypes: Mapping[str, torch.dtype],
        version: int,
        steps: Sequence[ReallocationStep],
    ) -> None:
        self._link = link
        self._source = source
        self._dtypes = dtypes
        self._version = version
        self._steps = steps
        self._out = _allocate_buffers(
            [step.sends for step in steps], link.device, link.shared_memory
        )
        self._in = _allocate_buffers(
            [self._filter_remote(step.receives) for step in steps], link.device
        )
        self._flights: list[_StepInFlight] = []

    @property
    def buffer_bytes(self) -> int:
        """Total size of the message buffers in bytes."""
        return sum(buffer.nbytes for buffer in (*self._out, *self._in))

    def iterate_arrivals(self, stays: Iterable[ParameterTransfer]) -> Iterator[Values]:
        """Iterate over the pieces that this rank has to write: local ones, then received ones.

        Each item is (name of the parameter, slices of the whole parameter, values). The values are
        valid until the next item is requested. `stays` are the transfers within this rank.
        """
        if self._steps:
            self._begin(0)
        for transfer in stays:
            yield (
                transfer.name,
                transfer.piece,
                self._source.select_piece(transfer.name, transfer.piece),
            )
        for index in range(len(self._steps)):
            if index + 1 < len(self._steps):
                self._begin(index + 1)
            yield from self._finish(self._flights[index])
        for flight in self._flights[-2:]:
            _wait(flight.acknowledgements)

    def _filter_remote(self, receives: Sequence[BucketMessage]) -> list[BucketMessage]:
        remote: list[BucketMessage] = []
        for message in receives:
            if message.source not in self._link.peer_memory:
                remote.append(message)
        return remote

    def _begin(self, index: int) -> None:
        """Pack the messages of the step at `index`, and start sending and receiving them.

        The previous step is still in flight, so consecutive steps use different buffers. This step
        uses the same buffers as the step at `index` - 2, so the acknowledgements of that
        step are awaited first.
        """
        step = self._steps[index]
        slot = index % 2
        if index > 1:
            _wait(self._flights[index - 2].acknowledgements)
        mail = _split_buffer(self._filter_remote(step.receives), self._in[slot])
        sends = _split_buffer(step.sends, self._out[slot])
        read_messages = []
        for message in step.receives:
            if message.source in self._link.peer_memory:
                read_messages.append(message)
        offsets = [(message, torch.empty(1, dtype=torch.int64)) for message in read_messages]
        posts = []
        acknowledgements = []
        for message, buffer in sends:
            self._pack(message, buffer, step.index)
            if message.target in self._link.mapped_by:
                posts.append((message.target, torch.tensor([buffer.storage_offset()])))
                acknowledgements.append((message.target, torch.empty(1, dtype=torch.int64)))
            else:
                posts.append((message.target, buffer))
        pending = self._link.post_messages(
            [(message.source, x) for message, x in (*mail, *offsets)], posts
        )
        self._flights.append(
            _StepInFlight(
                step,
                mail,
                offsets,
                pending,
                self._link.post_messages(acknowledgements, [], ACKNOWLEDGEMENT_TAG),
            )
        )

    def _finish(self, flight: _StepInFlight) -> Iterator[Values]:
        _wait(flight.pending)
        places = []
        for message, offset in flight.offsets:
            places.append(
                (
                    message,
                    self._link.peer_memory[message.source][
                        int(offset) : int(offset) + message.num_bytes
                    ],
                )
            )
        for message, buffer in (*flight.mail, *places):
            self._verify(message, buffer, flight.step.index)
            for part in message.parts:
                yield part.name, part.piece, self._view_piece(part, buffer)
        acknowledgement = torch.zeros(1, dtype=torch.int64)
        _wait(
            self._link.post_messages(
                [],
                [(message.source, acknowledgement) for message, _ in flight.offsets],
                ACKNOWLEDGEMENT_TAG,
            )
        )

    def _pack(self, message: BucketMessage, buffer: Tensor, index: int) -> None:
        for part in message.parts:
            self._view_piece(part, buffer).copy_(self._source.select_piece(part.name, part.piece))
            if (end := part.offset + part.num_bytes) < part.end:
                buffer[end : part.end] = 0
        seal = _view_seal(message, buffer)
        seal.copy_(torch.tensor([self._source.version, index, 0]))
        seal[2] = _compute_checksum(message, buffer)

    def _verify(self, message: BucketMessage, buffer: Tensor, index: int) -> None:
        """Raise `RunError` if a received message is damaged or has the wrong round or version.

        `index` is the index of the expected round.
        """
        version, sent_round, sent_checksum = _view_seal(message, buffer).tolist()
        checksum = int(_compute_checksum(message, buffer))
        if (sent_checksum, sent_round, version) == (checksum, index, self._version):
            return
        names = list(dict.fromkeys(part.name for part in message.parts))
        label = (
            f"reallocation: {', '.join(names)} from rank {message.source} to rank {message.target}"
        )
        if sent_checksum != checksum:
            raise RunError(
                f"{label}: the checksum of this message is not the sender's; the data were damaged"
            )
        if sent_round != index:
            raise RunError(f"{label}: sent in round {sent_round}, expected in round {index}")
        raise RunError(
            f"{label}: of version {version}, expected {self._version}; the source's weights "
            f"changed while they were read"
        )

    def _view_piece(self, part: MessagePiece, buffer: Tensor) -> Tensor:
        """Return a view of a piece in a message's buffer, with the piece's dtype and shape."""
        flat = buffer[part.offset : part.offset + part.num_bytes].view(self._dtypes[part.name])
        return flat.view([interval.stop - interval.start for interval in part.piece])


def _wait(pending: Iterable[PendingMessage]) -> None:
    for message in pending:
        message.wait()


def _allocate_buffers(
    messages: Sequence[Sequence[BucketMessage]], device: torch.device, within: Tensor | None = None
) -> list[Tensor]:
    """Return two message buffers, one for even steps and one for odd steps.

    `messages` has the messages of each step of the exchange. Two buffers are needed because two
    consecutive steps can be in flight at the same time. Each buffer is as large as the largest step
    that uses it. If `within` is given, the buffers are slices of this tensor.
    """
    sizes = []
    for step_messages in messages:
        sizes.append(sum(message.num_bytes for message in step_messages))
    most = [max(sizes[slot::2], default=0) for slot in (0, 1)]
    if within is None:
        return [torch.empty(size, dtype=torch.uint8, device=device) for size in most]
    return [within[: most[0]], within[most[0] : sum(most)]]


def _split_buffer(
    messages: Sequence[BucketMessage], buffer: Tensor
) -> list[tuple[BucketMessage, Tensor]]:
    """Return each message with its slice of `buffer`, in which all messages are consecutive."""
    ends = [0]
    for message in messages:
        ends.append(ends[-1] + message.num_bytes)
    return [(message, buffer[ends[i] : ends[i + 1]]) for i, message in enumerate(messages)]


def _view_seal(message: BucketMessage, buffer: Tensor) -> Tensor:
    return buffer[message.seal_offset : message.seal_offset + SEAL].view(torch.int64)


def _compute_checksum(message: BucketMessage, buffer: Tensor) -> Tensor:
    """Return 1 plus the sum of the 8-byte words of all pieces, modulo 2 ** 64.

    Because of the added 1, a buffer full of zeros is not a valid message.
    """
    return buffer[: message.seal_offset].view(torch.int64).sum() + 1
