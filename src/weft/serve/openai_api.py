"""OpenAI endpoints of a policy: `/v1/chat/completions` and `/v1/completions`.

Both answer in one piece or as a stream.
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

from weft.data.messages import normalise
from weft.data.template_check import TookTooLong, within
from weft.engine.base import TokenEvent
from weft.errors import UserError
from weft.serve.asgi import Exchange, Refused
from weft.serve.background import BackgroundWork
from weft.serve.limits import Limits
from weft.serve.metrics import Metrics
from weft.serve.openai_fields import Asked, read_asked
from weft.serve.served import Served
from weft.serve.text import GrowingText, Said
from weft.serve.worker import Job

MOST_PROMPTS = 128
# Time limit for rendering a conversation; freeing a larger result would block for too long.
TEMPLATE_SECONDS = 2.0
PAUSE = 16  # tokens handled per request before yielding to the event loop


@dataclass(frozen=True)
class Completions:
    """Both completion endpoints of one policy."""

    policy: Served
    metrics: Metrics
    limits: Limits
    background: BackgroundWork

    async def answer(self, exchange: Exchange, body: Mapping[str, Any], *, chat: bool) -> None:
        """Answer a request. Raises `Refused` if it is invalid or the policy is overloaded."""
        asked = read_asked(body, self.limits.most_new, self._stop_ids, chat=chat)
        if chat:
            prompts = [await self.background.run(self._chat_prompt, body.get("messages"))]
        else:
            prompts = await self.background.run(self._prompts, body.get("prompt"))
        limits = [self.limit(prompt, asked) for prompt in prompts]
        if self.policy.worker.load + asked.count * len(prompts) > self.limits.most_load:
            raise Refused(
                429, "the server is at its load limit; try again later", code="overloaded"
            )
        form = Form.of(self.policy.name, chat)
        run = Run(self, asked, prompts, limits, form)
        if asked.stream:
            await exchange.unless_gone(run.stream(exchange))
        else:
            await exchange.reply(200, await exchange.unless_gone(run.whole()))

    @property
    def _stop_ids(self) -> Sequence[int]:
        return self.policy.spec.stop_ids if self.policy.spec is not None else ()

    def _chat_prompt(self, messages: Any) -> list[int]:
        """Return the token ids of a conversation, rendered with the chat template."""
        tokenizer = self.background.tokenizer(self.policy.tokenizer)
        if messages is None:
            raise Refused(400, "messages is missing", param="messages")
        if tokenizer.chat_template is None:
            raise Refused(
                400, "this model has no chat template; use /v1/completions", code="no_chat_template"
            )
        self._check_bytes(num_bytes(messages), "messages")
        began = time.monotonic()
        try:
            tokenizer.check_template()
            with within(TEMPLATE_SECONDS):
                text = tokenizer.render(normalise(messages), add_generation_prompt=True)
            self._check_bytes(num_bytes(text), "messages")  # a template may repeat them
            return self.background.encode(self.policy.tokenizer, text, tokenizer.chat_bos)
        except (UserError, TookTooLong) as error:
            late = time.monotonic() - began > TEMPLATE_SECONDS
            if late:
                said = (
                    f"the chat template takes longer than {TEMPLATE_SECONDS:g} s on these messages"
                )
            else:
                said = str(error)
            raise Refused(400, said, param="messages") from None

    def _prompts(self, prompt: Any) -> list[list[int]]:
        """Return the prompts as token ids.

        `prompt` is a text, a list or array of token ids, or a list of either.
        """
        self._check_bytes(num_bytes(prompt), "prompt")
        if isinstance(prompt, str) or is_ids(prompt):
            return [self._prompt(prompt)]
        if isinstance(prompt, list) and prompt and len(prompt) <= MOST_PROMPTS:
            texts = all(isinstance(each, str) for each in prompt)
            if texts or all(is_ids(each) for each in prompt):
                return [self._prompt(each) for each in prompt]
        raise Refused(
            400,
            f"prompt must be a string, token ids, or a list of up to {MOST_PROMPTS} of either",
            param="prompt",
        )

    def _prompt(self, prompt: Any) -> list[int]:
        """Return the token ids of a text; token ids are returned as they are."""
        if isinstance(prompt, str):
            return self.background.encode(self.policy.tokenizer, prompt)
        self._check_length(len(prompt))
        return [int(id) for id in prompt]

    def _check_bytes(self, size: int, param: str) -> None:
        if size > (most := self.limits.prompt_bytes):
            said = f"the request's text has {size} bytes; the limit is {most}, the server's --max-prompt-kb"
            raise Refused(400, said, param=param, code="context_length_exceeded")

    def _check_length(self, length: int) -> None:
        if length > self.limits.most_prompt:
            said = f"the prompt has {length} tokens; the limit is {self.limits.most_prompt}"
            raise Refused(400, said, code="context_length_exceeded")

    def limit(self, prompt: Sequence[int], asked: Asked) -> int:
        """Return the maximum number of completion tokens for a prompt.

        Raises `Refused` if the prompt is invalid or leaves no room in the context.
        """
        # Check the length first: checking every id blocks the event loop.
        self._check_length(len(prompt))
        if not prompt or min(prompt) < 0 or max(prompt) >= self.policy.known:
            said = (
                f"the prompt must not be empty, and token ids must be 0 to {self.policy.known - 1}"
            )
            raise Refused(400, said, param="prompt")
        context = self.policy.context
        room = asked.max_new_tokens if context is None else context - len(prompt)
        if room < 1 or (room < asked.max_new_tokens and not asked.may_be_fewer):
            said = f"{len(prompt)} prompt tokens and {asked.max_new_tokens} new tokens exceed the context of {context}"
            raise Refused(400, said, code="context_length_exceeded")
        return min(room, asked.max_new_tokens)


def is_ids(value: Any) -> bool:
    """Return whether `value` is a list of token ids, or an array of them from a large request."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind == "i"
    return isinstance(value, list) and bool(value) and all(type(id) is int for id in value)


def num_bytes(value: Any) -> int:
    """Return the total size in bytes of all texts in a JSON value."""
    if isinstance(value, str):
        return len(value.encode(errors="surrogatepass"))
    if isinstance(value, Mapping):
        parts: Iterable[Any] = value.values()
    elif isinstance(value, list):
        parts = value
    else:
        parts = ()
    return sum(map(num_bytes, parts))


@dataclass(frozen=True)
class Form:
    """Response objects of one request, in the form of its endpoint."""

    id: str
    created: int
    model: str
    chat: bool

    @classmethod
    def of(cls, model: str, chat: bool) -> Form:
        """Return the form of a new request, with a new id and the current time."""
        return cls(
            f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}", int(time.time()), model, chat
        )

    def head(self, *, chunk: bool) -> dict[str, Any]:
        """Return the fields that every response object begins with."""
        kind = ("chat.completion" if self.chat else "text_completion") + (
            ".chunk" if chunk and self.chat else ""
        )
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def choice(
        self, index: int, text: str, finish: str | None, said: Sequence[Said] | None
    ) -> dict[str, Any]:
        """Return one entry of `choices` of a complete answer."""
        rest = {"finish_reason": finish, "logprobs": self._logprobs(said)}
        if self.chat:
            return {"index": index, "message": {"role": "assistant", "content": text}, **rest}
        return {"index": index, "text": text, **rest}

    def delta(
        self, index: int, delta: Mapping[str, str], finish: str | None, said: Sequence[Said] | None
    ) -> dict[str, Any]:
        """Return one chunk of a streamed answer."""
        rest = {"finish_reason": finish, "logprobs": self._logprobs(said)}
        if self.chat:
            own: dict[str, Any] = {"delta": dict(delta)}
        else:
            own = {"text": delta.get("content", "")}
        return {**self.head(chunk=True), "choices": [{"index": index, **own, **rest}]}

    def _logprobs(self, said: Sequence[Said] | None) -> dict[str, Any] | None:
        if said is None:
            return None
        if self.chat:
            content = [
                {**_token(s.piece, s.logprob), "top_logprobs": [_token(*other) for other in s.top]}
                for s in said
            ]
            return {"content": content, "refusal": None}
        return {
            "tokens": [_text(s.piece) for s in said],
            "token_logprobs": [s.logprob for s in said],
            "top_logprobs": [_by_text(s) for s in said] if any(s.top for s in said) else None,
            "text_offset": [s.offset for s in said],
        }


def _token(piece: bytes, logprob: float) -> dict[str, Any]:
    return {"token": _text(piece), "logprob": logprob, "bytes": list(piece)}


def _text(piece: bytes) -> str:
    """Return a token's text.

    A token that ends within a character contains U+FFFD; its exact bytes are in `bytes`.
    """
    return piece.decode(errors="replace")


def _by_text(said: Said) -> dict[str, float]:
    """Return text -> log-prob of the likeliest tokens and the sampled one.

    Of tokens with equal texts the likeliest counts.
    """
    found: dict[str, float] = {}
    for piece, logprob in (*said.top, (said.piece, said.logprob)):
        found.setdefault(_text(piece), logprob)
    return found


@dataclass(frozen=True)
class Run:
    """One running request. Choice `p * n + k` is completion k of prompt p."""

    of: Completions
    asked: Asked
    prompts: Sequence[Sequence[int]]
    limits: Sequence[int]  # maximum completion tokens of each prompt
    form: Form

    async def whole(self) -> bytes:
        """Return the complete answer as JSON."""
        texts = self._texts()
        async with aclosing(self._events()) as events:
            async for index, event in events:
                texts[index].feed(event)
        return await self.of.background.run(self._written, texts)

    def _written(self, texts: Sequence[GrowingText]) -> bytes:
        """Encode the complete answer.

        Choices are encoded one at a time, so that other threads can run in between.
        """
        wanted = self.asked.logprobs is not None
        choices = (
            json.dumps(
                self.form.choice(index, text.text, text.finish, text.take() if wanted else None)
            )
            for index, text in enumerate(texts)
        )
        rest = json.dumps({**self.form.head(chunk=False), "usage": self._usage(texts)})
        return f'{rest[:-1]}, "choices": [{", ".join(choices)}]}}'.encode()

    async def stream(self, exchange: Exchange) -> None:
        """Send the answer as server-sent events."""
        texts = self._texts()
        async with aclosing(self._events()) as events:
            if self.form.chat:
                for index in range(len(texts)):
                    first = {"role": "assistant", "content": ""}
                    await self._part(exchange, self.form.delta(index, first, None, None))
            async for index, event in events:
                new = texts[index].feed(event)
                said = texts[index].take()
                if new or said:
                    shown = said if self.asked.logprobs is not None else None
                    await self._part(
                        exchange, self.form.delta(index, {"content": new}, None, shown)
                    )
                if event.finish is not None:
                    await self._part(exchange, self.form.delta(index, {}, event.finish, None))
        if self.asked.usage_at_end:
            await self._part(
                exchange, {**self.form.head(chunk=True), "choices": [], "usage": self._usage(texts)}
            )
        await exchange.part("[DONE]")
        await exchange.end()

    async def _part(self, exchange: Exchange, value: Mapping[str, Any]) -> None:
        await exchange.part(json.dumps(value))

    async def _events(self) -> AsyncGenerator[tuple[int, TokenEvent], None]:
        """Iterate over (choice number, token event) as tokens are sampled.

        Closing the generator cancels unfinished completions.
        """
        queue: asyncio.Queue[TokenEvent | Exception] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        worker = self.of.policy.worker
        n = self.asked.count

        def tell(event: TokenEvent | Exception) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, event)

        jobs = [self._job(index, tell) for index in range(len(self.prompts))]
        left = {job.id: n for job in jobs}
        places = {job.id: index for index, job in enumerate(jobs)}
        for job in jobs:
            worker.generate(job)
        made = 0
        try:
            while any(left.values()):
                event = await queue.get()
                if isinstance(event, Exception):
                    raise event
                made += 1
                if made % PAUSE == 0:
                    await asyncio.sleep(0)  # `queue.get` does not yield while the queue has items
                left[event.id] -= event.finish is not None
                yield places[event.id] * n + event.k, event
        finally:
            self.of.metrics.tokens(sum(map(len, self.prompts)), made)
            for id, count in left.items():
                if count:
                    worker.cancel(id)

    def _job(self, index: int, tell: Callable[[TokenEvent | Exception], None]) -> Job:
        asked = self.asked
        named = None if asked.seed is None else f"seed {asked.seed}"
        id = f"{self.form.id}-{index}"
        prompt = self.prompts[index]
        return Job(id, prompt, asked.count, self.limits[index], asked.sampling, tell, named)

    def _texts(self) -> list[GrowingText]:
        tokenizer = self.of.policy.tokenizer
        pieces = self.of.policy.pieces
        return [
            GrowingText(tokenizer, [] if self.form.chat else prompt, self.asked.stops, pieces)
            for prompt in self.prompts
            for _ in range(self.asked.count)
        ]

    def _usage(self, texts: Sequence[GrowingText]) -> dict[str, int]:
        prompt = sum(map(len, self.prompts))
        made = sum(text.count for text in texts)
        return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
