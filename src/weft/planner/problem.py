"""The problem of placing a graph's calls on devices, and estimates of a placement's time and memory.

The duration of a step is simulated: calls that share a device run one after another. The cost of a
call depends on its layout and on how its mesh is divided over machines, but not on which machines
these are. It is therefore estimated once for all meshes that differ only in their position. The
functions are pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from weft.planner.candidates import PlacementUnit
from weft.planner.cluster import DeviceCluster
from weft.planner.cost import (
    CallEstimate,
    CallWorkload,
    build_memory_case,
    count_received_bytes,
    estimate_call,
    estimate_transfers,
)
from weft.planner.decoder_sizes import DecoderSizes
from weft.planner.devices import DeviceRates
from weft.planner.memory import MemoryCase, estimate
from weft.planner.scoring import PlacementScorer
from weft.topology import Mesh


@dataclass(frozen=True)
class PlacementEstimate:
    """Estimated step time and memory of a placement.

    Attributes:
        meshes: Mesh of each call.
        seconds: Duration of each call.
        parts: Parts of each call's duration, in seconds (see `CallEstimate`).
        transfer_seconds: Time to transfer weights to the devices of each call.
        moved_bytes: Bytes of weights that the devices of each call receive.
        step_seconds: Duration of a step.
        peak_bytes: Memory used on the device that uses the most.
        excess_bytes: Memory beyond the capacity of a device, at most; 0 if the placement fits.
    """

    meshes: Mapping[str, Mesh]
    seconds: Mapping[str, float]
    parts: Mapping[str, Mapping[str, float]]
    transfer_seconds: Mapping[str, float]
    moved_bytes: Mapping[str, float]
    step_seconds: float
    peak_bytes: float
    excess_bytes: float

    def get_bound(self, call: str) -> str:
        """Return the name of the largest part of a call's duration."""
        parts = self.parts[call]
        return max(parts, key=lambda name: parts[name])


# (bytes beyond the capacity, seconds of a step, devices), compared in this order; less is better
PlacementScore = tuple[float, float, int]


@dataclass
class PlacementProblem:
    """Model calls to place on devices, with the data for estimating the step time and the memory.

    Calls are placed in groups, called units. A placement is a list that has, for each unit, the
    index of the chosen mesh in `PlacementUnit.meshes`. Host functions are assumed to take no time.

    Attributes:
        units: Groups of calls to place.
        networks: Sizes of each role's model.
        loads: Workload of each call.
        order: Names of the graph's nodes in the order of execution.
        producers: For each node, the nodes whose outputs it reads.
        rates: Speed of the devices; with several kinds, what they have in common.
        num_devices: Number of devices on all machines.
        max_staleness: Number of steps by which sampling can be ahead of training.
        shared_roles: Maps a role to the role whose weights it uses if the two are on the same mesh.
        cluster: Kinds of devices, or None if all of them have the speed `rates`.
    """

    units: Sequence[PlacementUnit]
    networks: Mapping[str, DecoderSizes]
    loads: Mapping[str, CallWorkload]
    order: Sequence[str]
    producers: Mapping[str, Sequence[str]]
    rates: DeviceRates
    num_devices: int
    max_staleness: int = 0
    shared_roles: Mapping[str, str] = field(default_factory=dict)
    cluster: DeviceCluster | None = None

    def __post_init__(self) -> None:
        self.unit_of = {
            call: number for number, unit in enumerate(self.units) for call in unit.calls
        }
        self.home: dict[str, int] = {}  # role -> index of the unit whose mesh owns its weights
        for number, unit in enumerate(self.units):
            if unit.trains or unit.role not in self.home:
                self.home[unit.role] = number
        self.devices = self.cluster or DeviceCluster.build_from_one_kind(
            self.rates, self.num_devices
        )
        self._rates: dict[tuple[int, ...], tuple[DeviceRates, ...]] = {}

    @cached_property
    def scorer(self) -> PlacementScorer:
        """Scores of many placements at once."""
        return PlacementScorer(self)

    @property
    def num_placements(self) -> int:
        """Number of possible placements."""
        return math.prod(len(unit.meshes) for unit in self.units)

    def compute_score(self, choice: Sequence[int]) -> PlacementScore:
        """Return the score of the placement `choice`; a lower score is better.

        The score consists of the bytes beyond the memory capacity, the seconds per step, and the
        number of devices, which are compared in this order.
        """
        excess, seconds, devices = self.scorer.score(self.scorer.find_numbers(choice))
        return float(excess[0]), float(seconds[0]), int(devices[0])

    def estimate(self, choice: Sequence[int]) -> PlacementEstimate:
        """Return the estimated step time and memory of a placement.

        `choice` is the placement, given as the index of the chosen mesh for each unit.
        """
        meshes = [unit.meshes[index] for unit, index in zip(self.units, choice, strict=True)]
        excess, seconds, _ = self.scorer.score(self.scorer.find_numbers(choice))
        started = 1 + max(mesh.ranks[-1] for mesh in meshes)
        estimates = {
            call: self.estimate_call(call, meshes[unit], started)
            for call, unit in self.unit_of.items()
        }
        transfers = {}
        moved = {}
        for call, unit in self.unit_of.items():
            transfers[call] = 0.0
            moved[call] = 0.0
            role = self.units[unit].role
            source = meshes[self.home[role]]
            if self.is_trained(role) and source != meshes[unit]:
                (transfers[call],) = self.estimate_transfers(role, source, [meshes[unit]])
                received = count_received_bytes(self.networks[role], source, meshes[unit])
                moved[call] = sum(received.values())
        return PlacementEstimate(
            meshes={call: meshes[unit] for call, unit in self.unit_of.items()},
            seconds={name: each.seconds for name, each in estimates.items()},
            parts={name: each.parts for name, each in estimates.items()},
            transfer_seconds=transfers,
            moved_bytes=moved,
            step_seconds=float(seconds[0]),
            peak_bytes=self.scorer.compute_peak_bytes(self.scorer.find_numbers(choice)),
            excess_bytes=float(excess[0]),
        )

    def is_trained(self, role: str) -> bool:
        """Return whether any call trains the role."""
        return self.units[self.home[role]].trains

    def list_rates(self, *meshes: Mesh) -> tuple[DeviceRates, ...]:
        """Return the rates of each kind of device in meshes that work together."""
        if len(self.devices.groups) == 1:
            return (self.rates,)
        kinds = {kind for mesh in meshes for kind in self.devices.find_kinds(mesh.ranks)}
        key = tuple(sorted(kinds))
        if key not in self._rates:
            self._rates[key] = self.devices.list_rates(key)
        return self._rates[key]

    def estimate_call(self, call: str, mesh: Mesh, started: int) -> CallEstimate:
        """Return the duration of a call on a mesh, if no other call runs at the same time.

        `started` is the number of processes of the run, one for each device up to the last one that
        a call uses. With several kinds of device, the slowest one determines the time.
        """
        network = self.networks[self.units[self.unit_of[call]].role]
        if mesh.layout.context > 1:  # ranks that share tokens compute every prefix
            network = replace(network, shares_prefixes=False)
        load = self.loads[call]
        working, processes = self.count_processes(len(mesh.ranks), started)
        stages = load.count_active_stages(mesh.layout) / mesh.layout.pipeline
        estimates = []
        for rates in self.list_rates(mesh):
            shared = rates.share_cores(max(1.0, working * stages), processes)
            estimate = estimate_call(network, load, mesh, shared)
            overhead = rates.call + (rates.dispatch if started > 1 else 0.0)
            estimates.append(estimate.with_overhead(overhead))
        return max(estimates, key=lambda each: each.seconds)

    def count_processes(self, size: int, started: int) -> tuple[int, int]:
        """Return two counts for one machine: the processes that run a call, and all processes.

        `size` is the number of devices of the call's mesh, and `started` is the total number of
        processes on all machines.
        """
        return min(size, self.rates.per_node), min(started, self.rates.per_node)

    def estimate_transfers(self, role: str, source: Mesh, targets: Sequence[Mesh]) -> list[float]:
        """Return the seconds to copy newly trained weights to each of `targets`.

        All targets have the same number of devices. Kinds of device differ in their links.
        """
        network = self.networks[role]
        if len(self.devices.groups) == 1:
            return estimate_transfers(network, source, targets, self.rates)
        seconds = []
        for target in targets:
            rates = self.list_rates(source, target)[0]
            seconds += estimate_transfers(network, source, [target], rates)
        return seconds

    def estimate_memory(
        self, role: str, mesh: Mesh, calls: Sequence[str], *, own: bool, shared: bool
    ) -> tuple[float, float]:
        """Return the memory in bytes that a role uses on each device of a mesh.

        The first number is the memory that is always in use, and the second is the additional
        memory during the role's calls. `calls` are the role's calls on that mesh. `own` is True if
        the role is trained on the mesh or, for a frozen role, if its first call runs there.
        `shared` is True if the role uses the weights of another role.
        """
        case = self.build_memory_case(role, mesh, calls, own=own)
        role_memory = estimate(case.shape, case.settings, case.works)
        if shared:
            role_memory = role_memory.drop_weights()
        return role_memory.count_used_bytes(on_cpu=self.rates.cores is not None)

    def build_memory_case(
        self, role: str, mesh: Mesh, calls: Sequence[str], *, own: bool
    ) -> MemoryCase:
        """Return the input for estimating the memory of a role on each device of a mesh.

        The arguments are those of `estimate_memory`.
        """
        loads = [self.loads[call] for call in calls]
        rates = self.list_rates(mesh)[0]
        return build_memory_case(self.networks[role], loads, mesh.layout, rates, own=own)
