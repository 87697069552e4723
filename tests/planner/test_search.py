"""The search over placements: cases that a hand can follow, its limits, and that it repeats."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.planner.decoders import decoder, with_settings
from weft.planner import search
from weft.planner.candidates import PlacementUnit, list_layouts, list_meshes, list_ranges
from weft.planner.cost import CallWorkload
from weft.planner.decoder_sizes import DecoderSizes
from weft.planner.devices import GIB, DeviceRates, estimate_cpu_rates
from weft.planner.problem import PlacementProblem
from weft.planner.search import list_uniform_placements, search_placement
from weft.topology import Layout, Mesh

RATES = DeviceRates("hand", 1e12, 1e11, 1e10, 1e9, 1e-5, 1e-6, 64 * GIB, 128, per_node=4)


def network_of(layers: int, *, trained: bool = False) -> DecoderSizes:
    network = decoder(
        layers=layers,
        hidden=512,
        query=512,
        key=128,
        inner=2048,
        vocab=8000,
        active=4_000_000,
        embedding=4_096_000,
        outputs=4_096_000,
    )
    return with_settings(network, trained=trained)


NETWORK, TRAINED = network_of(8), network_of(8, trained=True)


def whole_range(unit: PlacementUnit, devices: int) -> int:
    """Where a search begins that knows of nothing better: all devices, data-parallel, sharded where
    it trains.
    """
    wanted = Mesh(Layout(data=devices, fsdp=devices if unit.trains else 1), tuple(range(devices)))
    return unit.meshes.index(wanted)


def problem(
    calls: dict[str, tuple[DecoderSizes, CallWorkload, Sequence[str]]],
    devices: int,
    rates: DeviceRates = RATES,
    **more: object,
) -> tuple[PlacementProblem, list[int]]:
    """Each call with a role of its own; `calls` says (network, load, producers) in the graph's
    order.
    """
    meshes = tuple(list_meshes(devices, rates.per_node, lambda layout: layout))
    units = [
        PlacementUnit(name, (name,), meshes, trains=load.trains)
        for name, (_, load, _) in calls.items()
    ]
    made = PlacementProblem(
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
    assert list(list_ranges(4, 4)) == [(0,), (1,), (2,), (3,), (0, 1), (2, 3), (0, 1, 2, 3)]
    assert [len(ranks) for ranks in list_ranges(6, 2)] == [1] * 6 + [2] * 3 + [4, 6]
    shown = {str(each).removesuffix("c1e1") for each in list_layouts(4, 2)}
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
    assert len(list_meshes(2, 2, lambda layout: layout if layout.tensor == 1 else None)) == 5


def test_generation_is_data_parallel_where_there_is_room() -> None:
    made, start = problem({"gen": (NETWORK, CallWorkload("generate", 1024, 64, 64), ())}, 4)
    best = search_placement(made, start).best
    assert str(best.meshes["gen"].layout) == "d4f1t1p1c1e1" and best.meshes["gen"].ranks == (
        0,
        1,
        2,
        3,
    )


def test_few_sequences_share_the_weights_instead() -> None:
    quick = replace(RATES, latency=0.0, link_bandwidth=1e12)
    made, start = problem({"gen": (NETWORK, CallWorkload("generate", 1, 8, 64), ())}, 4, quick)
    assert search_placement(made, start).best.meshes["gen"].layout.tensor == 4


def test_memory_forces_shards() -> None:
    load = CallWorkload("train_step", 8, 8, 8)
    free, start = problem({"train": (TRAINED, load, ())}, 4)
    held = 4 * 4 * TRAINED.shape.parameters  # weights, gradients and two moments
    tight, _ = problem({"train": (TRAINED, load, ())}, 4, replace(RATES, capacity=0.75 * held))
    copies = next(
        n
        for n, m in enumerate(free.units[0].meshes)
        if m.layout == Layout(data=4) and len(m.ranks) == 4
    )
    assert tight.estimate([copies]).excess_bytes > 0
    best = search_placement(tight, start).best
    layout = best.meshes["train"].layout
    assert not best.excess_bytes and layout.fsdp * layout.tensor * layout.pipeline >= 2
    assert best.step_seconds >= search_placement(free, start).best.step_seconds


def test_where_nothing_fits_the_least_is_found() -> None:
    made, start = problem(
        {"train": (TRAINED, CallWorkload("train_step", 32, 64, 64), ())},
        4,
        replace(RATES, capacity=1e6),
    )
    best = search_placement(made, start).best
    assert (
        best.excess_bytes
        == min(made.estimate([n]).excess_bytes for n in range(len(made.units[0].meshes)))
        > 0
    )


def test_calls_that_do_not_wait_for_each_other_take_halves() -> None:
    """Each alone is faster on all four devices, whose exchanges take time; side by side both end
    sooner.
    """
    far = replace(RATES, latency=1e-3)
    load = CallWorkload("train_step", 64, 64, 64, microbatch=2048)
    made, start = problem({"a": (TRAINED, load, ()), "b": (TRAINED, load, ())}, 4, far)
    best = search_placement(made, start).best
    a, b = (best.meshes[name] for name in "ab")
    assert len(a.ranks) == len(b.ranks) == 2 and set(a.ranks).isdisjoint(b.ranks)
    assert best.step_seconds == pytest.approx(max(best.seconds.values()))
    chained, _ = problem({"a": (TRAINED, load, ()), "b": (TRAINED, load, ("a",))}, 4, far)
    assert search_placement(chained, start).best.step_seconds == pytest.approx(
        sum(search_placement(chained, start).best.seconds.values())
    )


def test_calls_of_one_device_come_one_after_another() -> None:
    load = CallWorkload("inference", 64, 64, 64)
    made, _ = problem({"a": (NETWORK, load, ()), "b": (NETWORK, load, ())}, 2)
    first, second = (
        next(n for n, m in enumerate(made.units[0].meshes) if m.ranks == (rank,)) for rank in (0, 1)
    )
    apart, together = made.estimate([first, second]), made.estimate([first, first])
    assert (
        together.step_seconds == pytest.approx(2 * apart.step_seconds)
        and together.peak_bytes > apart.peak_bytes
    )


def test_a_copy_gets_its_weights_each_step_and_frozen_ones_do_not() -> None:
    meshes = tuple(list_meshes(2, 2, lambda layout: layout))
    train, sample = CallWorkload("train_step", 32, 64, 64), CallWorkload("generate", 32, 64, 64)
    units = [
        PlacementUnit("actor", ("gen",), meshes),
        PlacementUnit("actor", ("train",), meshes, trains=True),
    ]
    loads, producers = {"gen": sample, "train": train}, {"gen": (), "train": ("gen",)}
    made = PlacementProblem(units, {"actor": TRAINED}, loads, list(loads), producers, RATES, 2)
    one = {
        ranks: next(n for n, m in enumerate(meshes) if m.ranks == ranks) for ranks in ((0,), (1,))
    }
    assert made.estimate([one[0,], one[0,]]).transfer_seconds["gen"] == 0.0
    apart = made.estimate([one[1,], one[0,]])
    assert (
        apart.transfer_seconds["gen"] == pytest.approx(TRAINED.shape.parameters * 4 / 1e10 + 1e-5)
        and apart.transfer_seconds["train"] == 0.0
    )
    frozen = replace(made, units=[units[0], replace(units[1], trains=False)])
    assert frozen.estimate([one[1,], one[0,]]).transfer_seconds["gen"] == 0.0


def test_who_sends_weights_does_nothing_else_meanwhile() -> None:
    """`score` is on the actor's device, and waits until its weights are at the sampler's."""
    meshes = tuple(list_meshes(2, 2, lambda layout: layout))
    work = {name: CallWorkload(name, 32, 64, 64) for name in ("generate", "inference")} | {
        "train": CallWorkload("train_step", 32, 64, 64)
    }
    units = [
        PlacementUnit("actor", ("generate",), meshes),
        PlacementUnit("ref", ("inference",), meshes),
        PlacementUnit("actor", ("train",), meshes, trains=True),
    ]
    producers = {"generate": (), "inference": (), "train": ("generate", "inference")}
    slow = replace(RATES, link_bandwidth=1e6)
    made = PlacementProblem(
        units, {"actor": TRAINED, "ref": NETWORK}, work, list(work), producers, slow, 2
    )
    first, second = (next(n for n, m in enumerate(meshes) if m.ranks == (rank,)) for rank in (0, 1))
    found = made.estimate([second, first, first])
    seconds, moving = found.seconds, found.transfer_seconds["generate"]
    assert moving > 10 * seconds["inference"]
    begun = moving + max(seconds["generate"], seconds["inference"])
    assert found.step_seconds == pytest.approx(begun + seconds["train"])


def test_sampling_that_runs_ahead_is_bounded_by_the_busiest_device() -> None:
    calls = {
        "gen": (NETWORK, CallWorkload("generate", 64, 64, 64), ()),
        "train": (TRAINED, CallWorkload("train_step", 64, 64, 64), ("gen",)),
    }
    made, _ = problem(calls, 2)
    ahead, _ = problem(calls, 2, max_staleness=1)
    one, other = (
        next(n for n, m in enumerate(made.units[0].meshes) if m.ranks == (rank,)) for rank in (0, 1)
    )
    slow, quick = made.estimate([one, other]), ahead.estimate([one, other])
    assert slow.step_seconds == pytest.approx(sum(slow.seconds.values()))
    assert quick.step_seconds == pytest.approx(
        max(max(slow.seconds.values()), slow.step_seconds / 2)
    )


def test_processes_that_share_cores_gain_nothing_side_by_side() -> None:
    """Two calls that do not wait for each other, on two processes that share the cores."""
    load = CallWorkload("inference", 64, 64, 64)
    calls = {"a": (NETWORK, load, ()), "b": (NETWORK, load, ())}
    for cores, gain in ((1.0, 1), (2.0, 2)):
        made, _ = problem(calls, 4, estimate_cpu_rates(cores, 4.0, 4))
        first, second = (
            next(n for n, m in enumerate(made.units[0].meshes) if m.ranks == (rank,))
            for rank in (0, 1)
        )
        apart, together = made.estimate([first, second]), made.estimate([second, second])
        assert together.step_seconds / apart.step_seconds == pytest.approx(gain, rel=0.05)


def test_more_processes_than_cores_are_slower_than_one_of_each() -> None:
    made, start = problem(
        {"train": (TRAINED, CallWorkload("train_step", 64, 64, 64), ())},
        4,
        estimate_cpu_rates(2.0, 4.0, 4),
    )
    everywhere, best = made.estimate(start), search_placement(made, start).best
    assert len(best.meshes["train"].ranks) == 1 and best.step_seconds < everywhere.step_seconds
    assert (
        len(
            search_placement(
                *problem({"train": (TRAINED, CallWorkload("train_step", 64, 64, 64), ())}, 4)
            )
            .best.meshes["train"]
            .ranks
        )
        == 4
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "rates",
    [RATES, estimate_cpu_rates(2.0, 64.0, 4), estimate_cpu_rates(64.0, 64.0, 4)],
    ids=["gpu", "2", "64"],
)
def test_the_heuristic_is_never_slower_than_one_layout_for_all_calls(
    seed: int, rates: DeviceRates
) -> None:
    draw = random.Random(seed)
    calls: dict[str, tuple[DecoderSizes, CallWorkload, Sequence[str]]] = {}
    for number, method in enumerate(("generate", "inference", "train_step")):
        network = network_of(draw.choice((1, 8, 32)), trained=method == "train_step")
        load = CallWorkload(method, draw.choice((4, 64, 1024)), 64, draw.choice((8, 256)))
        calls[f"c{number}"] = (network, load, [f"c{number - 1}"] if number else [])
    made, everywhere = problem(calls, 8, rates)
    on_one = [next(n for n, m in enumerate(unit.meshes) if m.ranks == (0,)) for unit in made.units]
    assert on_one in list_uniform_placements(made) and everywhere in list_uniform_placements(made)
    chosen = made.estimate(min(list_uniform_placements(made), key=made.compute_score))
    assert not chosen.excess_bytes
    assert chosen.step_seconds <= min(
        made.estimate(on_one).step_seconds, made.estimate(everywhere).step_seconds
    )


def test_the_heuristic_leaves_alone_what_cannot_move_and_has_three_forms_of_a_size() -> None:
    meshes = tuple(list_meshes(2, 2, lambda layout: layout))
    fixed = (Mesh(Layout(tensor=2), (0, 1)),)
    units = [
        PlacementUnit("actor", ("gen",), meshes),
        PlacementUnit("actor", ("train",), meshes, trains=True),
        PlacementUnit("ref", ("ref",), fixed),
    ]
    work = {
        "gen": CallWorkload("generate", 4, 4, 4),
        "train": CallWorkload("train_step", 4, 4, 4),
        "ref": CallWorkload("inference", 4, 4, 4),
    }
    networks = {"actor": TRAINED, "ref": NETWORK}
    made = PlacementProblem(units, networks, work, list(work), dict.fromkeys(work, ()), RATES, 2)
    shown = [
        [str(unit.meshes[n].layout)[:6] for unit, n in zip(units, choice, strict=True)]
        for choice in list_uniform_placements(made)
    ]
    assert shown == [
        ["d1f1t1", "d1f1t1", "d1f1t2"],
        ["d2f2t1", "d2f2t1", "d1f1t2"],
        ["d2f1t1", "d2f1t1", "d1f1t2"],
        ["d2f1t1", "d2f2t1", "d1f1t2"],
    ]


def many(seed: int) -> tuple[PlacementProblem, list[int]]:
    """Six calls of several sizes on eight devices: more placements than can be tried."""
    draw = random.Random(seed)
    calls: dict[str, tuple[DecoderSizes, CallWorkload, Sequence[str]]] = {}
    for number, method in enumerate(
        ("generate", "inference", "inference", "inference", "train_step", "train_step")
    ):
        network = network_of(draw.choice((2, 4, 8, 16)), trained=method == "train_step")
        before = () if not number else ("c0",) if number < 4 else ("c0", "c1", "c2", "c3")
        calls[f"c{number}"] = (
            network,
            CallWorkload(method, draw.choice((16, 64, 256)), 64, 64),
            before,
        )
    return problem(calls, 8, replace(RATES, capacity=draw.choice((0.5, 2, 64)) * GIB))


def only_annealing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves branch and bound no placements, but for pairs of units."""
    monkeypatch.setattr(search, "FIRST_PLACEMENTS", 0)
    monkeypatch.setattr(search, "MAX_PLACEMENTS", 0)


@pytest.mark.parametrize("seed", [1, 2])
def test_never_worse_than_where_it_begins_and_the_same_again(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_annealing(monkeypatch)
    made, start = many(seed)
    found, again = search_placement(made, start), search_placement(many(seed)[0], start)
    assert not found.is_exhaustive and (found.best.excess_bytes, found.best.step_seconds) <= (
        found.first.excess_bytes,
        found.first.step_seconds,
    )
    assert found.best == again.best and found.num_tried == again.num_tried


@pytest.mark.parametrize("seed", range(3))
def test_annealing_comes_close_to_the_best_and_says_how_close(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = search_placement(*many(seed))
    assert best.is_exhaustive and best.bound_seconds == best.best.step_seconds
    only_annealing(monkeypatch)
    drawn = search_placement(*many(seed))
    assert not drawn.is_exhaustive
    assert drawn.bound_seconds <= best.best.step_seconds * (1 + 1e-6)
    assert drawn.best.step_seconds <= best.best.step_seconds * 1.02


def test_the_next_best_differs_in_more_than_the_order_of_devices() -> None:
    """Of two equal calls on two devices each has its own; any other placement is slower."""
    load = CallWorkload("inference", 64, 64, 64)
    meshes = tuple(Mesh(Layout(), (rank,)) for rank in range(4))
    units = [PlacementUnit(name, (name,), meshes) for name in "ab"]
    made = PlacementProblem(
        units,
        dict.fromkeys("ab", NETWORK),
        dict.fromkeys("ab", load),
        ["a", "b"],
        {"a": (), "b": ()},
        RATES,
        4,
    )
    found = search_placement(made, [0, 0])
    a, b = (found.best.meshes[name].ranks for name in "ab")
    assert a != b and found.is_exhaustive
    assert found.next_best is not None
    assert found.next_best.meshes["a"].ranks == found.next_best.meshes["b"].ranks
    assert found.next_best.step_seconds == pytest.approx(2 * found.best.step_seconds)


@pytest.mark.parametrize("devices", [8, 128, 1024])
def test_the_work_of_a_search_hardly_grows_with_the_devices(devices: int) -> None:
    """Placements that are scored, and estimates of calls."""
    load = CallWorkload("train_step", 4096, 64, 64, microbatch=2048)
    calls = {
        "a": (TRAINED, load, ()),
        "b": (TRAINED, load, ()),
        "c": (NETWORK, CallWorkload("generate", 4096, 64, 64), ("a",)),
    }
    made, start = problem(calls, devices, replace(RATES, latency=1e-3))
    found = search_placement(made, start)
    assert found.is_exhaustive
    assert found.num_tried < 50_000
    assert len(made.scorer.table.examples) < 400
