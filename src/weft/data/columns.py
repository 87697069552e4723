"""Columns of a user's rows: renaming of columns, and reading of the prompt.

Columns are renamed by `dataset.columns={prompt: question, answer: solution}`. All dataset types
read the prompt of a row, which is a text, a list of messages or a dialogue in one text, in the same
way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.data.messages import CONTEXT, FACTS, Message, normalize_messages
from weft.data.rows import (
    ANSWER_KEYS,
    LABEL_KEYS,
    MESSAGE_KEYS,
    PROMPT_KEYS,
    BadRow,
    Row,
    describe_kind,
    find_first_key,
    read_text,
    require_key,
)
from weft.data.sources import RowLocation, UnreadableRow, find_files, read_rows
from weft.data.turns import count_common_start
from weft.errors import ConfigError, DataError, find_nearest

HUMAN = "\n\nHuman:"
ASSISTANT = "\n\nAssistant:"


def find_shared_prompt(text: str, other: str) -> str:
    r"""Return the common prefix of two dialogues, up to and including its last `\n\nAssistant:`.

    Returns "" if the common prefix has no `\n\nAssistant:`.
    """
    position = text.rfind(ASSISTANT, 0, count_common_start(text, other))
    return text[: position + len(ASSISTANT)] if position >= 0 else ""


def find_assistant_spans(text: str) -> list[tuple[int, int]]:
    """Return the character spans [start, stop) of the assistant's turns in a dialogue.

    If the text has no turns of either speaker, the only span is the whole text.
    """
    spans = []
    mark = text.find(ASSISTANT)
    if mark < 0:
        return [] if HUMAN in text else [(0, len(text))]
    while mark >= 0:
        start = mark + len(ASSISTANT)
        human = text.find(HUMAN, start)
        stop = human if human >= 0 else len(text)
        following = text.find(ASSISTANT, start)
        if 0 <= following < stop:
            stop = following
        spans.append((start, stop))
        mark = following
    return spans


def split_messages(text: str) -> list[dict[str, str]]:
    """Split a dialogue into chat messages. Text before the first turn is the system message.

    Empty turns are dropped, except a final assistant turn, which is either an empty reply or a
    reply that is still to be generated.
    """
    marks = []
    for mark, role in ((HUMAN, "user"), (ASSISTANT, "assistant")):
        for start in _find_marks(text, mark):
            marks.append((start, role, mark))
    marks.sort()
    turns = [("system", text[: marks[0][0]] if marks else text)]
    for (start, role, mark), (stop, _, _) in zip(
        marks, [*marks[1:], (len(text), "", "")], strict=True
    ):
        turns.append((role, text[start + len(mark) : stop]))
    messages = []
    for role, content in turns[:-1]:
        if content.strip():
            messages.append((role, content.strip()))
    for role, content in turns[-1:]:
        if content.strip() or role == "assistant":
            messages.append((role, content.strip()))
    return [{"role": role, "content": content} for role, content in messages]


def _find_marks(text: str, mark: str) -> list[int]:
    """Return the start positions of all occurrences of `mark` in a text."""
    positions = []
    position = text.find(mark)
    while position >= 0:
        positions.append(position)
        position = text.find(mark, position + 1)
    return positions


def count_shared_characters(text: str, other: str) -> int:
    """Return the number of characters before the first word in which two texts differ.

    The last word of each text counts as different, so that a part of the text remains after the
    shared words. For example, the texts "a big dog" and "a big cat" share 6 characters.
    """
    length = min(count_common_start(text, other), len(text.rstrip()) - 1, len(other.rstrip()) - 1)
    while length > 0 and not text[length - 1].isspace():
        length -= 1
    return max(length, 0)


# names of columns
SYSTEM = "system"
INPUT = "input"
HISTORY = "history"


def list_prompt_keys(key: str | None) -> tuple[str, ...]:
    """Return the names of the columns that may contain the prompt.

    `key` is the column that the user chose, or None. If it is None, all usual prompt columns are
    returned; otherwise, only `key` is.
    """
    return (key,) if key else PROMPT_KEYS


def require_prompt_key(row: Row, key: str | None, form: str) -> str:
    """Return the name of the row's prompt column, which contains text or messages.

    `key` is the user's choice of the column, or None. `form` is the dataset type, for the error
    message. Raises `BadRow` if the row has no prompt.
    """
    return (
        find_first_key(row, list_prompt_keys(key))
        or find_first_key(row, MESSAGE_KEYS)
        or require_key(row, list_prompt_keys(key), form)
    )


def read_prompt_text(row: Row, key: str) -> str:
    """Return the prompt in column `key` of a row as plain text.

    The text of a `system` column comes before the prompt, on a separate line. The text of an
    `input` column comes after an instruction, on a separate line. If `key` is `instruction` or
    `question`, the result ends with a newline.
    """
    prompt = _read_question(row, key)
    system = _read_system(row)
    prefix = f"{system}\n" if system else ""
    if key in ("instruction", "question"):
        return f"{prefix}{prompt}\n"
    return prefix + prompt


def read_conversation(row: Row, key: str) -> list[Message]:
    r"""Return the prompt in column `key` of a row as messages, without trailing assistant messages.

    A text becomes a user message, preceded by the turns in a `history` column (pairs of a message
    and its reply). A text in the `\n\nHuman:` format is split into its turns. The text of a
    `system` column becomes the first message unless there is a system message already. Raises
    `BadRow` if no message is left to reply to.
    """
    value = row[key]
    if isinstance(value, str):
        if HUMAN in value:
            messages = normalize_messages(split_messages(value))
        else:
            if not value.strip():
                raise BadRow(f"{key!r} is empty")
            messages = [*_read_history(row), {"role": "user", "content": _read_question(row, key)}]
    else:
        messages = read_messages(row, key, "user")
    messages = prepend_system(row, messages)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise BadRow(f"{key!r} has no turn that a reply could follow")
    return messages


def read_messages(row: Row, key: str, role: str) -> list[Message]:
    """Return the messages in a column that contains text, one message or a list of messages.

    A text becomes a message with the role `role`. Raises `BadRow` naming the column if its value is
    neither text nor messages.
    """
    value = row[key]
    if isinstance(value, str):
        return normalize_messages([{"role": role, "content": value}])
    if not isinstance(value, Mapping | list | tuple):
        raise BadRow(
            f"{key!r} must be text or a list of messages {{role, content}}, not "
            f"{describe_kind(value)}"
        )
    return _normalize_column([value] if isinstance(value, Mapping) else value, key)


def read_message_list(row: Row, key: str) -> list[Message]:
    """Return the list of messages in a column.

    Raises `BadRow` naming the column if the messages are invalid.
    """
    if not isinstance(row[key], list | tuple):
        raise BadRow(
            f"{key!r} must be a list of messages {{role, content}}, not {describe_kind(row[key])}"
        )
    return _normalize_column(row[key], key)


def _normalize_column(messages: Sequence[Any], key: str) -> list[Message]:
    """Normalize the messages of the column `key`.

    Raises `BadRow` if the messages are invalid. The error names the column, except for the standard
    column `messages`.
    """
    try:
        return normalize_messages(messages)
    except DataError as error:
        raise BadRow(str(error) if key == MESSAGE_KEYS[0] else f"{key!r}: {error}") from error


def prepend_system(row: Row, messages: Sequence[Message]) -> list[Message]:
    """Prepend the text of the row's `system` column as a system message.

    Returns the messages unchanged if they have a system message already, or if there is no such
    text.
    """
    if messages and messages[0]["role"] in ("system", "developer"):
        return list(messages)
    system = _read_system(row)
    if system:
        return [{"role": "system", "content": system}, *messages]
    return list(messages)


def _read_question(row: Row, key: str) -> str:
    """Return the text of the prompt column.

    For an instruction, the text of the `input` column is appended on the next line.
    """
    prompt = read_text(row, key, may_be_empty=True)
    if key == "instruction" and row.get(INPUT) is not None:
        appended = read_text(row, INPUT, may_be_empty=True)
        return f"{prompt}\n{appended}" if appended else prompt
    return prompt


def _read_system(row: Row) -> str:
    if row.get(SYSTEM) is None:
        return ""
    return read_text(row, SYSTEM, may_be_empty=True)


def _read_history(row: Row) -> list[Message]:
    """Return the messages of the `history` column.

    The column contains pairs of a user message and the reply to it.
    """
    pairs = row.get(HISTORY) or []
    if not isinstance(pairs, Sequence) or isinstance(pairs, str):
        raise BadRow(
            f"{HISTORY!r} must be a list of [message, reply] pairs, not {describe_kind(pairs)}"
        )
    messages: list[Message] = []
    for number, pair in enumerate(pairs, 1):
        if (
            not isinstance(pair, Sequence)
            or len(pair) != 2
            or not all(isinstance(text, str) for text in pair)
        ):
            raise BadRow(
                f"{HISTORY!r}, entry {number}, must be a pair of texts: a message and its reply"
            )
        messages += [
            {"role": "user", "content": pair[0]},
            {"role": "assistant", "content": pair[1]},
        ]
    return messages


COMMON_COLUMNS = ("id", SYSTEM, INPUT, HISTORY, "tools", *FACTS, CONTEXT)
PROMPT_COLUMNS = (*PROMPT_KEYS, *MESSAGE_KEYS)
# Columns that each dataset type reads. Type `prompt` (whose columns are passed to verifiers) and
# the user's dataset classes accept any column.
TYPE_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "prompt_answer": (*PROMPT_COLUMNS, *ANSWER_KEYS),
    "chat": (*PROMPT_COLUMNS, *ANSWER_KEYS),
    "paired_comparison": (*PROMPT_COLUMNS, "pos_answers", "neg_answers", "margin"),
    "preference": (
        *PROMPT_COLUMNS,
        "chosen",
        "rejected",
        "chosen_messages",
        "rejected_messages",
        "margin",
        *ANSWER_KEYS,
        *LABEL_KEYS,
    ),
    "ranking": (*PROMPT_COLUMNS, "prefix", "replies", "augmented"),
    "text": ("text",),
}
MAX_SHOWN = 20  # maximum number of columns listed in an error message

# column name of the dataset type -> column of the file, or a.b for key b of the mapping in column a
Columns = Mapping[str, str]
Read = tuple[RowLocation, Row | UnreadableRow]


def check_names(columns: Columns, type: str, args: Mapping[str, Any]) -> None:
    """Check that the keys of `columns` are names of columns that the dataset type `type` reads.

    Types that are not in `TYPE_COLUMNS` accept any name. The values of arguments such as
    `prompt_key` in `args` are accepted too. Raises `ConfigError` for an unknown name, and if an
    argument such as `prompt_key` is empty.
    """
    for name, value in args.items():
        if name.endswith("_key") and value == "":
            raise ConfigError(f"dataset.args.{name}='': is empty; name a column, or leave it out")
    named_by_args = []
    for name, value in args.items():
        if name.endswith("_key"):
            named_by_args.append(str(value))
    if type not in TYPE_COLUMNS:
        return
    for name, column in columns.items():
        known = (*TYPE_COLUMNS[type], *COMMON_COLUMNS, *named_by_args)
        if name not in known:
            close = find_nearest(name, known)
            if column in known:
                swapped = f"; names come first: {{{column}: {name}}}"
            else:
                swapped = ""
            if close:
                hint = f"did you mean {' or '.join(close)}?"
            else:
                hint = f"names: {', '.join(TYPE_COLUMNS[type])}"
            raise ConfigError(
                f"dataset.columns: rows of dataset.type={type} have no {name!r} (given for "
                f"column {column!r}); "
                f"{hint}{swapped}"
            )


def read_renamed_rows(path: str, split: str | None, columns: Columns) -> Iterator[Read]:
    """Yield (location, row) for each row of a source, with its columns renamed.

    `columns` maps new names to old ones. After the last row, raises `ConfigError` if one of the old
    names occurred in no row.
    """
    return rename_columns(
        (row for file in find_files(path, split) for row in read_rows(file)), columns, path
    )


def rename_columns(rows: Iterable[Read], columns: Columns, path: str | Path) -> Iterator[Read]:
    """Yield (location, row) for each of `rows`, with its columns renamed.

    `columns` maps new names to old ones. After the last row, raises `ConfigError`, naming `path`,
    if one of the old names occurred in no row.
    """
    missing = dict(columns)
    existing = dict[str, None]()
    for place, row in rows:
        if isinstance(row, UnreadableRow) or not columns:
            yield place, row
            continue
        existing.update(dict.fromkeys(_iterate_paths(row)))
        renamed_values = {
            name: value
            for name, column in columns.items()
            if (value := _read_value(row, column)) is not ABSENT
        }
        for name in renamed_values:
            missing.pop(name, None)
        used = set(columns.values())
        yield (
            place,
            {**{key: value for key, value in row.items() if key not in used}, **renamed_values},
        )
    if missing and existing:
        raise ConfigError(_describe_missing(missing, list(existing), path))


def _describe_missing(missing: Mapping[str, str], existing: list[str], path: str | Path) -> str:
    """Format the error message for columns that are to be renamed but do not exist.

    `missing` maps the new name of each of these columns to its old name. `existing` lists the
    columns that exist.
    """
    name, column = next(iter(missing.items()))
    close = find_nearest(column, existing)
    hint = f"did you mean {' or '.join(close)}? The" if close else "the"
    remainder = f" and {len(existing) - MAX_SHOWN} more" if len(existing) > MAX_SHOWN else ""
    return (
        f"dataset.columns: {name}: no row of {path} has the column {column!r}; {hint} columns are "
        f"{', '.join(existing[:MAX_SHOWN])}{remainder}"
    )


ABSENT = object()


def _read_value(row: Row, column: str) -> Any:
    """Return the value of a column, or `ABSENT` if the row lacks it.

    The name `a.b` refers to key b of the mapping in column a, and `a.0` to the first entry of a
    list.
    """
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return ABSENT
    return value


def _iterate_paths(row: Row, prefix: str = "") -> Iterator[str]:
    """Yield the column names of a row. Keys of nested mappings have dotted names such as `a.b`."""
    for key, value in row.items():
        if isinstance(value, Mapping) and value:
            yield from _iterate_paths(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"
