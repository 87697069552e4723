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
QUIET_POLLS = 4  # polls without a new line before an inactive run counts as finished


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
    given = parser.parse_args(argv)
    if given.lines < 0:
        raise ConfigError(f"--lines {given.lines}: must be at least 0 (no lines)")
    run = find_given_run(given, "logs")

    # Called again while following: processes of devices start their logs later.
    def list_files() -> list[LogFile]:
        result: list[LogFile] = []
        for file in find_log_files(run):
            if given.worker is None or file.worker == given.worker:
                result.append(file)
        return result

    chosen = list_files()
    if not chosen and not given.follow:
        raise ConfigError(_explain_missing_log(run, given.worker))
    follower = LogFollower(chosen)
    _print_logs(run, chosen, given.lines)
    if given.follow:
        _print_new_lines(run, follower, list_files)
    return 0


def _print_logs(run: Path, files: Sequence[LogFile], lines: int) -> None:
    from weft.launch.stop import format_status, read_run_status

    print(format_status(run))
    # Earlier failures were resolved by a restart.
    failures = [] if read_run_status(run) == "finished" else find_failures(files)
    if failures:
        print(f"\nfirst failure: {_format_location(failures[0])}")
        print("\n".join(f"    {line}" for line in failures[0].text))
        for each in failures[1:]:
            print(f"then: {_format_location(each)}: {each.summary.strip()}")
    for file in files:
        last = file.read_lines()[-lines:] if lines > 0 else []
        print(f"\n== {file.name} ({file.path})")
        print("\n".join(last))


def _format_location(failure: LoggedFailure) -> str:
    return f"{failure.file.name}, line {failure.line}"


def _print_new_lines(
    run: Path, follower: LogFollower, files: Callable[[], Sequence[LogFile]]
) -> None:
    """Print new log lines as they are written, until no process is working on the run.

    `files` returns the current log files. It is called repeatedly, because new processes can create
    log files.
    """
    from weft.launch.stop import is_alive

    quiet = 0
    while quiet < QUIET_POLLS:
        added = False
        chosen = files()
        for file, line in follower.read_new_lines(chosen):
            print(f"[{file.name}] {line}" if len(chosen) > 1 else line, flush=True)
            added = True
        quiet = 0 if added or is_alive(run) else quiet + 1
        time.sleep(POLL_SECONDS)


def _explain_missing_log(run: Path, worker: int | None) -> str:
    there = find_log_files(run)
    if not there:
        return f"{run} has no log yet; --follow waits for one"
    workers = [str(file.worker) for file in there if file.worker is not None]
    if not workers:
        return f"--worker {worker}: this run has one process, whose log is {there[0].path}; leave --worker out"
    return f"--worker {worker}: there is no log of this worker; workers: {', '.join(workers)}"
