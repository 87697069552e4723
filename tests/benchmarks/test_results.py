"""What a benchmark writes, and when it refuses to."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from pathlib import Path

import pytest

from benchmarks import results
from benchmarks.results import DirtyTree, Results


def git(root: Path, *words: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
    subprocess.run(["git", *identity, *words], cwd=root, check=True, capture_output=True)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with one commit and nothing else."""
    git(tmp_path, "init")
    (tmp_path / "code.py").write_text("x = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    return tmp_path


def test_a_clean_tree_is_measured(tree: Path) -> None:
    results.require_clean(tree)


@pytest.mark.parametrize("name", ["code.py", "new.py", "benchmarks/sft.py"])
def test_a_dirty_tree_is_refused(name: str, tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / name).parent.mkdir(exist_ok=True)
    (tree / name).write_text("x = 2\n")
    with pytest.raises(DirtyTree) as raised:
        results.require_clean(tree)
    assert raised.value.code == 2
    said = capsys.readouterr().err
    assert name.split("/")[0] in said and "--dry" in said


def test_results_of_other_benchmarks_do_not_make_a_tree_dirty(tree: Path) -> None:
    (tree / "benchmarks" / "results").mkdir(parents=True)
    (tree / "benchmarks" / "results" / "sft.json").write_text("{}")
    results.require_clean(tree)


def test_where_there_is_no_repository_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(DirtyTree):
        results.require_clean(tmp_path)


def test_a_result_says_how_it_came_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "benchmarks" / "results"
    made = Results(
        "sft", [{"side": "weft", "tokens/s": 1234.5}], {"batch": 8}, {"weft": [1]}, ["a note"]
    )
    path = results.report(made, argparse.Namespace(dry=False, threads=2), folder)
    assert path == folder / "sft.json"
    written = json.loads(path.read_text())
    assert (
        written["threads"] == 2
        and written["rows"] == made.rows
        and written["settings"] == {"batch": 8}
    )
    assert {"command", "commit", "date", "hardware", "versions"} <= set(written)
    assert {"cpu", "cores", "memory_gib"} == set(written["hardware"])
    assert "torch" in written["versions"] and len(written["commit"]) == 40
    assert "1,234" in capsys.readouterr().out


def test_a_dry_run_prints_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        results.report(Results("sft", [{"a": 1}]), argparse.Namespace(dry=True), tmp_path) is None
    )
    assert list(tmp_path.iterdir()) == [] and "sft" in capsys.readouterr().out


def test_a_table_sets_numbers_to_the_right() -> None:
    assert results.table([{"name": "ab", "n": 1}, {"name": "c", "n": 12.34}]) == (
        "name     n\n----  ----\nab       1\nc     12.3"
    )


def test_data_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = results.parser("sft", "", 1).parse_args(
        ["--dry", "--data", str(tmp_path / "absent")]
    )
    with pytest.raises(SystemExit) as raised:
        results.start(arguments)
    assert raised.value.code == 2
    assert "WEFT_TEST_DATA" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["-1", "nan", "inf", "soon"])
def test_a_rest_that_is_no_time_is_refused(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        results.parser("sft", "", 1).parse_args(["--rest", word])
    assert ended.value.code == 2 and "--rest" in capsys.readouterr().err


def test_a_quick_look_takes_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    arguments = results.parser("sft", "", 1).parse_args(["--quick", "--data", str(tmp_path)])
    assert arguments.rest == results.REST
    results.start(arguments)
    assert arguments.rest == 0


def test_a_command_names_no_folder_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sys.argv",
        ["/a/benchmarks/ppo.py", "--trl", "/home/me/trl", "--data=/home/me/data", "--steps", "3"],
    )
    assert (
        results.provenance(2)["command"]
        == "python -m benchmarks.ppo --trl DIR --data=DIR --steps 3"
    )
