"""Ranges that differ only in the order of equal devices."""

from __future__ import annotations

from weft.planner.candidates import list_ranges
from weft.planner.symmetry import DeviceSymmetry, Run, describe_pattern
from weft.topology import list_rank_intervals


def list_distinct(
    num_devices: int, per_node: int, *used: Run, firsts: tuple[int, ...] = (0,)
) -> list[Run]:
    runs = [(ranks[0], ranks[-1] + 1) for ranks in list_ranges(num_devices, per_node)]
    numbers = {run: number for number, run in enumerate(runs)}
    symmetry = DeviceSymmetry(numbers, num_devices, per_node, firsts)
    return sorted(runs[number] for number in symmetry.list_distinct([[run] for run in used]))


def test_one_range_of_each_size_where_nothing_is_placed() -> None:
    assert list_distinct(8, 4) == [(0, 1), (0, 2), (0, 4), (0, 8)]


def test_with_a_placed_mesh_there_are_places_in_it_beside_it_and_elsewhere() -> None:
    """Devices 0 and 1 of the first of two machines are in use."""
    assert list_distinct(8, 4, (0, 2)) == [
        (0, 1),  # in it
        (0, 2),
        (0, 4),
        (0, 8),
        (2, 3),  # in its machine
        (2, 4),
        (4, 5),  # in the other machine
        (4, 6),
        (4, 8),
    ]


def test_a_mesh_on_all_devices_breaks_no_symmetry() -> None:
    assert list_distinct(8, 4, (0, 8)) == list_distinct(8, 4)


def test_machines_of_different_kinds_are_not_exchanged() -> None:
    assert list_distinct(4, 2, firsts=(0, 2)) == [(0, 1), (0, 2), (0, 4), (2, 3), (2, 4)]


def test_of_three_machines_the_last_is_in_no_pair() -> None:
    """Machines 0 and 1 can be exchanged, machine 2 with neither."""
    assert list_distinct(3, 1) == [(0, 1), (0, 2), (0, 3), (2, 3)]


def test_a_machine_of_six_devices() -> None:
    """The sizes 2, 3 and 4 cross each other, so few devices can be exchanged: 0 with 1, 4 with 5."""
    distinct = list_distinct(6, 6)
    assert (0, 1) in distinct and (1, 2) not in distinct
    assert (4, 5) in distinct and (5, 6) not in distinct
    assert {(0, 2), (2, 4), (4, 6), (0, 3), (3, 6), (0, 4), (0, 6)} <= set(distinct)


def describe(*runs: Run, per_node: int = 4, firsts: tuple[int, ...] = (0,)) -> object:
    return describe_pattern([("d1", [run]) for run in runs], per_node, firsts)


def test_patterns_are_equal_for_other_devices_in_the_same_relation() -> None:
    assert describe((0, 2), (2, 4)) == describe((6, 8), (4, 6))
    assert describe((0, 2), (2, 4)) != describe((0, 2), (4, 6))  # on two machines
    assert describe((0, 2), (0, 2)) != describe((0, 2), (2, 4))
    assert describe((0, 4), (0, 8)) == describe((8, 12), (8, 16))
    assert describe((0, 4), (0, 2)) != describe((0, 2), (0, 4))  # the other call has more
    assert describe((0, 4), firsts=(0, 4)) != describe((4, 8), firsts=(0, 4))


def test_patterns_of_many_machines_do_not_list_them() -> None:
    assert describe((0, 4096), (4096, 8192)) == describe((4096, 8192), (0, 4096))


def test_runs_of_ranks() -> None:
    assert list_rank_intervals((0, 1, 2)) == [(0, 3)]
    assert list_rank_intervals((0, 2, 3, 7)) == [(0, 1), (2, 4), (7, 8)]
