"""Simulated execution of one step on many placements at once.

Calls that share a device run one after another. If some units are not placed yet, the duration is a
lower bound for all placements of them. The arrays have one element per placement. The functions are
pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from weft.planner.mesh_table import Floats, Integers, MeshTable, PlacementCosts, TransferTable

# For each unit the numbers of its meshes, or None if the unit is not placed yet. Arrays have one
# element per placement, or one element if the unit is on the same mesh in all placements.
Columns = Sequence[Integers | None]


class CallTimes:
    """Durations of the calls on each class of meshes, and bounds for calls that are not placed yet.

    Attributes:
        least_seconds: Shortest duration of each call.
        least_area: Smallest product of a call's duration and number of devices.
        least_work: Smallest number of core seconds of a call; 0 for GPUs.
        least_devices: Fewest devices of each unit.
        groups: Sets of calls that run between the same nodes, as (node, calls): the node starts
            after all of these calls, or is None for the end of the step.
    """

    def __init__(
        self, problem: PlacementCosts, table: MeshTable, numbers: Sequence[Integers]
    ) -> None:
        self._problem = problem
        self.table = table
        rates = problem.rates
        # Numbers of started processes that make a difference: one or several, or on CPUs each
        self.most_started = 2 if rates.cores is None else max(2, rates.per_node)
        shape = (len(table.examples), self.most_started)
        self.cores_each = np.zeros(shape)
        for mesh_class, mesh in enumerate(table.examples):
            for started in range(1, 1 + self.most_started):
                counts = problem.count_processes(len(mesh.ranks), started)
                self.cores_each[mesh_class, started - 1] = rates.compute_cores_each(*counts)
        self._seconds: dict[str, Floats] = {}
        self._least: dict[str, Floats] = {}
        self._work: dict[str, Floats] = {}
        for call, unit in problem.unit_of.items():
            seconds = np.full(shape, np.nan)
            for mesh_class in np.unique(table.classes[numbers[unit]]):
                seconds[mesh_class] = self._estimate_seconds(call, int(mesh_class))
            self._seconds[call] = seconds
            # More processes may be started for calls that are placed later.
            self._least[call] = _accumulate_minima(seconds)
            self._work[call] = _accumulate_minima(seconds * self.cores_each)
        self.groups = list_call_groups(problem)
        self.restrict(numbers)

    def _estimate_seconds(self, call: str, mesh_class: int) -> list[float]:
        """Return the duration of a call on a class of meshes, by the number of started processes."""
        problem = self._problem
        mesh = self.table.examples[mesh_class]
        seconds_of: dict[object, float] = {}
        seconds = []
        for started in range(1, 1 + self.most_started):
            overhead = problem.rates.dispatch if started > 1 else 0.0
            counts = problem.count_processes(len(mesh.ranks), started)
            shared = problem.rates.share_cores(*counts)
            key = (shared.flops, shared.launch, shared.threads_used, shared.slowdown)
            if key not in seconds_of:
                seconds_of[key] = problem.estimate_call(call, mesh, started).seconds - overhead
            seconds.append(seconds_of[key] + overhead)
        return seconds

    def restrict(self, numbers: Sequence[Integers]) -> None:
        """Set the meshes from which units that are not placed yet will be placed."""
        table = self.table
        sizes = np.array([len(mesh.ranks) for mesh in table.examples], np.float64)[:, None]
        self.least_seconds: dict[str, float] = {}
        self.least_area: dict[str, float] = {}
        self.least_work: dict[str, float] = {}
        self.least_devices: list[int] = []
        for unit, possible in enumerate(numbers):
            mesh_classes = np.unique(table.classes[possible])
            self.least_devices.append(int(sizes[mesh_classes].min()))
            for call in self._problem.units[unit].calls:
                seconds = self._seconds[call][mesh_classes]
                self.least_seconds[call] = float(seconds.min())
                self.least_area[call] = float((seconds * sizes[mesh_classes]).min())
                self.least_work[call] = float(
                    (seconds * sizes[mesh_classes] * self.cores_each[mesh_classes]).min()
                )

    def get_all_seconds(self, call: str) -> Floats:
        """Return the durations of a call, [classes, started processes]."""
        return self._seconds[call]

    def get_seconds(
        self, call: str, classes: Integers, started: Integers, *, least: bool
    ) -> Floats:
        """Return the duration of a call on classes of meshes.

        `started` is the number of started processes; with `least`, there may be more of them.
        """
        return (self._least if least else self._seconds)[call][classes, started - 1]

    def get_work(self, call: str, classes: Integers, started: Integers) -> Floats:
        """Return the fewest core seconds of a call on each device of classes of meshes.

        At least `started` processes are started.
        """
        return self._work[call][classes, started - 1]


def _accumulate_minima(values: Floats) -> Floats:
    """Return for each element the minimum of itself and those after it in its row."""
    return np.minimum.accumulate(values[:, ::-1], axis=1)[:, ::-1]


def list_call_groups(problem: PlacementCosts) -> list[tuple[str | None, tuple[str, ...]]]:
    """Return the sets of calls that all end before a node starts and start after another one ends.

    Only sets of several calls are listed: all of a set's work has to be done on the devices between
    the start of the first of its calls and the start of the node.
    """
    ancestors: dict[str | None, set[str]] = {}
    for name in problem.order:
        before = set(problem.producers[name])
        for other in problem.producers[name]:
            before |= ancestors[other]
        ancestors[name] = before
    ancestors[None] = set(problem.order)
    groups: list[tuple[str | None, tuple[str, ...]]] = []
    for node, before in ancestors.items():
        for first in (None, *problem.order):
            if first is not None and first not in before:
                continue
            calls = tuple(
                call
                for call in problem.order
                if call in before
                and call in problem.unit_of
                and (first is None or first in ancestors[call])
            )
            if len(calls) > 1 and (node, calls) not in groups:
                groups.append((node, calls))
    return groups


class MeshCoverage:
    """Devices that meshes share, and those at which other meshes begin.

    Attributes:
        points: Ranks of devices of which one has the most work and memory: the first of each run of
            adjacent ranks, and the first device of each kind.
        capacities: Memory capacity of these devices in bytes.
    """

    def __init__(self, problem: PlacementCosts, table: MeshTable, columns: Columns) -> None:
        self._starts: dict[int, list[Integers]] = {}
        self._stops: dict[int, list[Integers]] = {}
        width = table.starts.shape[1]
        for unit, numbers in enumerate(columns):
            if numbers is not None:
                self._starts[unit] = [table.starts[numbers, run] for run in range(width)]
                self._stops[unit] = [table.stops[numbers, run] for run in range(width)]
        groups = problem.devices.groups
        self.points: list[Integers] = []
        for group in groups[1:]:
            self.points.append(np.array([group.first], np.int64))
        for starts in self._starts.values():
            self.points += starts
        self.capacities: list[Floats] = []
        for point in self.points:
            capacity = np.full(1, groups[0].rates.capacity)
            for group in groups[1:]:
                capacity = np.where(point >= group.first, group.rates.capacity, capacity)
            self.capacities.append(capacity)
        self._overlaps: dict[tuple[int, int], Floats] = {}
        self._covering: dict[int, list[Floats]] = {}

    def overlap(self, unit: int, other: int) -> Floats:
        """Return 1 where the meshes of two units share a device, and 0 elsewhere."""
        key = (min(unit, other), max(unit, other))
        if key not in self._overlaps:
            shares = np.zeros(1, np.bool_)
            for start, stop in zip(self._starts[unit], self._stops[unit], strict=True):
                for begin, end in zip(self._starts[other], self._stops[other], strict=True):
                    shares = shares | ((start < end) & (begin < stop))
            self._overlaps[key] = shares.astype(np.float64)
        return self._overlaps[key]

    def list_covering(self, unit: int) -> list[Floats]:
        """Return, for each point, 1 where the unit's mesh has that device, and 0 elsewhere."""
        if unit not in self._covering:
            covering = []
            for point in self.points:
                covers = np.zeros(1, np.bool_)
                for start, stop in zip(self._starts[unit], self._stops[unit], strict=True):
                    covers = covers | ((start <= point) & (point < stop))
                covering.append(covers.astype(np.float64))
            self._covering[unit] = covering
        return self._covering[unit]

    def count_on_node(self, unit: int, node: Integers, per_node: int) -> Integers:
        """Return the number of devices of the unit's mesh on a machine."""
        count: Integers = np.zeros(1, np.int64)
        low, high = node * per_node, (node + 1) * per_node
        for start, stop in zip(self._starts[unit], self._stops[unit], strict=True):
            count = count + np.maximum(0, np.minimum(stop, high) - np.maximum(start, low))
        return count

    def list_nodes(self, per_node: int) -> list[Integers]:
        """Return machines of which one has the most devices of the meshes.

        Between the first and the last machine of a run, all machines have equally many.
        """
        nodes: list[Integers] = []
        for unit in self._starts:
            for start, stop in zip(self._starts[unit], self._stops[unit], strict=True):
                last = np.maximum(stop - 1, 0) // per_node
                nodes += [start // per_node, start // per_node + 1, last, last + 1]
        return nodes


class SimulatedStep:
    """Simulated execution of one step for many placements.

    `transfers` has the times to copy the weights of each role; without a role's, they are 0.
    """

    def __init__(
        self,
        problem: PlacementCosts,
        times: CallTimes,
        columns: Columns,
        covers: MeshCoverage,
        transfers: Mapping[str, TransferTable],
    ) -> None:
        self._problem = problem
        self._times = times
        self._covers = covers
        self._transfers = transfers
        table = times.table
        self._columns = {unit: each for unit, each in enumerate(columns) if each is not None}
        self._classes = {unit: table.classes[each] for unit, each in self._columns.items()}
        self._sizes = {unit: table.sizes[each] for unit, each in self._columns.items()}
        started: Integers = np.ones(1, np.int64)
        for each in self._columns.values():
            started = np.maximum(started, table.ends[each])
        self._started = np.minimum(started, times.most_started)
        self._is_complete = len(self._columns) == len(columns)
        self._num_nodes = -(-problem.num_devices // problem.rates.per_node)
        # By call: when it begins and ends, how long it takes, and its devices x time
        self._begins: dict[str, Floats] = {}
        self._ends: dict[str, Floats] = {}
        self._takes: dict[str, Floats] = {}
        self._areas: dict[str, Floats] = {}
        # By call: seconds in which its devices and those of its role's own mesh move weights
        self._moves: dict[str, Floats] = {}

    def compute_seconds(self) -> Floats:
        """Return the duration of the step in seconds; a lower bound if units are not placed yet."""
        problem = self._problem
        free = {unit: np.zeros(1) for unit in self._columns}
        # Run the nodes in order; each starts when its inputs and its devices are ready.
        for name in problem.order:
            begin = np.zeros(1)
            for other in problem.producers[name]:
                begin = np.maximum(begin, self._ends[other])
            unit = problem.unit_of.get(name)
            if unit is None:
                self._ends[name] = begin
                continue
            if not self._is_complete:
                begin = np.maximum(begin, self._bound_begin(name))
            if unit in self._columns:
                self._run_call(name, unit, begin, free)
            else:
                self._begins[name] = begin
                self._takes[name] = np.full(1, self._times.least_seconds[name])
                self._areas[name] = np.full(1, self._times.least_area[name])
                self._ends[name] = begin + self._takes[name]
        last = np.zeros(1)
        for end in self._ends.values():
            last = np.maximum(last, end)
        if not self._is_complete:
            last = np.maximum(last, self._bound_begin(None))
        # Steps overlap if sampling may run ahead; the busiest device is then a lower bound.
        if problem.max_staleness:
            last = np.maximum(last / (problem.max_staleness + 1), self._compute_busy())
        return self._bound_by_cores(last)

    def _run_call(self, name: str, unit: int, begin: Floats, free: dict[int, Floats]) -> None:
        """Run a call as soon as its devices are free.

        `free` has the time at which the devices of each unit have ended their work before.
        """
        covers = self._covers
        begin = np.maximum(begin, free[unit])
        role = self._problem.units[unit].role
        home = self._problem.home[role]
        is_copied = unit != home and self._problem.is_trained(role)
        if is_copied and home in self._columns and role in self._transfers:
            # Devices compute nothing while they send or receive weights.
            table = self._transfers[role]
            moved = table.find_seconds(self._columns[home], self._columns[unit])
            moves = (moved > 0).astype(np.float64)
            self._moves[name] = moved
            begin = np.maximum(begin, moves * free[home]) + moved
            for other in free:
                free[other] = np.maximum(free[other], covers.overlap(other, home) * moves * begin)
        takes = self._times.get_seconds(
            name, self._classes[unit], self._started, least=not self._is_complete
        )
        self._begins[name] = begin
        self._takes[name] = takes
        self._areas[name] = takes * self._sizes[unit]
        self._ends[name] = end = begin + takes
        for other in free:
            free[other] = np.maximum(free[other], covers.overlap(other, unit) * end)

    def _bound_begin(self, name: str | None) -> Floats:
        """Return a lower bound of the start of a node, or of the end of the step for None.

        All devices together need some time for the work of the calls before it.
        """
        bound = np.zeros(1)
        for node, calls in self._times.groups:
            if node == name:
                begin = self._begins[calls[0]]
                area = self._areas[calls[0]]
                for call in calls[1:]:
                    begin = np.minimum(begin, self._begins[call])
                    area = area + self._areas[call]
                bound = np.maximum(bound, begin + area / self._problem.num_devices)
        return bound

    def _compute_busy(self) -> Floats:
        """Return the seconds per step for which the busiest device works."""
        problem, covers = self._problem, self._covers
        most = np.zeros(1)
        for point in range(len(covers.points)):
            busy = np.zeros(1)
            for name, takes in self._takes.items():
                unit = problem.unit_of[name]
                if unit in self._columns:
                    has_call = covers.list_covering(unit)[point]
                    busy = busy + takes * has_call
                    if name in self._moves:
                        home = problem.home[problem.units[unit].role]
                        sends = covers.list_covering(home)[point]
                        busy = busy + self._moves[name] * np.maximum(has_call, sends)
            most = np.maximum(most, busy)
        if not self._is_complete:
            area = np.zeros(1)
            for each in self._areas.values():
                area = area + each
            most = np.maximum(most, area / problem.num_devices)
        return most

    def _bound_by_cores(self, step: Floats) -> Floats:
        """Return the duration of the step, or longer where the cores of a machine need longer.

        Concurrent calls share the cores of a machine, so its total work bounds the step.
        """
        problem, times = self._problem, self._times
        rates = problem.rates
        if rates.cores is None:
            return step
        if not self._is_complete:
            return np.maximum(step, self._sum_least_work() / rates.cores / self._num_nodes)
        computed = {}
        for name, takes in self._takes.items():
            classes = self._classes[problem.unit_of[name]]
            computed[name] = takes * times.cores_each[classes, self._started - 1]
        for node in self._covers.list_nodes(rates.per_node):
            work = np.zeros(1)
            for name, each in computed.items():
                count = self._covers.count_on_node(problem.unit_of[name], node, rates.per_node)
                work = work + each * count
            step = np.maximum(step, work / rates.cores)
        return step

    def _sum_least_work(self) -> Floats:
        """Return the fewest core seconds of all calls, on all machines together."""
        problem, times = self._problem, self._times
        total = np.zeros(1)
        for name, unit in problem.unit_of.items():
            if unit in self._columns:
                work = times.get_work(name, self._classes[unit], self._started)
                total = total + work * self._sizes[unit]
            else:
                total = total + times.least_work[name]
        return total
