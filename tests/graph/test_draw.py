"""Graphs as SVG: everything is there, nothing overlaps, any name is text."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ElementTree

import pytest

from weft.graph.draw import HEIGHT, WIDTH, shorten_keys, to_svg
from weft.graph.graph import DataflowGraph
from weft.graph.layers import find_implied_edges, lay_out_graph
from weft.graph.mfc import HostFunction, MFCDef, ParamSync

SVG = "{http://www.w3.org/2000/svg}"
PAIR = ("prompt", "completion")


def ppo() -> DataflowGraph:
    return DataflowGraph(
        [
            MFCDef(
                "actor_gen",
                "actor",
                "generate",
                "generate",
                8,
                ("prompt",),
                ("completion", "logprobs"),
            ),
            MFCDef("rew_inf", "reward", "infer", "inference", 8, PAIR, ("rewards",)),
            MFCDef("ref_inf", "ref", "infer", "inference", 8, PAIR, ("ref_logprobs",)),
            MFCDef("critic_inf", "critic", "infer", "inference", 8, PAIR, ("values",)),
            HostFunction(
                "advantages",
                "gae",
                8,
                ("rewards", "ref_logprobs", "values"),
                ("advantages", "returns"),
            ),
            MFCDef(
                "actor_train", "actor", "train", "train_step", 8, (*PAIR, "advantages", "logprobs")
            ),
            MFCDef("critic_train", "critic", "train", "train_step", 8, (*PAIR, "returns")),
        ],
        ("prompt",),
        (ParamSync("actor", "ref", 0.1),),
    )


def drawn(graph: DataflowGraph) -> ElementTree.Element:
    return ElementTree.fromstring(to_svg(graph))


def classes(root: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [element for element in root.iter() if name in element.get("class", "").split()]


def test_every_node_and_edge_is_drawn() -> None:
    graph = ppo()
    root = drawn(graph)
    names = {element.text for element in classes(root, "name")}
    assert names == {"dataset", *graph.order}
    titles = [
        path.findtext(f"{SVG}title")
        for path in root.iter(f"{SVG}path")
        if "edge" in path.get("class", "").split()
    ]
    told = {title for title in titles if title}
    assert {f"{e.producer} to {e.consumer}: {', '.join(e.keys)}" for e in graph.edges} == told


def test_host_functions_have_another_shape_and_lines_their_own_style() -> None:
    root = drawn(ppo())
    assert [group.findtext(f"{SVG}text") for group in classes(root, "host")] == ["advantages"]
    assert all(group.find(f"{SVG}polygon") is not None for group in classes(root, "host"))
    lanes = [
        lane.findtext(f"{SVG}title")
        for lane in classes(root, "version")
        if lane.find(f"{SVG}title") is not None
    ]
    assert lanes == [
        "actor_gen runs on weights of actor_train",
        "critic_inf runs on weights of critic_train",
    ]
    (sync,) = (lane for lane in classes(root, "sync") if lane.find(f"{SVG}title") is not None)
    assert sync.findtext(f"{SVG}title") == "ref moves by 0.1 toward actor after actor_train"


def test_a_role_has_one_colour() -> None:
    root = drawn(ppo())
    kinds = {g.findtext(f"{SVG}text"): g.get("class", "").split()[1] for g in classes(root, "node")}
    assert (
        kinds["actor_gen"] == kinds["actor_train"] != kinds["critic_train"] == kinds["critic_inf"]
    )


def test_edges_that_follow_from_others_carry_no_label() -> None:
    labels = [element.text for element in classes(drawn(ppo()), "keys")]
    assert sorted(label for label in labels if label) == sorted(
        [
            "prompt",
            "completion",
            "completion",
            "completion",
            "rewards",
            "ref_logprobs",
            "values",
            "advantages",
            "returns",
        ]
    )


def test_nodes_do_not_overlap_and_lie_inside_the_picture() -> None:
    graph = DataflowGraph(
        [
            HostFunction(
                f"n{i}", "f", 1, tuple(f"k{j}" for j in range(i) if (i * 7 + j) % 3), (f"k{i}",)
            )
            for i in range(14)
        ]
    )
    root = drawn(graph)
    spots = []
    for group in classes(root, "node"):
        name = group.find(f"{SVG}text")
        assert name is not None
        spots.append((float(name.get("x", "")), float(name.get("y", ""))))
    left, top, width, height = (float(value) for value in root.get("viewBox", "").split())
    for (x, y), (u, v) in itertools.combinations(spots, 2):
        assert abs(x - u) >= WIDTH or abs(y - v) >= HEIGHT
    assert all(
        left + WIDTH / 2 <= x <= left + width - WIDTH / 2 and top <= y <= top + height
        for x, y in spots
    )


@pytest.mark.parametrize(
    "name", ["<script>alert(1)</script>", 'a"b&c', "a very long name of a call that does not fit"]
)
def test_any_name_is_text(name: str) -> None:
    root = drawn(DataflowGraph([HostFunction(name, name, 1, ("x",), (name,))], ("x",)))
    assert name in {element.text for element in classes(root, "name")}
    assert not list(root.iter(f"{SVG}script"))


def test_the_picture_needs_nothing_from_outside() -> None:
    text = to_svg(ppo()).replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|@import|href=", text)
    assert "prefers-color-scheme:dark" in text


def test_a_graph_without_rows_or_edges_is_drawn() -> None:
    assert {
        e.text for e in classes(drawn(DataflowGraph([HostFunction("alone", "f", 1)])), "name")
    } == {"alone"}


def test_implied_edges_are_those_with_a_longer_way() -> None:
    edges = [("a", "b"), ("b", "c"), ("a", "c"), ("a", "d")]
    assert find_implied_edges(["a", "b", "c", "d"], edges) == {("a", "c")}


def test_layers_go_down_and_bundled_edges_share_a_trunk() -> None:
    names = ["a", "b", "c", "d", "e"]
    edges = [("a", "b"), ("b", "c"), ("c", "d"), ("c", "e"), ("a", "d"), ("a", "e")]
    placed = lay_out_graph(names, edges, {("a", "d"), ("a", "e")}, 100, 20)
    assert dict(placed.layer) == {"a": 0, "b": 1, "c": 2, "d": 3, "e": 3}
    assert placed.bends["a", "d"] == placed.bends["a", "e"] and [
        layer for _, layer in placed.bends["a", "d"]
    ] == [1, 2]
    assert abs(placed.x["d"] - placed.x["e"]) >= 100


def test_keys_are_shortened_to_fit() -> None:
    assert shorten_keys(["prompt", "completion"]) == "prompt, completion"
    assert shorten_keys(["prompt", "completion", "logprobs", "versions"]) == "prompt, completion +2"
    assert (
        shorten_keys(["one_key_that_is_longer_than_any_edge"])
        == "one_key_that_is_longer_than_any_edge"
    )
