"""Settings of trained prefixes: values that are read, and values that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weft.checkpoints.config_file import PrefixSettings, has_prefix, read_prefix
from weft.checkpoints.names import ADAPTER
from weft.errors import CheckpointError

GOOD = {
    "peft_type": "PREFIX_TUNING",
    "task_type": "CAUSAL_LM",
    "num_virtual_tokens": 4,
    "base_model_name_or_path": "a/b",
}


def write(directory: Path, **changes: Any) -> Path:
    (directory / ADAPTER).write_text(json.dumps(GOOD | changes))
    return directory


def test_settings(tmp_path: Path) -> None:
    assert read_prefix(tmp_path) is None and not has_prefix(None)
    assert read_prefix(write(tmp_path)) == PrefixSettings(4, "a/b")
    assert has_prefix(tmp_path)
    assert read_prefix(write(tmp_path, peft_type="LORA")) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task_type": "TOKEN_CLS"}, "is for 'TOKEN_CLS'; weft reads CAUSAL_LM and SEQ_CLS"),
        ({"num_virtual_tokens": None}, "num_virtual_tokens=None; a prefix has 1 at least"),
        ({"base_model_name_or_path": None}, "does not name its model"),
        ({"prefix_projection": True}, "still to be projected"),
    ],
)
def test_settings_that_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_prefix(write(tmp_path, **changes))


@pytest.mark.parametrize("text", ["{", "[]"])
def test_broken_settings(text: str, tmp_path: Path) -> None:
    (tmp_path / ADAPTER).write_text(text)
    with pytest.raises(CheckpointError, match="JSON"):
        read_prefix(tmp_path)
