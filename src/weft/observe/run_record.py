"""`run.json` of a run: how it was started, each time, by what and where. The runtime writes it, `weft show` reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from weft.observe.run_list import RECORD, read_json


@dataclass(frozen=True)
class Start:
    """One process that worked on the run. `step`: how many were done before; `commit`: of weft's own checkout, if it is one."""

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
    """Everything that `run.json` holds, oldest start first. `chosen`: options that nobody has set, and that weft has given a
    value."""

    algorithm: str | None = None
    total_steps: int | None = None
    starts: list[Start] = field(default_factory=list)
    chosen: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, run: Path) -> RunRecord:
        """As much of it as can be read."""
        found = read_json(run / RECORD)
        listed = found.get("starts")
        starts = [start for each in (listed if isinstance(listed, list) else []) if (start := _start(each)) is not None]
        total = found.get("total_steps")
        algorithm = found.get("algorithm")
        chosen = found.get("chosen")
        return cls(
            str(algorithm) if algorithm else None,
            total if isinstance(total, int) else None,
            starts,
            [str(name) for name in chosen] if isinstance(chosen, list) else [],
        )

    def plain(self) -> dict[str, Any]:
        """As it is written."""
        return asdict(self)


def _start(value: Any) -> Start | None:
    if not isinstance(value, Mapping):
        return None
    known = {spec.name: value[spec.name] for spec in fields(Start) if spec.name in value}
    try:
        return Start(**{**known, "time": float(known["time"]), "step": int(known.get("step", 0))})
    except (KeyError, TypeError, ValueError):
        return None
