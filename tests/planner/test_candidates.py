"""Ranges of devices and layouts that a search tries, counted by hand."""

from __future__ import annotations

import itertools

import pytest

from weft.planner.candidates import (
    compute_max_context,
    list_layouts,
    list_meshes,
    list_ranges,
)


def show(num_devices: int, per_node: int) -> list[str]:
    return [f"{ranks[0]}-{ranks[-1]}" for ranks in list_ranges(num_devices, per_node)]


def test_ranges_of_machines_of_six_devices() -> None:
    """Sizes 1, 2, 3 and 6 divide a machine; 4 is a power of two and fits once."""
    assert show(6, 6) == [
        *(f"{rank}-{rank}" for rank in range(6)),
        "0-1",
        "2-3",
        "4-5",
        "0-2",
        "3-5",
        "0-3",
        "0-5",
    ]
    assert show(12, 6)[-3:] == ["0-5", "6-11", "0-11"]


def test_ranges_of_three_machines() -> None:
    """Two of three machines are a power of two; they are the first ones."""
    assert show(6, 2)[6:] == ["0-1", "2-3", "4-5", "0-3", "0-5"]


def test_ranges_where_the_last_machine_has_fewer_devices() -> None:
    assert show(6, 4) == [
        *(f"{rank}-{rank}" for rank in range(6)),
        "0-1",
        "2-3",
        "4-5",
        "0-3",
        "0-5",
    ]
    assert show(3, 4) == ["0-0", "1-1", "2-2", "0-1", "0-2"]


@pytest.mark.parametrize(("num_devices", "per_node"), [(8, 8), (24, 8), (12, 6), (10, 4), (1, 8)])
def test_ranges_are_within_a_machine_or_whole_machines(num_devices: int, per_node: int) -> None:
    ranges = list(list_ranges(num_devices, per_node))
    assert len(set(ranges)) == len(ranges)
    assert tuple(range(num_devices)) in ranges
    for ranks in ranges:
        nodes = {rank // per_node for rank in ranks}
        ends = num_devices, per_node * (max(nodes) + 1)
        whole = ranks[0] % per_node == 0 and ranks[-1] + 1 in ends
        assert len(nodes) == 1 or whole


def test_tensors_and_tokens_are_shared_within_a_machine() -> None:
    layouts = list(list_layouts(16, 4, max_context=4))
    assert max(layout.tensor * layout.context for layout in layouts) == 4
    assert {layout.context for layout in layouts} == {1, 2, 4}
    assert len(set(layouts)) == len(layouts)
    assert all(layout.num_devices == 16 for layout in layouts)


def test_experts_are_divided_over_data_parallel_ranks() -> None:
    layouts = {str(layout) for layout in list_layouts(4, 4, num_experts=6)}
    assert "d4f4t1p1c1e2" in layouts and "d4f1t1p1c1e2" in layouts
    assert "d2f1t2p1c1e2" in layouts
    assert not any("e4" in layout for layout in layouts)  # 4 does not divide 6
    assert all(layout.expert == 1 for layout in list_layouts(4, 4))


def test_only_long_sequences_are_shared_by_ranks() -> None:
    assert [compute_max_context(length) for length in (1, 1024, 2047, 2048, 8192)] == [
        1,
        1,
        1,
        2,
        8,
    ]


def test_layouts_that_are_refused_or_changed() -> None:
    """Data-parallel layouts alone; each mesh is listed once."""
    found = list_meshes(4, 4, lambda layout: layout if layout.data == layout.num_devices else None)
    assert len(found) == 4 + 2 * 2 + 2  # one device; two, sharded or not; four
    assert all(a != b for a, b in itertools.combinations(found, 2))
