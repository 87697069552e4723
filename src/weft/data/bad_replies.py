"""Extract prompts with replies from rows of any dataset type, and make worse replies.

A reward model trained only on human replies can be fooled by text that no person would write;
ranking artificial bad replies last makes it more robust (Open-Assistant's augmented rankings).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft import randomness
from weft.data import dialogue, trees
from weft.data.asked import (
    as_messages,
    conversation,
    listed_messages,
    need_prompt,
    prompt_text,
    with_system,
)
from weft.data.messages import Message, normalise
from weft.data.rows import (
    ANSWER_KEYS,
    MESSAGE_KEYS,
    PROMPT_KEYS,
    BadRow,
    Row,
    first_of,
    is_tree,
    looks_like,
    need,
    row_id,
    text,
    texts,
)

Random = np.random.Generator
CHOSEN = ("chosen", "chosen_messages")
REJECTED = ("rejected", "rejected_messages")


@dataclass(frozen=True)
class Replied:
    """One prompt, as `text` or as `messages`, and its replies, best first.

    If both `text` and `messages` are empty, the replies are complete texts.
    """

    id: str
    text: str | None
    messages: tuple[Message, ...]
    replies: tuple[str, ...]

    @property
    def asked(self) -> dict[str, Any]:
        """Return the prompt as columns of a row."""
        if self.text is None and self.messages:
            return {"messages": list(self.messages)}
        return {"prompt": self.text}

    def alike(self, reply: str) -> str:
        """Return `reply` with the leading whitespace of the row's best reply.

        Otherwise the whitespace would reveal that the reply is artificial.
        """
        best = self.replies[0]
        return best[: len(best) - len(best.lstrip())] + reply.strip()

    def has(self, reply: str) -> bool:
        """Return whether `reply` equals one of the row's replies, ignoring whitespace."""
        return " ".join(reply.split()) in {" ".join(own.split()) for own in self.replies}


def replied_rows(row: Row, number: int) -> Iterator[Replied]:
    """Iterate over the prompts of a row with their replies.

    The row is a ranking, a pair, an answer, a conversation or an Open-Assistant tree; a tree yields
    several. Raises `BadRow` if the row has no reply.
    """
    if is_tree(row):
        yield from _of_tree(row)
        return
    name = row_id(row) or str(number)
    form = looks_like(row)
    if form == "preference":
        yield _pair(name, row)
    elif form in ("ranking", "paired_comparison"):
        if form == "ranking":
            replies = texts(row, "replies")
        else:
            replies = [texts(row, key)[0] for key in ("pos_answers", "neg_answers")]
        yield _asked(name, row, form, replies)
    elif form == "chat":
        key = need(row, MESSAGE_KEYS, "chat")
        yield _talk(name, with_system(row, listed_messages(row, key)))
    elif form == "prompt_answer":
        yield _asked(name, row, form, [text(row, need(row, ANSWER_KEYS, form))])
    else:
        raise BadRow(
            "it has no reply: give a ranking, a pair, an answer, a conversation, or a message tree"
        )


def _asked(name: str, row: Row, form: str, replies: Sequence[str]) -> Replied:
    if (
        form == "ranking"
        and first_of(row, (*PROMPT_KEYS, *MESSAGE_KEYS)) is None
        and "prompt" in row
    ):
        return Replied(name, None, (), tuple(replies))
    key = need_prompt(row, None, form)
    if isinstance(row[key], str) and dialogue.HUMAN not in row[key] and not row.get("history"):
        return Replied(name, prompt_text(row, key), tuple(conversation(row, key)), tuple(replies))
    return Replied(name, None, tuple(conversation(row, key)), tuple(replies))


def _pair(name: str, row: Row) -> Replied:
    keys = [key for names in (CHOSEN, REJECTED) if (key := first_of(row, names)) is not None]
    found = [row[key] for key in keys]
    if len(found) < 2:
        raise BadRow("it has no two replies to compare")
    if all(isinstance(each, str) for each in found) and not all(
        dialogue.HUMAN in each for each in found
    ):
        return _asked(
            name,
            row,
            "preference",
            [text({"chosen": found[0]}, "chosen"), text({"rejected": found[1]}, "rejected")],
        )
    talks = [
        normalise(dialogue.messages(row[key]))
        if isinstance(row[key], str)
        else as_messages(row, key, "assistant")
        for key in keys
    ]
    if talks[0][0]["role"] == "assistant":
        return _asked(name, row, "preference", [_said(talk, []) for talk in talks])
    shared = _talk(name, with_system(row, talks[0]))
    return Replied(
        name,
        None,
        shared.messages,
        (shared.replies[0], _said(with_system(row, talks[1]), shared.messages)),
    )


def _talk(name: str, messages: Sequence[Message]) -> Replied:
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise BadRow("the conversation does not end with a reply")
    return Replied(name, None, tuple(messages[:-1]), (_said(messages, messages[:-1]),))


def _said(talk: Sequence[Message], before: Sequence[Message]) -> str:
    """Return the content of the single reply by which `talk` extends `before`."""
    added = talk[len(before) :]
    if list(talk[: len(before)]) != list(before) or len(added) != 1:
        raise BadRow("its two conversations differ in more than their last reply")
    if (
        added[0]["role"] != "assistant"
        or added[0].get("tool_calls")
        or not added[0]["content"].strip()
    ):
        raise BadRow("its last message is not a reply with text")
    return str(added[0]["content"])


def _of_tree(row: Row) -> Iterator[Replied]:
    ranked = set()
    for path, replies in trees.rankings(row):
        ranked.add(path[-1]["message_id"])
        said = tuple(reply["text"] for reply in replies)
        yield Replied(path[-1]["message_id"], None, tuple(normalise(trees.messages(path))), said)
    for path in trees.threads(row):
        if len(path) > 1 and path[-2]["message_id"] not in ranked:
            ranked.add(path[-2]["message_id"])
            asked = tuple(normalise(trees.messages(path[:-1])))
            yield Replied(path[-2]["message_id"], None, asked, (path[-1]["text"],))


# -- Functions that make a reply worse


def _shuffled(reply: str, random: Random) -> str:
    words = reply.split()
    return " ".join(words[place] for place in random.permutation(len(words)))


def _cut(reply: str, random: Random) -> str:
    """Return the first 20 to 60 % of the words, without final punctuation."""
    words = reply.split()
    return " ".join(words[: max(1, int(len(words) * random.uniform(0.2, 0.6)))]).rstrip(".!?")


def _repeated(reply: str, random: Random) -> str:
    """Repeat the first sentence (at most 12 words) 3 to 6 times."""
    first = " ".join(re.split(r"(?<=[.!?])\s", reply.strip(), maxsplit=1)[0].split()[:12])
    return " ".join([first] * int(random.integers(3, 7)))


WORSE: Mapping[str, Callable[[str, Random], str]] = {
    "shuffled": _shuffled,
    "cut": _cut,
    "repeated": _repeated,
}
OTHER = "other"  # kind of bad reply: the best reply to another prompt
KINDS = (*WORSE, OTHER)
LEAST_WORDS = 4  # replies with fewer words are not made worse


def worse(kind: str, row: Replied, others: Sequence[Replied], seed: int) -> str | None:
    """Return a reply worse than all of the row's, or None if none can be made.

    `kind` is one of `KINDS`. The result depends only on seed, kind, row and `others`.
    """
    low, high = randomness.key(seed, f"worse/{kind}", id=row.id)
    random = np.random.default_rng([int(low), int(high)])
    if kind == OTHER:
        taken = [each for each in others if each.id != row.id]
        made = taken[int(random.integers(len(taken)))].replies[0] if taken else ""
    else:
        if len(row.replies[0].split()) >= LEAST_WORDS:
            made = WORSE[kind](row.replies[0], random)
        else:
            made = ""
    return None if not made.strip() or row.has(made) else row.alike(made)
