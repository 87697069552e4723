"""`insert_after`: a node behind another, whose keys it changes on the way."""

from __future__ import annotations

import pytest

from weft.errors import GraphError
from weft.graph.graph import DataflowGraph
from weft.graph.mfc import HostFunction, MFCDef


def chain() -> DataflowGraph:
    sample = MFCDef(
        "gen", "actor", "generate", "generate", 8, ("prompt",), ("completion", "logprobs")
    )
    reward = HostFunction("reward", "reward", 8, ("prompt", "completion"), ("rewards",))
    train = MFCDef(
        "train", "actor", "train", "train_step", 8, ("prompt", "completion", "rewards", "logprobs")
    )
    return DataflowGraph([sample, reward, train], ["prompt"])


def edges(graph: DataflowGraph) -> set[tuple[str, str, tuple[str, ...]]]:
    return {(edge.producer, edge.consumer, edge.keys) for edge in graph.edges}


def centre(name: str = "centre") -> HostFunction:
    return HostFunction(name, "centre", 0, ("rewards",), ("rewards",))


def test_what_both_make_comes_from_the_new_node() -> None:
    graph = chain().insert_after("reward", centre())
    assert graph.order == ("gen", "reward", "centre", "train")
    assert ("reward", "centre", ("rewards_before_centre",)) in edges(graph)
    assert ("centre", "train", ("rewards",)) in edges(graph)
    assert graph.node("centre").batch_size == 8
    assert graph.node("reward").outputs == ("rewards_before_centre",)
    assert graph.node("centre").input_keys == ("rewards",), (
        "the function sees its own name of the key"
    )


def test_two_stand_in_a_row() -> None:
    graph = chain().insert_after("reward", centre()).insert_after("centre", centre("clip"))
    assert graph.order == ("gen", "reward", "centre", "clip", "train")
    assert ("clip", "train", ("rewards",)) in edges(graph)
    between = chain().insert_after("reward", centre()).insert_after("reward", centre("clip"))
    assert between.order == ("gen", "reward", "clip", "centre", "train")


def test_other_keys_pass_by() -> None:
    graph = chain().insert_after(
        "gen", HostFunction("scale", "scale", 4, ("prompt", "logprobs"), ("logprobs", "extra"))
    )
    assert ("gen", "train", ("completion",)) in edges(graph)
    assert ("gen", "scale", ("logprobs_before_scale",)) in edges(graph)
    assert ("scale", "train", ("logprobs",)) in edges(graph)
    assert graph.node("scale").batch_size == 4


def test_a_node_that_reads_nothing_of_it_is_refused() -> None:
    with pytest.raises(GraphError, match="'odd' reads prompt, but 'reward' makes rewards"):
        chain().insert_after("reward", HostFunction("odd", "odd", 0, ("prompt",), ("rewards",)))
