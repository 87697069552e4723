"""What can be used of a run's files.

Any of them may be damaged, and one bad run must not keep the others from being shown.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.errors import ConfigError
from weft.reading import MOST_DEPTH, read_object, read_yaml


def cleaned(value: Any, depth: int = 0) -> Any:
    """Return nested plain values that any output can write: names are texts, texts hold no half
    characters (half of a surrogate pair), and what is neither number, text nor container, such as a
    date, is its text.

    Raises `ValueError` for values that nest too deep.
    """
    if depth > MOST_DEPTH:
        raise ValueError(f"nests deeper than {MOST_DEPTH} levels")
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, dict):
        return {cleaned(str(name)): cleaned(each, depth + 1) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [cleaned(each, depth + 1) for each in value]
    return str(value).encode("utf-8", errors="replace").decode()


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file; empty where the file is missing, no regular file, damaged, or
    holds something else.
    """
    try:
        return dict(cleaned(read_object(path, str(path))))
    except ValueError:  # which a `UserError` is too
        return {}


def read_config(path: Path) -> dict[str, Any]:
    """Return the options in a `config.yaml`; empty where there is none.

    Raises `ConfigError` where it cannot be read.
    """
    if not path.exists():
        return {}
    found = read_yaml(path, str(path), ConfigError)
    return dict(cleaned(found)) if isinstance(found, dict) else {}
