"""`run.json` of a run: how it was started, each time, by what and where.

The runtime writes it, `weft show` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from weft.observe.lenient import read_json
from weft.observe.metrics import LAST_TIME, finite, is_step
from weft.observe.run_files import RECORD


@dataclass(frozen=True)
class Start:
    """One process that worked on the run.

    `step`: how many were done before; `commit`: of weft's own checkout, if it is one.
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
    """Everything that `run.json` holds, oldest start first.

    `chosen`: options that nobody has set, and that weft has given a value.
    """

    algorithm: str | None = None
    total_steps: int | None = None
    starts: list[Start] = field(default_factory=list)
    chosen: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, run: Path) -> RunRecord:
        """As much of it as can be read."""
        found = read_json(run / RECORD)
        listed = found.get("starts")
        starts = [
            start
            for each in (listed if isinstance(listed, list) else [])
            if (start := _start(each)) is not None
        ]
        total = found.get("total_steps")
        algorithm = found.get("algorithm")
        chosen = found.get("chosen")
        return cls(
            algorithm if isinstance(algorithm, str) and algorithm else None,
            total if isinstance(total, int) and is_step(total) else None,
            starts,
            [str(name) for name in chosen] if isinstance(chosen, list) else [],
        )

    def plain(self) -> dict[str, Any]:
        """As it is written."""
        return asdict(self)


def _start(value: Any) -> Start | None:
    if not isinstance(value, Mapping):
        return None
    time: Any = value.get("time")
    step: Any = value.get("step", 0)
    if not finite(time) or not 0 <= time <= LAST_TIME or not is_step(step):
        return None
    command = value.get("command")
    versions = value.get("versions")
    return Start(
        time=float(time),
        step=int(step),
        command=[str(word) for word in command] if isinstance(command, list) else [],
        versions={name: str(number) for name, number in versions.items()}
        if isinstance(versions, Mapping)
        else {},
        **{name: str(value.get(name) or "") for name in ("folder", "host", "hardware", "commit")},
    )
