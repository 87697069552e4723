"""metrics.jsonl and samples.jsonl: always valid JSON, and truncated at a restart."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from weft.observe.jsonl import StepFile, convert_to_json, read_rows


def test_values_that_are_not_finite_are_written_as_null(tmp_path: Path) -> None:
    file = StepFile(tmp_path / "metrics.jsonl")
    file.append(
        {
            "step": 1,
            "nan": math.nan,
            "inf": -math.inf,
            "deep": [{"x": np.float32("nan")}],
            "loss": 0.5,
        }
    )
    text = file.path.read_text()
    assert text == '{"step": 1, "nan": null, "inf": null, "deep": [{"x": null}], "loss": 0.5}\n'
    json.loads(text, parse_constant=lambda name: pytest.fail(f"bare {name}"))


def test_numpy_and_array_numbers_become_plain() -> None:
    import torch

    values = convert_to_json(
        {
            "a": np.int64(3),
            "b": np.float64(0.25),
            "c": torch.tensor(2.0),
            "d": True,
            "e": "x",
            "f": None,
        }
    )
    assert values == {"a": 3, "b": 0.25, "c": 2.0, "d": True, "e": "x", "f": None}
    assert isinstance(values["a"], int) and values["d"] is True


def test_truncation_keeps_the_lines_up_to_the_cut_byte_for_byte(tmp_path: Path) -> None:
    file = StepFile(tmp_path / "metrics.jsonl")
    for step in range(1, 6):
        file.append({"step": step, "loss": 1.0 / 3.0 / step})
    lines = file.path.read_bytes().splitlines(keepends=True)
    file.truncate(3)
    assert file.path.read_bytes() == b"".join(lines[:3])
    file.append({"step": 4})
    assert [row["step"] for row in file.read_rows()] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "torn", ['{"step": 3, "lo', '{"step": 3}', "\x00\x00", "[1]\n", "null\n", '{"loss": 1}\n']
)
def test_truncation_drops_a_torn_or_foreign_last_line(tmp_path: Path, torn: str) -> None:
    file = StepFile(tmp_path / "metrics.jsonl")
    file.extend([{"step": 1}, {"step": 2}])
    with file.path.open("a") as end:
        end.write(torn)
    file.truncate(9)
    assert file.path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_truncation_creates_no_file(tmp_path: Path) -> None:
    StepFile(tmp_path / "metrics.jsonl").truncate(3)
    assert list(tmp_path.iterdir()) == []


def test_incomplete_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "text": "\xc3')
    assert list(read_rows(path)) == [{"step": 1}]


@given(st.text())
@example("half a pair \ud800")
@example("\u2028\x00\r")
def test_any_text_survives_on_one_line(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    file = StepFile(tmp_path_factory.mktemp("run") / "samples.jsonl")
    file.append({"step": 1, "completion": text})
    assert file.path.read_bytes().count(b"\n") == 1
    assert list(file.read_rows()) == [{"step": 1, "completion": text}]
