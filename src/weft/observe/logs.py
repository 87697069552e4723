"""Log files of a run: finding them, finding failures in them, and following new lines."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from weft.errors import TRANSPORTS
from weft.writing import open_file

RUN_LOG = "log.txt"
WORKER_LOGS = "logs"  # folder of a run
SLURM_LOGS = "slurm"  # folder of a run
WORKER_NAME = re.compile(r"worker-(\d+)")
TIME_STAMP = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)")
# Lines that begin a traceback, or name the reason for which a process ended.
TRACEBACK = "Traceback (most recent call last):"
FAILURE_LINE = re.compile(
    r"(^|\s)error: |^([a-z_]\w*\.)*[A-Z]\w*(Error|Exception|Interrupt)\b|Segmentation fault|core "
    r"dumped|"
    r"[Oo]ut of memory|oom-kill|DUE TO TIME LIMIT|^terminate called|^Fatal Python error|^weft: "
    r"\d+ of \d+ nodes have joined"
)
# Slurm's message for a step that was ended. No failure: weft ends Ray like this in every job.
SLURM_END = re.compile(
    r"slurmstepd.*\*\*\* STEP .*(CANCELLED AT \S+|FAILED \(non-zero.*\)) \*\*\*$"
)
BLOCK_LINES = 60  # maximum lines of a traceback to show


@dataclass(frozen=True)
class LogFile:
    """Log file of a run.

    `name` is the name shown to the user. `worker` is the index of the worker process that wrote the
    file, or None for a log that no worker wrote.
    """

    name: str
    path: Path
    worker: int | None = None

    def read_lines(self) -> list[str]:
        """Return the lines of the file. Invalid UTF-8 is replaced."""
        return self.path.read_text(encoding="utf-8", errors="replace").splitlines()


@dataclass(frozen=True)
class LoggedFailure:
    """Failure that a log file reports.

    `line` is the line number in the file at which the failure begins, counted from 1. `when` is the
    time in seconds since the epoch. `text` has the lines to show.
    """

    file: LogFile
    line: int
    when: float
    text: tuple[str, ...]

    @property
    def summary(self) -> str:
        """Last non-blank line of the failure, which usually names the exception."""
        return next((line for line in reversed(self.text) if line.strip()), "")

    @property
    def is_consequence(self) -> bool:
        """True if the failure only reports that the connection to another process was lost.

        The cause is then the failure of the other process.
        """
        return any(sign in self.summary for sign in TRANSPORTS)


def append(run: Path, line: str) -> None:
    """Append `line` to the run's main log file, with a time stamp."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    with open_file(run / RUN_LOG, "a", encoding="utf-8") as file:
        file.writelines(f"{stamp}  {part}\n" for part in line.splitlines() or [""])


def find_log_files(run: Path) -> list[LogFile]:
    """Return the log files of a run.

    The run's main log comes first, then those of the workers, then those of Slurm jobs, oldest
    first.
    """
    log_files = [LogFile("run", run / RUN_LOG)] if (run / RUN_LOG).is_file() else []
    workers = []
    for path in sorted(path for path in (run / WORKER_LOGS).glob("*.log") if path.is_file()):
        number = WORKER_NAME.fullmatch(path.stem)
        workers.append(LogFile(path.stem, path, int(number[1]) if number else None))
    log_files += sorted(
        workers, key=lambda file: (file.worker is None, file.worker or 0, file.name)
    )
    jobs = [path for path in (run / SLURM_LOGS).glob("*.log") if path.is_file()]
    jobs.sort(key=lambda path: (int(re.match(r"\d*", path.name)[0] or 0), path.name))  # type: ignore[index]
    return log_files + [LogFile(f"slurm/{path.stem}", path) for path in jobs]


def find_failure(file: LogFile) -> LoggedFailure | None:
    """Return the first failure in a log file; None if the file reports no failure."""
    lines = file.read_lines()
    starts = (
        index
        for index, line in enumerate(lines)
        if TRACEBACK in line or (FAILURE_LINE.search(line) and not SLURM_END.search(line))
    )
    start = next(starts, None)
    if start is None:
        return None
    # A traceback ends at the line that names the exception.
    end = start + 1
    if TRACEBACK in lines[start]:
        while end < len(lines) and not _is_traceback_end(lines[end]):
            end += 1
        end = min(end + 1, len(lines))
    text = lines[start:end]
    if len(text) > BLOCK_LINES:
        text = [*text[: BLOCK_LINES // 2], "  ...", *text[-BLOCK_LINES // 2 :]]
    return LoggedFailure(
        file, start + 1, _find_time(lines[start::-1]) or file.path.stat().st_mtime, tuple(text)
    )


def find_failures(files: Iterable[LogFile]) -> list[LoggedFailure]:
    """Return the first failure of each file that has one, earliest first.

    Failures that only report a lost connection to another process come last. If a file has no time
    stamps, its modification time is used, because the process that fails first is also the first to
    stop writing.
    """
    failures = [failure for file in files if (failure := find_failure(file)) is not None]
    return sorted(failures, key=lambda failure: (failure.is_consequence, failure.when))


def _is_traceback_end(line: str) -> bool:
    """Return whether a line ends a traceback.

    The last line of a traceback names the exception and is not indented.
    """
    # Remove a prefix in () or [], which other programs put before each line.
    unprefixed = re.sub(r"^(\(\w[^)]*\)|\[[^\]]*\])\s?", "", line)
    return bool(unprefixed) and not unprefixed[0].isspace()


def _find_time(lines: Iterable[str]) -> float | None:
    """Return the first time stamp in the lines, in seconds since the epoch; None if not found."""
    for line in lines:
        stamp = TIME_STAMP.search(line)
        if stamp:
            return time.mktime(time.strptime(f"{stamp[1]} {stamp[2]}", "%Y-%m-%d %H:%M:%S"))
    return None


class LogFollower:
    """Reader that follows log files and yields the lines that are added to them.

    Files that did not exist at the start are read from their beginning.
    """

    def __init__(self, files: Iterable[LogFile]) -> None:
        # bytes already read of each file
        self._offsets = {file.path: file.path.stat().st_size for file in files}

    def read_new_lines(self, files: Iterable[LogFile]) -> Iterator[tuple[LogFile, str]]:
        """Yield the file and the text of each line that was completed since the last call."""
        for file in files:
            start = self._offsets.get(file.path, 0)
            with file.path.open("rb") as handle:
                handle.seek(start)
                added = handle.read()
            num_complete = added.rfind(b"\n") + 1
            self._offsets[file.path] = start + num_complete
            for line in added[:num_complete].decode("utf-8", errors="replace").splitlines():
                yield file, line
