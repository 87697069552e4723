"""JSON objects in the responses of the OpenAI-compatible endpoints."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.serve.growing_text import EmittedToken

PART = 256  # list entries that are encoded as JSON at once
NO_FIELDS: Mapping[str, Any] = {}


@dataclass(frozen=True)
class OpenAIResponseForm:
    """Builder of the JSON objects in the response to one request, in the endpoint's format."""

    id: str
    created: int
    model: str
    chat: bool

    @classmethod
    def make_new(cls, model: str, chat: bool) -> OpenAIResponseForm:
        """Return the builder for a new request, with a new response id and the current time."""
        return cls(
            f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}", int(time.time()), model, chat
        )

    def build_head(self, *, chunk: bool) -> dict[str, Any]:
        """Return the fields that all response objects have in common.

        `chunk` is true for the objects of a streamed answer.
        """
        kind = ("chat.completion" if self.chat else "text_completion") + (
            ".chunk" if chunk and self.chat else ""
        )
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def build_choice(
        self,
        index: int,
        text: str,
        finish: str | None,
        tokens: Sequence[EmittedToken] | None,
        more: Mapping[str, Any] = NO_FIELDS,
    ) -> dict[str, Any]:
        """Return one item of `choices` in a complete answer.

        `finish` is the finish reason. `tokens` are the tokens whose log-probs are included, or None
        to include no log-probs. `more` are further fields of the item.
        """
        rest = {"finish_reason": finish, "logprobs": self._build_logprobs(tokens), **more}
        if self.chat:
            return {"index": index, "message": {"role": "assistant", "content": text}, **rest}
        return {"index": index, "text": text, **rest}

    def build_chunk(
        self,
        index: int,
        delta: Mapping[str, str],
        finish: str | None,
        tokens: Sequence[EmittedToken] | None,
        more: Mapping[str, Any] = NO_FIELDS,
    ) -> dict[str, Any]:
        """Return one chunk of a streamed answer, with one item in `choices`.

        `delta` has the new fields of the message. `finish`, `tokens` and `more` are as in
        `build_choice`.
        """
        rest = {"finish_reason": finish, "logprobs": self._build_logprobs(tokens), **more}
        if self.chat:
            own: dict[str, Any] = {"delta": dict(delta)}
        else:
            own = {"text": delta.get("content", "")}
        return {**self.build_head(chunk=True), "choices": [{"index": index, **own, **rest}]}

    def _build_logprobs(self, tokens: Sequence[EmittedToken] | None) -> dict[str, Any] | None:
        if tokens is None:
            return None
        if self.chat:
            content = []
            for s in tokens:
                content.append(
                    {
                        **_build_token(s.piece, s.logprob),
                        "top_logprobs": [_build_token(*other) for other in s.top],
                    }
                )
            return {"content": content, "refusal": None}
        return {
            "tokens": [decode_piece(s.piece) for s in tokens],
            "token_logprobs": [s.logprob for s in tokens],
            "top_logprobs": [_map_texts(s) for s in tokens] if any(s.top for s in tokens) else None,
            "text_offset": [s.offset for s in tokens],
        }


def encode_json(value: Any) -> str:
    """Return `value` as JSON, encoded in parts, so that other threads can run in between.

    Objects are taken apart, and lists are cut into parts of `PART` entries.
    """
    if isinstance(value, dict):
        entries = (f"{json.dumps(key)}: {encode_json(each)}" for key, each in value.items())
        return f"{{{', '.join(entries)}}}"
    if isinstance(value, list) and len(value) > PART:
        parts = (value[start : start + PART] for start in range(0, len(value), PART))
        return f"[{', '.join(json.dumps(part)[1:-1] for part in parts)}]"
    return json.dumps(value)


def _build_token(piece: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": decode_piece(piece), "logprob": logprob, "bytes": list(piece)}


def decode_piece(piece: bytes) -> str:
    """Return a token's bytes decoded as UTF-8.

    Incomplete characters are replaced by U+FFFD; the response field `bytes` has the exact bytes.
    """
    return piece.decode(errors="replace")


def _map_texts(token: EmittedToken) -> dict[str, float] | None:
    """Return the log-probs of the likeliest tokens and of the token itself, keyed by their text.

    Returns None for the first token of a prompt, which has no log-prob. If several tokens have the
    same text, the first log-prob is kept, which is that of the likeliest.
    """
    if token.logprob is None:
        return None
    logprobs: dict[str, float] = {}
    for piece, logprob in (*token.top, (token.piece, token.logprob)):
        logprobs.setdefault(decode_piece(piece), logprob)
    return logprobs
