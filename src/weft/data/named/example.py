"""Output of readers (conversations with replies), and its conversion to rows for each mode.

Readers select values of a row by paths and combine them by templates such as `{context} {question}`
or `{answers.text.0}`. Catalogue entries with the option `filter_words` leave out rows with phrases
that reveal that an answer was copied from a language model.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from weft.data.messages import Message
from weft.data.rows import BadRow, Row

PHRASES = (
    "as a language model",
    "as an ai language model",
    "as a large language model",
    "as an ai ",
    "an ai language model you don't have",
    "i am an ai language model and do not",
    "ai language model and i do not",
    "i know as an ai language model you don't have",
    "i'm an ai ",
    "i am an ai ",
    "as your dedicated ai language model",
    "as a hypothetical ai",
    "as a neutral ai",
    "my knowledge cutoff",
    "my knowledge cut off",
    "as a machine",
    "i cannot assist",
    "i do not have personal preferences",
    "i don't have personal preferences",
    "unfortunately, i cannot provide",
    "i'm sorry, i cannot",
    "ai cannot create or program",
    "i'm afraid i cannot create",
    "openai",
)


TYPES = {"sft": "chat", "rm": "ranking", "rl": "prompt"}  # mode -> dataset type of its rows


@dataclass(frozen=True)
class Example:
    """Example from a named dataset: a conversation and the replies to its last message.

    An example can have a `text` instead of a conversation. Its replies then continue the text.
    Without replies, the text itself is the training text.

    Attributes:
        context: messages of the conversation, without the replies; empty if there is only a text
        replies: alternative replies, best first
        text: text that is used if there is no conversation
        group: name of a group of examples that must all be used for training or all for validation
        id: id of the row made from the example, or None to number the rows
        columns: additional columns of the row if it is used for RL
    """

    context: Sequence[Message] = ()
    replies: Sequence[Message] = ()
    text: str | None = None
    group: str | None = None
    id: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class ReaderContext:
    """Settings and counters of a reader for one pass over a named dataset.

    Attributes:
        name: name of the dataset
        mode: kind of training that the rows are for: sft, rm or rl
        training: True for training rows, False for validation rows
        seed: seed of the random choices
        left_out: number of rows left out, by reason
        cut: number of rows that were used only in part, for each kind of omitted part (for example
            "turns after the last reply")
    """

    name: str
    mode: str
    training: bool = True
    seed: int = 1
    left_out: Counter[str] = field(default_factory=Counter)
    cut: Counter[str] = field(default_factory=Counter)

    def skip(self, reason: str, count: int = 1) -> None:
        self.left_out[reason] += count

    def truncate_turns(self, turns: Sequence[str], max_characters: int) -> list[str]:
        """Return the turns, each truncated to at most `max_characters` characters.

        If any of them is truncated, the row is counted in the attribute `cut`.
        """
        if any(len(turn) > max_characters for turn in turns):
            self.cut[f"the end of turns of more than {max_characters:,} characters"] += 1
        return [turn[:max_characters] for turn in turns]

    def note_columns(self, row: Mapping[str, Any], *columns: str) -> None:
        """Record which of the ignored columns are not empty in a row.

        `columns` are the columns that the reader ignores. For each of them, the counter `cut` has
        the number of rows in which it is not empty.
        """
        self.cut.update(f"column {column!r}" for column in columns if row.get(column))

    def make_random(self, *parts: object) -> random.Random:
        """Return a random generator that depends only on the seed, the dataset's name and `parts`.

        `parts` identify the purpose of the generator, for example by a row index.
        """
        digest = hashlib.blake2b(
            "|".join(map(str, (self.seed, self.name, *parts))).encode(), digest_size=8
        ).digest()
        return random.Random(int.from_bytes(digest, "little"))

    def accept_texts(self, *texts: str) -> bool:
        """Return whether the texts are free of unwanted phrases. If not, count the row as left out.

        Unwanted phrases, such as "as an AI language model", reveal that a text was copied from a
        model.
        """
        if any(phrase in text.lower() for text in texts for phrase in PHRASES):
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
    """Return the turns as messages that alternate between user and assistant.

    If `system` is given, it becomes a system message in front of the turns. The values in `more`
    (such as lang) are added to every message except the system message.
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
    """Return an example with the last message as the reply and the earlier ones as the context."""
    return Example(context=messages[:-1], replies=messages[-1:], **more)


def to_row(example: Example, mode: str) -> tuple[str, dict[str, Any]] | None:
    """Convert an example to a row for a mode (sft, rm or rl), and return (dataset type, row).

    Returns None if the example lacks something that the mode needs, such as a second reply.
    """
    id_column = {} if example.id is None else {"id": example.id}
    has_context = bool(example.context)
    if not has_context and mode == "rl":
        return None
    if mode == "rl":
        return "prompt", {**id_column, "prompt": list(example.context), **example.columns}
    if mode == "rm":
        if len(example.replies) < 2:
            return None
        prompt: Any = list(example.context) if has_context else example.text or ""
        return "ranking", {
            **id_column,
            "prompt": prompt,
            "replies": [reply["content"] for reply in example.replies],
        }
    if not has_context and not example.replies:
        return "text", {**id_column, "text": example.text}
    if not has_context:
        return "text", {**id_column, "text": (example.text or "") + example.replies[0]["content"]}
    if example.replies:
        return "chat", {**id_column, "messages": [*example.context, example.replies[0]]}
    return None


def _drop_empty(more: Mapping[str, Any]) -> dict[str, Any]:
    nonempty: dict[str, Any] = {}
    for key, value in more.items():
        if value is not None and value != "":
            nonempty[key] = value
    return nonempty


PLACEHOLDER = re.compile(r"\{([^{}\n]+)\}")


def fill_template(template: str, row: Row, random: Random) -> str:
    """Fill in a template with the columns of a row and return the text.

    `template` is the path of a column (`answer`, `meta.text`) or a text with such paths in braces.
    In a path, a number is the index of a list entry, `?` selects a random entry, and `*` joins all
    entries with spaces. Null and missing values become "". Raises `BadRow` for a column that the
    row lacks.
    """
    if not PLACEHOLDER.search(template):
        return _to_text(pick_value(template, row, random))
    return PLACEHOLDER.sub(lambda match: _to_text(pick_value(match[1], row, random)), template)


def pick_value(path: str, row: Row, random: Random) -> Any:
    """Return the value at a path in a row. Paths are described in `fill_template`.

    Returns None for a key that a nested mapping lacks, since null keys are removed when Parquet
    files are read. Raises `BadRow` for a column that the row lacks.
    """
    value: Any = row
    if path in row:  # a column name can contain dots
        return row[path]
    for step in path.split("."):
        if value is None:
            return None
        if isinstance(value, Mapping):
            if value is row and step not in row:
                raise BadRow(f"lacks the key {path!r} (it has: {', '.join(map(repr, row))})")
            value = value.get(step)
        elif isinstance(value, Sequence) and not isinstance(value, str):
            value = _pick_entry(value, step, path, random)
        else:
            raise BadRow(f"{path!r}: there is no {step!r} in {type(value).__name__}")
    return value


def _pick_entry(values: Sequence[Any], step: str, path: str, random: Random) -> Any:
    if step == "*":
        return " ".join(map(_to_text, values))
    if step == "?":
        return values[random.randrange(len(values))] if values else None
    if not step.isdecimal():
        raise BadRow(f"{path!r}: {step!r} is not an index of a list; write a number, ? or *")
    return values[int(step)] if int(step) < len(values) else None


def _to_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, Mapping | list | tuple):
        raise BadRow(f"a text was expected, not {type(value).__name__}")
    return str(value)
