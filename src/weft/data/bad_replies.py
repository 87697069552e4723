"""Extraction of prompts and replies from rows of any dataset type, and generation of worse replies.

A reward model that is trained only on human replies can be fooled by text that no person would
write. Ranking artificial bad replies last makes it more robust (as in Open-Assistant's augmented
rankings).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft import randomness
from weft.data import columns, trees
from weft.data.columns import (
    prepend_system,
    read_conversation,
    read_message_list,
    read_messages,
    read_prompt_text,
    require_prompt_key,
)
from weft.data.messages import Message, normalize_messages
from weft.data.rows import (
    ANSWER_KEYS,
    MESSAGE_KEYS,
    PROMPT_KEYS,
    BadRow,
    Row,
    find_first_key,
    guess_type,
    is_tree,
    read_id,
    read_text,
    read_texts,
    require_key,
)

Random = np.random.Generator
CHOSEN = ("chosen", "chosen_messages")
REJECTED = ("rejected", "rejected_messages")


@dataclass(frozen=True)
class PromptReplies:
    """Prompt with its replies.

    Attributes:
        id: id of the prompt
        text: prompt as plain text, or None if it is only given as messages
        messages: prompt as messages; empty if there is no prompt and the replies are complete texts
        replies: replies to the prompt, best first
    """

    id: str
    text: str | None
    messages: tuple[Message, ...]
    replies: tuple[str, ...]

    @property
    def prompt_columns(self) -> dict[str, Any]:
        """Prompt as a row with one column: `messages` for a conversation, else `prompt`."""
        if self.text is None and self.messages:
            return {"messages": list(self.messages)}
        return {"prompt": self.text}

    def match_whitespace(self, reply: str) -> str:
        """Return `reply` with the leading whitespace of the prompt's best reply.

        Different whitespace would reveal that `reply` is artificial.
        """
        best = self.replies[0]
        return best[: len(best) - len(best.lstrip())] + reply.strip()

    def has_reply(self, reply: str) -> bool:
        """Return whether `reply` equals one of the prompt's replies, ignoring whitespace."""
        return " ".join(reply.split()) in {" ".join(own.split()) for own in self.replies}


def read_replies(row: Row, number: int) -> Iterator[PromptReplies]:
    """Iterate over the prompts of a row, each with its replies.

    The row can be a ranking, a pair, a prompt with an answer, a conversation or an Open-Assistant
    tree. Only a tree can have several prompts. If the row has no id, the caller's `number` is used
    as the id of the prompt. Raises `BadRow` if the row has no reply.
    """
    if is_tree(row):
        yield from _read_tree(row)
        return
    name = read_id(row) or str(number)
    form = guess_type(row)
    if form == "preference":
        yield _read_pair(name, row)
    elif form in ("ranking", "paired_comparison"):
        if form == "ranking":
            replies = read_texts(row, "replies")
        else:
            replies = [read_texts(row, key)[0] for key in ("pos_answers", "neg_answers")]
        yield _read_prompt(name, row, form, replies)
    elif form == "chat":
        key = require_key(row, MESSAGE_KEYS, "chat")
        yield _read_conversation(name, prepend_system(row, read_message_list(row, key)))
    elif form == "prompt_answer":
        yield _read_prompt(name, row, form, [read_text(row, require_key(row, ANSWER_KEYS, form))])
    else:
        raise BadRow(
            "it has no reply: give a ranking, a pair, an answer, a conversation, or a message tree"
        )


def _read_prompt(name: str, row: Row, form: str, replies: Sequence[str]) -> PromptReplies:
    if (
        form == "ranking"
        and find_first_key(row, (*PROMPT_KEYS, *MESSAGE_KEYS)) is None
        and "prompt" in row
    ):
        return PromptReplies(name, None, (), tuple(replies))
    key = require_prompt_key(row, None, form)
    if isinstance(row[key], str) and columns.HUMAN not in row[key] and not row.get("history"):
        return PromptReplies(
            name, read_prompt_text(row, key), tuple(read_conversation(row, key)), tuple(replies)
        )
    return PromptReplies(name, None, tuple(read_conversation(row, key)), tuple(replies))


def _read_pair(name: str, row: Row) -> PromptReplies:
    keys = [key for names in (CHOSEN, REJECTED) if (key := find_first_key(row, names)) is not None]
    replies = [row[key] for key in keys]
    if len(replies) < 2:
        raise BadRow("it has no two replies to compare")
    if all(isinstance(reply, str) for reply in replies) and not all(
        columns.HUMAN in reply for reply in replies
    ):
        return _read_prompt(
            name,
            row,
            "preference",
            [
                read_text({"chosen": replies[0]}, "chosen"),
                read_text({"rejected": replies[1]}, "rejected"),
            ],
        )
    conversations = [
        normalize_messages(columns.split_messages(row[key]))
        if isinstance(row[key], str)
        else read_messages(row, key, "assistant")
        for key in keys
    ]
    if conversations[0][0]["role"] == "assistant":
        return _read_prompt(
            name,
            row,
            "preference",
            [_find_reply(conversation, []) for conversation in conversations],
        )
    shared = _read_conversation(name, prepend_system(row, conversations[0]))
    return PromptReplies(
        name,
        None,
        shared.messages,
        (shared.replies[0], _find_reply(prepend_system(row, conversations[1]), shared.messages)),
    )


def _read_conversation(name: str, messages: Sequence[Message]) -> PromptReplies:
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise BadRow("the conversation does not end with a reply")
    return PromptReplies(name, None, tuple(messages[:-1]), (_find_reply(messages, messages[:-1]),))


def _find_reply(conversation: Sequence[Message], before: Sequence[Message]) -> str:
    """Return the content of the reply that follows the messages `before` in `conversation`.

    Raises `BadRow` if `conversation` is not `before` followed by one reply.
    """
    added = conversation[len(before) :]
    if list(conversation[: len(before)]) != list(before) or len(added) != 1:
        raise BadRow("its two conversations differ in more than their last reply")
    if (
        added[0]["role"] != "assistant"
        or added[0].get("tool_calls")
        or not added[0]["content"].strip()
    ):
        raise BadRow("its last message is not a reply with text")
    return str(added[0]["content"])


def _read_tree(row: Row) -> Iterator[PromptReplies]:
    ranked = set()
    for path, replies in trees.iterate_rankings(row):
        ranked.add(path[-1]["message_id"])
        texts = tuple(reply["text"] for reply in replies)
        yield PromptReplies(
            path[-1]["message_id"], None, tuple(normalize_messages(trees.to_messages(path))), texts
        )
    for path in trees.iterate_threads(row):
        if len(path) > 1 and path[-2]["message_id"] not in ranked:
            ranked.add(path[-2]["message_id"])
            prompt = tuple(normalize_messages(trees.to_messages(path[:-1])))
            yield PromptReplies(path[-2]["message_id"], None, prompt, (path[-1]["text"],))


# -- degradation of replies


def _shuffle_words(reply: str, random: Random) -> str:
    words = reply.split()
    return " ".join(words[place] for place in random.permutation(len(words)))


def _truncate_words(reply: str, random: Random) -> str:
    """Return the first 20 to 60 % of the words of a reply, without final punctuation."""
    words = reply.split()
    return " ".join(words[: max(1, int(len(words) * random.uniform(0.2, 0.6)))]).rstrip(".!?")


def _repeat_sentence(reply: str, random: Random) -> str:
    """Return the first sentence of a reply (at most 12 words), repeated 3 to 6 times."""
    first = " ".join(re.split(r"(?<=[.!?])\s", reply.strip(), maxsplit=1)[0].split()[:12])
    return " ".join([first] * int(random.integers(3, 7)))


DEGRADATIONS: Mapping[str, Callable[[str, Random], str]] = {
    "shuffled": _shuffle_words,
    "cut": _truncate_words,
    "repeated": _repeat_sentence,
}
OTHER_PROMPT = "other"  # kind of bad reply: the best reply to another prompt
KINDS = (*DEGRADATIONS, OTHER_PROMPT)
MIN_WORDS = 4  # replies with fewer words are not made worse


def make_worse_reply(
    kind: str, row: PromptReplies, others: Sequence[PromptReplies], seed: int
) -> str | None:
    """Return a reply that is worse than all replies of `row`, or None if none can be made.

    For the kinds "shuffled", "cut" and "repeated", the best reply is degraded: its words are
    shuffled, it is truncated, or its first sentence is repeated. For the kind "other", the result
    is the best reply to another prompt, chosen from `others`. The same arguments always give the
    same reply.
    """
    low, high = randomness.derive_key(seed, f"worse/{kind}", id=row.id)
    random = np.random.default_rng([int(low), int(high)])
    if kind == OTHER_PROMPT:
        other_rows = [other for other in others if other.id != row.id]
        reply = other_rows[int(random.integers(len(other_rows)))].replies[0] if other_rows else ""
    else:
        if len(row.replies[0].split()) >= MIN_WORDS:
            reply = DEGRADATIONS[kind](row.replies[0], random)
        else:
            reply = ""
    return None if not reply.strip() or row.has_reply(reply) else row.match_whitespace(reply)
