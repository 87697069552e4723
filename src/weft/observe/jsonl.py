"""Files of one JSON object a line, each of a step: `metrics.jsonl` and `samples.jsonl`.

Whole after any kill.
"""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.observe.lenient import cleaned
from weft.observe.metrics import is_step
from weft.reading import MOST_DEPTH
from weft.writing import opened, replacing


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: numpy and zero-dimensional array numbers become Python's; what
    is not finite becomes None, since JSON has no NaN.
    """
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
    """Yield the objects of a file that have a step, oldest first; nothing where there is no regular
    file.

    A line that cannot be read, such as a half-written last one, is left out.
    """
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            row = read_row(line)
            if row is not None:
                yield row


def read_row(line: str) -> dict[str, Any] | None:
    """Return the object of a line; None for a line that cannot be read or has no step."""
    try:
        row = json.loads(line)
        if not isinstance(row, dict) or not is_step(row.get("step")):
            return None
        if line.count("[") + line.count("{") > MOST_DEPTH:
            cleaned(row)  # which refuses what nests too deep
        return row
    except (ValueError, RecursionError):
        return None


def listed(steps: Sequence[int], most: int = 8) -> str:
    """Return whole numbers in rising order as text, neighbours as ranges: `1-3, 7, 9-20`, at most
    so many of them.
    """
    ranges: list[list[int]] = []
    for step in steps:
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in ranges[:most]]
    return ", ".join(texts) + (
        f" and {len(ranges) - most} more ranges" if len(ranges) > most else ""
    )


class StepFile:
    """Appends objects that hold their `step`.

    Each is written by one call and flushed, so a kill costs one line at most.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one object as a line. NaN and infinities are written as null."""
        self.extend([row])

    def extend(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write objects as lines, all at once."""
        lines = "".join(
            json.dumps(plain(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows
        )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with opened(self.path, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(lines)

    def truncate(self, step: int) -> None:
        """Keep the lines of steps up to `step`, as they are; later ones, and a half-written last
        one, go.
        """
        if self.path.is_file():
            self._rewrite(
                lambda line: line if line.endswith(b"\n") and _step_of(line) <= step else b""
            )

    def missing(self, first: int, last: int) -> list[int]:
        """Return the steps from `first` to `last` that have no line which can be read, in order."""
        there = {int(row["step"]) for row in self.rows()}
        return [step for step in range(first, last + 1) if step not in there]

    def amend(self, step: int, more: Mapping[str, Any]) -> None:
        """Put `more` into the object of `step`, at once: a kill leaves the line as it was or as it
        will be.
        """

        def mended(line: bytes) -> bytes:
            row = json.loads(line) | plain(more) if _step_of(line) == step else None
            if row is None:
                return line
            return (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode()

        self._rewrite(mended)

    def _rewrite(self, change: Callable[[bytes], bytes]) -> None:
        """The file with every line changed, in one move."""
        with (
            self.path.open("rb") as old,
            replacing(self.path) as partial,
            partial.open("wb") as new,
        ):
            new.writelines(change(line) for line in old)

    def rows(self) -> Iterator[dict[str, Any]]:
        """The objects of the file, oldest first."""
        return read_rows(self.path)


def _step_of(line: bytes) -> float:
    """The step of a line; infinite for one that cannot be read, so that it is dropped."""
    row = read_row(line.decode("utf-8", errors="replace"))
    return math.inf if row is None else row["step"]
