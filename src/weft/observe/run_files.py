"""What a run's directory holds, read for its report; any of it may be missing."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.errors import ConfigError, UserError
from weft.observe.jsonl import read_rows
from weft.observe.metrics import finite
from weft.observe.timeline import Span, read_spans
from weft.reading import parse_yaml

CONFIG, STATUS, METRICS, SAMPLES = "config.yaml", "status.json", "metrics.jsonl", "samples.jsonl"
HARDWARE, PROFILE = "hardware.txt", "profile"  # what the device is; the folder of traces
TIMELINE, GRAPH, LOG = "timeline.json", "graph.svg", "log.txt"
KNOWN = (CONFIG, METRICS, SAMPLES, TIMELINE, GRAPH, LOG)
LOG_LINES = 400
QUIET_SECONDS = 600.0  # a run that has written nothing for so long is not called running


@dataclass(frozen=True)
class RunFiles:
    """The contents of one run's directory. `lines` are those of metrics.jsonl that have a step, oldest first."""

    directory: Path
    lines: Sequence[Mapping[str, Any]] = ()
    samples: Sequence[Mapping[str, Any]] = ()
    spans: Sequence[Span] = ()
    graph: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    log: Sequence[str] = ()
    status: str = "unfinished"
    hardware: str = ""
    traces: Sequence[str] = ()  # of steps that were profiled, by their paths in the directory

    @classmethod
    def read(cls, directory: Path) -> RunFiles:
        """Raises `ConfigError` where `directory` is no run's."""
        if not directory.is_dir():
            raise ConfigError(
                f"{directory}: there is no such directory; give the folder of a run, such as runs/EXPERIMENT/TRIAL"
            )
        if not any((directory / name).is_file() for name in KNOWN):
            inside = sorted(str(path.parent) for path in directory.glob(f"*/{CONFIG}")) or ["runs/EXPERIMENT/TRIAL"]
            raise ConfigError(
                f"{directory} holds no run (none of {', '.join(KNOWN)}); give the folder of a run, such as {inside[0]}"
            )
        return cls(
            directory=directory,
            lines=[row for row in read_rows(directory / METRICS) if finite(row.get("step"))],
            samples=[row for row in read_rows(directory / SAMPLES) if finite(row.get("step"))],
            spans=read_spans(directory / TIMELINE),
            graph=_text(directory / GRAPH),
            config=_config(directory / CONFIG),
            log=(_text(directory / LOG) or "").splitlines()[-LOG_LINES:],
            status=_status(directory),
            hardware=(_text(directory / HARDWARE) or "").strip(),
            traces=sorted(f"{PROFILE}/{path.name}" for path in (directory / PROFILE).glob("[!.]*.json.gz")),
        )

    @property
    def names(self) -> list[str]:
        """Every metric with a finite value, in the order of their first appearance."""
        return list(dict.fromkeys(name for line in self.lines for name, value in line.items() if finite(value)))

    @property
    def title(self) -> tuple[str, str]:
        """(experiment, trial): from the configuration, or else the names of the folders."""
        folder = self.directory.resolve()
        trial = self.config.get("trial_name") or folder.name
        return str(self.config.get("experiment_name") or folder.parent.name), str(trial)

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """(steps, values) of a metric, where it is finite."""
        pairs = [(float(line["step"]), float(line[name])) for line in self.lines if finite(line.get(name))]
        return [step for step, _ in pairs], [value for _, value in pairs]

    def not_finite(self, name: str) -> int:
        """Steps whose value of a metric was NaN or infinite."""
        return sum(1 for line in self.lines if name in line and line[name] is None)


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None


def _config(path: Path) -> dict[str, Any]:
    try:
        loaded, _ = parse_yaml(_text(path) or "", str(path))
    except UserError:
        return {}  # a report of what can be read is better than none
    return loaded if isinstance(loaded, dict) else {}


def _status(directory: Path) -> str:
    """finished, stopped, failed, running; unfinished where nobody wrote down how it ended."""
    try:
        status = str(json.loads((directory / STATUS).read_text())["status"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "unfinished"
    files = [directory / name for name in (STATUS, METRICS, LOG) if (directory / name).is_file()]
    quiet = time.time() - max(path.stat().st_mtime for path in files)
    return "unfinished" if status == "running" and quiet > QUIET_SECONDS else status
