"""The runs in a folder, a line each: what `weft ls` lists. Only the ends of files are read, so a hundred runs take no time."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import UserError
from weft.observe.jsonl import read_row
from weft.observe.lenient import cleaned, read_json
from weft.observe.metrics import EVAL, TIME, finite, headline, is_step, last_part
from weft.observe.run_files import CONFIG, LOG, METRICS, STATUS, STATUSES, is_quiet
from weft.reading import MOST_YAML, read_text

RECORD = "run.json"  # who started the run, how, and with what
MARKS = (CONFIG, STATUS, METRICS, RECORD)
ALGORITHMS = (
    "online_dpo",
    "distill",
    "ppo",
    "grpo",
    "dpo",
    "rw",
    "sft",
    "gen",
)  # groups of options, the telling ones first
JUDGED = {"rw": "accuracy", "dpo": "accuracies"}  # what tells more than the loss does
TAIL_BYTES = 1 << 16  # of metrics.jsonl, which hold the last line of any run
TOP_KEY = re.compile(r"^(\w+):[ ]*(.*?)[ ]*$", re.MULTILINE)


@dataclass(frozen=True)
class RunSummary:
    """One run. What nobody wrote down is None; `changed` is in seconds since the epoch."""

    path: Path
    experiment: str
    trial: str
    algorithm: str | None
    status: str  # running, finished, stopped, failed; unfinished where nobody works on it and nobody wrote how it ended
    step: int | None
    total_steps: int | None
    metric: str | None  # the headline metric
    value: float | None  # its last value
    num_bytes: int
    changed: float | None


def list_runs(root: Path, alive: Callable[[Path], bool] | None = None) -> list[RunSummary]:
    """The runs in `root`, in its folders and in theirs, newest first. `root` may be a run itself.

    `alive` tells whether somebody works on a run that calls itself running; without it a run that has not written anything for
    ten minutes is unfinished.
    """
    runs = [summarize(path, alive) for path in find_runs(root)]
    return sorted(runs, key=lambda run: (-(run.changed or 0.0), str(run.path)))


def newest_first(root: Path) -> list[Path]:
    """The directories of the runs in `root`, in the order of `list_runs`, without a look at what they hold."""
    return sorted(find_runs(root), key=lambda run: (-(_changed(run) or 0.0), str(run)))


def find_runs(root: Path) -> Iterator[Path]:
    """The directories of runs in `root` and up to two levels below. Links are not followed."""
    level = [root]
    for _ in range(3):
        below: list[Path] = []
        for folder in level:
            if is_run(folder):
                yield folder
            else:
                below += _folders(folder)
        level = below


def is_run(folder: Path) -> bool:
    """Return whether a folder looks like the directory of a run."""
    try:
        return any((folder / name).is_file() for name in MARKS)
    except OSError:  # a folder of somebody else
        return False


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(p for p in folder.iterdir() if p.is_dir() and not p.is_symlink() and not p.name.startswith("."))
    except OSError:
        return []


def summarize(run: Path, alive: Callable[[Path], bool] | None = None) -> RunSummary:
    """What the files of one run say, as far as they can be read."""
    status, record, top = read_json(run / STATUS), read_json(run / RECORD), _top_keys(run / CONFIG)
    lines = last_lines(run / METRICS)
    named = record.get("algorithm")
    algorithm = (named if isinstance(named, str) else "") or next((name for name in ALGORITHMS if name in top), None)
    metric = _headline(algorithm, dict.fromkeys(name for line in lines for name in line))
    value = next((line[metric] for line in reversed(lines) if metric in line), None) if metric else None
    steps = [line["step"] for line in lines[-1:]] + [status.get("step")]
    step = max((int(each) for each in steps if is_step(each)), default=None)
    said = _status(run, status, alive)
    total = _whole(record.get("total_steps")) or _whole(top.get("max_steps"))
    folder = run.absolute()
    return RunSummary(
        path=run,
        experiment=folder.parent.name,
        trial=folder.name,
        algorithm=algorithm,
        status=said,
        step=step,
        total_steps=step if said == "finished" and step is not None else total,
        metric=metric,
        value=float(value) if value is not None and finite(value) else None,
        num_bytes=tree_bytes(run),
        changed=_changed(run),
    )


def _headline(algorithm: str | None, names: Iterable[str]) -> str | None:
    """The metric by which runs of an algorithm are compared: of models that judge their accuracy."""
    known = list(names)
    own = [
        name for name in known if not name.startswith((TIME, EVAL)) and last_part(name) == JUDGED.get(algorithm or "")
    ]
    return own[0] if own else headline(known)


def _status(run: Path, written: Mapping[str, Any], alive: Callable[[Path], bool] | None) -> str:
    said = str(written.get("status"))
    if said not in STATUSES:
        return "unfinished"
    if said != "running":
        return said
    works = alive(run) if alive is not None else not is_quiet(run)
    return said if works else "unfinished"


def _top_keys(config: Path) -> dict[str, str]:
    """The keys at the top of a config.yaml with what stands beside them. To parse a hundred such files would take seconds."""
    try:
        return dict(TOP_KEY.findall(read_text(config, str(config), most=MOST_YAML)))
    except UserError:
        return {}


def last_lines(metrics: Path) -> list[dict[str, Any]]:
    """The last lines that have a step, oldest first."""
    if not metrics.is_file():
        return []
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            rows = file.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return []
    read = map(read_row, rows)  # None: torn, or the rest of a line that begins before the tail
    return [cleaned(line) for line in read if line is not None]


def tree_bytes(folder: Path) -> int:
    """Bytes of the files below a folder, each once however many names it has. Links are counted, not followed."""
    seen: dict[tuple[int, int], int] = {}
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                stat = os.lstat(os.path.join(place, name))
            except OSError:  # it was removed meanwhile
                continue
            seen[stat.st_dev, stat.st_ino] = stat.st_size
    return sum(seen.values())


def _changed(run: Path) -> float | None:
    times = []
    for name in (*MARKS, LOG):
        try:
            times.append((run / name).stat().st_mtime)
        except OSError:
            continue
    return max(times, default=None)


def _whole(value: Any) -> int | None:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if is_step(number) else None
