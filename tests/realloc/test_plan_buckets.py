"""Rounds of messages: all of a plan, in order, within the bucket's size."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tests.realloc.common import Sizes, layouts, on, shapes
from weft.errors import ConfigError
from weft.realloc.plan import (
    SMALLEST,
    BucketMessage,
    MessagePiece,
    ParameterTransfer,
    plan,
    plan_rounds,
    split_piece,
)
from weft.topology import Layout


def one_node(rank: int) -> int:
    return 0


@pytest.mark.parametrize("limit", [1, 3, 4, 7, 24, 1000])
def test_a_piece_is_cut_into_parts_that_are_the_whole(limit: int) -> None:
    times = np.zeros((5, 6, 7), int)
    for part in split_piece((slice(1, 3), slice(2, 6), slice(0, 7)), limit):
        times[part] += 1
        assert times[part].size <= limit
    assert times.sum() == times[1:3, 2:6].sum() == 2 * 4 * 7 and times.max() == 1


@pytest.mark.parametrize("bucket", [SMALLEST, 3000, 10**6])
def test_all_that_is_sent_is_in_the_rounds_once_and_within_the_bucket(bucket: int) -> None:
    sizes = Sizes(head_dim=8)
    every = shapes(sizes)
    itemsize = {name: 2 + 2 * (at % 2) for at, name in enumerate(every)}
    for a in layouts(4, sizes):
        for b in (Layout(tensor=4), Layout(data=4, fsdp=4), Layout(data=2, pipeline=2)):
            transfers = plan(on(a, sizes), on(b, sizes, start=1), node_of=one_node)
            arrived = Counter[tuple[str, int]]()
            for messages in plan_rounds(transfers, itemsize, bucket):
                sends, receives = Counter[int](), Counter[int]()
                for message in messages:
                    sends[message.source] += message.num_bytes
                    receives[message.target] += message.num_bytes
                    for part in message.parts:
                        elements = int(np.prod([p.stop - p.start for p in part.piece]))
                        assert part.num_bytes == elements * itemsize[part.name]
                        arrived[part.name, message.target] += elements
                assert max(sends.values()) <= bucket and max(receives.values()) <= bucket
                assert len({(m.source, m.target) for m in messages}) == len(messages)
            asked = Counter[tuple[str, int]]()
            for each in transfers:
                asked[each.name, each.target] += 0 if each.is_local else each.num_elements
            assert arrived == +asked


def test_parts_of_a_message_do_not_overlap() -> None:
    message = BucketMessage(0, 1)
    for at, num_bytes in enumerate((6, 16, 2, 40)):
        size = message.compute_size_with(num_bytes)
        message.parts.append(MessagePiece(f"w{at}", (), message.seal_offset, num_bytes))
        assert message.num_bytes == size
    assert [part.offset for part in message.parts] == [0, 16, 32, 48]
    assert message.seal_offset == 96 and message.num_bytes == 128


def test_ranks_work_at_the_same_time() -> None:
    """Two ranks send 8 KiB each to each of two others: no more rounds than one of them needs for
    its own 16.
    """
    piece = (slice(0, 64), slice(0, 16))
    transfers = [
        ParameterTransfer(f"w{g}{t}{n}", piece, g, t)
        for g in (0, 1)
        for t in (2, 3)
        for n in range(8)
    ]
    sizes = {each.name: 1 for each in transfers}
    made = plan_rounds(transfers, sizes, 4 * 1024 + 64)
    assert len(made) <= 6
    assert all(len({m.source for m in messages}) == 2 for messages in made[:4])


def test_what_stays_needs_no_message() -> None:
    assert plan_rounds([ParameterTransfer("w", (slice(0, 9),), 3, 3)], {"w": 4}, SMALLEST) == []


def test_a_bucket_that_is_too_small() -> None:
    with pytest.raises(
        ConfigError, match=f"bucket_bytes=100: a bucket has at least {SMALLEST} bytes"
    ):
        plan_rounds([], {}, 100)
