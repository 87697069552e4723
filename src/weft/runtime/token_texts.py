"""Decoding of the text of each token in a sequence, for coloring a text by token."""

from __future__ import annotations

from collections.abc import Sequence

from weft.data.tokenizer import Tokenizer

BROKEN = "\ufffd"  # replacement character: decoded from an incomplete byte sequence


class TokenDecoder:
    """Decoder of single tokens, which caches their texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        self._anchor: tuple[int, str] | None = None  # token decoded before others, and its text

    def __call__(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token, including special tokens.

        If a character consists of several tokens, the text of the last one is the character, and
        that of the others is empty.
        """
        texts: list[str] = []
        waiting: list[int] = []
        for id in ids:
            piece = self._decode_token(id)
            if not waiting and BROKEN not in piece:
                texts.append(piece)
                continue
            waiting.append(id)
            text = self._decode_after_anchor(waiting)
            if BROKEN in text and len(waiting) < 8:
                texts.append("")
                continue
            texts.append(text)
            waiting = []
        return [*texts[:-1], self._decode_after_anchor(waiting)] if waiting else texts

    def _decode_token(self, id: int) -> str:
        if id not in self._texts:
            self._texts[id] = self._decode_after_anchor([id])
        return self._texts[id]

    def _decode_after_anchor(self, ids: Sequence[int]) -> str:
        """Decode tokens as a continuation of other text, so that a space before a word is kept."""
        if self._anchor is None:
            self._anchor = self._choose_anchor(ids[0])
        anchor, text = self._anchor
        whole = self._tokenizer.decode([anchor, *ids])
        if whole.startswith(text):
            return whole[len(text) :]
        return self._tokenizer.decode(ids)

    def _choose_anchor(self, fallback: int) -> tuple[int, str]:
        """Return (token id, text) of the anchor, a token put in front of the tokens to decode.

        Without an anchor, a space at the beginning of the first word would be lost. The anchor is
        the token of the letter "a" or, if the tokenizer cannot encode this letter, `fallback`.
        """
        anchor = (self._tokenizer.encode("a", bos=False) or [fallback])[-1]
        return anchor, self._tokenizer.decode([anchor])
