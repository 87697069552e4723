"""Access to the columns of one row of a data file, with errors that describe the problem."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weft.errors import find_nearest
from weft.reading import shorten

Row = Mapping[str, Any]

PROMPT_KEYS = ("prompt", "instruction", "question")
ANSWER_KEYS = ("answer", "completion", "output", "response")
MESSAGE_KEYS = ("messages", "conversations", "conversation")
LABEL_KEYS = ("label", "kto_tag")

# (dataset type, keys by which its rows are recognized), most specific first.
TYPE_KEYS = (
    ("paired_comparison", ("pos_answers", "neg_answers")),
    ("preference", ("chosen", "rejected")),
    ("preference", ("chosen_messages", "rejected_messages")),
    ("ranking", ("replies",)),
    ("preference", ("prompt", "completion", "label")),
    ("preference", ("messages", "label")),
    ("preference", ("kto_tag",)),
    ("chat", ("messages",)),
    ("chat", ("conversations",)),
    ("prompt_answer", ("prompt", "answer")),
    ("prompt_answer", ("instruction", "output")),
    ("prompt_answer", ("question", "answer")),
    ("prompt_answer", ("prompt", "completion")),
    ("prompt", ("prompt",)),
    ("text", ("text",)),
)


# Usual dataset type of an algorithm -> type that reads Open-Assistant trees in its place.
TREE_TYPES = {"prompt_answer": "chat", "paired_comparison": "ranking", "preference": "ranking"}
SINGLE_MESSAGE_HINT = (
    "one message of an Open-Assistant export; dataset.named='{oasst_export: {path: FILE}}' reads a "
    "file of them"
)


class BadRow(Exception):
    """Raised if a row is invalid.

    The caller reports the message with the row's file and line, as part of a `DataError`.
    """


class RowTooLong(BadRow):
    """Raised if a row exceeds a length limit.

    Attributes:
        part: the part that is too long: "prompt" or "row"
        tokens: number of tokens of this part
        option: option that sets the limit
        limit: maximum number of tokens
        uncounted: True if the part was not tokenized and `tokens` is therefore only a lower bound
    """

    def __init__(
        self, part: str, tokens: int, option: str, limit: int, uncounted: bool = False
    ) -> None:
        super().__init__(part, tokens, option, limit, uncounted)
        self.part = part
        self.tokens = tokens
        self.option = option
        self.limit = limit
        self.uncounted = uncounted

    def __str__(self) -> str:
        bound = "at least " if self.uncounted else ""
        return (
            f"the {self.part} has {bound}{self.tokens:,} tokens, more than "
            f"{self.option}={self.limit}"
        )


class TrackedRow(Mapping[str, Any]):
    """Row that records which of its columns were read.

    Testing for a column with `in` does not count as reading it.
    """

    def __init__(self, row: Row) -> None:
        self.row = row
        self.read = set[str]()

    def __getitem__(self, key: str) -> Any:
        value = self.row[key]
        self.read.add(key)
        return value

    def __contains__(self, key: object) -> bool:
        return key in self.row

    def __iter__(self) -> Iterator[str]:
        return iter(self.row)

    def __len__(self) -> int:
        return len(self.row)


def find_first_key(row: Row, keys: Sequence[str]) -> str | None:
    """Return the first column in `keys` that has a non-null value in the row, or None."""
    return next((key for key in keys if row.get(key) is not None), None)


def require_key(row: Row, keys: Sequence[str], form: str) -> str:
    """Return the first of the column names `keys` with a non-null value in the row.

    Raises `BadRow` if there is none. The error names the missing column. If the row fits another
    dataset type better than `form`, the error names that type, too.
    """
    first_key = find_first_key(row, keys)
    if first_key is not None:
        return first_key
    if any(key in row for key in keys):
        raise BadRow(f"{next(key for key in keys if key in row)!r} is null")
    if is_tree_message(row):
        raise BadRow(f"is {SINGLE_MESSAGE_HINT}")
    close = find_nearest(keys[0], row)
    guessed_type = TREE_TYPES.get(form) if is_tree(row) else guess_type(row)
    if close:
        hint = f"did you mean {close[0]!r}?"
    else:
        hint = f"it has: {', '.join(map(repr, row)) or 'none'}"
    if guessed_type and guessed_type != form:
        other = f"; such rows are of dataset.type={guessed_type}"
    else:
        other = ""
    raise BadRow(f"lacks the key {keys[0]!r} ({hint}{other})")


def guess_type(row: Row) -> str | None:
    """Return the dataset type that fits the row's columns, or None if none fits.

    Columns with null values are ignored.
    """
    if is_tree(row):
        return "chat"
    if is_tree_message(row):
        return None
    dataset_type = next(
        (form for form, keys in TYPE_KEYS if all(row.get(key) is not None for key in keys)), None
    )
    if dataset_type == "prompt_answer" and find_answer_messages(row) is not None:
        return "chat"
    return dataset_type


def is_tree(row: Row) -> bool:
    """Return whether a row is an Open-Assistant tree of messages.

    A tree can consist of a single message without replies.
    """
    root = row.get("prompt")
    return isinstance(root, Mapping) and ("replies" in root or "message_id" in root)


def is_tree_message(row: Row) -> bool:
    """Return whether a row is one message of an Open-Assistant tree, with or without replies."""
    return all(isinstance(row.get(key), str) for key in ("message_id", "role", "text"))


def find_answer_messages(row: Row) -> str | None:
    """Return the name of the answer column if it contains messages.

    Returns None if it contains text, or if the row has no answer column.
    """
    key = find_first_key(row, ANSWER_KEYS)
    if key is not None and isinstance(row[key], Mapping | list | tuple):
        return key
    return None


def read_text(row: Row, key: str, *, may_be_empty: bool = False) -> str:
    """Return the text in column `key` of the row.

    Raises `BadRow` if the value is not text. An empty or blank text is also an error unless
    `may_be_empty` is set.
    """
    value = row[key]
    if not isinstance(value, str):
        raise BadRow(f"{key!r} must be text, not {describe_kind(value)}")
    if not may_be_empty and not value.strip():
        raise BadRow(f"{key!r} is empty")
    return value


def read_texts(row: Row, key: str, *, at_least: int = 1) -> list[str]:
    """Return the list of non-empty texts in column `key`.

    Raises `BadRow` if an entry is empty or is not text, or if there are fewer than `at_least`
    texts.
    """
    value = row[key]
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise BadRow(f"{key!r} must be a list of texts, not {describe_kind(value)}")
    for number, entry in enumerate(value, 1):
        if not isinstance(entry, str):
            raise BadRow(f"{key!r}, entry {number}, must be text, not {describe_kind(entry)}")
        if not entry.strip():
            raise BadRow(f"{key!r}, entry {number}, is empty")
    if len(value) < at_least:
        raise BadRow(f"{key!r} has {len(value)} entries; it needs at least {at_least}")
    return list(value)


def read_number(value: Any, key: str) -> float:
    """Return a value as a float. Raises `BadRow` if it is not a finite number."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not abs(value) <= sys.float_info.max
    ):
        raise BadRow(f"{key!r} must be a finite number, not {shorten(repr(value))}")
    return float(value)


def read_id(row: Row, key: str = "id") -> str | None:
    """Return the row's own id, or None if it has no id.

    Raises `BadRow` if the id is neither text nor an integer.
    """
    value = row.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise BadRow(f"{key!r} must be text or a whole number, not {value!r}")
    return str(value)


def to_json_value(value: Any) -> Any:
    """Convert a value to one that JSON can represent.

    Dates, decimals and values of other types become text.
    """
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): to_json_value(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [to_json_value(item) for item in value]
    return str(value)


def describe_kind(value: Any) -> str:
    """Describe the type of a JSON value in words, such as "a list"."""
    kinds = {
        str: "text",
        dict: "a mapping",
        list: "a list",
        bool: "true or false",
        type(None): "null",
    }
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "a number"
    return kinds.get(type(value), type(value).__name__)
