"""Rows of Parquet and Arrow files equal those of the JSON from which they were made."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from weft.data.datasets.base import DatasetUtility
from weft.data.sources import find_files, read_rows
from weft.data.tokenizer import Tokenizer
from weft.errors import DataError
from weft.registry import datasets

Write = Callable[[list[dict[str, Any]], Path], None]


def parquet(rows: list[dict[str, Any]], folder: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")


def arrow_stream(rows: list[dict[str, Any]], folder: Path) -> None:
    """Write a folder as `datasets` saves it to disk, including its other files."""
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_stream(folder / "data-00000-of-00001.arrow", table.schema) as writer:
        writer.write_table(table)
    (folder / "cache-0f.arrow").write_bytes(b"what was made of the rows at another time")
    (folder / "state.json").write_text('{\n "_split": null\n}')
    (folder / "dataset_info.json").write_text('{\n "features": {}\n}')


def arrow_file(rows: list[dict[str, Any]], folder: Path) -> None:
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_file(folder / "rows.arrow", table.schema) as writer:
        writer.write_table(table)


def read(place: Path) -> list[Any]:
    return [row for file in find_files(str(place)) for _, row in read_rows(file)]


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def schema(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


ROWS: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": "", "tool_calls": [call("weather", city="Paris")]},
        ],
        "tools": [schema("weather", city={"type": "string", "enum": ["Paris", "Rome"]})],
        "facts": {"where": {"lat": 1.5, "near": [{"a": 1}, {"b": 2}]}},
    },
    {
        "messages": [
            {"role": "user", "content": "Time?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [call("time", at={"hour": 3}, zone="CET")],
            },
            {"role": "tool", "content": "4", "name": "time"},
            {"role": "assistant", "content": "Four."},
        ],
        "tools": [schema("time", zone={"type": "string", "description": "a zone"}), schema("now")],
        "facts": {"who": None},
    },
]


@pytest.mark.parametrize("write", [parquet, arrow_stream, arrow_file])
def test_no_key_of_another_row_is_added(tmp_path: Path, write: Write) -> None:
    write(ROWS, tmp_path)
    first, second = read(tmp_path)
    assert first == ROWS[0]
    # a null inside a struct cannot be told from one that was filled in
    assert second == {**ROWS[1], "facts": {}}


@pytest.mark.parametrize("others", [[{"a": 1, "b": 2}], [{"a": 1, "b": None}], []])
def test_a_null_and_a_missing_key_make_the_same_file(others: list[dict[str, Any]]) -> None:
    """This is why both are left out: the file does not distinguish them."""
    held, lacks = (
        [{"s": row} for row in (*others, row)] for row in ({"a": 1, "b": None}, {"a": 1})
    )
    kinds = pyarrow.Table.from_pylist(held).schema
    assert pyarrow.Table.from_pylist(held, kinds).equals(
        pyarrow.Table.from_pylist(lacks, kinds), check_metadata=True
    )


def test_a_null_inside_arguments_that_are_json_text_stays(
    tmp_path: Path, with_template: Callable[..., Tokenizer]
) -> None:
    calls = (
        {"function": {"name": "f", "arguments": text}} for text in ('{"zone": null}', '{"at": 3}')
    )
    replies = ({"role": "assistant", "content": "", "tool_calls": [call]} for call in calls)
    rows = [{"messages": [{"role": "user", "content": "Time?"}, reply]} for reply in replies]
    parquet(rows, tmp_path)
    text = trained_text(tmp_path / "rows.parquet", with_template(TOOLS), tmp_path)
    assert '"arguments": {"zone": null}' in text and '"arguments": {"at": 3}' in text


def test_nulls_that_nothing_filled_in_stay(tmp_path: Path) -> None:
    row = {"answer": None, "steps": [1, None], "options": [("a", None), ("b", 2)]}
    options = pyarrow.map_(pyarrow.string(), pyarrow.int64())
    kinds = pyarrow.schema(
        [("answer", "string"), ("steps", pyarrow.list_(pyarrow.int64())), ("options", options)]
    )
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row], kinds), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == [
        {"answer": None, "steps": [1, None], "options": {"a": None, "b": 2}}
    ]


def test_nulls_of_a_json_file_stay(tmp_path: Path, with_template: Callable[..., Tokenizer]) -> None:
    row = {**ROWS[0], "tools": [schema("weather", city={"default": None})]}
    row["messages"] = [
        ROWS[0]["messages"][0],
        {"role": "assistant", "tool_calls": [call("weather", zone=None)]},
    ]
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    text = trained_text(tmp_path / "a.jsonl", with_template(TOOLS), tmp_path)
    assert '"arguments": {"zone": null}' in text and '"default": null' in text


TOOLS = (
    "{{ tools | tojson }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% "
    "endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def trained_text(file: Path, tokenizer: Tokenizer, cache: Path) -> str:
    util = DatasetUtility(tokenizer, cache_dir=str(cache / "cache"))
    dataset = datasets.get("chat")(util=util, path=str(file))
    samples = [dataset[index] for index in range(len(dataset))]
    return "".join(
        tokenizer.decode([*sample.data["prompt"].tolist(), *sample.data["completion"].tolist()])
        for sample in samples
    )


def test_a_parquet_file_trains_what_the_json_does(
    tmp_path: Path, with_template: Callable[..., Tokenizer]
) -> None:
    parquet(ROWS, tmp_path)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    texts = [
        trained_text(tmp_path / f"rows.{form}", with_template(TOOLS), tmp_path)
        for form in ("parquet", "jsonl")
    ]
    assert texts[0] == texts[1]
    assert '{"name": "weather", "arguments": {"city": "Paris"}}' in texts[0]
    assert '{"name": "time", "arguments": {"at": {"hour": 3}, "zone": "CET"}}' in texts[0]
    assert "null" not in texts[0]


def test_a_verifier_gets_the_columns_as_they_were(
    tmp_path: Path, with_template: Callable[..., Tokenizer]
) -> None:
    rows = [
        {"prompt": "a", "truth": {"x": 1}},
        {"prompt": "b", "truth": {"y": [{"k": "v"}, {"n": 2}]}},
    ]
    parquet(rows, tmp_path)
    util = DatasetUtility(with_template(None), cache_dir=str(tmp_path / "cache"))
    dataset = datasets.get("prompt")(util=util, path=str(tmp_path / "rows.parquet"))
    assert [dataset[index].metadata["truth"][0] for index in range(2)] == [
        row["truth"] for row in rows
    ]


@pytest.mark.parametrize(("name", "form"), [("a.arrow", "Arrow"), ("a.parquet", "Parquet")])
def test_other_bytes_are_named(tmp_path: Path, name: str, form: str) -> None:
    (tmp_path / name).write_text("no such thing")
    with pytest.raises(DataError, match=f"{name}: not {form}, or damaged"):
        read(tmp_path / name)
