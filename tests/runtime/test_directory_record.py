"""`run.json`: every process that works on a run adds itself, and no secret comes with it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.runtime.toy import Toy
from weft.observe.run_files import RunRecord
from weft.observe.run_list import list_runs
from weft.runtime.directory import build_command, parse_quickstart, read_commit, record_process


def test_a_run_records_how_it_was_started(tmp_path, monkeypatch):
    monkeypatch.setattr(
        sys, "argv", ["/env/bin/weft", "quickstart", "my-ppo", "launch.env.HF_TOKEN=hf_1", "seed=2"]
    )
    toy = Toy(tmp_path)
    toy.run()
    record = RunRecord.read(toy.path)
    assert (record.algorithm, record.total_steps) == ("my-ppo", 10)
    (start,) = record.starts
    assert start.command == ["weft", "quickstart", "my-ppo", "launch.env.HF_TOKEN=***", "seed=2"]
    assert {"weft", "python", "torch"} <= start.versions.keys() and start.host and start.step == 0
    assert "hf_1" not in (toy.path / "run.json").read_text()
    assert [(run.algorithm, run.step, run.total_steps) for run in list_runs(tmp_path)] == [
        ("my-ppo", 10, 10)
    ]


def test_a_restart_is_added_and_a_torn_file_begins_anew(tmp_path):
    for step in (0, 7):
        record_process(tmp_path, step=step, total_steps=20, hardware="a CPU")
    assert [(start.step, start.hardware) for start in RunRecord.read(tmp_path).starts] == [
        (0, "a CPU"),
        (7, "a CPU"),
    ]
    (tmp_path / "run.json").write_text('{"starts": [{"time"')
    record_process(tmp_path, step=9, total_steps=None, hardware="")
    assert [start.step for start in RunRecord.read(tmp_path).starts] == [9]
    (tmp_path / "run.json").write_text(
        '{"starts": [3, {"step": 1}, {"time": 5, "step": 2, "new": 1}], "total_steps": "x"}'
    )
    assert [start.step for start in RunRecord.read(tmp_path).starts] == [2]


@pytest.mark.parametrize(
    ("words", "original", "shown", "name"),
    [
        (
            ["/v/bin/weft", "quickstart", "--import", "my.py", "ppo", "a=1"],
            [],
            ["weft", "quickstart", "--import", "my.py", "ppo", "a=1"],
            "ppo",
        ),
        (
            ["/s/weft/apps/quickstart.py", "sft"],
            ["python3", "-m", "weft.apps.quickstart", "sft"],
            ["python", "-m", "weft.apps.quickstart", "sft"],
            "sft",
        ),
        (
            ["train.py", "--fast"],
            ["python3", "train.py", "--fast"],
            ["python", "train.py", "--fast"],
            None,
        ),
        (["-c"], ["python3", "-c", "import weft; ..."], ["python", "-c", "..."], None),
        (["/v/bin/weft", "demo"], [], ["weft", "demo"], None),
    ],
)
def test_the_command_is_what_a_user_would_type(words, original, shown, name):
    assert build_command(words, original) == shown
    assert parse_quickstart(shown) == name


def test_the_commit_of_a_checkout_says_whether_it_was_changed(tmp_path):
    assert read_commit(tmp_path) == ""
    (tmp_path / "a").write_text("1")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@x"]
    for words in (["init", "-q"], ["add", "a"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    clean = read_commit(tmp_path)
    assert len(clean) == 12
    (tmp_path / "a").write_text("2")
    assert read_commit(tmp_path) == f"{clean}+"
