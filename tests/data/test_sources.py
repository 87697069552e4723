"""Rows of every kind of file, each with its line number, and files without rows."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest

from weft.data.sources import UnreadableRow, find_files, hash_content, read_rows
from weft.errors import DataError

ROWS = [{"prompt": "a\nb", "n": 1}, {"prompt": "日本", "n": 2}]


def read(path: Path) -> list[tuple[int, object]]:
    return [(place.line, row) for file in find_files(str(path)) for place, row in read_rows(file)]


def test_every_form_gives_the_same_rows(tmp_path: Path) -> None:
    lines = "\n\n".join(json.dumps(row) for row in ROWS)
    (tmp_path / "a.jsonl").write_text("\ufeff" + lines)
    (tmp_path / "a.json").write_text(json.dumps(ROWS, indent=1))
    (tmp_path / "lines.json").write_text(lines)
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write(lines)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.json", "lines.json", "a.jsonl.gz", "a.parquet"):
        assert [row for _, row in read(tmp_path / name)] == ROWS, name
    assert len(read(tmp_path)) == 10


def test_lines_are_those_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[\n {"x": "1\\n2"},\n\n {"x":\n 2}, 3\n]')
    assert [line for line, _ in read(tmp_path / "a.json")] == [2, 4, 5]
    (tmp_path / "b.jsonl").write_text('{"x": 1}\n\n{"x": 2\n[1]\n')
    found = read(tmp_path / "b.jsonl")
    assert [line for line, _ in found] == [1, 3, 4]
    assert found[1][1] == UnreadableRow("not JSON: Expecting ',' delimiter at column 8")
    assert found[2][1] == UnreadableRow("a row must be a JSON object, not list")


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ('[{"x": 1}', "the list is not closed"),
        ('[{"x": 1}, {"x" 2}]', "what follows was not read"),
        ("hello", "not JSON: Expecting value"),
    ],
)
def test_what_is_not_json_is_reported(tmp_path: Path, text: str, wrong: str) -> None:
    (tmp_path / "a.json").write_text(text)
    last = read(tmp_path / "a.json")[-1][1]
    assert isinstance(last, UnreadableRow) and wrong in last.reason


def test_files_without_rows(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "blank.jsonl").write_text("\n \n")
    (tmp_path / "none.json").write_text("[ ]")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe{}")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"x": 1}\n' * 5000)[:-20])
    (tmp_path / "no.parquet").write_text("PAR1")
    for name, wrong in (
        ("empty.jsonl", "the file is empty"),
        ("blank.jsonl", "has no rows"),
        ("none.json", "has no rows"),
        ("binary.jsonl", "not UTF-8"),
        ("cut.jsonl.gz", "damaged or cut short"),
        ("no.parquet", "not Parquet"),
    ):
        with pytest.raises(DataError, match=wrong):
            read(tmp_path / name)


def test_paths_that_lead_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.jsonl").write_text("{}")
    (tmp_path / "notes.txt").write_text("hi")
    with pytest.raises(DataError, match=r"no such file or directory; did you mean .*train\.jsonl"):
        find_files(str(tmp_path / "tarin.jsonl"))
    with pytest.raises(DataError, match=r"weft reads \.json"):
        find_files(str(tmp_path / "notes.txt"))
    (tmp_path / "sub").mkdir()
    with pytest.raises(DataError, match="no data files"):
        find_files(str(tmp_path / "sub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="no such file or directory, and HF_HUB_OFFLINE"):
        find_files("someone/surely-not-there")


def test_a_hub_name_is_fetched_and_a_folder_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "main").mkdir()
    (tmp_path / "main" / "train-00000-of-00001.jsonl").write_text('{"x": 1}\n')
    asked = {}

    def fetch(name: str, **options: object) -> str:
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert [f.name for f in find_files("openai/gsm8k:main")] == ["train-00000-of-00001.jsonl"]
    assert asked["name"] == "openai/gsm8k" and asked["repo_type"] == "dataset"
    assert "main/**.jsonl" in asked["allow_patterns"]


def test_splits_are_told_by_file_names(tmp_path: Path) -> None:
    for name in ("train-00000.jsonl", "dev.jsonl", "test_set.jsonl"):
        (tmp_path / name).write_text("{}")
    assert [f.name for f in find_files(str(tmp_path))] == ["train-00000.jsonl"]
    assert [f.name for f in find_files(str(tmp_path), "validation")] == ["dev.jsonl"]
    assert [f.name for f in find_files(str(tmp_path), "test")] == ["test_set.jsonl"]
    (tmp_path / "test_set.jsonl").unlink()
    with pytest.raises(DataError, match="no files of the split 'test'; it has train, validation"):
        find_files(str(tmp_path), "test")


def test_the_hash_is_of_the_content(tmp_path: Path) -> None:
    one, two = tmp_path / "1", tmp_path / "2"
    one.write_text("ab")
    two.write_text("ab")
    assert hash_content([one]) == hash_content([two])
    two.write_text("ac")
    assert hash_content([one]) != hash_content([two])


@pytest.mark.parametrize("name", ["b.jsonl", "sub/b.parquet", "b.json.gz"])
def test_a_pipe_or_a_device_among_the_files_is_refused_before_it_is_opened(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / name).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match=f"{name}: is a pipe or a device, not a file"):
        find_files(str(tmp_path))
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(DataError, match="is a pipe or a device"):
        find_files(str(tmp_path))
