"""Paths through Open-Assistant trees, for the built-in dataset types.

A row is a tree of messages (`message_tree_id`, and `prompt` with nested `replies`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weft.data.rows import BadRow, Row

Node = Mapping[str, Any]


def iterate_threads(row: Row) -> Iterator[list[Node]]:
    """Iterate over the paths from the root to each leaf, cut to end with an assistant's message.

    If the last message of a path is a prompter's (a human user's), it is removed. Paths that become
    equal in this way are yielded only once.
    """
    seen: set[str] = set()
    for path in _iterate_paths(_find_root(row)):
        if path[-1].get("role") == "prompter":
            path = path[:-1]
        if path and path[-1]["message_id"] not in seen:
            seen.add(path[-1]["message_id"])
            yield path


def iterate_rankings(row: Row) -> Iterator[tuple[list[Node], list[Node]]]:
    """Yield (path, ranked replies) for each prompter's message with at least two ranked replies.

    The path leads from the root to the message, and the replies are sorted best first.
    """
    for path in _iterate_paths(_find_root(row), inner=True):
        ranked = [reply for reply in _filter_replies(path[-1]) if reply.get("rank") is not None]
        if path[-1].get("role") == "prompter" and len(ranked) > 1:
            yield path, sorted(ranked, key=lambda reply: reply["rank"])


def iterate_prompts(row: Row) -> Iterator[list[Node]]:
    """Iterate over the paths from the root to each prompter's message."""
    return (
        path
        for path in _iterate_paths(_find_root(row), inner=True)
        if path[-1].get("role") == "prompter"
    )


def to_messages(path: Sequence[Node]) -> list[dict[str, Any]]:
    """Convert the nodes of a path to chat messages.

    Each message also has the node's language and the mean values of its labels for quality, humor
    and creativity, if the node has them.
    """
    return [{"role": node["role"], "content": node["text"], **_read_facts(node)} for node in path]


def _read_facts(node: Node) -> dict[str, Any]:
    labels = node.get("labels") or {}
    label_values = {}
    for name in ("quality", "humor", "creativity"):
        if labels.get(name):
            label_values[name] = labels[name]["value"]
    return {"lang": node["lang"], **label_values} if node.get("lang") else label_values


def _find_root(row: Row) -> Node:
    root: Node = row["prompt"]
    if "message_id" not in root or "text" not in root:
        raise BadRow("a message tree whose 'prompt' lacks 'message_id' or 'text'")
    return root


def _iterate_paths(root: Node, inner: bool = False) -> Iterator[list[Node]]:
    """Iterate over the paths from the root to each leaf or, with `inner`, to each node.

    The order is depth first. Yields nothing if the root is deleted or synthetic.
    """
    stack: list[list[Node]] = [[root]] if _is_wanted(root) else []
    while stack:
        path = stack.pop()
        replies = _filter_replies(path[-1])
        if inner or not replies:
            yield path
        for reply in reversed(replies):
            stack.append([*path, reply])


def _filter_replies(node: Node) -> list[Node]:
    """Return a message's replies, without the deleted and the synthetic ones."""
    result: list[Node] = []
    for reply in node.get("replies") or ():
        if _is_wanted(reply):
            result.append(reply)
    return result


def _is_wanted(node: Node) -> bool:
    return not node.get("deleted") and not node.get("synthetic")
