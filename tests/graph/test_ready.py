"""Laws of the schedule, on graphs and batch sizes drawn at random."""

from __future__ import annotations

import json
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.work import calls_of
from weft.graph.graph import DataflowGraph
from weft.graph.mfc import HostFunction, MFCDef, ParamSync
from weft.graph.ready import (
    Firing,
    IdBuffer,
    find_exhausted_filter,
    find_ready_firings,
    find_surplus,
    needs_rows,
)


def ppo(
    sizes: dict[str, int] | int = 4, staleness: int = 0, ref_follows: bool = False, rounds: int = 0
) -> DataflowGraph:
    size = sizes if isinstance(sizes, dict) else defaultdict(lambda: sizes)
    nodes = [
        MFCDef(
            "gen",
            "actor",
            "g",
            "generate",
            size["gen"],
            ["prompt"],
            ["completion"],
            max_staleness=staleness,
        ),
        MFCDef(
            "ref_inf",
            "ref",
            "i",
            "inference",
            size["ref_inf"],
            ["completion"],
            ["ref"],
            max_staleness=staleness,
        ),
        HostFunction("reward", "r", size["reward"], ["completion"], ["rewards"]),
        HostFunction("filter", "f", size["filter"], ["rewards"], ["kept"], refill_rounds=rounds),
        MFCDef(
            "critic_inf",
            "critic",
            "i",
            "inference",
            size["critic_inf"],
            ["kept"],
            ["values"],
            max_staleness=staleness,
        ),
        HostFunction("advantages", "a", size["advantages"], ["values", "ref", "kept"], ["adv"]),
        MFCDef("actor_train", "actor", "t", "train_step", size["actor_train"], ["adv"]),
        MFCDef("critic_train", "critic", "t", "train_step", size["critic_train"], ["adv"]),
    ]
    return DataflowGraph(
        nodes, ["prompt"], [ParamSync("actor", "ref", 0.1, "actor_train")] if ref_follows else []
    )


class Simulation:
    """A loader, a filter and workers that finish at once: what is left is the schedule."""

    def __init__(
        self, graph: DataflowGraph, num_ids: int, batch: int, epochs: int = 1, drop=lambda id: False
    ) -> None:
        self.graph, self.drop = graph, drop
        self.epochs = [[f"{e}-{i}" for i in range(num_ids)] for e in range(epochs)]
        self.batch, self.buffer, self.versions = batch, IdBuffer(), {}
        self.log: list[Firing] = []
        self.surplus: list[str] = []
        # (node, id) -> versions when it was taken
        self.used: dict[tuple[str, str], dict[str, int]] = {}

    def run(self) -> Simulation:
        for ids in self.epochs:
            waiting = list(ids)
            self.buffer.closed = False
            while waiting or self.buffer.entries:
                firings = find_ready_firings(self.graph, self.buffer, self.versions, [])
                if firings:
                    self.fire(firings[0])
                    continue
                assert waiting and needs_rows(self.graph, self.buffer, self.versions), (
                    "the schedule is stuck"
                )
                self.buffer.add(waiting[: self.batch], ["prompt"])
                waiting = waiting[self.batch :]
                self.buffer.closed = not waiting
        return self

    def fire(self, firing: Firing) -> None:
        self.buffer.record_start(firing)
        self.log.append(firing)
        for id in firing.ids:
            self.used[firing.node, id] = dict(self.versions)
        node = self.graph.get_node(firing.node)
        kept = [i for i in firing.ids if not (firing.node == "filter" and self.drop(i))]
        self.buffer.record_finish(firing, kept, node.outputs, len(self.graph.nodes))
        self.versions[firing.node] = self.versions.get(firing.node, 0) + 1
        left_over = find_surplus(self.graph, self.buffer, firing.node)
        self.surplus += left_over
        self.buffer.drop(left_over)
        here = [entry for _, entry in self.buffer.entries.items()]
        assert +self.buffer.num_ids_started == Counter(
            node for entry in here for node in entry.started
        )
        assert +self.buffer.num_ids_finished == Counter(
            node for entry in here for node in entry.finished
        )

    def ids(self, node: str) -> list[str]:
        return [id for f in self.log if f.node == node for id in f.ids]


NAMES = [n.name for n in ppo().nodes]
SIZES = st.fixed_dictionaries({name: st.integers(1, 7) for name in NAMES})


@settings(max_examples=60, deadline=None)
@given(
    SIZES,
    st.integers(0, 2),
    st.integers(1, 25),
    st.integers(1, 6),
    st.booleans(),
    st.sets(st.integers(0, 24)),
)
def test_every_id_goes_through_every_node_once_and_weights_are_never_too_old(
    sizes, staleness, num_ids, batch, ref_follows, dropped
):
    graph = ppo(sizes, staleness, ref_follows)
    drop = lambda id: int(id.split("-")[1]) in dropped  # noqa: E731
    done = Simulation(graph, num_ids, batch, epochs=2, drop=drop).run()
    everything = [id for epoch in done.epochs for id in epoch]
    kept = [id for id in everything if not drop(id)]
    for name in NAMES:
        seen = done.ids(name)
        assert len(seen) == len(set(seen)), "an id goes through a node once"
        assert [i for i in seen if not drop(i)] == kept, "in loader order, none lost"
    assert all(len(f.ids) <= sizes[f.node] for f in done.log)
    for edge in graph.version_edges:
        for id in kept:
            age = done.used[edge.producer, id].get(edge.producer, 0) - done.used[
                edge.consumer, id
            ].get(edge.producer, 0)
            assert 0 <= age <= edge.max_staleness
    assert not done.buffer.entries
    for name in NAMES:
        steps = [f.step for f in done.log if f.node == name]
        assert steps == list(range(len(steps)))


@given(st.integers(1, 30), st.integers(1, 8), st.integers(1, 8))
def test_without_a_filter_only_the_last_batch_of_an_epoch_is_short(num_ids, size, batch):
    done = Simulation(ppo(size), num_ids, batch, epochs=2).run()
    for name in NAMES:
        expected = 2 * ([size] * (num_ids // size) + ([num_ids % size] if num_ids % size else []))
        assert [len(f.ids) for f in done.log if f.node == name] == expected


def test_a_filter_is_refilled_before_training():
    dropped = {"0-0", "0-1", "0-5", "0-9"}
    done = Simulation(ppo(4), 12, 4, drop=dropped.__contains__).run()
    assert [len(f.ids) for f in done.log if f.node == "actor_train"] == [4, 4]
    assert [len(f.ids) for f in done.log if f.node == "gen"][:2] == [4, 2], (
        "only what is missing is sampled again"
    )
    assert set(done.ids("critic_inf")).isdisjoint(dropped)


def sizes_of(done: Simulation, node: str) -> list[int]:
    return [len(f.ids) for f in done.log if f.node == node]


def test_a_filter_that_refills_samples_whole_batches():
    dropped = {f"0-{i}" for i in (0, 1, 2, 5, 8, 13)}
    done = Simulation(ppo(4, rounds=5), 24, 4, drop=dropped.__contains__).run()
    assert sizes_of(done, "gen") == [4] * 6, "never fewer than a batch"
    assert sizes_of(done, "actor_train") == [4, 4, 4, 4]
    trained = [3, 4, 6, 7, 9, 10, 11, 12, *range(16, 24)]
    assert done.ids("actor_train") == [f"0-{i}" for i in trained]
    assert done.surplus == ["0-14", "0-15"]
    assert set(done.ids("actor_train")).isdisjoint(dropped)


def test_what_a_refill_brings_too_much_is_let_go_of():
    dropped = {"0-0"}
    done = Simulation(ppo(4, rounds=5), 12, 4, drop=dropped.__contains__).run()
    assert done.ids("actor_train") == [
        "0-1",
        "0-2",
        "0-3",
        "0-4",
        *(f"0-{i}" for i in range(8, 12)),
    ]
    assert done.surplus == ["0-5", "0-6", "0-7"], "sampled with weights that are old by then"
    lagging = Simulation(ppo(4, staleness=1, rounds=5), 12, 4, drop=dropped.__contains__).run()
    assert len(lagging.ids("actor_train")) >= len(done.ids("actor_train"))


def test_rounds_are_bounded_and_what_is_there_is_trained_on():
    keep = {"0-3", "0-9"}
    done = Simulation(
        ppo(4, rounds=3), 40, 4, drop=lambda id: id not in keep and int(id[2:]) < 20
    ).run()
    assert sizes_of(done, "actor_train")[0] == 2, "two of twelve"
    assert [f.node for f in done.log].index("actor_train") > [
        i for i, f in enumerate(done.log) if f.node == "gen"
    ][2]


def test_rounds_that_leave_nothing_are_seen():
    graph, buffer = ppo(2, rounds=2), IdBuffer()
    for first in range(2):
        buffer.add([f"{first}a", f"{first}b"], ["prompt"])
        for name in ("gen", "ref_inf", "reward", "filter"):
            firing = next(f for f in find_ready_firings(graph, buffer, {}, []) if f.node == name)
            buffer.record_start(firing)
            kept = () if name == "filter" else firing.ids
            buffer.record_finish(firing, kept, graph.get_node(name).outputs, 8)
        assert (find_exhausted_filter(graph, buffer) is not None) == (first == 1)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2),
    st.integers(1, 30),
    st.integers(1, 6),
    st.integers(1, 5),
    st.sets(st.integers(0, 29)),
)
def test_no_weights_are_too_old_behind_a_filter_that_refills(
    staleness, num_ids, batch, size, dropped
):
    drop = lambda id: int(id.split("-")[1]) in dropped  # noqa: E731
    graph = ppo(size, staleness, rounds=100)
    done = Simulation(graph, num_ids, batch, epochs=2, drop=drop).run()
    everything = [id for epoch in done.epochs for id in epoch]
    kept = [id for id in everything if not drop(id)]
    for name in ("advantages", "actor_train", "critic_train"):
        seen = done.ids(name)
        assert seen == [id for id in kept if id in set(seen)] and len(seen) == len(set(seen))
    assert set(kept) - set(done.ids("actor_train")) == set(done.surplus)
    for edge in graph.version_edges:
        for id in done.ids("actor_train"):
            age = done.used[edge.producer, id].get(edge.producer, 0) - done.used[
                edge.consumer, id
            ].get(edge.producer, 0)
            assert 0 <= age <= edge.max_staleness
    assert not done.buffer.entries


def test_generation_waits_for_the_weights_of_the_step_before():
    graph, buffer = ppo(2), IdBuffer()
    buffer.add(["a", "b", "c", "d"], ["prompt"])
    first = find_ready_firings(graph, buffer, {}, [])
    assert first == [Firing("gen", ("a", "b"), 0)]
    buffer.record_start(first[0])
    assert find_ready_firings(graph, buffer, {}, first) == []
    buffer.record_finish(first[0], first[0].ids, ["completion"], 8)
    assert [f.node for f in find_ready_firings(graph, buffer, {}, [])] == ["ref_inf", "reward"], (
        "both at the same time"
    )
    lagging = ppo(2, staleness=1)
    assert [f.node for f in find_ready_firings(lagging, buffer, {}, [])] == [
        "ref_inf",
        "reward",
        "gen",
    ], "oldest ids first"


def test_training_under_way_holds_generation_back_until_its_weights_are_in_place():
    graph = DataflowGraph(
        [
            MFCDef("gen", "actor", "g", "generate", 1, ["prompt"], ["completion"]),
            MFCDef("train", "actor", "t", "train_step", 1, ["completion"]),
        ],
        ["prompt"],
    )
    buffer = IdBuffer()
    buffer.add(["a", "b"], ["prompt"])
    for name in ("gen", "train"):
        (firing,) = find_ready_firings(graph, buffer, {}, [])
        assert firing.node == name
        buffer.record_start(firing)
        if name == "gen":
            buffer.record_finish(firing, firing.ids, ["completion"], 2)
    assert find_ready_firings(graph, buffer, {"train": 0}, [firing]) == []
    assert find_ready_firings(graph, buffer, {"train": 1}, [])[0] == Firing("gen", ("b",), 1)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(0, 1))
def test_batch_size_0_takes_the_batches_of_the_loader(sizes, staleness):
    graph = ppo(0, staleness)
    buffer, versions, seen, number = IdBuffer(), {}, [], 0
    for i, size in enumerate(sizes):
        buffer.add([f"{number + j}" for j in range(size)], ["prompt"])
        number += size
        buffer.closed = i == len(sizes) - 1
        while firings := find_ready_firings(graph, buffer, versions, []):
            firing = firings[0]
            buffer.record_start(firing)
            buffer.record_finish(firing, firing.ids, graph.get_node(firing.node).outputs, 8)
            versions[firing.node] = versions.get(firing.node, 0) + 1
            seen.append(firing)
    assert not buffer.entries
    for name in NAMES:
        assert [len(f.ids) for f in seen if f.node == name] == sizes


def test_ready_changes_nothing_and_the_buffer_survives_a_restart():
    graph, buffer = ppo(4, staleness=1), IdBuffer()
    buffer.add([str(i) for i in range(10)], ["prompt"])
    for _ in range(4):
        firing = find_ready_firings(graph, buffer, {}, [])[0]
        buffer.record_start(firing)
        buffer.record_finish(firing, firing.ids[1:], graph.get_node(firing.node).outputs, 8)
    before = json.dumps(buffer.state_dict())
    expected = find_ready_firings(graph, buffer, {}, [])
    assert json.dumps(buffer.state_dict()) == before
    other = IdBuffer()
    other.load_state_dict(json.loads(before))
    assert find_ready_firings(graph, other, {}, []) == expected and list(other.entries) == list(
        buffer.entries
    )


def pass_through(num_ids: int) -> None:
    """One batch through every node, each of which takes all of it."""
    graph, buffer, versions = ppo(num_ids), IdBuffer(), {}
    buffer.add([str(i) for i in range(num_ids)], ["prompt"])
    buffer.closed = True
    while firings := find_ready_firings(graph, buffer, versions, []):
        firing = firings[0]
        buffer.record_start(firing)
        buffer.record_finish(firing, firing.ids, graph.get_node(firing.node).outputs, 8)
        versions[firing.node] = 1
    assert not buffer.entries


def test_ids_that_go_together_cost_as_much_as_one():
    assert calls_of(lambda: pass_through(1_000)) == calls_of(lambda: pass_through(10))


def test_blocks_are_split_where_nodes_take_parts_of_them_and_keep_the_loaders_order():
    graph, buffer = ppo({**dict.fromkeys(NAMES, 4), "gen": 2}), IdBuffer()
    buffer.add(["a", "b", "c", "d"], ["prompt"])
    for _ in range(2):
        firing = find_ready_firings(graph, buffer, {}, [])[0]
        buffer.record_start(firing)
        buffer.record_finish(firing, firing.ids, ["completion"], 8)
    assert sorted("".join(block.ids) for block in buffer.entries.blocks) == ["ab", "cd"]
    firing = next(
        each for each in find_ready_firings(graph, buffer, {}, []) if each.node == "reward"
    )
    assert firing.ids == ("a", "b", "c", "d")
    buffer.record_start(firing)
    assert buffer.record_finish(firing, ["a", "d"], ["rewards"], 8) == ["b", "c"] and list(
        buffer.entries
    ) == ["a", "d"]


def test_a_loader_that_repeats_an_id_is_caught():
    buffer = IdBuffer()
    buffer.add(["a"], ["prompt"])
    with pytest.raises(AssertionError, match="'a' twice"):
        buffer.add(["a"], ["prompt"])
    with pytest.raises(AssertionError, match="'b' twice"):
        IdBuffer().add(["a", "b", "b"], ["prompt"])
