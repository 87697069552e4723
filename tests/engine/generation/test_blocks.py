"""The room that slots take: enough for what is here, and no more than the limits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.engine.generation.blocks import SlotManager


@settings(max_examples=150, deadline=None)
@given(
    most=st.integers(1, 20),
    tokens=st.integers(200, 1500),
    todo=st.lists(st.tuples(st.sampled_from("arps"), st.integers(1, 190)), max_size=60),
)
def test_slots_held_are_enough_and_within_the_limits(
    most: int, tokens: int, todo: list[tuple[str, int]]
) -> None:
    slots, apart, here = SlotManager(most, tokens), {}, []
    for number, (what, length) in enumerate(todo):
        if what == "a" and slots.admit(number, length):
            here.append(number)
            slots.start(number)
        elif what == "p" and slots.admit_prefix(-number - 1, length):
            apart[-number - 1] = length
        elif what == "s":
            slots.advance()
        elif what == "r" and here:
            slots.release(here.pop(length % len(here)))
        elif what == "r" and apart:
            apart.pop(key := next(iter(apart)))
            slots.release(key)
        assert len(slots) <= slots.num_slots <= most
        assert slots.num_slots * slots.capacity + sum(apart.values()) <= tokens


def test_slots_are_as_large_as_they_will_be_where_that_is_half_the_limit() -> None:
    slots = SlotManager(8, 2000, unit=16, ahead=True)
    slots.expect(5, 110)
    assert slots.admit("a", 10) and (slots.num_slots, slots.capacity) == (5, 112)
    slots.expect(20, 100)
    assert all(slots.admit(key, 10) for key in "bcdef") and (slots.num_slots, slots.capacity) == (
        8,
        112,
    )
    for longest, ahead in ((150, True), (110, False)):
        slots = SlotManager(8, 2000, unit=16, ahead=ahead)
        slots.expect(5, longest)
        assert slots.admit("a", 10) and (slots.num_slots, slots.capacity) == (8, 64), (
            "they grow by doubling"
        )


@pytest.mark.parametrize("longest", [100, 1900])
def test_those_that_come_later_find_room(longest: int) -> None:
    """One long sequence, then one more a step: as many run together as without looking ahead, and
    few copies are made.
    """
    sizes = {}
    for ahead in (True, False):
        slots, held = SlotManager(32, 8000, unit=16, ahead=ahead), set()
        for key in range(32):
            slots.expect(key + 1, longest)
            assert slots.admit(key, 5)
            slots.start(key)
            assert slots.advance()
            held.add((slots.num_slots, slots.capacity))
        sizes[ahead] = len(held)
    assert sizes[True] <= sizes[False] + 3
