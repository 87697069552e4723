"""Text as it grows: stop texts over several tokens, characters over several tokens, and which
tokens were said.
"""

from __future__ import annotations

from itertools import pairwise

import pytest

from weft.engine.base import TokenEvent
from weft.serve.growing_text import GrowingText
from weft.testing.datasets import build_small_tokenizer


def grown(text: str, *stops: str, cut: int | None = None) -> tuple[list[str], GrowingText]:
    """(parts shown, the text) of a completion a token at a time, the last with an end."""
    tokenizer = build_small_tokenizer()
    ids = tokenizer.encode(text, bos=False)[:cut]
    growing = GrowingText(tokenizer, [], stops)
    ends = [None] * (len(ids) - 1) + ["stop"]
    parts = [
        growing.feed(TokenEvent("a", 0, id, -float(n), 0, end))
        for n, (id, end) in enumerate(zip(ids, ends, strict=True))
    ]
    return parts, growing


@pytest.mark.parametrize("stop", ["END", "E", "xx", "D", "N stop"])
def test_nothing_of_a_stop_text_is_shown(stop: str) -> None:
    text = "before EN EEND after"
    parts, growing = grown(text, stop, "never there")
    assert "".join(parts) == text.partition(stop)[0] == growing.final_text
    assert len(growing.take()) == len(growing.final_text) and growing.take() == []


def test_characters_of_several_bytes_come_whole() -> None:
    parts, growing = grown("aé€😀!")
    assert "".join(parts) == "aé€😀!" and "\ufffd" not in "".join(parts)
    said = growing.take()
    assert len(said) == growing.count and all(
        one.offset <= other.offset for one, other in pairwise(said)
    )


def test_an_unfinished_character_shows_at_the_end() -> None:
    parts, _ = grown("a😀", cut=3)
    assert "".join(parts).startswith("a") and "\ufffd" in "".join(parts)


def test_a_beginning_that_is_no_stop_text_is_shown_in_the_end() -> None:
    parts, _ = grown("almost EN", "END")
    assert "".join(parts) == "almost EN" and "EN" in parts[-1]


def test_tokens_are_told_by_their_bytes() -> None:
    """A token that holds a part of a character has that part as its bytes, so that all bytes
    together are the text's.
    """
    _, growing = grown("aé€😀!")
    said = growing.take()
    assert b"".join(one.piece for one in said) == "aé€😀!".encode() and len(said) > 5


def test_every_token_is_told_where_it_is_asked_for() -> None:
    """An end token adds no text, and the tokens of a stop text are not shown."""
    tokenizer = build_small_tokenizer()
    ids = [*tokenizer.encode("ab END", bos=False), tokenizer.eos_id]
    for every in (False, True):
        growing = GrowingText(tokenizer, [], ["END"], every_token=every)
        for n, id in enumerate(ids):
            growing.feed(TokenEvent("a", 0, id, -1.0, 0, "stop" if n + 1 == len(ids) else None))
        said = growing.take()
        assert growing.final_text == "ab " and growing.take_ids() == ids
        assert len(said) == (len(ids) if every else 3)
        assert all(token.offset <= len("ab ") for token in said)
