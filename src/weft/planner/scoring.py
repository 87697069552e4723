"""Step times and memory of many placements at once.

The time to score a placement depends on the number of calls only, not on the number of devices:
work and memory are added up on the first device of each mesh, since no other device has more calls.
The arrays have one element per placement. The functions are pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.planner.memory import count_process_bytes
from weft.planner.mesh_table import Floats, Integers, MeshTable, PlacementCosts, TransferTable
from weft.planner.simulated_step import CallTimes, Columns, MeshCoverage, SimulatedStep

Booleans = npt.NDArray[np.bool_]


class PlacementScores(NamedTuple):
    """Scores of placements: bytes beyond the capacity, seconds of a step, and devices in use."""

    excess: Floats
    seconds: Floats
    devices: Integers

    def sort(self) -> Integers:
        """Return the indices of the placements, from the best to the worst."""
        return np.lexsort((self.devices, self.seconds, self.excess))

    def select(self, index: Integers | Booleans | slice) -> PlacementScores:
        """Return the scores of some of the placements."""
        return PlacementScores(self.excess[index], self.seconds[index], self.devices[index])

    def get(self, index: int) -> tuple[float, float, int]:
        """Return the score of one placement."""
        return float(self.excess[index]), float(self.seconds[index]), int(self.devices[index])


class PlacementScorer:
    """Scores of the placements of one problem, computed for many placements at once.

    Attributes:
        problem: The problem.
        table: Facts about the meshes.
        numbers: For each unit, the numbers of its meshes.
        num_scored: Number of placements that were scored or bounded so far.
    """

    def __init__(self, problem: PlacementCosts) -> None:
        self.problem = problem
        self.table = MeshTable(problem)
        self.numbers = [
            np.array([self.table.number_of[mesh] for mesh in unit.meshes], np.int64)
            for unit in problem.units
        ]
        self.num_scored = 0
        self._units_of: dict[str, list[int]] = {}
        for number, unit in enumerate(problem.units):
            self._units_of.setdefault(unit.role, []).append(number)
        self._memory: dict[tuple[int, int, bool], tuple[Floats, Floats]] = {}
        self._times = CallTimes(problem, self.table, self.numbers)
        self._transfers = {
            role: TransferTable(problem, self.table, role) for role in self._units_of
        }

    def find_numbers(self, choice: Sequence[int]) -> list[Integers]:
        """Return the mesh numbers of a placement, which is given as one index for each unit."""
        return [self.numbers[unit][index : index + 1] for unit, index in enumerate(choice)]

    def find_choice(self, numbers: Sequence[int]) -> list[int]:
        """Return the placement as one index for each unit, given its mesh numbers."""
        choice = []
        for unit, number in enumerate(numbers):
            choice.append(int(np.flatnonzero(self.numbers[unit] == number)[0]))
        return choice

    def restrict(self, candidates: Sequence[Integers]) -> None:
        """Set the meshes from which units that are not placed yet will be placed."""
        self._times.restrict(candidates)

    def get_least_area(self, unit: int) -> float:
        """Return the smallest product of devices and seconds that the unit's calls need."""
        area = 0.0
        for call in self.problem.units[unit].calls:
            area += self._times.least_area[call]
        return area

    def find_dominated(self, unit: int, numbers: Integers) -> Booleans:
        """Return which meshes of a unit are no better than another of `numbers` on the same devices.

        The other mesh is at least as fast and needs no more memory. Of equal ones, the first
        remains. No mesh is dominated if other units have the same weights, because the time to
        copy weights then depends on the devices of these units.
        """
        problem, table = self.problem, self.table
        role = problem.units[unit].role
        dominated = np.zeros(len(numbers), np.bool_)
        sharing_roles = {*problem.shared_roles, *problem.shared_roles.values()}
        if len(self._units_of[role]) > 1 or role in sharing_roles:
            return dominated
        calls = problem.units[unit].calls
        costs = np.column_stack(
            [
                *(self._times.get_all_seconds(call) for call in calls),
                *self._get_memory(unit, 1, False),
            ]
        )
        places: dict[int, list[int]] = {}
        for index, mesh_range in enumerate(table.range_of[numbers]):
            places.setdefault(int(mesh_range), []).append(index)
        dominated_of: dict[tuple[int, ...], Booleans] = {}
        for indices in places.values():
            classes = table.classes[numbers[indices]]
            key = tuple(classes.tolist())
            if key not in dominated_of:
                class_costs = costs[classes]
                no_worse = (class_costs[:, None] <= class_costs[None]).all(axis=2)
                earlier = np.tri(len(indices), k=-1, dtype=np.bool_).T
                dominated_of[key] = (no_worse & (~no_worse.T | earlier)).any(axis=0)
            dominated[indices] = dominated_of[key]
        return dominated

    def _get_memory(self, unit: int, mask: int, shared: bool) -> tuple[Floats, Floats]:
        """Return the permanent and the additional bytes of a role on each class of meshes.

        `mask` has a bit for each of the role's units that are on the same mesh as `unit`.
        """
        key = (unit, mask, shared)
        if key not in self._memory:
            problem, table = self.problem, self.table
            role = problem.units[unit].role
            calls: list[str] = []
            for bit, other in enumerate(self._units_of[role]):
                if mask >> bit & 1:
                    calls += problem.units[other].calls
            own = bool(mask >> self._units_of[role].index(problem.home[role]) & 1)
            values = np.full((2, len(table.examples)), np.nan)
            for mesh_class in np.unique(table.classes[self.numbers[unit]]):
                values[:, mesh_class] = problem.estimate_memory(
                    role, table.examples[mesh_class], calls, own=own, shared=shared
                )
            self._memory[key] = values[0], values[1]
        return self._memory[key]

    # -- scores

    def score(self, columns: Columns, *, moves: bool = True) -> PlacementScores:
        """Return the scores of placements.

        If units are not placed yet, these are scores that no completion can be better than. Without
        `moves`, the time to copy weights, which takes longest to estimate, is left out.
        """
        placed = [numbers for numbers in columns if numbers is not None]
        length = max((len(numbers) for numbers in placed), default=1)
        self.num_scored += length
        covers = MeshCoverage(self.problem, self.table, columns)
        transfers = self._transfers if moves else {}
        step = SimulatedStep(self.problem, self._times, columns, covers, transfers)
        seconds = step.compute_seconds()
        excess = np.zeros(1)
        other = self._count_process_bytes(columns)
        for used, capacity in zip(
            self._compute_used(columns, covers), covers.capacities, strict=True
        ):
            excess = np.maximum(excess, used + other - capacity)
        devices = np.zeros(1, np.int64)
        for unit, numbers in enumerate(columns):
            if numbers is None:
                devices = devices + self._times.least_devices[unit]
            else:
                devices = devices + self.table.sizes[numbers]
        return PlacementScores(
            np.broadcast_to(excess, length),
            np.broadcast_to(seconds, length),
            np.broadcast_to(devices, length),
        )

    def compute_peak_bytes(self, columns: Columns) -> float:
        """Return the number of bytes used on the device that uses the most, of one placement."""
        covers = MeshCoverage(self.problem, self.table, columns)
        used = np.max(self._compute_used(columns, covers))
        return float(used + self._count_process_bytes(columns)[0])

    def _count_process_bytes(self, columns: Columns) -> Floats:
        """Return the bytes that a device needs in addition to its roles.

        This is a lower bound if units are not placed yet.
        """
        on_cpu = self.problem.rates.cores is not None
        ends: Integers = np.ones(1, np.int64)
        for numbers in columns:
            if numbers is not None:
                ends = np.maximum(ends, self.table.ends[numbers])
        alone, several = (count_process_bytes(on_cpu=on_cpu, num_devices=n) for n in (1, 2))
        return np.where(ends > 1, several, alone)

    def _compute_used(self, columns: Columns, covers: MeshCoverage) -> list[Floats]:
        """Return the bytes in use at each point of `covers`, without those of the processes.

        The memory of the roles and calls is added up as in `MemoryForecast.total`.
        Roles whose own weights are not placed yet are left out.
        """
        stays = [np.zeros(1) for _ in range(len(covers.points))]
        most = [np.zeros(1) for _ in range(len(covers.points))]
        for role, units in self._units_of.items():
            home = columns[self.problem.home[role]]
            base = self.problem.shared_roles.get(role)
            if home is None:
                continue
            base_home = None if base is None else columns[self.problem.home[base]]
            if base is not None and base_home is None:
                continue
            for unit in units:
                numbers = columns[unit]
                if numbers is None:
                    continue
                own_stays, own_most = self._compute_unit_bytes(
                    columns, units, unit, numbers, base_home
                )
                for point, covering in enumerate(covers.list_covering(unit)):
                    stays[point] = stays[point] + covering * own_stays
                    most[point] = np.maximum(most[point], covering * own_most)
        return [a + b for a, b in zip(stays, most, strict=True)]

    def _compute_unit_bytes(
        self,
        columns: Columns,
        units: Sequence[int],
        unit: int,
        numbers: Integers,
        base_home: Integers | None,
    ) -> tuple[Floats, Floats]:
        """Return the permanent and the additional bytes of one unit of a role on its mesh.

        `units` are the units of the role. If several of them are on the same mesh, the first one
        counts for all. `base_home` are the meshes of the role whose weights may be shared.
        """
        classes = self.table.classes[numbers]
        masks: Integers = np.zeros(1, np.int64)
        is_first: Booleans = np.ones(1, np.bool_)
        for bit, other in enumerate(units):
            other_numbers = columns[other]
            if other_numbers is None:
                continue
            same = other_numbers == numbers
            masks = masks | (same.astype(np.int64) << bit)
            if other < unit:
                is_first = is_first & ~same
        shared: Booleans = np.zeros(1, np.bool_)
        if base_home is not None:
            shared = self.table.parts[base_home] == self.table.parts[numbers]
        stays: Floats = np.zeros(1)
        most: Floats = np.zeros(1)
        for mask, is_shared in itertools.product(np.unique(masks), (False, True)):
            if is_shared and not shared.any():
                continue
            chosen = is_first & (masks == mask) & (shared == is_shared)
            permanent, additional = self._get_memory(unit, int(mask), is_shared)
            stays = np.where(chosen, permanent[classes], stays)
            most = np.where(chosen, additional[classes], most)
        return stays, most
