"""Reader of a run's directory, any file of which can be missing, and the record `run.json`.

The record has the command, folder and software of each process that worked on the run.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from weft.errors import ConfigError
from weft.observe.best import BestRecord
from weft.observe.diagnosis import RunDiagnosis, diagnose_run
from weft.observe.jsonl import clean_value, read_config, read_json, read_rows
from weft.observe.metrics import LARGEST, LAST_TIME, is_finite, is_step
from weft.observe.sample_rows import EVAL_PROMPTS, SAMPLES, read_samples
from weft.observe.shown_plan import ShownPlan, read_plan
from weft.observe.timeline import TimelineSpan, read_spans
from weft.redaction import mask_values, redact

CONFIG = "config.yaml"
STATUS = "status.json"
METRICS = "metrics.jsonl"
RECORD = "run.json"
HARDWARE = "hardware.txt"
PROFILE = "profile"  # folder of the profiler's traces
TIMELINE = "timeline.json"
GRAPH = "graph.svg"
LOG = "log.txt"
# A directory with any of these files is a run.
RUN_FILES = (CONFIG, METRICS, SAMPLES, TIMELINE, GRAPH, LOG)
# Statuses that a run writes; a run without one is `unfinished`.
STATUSES = ("running", "finished", "stopped", "failed")
MAX_LOG_LINES = 400  # number of last lines of the log in the report
NUMBER_TYPES = frozenset((float, int))
# Bytes read at each end of a timeline; the middle of a longer one is left out of the report.
HEAD_BYTES = 1 << 20
TAIL_BYTES = 3 << 20
QUIET_SECONDS = 600.0  # a run that has written nothing for longer does not count as running


@dataclass(frozen=True)
class RunFiles:
    """Contents of a run's directory.

    `lines` are the rows of metrics.jsonl that have a step, oldest first. `samples` are the samples
    of a few steps, and `answers` the answers to the fixed prompts. `spans` are the timed spans of
    the timeline. `record` is the content of run.json, which describes the starts of the run.
    """

    directory: Path
    lines: Sequence[Mapping[str, Any]] = ()
    samples: Sequence[Mapping[str, Any]] = ()
    spans: Sequence[TimelineSpan] = ()
    graph: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    log: Sequence[str] = ()
    status: str = "unfinished"
    hardware: str = ""
    traces: Sequence[str] = ()  # profiler traces, as paths relative to the directory
    record: Mapping[str, Any] = field(default_factory=dict)
    answers: Sequence[Mapping[str, Any]] = ()  # answers to the fixed prompts at several steps
    best: BestRecord | None = None  # best checkpoint, if the run has one
    plan: ShownPlan | None = None  # simulated steps; None if their duration is not predicted

    @classmethod
    def read(cls, directory: Path) -> RunFiles:
        """Read the files in a run's directory.

        Raises `ConfigError` if the directory does not contain a run.
        """
        if not directory.is_dir():
            raise ConfigError(
                f"{directory}: there is no such directory; give the folder of a run, such as "
                f"runs/EXPERIMENT/TRIAL"
            )
        if not any((directory / name).is_file() for name in RUN_FILES):
            examples = sorted(str(path.parent) for path in directory.glob(f"*/{CONFIG}")) or [
                "runs/EXPERIMENT/TRIAL"
            ]
            raise ConfigError(
                f"{directory} contains no run (none of {', '.join(RUN_FILES)}); give the folder of a "
                f"run, such as {examples[0]}"
            )
        return cls(
            directory=directory,
            lines=list(read_rows(directory / METRICS)),
            samples=read_samples(directory / SAMPLES),
            spans=read_spans(directory / TIMELINE, HEAD_BYTES, TAIL_BYTES),
            graph=_read_text(directory / GRAPH),
            config=_read_options(directory / CONFIG),
            log=[
                redact(line)
                for line in (_read_text(directory / LOG) or "").splitlines()[-MAX_LOG_LINES:]
            ],
            status=_read_status(directory),
            hardware=(_read_text(directory / HARDWARE) or "").strip(),
            traces=sorted(
                f"{PROFILE}/{path.name}" for path in (directory / PROFILE).glob("[!.]*.json.gz")
            ),
            record=mask_values(read_json(directory / RECORD)),
            answers=list(read_rows(directory / EVAL_PROMPTS)),
            best=BestRecord.read(directory),
            plan=read_plan(directory),
        )

    @property
    def metric_names(self) -> list[str]:
        """Names of all metrics that have a finite value, in the order of first appearance."""
        return list(self._columns)

    @property
    def _columns(self) -> dict[str, tuple[list[float], list[float]]]:
        return self._table[0]

    @cached_property
    def _table(self) -> tuple[dict[str, tuple[list[float], list[float]]], Counter[str]]:
        """Steps and finite values of each metric, and the number of non-finite values per metric.

        Values that are too large count as non-finite. The table is computed once. For speed,
        consecutive lines with the same metrics are converted together, since a long run has a
        million values.
        """
        columns: dict[str, tuple[list[float], list[float]]] = {}
        num_not_finite = Counter[str]()
        for (names, is_plain), group in itertools.groupby(self.lines, key=_describe_line):
            lines = list(group)
            steps = [float(line["step"]) for line in lines]
            # Lines with nulls, other types or huge integers are read value by value.
            if not is_plain:
                for step, line in zip(steps, lines, strict=True):
                    for name, value in line.items():
                        if type(value) in NUMBER_TYPES and -LARGEST < value < LARGEST:
                            _extend(columns, name, [step], [float(value)])
                        elif value is None or type(value) in NUMBER_TYPES:
                            num_not_finite[name] += 1
                continue
            # One array for all other lines of these metrics: [metrics, lines].
            matrix = np.array([list(line.values()) for line in lines], dtype=np.float64).T
            is_finite_value = np.abs(matrix) < LARGEST
            for name, values, mask in zip(names, matrix, is_finite_value, strict=True):
                if mask.all():
                    _extend(columns, name, steps, values.tolist())
                else:
                    _extend(columns, name, itertools.compress(steps, mask), values[mask].tolist())
                    num_not_finite[name] += len(lines) - int(mask.sum())
        return {clean_value(name): column for name, column in columns.items()}, num_not_finite

    @property
    def title(self) -> tuple[str, str]:
        """Names of the experiment and the trial, from the configuration or the folder names."""
        folder = self.directory.resolve()
        trial = self.config.get("trial_name") or folder.name
        return str(self.config.get("experiment_name") or folder.parent.name), str(trial)

    def get_series(self, name: str) -> tuple[list[float], list[float]]:
        """Return the steps at which a metric is finite, and its values at these steps.

        Both lists are empty if the run does not have the metric.
        """
        return self._columns.get(name, ([], []))

    @cached_property
    def diagnosis(self) -> RunDiagnosis | None:
        """Diagnosis of the run; None if the run has too few steps."""
        algorithm = self.record.get("algorithm")
        return diagnose_run(
            self.lines, str(algorithm) if algorithm else None, lambda: self.config, self.samples
        )

    def count_not_finite(self, name: str) -> int:
        """Return the number of steps at which the metric `name` was not finite."""
        return self._table[1][name]


def _read_text(path: Path) -> str | None:
    if path.is_file():
        return path.read_text(encoding="utf-8", errors="replace")
    return None


def _read_options(path: Path) -> dict[str, Any]:
    """Return the options of a run, with secrets masked; an empty dict if they cannot be read."""
    try:
        return dict(mask_values(read_config(path)))
    except ConfigError:
        return {}  # an incomplete report is better than none


def _read_status(directory: Path) -> str:
    """Return the status stored in the run's directory, or `unfinished`.

    The status is `unfinished` if no valid status is stored, or if the stored status is `running`
    but the run has written nothing for a long time.
    """
    status = str(read_json(directory / STATUS).get("status"))
    if status not in STATUSES:
        return "unfinished"
    if status == "running" and is_quiet(directory):
        return "unfinished"
    return status


def is_quiet(directory: Path) -> bool:
    """Return whether a run has written nothing for so long that it is assumed to have ended."""
    files = []
    for name in (STATUS, METRICS, LOG):
        if (directory / name).is_file():
            files.append(directory / name)
    return time.time() - max((path.stat().st_mtime for path in files), default=0.0) > QUIET_SECONDS


def _describe_line(line: Mapping[str, Any]) -> tuple[tuple[str, ...], bool]:
    """Return (metric names of a line, True if all its values can be converted to float64).

    Values can be converted if each is a float, or an integer whose absolute value is below
    `LARGEST`.
    """
    values = line.values()
    is_plain = NUMBER_TYPES.issuperset(map(type, values)) and all(
        abs(value) < LARGEST for value in values if type(value) is int
    )
    return tuple(line), is_plain


def _extend(
    columns: dict[str, tuple[list[float], list[float]]],
    name: str,
    steps: Iterable[float],
    values: list[float],
) -> None:
    """Append steps and values to a column, which is created unless `values` is empty."""
    if values:
        column = columns.setdefault(name, ([], []))
        column[0].extend(steps)
        column[1].extend(values)


@dataclass(frozen=True)
class RunStart:
    """Information about one start of a run. A run that is resumed has several starts.

    `step` is the number of steps that were done before this start. `commit` is the commit of weft's
    checkout, or "" if weft is not run from a checkout.
    """

    time: float  # seconds since the epoch
    step: int = 0
    command: list[str] = field(default_factory=list)
    folder: str = ""
    host: str = ""
    hardware: str = ""
    commit: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    forecast: str = ""  # basis of the predicted duration of a step


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
        recorded = record.get("starts")
        starts = []
        for entry in recorded if isinstance(recorded, list) else []:
            start = _parse_start(entry)
            if start is not None:
                starts.append(start)
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


def _parse_start(value: Any) -> RunStart | None:
    """Return one start of a run.json; None if its time or step is invalid."""
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
        command=[str(argument) for argument in command] if isinstance(command, list) else [],
        versions={name: str(version) for name, version in versions.items()}
        if isinstance(versions, Mapping)
        else {},
        **{
            name: str(value.get(name) or "")
            for name in ("folder", "host", "hardware", "commit", "forecast")
        },
    )
