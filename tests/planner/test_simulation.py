"""The replay of several steps: against the search's estimate, by hand, and its cost."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.planner.test_search import NETWORK, RATES, TRAINED
from tests.work import calls_of
from weft.graph.graph import DataflowGraph
from weft.graph.mfc import HostFunction, MFCDef, Node
from weft.planner.candidates import list_meshes
from weft.planner.cost import CallWorkload
from weft.planner.devices import DeviceRates, estimate_cpu_rates
from weft.planner.placed_calls import group_devices
from weft.planner.problem import PlacementEstimate, PlacementProblem, PlacementUnit
from weft.planner.simulated_memory import build_memory_course, estimate_memory
from weft.planner.simulation import RunSimulation, SimulatedSpan, simulate
from weft.topology import Layout, Mesh

METHODS = ("generate", "inference", "train_step")


def call(name: str, method: str, reads: Sequence[str], role: str = "", **more: Any) -> MFCDef:
    """A call that reads the outputs of the nodes `reads`, or the dataset."""
    inputs = [f"{each}_out" for each in reads] or ["prompt"]
    outputs = [] if method == "train_step" else [f"{name}_out"]
    return MFCDef(name, role or name, "i", method, 4, inputs, outputs, **more)  # type: ignore[arg-type]


def build_graph(nodes: Sequence[Node]) -> DataflowGraph:
    return DataflowGraph(nodes, ["prompt"])


def build_problem(
    graph: DataflowGraph,
    meshes: Mapping[str, Sequence[Mesh]],
    loads: Mapping[str, CallWorkload],
    num_devices: int,
    rates: DeviceRates = RATES,
) -> PlacementProblem:
    """One unit for each role that is trained, and for each other call; `meshes` are its choices."""
    groups: dict[tuple[str, str], list[MFCDef]] = {}
    for each in graph.list_model_calls():
        groups.setdefault((each.role, "" if each.trains else each.name), []).append(each)
    units = []
    for (role, _), calls in groups.items():
        names = tuple(each.name for each in calls)
        units.append(PlacementUnit(role, names, tuple(meshes[names[0]]), trains=calls[0].trains))
    trained = {unit.role for unit in units if unit.trains}
    return PlacementProblem(
        units=units,
        networks={unit.role: TRAINED if unit.role in trained else NETWORK for unit in units},
        loads=loads,
        order=graph.order,
        producers={name: graph.find_producers(name) for name in graph.order},
        rates=rates,
        num_devices=num_devices,
        max_staleness=max((edge.max_staleness for edge in graph.version_edges), default=0),
    )


def run(
    graph: DataflowGraph,
    problem: PlacementProblem,
    choice: Sequence[int],
    steps: int = 1,
    **more: Any,
) -> tuple[RunSimulation, PlacementEstimate]:
    estimate = problem.estimate(choice)
    follow = graph.order[-1]
    return simulate(graph, follow, problem, estimate, steps=steps, **more), estimate


def draw_load(draw: random.Random, method: str) -> CallWorkload:
    return CallWorkload(method, draw.choice((4, 8, 64)), draw.randint(1, 300), draw.randint(1, 300))


def draw_graph(draw: random.Random) -> DataflowGraph:
    """A random acyclic graph of calls, host functions and train steps of some of their roles."""
    nodes: list[Node] = []
    made: list[str] = []
    for number in range(draw.randint(1, 6)):
        name = f"n{number}"
        reads = draw.sample(made, draw.randint(0, min(3, len(made))))
        kind = draw.choice((*METHODS, "host", "host"))
        if kind == "host":
            inputs = [f"{each}_out" for each in reads] or ["prompt"]
            nodes.append(HostFunction(name, "f", 4, inputs, [f"{name}_out"]))
            made.append(name)
            continue
        roles = [each.role for each in nodes if isinstance(each, MFCDef) and not each.trains]
        trained = {each.role for each in nodes if isinstance(each, MFCDef) and each.trains}
        free = [role for role in roles if role not in trained]
        role = draw.choice(free) if kind == "train_step" and free and draw.random() < 0.7 else name
        nodes.append(call(name, kind, reads, role))
        if kind != "train_step":
            made.append(name)
    nodes.append(call("last", "train_step", made[-2:]))
    return build_graph(nodes)


def draw_problem(
    draw: random.Random, graph: DataflowGraph, devices: int, rates: DeviceRates
) -> tuple[PlacementProblem, list[int]]:
    meshes = list_meshes(devices, rates.per_node, lambda layout: layout)
    calls = graph.list_model_calls()
    problem = build_problem(
        graph,
        {each.name: meshes for each in calls},
        {each.name: draw_load(draw, each.method) for each in calls},
        devices,
        rates,
    )
    return problem, [draw.randrange(len(unit.meshes)) for unit in problem.units]


@pytest.mark.parametrize("seed", range(60))
def test_one_step_takes_what_the_search_estimates(seed: int) -> None:
    draw = random.Random(seed)
    graph = draw_graph(draw)
    problem, choice = draw_problem(draw, graph, draw.choice((1, 2, 4, 8)), RATES)
    result, estimate = run(graph, problem, choice)
    assert result.step_ends == [estimate.step_seconds]
    assert result.step_seconds == estimate.step_seconds
    several, _ = run(graph, problem, choice, 3)
    assert several.step_ends[-1] == pytest.approx(3 * estimate.step_seconds)


@pytest.mark.parametrize("seed", range(20))
def test_the_cores_of_a_machine_bound_a_step(seed: int) -> None:
    draw = random.Random(seed)
    graph = draw_graph(draw)
    rates = estimate_cpu_rates(2, 8.0, 4, 1)
    problem, choice = draw_problem(draw, graph, 8, rates)
    result, estimate = run(graph, problem, choice)
    assert result.step_seconds == pytest.approx(estimate.step_seconds, rel=1e-12)


def test_calls_at_the_same_time_share_the_cores_of_a_machine() -> None:
    """Four processes of one thread compute at once on two cores: that takes twice as long."""
    graph = build_graph([call(f"n{number}", "inference", []) for number in range(4)])
    meshes = {f"n{number}": [Mesh(Layout(), (number,))] for number in range(4)}
    loads = dict.fromkeys(meshes, CallWorkload("inference", 8, 50, 50))
    problem = build_problem(graph, meshes, loads, 4, estimate_cpu_rates(2, 8.0, 4, 1))
    result, estimate = run(graph, problem, [0] * 4, 2)
    alone = estimate.seconds["n0"]
    assert find(result, "n3")[0].seconds == alone
    assert result.step_ends == pytest.approx([2 * alone, 4 * alone])
    assert result.step_seconds == pytest.approx(estimate.step_seconds)


@pytest.mark.parametrize("seed", range(40))
def test_memory_peaks_at_what_the_search_estimates(seed: int) -> None:
    draw = random.Random(seed)
    graph = draw_graph(draw)
    problem, choice = draw_problem(draw, graph, 8, RATES)
    result, estimate = run(graph, problem, choice)
    memory = estimate_memory(problem, estimate, result.groups)
    assert max(each.peak for each in memory) == estimate.peak_bytes
    highest = 0.0
    for number, each in enumerate(memory):
        course = build_memory_course(result, number, each)
        highest = max(highest, *(used for _, used in course))
        times = [time for time, _ in course]
        assert times == sorted(times)
    assert highest == estimate.peak_bytes


# -- asynchronous runs


def build_rl_graph(staleness: int) -> DataflowGraph:
    """Sampling, a reward and a reference, a host function, and two roles that train."""
    return build_graph(
        [
            call("gen", "generate", [], "actor", max_staleness=staleness),
            call("rew", "inference", ["gen"]),
            call("ref", "inference", ["gen"]),
            HostFunction("adv", "f", 4, ["rew_out", "ref_out"], ["adv_out"]),
            call("critic", "train_step", ["adv"]),
            call("train", "train_step", ["adv"], "actor"),
        ]
    )


@pytest.mark.parametrize("seed", range(60))
def test_asynchronous_steps_take_at_least_the_bound_of_the_search(seed: int) -> None:
    draw = random.Random(seed)
    graph = build_rl_graph(draw.choice((1, 1, 2, 4)))
    problem, choice = draw_problem(draw, graph, 8, RATES)
    result, estimate = run(graph, problem, choice, 2)
    assert result.step_seconds >= estimate.step_seconds * (1 - 1e-9)


def place_apart(staleness: int, gen: CallWorkload, train: CallWorkload) -> tuple[Any, Any]:
    """Sampling on device 0, and training on device 1."""
    graph = build_graph(
        [
            call("gen", "generate", [], "actor", max_staleness=staleness),
            call("train", "train_step", ["gen"], "actor"),
        ]
    )
    meshes = {"gen": [Mesh(Layout(), (0,))], "train": [Mesh(Layout(), (1,))]}
    return graph, build_problem(graph, meshes, {"gen": gen, "train": train}, 2)


def find(result: RunSimulation, name: str, kind: str = "call") -> list[SimulatedSpan]:
    return [span for span in result.spans if span.name == name and span.kind == kind]


GEN = CallWorkload("generate", 8, 50, 400)
TRAIN = CallWorkload("train_step", 8, 50, 200)


def test_sampling_overlaps_training_by_the_steps_that_staleness_allows() -> None:
    graph, problem = place_apart(1, GEN, TRAIN)
    result, estimate = run(graph, problem, [0, 0], 4)
    sampling, training = estimate.seconds["gen"], estimate.seconds["train"]
    moves = estimate.transfer_seconds["gen"]
    # Both first batches are sampled with the first weights, then training begins.
    first, second, third = find(result, "gen")[:3]
    assert first.start == moves
    assert second.start == pytest.approx(first.end)
    trained = find(result, "train")
    assert trained[0].start == pytest.approx(first.end)
    # The third batch waits for the weights of the first train step, and for their transfer.
    assert third.start == pytest.approx(max(trained[0].end, second.end) + moves)
    assert result.step_ends[0] == pytest.approx(trained[0].end)
    # Device 0 samples or receives weights all the time; training is shorter.
    assert sampling > training
    assert result.step_seconds == pytest.approx(sampling + moves)
    # Without staleness, one waits for the other.
    graph, problem = place_apart(0, GEN, TRAIN)
    result, _ = run(graph, problem, [0, 0], 2)
    assert result.step_seconds == pytest.approx(sampling + moves + training)


def test_batches_are_sampled_ahead_as_a_run_samples_them() -> None:
    """With a staleness of k, batches 0 to k are sampled before the first train step."""
    graph, problem = place_apart(2, GEN, TRAIN)
    result, _ = run(graph, problem, [0, 0], 3)
    sampled, trained = find(result, "gen"), find(result, "train")
    assert [span.start for span in sampled[1:3]] == [span.end for span in sampled[:2]]
    assert trained[0].start == sampled[0].end
    # Batch 3 waits for the first train step, batch 4 for the second.
    assert len(trained) == 3
    for batch, span in enumerate(sampled[3:], start=3):
        assert span.start >= trained[batch - 3].end


def test_spans_say_what_they_wait_for() -> None:
    graph, problem = place_apart(0, GEN, TRAIN)
    result, estimate = run(graph, problem, [0, 0], 2)
    train = find(result, "train")[1]
    assert train.describe_wait() == "waits for the outputs of gen"
    # Its device sent weights before, and was idle since then.
    assert train.waited == pytest.approx(estimate.seconds["gen"])
    moves = find(result, "gen", "weights")[1]
    assert moves.describe_wait() == "waits for the weights that train trains"
    graph, problem = place_apart(1, replace(GEN, new_tokens=20), TRAIN)
    result, _ = run(graph, problem, [0, 0], 4)
    waits = [span.describe_wait() for span in find(result, "gen", "weights")]
    assert waits[-1] == "waits for the weights that train trains"


def test_calls_on_one_device_take_turns() -> None:
    graph = build_rl_graph(0)
    meshes = {each.name: [Mesh(Layout(), (0,))] for each in graph.list_model_calls()}
    loads = {each.name: CallWorkload(each.method, 8, 20, 20) for each in graph.list_model_calls()}
    problem = build_problem(graph, meshes, loads, 1)
    result, estimate = run(graph, problem, [0] * 5, host_seconds={"adv": 2.0})
    assert result.step_seconds == pytest.approx(sum(estimate.seconds.values()) + 2.0)
    ref = find(result, "ref")[0]
    assert ref.describe_wait() == "ready earlier, but its devices run rew"
    assert ref.waited == pytest.approx(estimate.seconds["rew"])
    assert find(result, "adv", "host")[0].seconds == 2.0


def test_a_node_with_half_a_batch_runs_twice_a_step() -> None:
    half = replace(call("gen", "generate", [], "actor"), batch_size=2)
    graph = build_graph([half, call("train", "train_step", ["gen"], "actor")])
    meshes = {name: [Mesh(Layout(), (0,))] for name in ("gen", "train")}
    problem = build_problem(graph, meshes, {"gen": GEN, "train": TRAIN}, 1)
    result, estimate = run(graph, problem, [0, 0], 2)
    assert [span.step for span in find(result, "gen")] == [1, 1, 2, 2]
    assert find(result, "gen")[0].seconds == pytest.approx(estimate.seconds["gen"] / 2)
    assert result.step_seconds == pytest.approx(estimate.step_seconds)


# -- devices


def list_ranks(intervals: Iterable[tuple[int, int]]) -> list[int]:
    return [rank for first, stop in intervals for rank in range(first, stop)]


@pytest.mark.parametrize("seed", range(30))
def test_devices_of_a_group_belong_to_the_same_meshes(seed: int) -> None:
    draw = random.Random(seed)
    meshes = []
    for _ in range(draw.randint(1, 5)):
        size = draw.randint(1, 12)
        meshes.append(Mesh(Layout(data=size), tuple(sorted(draw.sample(range(16), size)))))
    groups = group_devices(meshes, 16)
    found = [rank for group in groups for rank in list_ranks(group.intervals)]
    assert sorted(found) == list(range(16))
    seen = []
    for group in groups:
        members = {
            frozenset(number for number, mesh in enumerate(meshes) if rank in mesh.ranks)
            for rank in list_ranks(group.intervals)
        }
        assert len(members) == 1
        assert group.num_devices == len(list_ranks(group.intervals))
        seen += members
    assert len(seen) == len(set(seen))


@pytest.mark.parametrize("staleness", [0, 2])
def test_the_cost_does_not_depend_on_the_number_of_devices(staleness: int) -> None:
    graph = build_rl_graph(staleness)
    counts = []
    for devices in (8, 128, 1024, 16384):
        half = devices // 2
        first = Mesh(Layout(data=half), tuple(range(half)))
        second = Mesh(Layout(data=half, fsdp=half), tuple(range(half, devices)))
        meshes = {each.name: [second] for each in graph.list_model_calls()}
        meshes["gen"] = meshes["rew"] = [first]
        loads = {each.name: CallWorkload(each.method, 8, 9, 9) for each in graph.list_model_calls()}
        problem = build_problem(graph, meshes, loads, devices)
        names = [name for unit in problem.units for name in unit.calls]
        # Durations are not part of the replay.
        estimate = PlacementEstimate(
            {name: meshes[name][0] for name in names},
            dict.fromkeys(names, 1.0),
            {name: {} for name in names},
            dict.fromkeys(names, 0.25),
            dict.fromkeys(names, 1.0),
            5.0,
            1.0,
            0.0,
        )
        simulate(graph, "train", problem, estimate, steps=10)  # fills caches of the interpreter
        counts.append(
            calls_of(lambda: simulate(graph, "train", problem, estimate, steps=10))  # noqa: B023
        )
    assert len(set(counts)) == 1, counts
