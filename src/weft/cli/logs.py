"""`weft logs RUN`: print the logs of a run and its workers, starting with the first failure."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from weft.cli.named_run import add_run, find_given_run
from weft.cli.parsing import CommandParser
from weft.errors import ConfigError
from weft.observe.logs import LogFile, LogFollower, LoggedFailure, find_failures, find_log_files

POLL_SECONDS = 0.5
QUIET_POLLS = 4  # polls without new lines after which an inactive run counts as finished


def main(argv: Sequence[str]) -> int:
    """Run `weft logs ...` and return the exit code.

    Raises `UserError` for an unknown run or worker.
    """
    parser = CommandParser(
        url_arguments=("fileroot",),
        prog="weft logs",
        description="Show the logs of a run, starting with its first failure.",
    )
    add_run(parser)
    parser.add_argument(
        "--worker", type=int, metavar="N", help="show only the process of this device"
    )
    parser.add_argument(
        "--lines",
        type=int,
        default=20,
        metavar="N",
        help="number of last lines of each log (default 20)",
    )
    parser.add_argument("--follow", action="store_true", help="show new lines until the run ends")
    arguments = parser.parse_args(argv)
    if arguments.lines < 0:
        raise ConfigError(f"--lines {arguments.lines}: must be at least 0 (no lines)")
    run = find_given_run(arguments, "logs")

    def list_files() -> list[LogFile]:
        """Return the current log files; device processes create theirs later than the run."""
        result: list[LogFile] = []
        for file in find_log_files(run):
            if arguments.worker is None or file.worker == arguments.worker:
                result.append(file)
        return result

    files = list_files()
    if not files and not arguments.follow:
        raise ConfigError(_explain_missing_log(run, arguments.worker))
    follower = LogFollower(files)
    _print_logs(run, files, arguments.lines)
    if arguments.follow:
        _print_new_lines(run, follower, list_files)
    return 0


def _print_logs(run: Path, files: Sequence[LogFile], lines: int) -> None:
    """Print the status of a run, its failures, and the last `lines` lines of each log."""
    from weft.launch.stop import format_status, read_run_status

    print(format_status(run))
    # In a finished run, restarts have resolved all failures.
    failures = [] if read_run_status(run) == "finished" else find_failures(files)
    if failures:
        print(f"\nfirst failure: {_format_location(failures[0])}")
        print("\n".join(f"    {line}" for line in failures[0].text))
        for failure in failures[1:]:
            print(f"then: {_format_location(failure)}: {failure.summary.strip()}")
    for file in files:
        last_lines = file.read_lines()[-lines:] if lines > 0 else []
        print(f"\n== {file.name} ({file.path})")
        print("\n".join(last_lines))


def _format_location(failure: LoggedFailure) -> str:
    return f"{failure.file.name}, line {failure.line}"


def _print_new_lines(
    run: Path, follower: LogFollower, list_files: Callable[[], Sequence[LogFile]]
) -> None:
    """Print new log lines as they are written, until no process is working on the run.

    `list_files` returns the current log files. It is called repeatedly, because new processes may
    create log files.
    """
    from weft.launch.stop import is_alive

    quiet_polls = 0
    while quiet_polls < QUIET_POLLS:
        has_new_lines = False
        current_files = list_files()
        for file, line in follower.read_new_lines(current_files):
            print(f"[{file.name}] {line}" if len(current_files) > 1 else line, flush=True)
            has_new_lines = True
        quiet_polls = 0 if has_new_lines or is_alive(run) else quiet_polls + 1
        time.sleep(POLL_SECONDS)


def _explain_missing_log(run: Path, worker: int | None) -> str:
    """Return the error message for a run without logs, or without a log of `worker`."""
    files = find_log_files(run)
    if not files:
        return f"{run} has no log yet; --follow waits for one"
    workers = [str(file.worker) for file in files if file.worker is not None]
    if not workers:
        return (
            f"--worker {worker}: this run has one process, whose log is {files[0].path}; leave "
            f"--worker out"
        )
    return f"--worker {worker}: there is no log of this worker; workers: {', '.join(workers)}"
