"""Invalid config.json files: the message begins with the file and has the value and the rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weft.checkpoints.config_file import (
    find_problem,
    prefix_errors,
    prefix_option,
    read_config_file,
)
from weft.errors import CheckpointError


@pytest.mark.parametrize(
    ("key", "bad", "good"),
    [
        ("eos_token_id", ["a", [1, "a"], 1.5, True], [2, [2, 3], None]),
        ("pad_token_id", ["a", [0]], [0, -1]),
        ("tie_word_embeddings", ["maybe", 1], [True, False]),
        ("torch_dtype", ["float99", "int8", 3, ""], ["float32", "bfloat16", "torch.float16", None]),
        ("dtype", ["float99"], ["float8_e4m3fn", "auto"]),
        ("architectures", ["x", [1]], [["LlamaForCausalLM"], [], None]),
        ("hidden_size", [0, -1, "8", 2**31, True], [8]),
        ("num_hidden_layers", [0, 10**9], [1]),
        ("rms_norm_eps", [float("nan"), float("inf")], [1e-6]),
        ("anything", [float("nan")], ["x", {"a": 1}]),
    ],
)
def test_values_that_no_model_can_have_are_refused(
    key: str, bad: list[Any], good: list[Any]
) -> None:
    assert [value for value in bad if find_problem(key, value) is None] == []
    assert [value for value in good if find_problem(key, value) is not None] == []


def test_the_message_begins_with_the_option_and_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama", "eos_token_id": "a"}))
    said = r"^critic\.path=m/config\.json: eos_token_id='a': it must be a whole number"
    with pytest.raises(CheckpointError, match=said), prefix_option("critic.path"):
        read_config_file(file, "m/config.json")
    with (
        pytest.raises(CheckpointError, match=r"^m/config\.json: lacks 'x'$"),
        prefix_errors("m/config.json"),
    ):
        raise CheckpointError("lacks 'x'")
    file.write_text('{"model_type": "llama"}')
    assert read_config_file(file, "m/config.json") == {"model_type": "llama"}
