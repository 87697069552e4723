"""Reader of Open-Assistant's exports: threads, ranked replies or prompts of message trees."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from weft.data import message_trees
from weft.data.named.example import Example, ReaderContext, make_example
from weft.data.rows import Row
from weft.errors import ConfigError
from weft.registry import register_reader

# States of trees whose first message is an accepted prompt; the first state: with released replies.
PROMPT_TREE_STATES = ("ready_for_export", "prompt_lottery_waiting")


@register_reader("trees")
def trees(
    rows: Iterable[Row],
    use: ReaderContext,
    *,
    lang: str | list[str] = "",
    top_k: int | None = None,
    least: Mapping[str, float] | None = None,
    most: Mapping[str, float] | None = None,
) -> Iterator[Example]:
    """Read message trees as threads (mode sft), ranked replies (rm) or prompts (rl).

    All examples of a tree are used either for training or for validation.

    `lang` lists the allowed languages of the first message, such as "en,de". `top_k` keeps only
    replies with the k best ranks; it is ignored in mode rl. `least` and `most` map labels to their
    minimum and maximum values, such as `{quality: 0.5}`. Deleted and synthetic messages are left
    out, and so are trees that did not pass their review or were not released. Mode rl also accepts
    trees in the state `prompt_lottery_waiting`.
    """
    if top_k is not None and top_k < 1:
        raise ConfigError(f"{use.name}: top_k={top_k}: must be at least 1")
    langs = lang.split(",") if isinstance(lang, str) else lang
    wanted = message_trees.TreeFilter(
        langs=tuple(each.strip() for each in langs if each.strip()),
        states=PROMPT_TREE_STATES if use.mode == "rl" else PROMPT_TREE_STATES[:1],
        top_k=None if use.mode == "rl" else top_k,
        least=least or {},
        most=most or {},
    )
    for tree in message_trees.read_trees(rows):
        if not wanted.accepts_tree(tree):
            use.skip("other languages, or not released and reviewed")
        else:
            yield from _build_examples(tree, wanted, use.mode)


def _build_examples(tree: Row, wanted: message_trees.TreeFilter, mode: str) -> Iterator[Example]:
    group = str(tree["message_tree_id"])
    if mode == "sft":
        for path in message_trees.iterate_threads(tree, wanted):
            yield make_example(
                message_trees.to_messages(path), id=path[-1]["message_id"], group=group
            )
    elif mode == "rm":
        for path, replies in message_trees.iterate_rankings(tree, wanted):
            context = message_trees.to_messages(path)
            reply_messages = message_trees.to_messages(replies)
            yield Example(context, reply_messages, id=path[-1]["message_id"], group=group)
    else:
        for path in message_trees.iterate_prompts(tree, wanted):
            yield Example(message_trees.to_messages(path), id=path[-1]["message_id"], group=group)
