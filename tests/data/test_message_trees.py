"""Open-Assistant's trees: the kinds of lines, invalid ones, threads, rankings and prompts."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from weft.data import message_trees
from weft.data.message_trees import TreeFilter
from weft.data.rows import BadRow


def node(name: str, *replies: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a message named after its speaker: p.. for the prompter, a.. for the assistant."""
    role = "prompter" if name.startswith("p") else "assistant"
    usual = {
        "message_id": name,
        "text": f"text of {name}",
        "role": role,
        "lang": "en",
        "review_result": True,
    }
    return {**usual, "deleted": False, "synthetic": False, "replies": list(replies), **more}


def tree(root: dict[str, Any], state: str = "ready_for_export") -> dict[str, Any]:
    return {"message_tree_id": root["message_id"], "tree_state": state, "prompt": root}


def named(paths: Any) -> list[list[str]]:
    return [[each["message_id"] for each in path] for path in paths]


BRANCHED = tree(
    node(
        "p0",
        node("a1", node("p2", node("a3", rank=0), node("a4", rank=1)), node("p5"), rank=1),
        node("a6", node("p7"), node("p8"), rank=0),
        node("a9", rank=2, synthetic=True),
        node("a10", rank=3, deleted=True),
    )
)


def test_threads_end_with_the_assistant_and_come_once() -> None:
    # p5 follows a branch that goes on; p7 and p8 both end at a6, which is one thread
    assert named(message_trees.iterate_threads(BRANCHED, TreeFilter())) == [
        ["p0", "a1", "p2", "a3"],
        ["p0", "a1", "p2", "a4"],
        ["p0", "a6"],
    ]
    assert ["p0", "a9"] in named(
        message_trees.iterate_threads(BRANCHED, TreeFilter(synthetic=True))
    )
    assert ["p0", "a10"] in named(message_trees.iterate_threads(BRANCHED, TreeFilter(deleted=True)))


def test_rankings_are_by_rank_and_prompts_are_all_of_them() -> None:
    found = [
        (path[-1]["message_id"], named([replies])[0])
        for path, replies in message_trees.iterate_rankings(BRANCHED, TreeFilter())
    ]
    assert found == [("p0", ["a6", "a1"]), ("p2", ["a3", "a4"])]
    assert named(message_trees.iterate_prompts(BRANCHED, TreeFilter())) == [
        ["p0"],
        ["p0", "a1", "p2"],
        ["p0", "a1", "p5"],
        ["p0", "a6", "p7"],
        ["p0", "a6", "p8"],
    ]


def test_top_k_takes_the_best_and_of_several_only_ranked_ones() -> None:
    assert named(message_trees.iterate_threads(BRANCHED, TreeFilter(top_k=1))) == [["p0", "a6"]]
    assert named(
        message_trees.iterate_threads(
            tree(node("p0", node("a1"), node("a2", rank=0))), TreeFilter(top_k=1)
        )
    ) == [["p0", "a2"]]
    assert named(
        message_trees.iterate_threads(tree(node("p0", node("a1"))), TreeFilter(top_k=1))
    ) == [["p0", "a1"]]


@pytest.mark.parametrize(
    "root, state",
    [
        (node("p0", lang="de"), "ready_for_export"),
        (node("p0"), "growing"),
        (node("p0", review_result=False), "ready_for_export"),
    ],
)
def test_other_trees_are_left_out(root: dict[str, Any], state: str) -> None:
    assert not TreeFilter(langs=("en",)).accepts_tree(tree(root, state))
    assert TreeFilter(states=(), reviewed=False).accepts_tree(tree(root, state))
    assert not list(message_trees.iterate_prompts(tree(root, state), TreeFilter(langs=("en",))))


def test_labels_in_both_shapes_bound_messages() -> None:
    export = node("a1", labels={"quality": {"value": 0.75, "count": 3}})
    hub = node("a2", labels={"name": ["spam", "quality"], "value": [0.0, 0.25], "count": [3, 3]})
    bare = node("a3")
    assert [message_trees.read_label(each, "quality") for each in (export, hub, bare)] == [
        0.75,
        0.25,
        None,
    ]
    threads = named(
        message_trees.iterate_threads(
            tree(node("p0", export, hub, bare)), TreeFilter(least={"quality": 0.5})
        )
    )
    assert threads == [["p0", "a1"], ["p0", "a3"]]
    assert not TreeFilter(most={"quality": 0.5}).accepts_message(export) and TreeFilter(
        most={"quality": 0.5}
    ).accepts_message(hub)
    assert message_trees.to_messages([export])[0] == {
        "role": "assistant",
        "content": "text of a1",
        "lang": "en",
        "quality": 0.75,
    }


def test_flattened_shuffled_and_built_is_the_same_tree() -> None:
    flat = list(message_trees.flatten(BRANCHED))
    assert [each["message_id"] for each in flat][:3] == ["p0", "a1", "p2"] and flat[1][
        "parent_id"
    ] == "p0"
    (same,) = message_trees.read_trees(flat)
    assert named(message_trees.iterate_threads(same, TreeFilter())) == named(
        message_trees.iterate_threads(BRANCHED, TreeFilter())
    )
    random.Random(1).shuffle(flat)
    (again,) = message_trees.read_trees(flat)
    assert sorted(named(message_trees.iterate_prompts(again, TreeFilter()))) == sorted(
        named(message_trees.iterate_prompts(BRANCHED, TreeFilter()))
    )
    threads = [
        {"thread_id": str(i), "messages": path}
        for i, path in enumerate(message_trees._iterate_paths(BRANCHED, TreeFilter()))
    ]
    (of_threads,) = message_trees.read_trees(json.loads(json.dumps(threads)))
    assert len(list(message_trees.iterate_nodes(of_threads["prompt"]))) == len(
        list(message_trees.iterate_nodes(BRANCHED["prompt"]))
    )


def test_a_pruned_tree_has_no_message_that_is_not_wanted() -> None:
    made = message_trees.prune(BRANCHED, TreeFilter(top_k=1))
    assert made is not None and [
        each["message_id"] for each in message_trees.iterate_nodes(made["prompt"])
    ] == [
        "p0",
        "a6",
        "p7",
        "p8",
    ]
    assert message_trees.prune(BRANCHED, TreeFilter(langs=("de",))) is None


def test_what_is_no_tree_is_said() -> None:
    with pytest.raises(BadRow, match=r"not a tree .*it has: 'text'"):
        list(message_trees.read_trees([{"text": "x"}]))
    with pytest.raises(BadRow, match="'a1': its parent 'p9' is not among"):
        list(message_trees.read_trees([{**node("a1"), "parent_id": "p9"}]))


def test_real_trees_and_real_messages_are_the_same(data_dir: Path) -> None:
    """100 trees, 1,167 messages, 22 of them synthetic; the other file has the same trees under
    their first messages.
    """
    files = [data_dir / "oasst" / name for name in ("en_100_tree.jsonl", "en_100_message.jsonl")]
    both = [list(message_trees.read_trees(map(json.loads, file.open()))) for file in files]
    for trees in both:
        every = [each for one in trees for each in message_trees.iterate_nodes(one["prompt"])]
        assert (len(trees), len(every), sum(bool(each["synthetic"]) for each in every)) == (
            100,
            1167,
            22,
        )
    wanted = TreeFilter(langs=("en",))
    threads = [
        sorted(
            path[-1]["message_id"]
            for t in trees
            for path in message_trees.iterate_threads(t, wanted)
        )
        for trees in both
    ]
    assert threads[0] == threads[1] and len(set(threads[0])) == len(threads[0]) == 538
    for one in both[0]:
        for path in message_trees.iterate_threads(one, wanted):
            assert [each["role"] for each in path] == ["prompter", "assistant"] * (len(path) // 2)
            assert not any(each["synthetic"] or each["deleted"] for each in path)
