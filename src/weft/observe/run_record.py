"""Record of a run, `run.json`: command, folder and software of each process that worked on it.

The runtime writes the record; `weft show` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from weft.observe.jsonl import read_json
from weft.observe.metrics import LAST_TIME, is_finite, is_step
from weft.observe.run_files import RECORD


@dataclass(frozen=True)
class RunStart:
    """Information about one start of a run. A run that is resumed has several starts.

    `step` is the number of steps that were done before this start. `commit` is the commit of weft's
    checkout, if weft is run from one.
    """

    time: float  # seconds since the epoch
    step: int = 0
    command: list[str] = field(default_factory=list)
    folder: str = ""
    host: str = ""
    hardware: str = ""
    commit: str = ""
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RunRecord:
    """Content of `run.json`. `starts` lists the starts of the run, oldest first.

    `chosen` lists the options that the user left unset and for which weft chose a value.
    """

    algorithm: str | None = None
    total_steps: int | None = None
    starts: list[RunStart] = field(default_factory=list)
    chosen: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, run: Path) -> RunRecord:
        """Read the record of a run. Fields that cannot be read keep their defaults."""
        record = read_json(run / RECORD)
        listed = record.get("starts")
        starts = [
            start
            for each in (listed if isinstance(listed, list) else [])
            if (start := _start(each)) is not None
        ]
        total = record.get("total_steps")
        algorithm = record.get("algorithm")
        chosen = record.get("chosen")
        return cls(
            algorithm if isinstance(algorithm, str) and algorithm else None,
            total if isinstance(total, int) and is_step(total) else None,
            starts,
            [str(name) for name in chosen] if isinstance(chosen, list) else [],
        )

    def to_plain(self) -> dict[str, Any]:
        """Return the record as the mapping that is stored in `run.json`."""
        return asdict(self)


def _start(value: Any) -> RunStart | None:
    if not isinstance(value, Mapping):
        return None
    time: Any = value.get("time")
    step: Any = value.get("step", 0)
    if not is_finite(time) or not 0 <= time <= LAST_TIME or not is_step(step):
        return None
    command = value.get("command")
    versions = value.get("versions")
    return RunStart(
        time=float(time),
        step=int(step),
        command=[str(word) for word in command] if isinstance(command, list) else [],
        versions={name: str(number) for name, number in versions.items()}
        if isinstance(versions, Mapping)
        else {},
        **{name: str(value.get(name) or "") for name in ("folder", "host", "hardware", "commit")},
    )
