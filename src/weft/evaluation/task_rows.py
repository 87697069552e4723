"""Readers of files with rows, for `task_data`. Errors name the file and the line."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.data.rows import BadRow, find_first_key, read_text
from weft.data.sources import SUFFIXES, UnreadableRow, read_rows
from weft.errors import DataError
from weft.reading import explain_read_errors

Row = Mapping[str, Any]
Item = dict[str, Any]
LocatedRows = Iterator[tuple[str, Row | UnreadableRow]]  # (FILE:LINE or another location, row)


def list_files(path: Path, *patterns: str) -> list[Path]:
    """Return the file itself, or the files in a folder that match the first pattern with a match.

    Raises `DataError` if no pattern matches a file.
    """
    if path.is_file():
        return [path]
    for pattern in patterns:
        files = sorted(file for file in path.glob(pattern) if file.is_file())
        if files:
            return files
    raise DataError(f"{path}: no file such as {' or '.join(patterns)} in it; name the file itself")


def list_row_files(path: Path, *patterns: str) -> list[Path]:
    """Return files with rows: the file itself, or files in a folder.

    In a folder, the first of these with a match are used: `patterns` in their order, files of a
    test or validation split, all files with rows. Files with `train` in their name are left out.
    Raises `DataError` if none remain.
    """
    splits = [f"**/*{split}*{suffix}" for split in ("test", "validation") for suffix in SUFFIXES]
    files = list_files(path, *patterns, *splits, *(f"**/*{suffix}" for suffix in SUFFIXES))
    usable_files = [file for file in files if path.is_file() or "train" not in file.stem]
    if not usable_files:
        raise DataError(f"{path}: only training data in it; name the file itself to use it anyway")
    return usable_files


def read_files(files: Sequence[Path]) -> LocatedRows:
    """Yield (FILE:LINE, row) of JSON, JSON lines, Parquet and CSV files."""
    for file in files:
        if file.suffix == ".csv":
            yield from _read_csv(file)
            continue
        single_row = _read_single(file)
        if single_row is not None:
            yield str(file), single_row
            continue
        for location, row in read_rows(file):
            yield str(location), row


def _read_single(file: Path) -> Row | None:
    """Return the row of a JSON file that is a single object on several lines, else None."""
    if file.suffix != ".json":
        return None
    text = read_file(file).removeprefix("\ufeff").strip()
    if not text.startswith("{") or "\n" not in text:
        return None
    try:
        return dict(json.loads(text))
    except ValueError:
        return None  # JSON lines, or an error that the reader of rows explains


def _read_csv(file: Path) -> LocatedRows:
    """Yield (FILE:LINE, row) of a CSV file whose first line names the columns."""
    with explain_read_errors(str(file), DataError), open_csv(file) as stream:
        reader = csv.DictReader(stream)
        for row in reader:
            yield f"{file}:{reader.line_num}", {key: value for key, value in row.items() if key}


def read_file(file: Path) -> str:
    """Return the text of a file. Raises `DataError` if it cannot be read, or is not UTF-8."""
    with explain_read_errors(str(file), DataError):
        return file.read_text(encoding="utf-8")


def open_csv(file: Path) -> Any:
    """Open a CSV file for reading; a byte order mark is skipped."""
    return file.open(encoding="utf-8-sig", newline="")


def convert_rows(rows: LocatedRows, convert: Callable[[Row], Item | None]) -> list[Item]:
    """Return the items of rows. Rows for which `convert` returns None are left out.

    Raises `DataError` with FILE:LINE of each unreadable row, and of each row for which `convert`
    raises `BadRow` or `DataError`.
    """
    items = []
    problems = []
    for place, row in rows:
        if isinstance(row, UnreadableRow):
            problems.append(f"{place}: {row.reason}")
            continue
        try:
            item = convert(row)
        except (BadRow, DataError) as error:
            problems.append(f"{place}: {error}")
            continue
        if item is not None:
            items.append(item)
    if problems:
        raise DataError(problems)
    return items


def require(row: Row, *keys: str) -> str:
    """Return the first of the keys that the row has. Raises `BadRow` if it has none."""
    key = find_first_key(row, keys)
    if key is None:
        present = ", ".join(map(repr, row)) or "none"
        raise BadRow(f"lacks the field {' or '.join(map(repr, keys))}; it has: {present}")
    return key


def read_field(row: Row, *keys: str) -> str:
    """Return the text of the first of the keys that the row has. Raises `BadRow` if it has none."""
    return read_text(row, require(row, *keys))
