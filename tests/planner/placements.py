"""Random small placement problems, and the best placement by trying all of them, device by device."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tests.planner.decoders import compute_memory, compute_seconds, decoder, with_settings
from weft.planner.candidates import PlacementUnit, list_meshes
from weft.planner.cluster import build_cluster
from weft.planner.cost import (
    CallWorkload,
    estimate_transfers,
)
from weft.planner.decoder_sizes import DecoderSizes
from weft.planner.devices import GIB, DeviceRates, estimate_cpu_rates
from weft.planner.memory import HOLES, PROCESS, PROGRAM
from weft.planner.problem import PlacementProblem
from weft.topology import Layout, Mesh

RATES = DeviceRates("hand", 1e12, 1e11, 1e10, 1e9, 1e-5, 1e-6, 64 * GIB, 128, per_node=4)
Known = dict[Any, Any]
METHODS = ("generate", "inference", "train_step")


def build_random_problem(draw: random.Random, most: int) -> PlacementProblem:
    """Return a problem with at most `most` placements: roles of several calls, frozen and trained."""
    per_node = draw.choice((2, 3, 4))
    devices = draw.choice((2, 3, 4, 6, per_node, 2 * per_node))
    rates = _draw_rates(draw, per_node)
    cluster = None
    if rates.cores is None and devices == 2 * per_node and draw.random() < 0.5:
        slower = replace(rates, flops=rates.flops / 3, capacity=rates.capacity / 2, name="slow")
        kinds = draw.sample([rates, slower], 2)
        cluster = build_cluster([(each, per_node) for each in kinds])
        rates = cluster.rates
    # Each role has a training call or not, and calls that only use it.
    calls: list[tuple[str, str]] = []
    networks = {}
    for number in range(draw.choice((1, 2, 2, 3))):
        trained = draw.random() < 0.6
        networks[f"r{number}"] = _draw_network(draw, trained)
        methods = draw.choices(METHODS[:2], k=draw.choice((0, 1, 2) if trained else (1, 2)))
        for method in [*methods, *(["train_step"] * draw.choice((1, 1, 2)) if trained else [])]:
            calls.append((f"r{number}", method))
    draw.shuffle(calls)
    calls = calls[:5]
    used = {role for role, _ in calls}
    names = [f"c{number}" for number in range(len(calls))]
    order: list[str] = []
    producers: dict[str, Sequence[str]] = {}
    loads = {}
    for number, name in enumerate(names):
        producers[name] = [other for other in order if draw.random() < 0.5]
        order.append(name)
        if draw.random() < 0.2:
            host = f"host{number}"
            producers[host] = [name]
            order.append(host)
        loads[name] = CallWorkload(calls[number][1], draw.choice((4, 16, 64)), 64, 32)
    groups: dict[tuple[str, str], list[str]] = {}
    for name, (role, method) in zip(names, calls, strict=True):
        groups.setdefault((role, "" if method == "train_step" else name), []).append(name)
    meshes = list_meshes(devices, per_node, lambda layout: layout)
    chosen = _draw_candidates(draw, meshes, len(groups), most)
    units = []
    for ((role, other), members), candidates in zip(groups.items(), chosen, strict=True):
        units.append(PlacementUnit(role, tuple(members), candidates, trains=not other))
    shared = {}
    trained_roles = [unit.role for unit in units if unit.trains]
    frozen = [role for role in used if role not in trained_roles]
    if trained_roles and frozen and draw.random() < 0.4:
        shared[draw.choice(sorted(frozen))] = draw.choice(trained_roles)
    return PlacementProblem(
        units,
        networks,
        loads,
        order,
        producers,
        rates,
        devices,
        max_staleness=draw.choice((0, 0, 1, 2)),
        shared_roles=shared,
        cluster=cluster,
    )


def _draw_rates(draw: random.Random, per_node: int) -> DeviceRates:
    if draw.random() < 0.3:
        threads = draw.choice((None, 1, 2))
        cores = draw.choice((1.0, 2.0, 4.0))
        return estimate_cpu_rates(cores, draw.choice((0.6, 1.0, 8.0)), per_node, threads)
    return replace(
        RATES,
        per_node=per_node,
        latency=draw.choice((1e-5, 1e-3)),
        link_bandwidth=draw.choice((1e8, 1e10)),
        network_bandwidth=draw.choice((1e7, 1e9)),
        capacity=draw.choice((0.05, 0.1, 0.2, 0.5, 64)) * GIB,
        dispatch=draw.choice((0.0, 1e-2)),
    )


def _draw_network(draw: random.Random, trained: bool) -> DecoderSizes:
    network = decoder(
        layers=draw.choice((2, 4, 8)),
        hidden=256,
        query=256,
        key=128,
        inner=1024,
        vocab=1000,
        active=1_000_000,
        embedding=256_000,
        outputs=256_000,
    )
    return with_settings(network, trained=trained, weights_leave=draw.random() < 0.2)


def _draw_candidates(
    draw: random.Random, meshes: Sequence[Mesh], count: int, most: int
) -> list[tuple[Mesh, ...]]:
    """Return candidates of each unit: layouts on all ranges of their size, or any meshes, or one."""
    limit = most ** (1 / count)
    found = []
    for _ in range(count):
        kind = draw.choice(("layouts", "layouts", "layouts", "any", "fixed"))
        if kind == "fixed":
            found.append((draw.choice(meshes),))
        elif kind == "any":
            found.append(tuple(draw.sample(meshes, min(len(meshes), int(limit)))))
        else:
            own: list[Mesh] = []
            layouts = list(dict.fromkeys(mesh.layout for mesh in meshes))
            draw.shuffle(layouts)
            for layout in layouts:
                more = [mesh for mesh in meshes if mesh.layout == layout]
                if len(own) + len(more) <= max(limit, 1):
                    own += more
            found.append(tuple(own or meshes[:1]))
    return found


# -- all placements, device by device


def score_placement(
    problem: PlacementProblem, meshes: Sequence[Mesh], known: Known | None = None
) -> tuple[float, float, int]:
    """Return (bytes beyond the capacity, seconds of a step, devices) by following each device.

    `known` keeps estimates from one placement of a problem to the next.
    """
    known = {} if known is None else known
    return (
        max(0.0, _find_excess(problem, meshes, known)),
        _simulate(problem, meshes, known),
        sum(len(mesh.ranks) for mesh in meshes),
    )


def find_best(problem: PlacementProblem) -> tuple[float, float]:
    """Return the least (bytes beyond the capacity, seconds of a step) of all placements."""
    best = (math.inf, math.inf)
    known: Known = {}
    for meshes in itertools.product(*(unit.meshes for unit in problem.units)):
        best = min(best, score_placement(problem, meshes, known)[:2])
    return best


def _get_rates(problem: PlacementProblem, ranks: Sequence[int]) -> DeviceRates:
    if problem.cluster is None:
        return problem.rates
    kinds = set()
    for rank in ranks:
        for number, group in enumerate(problem.cluster.groups):
            if group.first <= rank < group.first + group.count:
                kinds.add(number)
    slowest = [problem.cluster.groups[kind].rates for kind in sorted(kinds)]
    return replace(
        slowest[0],
        flops=min(each.flops for each in slowest),
        capacity=min(each.capacity for each in slowest),
    )


def _simulate(problem: PlacementProblem, meshes: Sequence[Mesh], known: Known) -> float:
    started = 1 + max(max(mesh.ranks) for mesh in meshes)
    free = [0.0] * problem.num_devices
    busy = [0.0] * problem.num_devices
    computed = [0.0] * problem.num_devices
    ends: dict[str, float] = {}
    per_node = problem.rates.per_node
    for name in problem.order:
        begin = max((ends[other] for other in problem.producers[name]), default=0.0)
        unit = next((n for n, unit in enumerate(problem.units) if name in unit.calls), None)
        if unit is None:
            ends[name] = begin
            continue
        role, mesh = problem.units[unit].role, meshes[unit]
        trainer = next(
            (n for n, each in enumerate(problem.units) if each.role == role and each.trains), None
        )
        moves = 0.0
        senders: Sequence[int] = ()
        if trainer is not None and meshes[trainer] != mesh:
            both = [*mesh.ranks, *meshes[trainer].ranks]
            key = (role, meshes[trainer], mesh)
            if key not in known:
                (known[key],) = estimate_transfers(
                    problem.networks[role], meshes[trainer], [mesh], _get_rates(problem, both)
                )
            moves = known[key]
            senders = meshes[trainer].ranks if moves else ()
        begin = max(begin, *(free[rank] for rank in (*mesh.ranks, *senders)))
        for rank in {*mesh.ranks, *senders}:
            free[rank] = begin + moves
            busy[rank] += moves
        counts = min(len(mesh.ranks), per_node), min(started, per_node)
        rates = _get_rates(problem, mesh.ranks)
        key = (name, mesh, counts)
        if key not in known:
            load = problem.loads[name]
            # Of a pipeline, some stages wait.
            active = load.count_active_stages(mesh.layout) / mesh.layout.pipeline
            shared = rates.share_cores(max(1.0, counts[0] * active), counts[1])
            known[key] = compute_seconds(problem.networks[role], load, mesh, shared)
        takes = known[key]
        takes += rates.call + (rates.dispatch if started > 1 else 0.0)
        ends[name] = begin + moves + takes
        for rank in mesh.ranks:
            free[rank] = ends[name]
            busy[rank] += takes
            computed[rank] += takes * problem.rates.compute_cores_each(*counts)
    last = max(ends.values())
    step = last
    if problem.max_staleness:
        step = max(*busy, last / (problem.max_staleness + 1))
    if problem.rates.cores is not None:
        for first in range(0, problem.num_devices, per_node):
            step = max(step, sum(computed[first : first + per_node]) / problem.rates.cores)
    return step


def _find_excess(problem: PlacementProblem, meshes: Sequence[Mesh], known: Known) -> float:
    owners: dict[str, Mesh] = {}
    for unit, mesh in zip(problem.units, meshes, strict=True):
        if unit.trains or unit.role not in owners:
            owners[unit.role] = mesh
    places: dict[tuple[str, Mesh], list[str]] = {}
    for unit, mesh in zip(problem.units, meshes, strict=True):
        places.setdefault((unit.role, mesh), []).extend(unit.calls)
    stays = [0.0] * problem.num_devices
    most = [0.0] * problem.num_devices
    for (role, mesh), calls in places.items():
        own = owners[role] == mesh
        key = (role, mesh, tuple(calls), own)
        if key not in known:
            known[key] = compute_memory(
                problem.networks[role],
                [problem.loads[call] for call in calls],
                mesh.layout,
                _get_rates(problem, mesh.ranks),
                own=own,
            )
        held = known[key]
        base = problem.shared_roles.get(role)
        shared = base is not None and _are_equal_but_for_shards(owners[base], mesh)
        for rank in mesh.ranks:
            permanent = held.resident_cache if shared else held.permanent - held.away
            more = held.call + (0 if shared else held.away)
            if problem.rates.cores is not None:  # the heap keeps freed memory, with gaps
                permanent, more = permanent + held.cache, HOLES * more
            stays[rank] += permanent
            most[rank] = max(most[rank], more)
    other = 0.0
    if problem.rates.cores is not None:
        started = 1 + max(max(mesh.ranks) for mesh in meshes)
        other = PROGRAM + (PROCESS if started > 1 else 0)
    excess = -math.inf
    for rank in range(problem.num_devices):
        capacity = _get_rates(problem, (rank,)).capacity
        excess = max(excess, stays[rank] + most[rank] + other - capacity)
    return excess


def _are_equal_but_for_shards(a: Mesh, b: Mesh) -> bool:
    def list_degrees(layout: Layout) -> list[int]:
        return [layout.data, layout.tensor, layout.pipeline, layout.context, layout.expert]

    return a.ranks == b.ranks and list_degrees(a.layout) == list_degrees(b.layout)
