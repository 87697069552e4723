"""The graph's edges, and the words of its refusals."""

from __future__ import annotations

import pytest

from weft.errors import ConfigError, GraphError
from weft.graph.graph import DataflowGraph, KeyEdge, VersionEdge
from weft.graph.mfc import HostFunction, MFCDef, ParamSync


def gen(**changes):
    fields = {"input_keys": ["prompt"], "output_keys": ["completion", "logprobs"], "batch_size": 4}
    return MFCDef("actor_gen", "actor", "generate", "generate", **(fields | changes))


def ref(**changes):
    fields = {
        "input_keys": ["prompt", "completion"],
        "output_keys": ["logprobs"],
        "output_key_remap": {"logprobs": "ref_logprobs"},
        "batch_size": 4,
    }
    return MFCDef("ref_inf", "ref", "infer", "inference", **(fields | changes))


def train(**changes):
    fields = {"input_keys": ["prompt", "completion", "logprobs", "ref_logprobs"], "batch_size": 4}
    return MFCDef("actor_train", "actor", "train", "train_step", **(fields | changes))


def test_edges_come_from_keys_with_their_remaps():
    graph = DataflowGraph([train(), gen(), ref()], ["prompt"])
    assert graph.order == ("actor_gen", "ref_inf", "actor_train")
    assert set(graph.edges) == {
        KeyEdge("dataset", "actor_gen", ("prompt",)),
        KeyEdge("dataset", "ref_inf", ("prompt",)),
        KeyEdge("actor_gen", "ref_inf", ("completion",)),
        KeyEdge("dataset", "actor_train", ("prompt",)),
        KeyEdge("actor_gen", "actor_train", ("completion", "logprobs")),
        KeyEdge("ref_inf", "actor_train", ("ref_logprobs",)),
    }
    assert graph.find_producers("actor_train") == ("actor_gen", "ref_inf")


def test_input_remap_reads_another_key():
    reads = HostFunction(
        "adv", "f", 4, input_keys=["rewards"], input_key_remap={"rewards": "scores"}
    )
    maker = MFCDef("rew", "reward", "infer", "inference", 4, ["completion"], ["scores"])
    graph = DataflowGraph([reads, maker], ["completion"])
    assert KeyEdge("rew", "adv", ("scores",)) in graph.edges


def test_optional_keys_make_edges_only_where_somebody_makes_them():
    node = train(input_keys=["completion"], optional_keys=["loss_mask", "margin", "logprobs"])
    graph = DataflowGraph([node, gen()], ["prompt", "margin"])
    assert {e.producer: e.keys for e in graph.edges if e.consumer == "actor_train"} == {
        "actor_gen": ("completion", "logprobs"),
        "dataset": ("margin",),
    }
    assert graph.find_required_dataset_keys() == {"prompt": "actor_gen"}


def test_version_edges_come_from_training_and_from_syncs():
    graph = DataflowGraph(
        [gen(max_staleness=1), ref(), train()],
        ["prompt"],
        [ParamSync("actor", "ref", 0.1, "actor_train")],
    )
    assert set(graph.version_edges) == {
        VersionEdge("actor_train", "actor_gen", 1),
        VersionEdge("actor_train", "ref_inf", 0),
    }
    assert DataflowGraph([gen(), ref(), train()], ["prompt"]).find_version_edges("ref_inf") == ()


def test_a_sync_without_after_follows_the_training_of_its_source():
    graph = DataflowGraph([gen(), ref(), train()], ["prompt"], [ParamSync("actor", "ref", 0.5)])
    assert graph.syncs[0].after == "actor_train"


def test_a_missing_key_names_the_node_the_key_and_what_there_is():
    with pytest.raises(GraphError) as caught:
        DataflowGraph([gen(), train()], ["prompt"])
    text = str(caught.value)
    assert "'actor_train' reads key 'ref_logprobs'" in text
    assert (
        "prompt (dataset)" in text
        and "logprobs (actor_gen)" in text
        and "did you mean logprobs" in text
    )


def test_a_cycle_names_the_nodes_and_keys_on_it():
    nodes = [
        HostFunction("a", "f", 4, input_keys=["z"], output_keys=["x"]),
        HostFunction("b", "f", 4, input_keys=["x"], output_keys=["y"]),
        HostFunction("c", "f", 4, input_keys=["y"], output_keys=["z"]),
        HostFunction("d", "f", 4, input_keys=["z"]),
    ]
    with pytest.raises(GraphError, match="cycle") as caught:
        DataflowGraph(nodes)
    for words in ("'a' reads z of 'c'", "'b' reads x of 'a'", "'c' reads y of 'b'"):
        assert words in str(caught.value)
    assert "'d'" not in str(caught.value)


def test_a_node_that_wants_its_own_key_is_a_cycle():
    with pytest.raises(GraphError, match="'a' reads x of 'a'"):
        DataflowGraph([HostFunction("a", "f", 4, input_keys=["x"], output_keys=["x"])], ["x"])


@pytest.mark.parametrize(
    ("nodes", "syncs", "words"),
    [
        ([gen(), gen()], [], "name of two nodes"),
        ([], [], "no nodes"),
        ([gen(), ref(output_key_remap={})], [], "made by node 'actor_gen' and by node 'ref_inf'"),
        ([gen(batch_size=-1)], [], "batch_size=-1"),
        ([gen(max_staleness=-1)], [], "max_staleness=-1"),
        ([gen(output_key_remap={"scores": "x"})], [], "not one of its keys"),
        ([gen()], [ParamSync("actor", "ref")], "node that trains 'actor'"),
        ([gen()], [ParamSync("actor", "ref", 1.0, "x")], "after 'x'"),
        ([gen()], [ParamSync("actor", "actor", 1.0, "actor_gen")], "different roles"),
        ([gen()], [ParamSync("actor", "ref", 0.0, "actor_gen")], "eta=0.0"),
    ],
)
def test_what_cannot_be_a_graph_is_refused(nodes, syncs, words):
    with pytest.raises(GraphError, match=words):
        DataflowGraph(nodes, ["prompt"], syncs)


def test_an_unknown_node_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="actor_gen"):
        DataflowGraph([gen()], ["prompt"]).get_node("actor_gne")
