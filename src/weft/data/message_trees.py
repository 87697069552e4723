"""Open-Assistant's message trees: reading, filtering, traversal and flattening.

A line of a file is a tree (`message_tree_id`, and `prompt` with nested `replies`), a message
(`message_id`, `parent_id`), or a thread (`thread_id`, and `messages` beginning at the root).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.data.rows import BadRow, Row

Node = Mapping[str, Any]
Tree = dict[str, Any]
LABELS = ("quality", "humor", "creativity")  # labels that are copied into chat messages


@dataclass(frozen=True)
class TreeFilter:
    """Filter for message trees and for the messages in them.

    If a message is rejected, all threads that contain it are left out.

    Attributes:
        langs: accepted languages of a tree's first message; empty means all
        states: accepted states of a tree; empty means all
        top_k: accept only assistant replies with a rank below `top_k` (the best rank is 0), and
            replies without a rank that have no siblings; None accepts all
        reviewed: require that a tree's first message passed its review
        deleted: accept deleted messages
        synthetic: accept synthetic messages
        least: minimum values of labels, such as `{"quality": 0.5}`; messages without the label are
            accepted
        most: maximum values of labels, in the same form
    """

    langs: tuple[str, ...] = ()
    states: tuple[str, ...] = ("ready_for_export",)
    top_k: int | None = None
    reviewed: bool = True
    deleted: bool = False
    synthetic: bool = False
    least: Mapping[str, float] = field(default_factory=dict)
    most: Mapping[str, float] = field(default_factory=dict)

    def accepts_tree(self, tree: Row) -> bool:
        root = tree["prompt"]
        state = tree.get("tree_state")
        return (
            (not self.states or state is None or state in self.states)
            and (not self.reviewed or bool(root.get("review_result")))
            and (not self.langs or root.get("lang") in self.langs)
        )

    def accepts_message(self, node: Node) -> bool:
        if (node.get("deleted") and not self.deleted) or (
            node.get("synthetic") and not self.synthetic
        ):
            return False
        for bounds, sign in ((self.least, 1.0), (self.most, -1.0)):
            for name, bound in bounds.items():
                value = read_label(node, name)
                if value is not None and sign * value < sign * bound:
                    return False
        return True

    def accepts_rank(self, node: Node, siblings: int) -> bool:
        """Return whether the limit `top_k` on the ranks of replies accepts a message.

        A reply of the assistant is accepted if its rank is below `top_k`, or if it has no rank and
        is the only reply. Messages of users, and all messages if `top_k` is None, are accepted.
        `siblings` is the number of replies to the same message, including `node` itself.
        """
        if self.top_k is None or node.get("role") != "assistant":
            return True
        rank = node.get("rank")
        return siblings < 2 if rank is None else rank < self.top_k


def read_label(node: Node, name: str) -> float | None:
    """Return the mean value of a message's label `name`, or None if the message lacks the label.

    Reads both the format of Open-Assistant's exports and the format of its datasets on the hub.
    """
    labels = node.get("labels") or {}
    if isinstance(labels.get("name"), Sequence) and not isinstance(labels["name"], str):
        return dict(zip(labels["name"], labels["value"], strict=True)).get(name)
    label = labels.get(name)
    value = label.get("value") if isinstance(label, Mapping) else label
    return None if value is None else float(value)


def read_trees(rows: Iterable[Row]) -> Iterator[Tree]:
    """Iterate over the message trees that the rows contain.

    A row is a whole tree, a thread or a single message. Whole trees are yielded as they are read.
    Threads and single messages, which may be in any order, are joined into trees after all rows
    have been read. Raises `BadRow` for other rows, and for a message whose parent is missing.
    """
    loose: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row.get("message_id") is not None:
            _add(loose, row)
        elif row.get("thread_id") is not None and isinstance(row.get("messages"), Sequence):
            parent = None
            for node in row["messages"]:
                _add(loose, {"parent_id": parent, **node})
                parent = node.get("message_id")
        elif isinstance(row.get("prompt"), Mapping) and "message_id" in row["prompt"]:
            yield {**row, "prompt": _nest_replies(row["prompt"])}
        else:
            raise BadRow(
                "is not a tree (message_tree_id, prompt), message (message_id, parent_id) or "
                "thread (thread_id, messages); "
                f"it has: {', '.join(map(repr, row))}"
            )
    yield from _build_trees(loose)


def _add(loose: dict[str, dict[str, Any]], row: Row) -> None:
    """Add a message and all replies nested in it to `loose`, which maps ids to messages."""
    if row["message_id"] in loose:
        return
    loose[row["message_id"]] = {**row, "replies": []}
    for reply in row.get("replies") or ():
        _add(loose, {**reply, "parent_id": row["message_id"]})


def _build_trees(loose: Mapping[str, dict[str, Any]]) -> Iterator[Tree]:
    for node in loose.values():
        parent = node.get("parent_id")
        if parent is not None:
            if parent not in loose:
                raise BadRow(
                    f"message {node['message_id']!r}: its parent {parent!r} is not among the "
                    f"messages"
                )
            loose[parent]["replies"].append(node)
    for node in loose.values():
        if node.get("parent_id") is None:
            yield {
                "message_tree_id": node.get("message_tree_id") or node["message_id"],
                "tree_state": node.get("tree_state"),
                "prompt": node,
            }


def _nest_replies(node: Node) -> dict[str, Any]:
    return {**node, "replies": [_nest_replies(reply) for reply in node.get("replies") or ()]}


def iterate_nodes(node: Node) -> Iterator[Node]:
    """Iterate over a message and all messages below it in the tree, depth first."""
    yield node
    for reply in node.get("replies") or ():
        yield from iterate_nodes(reply)


def flatten(tree: Row) -> Iterator[dict[str, Any]]:
    """Iterate over the messages of a tree, parents first, each without its nested replies.

    Each message gets the id of its parent message, and the id and state of the tree.
    """

    def flatten_node(node: Node, parent: str | None) -> Iterator[dict[str, Any]]:
        fields = {key: value for key, value in node.items() if key != "replies"}
        yield {
            **fields,
            "parent_id": parent,
            "message_tree_id": tree["message_tree_id"],
            "tree_state": tree.get("tree_state"),
        }
        for reply in node.get("replies") or ():
            yield from flatten_node(reply, node["message_id"])

    return flatten_node(tree["prompt"], None)


def prune(tree: Row, tree_filter: TreeFilter) -> Tree | None:
    """Return the tree without rejected messages and without the replies below them.

    The filter `tree_filter` decides which messages are rejected. Returns None if the tree or its
    first message is rejected.
    """

    def prune_node(node: Node) -> dict[str, Any]:
        replies = []
        for reply in node.get("replies") or ():
            if tree_filter.accepts_message(reply):
                replies.append(reply)
        return {
            **node,
            "replies": [
                prune_node(reply)
                for reply in replies
                if tree_filter.accepts_rank(reply, len(replies))
            ],
        }

    if not tree_filter.accepts_tree(tree) or not tree_filter.accepts_message(tree["prompt"]):
        return None
    return {**tree, "prompt": prune_node(tree["prompt"])}


def iterate_threads(tree: Row, tree_filter: TreeFilter) -> Iterator[list[Node]]:
    """Iterate over the threads of a tree: paths from the root that end with an assistant message.

    A path ends at a message that has no accepted replies. If that is a user message, it is removed.
    To avoid duplicates, the shortened path is yielded only if the removed message is the first
    accepted reply to its parent.
    """
    for path in _iterate_paths(tree, tree_filter):
        replies = _filter_replies(path[-1], tree_filter)
        if replies or len(path) < 2:
            continue
        if path[-1]["role"] == "assistant":
            yield path
        elif (
            _filter_replies(path[-2], tree_filter)[0]["message_id"] == path[-1]["message_id"]
            and len(path) > 2
        ):
            yield path[:-1]


def iterate_rankings(tree: Row, tree_filter: TreeFilter) -> Iterator[tuple[list[Node], list[Node]]]:
    """Yield (path, ranked replies) for each user message with at least two ranked replies.

    The path leads from the root to the user message, and the replies are sorted best first.
    """
    for path in _iterate_paths(tree, tree_filter):
        ranked = [
            reply
            for reply in _filter_replies(path[-1], tree_filter, all=True)
            if reply.get("rank") is not None
        ]
        if path[-1]["role"] == "prompter" and len(ranked) > 1:
            yield path, sorted(ranked, key=lambda reply: int(reply["rank"]))


def iterate_prompts(tree: Row, tree_filter: TreeFilter) -> Iterator[list[Node]]:
    """Iterate over the paths from the root to each user message that `tree_filter` accepts.

    A path is left out if any of its messages is rejected.
    """
    return (path for path in _iterate_paths(tree, tree_filter) if path[-1]["role"] == "prompter")


def _iterate_paths(tree: Row, tree_filter: TreeFilter) -> Iterator[list[Node]]:
    """Iterate over the paths from the root to each accepted message, depth first."""
    if not tree_filter.accepts_tree(tree) or not tree_filter.accepts_message(tree["prompt"]):
        return
    stack: list[list[Node]] = [[tree["prompt"]]]
    while stack:
        path = stack.pop()
        yield path
        for reply in reversed(_filter_replies(path[-1], tree_filter)):
            stack.append([*path, reply])


def _filter_replies(node: Node, tree_filter: TreeFilter, *, all: bool = False) -> list[Node]:
    """Return a message's replies, without those that `tree_filter` rejects.

    If `all` is set, the condition `top_k` is not applied.
    """
    replies = []
    for reply in node.get("replies") or ():
        if tree_filter.accepts_message(reply):
            replies.append(reply)
    if all:
        return replies
    result: list[Node] = []
    for reply in replies:
        if tree_filter.accepts_rank(reply, len(replies)):
            result.append(reply)
    return result


def to_messages(path: Sequence[Node]) -> list[dict[str, Any]]:
    """Convert the messages of a path to chat messages with their language and label values."""
    messages = []
    for node in path:
        role = "assistant" if node["role"] == "assistant" else "user"
        values = {"lang": node.get("lang"), **{name: read_label(node, name) for name in LABELS}}
        present = {}
        for name, value in values.items():
            if value is not None:
                present[name] = value
        messages.append({"role": role, "content": node["text"], **present})
    return messages
