"""Symmetries of the devices: placements that differ only in the order of equal devices cost the same.

A search needs only one of them. The functions are pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

Run = tuple[int, int]  # first rank and the rank after the last one of adjacent devices


@dataclass
class DeviceBlock:
    """Adjacent devices that no range crosses: each range is inside, around, or elsewhere.

    Attributes:
        run: Its devices.
        ranges: Numbers of the ranges that are in this block and in none of its children.
        children: Blocks within this one, in the order of their devices.
        kind: Equal for two children of a block that can be exchanged.
    """

    run: Run
    ranges: list[int] = field(default_factory=list)
    children: list[DeviceBlock] = field(default_factory=list)
    kind: int = 0


class DeviceSymmetry:
    """Finds the ranges of devices that have to be tried, given those that are in use already."""

    def __init__(
        self, ranges: Mapping[Run, int], num_devices: int, per_node: int, firsts: Sequence[int]
    ) -> None:
        """Divide the devices into blocks that can be exchanged.

        `ranges` maps the candidates to their numbers, `per_node` is the number of devices per
        machine, and `firsts` are the first devices of each kind.
        """
        self._firsts = sorted(firsts)
        nodes = []
        for first in range(0, num_devices, per_node):
            nodes.append((first, min(first + per_node, num_devices)))
        runs = sorted({*ranges, *nodes, (0, num_devices)}, key=lambda run: (run[0], -run[1]))
        crossed = _find_crossed(runs)
        self._root = DeviceBlock((0, num_devices))
        path = [self._root]
        for run in runs:
            while run[1] > path[-1].run[1] or run[0] >= path[-1].run[1]:
                path.pop()
            if run not in crossed and run != path[-1].run:
                block = DeviceBlock(run)
                path[-1].children.append(block)
                path.append(block)
            if run in ranges:
                path[-1].ranges.append(ranges[run])
        self._runs = {number: run for run, number in ranges.items()}
        self._crossed = sorted(crossed)
        self._kinds: dict[Hashable, int] = {}
        self._set_kind(self._root)

    def list_distinct(self, used: Iterable[Sequence[Run]]) -> list[int]:
        """Return the numbers of ranges such that every other one is equal to one of them.

        `used` are the runs of the meshes that are placed already. Two ranges are equal if devices
        can be exchanged such that one becomes the other and all of `used` stay the same.
        """
        distinct: list[int] = []
        self._collect(self._root, [run for runs in used for run in runs], distinct)
        return distinct

    def _collect(self, block: DeviceBlock, used: Sequence[Run], distinct: list[int]) -> None:
        distinct += block.ranges
        collected_kinds = set()
        start, stop = block.run
        # A mesh with all devices of the block does not distinguish its children.
        inside = [
            run
            for run in used
            if run[0] < stop and start < run[1] and not _is_around(run, (start, stop))
        ]
        for child in block.children:
            touched = any(
                run[0] < child.run[1]
                and child.run[0] < run[1]
                and (run == child.run or not _is_around(run, child.run))
                for run in inside
            )
            if touched:
                self._collect(child, inside, distinct)
            elif child.kind not in collected_kinds:
                collected_kinds.add(child.kind)
                self._collect(child, inside, distinct)

    def _set_kind(self, block: DeviceBlock) -> None:
        """Set the kind of a block and of all blocks in it."""
        start, stop = block.run
        for child in block.children:
            self._set_kind(child)
        range_positions = []
        for index in block.ranges:
            first, last = self._runs[index]
            range_positions.append((first - start, last - start))
        around = []
        for run in self._crossed:
            if _is_around(run, block.run):
                around.append(run)
        kinds = []
        for first in self._firsts:
            kinds.append(min(max(first - start, 0), stop - start))
        parts = []
        for child in block.children:
            parts.append((child.run[0] - start, child.kind))
        shape = (stop - start, tuple(range_positions), tuple(kinds), tuple(parts))
        block.kind = self._kinds.setdefault((shape, tuple(around)), len(self._kinds))


def _is_around(run: Run, other: Run) -> bool:
    return run[0] <= other[0] and other[1] <= run[1]


def _find_crossed(runs: Sequence[Run]) -> set[Run]:
    """Return the runs that share some devices with another run, but neither contains the other.

    `runs` are in ascending order of their first devices; of those with the same one, the longest
    is first.
    """
    crossed: set[Run] = set()
    open_runs: list[Run] = []
    for run in runs:
        open_runs = [other for other in open_runs if other[1] > run[0]]
        for other in open_runs:
            if other[1] < run[1]:
                crossed |= {run, other}
        open_runs.append(run)
    return crossed


def describe_pattern(
    meshes: Sequence[tuple[Hashable, Sequence[Run]]],
    per_node: int,
    firsts: Sequence[int],
) -> Hashable:
    """Return a value that is equal for placements that differ only in the order of equal devices.

    `meshes` has the layout and the runs of adjacent ranks of each unit's mesh, and `firsts` are the
    first devices of each kind. Machines are compared by which meshes use how many of their devices.
    """
    ends = {end for _, runs in meshes for run in runs for end in run}
    last = max(ends)
    ends |= {first for first in firsts if first < last}
    # Machines in which something begins or ends are looked at; the others are like a neighbor.
    nodes = {0}
    for end in ends:
        nodes |= {(end - 1) // per_node, end // per_node, end // per_node + 1}
    ordered = sorted(node for node in nodes if 0 <= node * per_node < last)
    machines: Counter[Hashable] = Counter()
    for number, node in enumerate(ordered):
        following = ordered[number + 1] if number + 1 < len(ordered) else node + 1
        low, high = node * per_node, (node + 1) * per_node
        cuts = sorted({low, high, *(end for end in ends if low < end < high)})
        content: Counter[Hashable] = Counter()
        for start, stop in pairwise(cuts):
            mask = tuple(any(run[0] <= start < run[1] for run in runs) for _, runs in meshes)
            if any(mask):
                content[mask] += stop - start
        kind = sum(first <= low for first in firsts)
        machines[kind, frozenset(content.items())] += following - node
    machines = Counter({name: count for name, count in machines.items() if name[1]})  # type: ignore[index]
    return tuple(layout for layout, _ in meshes), frozenset(machines.items())
