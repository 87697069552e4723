"""Reading tokenizers without a model's configuration gives the same as `AutoTokenizer`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.tiny import make_tokenizer
from weft.data import tokenizer_files

TEXT = "Once upon a time, 12 people said: héllo </s> again."


def described(hf: Any) -> tuple[Any, ...]:
    """Return everything that determines the behavior of a tokenizer."""
    return (
        type(hf),
        hf.special_tokens_map,
        hf.chat_template,
        hf.padding_side,
        hf(TEXT)["input_ids"],
        hf.name_or_path,
    )


@pytest.mark.parametrize(
    "model_type", ["llama", "gpt2", "mistral", "qwen2", "gemma2", "deepseek_v2", "unheard_of"]
)
@pytest.mark.parametrize(
    "named", ["TokenizersBackend", "PreTrainedTokenizerFast", "LlamaTokenizerFast", "GPT2Tokenizer"]
)
def test_a_named_class_is_read_as_by_auto_tokenizer(
    tmp_path: Path, model_type: str, named: str
) -> None:
    make_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    own = tmp_path / "tokenizer_config.json"
    own.write_text(json.dumps({**json.loads(own.read_text()), "tokenizer_class": named}))
    assert tokenizer_files._read_plain_config(str(tmp_path)) is not None
    theirs = AutoTokenizer.from_pretrained(str(tmp_path))
    assert described(tokenizer_files.read_tokenizer(str(tmp_path), False)) == described(theirs)


@pytest.mark.parametrize("name", ["llama2"])
def test_a_tokenizer_of_real_files_is_read_as_by_auto_tokenizer(
    data_dir: Path, tmp_path: Path, name: str
) -> None:
    shutil.copytree(data_dir / "tokenizers" / name, tmp_path / name)
    place = tmp_path / name
    (place / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert described(tokenizer_files.read_tokenizer(str(place), False)) == described(
        AutoTokenizer.from_pretrained(str(place))
    )


@pytest.mark.parametrize("left_out", ["tokenizer_class", "auto_map", "config.json"])
def test_the_short_way_is_for_named_classes_alone(tmp_path: Path, left_out: str) -> None:
    make_tokenizer(tmp_path)
    own = tmp_path / "tokenizer_config.json"
    values = json.loads(own.read_text())
    if left_out == "tokenizer_class":
        del values["tokenizer_class"]
    if left_out == "auto_map":
        values["auto_map"] = {"AutoTokenizer": [None, "own.Own"]}
    own.write_text(json.dumps(values))
    if left_out != "config.json":
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert tokenizer_files._read_plain_config(str(tmp_path)) is None


def test_a_config_without_scaling_gives_no_warning(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    make_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "rope_scaling": null}')
    named = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named["tokenizer_class"] = "PreTrainedTokenizerFast"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    assert tokenizer_files._read_plain_config(str(tmp_path)) is not None, "the short way is taken"
    assert not [each for each in recwarn if "rope_scaling" in str(each.message)]
