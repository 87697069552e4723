"""Log-probs of the tokens of a prompt, for the request fields `echo` and `prompt_logprobs`.

They are computed at temperature 1, over the whole vocabulary.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from weft.data.token_bytes import TokenBytes
from weft.data.tokenizer import Tokenizer
from weft.engine.base import TokenEvent
from weft.serve.growing_text import EmittedToken
from weft.serve.openai_format import decode_piece
from weft.serve.prompts import EncodedPrompt
from weft.serve.worker import RowScores

MIN_LOGPROB = -9999.0  # replaces minus infinity, which JSON does not support
NEXT = 0  # placeholder id after a prompt; the pass computes the next token's log-probs in its place


@dataclass(frozen=True)
class EchoedPrompt:
    """Text of a prompt, and its tokens with their log-probs.

    `tokens` is empty if no log-probs were requested.
    """

    text: str
    tokens: list[EmittedToken]


@dataclass(frozen=True)
class PromptDescriber:
    """Builder of the parts of an answer that repeat a prompt.

    `tokenizer` must be the copy that belongs to the calling thread.
    """

    tokenizer: Tokenizer
    pieces: TokenBytes

    def build_echo(self, prompt: EncodedPrompt, scores: RowScores | None, top: int) -> EchoedPrompt:
        """Return the prompt's text, and its tokens if `scores` is not None.

        A prompt given as ids is decoded, including special tokens. Each token has its `top` most
        likely alternatives. The first token has no log-prob, because no token precedes it.
        """
        text = self.tokenizer.decode(prompt.ids) if prompt.text is None else prompt.text
        if scores is None:
            return EchoedPrompt(text, [])
        logprobs, top_ids, top_logprobs = _read_scores(prompt.ids, scores, top)
        offsets = self._find_offsets(prompt, text)
        tokens = [EmittedToken(self.pieces.get_bytes(prompt.ids[0]), None, offsets[0])]
        for index, (logprob, likeliest) in enumerate(
            zip(logprobs, _combine_likeliest(top_ids, top_logprobs), strict=True), 1
        ):
            piece = self.pieces.get_bytes(prompt.ids[index])
            alternatives = tuple((self.pieces.get_bytes(id), value) for id, value in likeliest)
            tokens.append(EmittedToken(piece, logprob, offsets[index], alternatives))
        return EchoedPrompt(text, tokens)

    def build_prompt_logprobs(
        self, prompt: EncodedPrompt, scores: RowScores, top: int
    ) -> list[dict[str, Any] | None]:
        """Return vLLM's field `prompt_logprobs`: log-probs by id for each token of the prompt.

        The first element is None. The entries of each other token are its own log-prob and those of
        the `top` most likely ids at its position. `rank` is 1 for the most likely id, and null for
        a token that is not among the `top` ids.
        """
        logprobs, top_ids, top_logprobs = _read_scores(prompt.ids, scores, top)
        rows: list[dict[str, Any] | None] = [None]
        for index, (logprob, likeliest) in enumerate(
            zip(logprobs, _combine_likeliest(top_ids, top_logprobs), strict=True), 1
        ):
            token = prompt.ids[index]
            entries = {str(token): self._describe(token, logprob, None)}
            for rank, (id, value) in enumerate(likeliest, 1):
                entries[str(id)] = self._describe(id, value, rank)
            rows.append(entries)
        return rows

    def _describe(self, id: int, logprob: float, rank: int | None) -> dict[str, Any]:
        """Return the entry of one id in `prompt_logprobs`."""
        text = decode_piece(self.pieces.get_bytes(id))
        return {"logprob": logprob, "rank": rank, "decoded_token": text}

    def _find_offsets(self, prompt: EncodedPrompt, text: str) -> list[int]:
        """Return the position of each token's text in `text`, in characters.

        A BOS token that is not part of the text has length 0. The same applies to a space that the
        tokenizer inserts before the first word and that is not part of the text.
        """
        pieces = [self.pieces.get_bytes(id) for id in prompt.ids]
        has_hidden_bos = (
            prompt.text is not None
            and prompt.ids[0] == self.tokenizer.bos_id
            and not text.startswith(str(self.tokenizer.hf.bos_token))
        )
        if has_hidden_bos:
            pieces[0] = b""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        sizes = [len(decoder.decode(piece)) for piece in pieces]
        # If there is one character too many, it is the inserted space.
        if sum(sizes) == len(text) + 1:
            for index, piece in enumerate(pieces):
                if piece.startswith(b" "):
                    sizes[index] -= 1
                    break
        offsets = np.cumsum([0, *sizes[:-1]])
        return np.minimum(offsets, len(text)).tolist()


def build_next_event(id: str, scores: RowScores, top: int, stop_ids: Sequence[int]) -> TokenEvent:
    """Return the event of the most likely next token, after a prompt followed by `NEXT`.

    `top` is the number of most likely alternatives in the event.
    """
    token = int(scores.top_ids[-1, 0])
    logprobs = scores.top_logprobs[-1].tolist()
    likeliest = tuple(zip(scores.top_ids[-1].tolist(), logprobs, strict=True))[:top]
    finish: Literal["stop", "length"] = "stop" if token in stop_ids else "length"
    return TokenEvent(id, 0, token, logprobs[0], 0, finish, (), likeliest)


def _read_scores(
    ids: Sequence[int], scores: RowScores, top: int
) -> tuple[list[float], npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Return the log-probs of `ids` [n] after the first, and the `top` most likely alternatives.

    The result is (log-probs [n - 1], ids [n - 1, top], log-probs [n - 1, top]). The network
    computes the log-probs of the tokens and of the alternatives separately, so they may differ in
    the last bit. Because clients compare them for equality, a token that is among the most likely
    ids gets the log-prob that it has there.
    """
    count = len(ids) - 1
    top_ids = scores.top_ids[:count]
    top_logprobs = np.maximum(scores.top_logprobs[:count], MIN_LOGPROB)
    values = np.maximum(scores.values[:count], MIN_LOGPROB)
    if top_ids.shape[1]:
        is_token = top_ids == np.asarray(ids[1:], np.int64)[:, None]
        column = is_token.argmax(axis=1)[:, None]
        token_logprobs = np.take_along_axis(top_logprobs, column, axis=1)[:, 0]
        values = np.where(is_token.any(axis=1), token_logprobs, values)
    return values.tolist(), top_ids[:, :top], top_logprobs[:, :top]


def _combine_likeliest(
    ids: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32]
) -> list[list[tuple[int, float]]]:
    """Return a list of pairs (id, log-prob) for each row of `ids` and `logprobs`, both [n, K]."""
    return [
        list(zip(row, values, strict=True))
        for row, values in zip(ids.tolist(), logprobs.tolist(), strict=True)
    ]
