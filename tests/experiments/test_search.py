"""The search over placements: cases that a hand can follow, its limits, and that it repeats."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from weft.experiments import _search
from weft.experiments._cost import Load, Network
from weft.experiments._rates import GIB, Rates, cpu_rates
from weft.experiments._search import Problem, Unit, candidates, layouts, ranges, search, uniform
from weft.topology import Layout, Mesh

RATES = Rates("hand", 1e12, 1e11, 1e10, 1e9, 1e-5, 1e-6, 64 * GIB, 128, per_node=4)
NETWORK = Network(
    layers=8,
    hidden=512,
    query=512,
    key=128,
    inner=2048,
    vocab=8000,
    active=4_000_000,
    whole=4_000_000,
    embedding=4_096_000,
    outputs=4_096_000,
    dtype="float32",
)
TRAINED = replace(NETWORK, trained=True)


def whole_range(unit: Unit, devices: int) -> int:
    """Where a search begins that knows of nothing better: all devices, data-parallel, sharded where
    it trains.
    """
    wanted = Mesh(Layout(data=devices, fsdp=devices if unit.trains else 1), tuple(range(devices)))
    return unit.meshes.index(wanted)


def problem(
    calls: dict[str, tuple[Network, Load, Sequence[str]]],
    devices: int,
    rates: Rates = RATES,
    **more: object,
) -> tuple[Problem, list[int]]:
    """Each call with a role of its own; `calls` says (network, load, producers) in the graph's
    order.
    """
    meshes = tuple(candidates(devices, rates.per_node, lambda layout: layout))
    units = [
        Unit(name, (name,), meshes, trains=load.trains) for name, (_, load, _) in calls.items()
    ]
    made = Problem(
        units=units,
        networks={name: network for name, (network, _, _) in calls.items()},
        loads={name: load for name, (_, load, _) in calls.items()},
        order=list(calls),
        producers={name: producers for name, (_, _, producers) in calls.items()},
        rates=rates,
        num_devices=devices,
        **more,  # type: ignore[arg-type]
    )
    return made, [whole_range(unit, devices) for unit in units]


def test_meshes_divide_nodes_or_are_made_of_whole_ones() -> None:
    assert list(ranges(4, 4)) == [(0,), (1,), (2,), (3,), (0, 1), (2, 3), (0, 1, 2, 3)]
    assert [len(ranks) for ranks in ranges(6, 2)] == [1] * 6 + [2] * 3 + [6]
    shown = {str(each).removesuffix("c1e1") for each in layouts(4, 2)}
    assert shown == {
        "d4f4t1p1",
        "d4f1t1p1",
        "d2f2t1p2",
        "d2f1t1p2",
        "d1f1t1p4",
        "d2f2t2p1",
        "d2f1t2p1",
        "d1f1t2p2",
    }
    assert len(candidates(2, 2, lambda layout: layout if layout.tensor == 1 else None)) == 5


def test_generation_is_data_parallel_where_there_is_room() -> None:
    made, start = problem({"gen": (NETWORK, Load("generate", 1024, 64, 64), ())}, 4)
    best = search(made, start).best
    assert str(best.meshes["gen"].layout) == "d4f1t1p1c1e1" and best.meshes["gen"].ranks == (
        0,
        1,
        2,
        3,
    )


def test_few_sequences_share_the_weights_instead() -> None:
    quick = replace(RATES, latency=0.0, link=1e12)
    made, start = problem({"gen": (NETWORK, Load("generate", 1, 8, 64), ())}, 4, quick)
    assert search(made, start).best.meshes["gen"].layout.tensor == 4


def test_memory_forces_shards() -> None:
    load = Load("train_step", 8, 8, 8)
    free, start = problem({"train": (TRAINED, load, ())}, 4)
    held = 4 * 4 * TRAINED.parameters  # weights, gradients and two moments
    tight, _ = problem({"train": (TRAINED, load, ())}, 4, replace(RATES, capacity=0.75 * held))
    copies = next(
        n
        for n, m in enumerate(free.units[0].meshes)
        if m.layout == Layout(data=4) and len(m.ranks) == 4
    )
    assert tight.estimate([copies]).over > 0
    best = search(tight, start).best
    layout = best.meshes["train"].layout
    assert not best.over and layout.fsdp * layout.tensor * layout.pipeline >= 2
    assert best.step >= search(free, start).best.step


def test_where_nothing_fits_the_least_is_found() -> None:
    made, start = problem(
        {"train": (TRAINED, Load("train_step", 32, 64, 64), ())}, 4, replace(RATES, capacity=1e6)
    )
    best = search(made, start).best
    assert best.over == min(made.estimate([n]).over for n in range(len(made.units[0].meshes))) > 0


def test_calls_that_do_not_wait_for_each_other_take_halves() -> None:
    """Each alone is faster on all four devices, whose exchanges take time; side by side both end
    sooner.
    """
    far = replace(RATES, latency=1e-3)
    load = Load("train_step", 64, 64, 64, microbatch=2048)
    made, start = problem({"a": (TRAINED, load, ()), "b": (TRAINED, load, ())}, 4, far)
    best = search(made, start).best
    a, b = (best.meshes[name] for name in "ab")
    assert len(a.ranks) == len(b.ranks) == 2 and set(a.ranks).isdisjoint(b.ranks)
    assert best.step == pytest.approx(max(best.seconds.values()))
    chained, _ = problem({"a": (TRAINED, load, ()), "b": (TRAINED, load, ("a",))}, 4, far)
    assert search(chained, start).best.step == pytest.approx(
        sum(search(chained, start).best.seconds.values())
    )


def test_calls_of_one_device_come_one_after_another() -> None:
    load = Load("inference", 64, 64, 64)
    made, _ = problem({"a": (NETWORK, load, ()), "b": (NETWORK, load, ())}, 2)
    first, second = (
        next(n for n, m in enumerate(made.units[0].meshes) if m.ranks == (rank,)) for rank in (0, 1)
    )
    apart, together = made.estimate([first, second]), made.estimate([first, first])
    assert together.step == pytest.approx(2 * apart.step) and together.bytes > apart.bytes


def test_a_copy_gets_its_weights_each_step_and_frozen_ones_do_not() -> None:
    meshes = tuple(candidates(2, 2, lambda layout: layout))
    train, sample = Load("train_step", 32, 64, 64), Load("generate", 32, 64, 64)
    units = [Unit("actor", ("gen",), meshes), Unit("actor", ("train",), meshes, trains=True)]
    loads, producers = {"gen": sample, "train": train}, {"gen": (), "train": ("gen",)}
    made = Problem(units, {"actor": TRAINED}, loads, list(loads), producers, RATES, 2)
    one = {
        ranks: next(n for n, m in enumerate(meshes) if m.ranks == ranks) for ranks in ((0,), (1,))
    }
    assert made.estimate([one[0,], one[0,]]).moving["gen"] == 0.0
    apart = made.estimate([one[1,], one[0,]])
    assert (
        apart.moving["gen"] == pytest.approx(TRAINED.parameters * 4 / 1e10 + 1e-5)
        and apart.moving["train"] == 0.0
    )
    frozen = replace(made, units=[units[0], replace(units[1], trains=False)])
    assert frozen.estimate([one[1,], one[0,]]).moving["gen"] == 0.0


def test_who_sends_weights_does_nothing_else_meanwhile() -> None:
    """`score` is on the actor's device, and waits until its weights are at the sampler's."""
    meshes = tuple(candidates(2, 2, lambda layout: layout))
    work = {name: Load(name, 32, 64, 64) for name in ("generate", "inference")} | {
        "train": Load("train_step", 32, 64, 64)
    }
    units = [
        Unit("actor", ("generate",), meshes),
        Unit("ref", ("inference",), meshes),
        Unit("actor", ("train",), meshes, trains=True),
    ]
    producers = {"generate": (), "inference": (), "train": ("generate", "inference")}
    slow = replace(RATES, link=1e6)
    made = Problem(units, {"actor": TRAINED, "ref": NETWORK}, work, list(work), producers, slow, 2)
    first, second = (next(n for n, m in enumerate(meshes) if m.ranks == (rank,)) for rank in (0, 1))
    found = made.estimate([second, first, first])
    seconds, moving = found.seconds, found.moving["generate"]
    assert moving > 10 * seconds["inference"]
    begun = moving + max(seconds["generate"], seconds["inference"])
    assert found.step == pytest.approx(begun + seconds["train"])


def test_sampling_that_runs_ahead_is_bounded_by_the_busiest_device() -> None:
    calls = {
        "gen": (NETWORK, Load("generate", 64, 64, 64), ()),
        "train": (TRAINED, Load("train_step", 64, 64, 64), ("gen",)),
    }
    made, _ = problem(calls, 2)
    ahead, _ = problem(calls, 2, lag=1)
    one, other = (
        next(n for n, m in enumerate(made.units[0].meshes) if m.ranks == (rank,)) for rank in (0, 1)
    )
    slow, quick = made.estimate([one, other]), ahead.estimate([one, other])
    assert slow.step == pytest.approx(sum(slow.seconds.values()))
    assert quick.step == pytest.approx(max(max(slow.seconds.values()), slow.step / 2))


def test_processes_that_share_cores_gain_nothing_side_by_side() -> None:
    """Two calls that do not wait for each other, on two processes that share the cores."""
    load = Load("inference", 64, 64, 64)
    calls = {"a": (NETWORK, load, ()), "b": (NETWORK, load, ())}
    for cores, gain in ((1.0, 1), (2.0, 2)):
        made, _ = problem(calls, 4, cpu_rates(cores, 4.0, 4))
        first, second = (
            next(n for n, m in enumerate(made.units[0].meshes) if m.ranks == (rank,))
            for rank in (0, 1)
        )
        apart, together = made.estimate([first, second]), made.estimate([second, second])
        assert together.step / apart.step == pytest.approx(gain, rel=0.05)


def test_more_processes_than_cores_are_slower_than_one_of_each() -> None:
    made, start = problem(
        {"train": (TRAINED, Load("train_step", 64, 64, 64), ())}, 4, cpu_rates(2.0, 4.0, 4)
    )
    everywhere, best = made.estimate(start), search(made, start).best
    assert len(best.meshes["train"].ranks) == 1 and best.step < everywhere.step
    assert (
        len(
            search(*problem({"train": (TRAINED, Load("train_step", 64, 64, 64), ())}, 4))
            .best.meshes["train"]
            .ranks
        )
        == 4
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "rates", [RATES, cpu_rates(2.0, 64.0, 4), cpu_rates(64.0, 64.0, 4)], ids=["gpu", "2", "64"]
)
def test_the_heuristic_is_never_slower_than_one_layout_for_all_calls(
    seed: int, rates: Rates
) -> None:
    draw = random.Random(seed)
    calls: dict[str, tuple[Network, Load, Sequence[str]]] = {}
    for number, method in enumerate(("generate", "inference", "train_step")):
        network = replace(
            TRAINED if method == "train_step" else NETWORK, layers=draw.choice((1, 8, 32))
        )
        load = Load(method, draw.choice((4, 64, 1024)), 64, draw.choice((8, 256)))
        calls[f"c{number}"] = (network, load, [f"c{number - 1}"] if number else [])
    made, everywhere = problem(calls, 8, rates)
    on_one = [next(n for n, m in enumerate(unit.meshes) if m.ranks == (0,)) for unit in made.units]
    assert on_one in uniform(made) and everywhere in uniform(made)
    chosen = made.estimate(min(uniform(made), key=made.score))
    assert not chosen.over
    assert chosen.step <= min(made.estimate(on_one).step, made.estimate(everywhere).step)


def test_the_heuristic_leaves_alone_what_cannot_move_and_has_three_forms_of_a_size() -> None:
    meshes = tuple(candidates(2, 2, lambda layout: layout))
    fixed = (Mesh(Layout(tensor=2), (0, 1)),)
    units = [
        Unit("actor", ("gen",), meshes),
        Unit("actor", ("train",), meshes, trains=True),
        Unit("ref", ("ref",), fixed),
    ]
    work = {
        "gen": Load("generate", 4, 4, 4),
        "train": Load("train_step", 4, 4, 4),
        "ref": Load("inference", 4, 4, 4),
    }
    networks = {"actor": TRAINED, "ref": NETWORK}
    made = Problem(units, networks, work, list(work), dict.fromkeys(work, ()), RATES, 2)
    shown = [
        [str(unit.meshes[n].layout)[:6] for unit, n in zip(units, choice, strict=True)]
        for choice in uniform(made)
    ]
    assert shown == [
        ["d1f1t1", "d1f1t1", "d1f1t2"],
        ["d2f2t1", "d2f2t1", "d1f1t2"],
        ["d2f1t1", "d2f1t1", "d1f1t2"],
        ["d2f1t1", "d2f2t1", "d1f1t2"],
    ]


def many(seed: int) -> tuple[Problem, list[int]]:
    """Six calls of several sizes on eight devices: more placements than can be tried."""
    draw = random.Random(seed)
    calls: dict[str, tuple[Network, Load, Sequence[str]]] = {}
    for number, method in enumerate(
        ("generate", "inference", "inference", "inference", "train_step", "train_step")
    ):
        network = replace(
            TRAINED if method == "train_step" else NETWORK, layers=draw.choice((2, 4, 8, 16))
        )
        before = () if not number else ("c0",) if number < 4 else ("c0", "c1", "c2", "c3")
        calls[f"c{number}"] = (network, Load(method, draw.choice((16, 64, 256)), 64, 64), before)
    return problem(calls, 8, replace(RATES, capacity=draw.choice((0.5, 2, 64)) * GIB))


@pytest.mark.parametrize("seed", [1, 2])
def test_never_worse_than_where_it_begins_and_the_same_again(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_search, "ANNEALED", 300)
    made, start = many(seed)
    found, again = search(made, start), search(many(seed)[0], start)
    assert not found.exhaustive and (found.best.over, found.best.step) <= (
        found.first.over,
        found.first.step,
    )
    assert found.best == again.best and found.tried == again.tried


def test_annealing_finds_what_trying_all_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    load = Load("train_step", 64, 64, 64, microbatch=2048)
    calls = {
        "a": (TRAINED, load, ()),
        "b": (TRAINED, load, ()),
        "c": (NETWORK, Load("generate", 64, 64, 64), ("a",)),
    }
    made, start = problem(calls, 4, replace(RATES, latency=1e-3))
    everything = search(made, start)
    monkeypatch.setattr(_search, "ALL", 0)
    drawn = search(made, start)
    assert everything.exhaustive and not drawn.exhaustive and drawn.tried < everything.tried
    assert drawn.best.step == pytest.approx(everything.best.step, rel=0.02)
