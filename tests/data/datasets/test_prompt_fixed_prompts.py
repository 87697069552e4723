"""Fixed prompts: supported files, and tokens that equal those of a run's own prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tiny import make_tokenizer
from weft.data.datasets.prompt import read_fixed_prompts, read_prompt_rows
from weft.data.spec import TokenizerSpec
from weft.data.tokenizer import Tokenizer
from weft.errors import DataError


def test_a_text_file_has_a_prompt_a_line(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one\n\n two words \n")
    assert list(read_prompt_rows(str(file))) == [
        (f"{file}:1", {"prompt": "one"}),
        (f"{file}:3", {"prompt": " two words "}),
    ]


def test_rows_have_the_tokens_that_the_runs_own_prompts_have(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "t")
    tokenizer = Tokenizer.load(TokenizerSpec(), str(tmp_path / "t"))
    file = tmp_path / "a.jsonl"
    said = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho"},
        {"role": "user", "content": "Go"},
    ]
    file.write_text(json.dumps({"prompt": "Hi"}) + "\n" + json.dumps({"messages": said}) + "\n")
    rendered = [
        tokenizer.encode_context(messages)[0]
        for messages in ([{"role": "user", "content": "Hi"}], said)
    ]
    for as_chat, first in ((False, tokenizer.encode("Hi")), (True, rendered[0])):
        found = read_fixed_prompts(str(file), tokenizer, as_chat=as_chat, max_tokens=None)
        assert found.ids == ("0", "1")
        assert [each.tolist() for each in found.sequences("prompt")] == [first, rendered[1]]
    with pytest.raises(
        DataError, match=r"a\.jsonl:2: the prompt has \d+ tokens, and the model's context leaves 3"
    ):
        read_fixed_prompts(str(file), tokenizer, as_chat=False, max_tokens=3)
