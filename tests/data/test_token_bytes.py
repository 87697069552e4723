"""Bytes of single tokens, in byte-level and sentencepiece vocabularies, with leading blanks."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.data.spec import TokenizerSpec
from weft.data.token_bytes import TokenBytes
from weft.data.tokenizer import Tokenizer
from weft.testing.datasets import build_small_tokenizer

TEXT = "Once upon a time, there\n was é€😀 漢  two"


@pytest.mark.parametrize(
    "name", ["llama2/tokenizer.json", "llama2/tokenizer.model", "llama2", "gpt2/tokenizer.json"]
)
def test_all_bytes_together_are_the_text(name: str, data_dir: Path) -> None:
    tokenizer = Tokenizer.load(TokenizerSpec(path=str(data_dir / "tokenizers" / name)))
    pieces, ids = TokenBytes(tokenizer), tokenizer.encode(TEXT, bos=False)
    assert b"".join(map(pieces.get_bytes, ids)).decode().removeprefix(" ") == TEXT
    upon = tokenizer.encode("Once upon", bos=False)[1]
    assert pieces.get_bytes(upon) == b" upon"


def test_a_part_of_a_character_and_a_special_token() -> None:
    tokenizer = build_small_tokenizer()
    pieces, ids = TokenBytes(tokenizer), tokenizer.encode("é", bos=False)
    assert [pieces.get_bytes(id) for id in ids] == [b"\xc3", b"\xa9"]
    assert (
        tokenizer.eos_id is not None
        and pieces.get_bytes(tokenizer.eos_id).decode() == tokenizer.eos_token
    )
