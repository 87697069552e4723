"""Search for the placement of a graph's calls with the shortest estimated step that fits in memory.

As in ReaL (Mei et al. 2024, arXiv 2406.14088, section 5) each call has its own devices and layout.
A step is simulated over the graph, with calls that share a device one after another. If there are
few placements, all are tried; otherwise descent and simulated annealing with a fixed seed try some
of them. The functions are pure.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from weft.experiments._cost import Load, Network, call_seconds, moving_seconds, role_memory
from weft.experiments._rates import Rates
from weft.topology import Layout, Mesh

# Up to ALL placements are all tried; of more, annealing draws ANNEALED.
ALL = 20_000
ANNEALED = 6_000
# Temperatures of annealing at its start and end, in units of log step time
HOT = 0.3
COLD = 0.003
SEED = 1


@dataclass(frozen=True)
class Unit:
    """Calls that share one placement: all calls that train a role, or one other call.

    `meshes` are the candidates.
    """

    role: str
    calls: tuple[str, ...]
    meshes: tuple[Mesh, ...]
    trains: bool = False


@dataclass(frozen=True)
class Estimate:
    """Estimate of a placement: mesh, seconds of work and of weight transfer of each call."""

    meshes: Mapping[str, Mesh]
    seconds: Mapping[str, float]
    moving: Mapping[str, float]
    step: float
    bytes: float  # memory used on the fullest device
    over: float  # bytes beyond the capacity of that device


# (bytes beyond the capacity, seconds of a step, devices), compared in this order; less is better
Score = tuple[float, float, int]


@dataclass
class Problem:
    """A graph to place on devices, and the data for the estimates.

    `order` and `producers` describe the graph and include host functions, which take no time here.
    `lag` is the number of steps by which sampling can be ahead of training. `shares` maps a role to
    the base role whose weights it uses if both are on the same mesh.
    """

    units: Sequence[Unit]
    networks: Mapping[str, Network]
    loads: Mapping[str, Load]
    order: Sequence[str]
    producers: Mapping[str, Sequence[str]]
    rates: Rates
    num_devices: int
    lag: int = 0
    shares: Mapping[str, str] = field(default_factory=dict)

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
        self._seconds: dict[tuple[str, int, int], float] = {}
        self._moving: dict[tuple[str, int, int], float] = {}
        self._held: dict[tuple[str, int, tuple[str, ...], bool, bool], tuple[int, int]] = {}

    @property
    def size(self) -> int:
        """Number of placements."""
        return math.prod(len(unit.meshes) for unit in self.units)

    def score(self, choice: Sequence[int]) -> Score:
        """Return the score of a placement, given as the index of each unit's mesh."""
        numbers = [self._numbers[unit][mesh] for unit, mesh in enumerate(choice)]
        devices = sum(len(self._meshes[number].ranks) for number in numbers)
        return max(0.0, self._bytes(numbers) - self.rates.capacity), self._step(numbers), devices

    def estimate(self, choice: Sequence[int]) -> Estimate:
        """Return the estimate of a placement, given as the index of each unit's mesh."""
        numbers = [self._numbers[unit][mesh] for unit, mesh in enumerate(choice)]
        most = self._bytes(numbers)
        started = self._started(numbers)
        return Estimate(
            meshes={call: self._meshes[numbers[unit]] for call, unit in self._unit_of.items()},
            seconds={
                call: self._call(call, numbers[unit], started)
                for call, unit in self._unit_of.items()
            },
            moving={call: self._move(unit, numbers) for call, unit in self._unit_of.items()},
            step=self._step(numbers),
            bytes=most,
            over=max(0.0, most - self.rates.capacity),
        )

    def is_trained(self, role: str) -> bool:
        """Return whether the role is trained."""
        return self.units[self._home[role]].trains

    def _started(self, numbers: Sequence[int]) -> int:
        """Return the number of processes: one for each device up to the last that a call uses."""
        return 1 + max((self._meshes[number].ranks[-1] for number in numbers), default=0)

    def _call(self, call: str, number: int, started: int) -> float:
        """Return the seconds of a call on its own, in a run with `started` processes."""
        found = self._seconds.get((call, number, started))
        if found is None:
            network = self.networks[self.units[self._unit_of[call]].role]
            mesh = self._meshes[number]
            found = call_seconds(
                network, self.loads[call], mesh, self.rates.at_work(*self._sharing(mesh, started))
            )
            found += self.rates.dispatch if started > 1 else 0.0
            self._seconds[call, number, started] = found
        return found

    def _sharing(self, mesh: Mesh, started: int) -> tuple[int, int]:
        """Return (processes of a machine that work in a call on `mesh`, all its processes)."""
        return min(len(mesh.ranks), self.rates.per_node), min(started, self.rates.per_node)

    def _move(self, unit: int, numbers: Sequence[int]) -> float:
        """Return the seconds to copy the trained weights to the unit's devices."""
        role = self.units[unit].role
        home = self._home[role]
        source = numbers[home]
        target = numbers[unit]
        if source == target or not self.units[home].trains:
            return 0.0  # frozen weights are copied only once
        found = self._moving.get((role, source, target))
        if found is None:
            found = moving_seconds(
                self.networks[role], self._meshes[source], self._meshes[target], self.rates
            )
            self._moving[role, source, target] = found
        return found

    def _step(self, numbers: Sequence[int]) -> float:
        """Return the seconds of a step, simulated over the graph."""
        # By device: the time at which its next call can start, and the seconds it works.
        free = [0.0] * self.num_devices
        busy = [0.0] * self.num_devices
        ends = dict[str, float]()
        started = self._started(numbers)
        computed = [0.0] * self.num_devices
        for name in self.order:
            begin = max([ends[other] for other in self.producers[name]], default=0.0)
            unit = self._unit_of.get(name)
            if unit is None:
                ends[name] = begin
                continue
            ranks = self._meshes[numbers[unit]].ranks
            moves = self._move(unit, numbers)
            if moves:
                sources = self._meshes[numbers[self._home[self.units[unit].role]]].ranks
            else:
                sources = ()
            begin = max(begin, max(free[rank] for rank in (*ranks, *sources)))
            # The devices that send weights compute nothing meanwhile.
            for rank in {*ranks, *sources}:
                free[rank] = begin + moves
                busy[rank] += moves
            takes = self._call(name, numbers[unit], started)
            cores_each = self.rates.cores_each(*self._sharing(self._meshes[numbers[unit]], started))
            end = ends[name] = begin + moves + takes
            for rank in ranks:
                free[rank] = end
                busy[rank] += takes
                computed[rank] += takes * cores_each
        # With a lag several steps overlap, until a device is always busy.
        last = max(ends.values(), default=0.0)
        step = last if not self.lag else max(max(busy), last / (self.lag + 1))
        if self.rates.cores is None:
            return step
        # Concurrent calls share the cores of a machine, so its total work bounds the step.
        per_node = self.rates.per_node
        nodes = (
            sum(computed[first : first + per_node])
            for first in range(0, self.num_devices, per_node)
        )
        return max(step, max(nodes) / self.rates.cores)

    def _bytes(self, numbers: Sequence[int]) -> float:
        """Return the bytes of the fullest device, counted as by `weft.engine.memory.total`."""
        places: dict[tuple[str, int], tuple[str, ...]] = {}
        for unit, number in zip(self.units, numbers, strict=True):
            places[unit.role, number] = places.get((unit.role, number), ()) + unit.calls
        stay = [0] * self.num_devices
        most = [0] * self.num_devices
        for (role, number), calls in places.items():
            own = numbers[self._home[role]] == number
            base = self.shares.get(role)
            mesh = self._meshes[number]
            shared = base is not None and self._meshes[numbers[self._home[base]]].parts_as(mesh)
            stays, call = self._memory(role, number, calls, own=own, shared=shared)
            for rank in mesh.ranks:
                stay[rank] += stays
                most[rank] = max(most[rank], call)
        return float(max(a + b for a, b in zip(stay, most, strict=True)))

    def _memory(
        self, role: str, number: int, calls: tuple[str, ...], *, own: bool, shared: bool
    ) -> tuple[int, int]:
        """Return (bytes that stay on a device, bytes added while the role is called).

        `shared`: the weights belong to another role.
        """
        key = (role, number, calls, own, shared)
        if key not in self._held:
            loads = [self.loads[call] for call in calls]
            layout = self._meshes[number].layout
            held = role_memory(self.networks[role], loads, layout, self.rates, own=own)
            stays = held.kept if shared else held.held - held.away
            self._held[key] = stays, held.call + (0 if shared else held.away)
        return self._held[key]


# -- candidates


def ranges(num_devices: int, per_node: int) -> Iterator[tuple[int, ...]]:
    """Yield the ranges of neighbouring devices that can form a mesh.

    Their size divides the number of devices per machine, or is a multiple of it.
    """
    for size in _divisors(num_devices):
        if (size <= per_node and per_node % size == 0) or size % per_node == 0:
            for first in range(0, num_devices, size):
                yield tuple(range(first, first + size))


def layouts(size: int, per_node: int) -> Iterator[Layout]:
    """Yield all layouts of `size` devices with d, t and p.

    Tensor parallelism stays within a machine. Each layout comes with fully sharded and with whole
    weights.
    """
    for t in _divisors(size):
        for p in _divisors(size // t):
            d = size // t // p
            if t <= per_node:
                for f in dict.fromkeys((d, 1)):
                    yield Layout(data=d, fsdp=f, tensor=t, pipeline=p)


def candidates(
    num_devices: int, per_node: int, allowed: Callable[[Layout], Layout | None]
) -> list[Mesh]:
    """Return all meshes with the layouts that `allowed` accepts, in the form that it returns."""
    found = []
    for ranks in ranges(num_devices, per_node):
        found += [
            Mesh(made, ranks)
            for each in layouts(len(ranks), per_node)
            if (made := allowed(each)) is not None
        ]
    return list(dict.fromkeys(found))


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


# -- the heuristic


def uniform(problem: Problem) -> list[list[int]]:
    """Return the placements in which all movable calls are data-parallel on the same first devices.

    There are up to three for each number of devices: trained roles sharded in all their calls;
    whole copies in all calls; trained roles sharded in training and whole in their other calls.
    """
    found = []
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
            if len(choice) == len(problem.units) and choice not in found:
                found.append(choice)
    return found


# -- search


@dataclass(frozen=True)
class Found:
    """The best placement, the first placement, and the number of placements `tried`.

    `exhaustive` is true if all placements were tried.
    """

    best: Estimate
    first: Estimate
    tried: int
    exhaustive: bool


def search(problem: Problem, start: Sequence[int]) -> Found:
    """Return the best placement found; its score is never worse than that of `start`.

    The result is deterministic.
    """
    seen: dict[tuple[int, ...], Score] = {}

    def look(choice: Sequence[int]) -> Score:
        key = tuple(choice)
        if key not in seen:
            seen[key] = problem.score(key)
        return seen[key]

    look(start)
    exhaustive = problem.size <= ALL
    if exhaustive:
        for choice in itertools.product(*(range(len(unit.meshes)) for unit in problem.units)):
            look(choice)
    else:
        _descend(problem, _anneal(problem, _descend(problem, start, look), look), look)
    best = min(seen, key=lambda choice: (seen[choice], choice))
    return Found(problem.estimate(best), problem.estimate(start), len(seen), exhaustive)


def _descend(
    problem: Problem, start: Sequence[int], look: Callable[[Sequence[int]], Score]
) -> list[int]:
    """Move one unit at a time to its best mesh, as long as the score improves."""
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
    problem: Problem, start: Sequence[int], look: Callable[[Sequence[int]], Score]
) -> list[int]:
    """Return the best placement found by simulated annealing, changing one or two units a turn."""
    draw = random.Random(SEED)
    movable = [number for number, unit in enumerate(problem.units) if len(unit.meshes) > 1]
    now = list(start)
    best = list(start)
    for turn in range(ANNEALED):
        heat = HOT * (COLD / HOT) ** (turn / ANNEALED)
        new = list(now)
        for number in draw.sample(movable, min(len(movable), draw.choice((1, 1, 2)))):
            new[number] = draw.randrange(len(problem.units[number].meshes))
        worse = _energy(problem, look(new)) - _energy(problem, look(now))
        if worse <= 0 or draw.random() < math.exp(-worse / heat):
            now = new
            if look(now) < look(best):
                best = list(now)
    return best


def _energy(problem: Problem, score: Score) -> float:
    """Return the objective of annealing: the log of the step time, plus a memory penalty."""
    over, step, _ = score
    return math.log(max(step, 1e-12)) + 10.0 * over / max(problem.rates.capacity, 1.0)
