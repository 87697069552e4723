"""`weft report`: pages of one run and of several, and invalid input."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.observe.test_report import write_run
from weft.cli.main import main


def test_the_command_says_where_the_page_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "runs" / "exp" / "one")
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert main(["report", str(run), "-o", str(tmp_path / "page.html")]) == 0
    assert "exp" in (tmp_path / "page.html").read_text()


def test_runs_are_found_by_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        write_run(tmp_path / "runs" / "exp" / name)
    assert main(["report", "exp/one", "latest"]) == 0
    assert "2 runs compared" in (tmp_path / "compare.html").read_text()


def test_it_opens_a_browser_where_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or True)
    run = write_run(tmp_path / "run")
    assert main(["report", str(run), "--open"]) == 0
    assert opened == [(run / "report.html").as_uri()]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere"], "no such run"),
        (["{run}", "-o", "{run}/none/page.html"], "choose another file with -o"),
        (["{run}"] * 9, "2 to 6"),
        (["{run}", "--shut"], "--shut"),
    ],
)
def test_invalid_input_has_exit_code_2(
    words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run")
    assert main(["report", *(word.format(run=run) for word in words)]) == 2
    assert told in capsys.readouterr().err
