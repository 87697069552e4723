"""What a plan costs, worked out by hand."""

from __future__ import annotations

from tests.realloc.common import Sizes, layouts, on, shapes
from weft.realloc.plan import count_least_bytes, count_traffic, plan
from weft.topology import Slice, build_whole_slice


def node_of(rank: int) -> int:
    return rank // 2


def test_by_hand() -> None:
    """w [4, 4] in halves of rows on ranks 0 and 1 goes whole to 1 and to 2, of another node; v [2]
    is on 1 before and after.
    """
    source: dict[int, dict[str, Slice]] = {
        0: {"w": (slice(0, 2), slice(0, 4))},
        1: {"w": (slice(2, 4), slice(0, 4)), "v": build_whole_slice((2,))},
    }
    target = {
        1: {"w": build_whole_slice((4, 4)), "v": build_whole_slice((2,))},
        2: {"w": build_whole_slice((4, 4))},
    }
    found = count_traffic(
        plan(source, target, node_of=node_of),
        source,
        target,
        itemsize={"w": 2, "v": 4},
        node_of=node_of,
    )
    assert found.sent == {0: 32, 1: 16} and found.received == {1: 16, 2: 32}
    assert found.in_place == {1: 8} and found.copied == {1: 16}
    assert (found.inside, found.across, found.moved_bytes) == (16, 32, 48) and found.names == {
        "w": 48
    }
    assert count_least_bytes(source, target, itemsize={"w": 2, "v": 4}) == 48


def test_every_plan_sends_the_least() -> None:
    sizes = Sizes()
    itemsize = dict.fromkeys(shapes(sizes), 2)
    for a in layouts(4, sizes):
        for b in layouts(4, sizes):
            source, target = on(a, sizes), on(b, sizes, start=2)
            found = count_traffic(
                plan(source, target, node_of=node_of),
                source,
                target,
                itemsize=itemsize,
                node_of=node_of,
            )
            assert found.moved_bytes == count_least_bytes(source, target, itemsize=itemsize)
            assert found.sent.total() == found.received.total() == found.moved_bytes
