"""Readers of a run's files, any of which can be missing or damaged.

One damaged run must not prevent the others from being shown.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.errors import ConfigError
from weft.reading import MOST_DEPTH, read_object, read_yaml


def clean_value(value: Any, depth: int = 0) -> Any:
    """Convert nested plain values to a form that can be written to any output format.

    Keys become strings, and lone surrogates in strings are replaced. Values of other types, such as
    dates, become strings too. `depth` is the nesting level of `value`. Raises `ValueError` if
    values are nested too deeply.
    """
    if depth > MOST_DEPTH:
        raise ValueError(f"nests deeper than {MOST_DEPTH} levels")
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, dict):
        result = {}
        for name, each in value.items():
            result[clean_value(str(name))] = clean_value(each, depth + 1)
        return result
    if isinstance(value, list | tuple):
        return [clean_value(each, depth + 1) for each in value]
    return str(value).encode("utf-8", errors="replace").decode()


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Returns an empty dict if the file is missing or damaged, or contains no object.
    """
    try:
        return dict(clean_value(read_object(path, str(path))))
    except ValueError:  # includes `UserError`
        return {}


def read_config(path: Path) -> dict[str, Any]:
    """Return the options in a `config.yaml`; an empty dict if the file does not exist.

    Raises `ConfigError` if the file cannot be read.
    """
    if not path.exists():
        return {}
    content = read_yaml(path, str(path), ConfigError)
    return dict(clean_value(content)) if isinstance(content, dict) else {}
