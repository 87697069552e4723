"""Pages as the scheduler counts them: never fewer than a sequence can come to hold, and none lost."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from weft.engine.generation.blocks import PageManager

PAGE = 4


def most_pages(length: int) -> int:
    """Over every place in a page at which a sequence's own tokens may begin."""
    return max(-(-(begin + length) // PAGE) for begin in range(PAGE))


steps = st.lists(
    st.tuples(
        st.sampled_from(["admit", "prefix", "start", "advance", "release"]),
        st.integers(0, 5),
        st.integers(1, 13),
    )
)


@settings(max_examples=300, deadline=None)
@given(steps)
def test_the_count_is_the_sum_over_sequences(todo: list[tuple[str, int, int]]) -> None:
    blocks = PageManager(max_sequences=4, max_tokens=60, page=PAGE, least_spared=None)
    waiting: dict[int, int] = {}
    started: dict[int, int] = {}
    prefixes: dict[int, int] = {}
    for what, key, length in todo:
        used = blocks.num_used
        if what == "admit" and key not in waiting and key not in started:
            admitted = blocks.admit(key, length)
            room = used + most_pages(length) <= 60 // PAGE + 2
            assert admitted == (room and len(waiting) + len(started) < 4)
            if admitted:
                waiting[key] = length
        elif what == "prefix" and key not in prefixes:
            if blocks.admit_prefix(("prefix", key), length):
                prefixes[key] = -(-length // PAGE)
        elif what == "start" and key in waiting:
            blocks.start(key)
            started[key] = waiting.pop(key)
        elif what == "advance":
            longer = {k: n + 1 for k, n in started.items()}
            fits = (
                sum(map(most_pages, [*longer.values(), *waiting.values()])) + sum(prefixes.values())
                <= 60 // PAGE + 2
            )
            assert blocks.advance() == fits
            started = longer if fits else started
        elif what == "release":
            for held, name in ((waiting, key), (started, key), (prefixes, ("prefix", key))):
                if key in held:
                    blocks.release(name)
                    del held[key]
        assert blocks.num_used == sum(
            map(most_pages, [*started.values(), *waiting.values()])
        ) + sum(prefixes.values())


def test_a_sequence_as_long_as_the_budget_runs_alone() -> None:
    """With its prompt as a prefix, and without."""
    for prefix in (0, 3, 5):
        blocks = PageManager(max_sequences=1, max_tokens=20, page=PAGE, least_spared=PAGE)
        assert not prefix or blocks.admit_prefix("p", prefix)
        assert blocks.admit("s", 1)
        blocks.start("s")
        assert all(blocks.advance() for _ in range(20 - prefix - 1))
