"""Selection of values in a row by a path, and templates that combine several values.

Examples of templates: `"{context} {question}"`, `"{answers.text.0}"`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from weft.data.rows import BadRow, Row

PLACE = re.compile(r"\{([^{}\n]+)\}")


def fill_template(template: str, row: Row, random: Random) -> str:
    """Fill in a template with the columns of a row and return the text.

    `template` is the path of a column (`answer`, `meta.text`) or a text with such paths in braces.
    In a path, a number is the index of a list entry, `?` selects a random entry, and `*` joins all
    entries with spaces. Null and missing values become "". Raises `BadRow` for a column that the
    row lacks.
    """
    if not PLACE.search(template):
        return _to_text(pick_value(template, row, random))
    return PLACE.sub(lambda match: _to_text(pick_value(match[1], row, random)), template)


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
