"""`weft logs`: runs with one process, several or none, and `--follow`."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from weft.cli import logs
from weft.cli import main as weft
from weft.runtime.directory import RunLock

NAMED = ["logs", "-e", "e", "-f", "t"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "e" / "t"
    (run / "logs").mkdir(parents=True)
    return run


def test_one_process(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "config.yaml").write_text("a: 1\n")
    (run / "status.json").write_text(json.dumps({"status": "finished"}))
    (run / "log.txt").write_text("".join(f"2026-01-01 00:00:00  step {n}\n" for n in range(50)))
    assert weft.main([*NAMED, "--lines", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "runs/e/t: finished",
        "",
        "== run (runs/e/t/log.txt)",
        "2026-01-01 00:00:00  step 48",
        "2026-01-01 00:00:00  step 49",
    ]
    assert weft.main([*NAMED, "--lines", "-2"]) == 2
    assert "--lines -2: must be at least 0" in capsys.readouterr().err
    assert weft.main([*NAMED, "--worker", "1"]) == 2
    assert "this run has one process, whose log is runs/e/t/log.txt" in capsys.readouterr().err


def test_the_first_failure_comes_first(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "config.yaml").write_text("a: 1\n")
    (run / "log.txt").write_text("2026-01-01 00:00:09  error: worker 1 is gone\n")
    (run / "logs" / "worker-0.log").write_text("fine\n")
    (run / "logs" / "worker-1.log").write_text(
        "2026-01-01 00:00:01\nTraceback (most recent call last):\n  x\nOSError: full\n"
    )
    assert weft.main(NAMED) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "runs/e/t: crashed or killed"
    assert lines[2:7] == [
        "first failure: worker-1, line 2",
        "    Traceback (most recent call last):",
        "      x",
        "    OSError: full",
        "then: run, line 1: 2026-01-01 00:00:09  error: worker 1 is gone",
    ]
    assert weft.main([*NAMED, "--worker", "0"]) == 0
    assert "failure" not in capsys.readouterr().out
    assert weft.main([*NAMED, "--worker", "2"]) == 2
    assert "workers: 0, 1" in capsys.readouterr().err


def test_following_ends_with_the_run(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run writes after the first poll of its files, and ends after the second."""
    lock, looks = RunLock(run), 0
    lock.take()
    (run / "log.txt").write_text("begins\n")

    def works(seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 1:
            with (run / "log.txt").open("a") as file:
                file.write("goes on\n")
            (run / "logs" / "worker-0.log").write_text("is there\n")
        elif looks == 2:
            lock.release()

    monkeypatch.setattr(logs, "time", SimpleNamespace(sleep=works))
    assert weft.main([*NAMED, "--follow"]) == 0
    assert looks >= 2
    assert set(capsys.readouterr().out.splitlines()[-2:]) == {
        "[run] goes on",
        "[worker-0] is there",
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["logs", "-e", "e"], "-f TRIAL is missing"),
        (["logs", "-e", "e", "-f", "u"], "there is no run runs/e/u; runs here: e/t"),
        (NAMED, "has no log yet; --follow waits for one"),
    ],
)
def test_wrong_input_is_exit_2(
    words: list[str], message: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert weft.main(words) == 2
    assert message in capsys.readouterr().err


def test_a_run_is_named_as_show_takes_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "config.yaml").write_text("a: 1\n")
    (run / "status.json").write_text(json.dumps({"status": "finished"}))
    (run / "log.txt").write_text("2026-01-01 00:00:00  step 1\n")
    for words in (["e/t"], ["runs/e/t"], [str(run)], ["latest"], ["e/t", "--fileroot", "runs"]):
        assert weft.main(["logs", *words]) == 0
        assert "step 1" in capsys.readouterr().out
    for words, told in (
        (["e/tt"], "e/tt: there is no such run; did you mean runs/e/t?"),
        (["e/t", "-e", "e"], "names a run, and so do -e and -f; leave one out"),
        (
            ["-e", "e"],
            "-f TRIAL is missing; write weft logs -e EXPERIMENT -f TRIAL, or weft logs RUN",
        ),
        (["--lines", "3"], "which run? Write weft logs RUN, such as weft logs latest"),
    ):
        assert weft.main(["logs", *words]) == 2
        assert told in capsys.readouterr().err


def test_a_run_that_has_only_begun_has_logs_too(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "logs" / "worker-0.log").write_text("starting\n")
    assert weft.main(["logs", "e/t"]) == 0
    assert "starting" in capsys.readouterr().out
