"""Times at which report.html is rebuilt during a run."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from weft.observe.report import MAX_BYTES_IN_PROCESS, ReportRenewal, main, start


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Elsewhere:
    """Process that builds a report until the test ends it."""

    def __init__(self) -> None:
        self.code: int | None = None
        self.killed = False

    def poll(self) -> int | None:
        return self.code

    def kill(self) -> None:
        self.killed = True

    def wait(self) -> int:
        return -9


class Run:
    """Run that counts the builds of its report, and stores the messages."""

    def __init__(self, folder: Path, seconds: float = 0.0, error: Exception | None = None) -> None:
        self.clock, self.seconds, self.error = Clock(), seconds, error
        self.built: list[str | None] = []
        self.started: list[Elsewhere] = []
        self.told: list[str] = []
        self.renewal = ReportRenewal(
            folder, self.told.append, clock=self.clock, build=self.build, start=self.start
        )

    def build(self, folder: Path, status: str | None) -> None:
        self.built.append(status)
        self.clock.now += self.seconds
        if self.error is not None:
            raise self.error

    def start(self, folder: Path) -> Elsewhere:
        self.started.append(Elsewhere())
        return self.started[-1]

    def step(self, at: float) -> int:
        """Return the number of reports after a step that ends at `at`."""
        self.clock.now = max(at, self.clock.now)
        self.renewal.renew_if_due()
        return len(self.built) + len(self.started)


def test_reports_are_built_at_the_first_step_and_after_30_seconds(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert [run.step(at) for at in (0, 1, 29, 30, 31, 59, 61)] == [1, 1, 1, 2, 2, 2, 3]


def test_slow_reports_are_built_less_often(tmp_path: Path) -> None:
    run = Run(tmp_path, seconds=4)
    assert [run.step(at) for at in (0, 30, 79, 81)] == [1, 1, 1, 2]


def large(folder: Path) -> Path:
    (folder / "metrics.jsonl").write_bytes(b" " * (MAX_BYTES_IN_PROCESS + 1))
    return folder


def test_reports_of_long_runs_are_built_by_one_other_process(tmp_path: Path) -> None:
    run = Run(large(tmp_path))
    assert [run.step(at) for at in (0, 60, 120)] == [1, 1, 1] and not run.built
    run.started[0].code = 0
    assert run.step(121) == 1, "it takes two minutes: the next one begins after 40"
    assert run.step(120 * 20) == 2 and not run.told
    run.started[1].code = 0
    assert run.step(120 * 20 + 40) == 3, (
        "of that one nobody knows how long it took, but that a step takes longer"
    )
    run.renewal.finish("stopped")
    assert run.started[2].killed and run.built == ["stopped"], (
        "the last one is built here, and alone"
    )


@pytest.mark.parametrize("size", ["small", "large"])
def test_failures_are_reported_once_and_the_run_continues(tmp_path: Path, size: str) -> None:
    run = Run(large(tmp_path) if size == "large" else tmp_path, error=KeyError("steps"))
    for at in (0, 40, 80, 2000, 50_000):
        run.step(at)
        for process in run.started:
            process.code = 3
    run.renewal.finish("finished")
    why = (
        "KeyError: 'steps'"
        if size == "small"
        else "the process that builds it ended with exit code 3"
    )
    assert run.told == [f"report.html could not be built ({why}); the run is not affected"]


def test_the_process_writes_the_report(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.0}\n')
    process = start(tmp_path)
    end = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < end:
        time.sleep(0.01)
    assert process.wait() == 0 and "<h1>" in (tmp_path / "report.html").read_text()


def test_the_command_of_the_process_takes_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    niceness: list[int] = []
    monkeypatch.setattr("os.nice", niceness.append)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert main([str(tmp_path)]) == 0 and (tmp_path / "report.html").is_file() and niceness == [10]
