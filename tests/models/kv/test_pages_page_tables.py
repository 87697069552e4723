"""The accounting of pages: who uses which, when one is copied, and that none is lost.

No tensors.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.models.kv.pages import SCRATCH, PageAllocator, PageTables, build_ranges

PAGE = 4


def rows(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def test_pages_double_and_come_back() -> None:
    pages = PageAllocator(PAGE, count=4)
    first = pages.allocate(3)
    assert first.tolist() == [1, 2, 3] and pages.num_used == 3 and len(pages) == 4
    assert pages.allocate(2).tolist() == [4, 5] and len(pages) == 8
    pages.add_users(first[:1])
    pages.remove_users(first)
    assert pages.num_used == 3, "page 1 has a user left"
    assert pages.allocate(1).tolist() == [2]


def test_a_row_gets_pages_as_it_grows() -> None:
    tables = PageTables(PageAllocator(PAGE), rows=1, width=1)
    copies = tables.extend(rows(0), rows(0), rows(PAGE))
    assert tables.copy_pages(0).tolist() == [1] and not len(copies.source)
    tables.extend(rows(0), rows(PAGE), rows(PAGE + 1))
    assert tables.copy_pages(0).tolist() == [1, 2]
    assert tables.compute_token_indices(rows(0, 0, 0), rows(0, 3, 4)).tolist() == [4, 7, 8]
    tables.clear(0, keep=1)
    assert tables.copy_pages(0).tolist() == [1] and tables.pages.num_used == 1


def test_a_shared_page_is_copied_by_all_who_write_but_the_last() -> None:
    tables = PageTables(PageAllocator(PAGE))
    tables.extend(rows(0), rows(0), rows(6))
    for row in (1, 2):
        tables.assign_pages(row, tables.copy_pages(0))
    assert tables.pages.num_used == 2
    copies = tables.extend(rows(0, 1, 2), rows(6, 6, 6), rows(7, 7, 7))
    assert copies.source.tolist() == [2, 2] and copies.target.tolist() == [3, 4]
    assert [tables.copy_pages(row).tolist() for row in range(3)] == [[1, 3], [1, 4], [1, 2]]
    assert not len(tables.extend(rows(0, 1, 2), rows(7, 7, 7), rows(8, 8, 8)).source), (
        "each has its own now"
    )


def test_a_full_shared_page_is_never_copied() -> None:
    tables = PageTables(PageAllocator(PAGE))
    tables.extend(rows(0), rows(0), rows(PAGE))
    tables.assign_pages(1, tables.copy_pages(0))
    assert not len(tables.extend(rows(0, 1), rows(PAGE, PAGE), rows(PAGE + 1, PAGE + 1)).source)
    assert (
        tables.copy_pages(0)[0] == tables.copy_pages(1)[0]
        and tables.copy_pages(0)[1] != tables.copy_pages(1)[1]
    )


steps = st.lists(
    st.tuples(
        st.sampled_from(["grow", "fork", "cut", "end"]), st.integers(0, 7), st.integers(1, 9)
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(steps)
def test_rows_read_back_what_they_wrote_and_no_page_is_lost(
    todo: list[tuple[str, int, int]],
) -> None:
    """A memory of numbers in place of keys: every row finds its own tokens, whatever others did."""
    tables, memory = (
        PageTables(PageAllocator(PAGE, count=2), rows=1, width=1),
        np.zeros(4096, np.int64),
    )
    held: list[list[int]] = [[] for _ in range(8)]
    token = 0
    tables.ensure_size(8, 0)
    for what, row, count in todo:
        if what == "grow":
            start = len(held[row])
            copies = tables.extend(rows(row), rows(start), rows(start + count))
            cells = memory.reshape(-1, PAGE)
            cells[copies.target] = cells[copies.source]
            new = list(range(token + 1, token + 1 + count))
            token += count
            places = tables.compute_token_indices(
                np.full(count, row), np.arange(start, start + count)
            )
            memory[places] = new
            held[row] += new
        elif what == "fork":
            target = count % 8
            if not held[target]:
                tables.assign_pages(target, tables.copy_pages(row))
                held[target] = list(held[row])
        else:
            left = min(count, len(held[row])) if what == "cut" else 0
            held[row] = held[row][:left]
            tables.clear(row, keep=-(-left // PAGE))
        for reader, tokens in enumerate(held):
            places = tables.compute_token_indices(
                np.full(len(tokens), reader), np.arange(len(tokens))
            )
            assert memory[places].tolist() == tokens
    for row in range(8):
        tables.clear(row)
    assert (
        tables.pages.num_used == 0
        and (tables.pages.users[1:] == 0).all()
        and (tables.table == SCRATCH).all()
    )


def test_order() -> None:
    assert build_ranges(rows(2, 0, 3)).tolist() == [0, 1, 0, 1, 2]


def test_pages_grow_up_to_their_limit_and_no_further() -> None:
    pages = PageAllocator(PAGE, count=4, max_pages=11)
    pages.reserve(100)
    assert len(pages) == 11
    pages = PageAllocator(PAGE, count=4, max_pages=11)
    pages.allocate(7)
    assert len(pages) <= 11
    pages.allocate(3)
    assert len(pages) == 11 and pages.num_used == 10
    with pytest.raises(AssertionError, match="10 of 11 pages are in use, and 1 more are needed"):
        pages.allocate(1)
