"""Task files are found and read without network, and errors name their file and line."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.evaluation.harness_tasks import write_tasks
from weft.errors import ConfigError, DataError
from weft.evaluation import suite_tasks
from weft.evaluation.suite_tasks import TaskSelection, load_tasks, open_manager


def test_broken_files_are_reported_with_their_lines(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("task: a\ninclude: nowhere.yaml\n")
    (tmp_path / "b.yaml").write_text("task: b\nother: 'x\n")
    (tmp_path / "c.yaml").write_text("- task\n")
    (tmp_path / "d.yaml").write_text("task: d\n")
    with pytest.raises(DataError) as error:
        suite_tasks.check_files(sorted(tmp_path.glob("*.yaml")))
    first, second, third = error.value.reports
    assert first == f"{tmp_path}/a.yaml:2: include: there is no file nowhere.yaml"
    assert re.match(rf"{tmp_path}/b.yaml:\d: .*of line 2$", second)
    assert third.startswith(f"{tmp_path}/c.yaml:1: ")
    with pytest.raises(DataError, match="needs the key task or group"):
        (tmp_path / "d.yaml").write_text("tusk: d\n")
        suite_tasks.check_files([tmp_path / "d.yaml"])


def test_the_line_is_that_of_the_longest_text_that_is_mentioned(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("task: a\nmetric_list:\n  - metric: accc\nmetric: accc_norm\n")
    assert suite_tasks.find_line(file, "unknown metric 'accc'") == 3
    assert suite_tasks.find_line(file, "unknown metric 'accc_norm'") == 4
    assert suite_tasks.find_line(file, "something else") == 1
    file.write_text("task: a\ndoc_to_choice: x\ndoc_to_text: 'Q: {{qestion}}'\n")
    assert suite_tasks.find_line(file, "'qestion' is undefined") == 3


def test_a_task_without_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").touch()
    file = tmp_path / "empty.yaml"
    file.write_text(
        "task: empty\ndataset_path: json\ndataset_kwargs:\n  data_files: {test: none.jsonl}\n"
        "test_split: test\noutput_type: loglikelihood_rolling\ndoc_to_text: ''\n"
        "doc_to_target: '{{text}}'\nmetric_list: [{metric: word_perplexity}]\n"
    )
    manager, names = open_manager(TaskSelection(["empty"], [tmp_path]))
    with pytest.raises(DataError, match=rf"{file}:4: .*'data_files' have no rows"):
        load_tasks(manager, names, tmp_path)


def test_data_are_found_next_to_the_file_and_in_copies(tmp_path: Path) -> None:
    file = tmp_path / "tasks" / "a.yaml"
    file.parent.mkdir()
    (file.parent / "rows.jsonl").touch()
    copy = tmp_path / "copies" / "OWNER" / "NAME"
    copy.mkdir(parents=True)
    config = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": ["rows.jsonl"]}}}
    changes = suite_tasks.find_local_data(config, file, tmp_path / "copies")
    found = {"test": [str(file.parent / "rows.jsonl")]}
    assert changes == {"dataset_kwargs": {"data_files": found}}
    config = {"dataset_path": "json", "dataset_kwargs": {"data_files": "other.jsonl"}}
    assert suite_tasks.find_local_data(config, file, tmp_path) == {}
    changes = suite_tasks.find_local_data({"dataset_path": "OWNER/NAME"}, file, copy.parent.parent)
    assert changes == {"dataset_path": str(copy)}


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    suite_tasks.require_harness()
    monkeypatch.setattr(suite_tasks, "version", lambda name: "0.4.9")
    with pytest.raises(ConfigError, match=r"version 0.4.9 is installed; python .*\[eval\]"):
        suite_tasks.require_harness()
    absent = SimpleNamespace(find_spec=lambda name: None)
    monkeypatch.setattr(suite_tasks.importlib, "util", absent)
    with pytest.raises(ConfigError, match="it is not installed"):
        suite_tasks.require_harness()


@pytest.mark.slow
def test_tasks_with_errors_are_refused(tmp_path: Path) -> None:
    folder = write_tasks(tmp_path, count=4)
    text = (folder / "choices.yaml").read_text()
    for name, wrong, message in (
        ("key", text.replace("output_type", "outputtype"), ":8: .*did you mean output_type"),
        ("metric", text.replace("metric: acc,", "metric: accc,"), ":20: .*did you mean acc"),
        ("file", text.replace("test.jsonl", "none.jsonl"), ":4: .*none.jsonl"),
    ):
        file = folder / f"{name}.yaml"
        file.write_text(wrong.replace("task: choices", f"task: {name}"))
        manager, names = open_manager(TaskSelection([name], [folder]))
        with pytest.raises(DataError, match=f"{file}{message}"):
            load_tasks(manager, names, tmp_path)
    (folder / "wrong.yaml").write_text(
        re.sub("doc_to_target: .*", 'doc_to_target: "none"', text).replace(
            "choices\n", "wrong\n", 1
        )
    )
    manager, names = open_manager(TaskSelection(["wrong"], [folder]))
    with pytest.raises(DataError, match="item 0: the target 'none' is none of the"):
        load_tasks(manager, names, tmp_path)
    lines = (folder / "talk.yaml").read_text().replace("task: talk", "task: programs")
    scoring = "process_results: !function weft.evaluation.task_scoring.score_program"
    (folder / "programs.yaml").write_text(f"{lines}\n{scoring}\n")
    manager, names = open_manager(TaskSelection(["programs"], [folder]))
    with pytest.raises(ConfigError, match=r"'programs' runs programs.*--allow_code"):
        load_tasks(manager, names, tmp_path)
    manager, names = open_manager(TaskSelection(["programs"], [folder]))
    assert len(load_tasks(manager, names, tmp_path, allow_code=True)) == 1
    manager, names = open_manager(TaskSelection([str(folder / "talk.yaml")]))
    assert names == ["talk"] and len(load_tasks(manager, names, tmp_path)) == 1
    manager, names = open_manager(TaskSelection(["st*"], [folder]))
    assert names == ["stories"]


@pytest.mark.slow
def test_tasks_of_the_harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error for an unknown name has the nearest one; unavailable data are named once."""
    with pytest.raises(ConfigError, match=r"unknown task 'gsm8q'; did you mean gsm8k\?"):
        open_manager(TaskSelection(["gsm8q"]))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    manager, names = open_manager(TaskSelection(["mmlu"]))
    with pytest.raises(DataError, match=r"cais/mmlu .*; put the files") as error:
        load_tasks(manager, names, tmp_path)
    assert len(error.value.reports) == 1 and f"{tmp_path}/cais/mmlu" in str(error.value)
