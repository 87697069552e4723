"""Conversion of prompts in requests (text, conversations or token ids) to checked token ids."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.data.messages import normalize_messages
from weft.data.tokenizer_checks import TimeLimitExceeded, limit_time
from weft.errors import UserError
from weft.serve.background import BackgroundWork
from weft.serve.exchange import RequestRefused, ServerLimits
from weft.serve.served_model import ServedModel

MAX_PROMPTS = 128
# Time limit for rendering a conversation. Even freeing a larger result would block for too long.
TEMPLATE_SECONDS = 2.0


@dataclass(frozen=True)
class EncodedPrompt:
    """Token ids of a prompt, and the prompt's text in the request.

    `text` is None if the request has token ids or a conversation instead.
    """

    ids: Sequence[int]
    text: str | None = None


@dataclass(frozen=True)
class PromptReader:
    """Conversion of the prompts in requests to a model's token ids, within the server's limits.

    The methods are slow for long texts, so they must be called in a worker thread.
    """

    model: ServedModel
    limits: ServerLimits
    background: BackgroundWork

    def encode_chat(
        self, messages: Any, *, add_generation_prompt: bool = True, bos: bool | None = None
    ) -> list[int]:
        """Return the token ids of a conversation, rendered with the model's chat template.

        `bos` decides whether the ids begin with the BOS token; None leaves this to the template and
        the tokenizer's options. Raises `RequestRefused` for invalid messages, and for a model
        without a chat template.
        """
        tokenizer = self.background.get_tokenizer(self.model.tokenizer)
        if messages is None:
            raise RequestRefused(400, "messages is missing", param="messages")
        if tokenizer.chat_template is None:
            raise RequestRefused(
                400, "this model has no chat template; use /v1/completions", code="no_chat_template"
            )
        self.check_bytes(count_bytes(messages), "messages")
        start = time.monotonic()
        try:
            tokenizer.check_template()
            with limit_time(TEMPLATE_SECONDS):
                text = tokenizer.render(
                    normalize_messages(messages), add_generation_prompt=add_generation_prompt
                )
            self.check_bytes(count_bytes(text), "messages")  # a template may repeat messages
            bos = tokenizer.chat_bos if bos is None else bos
            return self.background.encode(self.model.tokenizer, text, bos)
        except (UserError, TimeLimitExceeded) as error:
            if time.monotonic() - start > TEMPLATE_SECONDS:
                message = (
                    f"the chat template takes longer than {TEMPLATE_SECONDS:g} s on these messages"
                )
            else:
                message = str(error)
            raise RequestRefused(400, message, param="messages") from None

    def encode_prompts(self, prompt: Any) -> list[EncodedPrompt]:
        """Return the prompts in a request's field `prompt`.

        The field contains a single prompt, or a list of up to `MAX_PROMPTS` prompts. A prompt is a
        string, or token ids (see `is_ids`). The prompts in a list must be all strings or all token
        ids. Raises `RequestRefused` for any other value.
        """
        self.check_bytes(count_bytes(prompt), "prompt")
        if isinstance(prompt, str) or is_ids(prompt):
            return [self._encode_prompt(prompt)]
        if isinstance(prompt, list) and prompt and len(prompt) <= MAX_PROMPTS:
            are_texts = all(isinstance(each, str) for each in prompt)
            if are_texts or all(is_ids(each) for each in prompt):
                return [self._encode_prompt(each) for each in prompt]
        raise RequestRefused(
            400,
            f"prompt must be a string, token ids, or a list of up to {MAX_PROMPTS} of either",
            param="prompt",
        )

    def _encode_prompt(self, prompt: Any) -> EncodedPrompt:
        if isinstance(prompt, str):
            return EncodedPrompt(self.background.encode(self.model.tokenizer, prompt), prompt)
        return EncodedPrompt(self.read_ids(prompt))

    def read_ids(self, ids: Any) -> list[int]:
        """Return the token ids of a list or array, after checking its length."""
        self.check_length(len(ids))
        return [int(id) for id in ids]

    def check_bytes(self, size: int, param: str) -> None:
        """Raise `RequestRefused` if the text of the field `param` has too many bytes."""
        limit = self.limits.prompt_bytes
        if size > limit:
            message = (
                f"the request's text has {size} bytes; the limit is {limit}, the server's "
                f"--max-prompt-kb"
            )
            raise RequestRefused(400, message, param=param, code="context_length_exceeded")

    def check_length(self, length: int) -> None:
        """Raise `RequestRefused` if a prompt has too many tokens."""
        if length > self.limits.max_prompt_tokens:
            message = (
                f"the prompt has {length} tokens; the limit is {self.limits.max_prompt_tokens}"
            )
            raise RequestRefused(400, message, code="context_length_exceeded")

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Raise `RequestRefused` unless there is at least one id, and all ids are valid."""
        self.check_length(len(ids))  # first, because checking all ids of a long list is slow
        if not ids or min(ids) < 0 or max(ids) >= self.model.vocab_size:
            message = (
                f"the {param} must not be empty, and token ids must be 0 to "
                f"{self.model.vocab_size - 1}"
            )
            raise RequestRefused(400, message, param=param)


def is_ids(value: Any) -> bool:
    """Return whether `value` is a non-empty list of integers, or an integer array.

    Token ids in a request have one of these types: in large requests, long lists of token ids have
    been converted to arrays.
    """
    if isinstance(value, np.ndarray):
        return value.dtype.kind == "i"
    return isinstance(value, list) and bool(value) and all(type(id) is int for id in value)


def count_bytes(value: Any) -> int:
    """Return the total size of all strings in a JSON value, in bytes of UTF-8."""
    if isinstance(value, str):
        return len(value.encode(errors="surrogatepass"))
    if isinstance(value, Mapping):
        parts: Iterable[Any] = value.values()
    elif isinstance(value, list):
        parts = value
    else:
        parts = ()
    return sum(map(count_bytes, parts))
