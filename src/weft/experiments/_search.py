"""Where each call of a graph runs: the placement whose step is estimated to be shortest, of those that fit the devices' memory.

As in ReaL (Mei et al. 2024, arXiv 2406.14088, section 5): a call has devices and a layout of its own; a step is simulated over
the graph, calls that share a device one after another; few placements are all tried, of many some, by descent and simulated
annealing with a fixed seed. Pure.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from weft.engine.memory import RoleMemory
from weft.experiments._cost import Load, Network, call_seconds, device_bytes, moving_seconds, role_memory
from weft.experiments._rates import Rates
from weft.topology import Layout, Mesh

ALL, ANNEALED = 20_000, 10_000  # placements that are all tried; and that are drawn where there are more
HOT, COLD = (
    0.3,
    0.003,
)  # the worsening of a step's time, as its logarithm, that annealing takes in its beginning and end
SEED = 1


@dataclass(frozen=True)
class Unit:
    """Calls that are made in one place: those that train a role, or one other. `meshes` that they may have."""

    role: str
    calls: tuple[str, ...]
    meshes: tuple[Mesh, ...]
    trains: bool = False


@dataclass(frozen=True)
class Estimate:
    """A placement by call: its mesh, the seconds of one step's work, and those of getting its weights; and what comes of it."""

    meshes: Mapping[str, Mesh]
    seconds: Mapping[str, float]
    moving: Mapping[str, float]
    step: float
    bytes: float  # of the device that holds most
    over: float  # beyond its capacity

    @property
    def order(self) -> tuple[float, float, int]:
        """Less is better: memory first, then time, then devices."""
        return self.over, self.step, sum(len(mesh.ranks) for mesh in self.meshes.values())


@dataclass
class Problem:
    """`order` and `producers` are those of the graph, host functions (which take no time here) among them. `lag`: how many
    steps sampling may be ahead of training. `shares`: a role that has no weights of its own where it is on its base's mesh."""

    units: Sequence[Unit]
    networks: Mapping[str, Network]
    loads: Mapping[str, Load]
    order: Sequence[str]
    producers: Mapping[str, Sequence[str]]
    rates: Rates
    num_devices: int
    lag: int = 0
    shares: Mapping[str, str] = field(default_factory=dict)
    _seconds: dict[tuple[str, int], float] = field(default_factory=dict)
    _moving: dict[tuple[int, int, int, int], float] = field(default_factory=dict)
    _held: dict[tuple[str, Layout, frozenset[str], bool], RoleMemory] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._unit_of = {call: number for number, unit in enumerate(self.units) for call in unit.calls}
        self._home: dict[str, int] = {}  # the unit whose mesh is the role's own
        for number, unit in enumerate(self.units):
            if unit.trains or unit.role not in self._home:
                self._home[unit.role] = number

    @property
    def size(self) -> int:
        return math.prod(len(unit.meshes) for unit in self.units)

    def estimate(self, choice: Sequence[int]) -> Estimate:
        """`choice`: the number of its mesh, by unit."""
        meshes = {call: self.units[u].meshes[choice[u]] for call, u in self._unit_of.items()}
        seconds = {call: self._call(call, choice[self._unit_of[call]]) for call in meshes}
        moving = {call: self._move(self._unit_of[call], choice) for call in meshes}
        most = self._bytes(choice)
        return Estimate(
            meshes, seconds, moving, self._step(meshes, seconds, moving), most, max(0.0, most - self.rates.capacity)
        )

    def _call(self, call: str, number: int) -> float:
        key = (call, number)
        if key not in self._seconds:
            unit = self.units[self._unit_of[call]]
            network, load = self.networks[unit.role], self.loads[call]
            self._seconds[key] = call_seconds(network, load, unit.meshes[number], self.rates)
        return self._seconds[key]

    def _move(self, unit: int, choice: Sequence[int]) -> float:
        role = self.units[unit].role
        home = self._home[role]
        if not self.units[home].trains:
            return 0.0  # frozen weights move once
        key = (home, choice[home], unit, choice[unit])
        if key not in self._moving:
            source, target = self.units[home].meshes[choice[home]], self.units[unit].meshes[choice[unit]]
            self._moving[key] = (
                moving_seconds(self.networks[role], source, target, self.rates) if source != target else 0.0
            )
        return self._moving[key]

    def _step(self, meshes: Mapping[str, Mesh], seconds: Mapping[str, float], moving: Mapping[str, float]) -> float:
        free, busy, ends = [0.0] * self.num_devices, [0.0] * self.num_devices, dict[str, float]()
        for name in self.order:
            begin = max((ends[other] for other in self.producers[name]), default=0.0)
            if name not in meshes:
                ends[name] = begin
                continue
            ranks, takes = meshes[name].ranks, seconds[name] + moving[name]
            begin = max(begin, *(free[rank] for rank in ranks))
            ends[name] = begin + takes
            for rank in ranks:
                free[rank] = ends[name]
                busy[rank] += takes
        last = max(ends.values(), default=0.0)
        return last if not self.lag else max(max(busy), last / (self.lag + 1))

    def _bytes(self, choice: Sequence[int]) -> float:
        places: dict[tuple[str, Mesh], set[str]] = {}
        for number, unit in enumerate(self.units):
            places.setdefault((unit.role, unit.meshes[choice[number]]), set()).update(unit.calls)
        homes = {role: self.units[number].meshes[choice[number]] for role, number in self._home.items()}
        on: list[dict[str, RoleMemory]] = [{} for _ in range(self.num_devices)]
        for (role, mesh), calls in places.items():
            held = self._memory(role, mesh.layout, frozenset(calls), own=homes[role] == mesh)
            base = self.shares.get(role)
            if base is not None and homes[base].parts_as(mesh):
                held = RoleMemory(**{**vars(held), "parameters": 0, "masters": 0, "optimizer": 0, "gradients": 0})
            for rank in mesh.ranks:
                on[rank][f"{role} {mesh.layout} {mesh.ranks}"] = held
        return float(max(device_bytes(each) for each in on))

    def _memory(self, role: str, layout: Layout, calls: frozenset[str], *, own: bool) -> RoleMemory:
        key = (role, layout, calls, own)
        if key not in self._held:
            loads = [self.loads[call] for call in sorted(calls)]
            self._held[key] = role_memory(self.networks[role], loads, layout, self.rates, own=own)
        return self._held[key]


# -- candidates


def ranges(num_devices: int, per_node: int) -> Iterator[tuple[int, ...]]:
    """Devices that may form a mesh: neighbours, as many as divide a node or some whole nodes."""
    for size in _divisors(num_devices):
        if (size <= per_node and per_node % size == 0) or size % per_node == 0:
            for first in range(0, num_devices, size):
                yield tuple(range(first, first + size))


def layouts(size: int, per_node: int) -> Iterator[Layout]:
    """All of d, t and p on so many devices, t within a node, whole copies and shards alike."""
    for t in _divisors(size):
        for p in _divisors(size // t):
            d = size // t // p
            if t <= per_node:
                for f in dict.fromkeys((d, 1)):
                    yield Layout(data=d, fsdp=f, tensor=t, pipeline=p)


def candidates(num_devices: int, per_node: int, allowed: Callable[[Layout], Layout | None]) -> list[Mesh]:
    """Every mesh with every layout that `allowed` lets through, in the form that it gives it."""
    found = []
    for ranks in ranges(num_devices, per_node):
        found += [Mesh(made, ranks) for each in layouts(len(ranks), per_node) if (made := allowed(each)) is not None]
    return list(dict.fromkeys(found))


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


# -- search


@dataclass(frozen=True)
class Found:
    """The best placement and that which the search began with; how many were `tried`, all of them or not."""

    best: Estimate
    first: Estimate
    tried: int
    exhaustive: bool


def search(problem: Problem, start: Sequence[int]) -> Found:
    """Never worse than `start` by its own estimate, and the same for the same problem."""
    seen: dict[tuple[int, ...], Estimate] = {}

    def look(choice: Sequence[int]) -> Estimate:
        key = tuple(choice)
        if key not in seen:
            seen[key] = problem.estimate(key)
        return seen[key]

    first = look(start)
    exhaustive = problem.size <= ALL
    if exhaustive:
        for choice in itertools.product(*(range(len(unit.meshes)) for unit in problem.units)):
            look(choice)
    else:
        descended = _descend(problem, start, look)
        _descend(problem, _anneal(problem, descended, look), look)
    best = min(seen.items(), key=lambda each: (*each[1].order, each[0]))[1]
    return Found(best, first, len(seen), exhaustive)


def _descend(problem: Problem, start: Sequence[int], look: Callable[[Sequence[int]], Estimate]) -> list[int]:
    """Change one unit at a time, to its best mesh, as long as that helps."""
    now = list(start)
    while True:
        before = look(now).order
        for number, unit in enumerate(problem.units):
            now[number] = min(
                range(len(unit.meshes)),
                key=lambda mesh, at=number: (look([*now[:at], mesh, *now[at + 1 :]]).order, mesh),
            )
        if look(now).order >= before:
            return now


def _anneal(problem: Problem, start: Sequence[int], look: Callable[[Sequence[int]], Estimate]) -> list[int]:
    draw = random.Random(SEED)
    movable = [number for number, unit in enumerate(problem.units) if len(unit.meshes) > 1]
    now, best = list(start), list(start)
    for turn in range(ANNEALED):
        heat = HOT * (COLD / HOT) ** (turn / ANNEALED)
        new = list(now)
        for number in draw.sample(movable, min(len(movable), draw.choice((1, 1, 2)))):
            new[number] = draw.randrange(len(problem.units[number].meshes))
        worse = _energy(problem, look(new)) - _energy(problem, look(now))
        if worse <= 0 or draw.random() < math.exp(-worse / heat):
            now = new
            if look(now).order < look(best).order:
                best = list(now)
    return best


def _energy(problem: Problem, estimate: Estimate) -> float:
    return math.log(max(estimate.step, 1e-12)) + 10.0 * estimate.over / max(problem.rates.capacity, 1.0)
