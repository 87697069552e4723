"""Pieces of text by token."""

from __future__ import annotations

from pathlib import Path

from tests.tiny import make_tokenizer
from weft.data.tokenizer import Tokenizer, TokenizerSpec
from weft.runtime.samples import BROKEN, TokenDecoder


def test_pieces_put_together_are_the_text(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(TokenizerSpec(path=str(tmp_path)))
    pieces = TokenDecoder(tokenizer)
    for text in ("Once upon a time", "čáp 🦩 x", "two  blanks\n\nand lines"):
        ids = tokenizer.encode(text, bos=False)
        assert "".join(pieces(ids)) == text and len(pieces(ids)) == len(ids)
    torn = tokenizer.encode("🦩", bos=False)[:-1]
    assert len(pieces(torn)) == len(torn) and pieces(torn)[-1] == BROKEN
