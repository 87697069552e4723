"""Token ids as pieces of text that, put together, are the text: what colouring by token needs."""

from __future__ import annotations

from collections.abc import Sequence

from weft.data.tokenizer import Tokenizer

BROKEN = "\ufffd"  # what a tokenizer gives for the bytes of a part of a character


class Pieces:
    """Remembers the text of every token behind a usual one, so that a step's samples cost a look-up
    a token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}
        self._before: tuple[int, str] | None = None  # a token to stand before others, and its text

    def __call__(self, ids: Sequence[int]) -> list[str]:
        """One text a token, special tokens included.

        The first tokens of a character that is spread over several have none: the last one has it
        whole.
        """
        made: list[str] = []
        waiting: list[int] = []
        for id in ids:
            piece = self._piece(id)
            if not waiting and BROKEN not in piece:
                made.append(piece)
                continue
            waiting.append(id)
            text = self._behind(waiting)
            if BROKEN in text and len(waiting) < 8:
                made.append("")
                continue
            made.append(text)
            waiting = []
        return [*made[:-1], self._behind(waiting)] if waiting else made

    def _piece(self, id: int) -> str:
        if id not in self._known:
            self._known[id] = self._behind([id])
        return self._known[id]

    def _behind(self, ids: Sequence[int]) -> str:
        """The text of tokens in the middle of a text: the blank before a word stays."""
        if self._before is None:
            self._before = self._choose(ids[0])
        anchor, text = self._before
        whole = self._tokenizer.decode([anchor, *ids])
        if whole.startswith(text):
            return whole[len(text) :]
        return self._tokenizer.decode(ids)

    def _choose(self, fallback: int) -> tuple[int, str]:
        """A token whose text stays what it is whatever follows: a letter of the tokenizer's own."""
        anchor = (self._tokenizer.encode("a", bos=False) or [fallback])[-1]
        return anchor, self._tokenizer.decode([anchor])
