"""Laws of the agenda, with ends in an order drawn at random."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graph.test_ready import SIZES, ppo
from weft.graph.launch_queue import LaunchQueue, choose_first
from weft.graph.mfc import MFCDef
from weft.graph.ready import Firing, IdBuffer, find_ready_firings


def taken(agenda: LaunchQueue) -> list[tuple[str, tuple[str, ...]]]:
    return [(each.firing.node, each.firing.ids) for each in agenda.take()]


def decided(graph, num_ids: int, lanes=None) -> tuple[LaunchQueue, list[Firing], dict[str, int]]:
    """Everything that an epoch of `num_ids` ids amounts to, decided before any of it begins."""
    over: dict[str, int] = {}
    agenda, buffer, log = LaunchQueue(graph, over, lanes), IdBuffer(closed=True), list[Firing]()
    buffer.add([str(i) for i in range(num_ids)], ["prompt"])
    while firings := find_ready_firings(graph, buffer, buffer.num_finished, []):
        firings = choose_first(graph, firings) if lanes else firings
        for firing in firings:
            buffer.record_start(firing)
            agenda.add(firing, buffer)
            log.append(firing)
        for firing in firings:
            buffer.record_finish(
                firing, firing.ids, graph.get_node(firing.node).outputs, len(graph.nodes)
            )
    return agenda, log, over


@settings(max_examples=60, deadline=None)
@given(SIZES, st.integers(0, 1), st.integers(1, 12), st.booleans(), st.data())
def test_firings_begin_when_what_they_read_is_there_and_calls_in_the_order_they_were_decided_in(
    sizes, staleness, num_ids, ref_follows, data
):
    graph = ppo(sizes, staleness, ref_follows)
    agenda, log, over = decided(graph, num_ids)
    begun, running, through = list[Firing](), list[Firing](), set[tuple[str, str]]()
    while agenda or running:
        for firing in [each.firing for each in agenda.take()]:
            for id in firing.ids:
                assert all(
                    (producer, id) in through for producer in graph.find_producers(firing.node)
                )
            for edge in graph.find_version_edges(firing.node):
                trained = [f for f in log[: log.index(firing)] if f.node == edge.producer]
                assert over.get(edge.producer, 0) >= len(trained), "the weights are in place"
            assert firing.node not in {other.node for other in running}, (
                "a node does not run beside itself"
            )
            begun.append(firing)
            running.append(firing)
        assert running, "nothing runs and nothing may begin"
        end = running.pop(data.draw(st.integers(0, len(running) - 1)))
        over[end.node] = over.get(end.node, 0) + 1
        through |= {(end.node, id) for id in end.ids}
    assert sorted(begun, key=log.index) == log
    lanes: dict[str, list[Firing]] = {}
    for firing in begun:
        node = graph.get_node(firing.node)
        if isinstance(node, MFCDef):
            lanes.setdefault(node.role if staleness else "", []).append(firing)
    for calls in lanes.values():
        assert calls == sorted(calls, key=log.index)


def test_weights_that_may_be_old_let_a_role_overtake_another():
    graph = ppo(1, staleness=1)
    agenda, _, over = decided(graph, 2)
    assert [node for node, _ in taken(agenda)] == ["gen"]
    over["gen"] = 1
    assert taken(agenda) == [("ref_inf", ("0",)), ("reward", ("0",)), ("gen", ("1",))]
    over["reward"] = 1
    assert [node for node, _ in taken(agenda)] == ["filter"]
    over["filter"] = 1
    assert [node for node, _ in taken(agenda)] == ["critic_inf"], (
        "ref_inf and gen still run, and are decided on before it"
    )


def test_training_does_not_wait_for_calls_with_a_lane_of_their_own_and_keeps_the_weights_that_they_want():
    """With weights up to 2 steps old: completions 1 and 2 are sampled with the first weights,
    completion 3 with the next.
    """
    agenda, _, over = decided(ppo(1, staleness=2), 4, {"gen": "copy"})

    def go(*ends: str) -> list[tuple[str, int, int | None, bool]]:
        for node in ends:
            over[node] = over.get(node, 0) + 1
        found = [
            (each.firing.node, each.firing.step, each.version, each.needs_old_weights)
            for each in agenda.take()
        ]
        return [each for each in found if each[0] in ("gen", "actor_train")]

    assert go() == [("gen", 0, 0, False)]
    assert go("gen") == [("gen", 1, 0, False)]
    go("reward", "ref_inf")
    go("filter")
    go("critic_inf")
    assert go("advantages") == [("actor_train", 0, None, True)], (
        "the sampling of 1 goes on, that of 2 has not begun"
    )
    assert go("actor_train") == []
    assert go("gen") == [("gen", 2, 0, False)]
    assert go("gen") == [("gen", 3, 1, False)]
