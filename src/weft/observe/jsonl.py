"""Readers and writers of a run's JSON and JSON Lines files, and short names of checkpoints.

Each line of a JSON Lines file has one object and belongs to a training step. Files can be missing
or damaged; readers skip unreadable parts.
"""

from __future__ import annotations

import json
import math
import numbers
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.errors import ConfigError
from weft.observe.metrics import is_step
from weft.reading import MAX_DEPTH, read_object, read_yaml
from weft.writing import replace_file, resolve_destination


def clean_value(value: Any, depth: int = 0) -> Any:
    """Convert nested plain values to a form that can be written to any output format.

    Keys become strings, and lone surrogates in strings are replaced. Values of other types, such as
    dates, become strings too. `depth` is the nesting level of `value`. Raises `ValueError` if
    values are nested too deeply.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"nests deeper than {MAX_DEPTH} levels")
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, dict):
        result = {}
        for name, item in value.items():
            result[clean_value(str(name))] = clean_value(item, depth + 1)
        return result
    if isinstance(value, list | tuple):
        return [clean_value(item, depth + 1) for item in value]
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


def convert_to_json(value: Any) -> Any:
    """Convert `value` to types that JSON can represent.

    Numbers and zero-dimensional arrays of numpy become Python numbers. NaN and infinities become
    None, since JSON has neither.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): convert_to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [convert_to_json(item) for item in value]
    if isinstance(value, numbers.Integral):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects in a file, oldest first, except those without a valid `step`.

    Lines that cannot be parsed, such as an incomplete last line, are skipped. Yields nothing if
    `path` is not a regular file.
    """
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            row = read_row(line)
            if row is not None:
                yield row


def read_row(line: str) -> dict[str, Any] | None:
    """Return the object in a line; None if the line cannot be parsed or has no valid `step`."""
    try:
        row = json.loads(line)
        if not isinstance(row, dict) or not is_step(row.get("step")):
            return None
        if line.count("[") + line.count("{") > MAX_DEPTH:
            clean_value(row)  # raises ValueError if the row is nested too deeply
        return row
    except (ValueError, RecursionError):
        return None


def format_ranges(steps: Sequence[int], max_ranges: int = 8) -> str:
    """Format increasing whole numbers, such as steps, as ranges: `1-3, 7, 9-20`.

    If there are more than `max_ranges` ranges, the others are only counted, as in `and 2 more
    ranges`.
    """
    ranges: list[list[int]] = []
    for step in steps:
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    texts = [
        str(first) if first == last else f"{first}-{last}" for first, last in ranges[:max_ranges]
    ]
    return ", ".join(texts) + (
        f" and {len(ranges) - max_ranges} more ranges" if len(ranges) > max_ranges else ""
    )


class StepFile:
    """JSON Lines file to which objects with a `step` are appended.

    Each append is a single write and is flushed, so that at most one line is lost if the process is
    killed. Raises `UserError` if `path` exists but is not a regular file.
    """

    def __init__(self, path: Path) -> None:
        self.path = resolve_destination(path)

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one object as a line. NaN and infinities are written as null."""
        self.extend([row])

    def extend(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write several objects as lines, in a single write."""
        lines = "".join(
            json.dumps(convert_to_json(row), ensure_ascii=False, allow_nan=False) + "\n"
            for row in rows
        )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(lines)

    def truncate(self, step: int) -> None:
        """Remove the lines of steps after `step`, and an incomplete last line."""
        if self.path.is_file():
            self._rewrite(
                lambda line: line if line.endswith(b"\n") and _read_step(line) <= step else b""
            )

    def find_missing(self, first: int, last: int) -> list[int]:
        """Return the steps from `first` to `last`, inclusive, that have no readable line."""
        present_steps = {int(row["step"]) for row in self.read_rows()}
        return [step for step in range(first, last + 1) if step not in present_steps]

    def amend(self, step: int, items: Mapping[str, Any]) -> None:
        """Add `items` to the objects of `step`, replacing the file atomically."""

        def amend_line(line: bytes) -> bytes:
            if _read_step(line) != step:
                return line
            row = json.loads(line) | convert_to_json(items)
            return (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode()

        self._rewrite(amend_line)

    def _rewrite(self, change: Callable[[bytes], bytes]) -> None:
        """Apply `change` to each line, and replace the file atomically with the results."""
        with (
            self.path.open("rb") as old,
            replace_file(self.path) as partial,
            partial.open("wb") as new,
        ):
            new.writelines(change(line) for line in old)

    def read_rows(self) -> Iterator[dict[str, Any]]:
        """Yield the objects in the file, oldest first, except those without a valid `step`."""
        return read_rows(self.path)


def _read_step(line: bytes) -> float:
    """Return the step of a line, or infinity for an unreadable line, so that `truncate` removes it."""
    row = read_row(line.decode("utf-8", errors="replace"))
    return math.inf if row is None else row["step"]


POLICIES = ("actor", "model")  # roles whose checkpoint is a policy, most likely first
CHECKPOINTS = "checkpoints"
SUITE_FOLDER = "eval"  # folder of a run with the results of `eval_suite`, in stepN below it
STEP = re.compile(r"step(\d+)")


def shorten_path(path: str) -> str:
    """Return the short name of a run's checkpoint, or `path` itself for any other path.

    Examples are `runs/E/T@step40` for a policy, and `runs/E/T@step40:critic` for another role,
    where E is the experiment and T the trial.
    """
    parts = Path(path).parts
    if len(parts) <= 3 or parts[-3] != CHECKPOINTS or STEP.fullmatch(parts[-1]) is None:
        return path
    name = f"{Path(*parts[:-3])}@{parts[-1]}"
    return name if parts[-2] in POLICIES else f"{name}:{parts[-2]}"


def build_served_name(path: str) -> str:
    """Return the name by which clients of a server refer to a model.

    For a run's checkpoint, this is the name of the trial. Otherwise it is the last part of the
    path, ignoring step folders such as `step40`. The name is safe in URLs, and does not change when
    a run continues.
    """
    parts = Path(path).parts
    if len(parts) > 3 and parts[-3] == CHECKPOINTS and STEP.fullmatch(parts[-1]):
        name = parts[-4]
    else:
        name = next((part for part in reversed(parts) if STEP.fullmatch(part) is None), path)
    return re.sub(r"[^A-Za-z0-9._-]", "-", name)
