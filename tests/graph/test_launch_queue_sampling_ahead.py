"""What is sampled ahead of training, and how far."""

from __future__ import annotations

from tests.graph.test_ready import ppo
from weft.graph.launch_queue import can_run_ahead, choose_first, find_oldest, may_load
from weft.graph.ready import Firing, IdBuffer, find_ready_firings


def test_calls_that_may_run_ahead_come_first_and_training_last() -> None:
    graph = ppo(2, staleness=1)
    firings = [
        Firing("actor_train", ("0", "1"), 0),
        Firing("gen", ("2", "3"), 1),
        Firing("critic_train", ("0", "1"), 0),
    ]
    reward = Firing("reward", ("0", "1"), 0)
    assert choose_first(graph, [reward, *firings]) == firings[1:2]
    assert choose_first(graph, [reward, firings[0]]) == [reward]
    assert choose_first(graph, [firings[0], firings[2]]) == [firings[0], firings[2]]
    assert can_run_ahead(graph) and not can_run_ahead(ppo(2))


def sampled(staleness: int, batches: int, size: int = 2) -> IdBuffer:
    """A buffer in which all rows of so many batches of two have been sampled, and nothing has been
    trained.
    """
    buffer = IdBuffer()
    for number in range(batches):
        buffer.add([f"{number}a", f"{number}b"], ["prompt"])
        (firing,) = [
            f
            for f in find_ready_firings(ppo(size, staleness), buffer, buffer.num_finished, [])
            if f.node == "gen"
        ]
        buffer.record_start(firing)
        buffer.record_finish(firing, firing.ids, ["completion"], 9)
    return buffer


def test_rows_are_loaded_as_far_as_weights_may_lag() -> None:
    for staleness in (1, 3):
        graph = ppo(2, staleness)
        for batches in range(1, staleness + 1):
            assert may_load(graph, sampled(staleness, batches), {}, "actor_train", None)
        full = sampled(staleness, staleness + 1)
        assert not may_load(graph, full, {}, "actor_train", None)
    assert not may_load(ppo(2), sampled(0, 1), {}, "actor_train", None)


def test_no_rows_are_loaded_beyond_the_last_step_or_the_end_of_an_epoch() -> None:
    graph, buffer = ppo(2, 3), sampled(3, 2)
    assert may_load(graph, buffer, {}, "actor_train", 3)
    assert not may_load(graph, buffer, {}, "actor_train", 2)
    buffer.closed = True
    assert not may_load(graph, buffer, {}, "actor_train", None)


def test_rows_in_batches_of_the_loader_count_as_batches() -> None:
    graph, buffer = ppo(0, 3), sampled(3, 2, size=0)
    assert may_load(graph, buffer, {}, "actor_train", 3)
    assert not may_load(graph, buffer, {}, "actor_train", 2)
    assert not may_load(graph, sampled(3, 4, size=0), {}, "actor_train", 9)


def test_what_is_closed_first_is_of_the_oldest_ids() -> None:
    buffer = IdBuffer()
    buffer.add(["a", "b", "c", "d"], ["prompt"])
    ahead, first, second = (
        Firing("filter", ("c", "d"), 1),
        Firing("advantages", ("a", "b"), 0),
        Firing("more", ("a",), 0),
    )
    assert find_oldest(buffer, [ahead, first, second]) is first
