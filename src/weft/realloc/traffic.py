"""Cost of a reallocation in bytes: per rank, within and between machines, and its lower bound."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from weft.realloc.plan import Holdings, ParameterTransfer, overlap
from weft.topology import Slice


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

    @property
    def local_bytes(self) -> int:
        """Number of bytes that stay on their rank, in place or copied."""
        return self.in_place.total() + self.copied.total()


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
    ways: Counter[bool] = Counter()
    for each in transfers:
        size = each.num_elements * itemsize[each.name]
        if each.is_local:
            same = source[each.source][each.name] == target[each.target][each.name]
            (traffic.in_place if same else traffic.copied)[each.target] += size
            continue
        traffic.sent[each.source] += size
        traffic.received[each.target] += size
        traffic.names[each.name] += size
        ways[node_of(each.source) == node_of(each.target)] += size
    return ReallocationTraffic(
        traffic.sent,
        traffic.received,
        traffic.in_place,
        traffic.copied,
        traffic.names,
        ways[True],
        ways[False],
    )


def count_least_bytes(source: Holdings, target: Holdings, *, itemsize: Mapping[str, int]) -> int:
    """Return how many bytes of parameters the target ranks need but do not have yet.

    This is a lower bound on the bytes that any plan must send. `itemsize` maps each parameter to
    its number of bytes per element.
    """
    total = 0
    for rank, parts in target.items():
        own = source.get(rank, {})
        for name, part in parts.items():
            common = overlap(_to_box(own[name]), _to_box(part)) if name in own else None
            has = 0 if common is None else math.prod(high - low for low, high in common)
            total += (math.prod(each.stop - each.start for each in part) - has) * itemsize[name]
    return total


def _to_box(part: Slice) -> tuple[tuple[int, int], ...]:
    return tuple((each.start, each.stop) for each in part)
