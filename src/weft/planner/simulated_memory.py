"""Memory of devices over time, in a simulated run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.observe.shown_plan import CALL
from weft.planner.memory import count_process_bytes
from weft.planner.placed_calls import DeviceRange, find_homes, locate_meshes
from weft.planner.problem import PlacementEstimate, PlacementProblem
from weft.planner.simulation import RunSimulation
from weft.topology import Mesh


@dataclass
class DeviceMemory:
    """Memory of each device of a range, in bytes.

    Attributes:
        resident: Memory that is in use all the time.
        calls: Additional memory while a call runs, by call.
    """

    resident: float = 0.0
    calls: dict[str, float] = field(default_factory=dict)

    @property
    def peak(self) -> float:
        return self.resident + max(self.calls.values(), default=0.0)


def estimate_memory(
    problem: PlacementProblem, estimate: PlacementEstimate, groups: Sequence[DeviceRange]
) -> list[DeviceMemory]:
    """Return the memory of the devices of each of `groups` with the placement of `estimate`.

    Roles are counted as in `PlacementProblem.estimate`: the largest peak is its `peak_bytes`.
    """
    meshes = estimate.meshes
    homes = find_homes(problem)
    places: dict[tuple[str, Mesh], list[str]] = {}
    for unit in problem.units:
        for call in unit.calls:
            places.setdefault((unit.role, meshes[call]), []).append(call)
    located = locate_meshes(meshes.values(), groups)
    started = 1 + max(mesh.ranks[-1] for mesh in meshes.values())
    on_cpu = problem.rates.cores is not None
    other = count_process_bytes(on_cpu=on_cpu, num_devices=started)
    memory = [DeviceMemory(resident=other) for _ in groups]
    for (role, mesh), calls in places.items():
        own = meshes[homes[role]] == mesh
        base = problem.shared_roles.get(role)
        shared = base is not None and meshes[homes[base]].has_same_parts(mesh)
        resident, _ = problem.estimate_memory(role, mesh, calls, own=own, shared=shared)
        for call in calls:
            _, demand = problem.estimate_memory(role, mesh, [call], own=own, shared=shared)
            for group in located[mesh]:
                memory[group].calls[call] = demand
        for group in located[mesh]:
            memory[group].resident += resident
    return memory


def build_memory_course(
    simulation: RunSimulation, group: int, memory: DeviceMemory
) -> list[tuple[float, float]]:
    """Return the memory of a device of a range over time, as pairs (seconds, bytes).

    The bytes of a pair are in use from its time until the time of the next pair.
    """
    course = [(0.0, memory.resident)]
    for span in simulation.spans:
        if span.kind != CALL or group not in span.groups:
            continue
        used = memory.resident + memory.calls[span.name]
        if span.start <= course[-1][0]:  # it follows another call without a gap
            course.pop()
        course += [(span.start, used), (span.end, memory.resident)]
    return course
