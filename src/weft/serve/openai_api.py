"""OpenAI-compatible endpoints of a policy: `/v1/chat/completions` and `/v1/completions`.

Both can return a complete answer or stream it.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.data.messages import normalize_messages
from weft.data.token_bytes import TokenBytes
from weft.data.tokenizer import StreamDecoder, Tokenizer
from weft.data.tokenizer_checks import TimeLimitExceeded, limit_time
from weft.engine.base import TokenEvent
from weft.errors import UserError
from weft.serve.background import BackgroundWork
from weft.serve.exchange import HttpExchange, RequestRefused, ServerLimits, ServerMetrics
from weft.serve.openai_fields import CompletionSettings, read_settings
from weft.serve.served_model import ServedModel
from weft.serve.worker import CompletionJob

MOST_PROMPTS = 128
# Time limit for rendering a conversation; freeing a larger result would block for too long.
TEMPLATE_SECONDS = 2.0
PAUSE = 16  # tokens handled per request before yielding to the event loop


@dataclass(frozen=True)
class CompletionEndpoints:
    """OpenAI-compatible endpoints for chat and text completions by one policy."""

    policy: ServedModel
    metrics: ServerMetrics
    limits: ServerLimits
    background: BackgroundWork

    async def answer_request(
        self, exchange: HttpExchange, body: Mapping[str, Any], *, chat: bool
    ) -> None:
        """Answer a completion request.

        `chat` is true for `/v1/chat/completions`. Raises `RequestRefused` if the request is invalid
        or the policy is overloaded.
        """
        settings = read_settings(body, self.limits.most_new, self._stop_ids, chat=chat)
        if chat:
            prompts = [await self.background.run(self._encode_chat, body.get("messages"))]
        else:
            prompts = await self.background.run(self._encode_prompts, body.get("prompt"))
        limits = [self.compute_limit(prompt, settings) for prompt in prompts]
        if self.policy.worker.load + settings.count * len(prompts) > self.limits.most_load:
            raise RequestRefused(
                429, "the server is at its load limit; try again later", code="overloaded"
            )
        form = OpenAIResponseForm.make_new(self.policy.name, chat)
        run = CompletionRun(self, settings, prompts, limits, form)
        if settings.stream:
            await exchange.await_unless_disconnected(run.stream(exchange))
        else:
            await exchange.reply(200, await exchange.await_unless_disconnected(run.complete()))

    @property
    def _stop_ids(self) -> Sequence[int]:
        return self.policy.spec.stop_ids if self.policy.spec is not None else ()

    def _encode_chat(self, messages: Any) -> list[int]:
        """Return the token ids of a conversation, rendered with the model's chat template.

        Raises `RequestRefused` for invalid messages, and for a policy without a chat template.
        """
        tokenizer = self.background.get_tokenizer(self.policy.tokenizer)
        if messages is None:
            raise RequestRefused(400, "messages is missing", param="messages")
        if tokenizer.chat_template is None:
            raise RequestRefused(
                400, "this model has no chat template; use /v1/completions", code="no_chat_template"
            )
        self._check_bytes(count_bytes(messages), "messages")
        began = time.monotonic()
        try:
            tokenizer.check_template()
            with limit_time(TEMPLATE_SECONDS):
                text = tokenizer.render(normalize_messages(messages), add_generation_prompt=True)
            self._check_bytes(count_bytes(text), "messages")  # a template may repeat them
            return self.background.encode(self.policy.tokenizer, text, tokenizer.chat_bos)
        except (UserError, TimeLimitExceeded) as error:
            late = time.monotonic() - began > TEMPLATE_SECONDS
            if late:
                message = (
                    f"the chat template takes longer than {TEMPLATE_SECONDS:g} s on these messages"
                )
            else:
                message = str(error)
            raise RequestRefused(400, message, param="messages") from None

    def _encode_prompts(self, prompt: Any) -> list[list[int]]:
        """Return the token ids of each prompt in the request's field `prompt`.

        A prompt is a string, or token ids (see `is_ids`). The field can have a single prompt or a
        list of prompts. The prompts in a list must be all strings or all token ids. Raises
        `RequestRefused` for any other value.
        """
        self._check_bytes(count_bytes(prompt), "prompt")
        if isinstance(prompt, str) or is_ids(prompt):
            return [self._encode_prompt(prompt)]
        if isinstance(prompt, list) and prompt and len(prompt) <= MOST_PROMPTS:
            texts = all(isinstance(each, str) for each in prompt)
            if texts or all(is_ids(each) for each in prompt):
                return [self._encode_prompt(each) for each in prompt]
        raise RequestRefused(
            400,
            f"prompt must be a string, token ids, or a list of up to {MOST_PROMPTS} of either",
            param="prompt",
        )

    def _encode_prompt(self, prompt: Any) -> list[int]:
        """Return the token ids of a prompt, which is a string or a sequence of token ids."""
        if isinstance(prompt, str):
            return self.background.encode(self.policy.tokenizer, prompt)
        self._check_length(len(prompt))
        return [int(id) for id in prompt]

    def _check_bytes(self, size: int, param: str) -> None:
        if size > (most := self.limits.prompt_bytes):
            message = f"the request's text has {size} bytes; the limit is {most}, the server's --max-prompt-kb"
            raise RequestRefused(400, message, param=param, code="context_length_exceeded")

    def _check_length(self, length: int) -> None:
        if length > self.limits.most_prompt:
            message = f"the prompt has {length} tokens; the limit is {self.limits.most_prompt}"
            raise RequestRefused(400, message, code="context_length_exceeded")

    def compute_limit(self, prompt: Sequence[int], settings: CompletionSettings) -> int:
        """Return the maximum number of completion tokens for a prompt, given as token ids.

        Raises `RequestRefused` if the prompt is invalid or leaves too little room in the context.
        """
        # Check the length first: checking every id blocks the event loop.
        self._check_length(len(prompt))
        if not prompt or min(prompt) < 0 or max(prompt) >= self.policy.vocab_size:
            message = f"the prompt must not be empty, and token ids must be 0 to {self.policy.vocab_size - 1}"
            raise RequestRefused(400, message, param="prompt")
        context = self.policy.context
        room = settings.max_new_tokens if context is None else context - len(prompt)
        if room < 1 or (room < settings.max_new_tokens and not settings.may_be_fewer):
            message = f"{len(prompt)} prompt tokens and {settings.max_new_tokens} new tokens exceed the context of {context}"
            raise RequestRefused(400, message, code="context_length_exceeded")
        return min(room, settings.max_new_tokens)


def is_ids(value: Any) -> bool:
    """Return whether `value` is a non-empty list of integers, or an integer array.

    These are the forms in which a request gives token ids. In large requests, long lists of token
    ids have been converted to arrays.
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
        self, index: int, text: str, finish: str | None, tokens: Sequence[EmittedToken] | None
    ) -> dict[str, Any]:
        """Return one item of `choices` in a complete answer.

        `finish` is the finish reason. `tokens` are the tokens whose log-probs are included, or None
        to include no log-probs.
        """
        rest = {"finish_reason": finish, "logprobs": self._build_logprobs(tokens)}
        if self.chat:
            return {"index": index, "message": {"role": "assistant", "content": text}, **rest}
        return {"index": index, "text": text, **rest}

    def build_chunk(
        self,
        index: int,
        delta: Mapping[str, str],
        finish: str | None,
        tokens: Sequence[EmittedToken] | None,
    ) -> dict[str, Any]:
        """Return one chunk of a streamed answer, with one item in `choices`.

        `delta` has the new fields of the message. `finish` and `tokens` are as in `build_choice`.
        """
        rest = {"finish_reason": finish, "logprobs": self._build_logprobs(tokens)}
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
            "tokens": [_decode_piece(s.piece) for s in tokens],
            "token_logprobs": [s.logprob for s in tokens],
            "top_logprobs": [_map_texts(s) for s in tokens] if any(s.top for s in tokens) else None,
            "text_offset": [s.offset for s in tokens],
        }


def _build_token(piece: bytes, logprob: float) -> dict[str, Any]:
    return {"token": _decode_piece(piece), "logprob": logprob, "bytes": list(piece)}


def _decode_piece(piece: bytes) -> str:
    """Return a token's bytes decoded as UTF-8.

    Incomplete characters are replaced by U+FFFD; the response field `bytes` has the exact bytes.
    """
    return piece.decode(errors="replace")


def _map_texts(token: EmittedToken) -> dict[str, float]:
    """Return the log-probs of the likeliest tokens and of the sampled token, keyed by their text.

    If several tokens have the same text, the first log-prob is kept, which is that of the
    likeliest.
    """
    logprobs: dict[str, float] = {}
    for piece, logprob in (*token.top, (token.piece, token.logprob)):
        logprobs.setdefault(_decode_piece(piece), logprob)
    return logprobs


@dataclass(frozen=True)
class CompletionRun:
    """Completion request that is being answered.

    The answer has n completions of each prompt. Completion k of prompt p is the choice with index
    `p * n + k` in the answer.
    """

    endpoints: CompletionEndpoints
    settings: CompletionSettings
    prompts: Sequence[Sequence[int]]
    limits: Sequence[int]  # maximum completion tokens of each prompt
    form: OpenAIResponseForm

    async def complete(self) -> bytes:
        """Generate all completions and return the answer as JSON."""
        texts = self._build_texts()
        async with aclosing(self._generate_events()) as events:
            async for index, event in events:
                texts[index].feed(event)
        return await self.endpoints.background.run(self._encode_answer, texts)

    def _encode_answer(self, texts: Sequence[GrowingText]) -> bytes:
        """Return the complete answer, encoded as JSON.

        The choices are encoded one at a time, so that other threads can run in between.
        """
        wanted = self.settings.logprobs is not None
        choices = (
            json.dumps(
                self.form.build_choice(
                    index, text.final_text, text.finish, text.take() if wanted else None
                )
            )
            for index, text in enumerate(texts)
        )
        rest = json.dumps({**self.form.build_head(chunk=False), "usage": self._count_usage(texts)})
        return f'{rest[:-1]}, "choices": [{", ".join(choices)}]}}'.encode()

    async def stream(self, exchange: HttpExchange) -> None:
        """Generate all completions and send the answer as server-sent events."""
        texts = self._build_texts()
        async with aclosing(self._generate_events()) as events:
            if self.form.chat:
                for index in range(len(texts)):
                    first = {"role": "assistant", "content": ""}
                    await self._send_event(
                        exchange, self.form.build_chunk(index, first, None, None)
                    )
            async for index, event in events:
                new = texts[index].feed(event)
                tokens = texts[index].take()
                if new or tokens:
                    shown_tokens = tokens if self.settings.logprobs is not None else None
                    await self._send_event(
                        exchange, self.form.build_chunk(index, {"content": new}, None, shown_tokens)
                    )
                if event.finish is not None:
                    await self._send_event(
                        exchange, self.form.build_chunk(index, {}, event.finish, None)
                    )
        if self.settings.usage_at_end:
            await self._send_event(
                exchange,
                {
                    **self.form.build_head(chunk=True),
                    "choices": [],
                    "usage": self._count_usage(texts),
                },
            )
        await exchange.send_event("[DONE]")
        await exchange.end()

    async def _send_event(self, exchange: HttpExchange, value: Mapping[str, Any]) -> None:
        await exchange.send_event(json.dumps(value))

    async def _generate_events(self) -> AsyncGenerator[tuple[int, TokenEvent], None]:
        """Yield an event for each sampled token, with the index of the token's choice.

        Closing the generator cancels unfinished completions.
        """
        queue: asyncio.Queue[TokenEvent | Exception] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        worker = self.endpoints.policy.worker
        n = self.settings.count

        def tell(event: TokenEvent | Exception) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, event)

        jobs = [self._build_job(index, tell) for index in range(len(self.prompts))]
        left = {job.id: n for job in jobs}
        places = {job.id: index for index, job in enumerate(jobs)}
        for job in jobs:
            worker.generate(job)
        num_tokens = 0
        try:
            while any(left.values()):
                event = await queue.get()
                if isinstance(event, Exception):
                    raise event
                num_tokens += 1
                if num_tokens % PAUSE == 0:
                    await asyncio.sleep(0)  # `queue.get` does not yield while the queue has items
                left[event.id] -= event.finish is not None
                yield places[event.id] * n + event.k, event
        finally:
            self.endpoints.metrics.count_tokens(sum(map(len, self.prompts)), num_tokens)
            for id, count in left.items():
                if count:
                    worker.cancel(id)

    def _build_job(
        self, index: int, tell: Callable[[TokenEvent | Exception], None]
    ) -> CompletionJob:
        settings = self.settings
        named = None if settings.seed is None else f"seed {settings.seed}"
        id = f"{self.form.id}-{index}"
        prompt = self.prompts[index]
        return CompletionJob(
            id, prompt, settings.count, self.limits[index], settings.sampling, tell, named
        )

    def _build_texts(self) -> list[GrowingText]:
        tokenizer = self.endpoints.policy.tokenizer
        pieces = self.endpoints.policy.pieces
        result: list[GrowingText] = []
        for prompt in self.prompts:
            for _ in range(self.settings.count):
                result.append(
                    GrowingText(
                        tokenizer, [] if self.form.chat else prompt, self.settings.stops, pieces
                    )
                )
        return result

    def _count_usage(self, texts: Sequence[GrowingText]) -> dict[str, int]:
        prompt = sum(map(len, self.prompts))
        completion = sum(text.count for text in texts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }


CONTEXT = 4  # last prompt tokens, on which the text of the first new tokens may depend


@dataclass(frozen=True)
class EmittedToken:
    """A token whose text has been emitted, because later tokens cannot change it.

    `piece` has the token's bytes. `offset` is the position of the token's text in the completion,
    in characters. `top` has the bytes and the log-prob of each of the likeliest tokens at the same
    position.
    """

    piece: bytes
    logprob: float
    offset: int
    top: tuple[tuple[bytes, float], ...] = ()


class GrowingText:
    """Incremental decoder of one completion.

    `feed` adds a token and returns the new text that later tokens cannot change; `take` returns the
    tokens of that text. Text that may be the start of a stop string is held back. End tokens and
    the tokens of the stop string are left out.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stops: Sequence[str] = (),
        pieces: TokenBytes | None = None,
    ) -> None:
        self._pieces = pieces or TokenBytes(tokenizer)
        self._stops = [stop for stop in stops if stop]
        self._decoder = StreamDecoder(tokenizer)
        self._decoder.feed(list(prompt)[-CONTEXT:])
        self._text = ""
        self._num_emitted = 0
        self._pending_tokens: list[EmittedToken] = []
        self._emitted_tokens: list[EmittedToken] = []
        self.count = 0  # tokens fed
        self.finish: str | None = None

    @property
    def final_text(self) -> str:
        return self._text[: self._num_emitted]

    def feed(self, event: TokenEvent) -> str:
        """Add a token, and return the new text that later tokens cannot change."""
        self.count += 1
        top = tuple((self._pieces.get_bytes(id), logprob) for id, logprob in event.top)
        self._pending_tokens.append(
            EmittedToken(self._pieces.get_bytes(event.token), event.logprob, len(self._text), top)
        )
        self._text += self._decoder.feed([event.token])
        self.finish = event.finish
        if self.finish is not None:
            self._text += self._decoder.flush()
        until = self._count_final()
        new = self._text[self._num_emitted : until]
        self._num_emitted = until
        for token in self._pending_tokens:
            if token.offset < until:
                self._emitted_tokens.append(token)
        self._pending_tokens = [token for token in self._pending_tokens if token.offset >= until]
        return new

    def take(self) -> list[EmittedToken]:
        """Return the tokens whose text has been emitted since the last call."""
        taken = self._emitted_tokens
        self._emitted_tokens = []
        return taken

    def _count_final(self) -> int:
        """Return the number of leading characters that later tokens cannot change.

        A stop string, the text that follows it, and text that may be the start of a stop string are
        not counted.
        """
        stop_positions = [
            at
            for stop in self._stops
            if (at := self._text.find(stop, max(0, self._num_emitted - len(stop) + 1))) >= 0
        ]
        if stop_positions:
            return max(self._num_emitted, min(stop_positions))
        if self.finish is not None:
            return len(self._text)
        held = [self._match_stop_start(stop) for stop in self._stops]
        return max(self._num_emitted, len(self._text) - max(held, default=0))

    def _match_stop_start(self, stop: str) -> int:
        """Return the length of the longest proper prefix of `stop` with which the text ends."""
        return next(
            (
                n
                for n in range(min(len(stop) - 1, len(self._text)), 0, -1)
                if self._text.endswith(stop[:n])
            ),
            0,
        )
