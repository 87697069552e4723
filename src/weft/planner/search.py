"""Search for the placement of a graph's calls that fits in memory and has the shortest step time.

As in ReaL (Mei et al. 2024, arXiv 2406.14088, section 5), each call has its own devices and layout.
The duration of a step is simulated: calls that share a device run one after another. If there are
few placements, all of them are tried. Otherwise, coordinate descent and simulated annealing with a
fixed seed try some of them. The functions are pure.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from weft.planner.cost import (
    CallEstimate,
    CallWorkload,
    count_received_bytes,
    estimate_call,
    estimate_role_memory,
    estimate_transfer_seconds,
)
from weft.planner.decoder_sizes import DecoderSizes
from weft.planner.devices import DeviceRates
from weft.topology import Layout, Mesh

# At most MAX_EXHAUSTIVE placements are all tried; for more, annealing makes ANNEALING_STEPS steps.
MAX_EXHAUSTIVE = 20_000
ANNEALING_STEPS = 6_000
# Temperatures of annealing at its start and end, in units of log step time
INITIAL_TEMPERATURE = 0.3
FINAL_TEMPERATURE = 0.003
SEED = 1


@dataclass(frozen=True)
class PlacementUnit:
    """Group of calls that are placed on the same mesh.

    The group consists either of all calls that train a role, or of a single call that does not
    train. `meshes` are the candidate meshes from which the search chooses one.
    """

    role: str
    calls: tuple[str, ...]
    meshes: tuple[Mesh, ...]
    trains: bool = False


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
        excess_bytes: Memory beyond the capacity of that device; 0 if the placement fits.
    """

    meshes: Mapping[str, Mesh]
    seconds: Mapping[str, float]
    parts: Mapping[str, Mapping[str, float]]
    transfer_seconds: Mapping[str, float]
    moved_bytes: Mapping[str, float]
    step_seconds: float
    peak_bytes: float  # memory used on the fullest device
    excess_bytes: float  # bytes beyond the capacity of that device


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
        rates: Speed of the devices.
        num_devices: Number of devices on all machines.
        max_staleness: Number of steps by which sampling can be ahead of training.
        shared_roles: Maps a role to the role whose weights it uses if the two are on the same mesh.
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

    def __post_init__(self) -> None:
        self._unit_of = {
            call: number for number, unit in enumerate(self.units) for call in unit.calls
        }
        self._home: dict[str, int] = {}  # role -> index of the unit whose mesh owns its weights
        for number, unit in enumerate(self.units):
            if unit.trains or unit.role not in self._home:
                self._home[unit.role] = number
        # Meshes are identified by numbers for speed: many thousand placements are scored.
        self._meshes = list(dict.fromkeys(mesh for unit in self.units for mesh in unit.meshes))
        numbers = {mesh: number for number, mesh in enumerate(self._meshes)}
        self._numbers = [[numbers[mesh] for mesh in unit.meshes] for unit in self.units]
        self._estimates: dict[tuple[str, int, int], CallEstimate] = {}
        self._moving: dict[tuple[str, int, int], float] = {}
        self._held: dict[tuple[str, int, tuple[str, ...], bool, bool], tuple[int, int]] = {}

    @property
    def num_placements(self) -> int:
        """Number of possible placements."""
        return math.prod(len(unit.meshes) for unit in self.units)

    def compute_score(self, choice: Sequence[int]) -> PlacementScore:
        """Return the score of the placement `choice`; a lower score is better.

        The score consists of the bytes beyond the memory capacity, the seconds per step, and the
        number of devices, which are compared in this order.
        """
        numbers = [self._numbers[unit][mesh] for unit, mesh in enumerate(choice)]
        devices = sum(len(self._meshes[number].ranks) for number in numbers)
        return (
            max(0.0, self._compute_peak_bytes(numbers) - self.rates.capacity),
            self._simulate_step(numbers),
            devices,
        )

    def estimate(self, choice: Sequence[int]) -> PlacementEstimate:
        """Return the estimated step time and memory of a placement.

        `choice` is the placement, given as the index of the chosen mesh for each unit.
        """
        numbers = [self._numbers[unit][mesh] for unit, mesh in enumerate(choice)]
        most = self._compute_peak_bytes(numbers)
        started = self._count_started(numbers)
        estimates = {
            call: self._estimate_call(call, numbers[unit], started)
            for call, unit in self._unit_of.items()
        }
        return PlacementEstimate(
            meshes={call: self._meshes[numbers[unit]] for call, unit in self._unit_of.items()},
            seconds={name: each.seconds for name, each in estimates.items()},
            parts={name: each.parts for name, each in estimates.items()},
            transfer_seconds={
                call: self._estimate_transfer(unit, numbers) for call, unit in self._unit_of.items()
            },
            moved_bytes={
                call: self._count_moved_bytes(unit, numbers) for call, unit in self._unit_of.items()
            },
            step_seconds=self._simulate_step(numbers),
            peak_bytes=most,
            excess_bytes=max(0.0, most - self.rates.capacity),
        )

    def is_trained(self, role: str) -> bool:
        """Return whether any call trains the role."""
        return self.units[self._home[role]].trains

    def _count_started(self, numbers: Sequence[int]) -> int:
        """Return the number of processes that the run starts.

        The run starts a process for each device up to the last one that a call uses. For each unit
        (group of calls), `numbers` has the index of the unit's mesh in the list of all meshes.
        """
        return 1 + max((self._meshes[number].ranks[-1] for number in numbers), default=0)

    def _estimate_call(self, call: str, number: int, started: int) -> CallEstimate:
        """Return the duration of a call, if no other call runs at the same time.

        `number` is the index of the call's mesh in the list of all meshes, and `started` is the
        number of processes of the run.
        """
        estimate = self._estimates.get((call, number, started))
        if estimate is None:
            network = self.networks[self.units[self._unit_of[call]].role]
            mesh = self._meshes[number]
            rates = self.rates.share_cores(*self._count_processes(mesh, started))
            estimate = estimate_call(network, self.loads[call], mesh, rates)
            overhead = self.rates.call + (self.rates.dispatch if started > 1 else 0.0)
            estimate = estimate.with_overhead(overhead)
            self._estimates[call, number, started] = estimate
        return estimate

    def _count_processes(self, mesh: Mesh, started: int) -> tuple[int, int]:
        """Return two counts for one machine: the processes that run a call, and all processes.

        `mesh` is the call's mesh, and `started` is the total number of processes on all machines.
        """
        return min(len(mesh.ranks), self.rates.per_node), min(started, self.rates.per_node)

    def _estimate_transfer(self, unit: int, numbers: Sequence[int]) -> float:
        """Return the time to copy newly trained weights to the devices of a unit, in seconds.

        A unit is a group of calls on one mesh, and `unit` is its index. The time is 0 if the unit's
        role is frozen, or if the unit has the mesh on which the role is trained. `numbers[i]` is
        the index of unit i's mesh in the list of all meshes.
        """
        role = self.units[unit].role
        home = self._home[role]
        source = numbers[home]
        target = numbers[unit]
        if source == target or not self.units[home].trains:
            return 0.0  # frozen weights are copied only once
        seconds = self._moving.get((role, source, target))
        if seconds is None:
            seconds = estimate_transfer_seconds(
                self.networks[role], self._meshes[source], self._meshes[target], self.rates
            )
            self._moving[role, source, target] = seconds
        return seconds

    def _count_moved_bytes(self, unit: int, numbers: Sequence[int]) -> float:
        """Return the bytes of newly trained weights that the devices of a unit receive.

        The arguments are those of `_estimate_transfer`.
        """
        role = self.units[unit].role
        home = self._home[role]
        if numbers[unit] == numbers[home] or not self.units[home].trains:
            return 0.0
        source, target = self._meshes[numbers[home]], self._meshes[numbers[unit]]
        return sum(count_received_bytes(self.networks[role], source, target).values())

    def _simulate_step(self, numbers: Sequence[int]) -> float:
        """Return the duration of a step in seconds, estimated by simulating the graph's execution.

        `numbers[i]` is the index of unit i's mesh in the list of all meshes. A unit is a group of
        calls on one mesh.
        """
        # By device: the time at which its next call can start, and the seconds it works.
        free = [0.0] * self.num_devices
        busy = [0.0] * self.num_devices
        ends = dict[str, float]()
        started = self._count_started(numbers)
        computed = [0.0] * self.num_devices
        # Run the nodes in order; each starts when its inputs and its devices are ready.
        for name in self.order:
            begin = max([ends[other] for other in self.producers[name]], default=0.0)
            unit = self._unit_of.get(name)
            if unit is None:
                ends[name] = begin
                continue
            ranks = self._meshes[numbers[unit]].ranks
            moves = self._estimate_transfer(unit, numbers)
            if moves:
                sources = self._meshes[numbers[self._home[self.units[unit].role]]].ranks
            else:
                sources = ()
            begin = max(begin, max(free[rank] for rank in (*ranks, *sources)))
            # Devices compute nothing while they send or receive weights.
            for rank in {*ranks, *sources}:
                free[rank] = begin + moves
                busy[rank] += moves
            takes = self._estimate_call(name, numbers[unit], started).seconds
            cores_each = self.rates.compute_cores_each(
                *self._count_processes(self._meshes[numbers[unit]], started)
            )
            end = ends[name] = begin + moves + takes
            for rank in ranks:
                free[rank] = end
                busy[rank] += takes
                computed[rank] += takes * cores_each
        # Steps overlap if sampling may run ahead; the busiest device is then a lower bound.
        last = max(ends.values(), default=0.0)
        step = last if not self.max_staleness else max(max(busy), last / (self.max_staleness + 1))
        if self.rates.cores is None:
            return step
        # Concurrent calls share the cores of a machine, so its total work bounds the step.
        per_node = self.rates.per_node
        nodes = (
            sum(computed[first : first + per_node])
            for first in range(0, self.num_devices, per_node)
        )
        return max(step, max(nodes) / self.rates.cores)

    def _compute_peak_bytes(self, numbers: Sequence[int]) -> float:
        """Return the number of bytes used on the device that uses the most.

        The memory of the roles and calls is added up as in `weft.planner.memory.compute_peak`.
        `numbers[i]` is the index of unit i's mesh in the list of all meshes.
        """
        # Collect the calls of each role on each mesh.
        places: dict[tuple[str, int], tuple[str, ...]] = {}
        for unit, number in zip(self.units, numbers, strict=True):
            places[unit.role, number] = places.get((unit.role, number), ()) + unit.calls
        # Add up what stays on each device, and the most that a call adds to it.
        stay = [0] * self.num_devices
        most = [0] * self.num_devices
        for (role, number), calls in places.items():
            own = numbers[self._home[role]] == number
            base = self.shared_roles.get(role)
            mesh = self._meshes[number]
            shared = base is not None and self._meshes[numbers[self._home[base]]].has_same_parts(
                mesh
            )
            stays, call = self._estimate_memory(role, number, calls, own=own, shared=shared)
            for rank in mesh.ranks:
                stay[rank] += stays
                most[rank] = max(most[rank], call)
        return float(max(a + b for a, b in zip(stay, most, strict=True)))

    def _estimate_memory(
        self, role: str, number: int, calls: tuple[str, ...], *, own: bool, shared: bool
    ) -> tuple[int, int]:
        """Return the memory in bytes that a role uses on each device of a mesh.

        The first number is the memory that is always in use, and the second is the additional
        memory during the role's calls. `number` is the index of the mesh in the list of all meshes,
        and `calls` are the role's calls on that mesh. `own` is True if the role is trained on the
        mesh or, for a frozen role, if its first call runs there. `shared` is True if the role uses
        the weights of another role.
        """
        key = (role, number, calls, own, shared)
        if key not in self._held:
            loads = [self.loads[call] for call in calls]
            layout = self._meshes[number].layout
            held = estimate_role_memory(self.networks[role], loads, layout, self.rates, own=own)
            stays = held.resident_cache if shared else held.permanent - held.away
            self._held[key] = stays, held.call + (0 if shared else held.away)
        return self._held[key]


# -- candidates


def list_ranges(num_devices: int, per_node: int) -> Iterator[tuple[int, ...]]:
    """Yield the ranges of adjacent devices on which a mesh can be placed.

    The size of a range divides `num_devices`. It also divides `per_node`, the number of devices per
    machine, or is a multiple of it.
    """
    for size in _list_divisors(num_devices):
        if (size <= per_node and per_node % size == 0) or size % per_node == 0:
            for first in range(0, num_devices, size):
                yield tuple(range(first, first + size))


def list_layouts(size: int, per_node: int) -> Iterator[Layout]:
    """Yield the layouts of `size` devices with data, tensor and pipeline parallelism.

    A tensor-parallel group has at most `per_node` devices, the number of devices per machine. If
    there are several data-parallel ranks, each combination of degrees is yielded twice: once with
    weights that are sharded over all of these ranks, and once with unsharded weights.
    """
    for t in _list_divisors(size):
        for p in _list_divisors(size // t):
            d = size // t // p
            if t <= per_node:
                for f in dict.fromkeys((d, 1)):
                    yield Layout(data=d, fsdp=f, tensor=t, pipeline=p)


def list_meshes(
    num_devices: int, per_node: int, allowed: Callable[[Layout], Layout | None]
) -> list[Mesh]:
    """Return the meshes that can be placed on the devices, in all layouts that `allowed` accepts.

    `allowed` returns the layout to use, which can differ from its argument, or None to exclude the
    layout.
    """
    meshes = []
    for ranks in list_ranges(num_devices, per_node):
        meshes += [
            Mesh(layout, ranks)
            for each in list_layouts(len(ranks), per_node)
            if (layout := allowed(each)) is not None
        ]
    return list(dict.fromkeys(meshes))


def _list_divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


# -- the heuristic


def list_uniform_placements(problem: PlacementProblem) -> list[list[int]]:
    """Return the placements in which all movable calls are data-parallel on the same devices.

    A placement is a list with one index per unit (a group of calls that are placed together). The
    index selects the unit's mesh from `PlacementUnit.meshes`. The calls of a unit with a single
    mesh are not movable.

    The movable calls use the first n devices, and there are up to three placements for each n: one
    with the weights of trained roles sharded in all calls, one without any sharded weights, and one
    with the weights of trained roles sharded only in the calls that train.
    """
    placements = []
    for size in sorted({len(mesh.ranks) for unit in problem.units for mesh in unit.meshes}):
        for shards_training, shards_others in ((size, size), (1, 1), (size, 1)):
            choice = []
            for unit in problem.units:
                if unit.trains:
                    shards = shards_training
                elif problem.is_trained(unit.role):
                    shards = shards_others
                else:
                    shards = 1
                wanted = Mesh(Layout(data=size, fsdp=shards), tuple(range(size)))
                if len(unit.meshes) == 1:
                    choice.append(0)
                elif wanted in unit.meshes:
                    choice.append(unit.meshes.index(wanted))
            if len(choice) == len(problem.units) and choice not in placements:
                placements.append(choice)
    return placements


# -- search


@dataclass(frozen=True)
class SearchResult:
    """Result of a search for a placement.

    `best` is the best placement, and `first` is the placement from which the search started.
    `num_tried` is the number of placements that were tried. `is_exhaustive` is True if every
    possible placement was tried.
    """

    best: PlacementEstimate
    first: PlacementEstimate
    num_tried: int
    is_exhaustive: bool


def search_placement(problem: PlacementProblem, start: Sequence[int]) -> SearchResult:
    """Search for the best placement, starting from `start`, and return the result.

    Calls that are placed together form a unit. A placement has one index per unit, which selects
    the unit's mesh from `PlacementUnit.meshes`. The result is never worse than `start`. The search
    is deterministic.
    """
    seen: dict[tuple[int, ...], PlacementScore] = {}

    def look(choice: Sequence[int]) -> PlacementScore:
        key = tuple(choice)
        if key not in seen:
            seen[key] = problem.compute_score(key)
        return seen[key]

    look(start)
    exhaustive = problem.num_placements <= MAX_EXHAUSTIVE
    if exhaustive:
        for choice in itertools.product(*(range(len(unit.meshes)) for unit in problem.units)):
            look(choice)
    else:
        _descend(problem, _anneal(problem, _descend(problem, start, look), look), look)
    best = min(seen, key=lambda choice: (seen[choice], choice))
    return SearchResult(problem.estimate(best), problem.estimate(start), len(seen), exhaustive)


def _descend(
    problem: PlacementProblem, start: Sequence[int], look: Callable[[Sequence[int]], PlacementScore]
) -> list[int]:
    """Improve a placement by coordinate descent, and return the result.

    `start` is the initial placement: for each unit (group of calls to place together), the index of
    its mesh. One unit at a time is moved to its best mesh, until no move improves the score. `look`
    returns the score of a placement.
    """
    now = list(start)
    while True:
        before = look(now)
        for number, unit in enumerate(problem.units):
            rest = now[:number], now[number + 1 :]
            now[number] = min(
                (look([*rest[0], mesh, *rest[1]]), mesh) for mesh in range(len(unit.meshes))
            )[1]
        if look(now) >= before:
            return now


def _anneal(
    problem: PlacementProblem, start: Sequence[int], look: Callable[[Sequence[int]], PlacementScore]
) -> list[int]:
    """Return the best placement that simulated annealing finds from `start`.

    In each step, one or two units (groups of calls to place together) are moved to random meshes.
    `look` returns the score of a placement.
    """
    # Only units with several candidates can move.
    draw = random.Random(SEED)
    movable = []
    for number, unit in enumerate(problem.units):
        if len(unit.meshes) > 1:
            movable.append(number)
    now = list(start)
    best = list(start)
    # Accept a worse placement with a probability that falls with the temperature.
    for turn in range(ANNEALING_STEPS):
        heat = INITIAL_TEMPERATURE * (FINAL_TEMPERATURE / INITIAL_TEMPERATURE) ** (
            turn / ANNEALING_STEPS
        )
        new = list(now)
        for number in draw.sample(movable, min(len(movable), draw.choice((1, 1, 2)))):
            new[number] = draw.randrange(len(problem.units[number].meshes))
        worse = _compute_energy(problem, look(new)) - _compute_energy(problem, look(now))
        if worse <= 0 or draw.random() < math.exp(-worse / heat):
            now = new
            if look(now) < look(best):
                best = list(now)
    return best


def _compute_energy(problem: PlacementProblem, score: PlacementScore) -> float:
    """Return the value that annealing minimizes: the log of the step time plus a memory penalty.

    The penalty is proportional to the bytes that exceed a device's capacity.
    """
    over, step, _ = score
    return math.log(max(step, 1e-12)) + 10.0 * over / max(problem.rates.capacity, 1.0)
