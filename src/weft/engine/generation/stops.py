"""Detection of stop texts in completions."""

from __future__ import annotations

from collections.abc import Sequence

from weft.data.tokenizer import StreamDecoder, Tokenizer


class StopTextDetector:
    """Detector of stop texts in one completion.

    A stop text or a character can span several tokens. Text is therefore decoded only when later
    tokens cannot change it. Special tokens are part of the text.
    """

    def __init__(self, stops: Sequence[str], tokenizer: Tokenizer) -> None:
        self._stops = [stop for stop in stops if stop]
        self._decoder = StreamDecoder(tokenizer, skip_special=False)
        # characters that may begin a stop text still to come
        self._keep = max(map(len, self._stops)) - 1
        self._tail = ""

    def feed(self, token: int) -> bool:
        """Append a token, and return whether it completes a stop text.

        Stop texts that earlier tokens completed are not reported again.
        """
        text = self._tail + self._decoder.feed([token])
        self._tail = text[max(0, len(text) - self._keep) :]
        return any(stop in text for stop in self._stops)
