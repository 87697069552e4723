"""Plan of a reallocation: which rank sends which piece of each parameter to which rank.

The plan is computed without communication, from the rectangle (one slice per dimension) of each
parameter that each rank holds. If several ranks hold an element, it is taken from the target rank
itself if possible, otherwise from a rank on the same machine, otherwise from any rank. Among
equally near ranks, the one that has sent the fewest elements so far is chosen.

`ReallocationTraffic` is the cost of a plan in bytes: per rank, and within and between machines.

The pieces are grouped into messages of bounded size.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import NamedTuple

from weft.errors import ConfigError
from weft.topology import Mesh, Slice, StagedSizes, compute_holdings

Holdings = Mapping[int, Mapping[str, Slice]]
"""Rank -> canonical name -> the rectangle of the whole parameter on that rank.

Names of which the rank holds nothing are absent.
"""

Box = tuple[tuple[int, int], ...]  # a rectangle as (start, stop) of each dim
# parts of a wanted rectangle, each with the numbers of the rectangles that have it
Cells = list[tuple[Box, tuple[int, ...]]]


class ParameterTransfer(NamedTuple):
    """Transfer of a piece of a parameter from one rank to another.

    If `source == target`, the rank already has the piece: nothing is sent, and the piece is copied
    only if the rank's source and target engines are different.

    Attributes:
        name: Name of the parameter.
        piece: Part of the parameter to transfer, as one slice per dimension of the whole parameter.
        source: Rank that has the piece.
        target: Rank that needs the piece.
    """

    name: str
    piece: Slice
    source: int
    target: int

    @property
    def num_elements(self) -> int:
        """Number of elements to transfer."""
        return math.prod(part.stop - part.start for part in self.piece)

    @property
    def is_local(self) -> bool:
        """True if source and target are the same rank."""
        return self.source == self.target


def holdings_of(
    shapes: Mapping[str, tuple[int, ...]], sizes: StagedSizes, mesh: Mesh, *, tied: bool = False
) -> dict[int, dict[str, Slice]]:
    """Return the parts of parameters that each rank of a mesh holds, by parameter name.

    Each part is given by one slice per dimension of the whole parameter. `shapes` maps canonical
    names to the shapes of whole parameters. `tied` is True if the embedding is also the output
    matrix. Raises `ConfigError` if the layout does not fit the network.
    """
    result: dict[int, dict[str, Slice]] = {}
    for rank in mesh.ranks:
        result[rank] = compute_holdings(
            shapes, sizes, mesh.layout, mesh.get_coordinates(rank), tied=tied
        )
    return result


def plan(
    source: Holdings, target: Holdings, *, node_of: Callable[[int], int]
) -> list[ParameterTransfer]:
    """Return transfers that give every target rank each element of its slices exactly once.

    `source[rank][name]` is the slice of the parameter `name` that a rank has, with one range per
    dimension; `target` has the same form. `node_of` returns the machine of a rank; elements are
    sent from a rank on the same machine if possible. The transfers are ordered by parameter. Raises
    `ConfigError` naming the parameter if a target rank needs an element that no source rank has.
    """
    source_boxes = _group_by_name(source)
    target_boxes = _group_by_name(target)
    sent: dict[int, int] = defaultdict(int)
    cells_of: dict[tuple[tuple[Box, ...], Box], Cells] = {}  # cache: most blocks are cut alike
    transfers: list[ParameterTransfer] = []
    for name, boxes in target_boxes.items():
        holders = source_boxes.get(name, {})
        ranks_of_box = list(holders.values())
        available = tuple(holders)
        for box, ranks in boxes.items():
            if (available, box) not in cells_of:
                cells_of[available, box] = _split_cells(available, box)
            cells = []
            for cell, numbers in cells_of[available, box]:
                cells.append((cell, [rank for n in numbers for rank in ranks_of_box[n]]))
            missing = next((cell for cell, holding_ranks in cells if not holding_ranks), None)
            if missing is not None:
                raise ConfigError(
                    f"parameter {name!r}: rank {ranks[0]} needs {_format_box(box)}, and no rank of "
                    f"the source has {_format_box(missing)}; reallocate between layouts of one "
                    f"network"
                )
            for rank in ranks:
                transfers += _plan_transfers_to(rank, name, cells, sent, node_of)
    return transfers


def _plan_transfers_to(
    rank: int,
    name: str,
    cells: list[tuple[Box, list[int]]],
    sent: dict[int, int],
    node_of: Callable[[int], int],
) -> list[ParameterTransfer]:
    """Return the transfers by which one rank gets the pieces of a parameter that it needs.

    `rank` is the receiving rank, and `name` is the name of the parameter. `cells` are the pieces,
    each with a list of the ranks that can send it. `sent` counts the elements that each rank sends,
    and is updated.
    """
    chosen: dict[int, list[Box]] = defaultdict(list)
    for cell, holding_ranks in cells:
        if rank in holding_ranks:
            chosen[rank].append(cell)
            continue
        node = node_of(rank)
        if len(holding_ranks) > 1:
            near_ranks = [sender for sender in holding_ranks if node_of(sender) == node]
        else:
            near_ranks = holding_ranks
        sender = min(
            near_ranks or holding_ranks, key=lambda candidate: (sent[candidate], candidate)
        )
        sent[sender] += _count_elements(cell)
        chosen[sender].append(cell)
    return [
        ParameterTransfer(name, tuple(slice(*part) for part in box), sender, rank)
        for sender, boxes in chosen.items()
        for box in (_merge_boxes(boxes) if len(boxes) > 1 else boxes)
    ]


def _group_by_name(holdings: Holdings) -> dict[str, dict[Box, list[int]]]:
    """Return the distinct non-empty rectangles of each parameter.

    Each rectangle is mapped to the ranks that hold it.
    """
    holders: dict[str, dict[Box, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, parts in holdings.items():
        for name, part in parts.items():
            box = tuple([(interval.start, interval.stop) for interval in part])
            if _count_elements(box) > 0:
                holders[name][box].append(rank)
    return holders


def _split_cells(available: Sequence[Box], box: Box) -> Cells:
    """Split the rectangle `box` into cells along the edges of the rectangles `available`.

    Returns each cell with the indices of the rectangles in `available` that cover it, if any.
    """
    overlapping = [
        (number, common)
        for number, other in enumerate(available)
        if (common := overlap(other, box)) is not None
    ]
    cuts = []
    for dim, limits in enumerate(box):
        cuts.append(
            sorted({edge for _, common in overlapping for edge in common[dim]} | set(limits))
        )
    owners: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, common in overlapping:
        spans = (
            range(bisect_left(edges, low), bisect_left(edges, high))
            for edges, (low, high) in zip(cuts, common, strict=True)
        )
        for place in product(*spans):
            owners[place].append(number)
    result = []
    for place in product(*(range(len(edges) - 1) for edges in cuts)):
        cell = tuple((cuts[dim][index], cuts[dim][index + 1]) for dim, index in enumerate(place))
        result.append((cell, tuple(owners.get(place, ()))))
    return result


def overlap(a: Box, b: Box) -> Box | None:
    """Return the intersection of two rectangles of the same tensor, or None if it is empty."""
    common = []
    for (low, high), (start, stop) in zip(a, b, strict=True):
        first = max(low, start)
        last = min(high, stop)
        if first >= last:
            return None
        common.append((first, last))
    return tuple(common)


def _merge_boxes(boxes: list[Box]) -> list[Box]:
    """Return rectangles that cover the same elements as `boxes`, with adjacent ones joined.

    Rectangles are joined along one dimension at a time, beginning with the last dimension.
    """
    for dim in reversed(range(len(boxes[0]))):
        boxes = sorted(boxes, key=lambda box: (box[:dim], box[dim + 1 :], box[dim]))
        joined = [boxes[0]]
        for previous, box in pairwise(boxes):
            is_aligned = previous[:dim] == box[:dim] and previous[dim + 1 :] == box[dim + 1 :]
            if is_aligned and joined[-1][dim][1] == box[dim][0]:
                joined[-1] = (*box[:dim], (joined[-1][dim][0], box[dim][1]), *box[dim + 1 :])
            else:
                joined.append(box)
        boxes = joined
    return boxes


def _count_elements(box: Box) -> int:
    size = 1
    for low, high in box:
        size *= high - low
    return size


def _format_box(box: Box) -> str:
    return "[" + ", ".join(f"{low}:{high}" for low, high in box) + "]"


@dataclass(frozen=True)
class ReallocationTraffic:
    """Number of bytes that a plan sends, copies or leaves in place.

    Attributes:
        sent: Bytes sent by each rank.
        received: Bytes received by each rank.
        in_place: Bytes that each rank does not move, because it holds the same part of a parameter
            before and after the reallocation.
        copied: Bytes copied within each rank.
        names: Bytes sent between ranks, for each parameter.
        inside: Total bytes sent between ranks of the same machine.
        across: Total bytes sent between machines.
    """

    sent: Counter[int] = field(default_factory=Counter)
    received: Counter[int] = field(default_factory=Counter)
    in_place: Counter[int] = field(default_factory=Counter)
    copied: Counter[int] = field(default_factory=Counter)
    names: Counter[str] = field(default_factory=Counter)  # sent, by parameter
    inside: int = 0  # sent between ranks of one machine
    across: int = 0  # sent between machines

    @property
    def moved_bytes(self) -> int:
        """Number of bytes sent between ranks."""
        return self.inside + self.across


def count_traffic(
    transfers: Iterable[ParameterTransfer],
    source: Holdings,
    target: Holdings,
    *,
    itemsize: Mapping[str, int],
    node_of: Callable[[int], int],
) -> ReallocationTraffic:
    """Count the bytes that the transfers of a plan send, copy or leave in place.

    `source` and `target` are the parts of the parameters that each rank has before and after the
    reallocation. `itemsize` maps each parameter to the number of bytes that are sent per element.
    `node_of` returns the machine of a rank.
    """
    traffic = ReallocationTraffic()
    bytes_by_place: Counter[bool] = Counter()  # True: within a machine
    for transfer in transfers:
        size = transfer.num_elements * itemsize[transfer.name]
        if transfer.is_local:
            same = source[transfer.source][transfer.name] == target[transfer.target][transfer.name]
            counter = traffic.in_place if same else traffic.copied
            counter[transfer.target] += size
            continue
        traffic.sent[transfer.source] += size
        traffic.received[transfer.target] += size
        traffic.names[transfer.name] += size
        bytes_by_place[node_of(transfer.source) == node_of(transfer.target)] += size
    return ReallocationTraffic(
        traffic.sent,
        traffic.received,
        traffic.in_place,
        traffic.copied,
        traffic.names,
        bytes_by_place[True],
        bytes_by_place[False],
    )


def count_least_bytes(source: Holdings, target: Holdings, *, itemsize: Mapping[str, int]) -> int:
    """Return how many bytes of parameters the target ranks need but do not have yet.

    This is a lower bound on the bytes that any plan must send. `itemsize` maps each parameter to
    its number of bytes per element.
    """
    total = 0
    for rank, parts in target.items():
        held = source.get(rank, {})
        for name, part in parts.items():
            common = overlap(_to_box(held[name]), _to_box(part)) if name in held else None
            has = 0 if common is None else math.prod(high - low for low, high in common)
            total += (_count_piece_elements(part) - has) * itemsize[name]
    return total


def _to_box(part: Slice) -> tuple[tuple[int, int], ...]:
    return tuple((interval.start, interval.stop) for interval in part)


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
        """Return the message's size in bytes with another piece of `num_bytes` bytes."""
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
    remaining: dict[tuple[int, int], int] = defaultdict(int)
    for transfer in transfers:
        if not transfer.is_local:
            pair = (transfer.source, transfer.target)
            size = itemsize[transfer.name]
            for piece in split_piece(transfer.piece, bucket_bytes // PIECES // size):
                num_bytes = _count_piece_elements(piece) * size
                queues[pair].append((transfer.name, piece, num_bytes))
                remaining[pair] += num_bytes
    rounds: list[list[BucketMessage]] = []
    while remaining:
        sends: dict[int, int] = defaultdict(int)
        receives: dict[int, int] = defaultdict(int)
        messages = []
        for pair in sorted(remaining, key=lambda item: (-remaining[item], item)):
            room = bucket_bytes - max(sends[pair[0]], receives[pair[1]])
            message = _fill_message(pair, queues[pair], room)
            if message.parts:
                sends[pair[0]] += message.num_bytes
                receives[pair[1]] += message.num_bytes
                remaining[pair] -= sum(part.num_bytes for part in message.parts)
                messages.append(message)
        remaining = defaultdict(int, {pair: size for pair, size in remaining.items() if size})
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
    dim = next(index for index, part in enumerate(piece) if part.stop - part.start > 1)
    row_elements = _count_piece_elements(piece[dim + 1 :])
    rows = max(1, limit // row_elements)
    part = piece[dim]
    for start in range(part.start, part.stop, rows):
        yield from split_piece(
            (*piece[:dim], slice(start, min(start + rows, part.stop)), *piece[dim + 1 :]), limit
        )


def _count_piece_elements(piece: Slice) -> int:
    return math.prod(part.stop - part.start for part in piece)
