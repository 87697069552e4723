"""Which prompts begin alike, and how to spare most."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.engine.shared_prefixes import SharedPrefix, find_shared_prefixes

prompts = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=6)


def found(prompts: list[list[int]], least: int = 1) -> list[SharedPrefix]:
    return find_shared_prefixes([np.array(prompt, np.int64) for prompt in prompts], least)


def common(members: list[list[int]]) -> int:
    alike = len(list(takewhile(lambda tokens: len(set(tokens)) == 1, zip(*members, strict=False))))
    return min(alike, *(len(prompt) - 1 for prompt in members))


def partitions(numbers: list[int]) -> Iterator[list[list[int]]]:
    if not numbers:
        yield []
        return
    for rest in partitions(numbers[1:]):
        yield [[numbers[0]], *rest]
        for at in range(len(rest)):
            yield [*rest[:at], [numbers[0], *rest[at]], *rest[at + 1 :]]


@settings(max_examples=200, deadline=None)
@given(prompts, st.integers(1, 3))
def test_no_other_partition_spares_more(prompts: list[list[int]], least: int) -> None:
    made = found(prompts, least)
    sharers = [number for shared in made for number in shared.sequences]
    assert len(sharers) == len(set(sharers))
    for shared in made:
        assert len(shared.sequences) > 1 and shared.sequences == tuple(sorted(shared.sequences))
        assert least <= shared.size <= common([prompts[i] for i in shared.sequences])
    spared = sum(shared.size * (len(shared.sequences) - 1) for shared in made)

    def most(partition: list[list[int]]) -> int:
        sizes = [
            (len(part), common([prompts[i] for i in part])) for part in partition if len(part) > 1
        ]
        return sum(size * (count - 1) for count, size in sizes if size >= least)

    assert spared == max(most(partition) for partition in partitions(list(range(len(prompts)))))


def test_two_templates_that_begin_alike_by_hand() -> None:
    first, second = [1, 2, 3, 4, 5], [1, 2, 7, 7, 7, 7]
    assert found([[*first, 8, 8], [*second, 9, 9], [*first, 6], [*second, 5]]) == [
        SharedPrefix((0, 2), 5),
        SharedPrefix((1, 3), 6),
    ]
    # Three at 5 tokens spare 10, all four at 2 tokens only 6.
    assert found([[*first, 8], [*first, 9], [*first, 7], [*second, 9]]) == [
        SharedPrefix((0, 1, 2), 5)
    ]
    # Two go on from their own 4 tokens, the others from what all have in common.
    assert found([[1, 2, 3, 4, 9], [1, 6], [1, 7], [1, 2, 3, 4, 8]]) == [
        SharedPrefix((0, 3), 4),
        SharedPrefix((1, 2), 1),
    ]
    assert found([[1, 2, 5], [1, 2, 6], [1, 2, 7], [1, 2, 8, 9], [1, 2, 8, 8]]) == [
        SharedPrefix((0, 1, 2, 3, 4), 2)
    ]


def test_a_last_token_is_never_shared() -> None:
    assert found([[1, 2, 3], [1, 2, 3]]) == [SharedPrefix((0, 1), 2)]
    assert found([[1], [1], []]) == []
    assert found([[1, 2, 3], [1, 2, 4]], least=3) == []


def test_many_prompts_of_one_template_take_no_deep_stack() -> None:
    template = list(range(30))
    [shared] = found([[*template, 40 + i] for i in range(3000)])
    assert (shared.size, len(shared.sequences)) == (30, 3000)
