"""`weft eval table`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.observe.evaluations import FakeTask, write_checkpoints, write_evaluation
from weft.cli.main import main

SHARES = {10: 0.40, 20: 0.45, 30: 0.60}


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with six checkpoints of two runs, as the working directory."""
    write_checkpoints(tmp_path / "runs/demo/sft", SHARES)
    write_checkpoints(tmp_path / "runs/demo/ppo", {step + 30: 0.61 for step in SHARES})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


def test_six_checkpoints_in_one_command(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "table"]) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert lines[0].startswith("Best by average of 2 tasks: ")
    for name in ("sft@step10 (base)", "sft@step30", "ppo@step40", "ppo@step60"):
        assert sum(line.startswith(f"{name} ") for line in lines) == 2  # two blocks of columns
    assert max(map(len, lines)) <= 100
    assert "▲" in shown and "word_perplexity ↓" in shown and "(Holm)" in shown
    assert main(["eval", "table", "runs", "./runs/demo/sft"]) == 0
    assert capsys.readouterr().out == shown  # nothing random, and no result twice


def test_a_metric_sorts_and_a_base_is_chosen(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "table", "runs", "--by", "sums", "--base", "sft@step30"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = lines.index("") + 3  # two lines of headings
    assert lines[first].startswith("ppo@step40") and lines[first + 5].startswith("sft@step10")
    assert any(line.startswith("sft@step30 (base)") for line in lines)


def test_items_are_shown_side_by_side(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", "table", "--items", "sft@step10", "ppo@step60", "--task", "words"]
    assert main([*words, "--limit", "2"]) == 0
    shown = capsys.readouterr().out
    assert "sft@step10 to ppo@step60: 40 wrong -> right; 160 of 200 items unchanged" in shown
    assert shown.count("    prompt ") == 2
    assert "38 more items changed; --limit 0 shows all" in shown
    assert "It is 7.  (read as: 7)" in shown
    assert main([*words, "--limit", "0"]) == 0
    assert capsys.readouterr().out.count("    prompt ") == 40


def test_json_has_all_figures(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "table", "--json", "--items", "sft@step10", "sft@step30"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert len(content["names"]) == 6 and content["by"] == "average of 2 tasks"
    cells = [
        cell
        for cell in content["scores"]
        if cell["task"] == "sums" and cell["model"] == "runs/demo/sft@step30"
    ]
    (cell,) = cells
    assert cell["beyond_noise"] == "better" and cell["interval_method"] == "Wilson"
    assert cell["difference"]["items"] == 200 and cell["difference"]["interval"][0] > 0
    sums = content["changes"][0]
    assert sums["counts"]["wrong -> right"] == len(sums["items"])


def test_a_page_is_written(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "table", "--out", "t.html"]) == 0
    assert capsys.readouterr().out == "t.html\n"
    page = (runs / "t.html").read_text()
    assert "Best by average of 2 tasks" in page and "wrong → right" in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none"], "none: there is no such folder"),
        (["empty"], "empty: no results_*.json of an evaluation is below"),
        (["bad"], "results_x.json: is not JSON"),
        (["gs://bucket/runs"], "is a URL"),
        (["runs", "--base", "sft@step11"], "did you mean sft@step1"),
        (["runs", "--by", "summs"], "did you mean sums?"),
        (["runs", "--task", "summs"], "did you mean sums?"),
        (["runs", "--items", "sft@step10", "x"], "'x' is none of the evaluated models"),
        (["runs", "--limit", "-1"], "--limit -1: must be 0"),
        (["runs", "--out", "empty"], "is a folder"),
    ],
)
def test_bad_input_is_refused_in_words(
    runs: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    (runs / "empty").mkdir()
    (runs / "bad").mkdir()
    (runs / "bad/results_x.json").write_text("{")
    assert main(["eval", "table", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_one_model_without_items(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_evaluation(tmp_path, [FakeTask("sums", [1.0, 0.0])], model="org/model", samples=False)
    assert main(["eval", "table", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "Only model has a score by sums acc: 0.500 (no interval is known, 2 items)." in shown
    assert "no items of sums are stored" in shown
