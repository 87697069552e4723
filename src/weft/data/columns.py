"""Rename columns of the user's rows: `dataset.columns={prompt: question, answer: solution}`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from weft.data.messages import CONTEXT, FACTS
from weft.data.prompt_columns import HISTORY, INPUT, SYSTEM
from weft.data.rows import ANSWER_KEYS, LABEL_KEYS, MESSAGE_KEYS, PROMPT_KEYS, Row
from weft.data.sources import RowLocation, UnreadableRow, find_files, read_rows
from weft.errors import ConfigError, find_nearest

ANYWHERE = ("id", SYSTEM, INPUT, HISTORY, "tools", *FACTS, CONTEXT)
ASKED = (*PROMPT_KEYS, *MESSAGE_KEYS)
# Columns that each dataset type reads. Type `prompt` (whose columns are passed to verifiers) and
# the user's dataset classes accept any column.
NAMES: Mapping[str, tuple[str, ...]] = {
    "prompt_answer": (*ASKED, *ANSWER_KEYS),
    "chat": (*ASKED, *ANSWER_KEYS),
    "paired_comparison": (*ASKED, "pos_answers", "neg_answers", "margin"),
    "preference": (
        *ASKED,
        "chosen",
        "rejected",
        "chosen_messages",
        "rejected_messages",
        "margin",
        *ANSWER_KEYS,
        *LABEL_KEYS,
    ),
    "ranking": (*ASKED, "prefix", "replies", "augmented"),
    "text": ("text",),
}
SHOWN = 20  # maximum number of columns listed in an error message

# column name of the dataset type -> column of the file, or a.b for key b of the mapping in column a
Columns = Mapping[str, str]
Read = tuple[RowLocation, Row | UnreadableRow]


def check_names(columns: Columns, type: str, args: Mapping[str, Any]) -> None:
    """Check that the keys of `columns` are names of columns that the dataset type `type` reads.

    Types that are not in `NAMES` accept any name. The values of arguments such as `prompt_key` in
    `args` are accepted too. Raises `ConfigError` for an unknown name, and if an argument such as
    `prompt_key` is empty.
    """
    for name, value in args.items():
        if name.endswith("_key") and value == "":
            raise ConfigError(f"dataset.args.{name}='': is empty; name a column, or leave it out")
    own = []
    for name, value in args.items():
        if name.endswith("_key"):
            own.append(str(value))
    for name, column in columns.items() if type in NAMES else ():
        known = (*NAMES[type], *ANYWHERE, *own)
        if name not in known:
            close = find_nearest(name, known)
            if column in known:
                swapped = f"; names come first: {{{column}: {name}}}"
            else:
                swapped = ""
            if close:
                hint = f"did you mean {' or '.join(close)}?"
            else:
                hint = f"names: {', '.join(NAMES[type])}"
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
    there = dict[str, None]()
    for place, row in rows:
        if isinstance(row, UnreadableRow) or not columns:
            yield place, row
            continue
        there.update(dict.fromkeys(_iterate_paths(row)))
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
    if missing and there:
        raise ConfigError(_describe_missing(missing, list(there), path))


def _describe_missing(missing: Mapping[str, str], there: list[str], path: str | Path) -> str:
    """Format the error message for columns that are to be renamed but do not exist.

    `missing` maps the new name of each of these columns to its old name. `there` lists the columns
    that exist.
    """
    name, column = next(iter(missing.items()))
    close = find_nearest(column, there)
    hint = f"did you mean {' or '.join(close)}? The" if close else "the"
    more = f" and {len(there) - SHOWN} more" if len(there) > SHOWN else ""
    return (
        f"dataset.columns: {name}: no row of {path} has the column {column!r}; {hint} columns are "
        f"{', '.join(there[:SHOWN])}{more}"
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
