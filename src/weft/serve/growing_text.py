"""Incremental decoding of a completion: its text, and the tokens whose text is final."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.data.token_bytes import TokenBytes
from weft.data.tokenizer import StreamDecoder, Tokenizer
from weft.engine.base import TokenEvent

CONTEXT = 4  # number of last prompt tokens on which the text of the first new tokens may depend


@dataclass(frozen=True)
class EmittedToken:
    """Token whose text has been emitted, because later tokens cannot change it.

    `piece` are the token's bytes. `logprob` is None for the first token of a prompt. `offset` is
    the position of the token's text in the completion or the prompt, in characters. `top` are the
    bytes and log-probs of the most likely tokens at the same position.
    """

    piece: bytes
    logprob: float | None
    offset: int
    top: tuple[tuple[bytes, float], ...] = ()


class GrowingText:
    """Incremental decoder of one completion.

    `feed` adds a token, and returns the new text that later tokens cannot change. `take` returns
    the tokens of that text, and `take_ids` returns the ids of all tokens. Text that may be the
    start of a stop string is held back. The text and the tokens do not include end tokens and a
    stop string. If `every_token` is True, `take` also returns these tokens after the completion has
    ended.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stops: Sequence[str] = (),
        pieces: TokenBytes | None = None,
        *,
        every_token: bool = False,
    ) -> None:
        self._every_token = every_token
        self._pieces = pieces or TokenBytes(tokenizer)
        self._stops = [stop for stop in stops if stop]
        self._decoder = StreamDecoder(tokenizer)
        self._decoder.feed(list(prompt)[-CONTEXT:])
        self._text = ""
        self._num_emitted = 0
        self._pending_tokens: list[EmittedToken] = []
        self._emitted_tokens: list[EmittedToken] = []
        self._new_ids: list[int] = []
        self.count = 0  # number of tokens passed to `feed`
        self.finish: str | None = None

    @property
    def final_text(self) -> str:
        """Text that later tokens cannot change."""
        return self._text[: self._num_emitted]

    def feed(self, event: TokenEvent) -> str:
        """Add a token, and return the new text that later tokens cannot change."""
        self.count += 1
        self._new_ids.append(event.token)
        # Add the token and its text.
        top = tuple((self._pieces.get_bytes(id), logprob) for id, logprob in event.top)
        self._pending_tokens.append(
            EmittedToken(self._pieces.get_bytes(event.token), event.logprob, len(self._text), top)
        )
        self._text += self._decoder.feed([event.token])
        self.finish = event.finish
        if self.finish is not None:
            self._text += self._decoder.flush()
        # Emit the text that is final, and the tokens that begin in it.
        end = self._count_final()
        new_text = self._text[self._num_emitted : end]
        self._num_emitted = end
        self._emitted_tokens += [token for token in self._pending_tokens if token.offset < end]
        self._pending_tokens = [token for token in self._pending_tokens if token.offset >= end]
        if self._every_token and self.finish is not None:
            self._emitted_tokens += [replace(token, offset=end) for token in self._pending_tokens]
            self._pending_tokens = []
        return new_text

    def take(self) -> list[EmittedToken]:
        """Return the tokens whose text has been emitted since the last call."""
        tokens = self._emitted_tokens
        self._emitted_tokens = []
        return tokens

    def take_ids(self) -> list[int]:
        """Return the ids of the tokens fed since the last call, including end tokens."""
        ids = self._new_ids
        self._new_ids = []
        return ids

    def _count_final(self) -> int:
        """Return the number of leading characters that later tokens cannot change.

        A stop string, the text that follows it, and text that may be the start of a stop string are
        not counted.
        """
        # End the text at the first stop string. Only new text needs to be searched.
        stop_positions = []
        for stop in self._stops:
            position = self._text.find(stop, max(0, self._num_emitted - len(stop) + 1))
            if position >= 0:
                stop_positions.append(position)
        if stop_positions:
            return max(self._num_emitted, min(stop_positions))
        if self.finish is not None:
            return len(self._text)
        # Hold back what may be the start of a stop string.
        lengths = [self._match_stop_start(stop) for stop in self._stops]
        return max(self._num_emitted, len(self._text) - max(lengths, default=0))

    def _match_stop_start(self, stop: str) -> int:
        """Return the length of the longest proper prefix of `stop` with which the text ends."""
        for length in range(min(len(stop) - 1, len(self._text)), 0, -1):
            if self._text.endswith(stop[:length]):
                return length
        return 0
