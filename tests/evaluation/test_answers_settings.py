"""Named sampling settings: built-in ones and those in files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.engine.spec import GenerationSpec
from weft.errors import ConfigError
from weft.evaluation.answers import choose, read_file

BASE = GenerationSpec(max_new_tokens=7, seed=3)


def test_built_in_settings_override_the_command() -> None:
    (greedy, k50), notes = choose(["greedy", "k50"], BASE)
    assert greedy.spec.greedy and greedy.spec.max_new_tokens == 7
    assert (k50.spec.top_k, k50.spec.top_p, k50.spec.seed) == (50, 0.95, 3)
    assert notes == []


def test_a_file_in_open_assistants_form(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    common = {"max_new_tokens": 128, "min_new_tokens": 5, "do_sample": True, "temperature": 1.0}
    listed = [
        {"name": "a", "generate_args": {"top_k": 40, "repetition_penalty": 1.0}},
        {"name": "beam5", "generate_args": {"num_beams": 5, "repetition_penalty": 1.2}},
        {"name": "greedy", "generate_args": {"do_sample": False, "num_beams": 1}},
    ]
    file.write_text(json.dumps({"default": {"generate_args": common}, "configurations": listed}))
    found, notes = read_file(str(file), BASE)
    assert [(each.name, each.spec.greedy, each.spec.top_k) for each in found] == [
        ("a", False, 40),
        ("greedy", True, 0),
    ]
    assert found[0].spec.max_new_tokens == 128 and found[0].spec.min_new_tokens == 5
    assert (
        len(notes) == 1
        and "beam5 is left out: weft does not sample with num_beams=5, repetition_penalty=1.2"
        in notes[0]
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("warm: {temprature: 1}", "did you mean temperature"),
        ("warm: {top_p: 3}", "must be at most 1"),
        ("[1, 2]", "must contain settings by name"),
        ("warm: 3", "must be a mapping"),
        ("configurations: 3", "must be a list"),
        ("a: {num_beams: 4}", "no sampling setting is left"),
        ("{", "settings.yaml:1: is not YAML"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        choose([str(file)], BASE)


def test_unknown_and_double_names() -> None:
    with pytest.raises(ConfigError, match="greedy"):
        choose(["gredy"], BASE)
    with pytest.raises(ConfigError, match="two sampling settings are called 'greedy'"):
        choose(["greedy", "greedy"], BASE)
