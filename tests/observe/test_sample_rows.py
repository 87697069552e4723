"""Rows of a few steps, read without parsing all of samples.jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weft.observe.sample_rows import group_rows, read_samples


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_steps_with_tokens_are_chosen_and_the_last(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"step": s, "id": "a", "completion": str(s)} for s in range(1, 101)
    ]
    for row in rows[::10]:
        row["tokens"] = ["x"]
    path = write(tmp_path / "samples.jsonl", rows)
    assert [row["step"] for row in read_samples(path)] == [
        1,
        11,
        21,
        31,
        41,
        51,
        61,
        71,
        81,
        91,
        100,
    ]
    assert [row["step"] for row in read_samples(path, 3)] == [1, 51, 100]


def test_a_long_file_is_not_parsed_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "samples.jsonl", [{"step": s, "completion": "c"} for s in range(2000)])
    parsed, loads = [], json.loads
    monkeypatch.setattr("json.loads", lambda text: parsed.append(text) or loads(text))
    assert len(read_samples(path, 8)) == len(parsed) == 8


def test_other_layouts_and_damaged_lines_are_handled(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text('{"id": "x", "step": 3.0}\nnothing\n[1]\n{"step": null}\n{"step": 4, "id"')
    assert read_samples(path) == [{"id": "x", "step": 3.0}]
    assert read_samples(tmp_path / "none") == []


def test_groups_are_of_one_id_of_one_step() -> None:
    rows = [{"step": s, "id": i, "k": k} for s in (2, 1) for k in (0, 1) for i in ("a", "b")]
    found = group_rows(rows)
    assert list(found) == [1, 2] and [(g.id, [row["k"] for row in g.rows]) for g in found[1]] == [
        ("a", [0, 1]),
        ("b", [0, 1]),
    ]
    assert len(group_rows([{"step": 1}, {"step": 1}])[1]) == 2, "rows without an id stand alone"
