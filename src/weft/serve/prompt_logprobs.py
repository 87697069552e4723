"""Log-probs of the tokens of a prompt, as answers to `echo` and `prompt_logprobs` show them.

They are the model's own: at temperature 1, over the whole vocabulary.
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

LEAST_LOGPROB = -9999.0  # in place of minus infinity, which JSON does not have
NEXT = 0  # id that stands after a prompt whose next token is read from the same pass


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

    `tokenizer` must be the calling thread's own copy.
    """

    tokenizer: Tokenizer
    pieces: TokenBytes

    def build_echo(self, prompt: EncodedPrompt, scores: RowScores | None, top: int) -> EchoedPrompt:
        """Return the prompt's text, and its tokens if there are `scores`.

        A prompt given as ids is decoded, with its special tokens. Each token has its `top` most
        likely alternatives. The first token has no log-prob, since no token precedes it.
        """
        text = self.tokenizer.decode(prompt.ids) if prompt.text is None else prompt.text
        if scores is None:
            return EchoedPrompt(text, [])
        logprobs, ids, best = _read_scores(prompt.ids, scores, top)
        offsets = self._find_offsets(prompt, text)
        tokens = [EmittedToken(self.pieces.get_bytes(prompt.ids[0]), None, offsets[0])]
        for index, (logprob, likely) in enumerate(
            zip(logprobs, _combine_likeliest(ids, best), strict=True), 1
        ):
            piece = self.pieces.get_bytes(prompt.ids[index])
            others = tuple((self.pieces.get_bytes(id), value) for id, value in likely)
            tokens.append(EmittedToken(piece, logprob, offsets[index], others))
        return EchoedPrompt(text, tokens)

    def build_prompt_logprobs(
        self, prompt: EncodedPrompt, scores: RowScores, top: int
    ) -> list[dict[str, Any] | None]:
        """Return vLLM's `prompt_logprobs`: for each token, log-probs by id, and null for the first.

        The entries of a token are its own log-prob and those of the `top` most likely ids. `rank`
        is the id's place in the order of the log-probs, or null for a token outside of the top.
        """
        logprobs, ids, best = _read_scores(prompt.ids, scores, top)
        rows: list[dict[str, Any] | None] = [None]
        for index, (logprob, likely) in enumerate(
            zip(logprobs, _combine_likeliest(ids, best), strict=True), 1
        ):
            own = prompt.ids[index]
            entries = {str(own): self._describe(own, logprob, None)}
            for rank, (id, value) in enumerate(likely, 1):
                entries[str(id)] = self._describe(id, value, rank)
            rows.append(entries)
        return rows

    def _describe(self, id: int, logprob: float, rank: int | None) -> dict[str, Any]:
        text = decode_piece(self.pieces.get_bytes(id))
        return {"logprob": logprob, "rank": rank, "decoded_token": text}

    def _find_offsets(self, prompt: EncodedPrompt, text: str) -> list[int]:
        """Return the position of each token's text in `text`, in characters.

        The token for the beginning of a sequence takes no room if it is not part of the text. A
        blank that the tokenizer puts before the first word, and that decoding drops, does neither.
        """
        reader = codecs.getincrementaldecoder("utf-8")("replace")
        hidden = prompt.text is not None and prompt.ids[0] == self.tokenizer.bos_id
        hidden = hidden and not text.startswith(str(self.tokenizer.hf.bos_token))
        pieces = [self.pieces.get_bytes(id) for id in prompt.ids]
        if hidden:
            pieces[0] = b""
        sizes = [len(reader.decode(piece)) for piece in pieces]
        if sum(sizes) == len(text) + 1:
            blank = next((at for at, piece in enumerate(pieces) if piece.startswith(b" ")), None)
            if blank is not None:
                sizes[blank] -= 1
        offsets = np.cumsum([0, *sizes[:-1]])
        return np.minimum(offsets, len(text)).tolist()


def build_next_event(id: str, scores: RowScores, top: int, stop_ids: Sequence[int]) -> TokenEvent:
    """Return the event of the most likely next token, after a prompt followed by `NEXT`.

    `top` is the number of likely alternatives in the event.
    """
    token = int(scores.top_ids[-1, 0])
    logprobs = scores.top_logprobs[-1].tolist()
    likely = tuple(zip(scores.top_ids[-1].tolist(), logprobs, strict=True))[:top]
    finish: Literal["stop", "length"] = "stop" if token in stop_ids else "length"
    return TokenEvent(id, 0, token, logprobs[0], 0, finish, (), likely)


def _read_scores(
    ids: Sequence[int], scores: RowScores, top: int
) -> tuple[list[float], npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Return the log-probs of `ids` after the first, and the ids and log-probs of the `top`.

    The network computes the two separately, so they may differ in the last bit. A token that is
    among the most likely gets the log-prob that it has there: clients compare them for equality.
    """
    count = len(ids) - 1
    top_ids, best = scores.top_ids[:count], np.maximum(scores.top_logprobs[:count], LEAST_LOGPROB)
    values = np.maximum(scores.values[:count], LEAST_LOGPROB)
    if top_ids.shape[1]:
        same = top_ids == np.asarray(ids[1:], np.int64)[:, None]
        place = same.argmax(axis=1)[:, None]
        values = np.where(same.any(axis=1), np.take_along_axis(best, place, axis=1)[:, 0], values)
    return values.tolist(), top_ids[:, :top], best[:, :top]


def _combine_likeliest(
    ids: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32]
) -> list[list[tuple[int, float]]]:
    """Return (id, log-prob) of the most likely ids of each row."""
    return [
        list(zip(row, values, strict=True))
        for row, values in zip(ids.tolist(), logprobs.tolist(), strict=True)
    ]
