"""Which backend runs a model by its config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.checkpoints.kind import backend_of, cost, values_of
from weft.errors import CheckpointError
from weft.registry import families


def test_models_of_weft_s_own_families_are_its_own_to_run() -> None:
    assert {backend_of({"model_type": name}) for name in families.load_all()} == {"torch"}
    assert backend_of({"model_type": "bloom"}) == "hf"
    assert backend_of({}) == "torch", "who reads it says that it names no type"
    assert "type bloom" in cost({"model_type": "bloom"}) and "backend=hf" in cost(
        {"model_type": "bloom"}
    )


def test_values_of_a_directory(tmp_path: Path) -> None:
    assert values_of(str(tmp_path)) == {} and values_of("no/such") == {}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert values_of(str(tmp_path)) == {"model_type": "llama"}
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            values_of(str(tmp_path))
