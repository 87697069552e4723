"""Open-Assistant's lists of datasets as sources of weft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weft.compat.open_assistant.key_mapping import (
    InvalidDatasetEntry,
    convert_entries,
    limit_validation,
    scale_entries,
)


@pytest.mark.parametrize(
    ("entry", "made"),
    [
        ("webgpt", {"named": "webgpt"}),
        ({"webgpt": None}, {"named": "webgpt"}),
        ({"webgpt": {"fraction": 0.05}}, {"named": "webgpt", "fraction": 0.05}),
        (
            {"vicuna": {"val_split": 0.05, "max_val_set": 800, "fraction": 0.4}},
            {"named": "vicuna", "valid_split": 0.05, "max_valid": 800, "fraction": 0.4},
        ),
        ({"prompt_dialogue": {"size": 500}}, {"named": "prompt_dialogue", "size": 500}),
        (
            {"oasst_export": {"lang": "en,de", "input_file_path": "trees.jsonl.gz", "top_k": 1}},
            {
                "named": "oasst_export",
                "path": "trees.jsonl.gz",
                "args": {"lang": "en,de", "top_k": 1},
            },
        ),
        (
            {"augment_oasst": {"data_path": "folder", "input_file_path": "a.jsonl"}},
            {"named": "augment_oasst", "path": "folder/a.jsonl"},
        ),
        ({"oasst_export": {"hf_dataset_name": "OpenAssistant/oasst1"}}, {"named": "oasst_export"}),
        ({"oasst_export": {"hf_dataset_name": "OpenAssistant/oasst2"}}, {"named": "oasst2"}),
        (
            {"oasst_export": {"hf_dataset_name": "OpenAssistant/oasst1", "input_file_path": "f"}},
            {"named": "oasst_export", "path": "f"},
        ),
        (
            {"soda": {"input_max_length": 1024, "val_split": None}},
            {"named": "soda", "args": {"input_max_length": 1024}},
        ),
    ],
)
def test_an_entry(entry: Any, made: dict[str, Any]) -> None:
    assert convert_entries([entry]) == [made]


def test_a_copy_that_is_a_file_goes_before_the_file_of_the_entry(tmp_path: Path) -> None:
    def path(data_path: str) -> Any:
        return convert_entries(
            [{"oasst_export": {"data_path": data_path, "input_file_path": "a.jsonl.gz"}}]
        )[0]["path"]

    (tmp_path / "trees").write_text("")
    (tmp_path / "of.json").mkdir()
    assert path(f"{tmp_path}/trees") == f"{tmp_path}/trees"
    # so that the message names what was asked for
    assert path("missing/b.jsonl") == "missing/b.jsonl"
    assert path(f"{tmp_path}/of.json") == f"{tmp_path}/of.json/a.jsonl.gz"


def test_a_list_as_text() -> None:
    assert convert_entries("webgpt,alpaca") == [{"named": "webgpt"}, {"named": "alpaca"}]


@pytest.mark.parametrize(
    ("entry", "wrong"),
    [
        (
            {"webgpt": None, "fraction": 0.5},
            "fraction is on the same level as 'webgpt'; indent it below '- webgpt:'",
        ),
        ({"webgpt": 0.5}, "webgpt: 0.5 is not a parameter; an entry is '- name'"),
        (3, "3 is not a dataset"),
        (
            {"oasst_export": {"hf_dataset_name": "someone/else"}},
            "must be OpenAssistant/oasst1 or OpenAssistant/oasst2",
        ),
    ],
)
def test_a_bad_entry_is_named(entry: Any, wrong: str) -> None:
    with pytest.raises(InvalidDatasetEntry, match=wrong.replace("(", r"\(")) as caught:
        convert_entries(["alpaca", entry])
    assert caught.value.index == 1


def test_a_share_of_an_epoch_is_that_share_of_every_set() -> None:
    entries = [{"named": "a"}, {"named": "b", "fraction": 0.5}, {"named": "c", "size": 30}]
    assert [each.get("fraction", each.get("size")) for each in scale_entries(entries, 0.2)] == [
        0.2,
        0.1,
        6,
    ]
    with pytest.raises(InvalidDatasetEntry, match="weight has no share"):
        scale_entries([{"named": "a", "weight": 2.0}], 0.2)


def test_validation_sets_are_bounded() -> None:
    assert [
        each["max_valid"]
        for each in limit_validation([{"named": "a"}, {"named": "b", "max_valid": 5}], 20)
    ] == [20, 5]
