"""Calls of a placement on groups of devices that take part in the same calls.

Meshes are compared by the bounds of their ranks, so the cost does not depend on the number of
devices.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from weft.graph.graph import DataflowGraph
from weft.planner.devices import DeviceRates
from weft.planner.problem import PlacementEstimate, PlacementProblem
from weft.topology import Mesh, list_rank_intervals


@dataclass(frozen=True)
class DeviceRange:
    """Devices that take part in the same calls.

    `intervals` are pairs (first rank, rank after the last one), in ascending order.
    """

    intervals: tuple[tuple[int, int], ...]

    @property
    def num_devices(self) -> int:
        return sum(stop - first for first, stop in self.intervals)

    @property
    def name(self) -> str:
        """Ranks as text, such as `0-7` or `0,2`."""
        parts = []
        for first, stop in self.intervals:
            parts.append(str(first) if stop == first + 1 else f"{first}-{stop - 1}")
        return ",".join(parts)


def group_devices(
    meshes: Collection[Mesh], num_devices: int, kinds: Sequence[int] = (0,)
) -> list[DeviceRange]:
    """Return the devices, grouped by the meshes to which they belong and by their kind.

    `kinds` are the first ranks of devices of each kind, in ascending order. Ranges are in the order
    of their first ranks; devices of no mesh follow at the end.
    """
    runs = {mesh.ranks: list_rank_intervals(mesh.ranks) for mesh in meshes}
    ends = {0, num_devices, *(first for first in kinds if first < num_devices)}
    for intervals in runs.values():
        for first, stop in intervals:
            ends |= {first, stop}
    bounds = sorted(ends)
    # Ranks between two bounds belong to the same meshes.
    members: dict[int, set[int]] = {first: set() for first in bounds}
    index_of = {bound: number for number, bound in enumerate(bounds)}
    for number, intervals in enumerate(runs.values()):
        for first, stop in intervals:
            for place in range(index_of[first], index_of[stop]):
                members[bounds[place]].add(number)
    ranges: dict[tuple[int, frozenset[int]], list[tuple[int, int]]] = {}
    for first, stop in itertools.pairwise(bounds):
        kind = bisect.bisect(kinds, first)
        intervals = ranges.setdefault((kind, frozenset(members[first])), [])
        if intervals and intervals[-1][1] == first:
            intervals[-1] = (intervals[-1][0], stop)
        else:
            intervals.append((first, stop))
    keys = sorted(ranges, key=lambda key: not key[1])  # stable: idle devices move to the end
    return [DeviceRange(tuple(ranges[key])) for key in keys]


def locate_meshes(
    meshes: Iterable[Mesh], groups: Sequence[DeviceRange]
) -> dict[Mesh, tuple[int, ...]]:
    """Return the indices of the ranges of devices (`group_devices`) of which each mesh consists."""
    located = {}
    for mesh in set(meshes):
        runs = list_rank_intervals(mesh.ranks)
        inside = []
        for number, group in enumerate(groups):
            first = group.intervals[0][0]
            if any(start <= first < stop for start, stop in runs):
                inside.append(number)
        located[mesh] = tuple(inside)
    return located


@dataclass(frozen=True)
class PlacedCall:
    """Call with its estimated durations.

    Attributes:
        role: Role of the call.
        groups: Device ranges of its mesh.
        senders: Device ranges that send weights before the call; empty if no weights move.
        seconds: Duration of the call, a step.
        transfer_seconds: Duration of the transfer of weights before the call.
        lane: Name of the separate copy of the weights that the call uses, or None.
    """

    role: str
    groups: tuple[int, ...]
    senders: tuple[int, ...]
    seconds: float
    transfer_seconds: float
    lane: str | None = None


@dataclass(frozen=True)
class PlacedCalls:
    """Calls of a graph on ranges of devices.

    `core_seconds` is the least duration of a step for which the cores of each machine suffice; 0 if
    devices do not share cores.
    """

    groups: Sequence[DeviceRange]
    calls: Mapping[str, PlacedCall]
    core_seconds: float = 0.0

    @classmethod
    def build(
        cls, graph: DataflowGraph, problem: PlacementProblem, estimate: PlacementEstimate
    ) -> PlacedCalls:
        """Group the devices of the placement `estimate`, and gather what the replay needs."""
        meshes = estimate.meshes
        kinds = [group.first for group in problem.devices.groups]
        groups = group_devices(meshes.values(), problem.num_devices, kinds)
        groups_of = locate_meshes(meshes.values(), groups)
        homes = find_homes(problem)
        lanes = _find_separate_copies(graph, meshes, groups_of, homes)
        calls = {}
        for unit in problem.units:
            for name in unit.calls:
                home = meshes[homes[unit.role]]
                moves = estimate.transfer_seconds[name]
                calls[name] = PlacedCall(
                    unit.role,
                    groups_of[meshes[name]],
                    groups_of[home] if moves else (),
                    estimate.seconds[name],
                    moves,
                    lanes.get(name),
                )
        return cls(groups, calls, _compute_core_seconds(groups, calls, meshes, problem.rates))


def find_homes(problem: PlacementProblem) -> dict[str, str]:
    """Return the call of each role on whose mesh the role's own weights are.

    This is a call that trains the role, or the first one if no call does.
    """
    homes: dict[str, str] = {}
    for unit in problem.units:
        if unit.trains or unit.role not in homes:
            homes[unit.role] = unit.calls[0]
    return homes


def _find_separate_copies(
    graph: DataflowGraph,
    meshes: Mapping[str, Mesh],
    groups_of: Mapping[Mesh, tuple[int, ...]],
    homes: Mapping[str, str],
) -> dict[str, str]:
    """Return the name of the separate copy of the weights of each call that uses one.

    The rule is that of `weft.runtime.roles.find_separate_copies`: the call's mesh shares no device
    with that of the role's own weights, and all calls there tolerate stale weights.
    """
    synced_roles = {sync.target for sync in graph.syncs}
    calls_of: dict[tuple[str, Mesh], list[str]] = {}
    tolerant = set[str]()
    for call in graph.list_model_calls():
        if call.name not in meshes:
            continue
        calls_of.setdefault((call.role, meshes[call.name]), []).append(call.name)
        edges = graph.find_version_edges(call.name)
        if len(edges) == 1 and edges[0].max_staleness and graph.get_node(edges[0].producer).trains:
            tolerant.add(call.name)
    lanes = {}
    for (role, mesh), names in calls_of.items():
        is_apart = set(groups_of[mesh]).isdisjoint(groups_of[meshes[homes[role]]])
        if is_apart and role not in synced_roles and tolerant.issuperset(names):
            for name in names:
                lanes[name] = f"{role} on {mesh.ranks[0]}-{mesh.ranks[-1]}"
    return lanes


def _compute_core_seconds(
    groups: Sequence[DeviceRange],
    calls: Mapping[str, PlacedCall],
    meshes: Mapping[str, Mesh],
    rates: DeviceRates,
) -> float:
    """Return the seconds that the work of a step takes on the cores of the busiest machine."""
    if rates.cores is None:
        return 0.0
    per_node = rates.per_node
    started = min(per_node, 1 + max((mesh.ranks[-1] for mesh in meshes.values()), default=0))
    work = [0.0] * len(groups)  # seconds of a core, by device of the range
    for name, call in calls.items():
        working = min(len(meshes[name].ranks), per_node)
        cores_each = rates.compute_cores_each(working, started)
        for group in call.groups:
            work[group] += call.seconds * cores_each
    # All machines inside an interval have the same work, so only the first of them is computed.
    machines = set[int]()
    for devices in groups:
        for first, stop in devices.intervals:
            machines |= {first // per_node, (stop - 1) // per_node}
            machines.add(min(-(-first // per_node), (stop - 1) // per_node))
    most = 0.0
    for machine in machines:
        low, high = machine * per_node, (machine + 1) * per_node
        total = 0.0
        for number, devices in enumerate(groups):
            for first, stop in devices.intervals:
                total += work[number] * max(0, min(stop, high) - max(first, low))
        most = max(most, total)
    return most / rates.cores
