"""Output of readers: a conversation with replies, and its conversion to a row in each mode."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.data.messages import Message
from weft.data.named.words import find_unwanted_phrase

TYPES = {"sft": "chat", "rm": "ranking", "rl": "prompt"}  # mode -> dataset type of its rows


@dataclass(frozen=True)
class Example:
    """Conversation that ends with the user, and `replies` to it, best first.

    Without a conversation, the replies continue `text`; without replies, `text` is plain text.

    Examples of one `group` are all used for training or all for validation. `columns` are further
    columns of a prompt's row (mode rl).
    """

    context: Sequence[Message] = ()
    replies: Sequence[Message] = ()
    text: str | None = None
    group: str | None = None
    id: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class ReaderContext:
    """Settings and counters of one pass over a named dataset.

    `left_out[reason]` counts rows that gave no example, `cut[part]` rows whose example lacks a part
    of their conversation. `training`: the rows are training rows, not validation rows.
    """

    name: str
    mode: str
    training: bool = True
    seed: int = 1
    left_out: Counter[str] = field(default_factory=Counter)
    cut: Counter[str] = field(default_factory=Counter)

    def skip(self, reason: str, count: int = 1) -> None:
        self.left_out[reason] += count

    def truncate_turns(self, turns: Sequence[str], most: int) -> list[str]:
        """Return the turns cut to `most` characters each; count the row if one was longer."""
        if any(len(turn) > most for turn in turns):
            self.cut[f"the end of turns of more than {most:,} characters"] += 1
        return [turn[:most] for turn in turns]

    def note_columns(self, row: Mapping[str, Any], *columns: str) -> None:
        """Count a row with non-empty values in columns that its reader does not read."""
        self.cut.update(f"column {column!r}" for column in columns if row.get(column))

    def make_random(self, *parts: object) -> random.Random:
        """Return a random generator for one purpose, the same in every run."""
        digest = hashlib.blake2b(
            "|".join(map(str, (self.seed, self.name, *parts))).encode(), digest_size=8
        ).digest()
        return random.Random(int.from_bytes(digest, "little"))

    def accept_texts(self, *texts: str) -> bool:
        """Return whether none of these texts contains an unwanted phrase.

        If one does, the row is counted as skipped.
        """
        if any(find_unwanted_phrase(text) for text in texts):
            self.skip("unwanted phrases")
            return False
        return True


def make_user_message(content: str, **more: Any) -> Message:
    return {"role": "user", "content": content, **_drop_empty(more)}


def make_assistant_message(content: str, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **_drop_empty(more)}


def make_alternating_messages(
    turns: Sequence[str], system: str | None = None, **more: Any
) -> list[Message]:
    """Return messages of the user and the assistant in turn.

    `more` (lang, ...) is added to each of them.
    """
    if system and system.strip():
        head = [{"role": "system", "content": system}]
    else:
        head = []
    return [
        *head,
        *(
            (make_assistant_message if i % 2 else make_user_message)(turn, **more)
            for i, turn in enumerate(turns)
        ),
    ]


def make_example(messages: Sequence[Message], **more: Any) -> Example:
    """Return an example whose reply is the last message."""
    return Example(context=messages[:-1], replies=messages[-1:], **more)


def to_row(example: Example, mode: str) -> tuple[str, dict[str, Any]] | None:
    """Return (dataset type, row) of an example in a mode, or None if it lacks a part."""
    own = {} if example.id is None else {"id": example.id}
    plain = not example.context
    if plain and mode == "rl":
        return None
    if mode == "rl":
        return "prompt", {**own, "prompt": list(example.context), **example.columns}
    if mode == "rm":
        if len(example.replies) < 2:
            return None
        prompt: Any = example.text or "" if plain else list(example.context)
        return "ranking", {
            **own,
            "prompt": prompt,
            "replies": [reply["content"] for reply in example.replies],
        }
    if plain and not example.replies:
        return "text", {**own, "text": example.text}
    if plain:
        return "text", {**own, "text": (example.text or "") + example.replies[0]["content"]}
    if example.replies:
        return ("chat", {**own, "messages": [*example.context, example.replies[0]]})
    return None


def _drop_empty(more: Mapping[str, Any]) -> dict[str, Any]:
    empty: dict[str, Any] = {}
    for key, value in more.items():
        if value is not None and value != "":
            empty[key] = value
    return empty
