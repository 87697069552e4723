"""Summaries of the runs in a folder, for `weft ls`.

Only the start and the end of long files are read, so that a hundred runs can be listed quickly.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from weft.errors import UserError
from weft.observe import pace
from weft.observe.diagnosis import ALGORITHMS, FINE, RunDiagnosis, diagnose_run
from weft.observe.jsonl import clean_value, read_json, read_row
from weft.observe.metrics import EVAL, find_leading, get_last_part, is_finite, is_step
from weft.observe.run_files import CONFIG, LOG, METRICS, RECORD, STATUS, STATUSES, is_quiet
from weft.observe.sample_rows import SAMPLES
from weft.reading import MAX_YAML, read_text

RUN_MARKS = (CONFIG, STATUS, METRICS, RECORD)  # a folder with any of these files is a run
TAIL_BYTES = 1 << 16  # bytes at the end of metrics.jsonl, enough for the last line of any run
# A metrics.jsonl of at most this many bytes is read completely; otherwise, half as many bytes are
# read at each end.
MAX_BYTES = 1 << 19
SAMPLE_BYTES = 1 << 15  # bytes read at the end of samples.jsonl
REWARD = "reward"
OPTION_LINE = re.compile(r"^( *)([\w-]+):(.*)$", re.MULTILINE)
TOP_OPTION_LINE = re.compile(r"^(\w+):[ ]*(.*?)[ ]*$", re.MULTILINE)


@dataclass(frozen=True)
class RunSummary:
    """Summary of one run. Unknown values are None.

    `step` is the number of completed steps. `metric` is the name of the headline metric, and
    `value` its value at the end of the run. `num_bytes` is the total size of the run's files.
    `changed` is the time of the last change, in seconds since the epoch.
    """

    path: Path
    experiment: str
    trial: str
    algorithm: str | None
    # running, finished, stopped, failed; unfinished if it ended without writing its outcome
    status: str
    step: int | None
    total_steps: int | None
    metric: str | None  # headline metric, of the validation rows if possible
    value: float | None  # the last evaluation; for training metrics the mean of the last steps
    num_bytes: int
    changed: float | None
    # text of the diagnosis; None if the run has too few steps
    diagnosis: str | None = None

    @property
    def is_flagged(self) -> bool:
        """True if the diagnosis found a problem in the run."""
        return self.diagnosis not in (None, FINE)


def list_runs(root: Path, is_alive: Callable[[Path], bool] | None = None) -> list[RunSummary]:
    """Return summaries of the runs in `root`, up to two levels below it, newest first.

    `root` can itself be a run. `is_alive` returns whether a run with the status `running` has a
    live process. Without `is_alive`, such a run counts as unfinished if it has written nothing for
    ten minutes.
    """
    runs = [summarize(path, is_alive) for path in find_runs(root)]
    return sorted(runs, key=lambda run: (-(run.changed or 0.0), str(run.path)))


def list_newest_first(root: Path) -> list[Path]:
    """Return the directories of the runs in `root`, newest first, in the same order as `list_runs`.

    Reads only the modification times of files, not their contents.
    """
    return sorted(find_runs(root), key=lambda run: (-(_find_change_time(run) or 0.0), str(run)))


def find_runs(root: Path) -> Iterator[Path]:
    """Yield the directories of runs in `root`, up to two levels below it.

    Symbolic links are not followed.
    """
    level = [root]
    for _ in range(3):
        next_level: list[Path] = []
        for folder in level:
            if is_run(folder):
                yield folder
            else:
                next_level += _list_folders(folder)
        level = next_level


def is_run(folder: Path) -> bool:
    """Return whether a folder has any of the files in `RUN_MARKS`."""
    try:
        return any((folder / name).is_file() for name in RUN_MARKS)
    except OSError:  # no permission
        return False


def _list_folders(folder: Path) -> list[Path]:
    """Return the visible subfolders of a folder; none if it cannot be read."""
    try:
        return sorted(
            path
            for path in folder.iterdir()
            if path.is_dir() and not path.is_symlink() and not path.name.startswith(".")
        )
    except OSError:
        return []


def summarize(run: Path, is_alive: Callable[[Path], bool] | None = None) -> RunSummary:
    """Summarize one run, ignoring files that cannot be read.

    See `list_runs` for `is_alive`.
    """
    status = read_json(run / STATUS)
    record = read_json(run / RECORD)
    top_options = _read_top_keys(run / CONFIG)
    lines = read_end_rows(run / METRICS)
    recorded_algorithm = record.get("algorithm")
    algorithm = (recorded_algorithm if isinstance(recorded_algorithm, str) else "") or next(
        (name for name in ALGORITHMS if name in top_options), None
    )
    # The headline metric and the diagnosis.
    metric = find_leading(dict.fromkeys(name for line in lines for name in line), algorithm)
    value = _compute_value(metric, lines)
    diagnosis = diagnose(run, algorithm, lines)
    # Progress and status.
    steps = [line["step"] for line in lines[-1:]] + [status.get("step")]
    step = max((int(candidate) for candidate in steps if is_step(candidate)), default=None)
    run_status = _find_status(run, status, is_alive)
    total = _parse_steps(record.get("total_steps")) or _parse_steps(top_options.get("max_steps"))
    folder = run.absolute()
    return RunSummary(
        path=run,
        experiment=folder.parent.name,
        trial=folder.name,
        algorithm=algorithm,
        status=run_status,
        step=step,
        total_steps=step if run_status == "finished" and step is not None else total,
        metric=metric,
        value=value,
        num_bytes=count_tree_bytes(run),
        changed=_find_change_time(run),
        diagnosis=None if diagnosis is None else diagnosis.summary,
    )


def diagnose(
    run: Path, algorithm: str | None, lines: Sequence[Mapping[str, Any]] | None = None
) -> RunDiagnosis | None:
    """Diagnose a run, reading only the start and the end of long files.

    `lines` are the lines of metrics.jsonl, if the caller has already read them. Returns None if the
    run has too few steps.
    """
    metrics = read_end_rows(run / METRICS) if lines is None else lines
    has_reward = any(get_last_part(name) == REWARD for line in metrics[-1:] for name in line)
    samples = read_end_rows(run / SAMPLES, SAMPLE_BYTES) if has_reward else []
    return diagnose_run(metrics, algorithm, cache(lambda: _read_scalars(run / CONFIG)), samples)


def _compute_value(metric: str | None, lines: Sequence[Mapping[str, Any]]) -> float | None:
    """Return a metric's value at the end of the run; None if it has no finite value there.

    For an evaluation metric, this is the last value. For a training metric, it is the mean over the
    last steps.
    """
    if metric is None:
        return None
    recorded = [line[metric] for line in lines if metric in line]
    if not recorded or not is_finite(recorded[-1]):
        return None
    values = [float(value) for value in recorded if is_finite(value)]
    return values[-1] if metric.startswith(EVAL) else pace.compute_end_mean(values)


def _find_status(
    run: Path, recorded: Mapping[str, Any], is_alive: Callable[[Path], bool] | None
) -> str:
    """Return the run's status; `unfinished` if no process works on it any more."""
    status = str(recorded.get("status"))
    if status not in STATUSES:
        return "unfinished"
    if status != "running":
        return status
    is_running = is_alive(run) if is_alive is not None else not is_quiet(run)
    return status if is_running else "unfinished"


def _read_top_keys(config: Path) -> dict[str, str]:
    """Return each top-level key of a config.yaml, with the text that follows the key on its line.

    Uses a regular expression, because parsing a hundred such files would take seconds.
    """
    try:
        return dict(TOP_OPTION_LINE.findall(read_text(config, str(config), most=MAX_YAML)))
    except UserError:
        return {}


def _read_scalars(config: Path) -> dict[str, Any]:
    """Return the options of a config.yaml whose values are scalars, as nested dicts.

    Supports only the layout in which weft writes the file.
    """
    if not config.is_file():
        return {}
    try:
        text = read_text(config, str(config), UserError, MAX_YAML)
    except UserError:
        return {}
    options: dict[str, Any] = {}
    # (indentation, mapping) of the groups that contain the current line, outermost first
    groups: list[tuple[int, dict[str, Any]]] = [(-1, options)]
    for indent, name, value in OPTION_LINE.findall(text):
        while len(groups) > 1 and groups[-1][0] >= len(indent):
            groups.pop()
        if value.strip():
            groups[-1][1][name] = _parse_scalar(value.strip())
        else:
            group = groups[-1][1][name] = {}
            groups.append((len(indent), group))
    return options


def _parse_scalar(text: str) -> Any:
    for number_type in (int, float):
        try:
            return number_type(text)
        except ValueError:
            continue
    return {"null": None, "true": True, "false": False}.get(text, text.strip("'\""))


def read_last_lines(metrics: Path) -> list[dict[str, Any]]:
    """Return the rows in the last `TAIL_BYTES` bytes of a metrics.jsonl file, oldest first.

    Lines that are incomplete or have no valid `step` are left out.
    """
    return _read_ranges(metrics, lambda size: [(max(0, size - TAIL_BYTES), size)])


def read_end_rows(path: Path, max_bytes: int = MAX_BYTES) -> list[dict[str, Any]]:
    """Return the rows of a JSON Lines file that have a step, oldest first.

    If the file has more than `max_bytes` bytes, only rows near its start and its end are returned.
    """
    half = max_bytes // 2
    return _read_ranges(
        path, lambda size: [(0, size)] if size <= max_bytes else [(0, half), (size - half, size)]
    )


def _read_ranges(
    path: Path, choose_ranges: Callable[[int], Sequence[tuple[int, int]]]
) -> list[dict[str, Any]]:
    """Return the rows of a JSON Lines file that are completely inside given byte ranges.

    `choose_ranges` is called with the size of the file in bytes, and returns the ranges as (start,
    stop) pairs.
    """
    lines: list[str] = []
    if not path.is_file():
        return []
    try:
        with path.open("rb") as file:
            for start, stop in choose_ranges(os.fstat(file.fileno()).st_size):
                file.seek(start)
                lines += file.read(stop - start).decode("utf-8", errors="replace").splitlines()
    except OSError:
        return []
    parsed = map(read_row, lines)  # None for incomplete lines
    return [clean_value(row) for row in parsed if row is not None]


def count_tree_bytes(folder: Path) -> int:
    """Return the total size in bytes of all files below a folder.

    A file with several hard links counts once. For a symbolic link, the size of the link itself is
    counted, not that of its target.
    """
    sizes_by_inode: dict[tuple[int, int], int] = {}
    for directory, _, names in os.walk(folder):
        for name in names:
            try:
                stat = os.lstat(os.path.join(directory, name))
            except OSError:  # removed in the meantime
                continue
            sizes_by_inode[stat.st_dev, stat.st_ino] = stat.st_size
    return sum(sizes_by_inode.values())


def _find_change_time(run: Path) -> float | None:
    """Return the time of the last change of a run's files, in seconds since the epoch, or None."""
    times = []
    for name in (*RUN_MARKS, LOG):
        try:
            times.append((run / name).stat().st_mtime)
        except OSError:
            continue
    return max(times, default=None)


def _parse_steps(value: Any) -> int | None:
    """Return a number of steps from JSON or text; None if it is not a valid one."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if is_step(number) else None
