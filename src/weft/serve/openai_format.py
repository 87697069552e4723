"""JSON objects in the responses of the OpenAI-compatible endpoints."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.serve.growing_text import EmittedToken

CHUNK_SIZE = 256  # list entries that are encoded as JSON at a time
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
        prefix = "chatcmpl" if chat else "cmpl"
        return cls(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), model, chat)

    def build_head(self, *, chunk: bool) -> dict[str, Any]:
        """Return the fields that all response objects have in common.

        `chunk` is True for the objects of a streamed answer.
        """
        object_type = "chat.completion" if self.chat else "text_completion"
        if chunk and self.chat:
            object_type += ".chunk"
        return {"id": self.id, "object": object_type, "created": self.created, "model": self.model}

    def build_choice(
        self,
        index: int,
        text: str,
        finish: str | None,
        tokens: Sequence[EmittedToken] | None,
        fields: Mapping[str, Any] = NO_FIELDS,
    ) -> dict[str, Any]:
        """Return one item of `choices` in a complete answer.

        `finish` is the finish reason. `tokens` are the tokens whose log-probs are included, or None
        to include no log-probs. `fields` are further fields of the item.
        """
        shared = {"finish_reason": finish, "logprobs": self._build_logprobs(tokens), **fields}
        if self.chat:
            return {"index": index, "message": {"role": "assistant", "content": text}, **shared}
        return {"index": index, "text": text, **shared}

    def build_chunk(
        self,
        index: int,
        delta: Mapping[str, str],
        finish: str | None,
        tokens: Sequence[EmittedToken] | None,
        fields: Mapping[str, Any] = NO_FIELDS,
    ) -> dict[str, Any]:
        """Return one chunk of a streamed answer, with one item in `choices`.

        `delta` has the new fields of the message. `finish`, `tokens` and `fields` are as in
        `build_choice`.
        """
        shared = {"finish_reason": finish, "logprobs": self._build_logprobs(tokens), **fields}
        if self.chat:
            content: dict[str, Any] = {"delta": dict(delta)}
        else:
            content = {"text": delta.get("content", "")}
        return {**self.build_head(chunk=True), "choices": [{"index": index, **content, **shared}]}

    def _build_logprobs(self, tokens: Sequence[EmittedToken] | None) -> dict[str, Any] | None:
        """Return the field `logprobs` for the given tokens, or None if `tokens` is None."""
        if tokens is None:
            return None
        if self.chat:
            content = []
            for token in tokens:
                alternatives = [_build_token(*alternative) for alternative in token.top]
                entry = _build_token(token.piece, token.logprob)
                content.append({**entry, "top_logprobs": alternatives})
            return {"content": content, "refusal": None}
        top_logprobs = None
        if any(token.top for token in tokens):
            top_logprobs = [_map_texts(token) for token in tokens]
        return {
            "tokens": [decode_piece(token.piece) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": top_logprobs,
            "text_offset": [token.offset for token in tokens],
        }


def encode_json(value: Any) -> str:
    """Return `value` as JSON, encoded in parts, so that other threads can run in between.

    The values of objects are encoded one by one, and long lists in chunks of `CHUNK_SIZE` entries.
    """
    if isinstance(value, dict):
        entries = (f"{json.dumps(key)}: {encode_json(entry)}" for key, entry in value.items())
        return f"{{{', '.join(entries)}}}"
    if isinstance(value, list) and len(value) > CHUNK_SIZE:
        parts = (value[start : start + CHUNK_SIZE] for start in range(0, len(value), CHUNK_SIZE))
        return f"[{', '.join(json.dumps(part)[1:-1] for part in parts)}]"
    return json.dumps(value)


def _build_token(piece: bytes, logprob: float | None) -> dict[str, Any]:
    """Return the object that describes a token of a chat."""
    return {"token": decode_piece(piece), "logprob": logprob, "bytes": list(piece)}


def decode_piece(piece: bytes) -> str:
    """Return a token's bytes decoded as UTF-8.

    Incomplete characters are replaced by U+FFFD; the response field `bytes` has the exact bytes.
    """
    return piece.decode(errors="replace")


def _map_texts(token: EmittedToken) -> dict[str, float] | None:
    """Return the log-probs of the most likely tokens and of the token itself, keyed by their text.

    Returns None for the first token of a prompt, which has no log-prob. If several tokens have the
    same text, only the first log-prob is kept, which is the largest.
    """
    if token.logprob is None:
        return None
    logprobs: dict[str, float] = {}
    for piece, logprob in (*token.top, (token.piece, token.logprob)):
        logprobs.setdefault(decode_piece(piece), logprob)
    return logprobs
