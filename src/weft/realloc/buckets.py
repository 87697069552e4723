"""Grouping of a reallocation plan's pieces into messages of bounded size.

Messages are sent in rounds. In each round, no rank sends or receives more bytes than fit in a
bucket (a buffer of fixed size), and a rank sends at most one message to any other rank. Scheduling
the rounds needs no communication: every rank computes the same rounds from the same plan.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from weft.errors import ConfigError
from weft.realloc.plan import ParameterTransfer
from weft.topology import Slice

# Bytes. Pieces start at multiples, so that they can be viewed in their dtype and summed in words.
ALIGNMENT = 16
WORD = 8
SEAL = 3 * WORD  # bytes: version, round, checksum
SMALLEST = 1024
PIECES = 4  # a piece has at most 1 / PIECES of a bucket, so that buckets fill well


@dataclass(frozen=True)
class MessagePiece:
    """Piece of a parameter within a message.

    Attributes:
        name: Name of the parameter.
        piece: Part of the whole parameter that is sent, as one slice per dimension.
        offset: Position in the message at which the piece starts, in bytes.
        num_bytes: Size of the piece in bytes, without padding.
    """

    name: str
    piece: Slice
    offset: int
    num_bytes: int

    @property
    def end(self) -> int:
        """Offset in bytes at which the next piece can start, after padding for alignment."""
        return self.offset + align(self.num_bytes)


@dataclass
class BucketMessage:
    """Message that one rank sends to another in one round of a reallocation.

    The pieces of parameters are followed by a seal, which the receiver verifies: the version of the
    weights, the index of the round, and a checksum.

    Attributes:
        source: Rank that sends the message.
        target: Rank that receives the message.
        parts: Pieces of parameters, in the order in which they are sent.
    """

    source: int
    target: int
    parts: list[MessagePiece] = field(default_factory=list)

    @property
    def seal_offset(self) -> int:
        """Offset in bytes of the seal (version, round and checksum), which follows the last piece."""
        return self.parts[-1].end if self.parts else 0

    @property
    def num_bytes(self) -> int:
        """Size of the message in bytes, with its seal (version, round, checksum) and padding."""
        return align(self.seal_offset + SEAL)

    def compute_size_with(self, num_bytes: int) -> int:
        """Return the size in bytes that the message would have with another piece of `num_bytes`
        bytes.
        """
        return align(self.seal_offset + align(num_bytes) + SEAL)


def align(num_bytes: int) -> int:
    """Round `num_bytes` up to a multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def plan_rounds(
    transfers: Iterable[ParameterTransfer], itemsize: Mapping[str, int], bucket_bytes: int
) -> list[list[BucketMessage]]:
    """Group the transfers between ranks into messages, and return the messages of each round.

    Transfers within a rank are ignored. In each round, the pairs of ranks with the most remaining
    bytes are served first, so that all pairs finish at about the same time. `itemsize` maps each
    parameter to its number of bytes per element, and `bucket_bytes` limits what a rank sends or
    receives in a round. Raises `ConfigError` if `bucket_bytes` is too small.
    """
    if bucket_bytes < SMALLEST:
        raise ConfigError(f"bucket_bytes={bucket_bytes}: a bucket has at least {SMALLEST} bytes")
    queues: dict[tuple[int, int], deque[tuple[str, Slice, int]]] = defaultdict(deque)
    left: dict[tuple[int, int], int] = defaultdict(int)
    for each in transfers:
        if not each.is_local:
            pair = (each.source, each.target)
            size = itemsize[each.name]
            for piece in split_piece(each.piece, bucket_bytes // PIECES // size):
                num_bytes = _count_piece_elements(piece) * size
                queues[pair].append((each.name, piece, num_bytes))
                left[pair] += num_bytes
    rounds: list[list[BucketMessage]] = []
    while left:
        sends: dict[int, int] = defaultdict(int)
        receives: dict[int, int] = defaultdict(int)
        messages = []
        for pair in sorted(left, key=lambda each: (-left[each], each)):
            room = bucket_bytes - max(sends[pair[0]], receives[pair[1]])
            message = _fill_message(pair, queues[pair], room)
            if message.parts:
                sends[pair[0]] += message.num_bytes
                receives[pair[1]] += message.num_bytes
                left[pair] -= sum(part.num_bytes for part in message.parts)
                messages.append(message)
        left = defaultdict(int, {pair: size for pair, size in left.items() if size})
        rounds.append(messages)
    return rounds


def _fill_message(
    pair: tuple[int, int], queue: deque[tuple[str, Slice, int]], room: int
) -> BucketMessage:
    """Return a message of at most `room` bytes, filled with pieces from the front of the queue.

    The pieces are removed from `queue`. `pair` is the (source rank, target rank) of the message.
    """
    message = BucketMessage(*pair)
    while queue and message.compute_size_with(queue[0][2]) <= room:
        name, piece, num_bytes = queue.popleft()
        message.parts.append(MessagePiece(name, piece, message.seal_offset, num_bytes))
    return message


def split_piece(piece: Slice, limit: int) -> Iterator[Slice]:
    """Split `piece`, a slice of a tensor, into slices of at most `limit` elements each.

    The first dimension is split first, and the next ones only if that is not enough.
    """
    if _count_piece_elements(piece) <= max(limit, 1):
        yield piece
        return
    dim = next(at for at, part in enumerate(piece) if part.stop - part.start > 1)
    rest = _count_piece_elements(piece[dim + 1 :])
    rows = max(1, limit // rest)
    part = piece[dim]
    for start in range(part.start, part.stop, rows):
        yield from split_piece(
            (*piece[:dim], slice(start, min(start + rows, part.stop)), *piece[dim + 1 :]), limit
        )


def _count_piece_elements(piece: Slice) -> int:
    return math.prod(part.stop - part.start for part in piece)
