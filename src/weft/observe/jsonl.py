"""Files of one JSON object a line, each of a step: `metrics.jsonl` and `samples.jsonl`. Whole after any kill."""

from __future__ import annotations

import json
import math
import numbers
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

TEMPORARY = ".tmp"


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: numpy and zero-dimensional array numbers become Python's; what is not finite becomes
    None, since JSON has no NaN."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, numbers.Integral):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file, oldest first; nothing where there is no file. A half-written last line is left out."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                yield row


class StepFile:
    """Appends objects that hold their `step`. Each is written by one call and flushed, so a kill costs one line at most."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one object as a line. NaN and infinities are written as null."""
        self.extend([row])

    def extend(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write objects as lines, all at once."""
        lines = "".join(json.dumps(plain(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(lines)

    def truncate(self, step: int) -> None:
        """Keep the lines of steps up to `step`, as they are; later ones, and a half-written last one, go."""
        if self.path.is_file():
            self._rewrite(lambda line: line if line.endswith(b"\n") and _step_of(line) <= step else b"")

    def amend(self, step: int, more: Mapping[str, Any]) -> None:
        """Put `more` into the object of `step`, at once: a kill leaves the line as it was or as it will be."""

        def mended(line: bytes) -> bytes:
            row = json.loads(line) | plain(more) if _step_of(line) == step else None
            return line if row is None else (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode()

        self._rewrite(mended)

    def _rewrite(self, change: Callable[[bytes], bytes]) -> None:
        """The file with every line changed, in one move."""
        temporary = self.path.with_name(self.path.name + TEMPORARY)
        with self.path.open("rb") as old, temporary.open("wb") as new:
            new.writelines(change(line) for line in old)
            new.flush()
            os.fsync(new.fileno())
        os.replace(temporary, self.path)

    def rows(self) -> Iterator[dict[str, Any]]:
        """The objects of the file, oldest first."""
        return read_rows(self.path)


def _step_of(line: bytes) -> float:
    """The step of a line; infinite for one that cannot be read, so that it is dropped."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
