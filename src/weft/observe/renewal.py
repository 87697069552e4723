"""Regular rebuilding of `report.html` during a run, without slowing the run down."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from weft.observe.report import build_report
from weft.observe.run_files import METRICS, SAMPLES, TIMELINE

SECONDS = 30.0  # minimum time between two reports
SHARE = 20.0  # a report that takes a second is built every 20 seconds at most
# Bytes of a run's files. Up to here a report takes less than 0.1 s, and the run builds it itself.
LARGE = 1_000_000
NICE = 10  # niceness of the process that builds the report


class ReportProcess(Protocol):
    """Interface of the process that builds a report; `subprocess.Popen` implements it."""

    def poll(self) -> int | None: ...
    def kill(self) -> None: ...
    def wait(self) -> int: ...


def start(directory: Path) -> ReportProcess:
    """Start a process that builds the report and does not receive Ctrl-C from the terminal."""
    command = [sys.executable, "-m", "weft.observe.renewal", str(directory)]
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, process_group=0)


class ReportRenewal:
    """Builder that keeps the report of one run up to date.

    A failed build does not stop the run. The first time that a build fails, `tell` is called with a
    message.
    """

    def __init__(
        self,
        directory: Path,
        tell: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        build: Callable[[Path, str | None], Any] = build_report,
        start: Callable[[Path], ReportProcess] = start,
    ) -> None:
        self._directory = directory
        self._tell = tell
        self._clock = clock
        self._build = build
        self._start = start
        self._process: ReportProcess | None = None
        self._began: float | None = None
        self._cost = 0.0  # seconds the last build took
        self._failure_reported = False

    def renew_if_due(self) -> None:
        """Build the report if the last build was long enough ago. Called after each step.

        The report of a large run is built in another process, and this method does not wait for it.
        """
        # Check a build in progress.
        if self._process is not None:
            code = self._process.poll()
            if code is None:
                # An upper bound, since a step can take longer than the build.
                self._cost = self._clock() - (self._began or 0.0)
                return
            self._process = None
            if code:
                self._report_failure(f"the process that builds it ended with exit code {code}")
        # Wait if the last build was too recent.
        if self._began is not None and self._clock() - self._began < max(
            SECONDS, SHARE * self._cost
        ):
            return
        self._began = self._clock()
        if self._measure_size() > LARGE:
            self._process = self._start(self._directory)
            self._cost = 0.0
        else:
            self._build_here(None)
            self._cost = self._clock() - self._began

    def stop(self) -> None:
        """Kill the process of a build in progress. The previous report remains intact."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def finish(self, status: str) -> None:
        """Build the final report with `status`, the outcome of the run."""
        self.stop()
        self._build_here(status)

    def _build_here(self, status: str | None) -> None:
        with ThreadPoolExecutor(1) as pool:  # the future catches every exception
            trouble = pool.submit(self._build, self._directory, status).exception()
        if trouble is not None:
            self._report_failure(f"{type(trouble).__name__}: {trouble}")

    def _report_failure(self, why: str) -> None:
        if not self._failure_reported:
            self._failure_reported = True
            self._tell(f"report.html could not be built ({why}); the run is not affected")

    def _measure_size(self) -> int:
        paths = [self._directory / name for name in (METRICS, SAMPLES, TIMELINE)]
        return sum(path.stat().st_size for path in paths if path.is_file())


def main(words: Sequence[str]) -> int:
    """Build the report of the run `words[0]` at low priority.

    Called by `python -m weft.observe.renewal RUN_DIR`.
    """
    os.nice(NICE)
    build_report(Path(words[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
