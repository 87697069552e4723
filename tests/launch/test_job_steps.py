"""The record of the steps of a submission."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.launch.job_steps import RECORD, StepRecord, describe_files


def test_a_step_is_finished_for_its_inputs(tmp_path: Path) -> None:
    folder = tmp_path / "jobs" / "tulu"
    record = StepRecord.read(folder)
    assert not record.is_damaged and not record.was_begun("convert")
    record.begin("convert", {"model": "a"})
    begun = StepRecord.read(folder)
    assert not begun.is_damaged and begun.was_begun("convert")
    assert begun.find_finished("convert", {"model": "a"}) is None
    begun.finish("convert", files={"x": [1, 2]})
    finished = StepRecord.read(folder)
    step = finished.find_finished("convert", {"model": "a"})
    assert step is not None and step["files"] == {"x": [1, 2]}
    assert finished.find_finished("convert", {"model": "b"}) is None
    finished.begin("convert", {"model": "a"})
    assert StepRecord.read(folder).find_finished("convert", {"model": "a"}) is None


def test_submissions_are_found_by_file_and_contents(tmp_path: Path) -> None:
    record = StepRecord.read(tmp_path)
    record.add_submission(tmp_path / "tulu.slurm.sh", "ab", "4711")
    read = StepRecord.read(tmp_path)
    found = read.find_submission(tmp_path / "tulu.slurm.sh", "ab")
    assert found is not None and found["job"] == "4711"
    assert read.find_submission(tmp_path / "tulu.slurm.sh", "cd") is None
    assert read.find_submission(tmp_path / "tulu-2.slurm.sh", "ab") is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"steps": 3, "submissions": {}}', "\0"])
def test_a_damaged_record_has_no_steps(text: str, tmp_path: Path) -> None:
    (tmp_path / RECORD).write_text(text)
    record = StepRecord.read(tmp_path)
    assert record.is_damaged and record.steps == {} and record.submissions == []
    record.begin("upload", 1)
    assert json.loads((tmp_path / RECORD).read_text())["steps"]["upload"]["inputs"] == 1


def test_steps_of_a_wrong_form_are_not_finished(tmp_path: Path) -> None:
    values = {"steps": {"a": 1, "b": {"inputs": 1}}, "submissions": [1, {"file": "x"}]}
    (tmp_path / RECORD).write_text(json.dumps(values))
    record = StepRecord.read(tmp_path)
    assert record.find_finished("a", 1) is None and record.find_finished("b", 1) is None
    assert record.find_submission(tmp_path / "x", "") is None


def test_every_change_of_a_file_shows(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    file = tmp_path / "sub" / "weights"
    file.write_bytes(b"abc")
    before = describe_files(tmp_path)
    assert list(before) == ["sub/weights"] and before["sub/weights"][0] == 3
    file.write_bytes(b"abd")
    assert describe_files(tmp_path) != before
