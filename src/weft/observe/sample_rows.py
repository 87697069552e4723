"""`samples.jsonl` as a report reads it: a few steps of it, in groups of one prompt each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from weft.observe.jsonl import read_row
from weft.observe.lenient import cleaned
from weft.observe.metrics import finite

SAMPLES = "samples.jsonl"
STEPS = 12  # that a report shows
GROUPS = 6  # of a step
STEP = re.compile(rb'\s*\{"step": (\d{1,15})[,}]')
DETAILED = b'"tokens": ['
T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """One prompt of a step with its completions, in order."""

    step: float
    id: str | None
    rows: Sequence[Mapping[str, Any]]

    @property
    def prompt(self) -> str:
        return str(self.rows[0].get("prompt") or "")

    @property
    def answer(self) -> str | None:
        """What the data say is right."""
        found = self.rows[0].get("answer")
        return str(found) if isinstance(found, str | int | float) else None

    @property
    def pair(self) -> bool:
        """Whether its answers are ranked by the data."""
        return len(self.rows) > 1 and all(finite(row.get("rank")) for row in self.rows)

    def values(self, name: str) -> list[float]:
        """The finite values that its rows have of a name."""
        return [float(row[name]) for row in self.rows if finite(row.get(name))]


def pick(values: Sequence[T], count: int) -> list[T]:
    """At most `count` of `values`, evenly spread, with the first and the last."""
    if len(values) <= count:
        return list(values)
    return [values[round(index * (len(values) - 1) / (count - 1))] for index in range(count)]


def read_samples(path: Path, steps: int = STEPS) -> list[dict[str, Any]]:
    """The rows of `steps` steps, of those that tell of single tokens where there are any.

    A file of a long run is large, so only these are parsed.
    """
    lines: dict[int, list[bytes]] = {}
    told: set[int] = set()
    if not path.is_file():
        return []
    with path.open("rb") as file:
        for line in file:
            step = _step(line)
            if step is not None:
                lines.setdefault(step, []).append(line)
                if DETAILED in line:
                    told.add(step)
    last = max(lines, default=0)
    if lines:
        chosen = pick(sorted(told | {last} if told else lines), steps)
    else:
        chosen = []
    return [row for step in chosen for line in lines[step] if (row := _row(line)) is not None]


def _step(line: bytes) -> int | None:
    """The step of a line, without reading the rest where it is written as weft writes it."""
    known = STEP.match(line)
    if known is not None:
        return int(known[1])  # at most 15 digits
    row = _row(line)
    return None if row is None else int(row["step"])


def _row(line: bytes) -> dict[str, Any] | None:
    row = read_row(line.decode("utf-8", errors="replace"))
    return None if row is None else dict(cleaned(row))


def groups(rows: Iterable[Mapping[str, Any]], most: int = GROUPS) -> dict[float, list[Group]]:
    """Step -> its groups, at most so many; completions of one id belong together."""
    found: dict[float, dict[str, list[Mapping[str, Any]]]] = {}
    for row in rows:
        id = row.get("id")
        of_step = found.setdefault(float(row["step"]), {})
        key = f"id {id}" if id is not None else f"row {len(of_step)}"
        of_step.setdefault(key, []).append(row)
    return {
        step: [
            Group(step, _id(listed[0]), _ordered(listed)) for listed in list(by_id.values())[:most]
        ]
        for step, by_id in sorted(found.items())
    }


def _id(row: Mapping[str, Any]) -> str | None:
    return None if row.get("id") is None else str(row["id"])


def _ordered(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Answers of a pair best first, others as they were made."""
    ranked = all(finite(row.get("rank")) for row in rows)
    return sorted(rows, key=lambda row: row["rank"]) if ranked else list(rows)
