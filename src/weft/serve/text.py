"""Incremental text of one completion: the part that is final, cut before a stop text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.data.pieces import Pieces
from weft.data.tokenizer import StreamDecoder, Tokenizer
from weft.engine.base import TokenEvent

CONTEXT = 4  # last prompt tokens, on which the text of the first new tokens may depend


@dataclass(frozen=True)
class Said:
    """A token whose text has been emitted.

    `piece` is its bytes, `offset` its position in the completion in characters, and `top` the
    likeliest tokens at its position as (bytes, log-prob).
    """

    piece: bytes
    logprob: float
    offset: int
    top: tuple[tuple[bytes, float], ...] = ()


class GrowingText:
    """Decodes one completion token by token.

    `feed` returns new text that will not change, and `take` the tokens of that text. Text that may
    be the start of a stop text is held back. End tokens and the tokens of the stop text are left
    out.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stops: Sequence[str] = (),
        pieces: Pieces | None = None,
    ) -> None:
        self._pieces = pieces or Pieces(tokenizer)
        self._stops = [stop for stop in stops if stop]
        self._decoder = StreamDecoder(tokenizer)
        self._decoder.feed(list(prompt)[-CONTEXT:])
        self._text = ""
        self._shown = 0
        self._held: list[Said] = []
        self._ready: list[Said] = []
        self.count = 0  # tokens fed
        self.finish: str | None = None

    @property
    def text(self) -> str:
        return self._text[: self._shown]

    def feed(self, event: TokenEvent) -> str:
        """Add a token and return the text that is now final."""
        self.count += 1
        top = tuple((self._pieces.of(id), logprob) for id, logprob in event.top)
        self._held.append(Said(self._pieces.of(event.token), event.logprob, len(self._text), top))
        self._text += self._decoder.feed([event.token])
        self.finish = event.finish
        if self.finish is not None:
            self._text += self._decoder.flush()
        until = self._until()
        new = self._text[self._shown : until]
        self._shown = until
        self._ready += [said for said in self._held if said.offset < until]
        self._held = [said for said in self._held if said.offset >= until]
        return new

    def take(self) -> list[Said]:
        """Return the tokens whose text became final since the last call."""
        taken = self._ready
        self._ready = []
        return taken

    def _until(self) -> int:
        """Return the number of characters that are final."""
        found = [
            at
            for stop in self._stops
            if (at := self._text.find(stop, max(0, self._shown - len(stop) + 1))) >= 0
        ]
        if found:
            return max(self._shown, min(found))
        if self.finish is not None:
            return len(self._text)
        held = [self._begins(stop) for stop in self._stops]
        return max(self._shown, len(self._text) - max(held, default=0))

    def _begins(self, stop: str) -> int:
        """Return the length of the longest start of `stop` that the text ends with."""
        return next(
            (
                n
                for n in range(min(len(stop) - 1, len(self._text)), 0, -1)
                if self._text.endswith(stop[:n])
            ),
            0,
        )
