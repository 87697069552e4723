"""Choice of the backend for a model from its config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.checkpoints.config_file import choose_backend, describe_disadvantages, read_config_values
from weft.errors import CheckpointError
from weft.registry import families


def test_models_of_weft_s_own_families_are_its_own_to_run() -> None:
    assert {choose_backend({"model_type": name}) for name in families.load_all()} == {"torch"}
    assert choose_backend({"model_type": "bloom"}) == "hf"
    assert choose_backend({}) == "torch", "who reads it says that it names no type"
    assert "type bloom" in describe_disadvantages(
        {"model_type": "bloom"}
    ) and "backend=hf" in describe_disadvantages({"model_type": "bloom"})


def test_values_of_a_directory(tmp_path: Path) -> None:
    assert read_config_values(str(tmp_path)) == {} and read_config_values("no/such") == {}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert read_config_values(str(tmp_path)) == {"model_type": "llama"}
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            read_config_values(str(tmp_path))
