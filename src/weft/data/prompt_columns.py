"""Read the prompt of a row, as text or as messages, in the same way for all dataset types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.data import dialogue
from weft.data.messages import Message, normalize_messages
from weft.data.rows import (
    MESSAGE_KEYS,
    PROMPT_KEYS,
    BadRow,
    Row,
    describe_kind,
    find_first_key,
    read_text,
    require_key,
)
from weft.errors import DataError

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
    above = f"{system}\n" if system else ""
    if key in ("instruction", "question"):
        return f"{above}{prompt}\n"
    return above + prompt


def read_conversation(row: Row, key: str) -> list[Message]:
    r"""Return the prompt in column `key` of a row as messages, without trailing assistant messages.

    A text becomes a user message, preceded by the turns in a `history` column (pairs of a message
    and its reply). A text in the `\n\nHuman:` format is split into its turns. The text of a
    `system` column becomes the first message unless there is a system message already. Raises
    `BadRow` if no message is left to reply to.
    """
    value = row[key]
    if isinstance(value, str):
        if dialogue.HUMAN in value:
            messages = normalize_messages(dialogue.split_messages(value))
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
            f"{key!r} must be text or a list of messages {{role, content}}, not {describe_kind(value)}"
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
        more = read_text(row, INPUT, may_be_empty=True)
        return f"{prompt}\n{more}" if more else prompt
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
