"""Files of prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tiny import make_tokenizer
from weft.data.spec import TokenizerSpec
from weft.data.tokenizer import Tokenizer
from weft.errors import DataError
from weft.evaluation.answers import read_prompts


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return Tokenizer.load(TokenizerSpec(path=str(folder)))


def test_rows_texts_and_conversations(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [
        "Who are you?",
        {"id": "x", "prompt": "What is 2?"},
        {
            "messages": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Yes?"},
                {"role": "user", "content": "Go"},
            ]
        },
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second, third = read_prompts(str(file))
    assert (first.id, second.id, third.text) == ("0", "x", "Go")
    assert tokenizer.decode(first.tokenize(tokenizer)) == "<|user|>Who are you?</s><|assistant|>"
    assert tokenizer.decode(third.tokenize(tokenizer, system="Be kind.")) == (
        "<|system|>Be kind.</s><|user|>Hi</s><|assistant|>Yes?</s><|user|>Go</s><|assistant|>"
    )
    assert tokenizer.decode(second.tokenize(tokenizer, plain=True)) == "What is 2?"
    assert len(read_prompts(str(file), 2)) == 2


def test_lines_of_a_text_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("One?\n\nTwo?\n")
    assert [prompt.text for prompt in read_prompts(str(file))] == ["One?", "Two?"]
    file.write_text("\n")
    with pytest.raises(DataError, match="no prompts"):
        read_prompts(str(file))


def test_bad_rows_are_named_with_their_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('"fine"\n{"answer": "x"}\nnonsense\n3\n')
    with pytest.raises(
        DataError, match=r"(?s)prompts.jsonl:2: .*prompts.jsonl:3: not JSON.*prompts.jsonl:4: "
    ):
        read_prompts(str(file))
