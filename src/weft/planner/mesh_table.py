"""Facts about candidate meshes as arrays: their positions, and the time to move weights.

Meshes that differ only in their position belong to one class, and nothing is estimated twice for a
class. The functions are pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from weft.planner.candidates import PlacementUnit
from weft.planner.cluster import DeviceCluster
from weft.planner.cost import CallEstimate
from weft.planner.devices import DeviceRates
from weft.topology import Layout, Mesh, list_rank_intervals

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


class PlacementCosts(Protocol):
    """Data and estimates behind scores of placements (see `weft.planner.problem`).

    `unit_of` maps calls to the indices of their units, `home` roles to those of the units whose
    meshes own their weights, and `devices` has the kinds of devices.
    """

    units: Sequence[PlacementUnit]
    order: Sequence[str]
    producers: Mapping[str, Sequence[str]]
    rates: DeviceRates
    num_devices: int
    max_staleness: int
    shared_roles: Mapping[str, str]
    unit_of: dict[str, int]
    home: dict[str, int]
    devices: DeviceCluster

    def is_trained(self, role: str) -> bool: ...
    def count_processes(self, size: int, started: int) -> tuple[int, int]: ...
    def estimate_call(self, call: str, mesh: Mesh, started: int) -> CallEstimate: ...
    def estimate_transfers(
        self, role: str, source: Mesh, targets: Sequence[Mesh]
    ) -> list[float]: ...
    def estimate_memory(
        self, role: str, mesh: Mesh, calls: Sequence[str], *, own: bool, shared: bool
    ) -> tuple[float, float]: ...


class MeshTable:
    """Facts about the meshes of all units, as arrays over the meshes' numbers.

    Attributes:
        meshes: The meshes; `number_of` maps them to their numbers.
        starts: First ranks of the runs of adjacent ranks of each mesh, [meshes, runs]; `stops` are
            the ranks after the last ones. Missing runs are empty.
        ends: Number of processes that a run with this mesh starts.
        sizes: Number of devices.
        classes: Class of each mesh. Meshes of a class differ only in their position, and every call
            costs the same on them; `examples` has a mesh of each class. `class_positions` are equal
            for classes that have the same ranges and differ in their layout.
        parts: Equal numbers where `Mesh.has_same_parts` is true.
        ranges: All tuples of ranks, and `runs` the runs of each; `range_of` has their indices.
        is_adjacent: True if the ranks of the mesh are adjacent.
    """

    def __init__(self, problem: PlacementCosts) -> None:
        self.meshes = list(dict.fromkeys(mesh for unit in problem.units for mesh in unit.meshes))
        self.number_of = {mesh: number for number, mesh in enumerate(self.meshes)}
        self.examples: list[Mesh] = []
        self.class_positions: list[object] = []
        indices: dict[tuple[int, ...], int] = {}
        # Meshes share a few tuples of ranks, which are long.
        range_of: dict[int, int] = {}
        positions: list[object] = []
        runs: list[list[tuple[int, int]]] = []
        classes: dict[object, int] = {}
        parts: dict[object, int] = {}
        unsharded: dict[Layout, Layout] = {}
        numbers = []
        for mesh in self.meshes:
            ranks, layout = mesh.ranks, mesh.layout
            if id(ranks) not in range_of:
                range_of[id(ranks)] = indices.setdefault(ranks, len(indices))
                if len(indices) > len(runs):
                    runs.append(list_rank_intervals(ranks))
                    positions.append(_describe_position(problem, ranks, runs[-1]))
            each = range_of[id(ranks)]
            if layout not in unsharded:
                unsharded[layout] = replace(layout, fsdp=1)
            if (layout, positions[each]) not in classes:
                self.examples.append(mesh)
                self.class_positions.append((len(ranks), positions[each]))
            own_class = classes.setdefault((layout, positions[each]), len(classes))
            part = parts.setdefault((unsharded[layout], each), len(parts))
            numbers.append((each, own_class, part, len(ranks), ranks[-1] + 1))
        self.ranges = list(indices)
        columns = np.array(numbers, np.int64).T
        self.range_of, self.classes, self.parts, self.sizes, self.ends = columns
        width = max(len(each) for each in runs)
        self.runs = runs
        bounds = np.zeros((2, len(runs), width), np.int64)
        for number, each_runs in enumerate(runs):
            for run, (start, stop) in enumerate(each_runs):
                bounds[:, number, run] = start, stop
        self.starts, self.stops = bounds[:, self.range_of]
        self.is_adjacent = np.array([len(each) == 1 for each in runs])[self.range_of]


def _describe_position(
    problem: PlacementCosts, ranks: tuple[int, ...], runs: Sequence[tuple[int, int]]
) -> object:
    """Return a value that is equal for positions on which a call with the same layout costs the same."""
    if len(runs) > 1:
        return ranks
    start, stop = runs[0]
    per_node = problem.rates.per_node
    is_inside = start // per_node == (stop - 1) // per_node
    return None if is_inside else start % per_node, problem.devices.find_kinds(ranks)


class TransferTable:
    """Times to copy the weights that one role's training changes from one mesh to another.

    They depend on both classes, and on how the meshes lie relative to each other.
    """

    def __init__(self, problem: PlacementCosts, table: MeshTable, role: str) -> None:
        self._problem = problem
        self._table = table
        self._role = role
        self._keys: Integers = np.zeros(0, np.int64)  # in ascending order
        self._seconds: Floats = np.zeros(0)

    def find_seconds(self, sources: Integers, targets: Integers) -> Floats:
        """Return the seconds to copy from each of `sources` to the same element of `targets`.

        Both are arrays of mesh numbers. The time is 0 if the two meshes are equal.
        """
        keys = self._compute_keys(sources, targets)
        places = np.searchsorted(self._keys, keys)
        is_known = places < len(self._keys)
        is_known[is_known] = self._keys[places[is_known]] == keys[is_known]
        if not is_known.all():
            self._add(keys[~is_known], sources, targets, ~is_known)
            places = np.searchsorted(self._keys, keys)
        return np.where(sources == targets, 0.0, self._seconds[places])

    def _compute_keys(self, sources: Integers, targets: Integers) -> Integers:
        """Return a key for each pair of meshes; pairs with equal keys have the same time."""
        table = self._table
        per_node = self._problem.rates.per_node
        low, stop = table.starts[sources, 0], table.ends[sources]
        begin, end = table.starts[targets, 0], table.ends[targets]
        # The relative position of two meshes matters if they use the same machine.
        meets = (low // per_node <= (end - 1) // per_node) & (
            begin // per_node <= (stop - 1) // per_node
        )
        span = int(table.ends.max())
        relation = np.where(meets, begin - low + span + 1, 0)
        classes = table.classes[sources] * len(table.examples) + table.classes[targets]
        keys = classes * (2 * span + 2) + relation
        # Meshes with gaps have no position that can be compared.
        adjacent = table.is_adjacent[sources] & table.is_adjacent[targets]
        return np.where(adjacent, keys, -1 - (sources * len(table.meshes) + targets))

    def _add(
        self, keys: Integers, sources: Integers, targets: Integers, chosen: npt.NDArray[np.bool_]
    ) -> None:
        """Estimate the times of new keys, each by the first of its pairs."""
        meshes = self._table.meshes
        sources = np.broadcast_to(sources, chosen.shape)[chosen]
        targets = np.broadcast_to(targets, chosen.shape)[chosen]
        added, firsts = np.unique(keys, return_index=True)
        # Estimates for targets of one size are computed together.
        groups: dict[tuple[int, int], list[int]] = {}
        for number, first in enumerate(firsts):
            size = int(self._table.sizes[targets[first]])
            groups.setdefault((int(sources[first]), size), []).append(number)
        seconds = np.zeros(len(firsts))
        for (source, _), members in groups.items():
            group = [meshes[targets[firsts[number]]] for number in members]
            seconds[members] = self._problem.estimate_transfers(self._role, meshes[source], group)
        all_keys = np.concatenate([self._keys, added])
        all_seconds = np.concatenate([self._seconds, seconds])
        order = np.argsort(all_keys)
        self._keys = all_keys[order]
        self._seconds = all_seconds[order]
