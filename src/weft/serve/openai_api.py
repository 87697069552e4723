"""OpenAI-compatible endpoints of a policy: `/v1/chat/completions` and `/v1/completions`.

Both can return a complete answer or stream it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from weft.engine.base import TokenEvent
from weft.serve.background import BackgroundWork
from weft.serve.exchange import HttpExchange, RequestRefused, ServerLimits, ServerMetrics
from weft.serve.growing_text import EmittedToken, GrowingText
from weft.serve.openai_fields import CompletionSettings, read_settings
from weft.serve.openai_format import OpenAIResponseForm, encode_json
from weft.serve.prompt_logprobs import NEXT, EchoedPrompt, PromptDescriber, build_next_event
from weft.serve.prompts import EncodedPrompt, PromptReader
from weft.serve.served_model import ServedModel
from weft.serve.worker import CompletionJob, RowScores

PAUSE = 16  # tokens handled per request before yielding to the event loop
MOST_PROMPT_VALUES = 1 << 20  # tokens and log-probs of prompts that one answer may repeat


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
        prompts = await self.background.run(self._read_prompts, body, chat)
        limits = await self.background.run(self._check_prompts, prompts, settings)
        per_prompt = settings.scores_prompt + (settings.count if settings.max_new_tokens else 0)
        if self.policy.worker.load + per_prompt * len(prompts) > self.limits.most_load:
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

    @property
    def reader(self) -> PromptReader:
        return PromptReader(self.policy, self.limits, self.background)

    @property
    def describer(self) -> PromptDescriber:
        """Describer of prompts for the calling worker thread."""
        tokenizer = self.background.get_tokenizer(self.policy.tokenizer)
        return PromptDescriber(tokenizer, self.policy.pieces)

    def _read_prompts(self, body: Mapping[str, Any], chat: bool) -> list[EncodedPrompt]:
        if chat:
            return [EncodedPrompt(self.reader.encode_chat(body.get("messages")))]
        return self.reader.encode_prompts(body.get("prompt"))

    def _check_prompts(
        self, prompts: Sequence[EncodedPrompt], settings: CompletionSettings
    ) -> list[int]:
        """Return the maximum number of completion tokens for each prompt.

        Raises `RequestRefused` for a prompt that is invalid or too long, and if the answer would
        repeat too much of the prompts.
        """
        limits = [self.compute_limit(prompt.ids, settings) for prompt in prompts]
        values = settings.count_prompt_values(sum(len(prompt.ids) for prompt in prompts))
        if values > MOST_PROMPT_VALUES:
            raise RequestRefused(
                400,
                f"the answer would have {values} tokens and log-probs of prompts; the limit is "
                f"{MOST_PROMPT_VALUES}: send fewer prompts in a request, or lower n or logprobs",
                param="prompt",
            )
        return limits

    def compute_limit(self, prompt: Sequence[int], settings: CompletionSettings) -> int:
        """Return the maximum number of completion tokens for a prompt, given as token ids.

        Raises `RequestRefused` if the prompt is invalid or leaves too little room in the context.
        """
        self.reader.check_ids(prompt, "prompt")
        most = self.policy.worker.max_tokens
        if settings.scores_prompt and len(prompt) > most:
            message = (
                f"the prompt has {len(prompt)} tokens; log-probs of a prompt are computed for at "
                f"most {most}, the server's --max-tokens-per-pass"
            )
            raise RequestRefused(400, message, code="context_length_exceeded")
        context = self.policy.context
        room = settings.max_new_tokens if context is None else context - len(prompt)
        least = min(1, settings.max_new_tokens)
        if room < least or (room < settings.max_new_tokens and not settings.may_be_fewer):
            message = f"{len(prompt)} prompt tokens and {settings.max_new_tokens} new tokens exceed the context of {context}"
            raise RequestRefused(400, message, code="context_length_exceeded")
        return min(room, settings.max_new_tokens)


@dataclass(frozen=True)
class CompletionRun:
    """Completion request that is being answered.

    The answer has n completions of each prompt. Completion k of prompt p is the choice with index
    `p * n + k` in the answer.
    """

    endpoints: CompletionEndpoints
    settings: CompletionSettings
    prompts: Sequence[EncodedPrompt]
    limits: Sequence[int]  # maximum completion tokens of each prompt
    form: OpenAIResponseForm

    async def complete(self) -> bytes:
        """Generate all completions and return the answer as JSON."""
        scores = await self._score_prompts()
        texts = self._build_texts()
        async with aclosing(self._generate_events(scores)) as events:
            async for index, event in events:
                texts[index].feed(event)
        return await self.endpoints.background.run(self._encode_answer, texts, scores)

    def _encode_answer(
        self, texts: Sequence[GrowingText], scores: Sequence[RowScores | None]
    ) -> bytes:
        """Return the complete answer, encoded as JSON.

        The choices are encoded in parts, so that other threads can run in between.
        """
        choices: list[str] = []
        head = {**self.form.build_head(chunk=False), "usage": self._count_usage(texts)}
        for prompt, score in zip(self.prompts, scores, strict=True):
            echo = self._build_echo(prompt, score)
            own = self._build_prompt_fields(prompt, score)
            if self.form.chat:
                head |= own
                own = {}
            for _ in range(self.settings.count):
                choice = self._build_choice(len(choices), texts[len(choices)], echo, own)
                choices.append(encode_json(choice))
        return f'{encode_json(head)[:-1]}, "choices": [{", ".join(choices)}]}}'.encode()

    def _build_choice(
        self, index: int, text: GrowingText, echo: EchoedPrompt, more: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return a choice of a complete answer, with the prompt before the completion."""
        if self.settings.return_token_ids:
            more = {**more, "token_ids": text.take_ids()}
        tokens = None
        if self.settings.logprobs is not None:
            tokens = [*echo.tokens, *_move_tokens(text.take(), len(echo.text))]
        whole = echo.text + text.final_text
        return self.form.build_choice(index, whole, text.finish, tokens, more)

    def _build_echo(self, prompt: EncodedPrompt, score: RowScores | None) -> EchoedPrompt:
        """Return the prompt as the answer repeats it: empty without `echo`."""
        if not self.settings.echo:
            return EchoedPrompt("", [])
        logprobs = self.settings.logprobs
        repeated = None if logprobs is None else score
        return self.endpoints.describer.build_echo(prompt, repeated, logprobs or 0)

    def _build_prompt_fields(
        self, prompt: EncodedPrompt, score: RowScores | None
    ) -> dict[str, Any]:
        """Return vLLM's fields that describe a prompt, as far as the request asks for them."""
        fields: dict[str, Any] = {}
        top = self.settings.prompt_logprobs
        if top is not None and score is not None:
            describer = self.endpoints.describer
            fields["prompt_logprobs"] = describer.build_prompt_logprobs(prompt, score, top)
        if self.settings.return_token_ids:
            fields["prompt_token_ids"] = list(prompt.ids)
        return fields

    async def stream(self, exchange: HttpExchange) -> None:
        """Generate all completions and send the answer as server-sent events."""
        scores = await self._score_prompts()
        texts = self._build_texts()
        shows_logprobs = self.settings.logprobs is not None
        async with aclosing(self._generate_events(scores)) as events:
            sizes = await self._send_prompts(exchange, scores)
            async for index, event in events:
                new = texts[index].feed(event)
                tokens = _move_tokens(texts[index].take(), sizes[index])
                if new or tokens:
                    shown_tokens = tokens if shows_logprobs else None
                    await self._send_delta(exchange, index, texts[index], new, shown_tokens)
                if event.finish is not None:
                    await self._send_delta(exchange, index, texts[index], None, None)
        if not self.settings.max_new_tokens:
            for index, text in enumerate(texts):
                await self._send_delta(exchange, index, text, None, None)
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

    async def _send_prompts(
        self, exchange: HttpExchange, scores: Sequence[RowScores | None]
    ) -> list[int]:
        """Send the first chunk of each choice: the role in a chat, else the repeated prompt.

        Returns the number of characters of the prompt that each choice repeats.
        """
        count = len(self.prompts) * self.settings.count
        if not (self.form.chat or self.settings.echo or self.settings.return_token_ids):
            return [0] * count
        sizes = []
        for index in range(count):
            at = index // self.settings.count
            echo, text = await self.endpoints.background.run(
                self._encode_first_chunk, index, self.prompts[at], scores[at]
            )
            sizes.append(len(echo.text))
            await exchange.send_event(text)
        return sizes

    def _encode_first_chunk(
        self, index: int, prompt: EncodedPrompt, score: RowScores | None
    ) -> tuple[EchoedPrompt, str]:
        echo = self._build_echo(prompt, score)
        fields = self._build_prompt_fields(prompt, score)
        if self.form.chat:
            first = {"role": "assistant", "content": ""}
            chunk = {**self.form.build_chunk(index, first, None, None), **fields}
            return echo, encode_json(chunk)
        content = {"content": echo.text}
        tokens = echo.tokens or None
        return echo, encode_json(self.form.build_chunk(index, content, None, tokens, fields))

    async def _send_delta(
        self,
        exchange: HttpExchange,
        index: int,
        text: GrowingText,
        new: str | None,
        tokens: Sequence[EmittedToken] | None,
    ) -> None:
        """Send new text of a choice, or, if `new` is None, its finish reason."""
        more = {"token_ids": text.take_ids()} if self.settings.return_token_ids else {}
        delta = {} if new is None else {"content": new}
        finish = text.finish if new is None else None
        await self._send_event(exchange, self.form.build_chunk(index, delta, finish, tokens, more))

    async def _send_event(self, exchange: HttpExchange, value: Mapping[str, Any]) -> None:
        await exchange.send_event(json.dumps(value))

    @property
    def _reads_next(self) -> bool:
        """True if the pass that scores the prompts also gives the completions' only tokens."""
        longest = max(len(prompt.ids) for prompt in self.prompts)
        fits = longest + 1 <= self.endpoints.policy.worker.max_tokens
        return fits and self.settings.scores_prompt and self.settings.takes_likeliest_next

    async def _score_prompts(self) -> Sequence[RowScores | None]:
        """Return the log-probs of each prompt's tokens, or None for each if they are not wanted."""
        if not self.settings.scores_prompt:
            return [None] * len(self.prompts)
        top = self.settings.top_of_prompt
        rows = [prompt.ids for prompt in self.prompts]
        if self._reads_next:
            top = max(top, self.settings.logprobs or 0, 1)
            rows = [[*row, NEXT] for row in rows]
        samples = self.settings.max_new_tokens and not self._reads_next
        num_later = self.settings.count * len(rows) if samples else 0
        with self.endpoints.policy.worker.hold_load(num_later):
            scores = await self.endpoints.policy.score_prompts(rows, top)
        self.endpoints.metrics.count_tokens(scored=sum(len(prompt.ids) for prompt in self.prompts))
        return scores

    async def _generate_events(
        self, scores: Sequence[RowScores | None]
    ) -> AsyncGenerator[tuple[int, TokenEvent], None]:
        """Yield an event for each sampled token, with the index of the token's choice.

        Closing the generator cancels unfinished completions.
        """
        num_tokens = 0
        try:
            if not self.settings.max_new_tokens:
                return
            events = self._read_next_events(scores) if self._reads_next else self._sample_events()
            async with aclosing(events):
                async for each in events:
                    num_tokens += 1
                    if num_tokens % PAUSE == 0:
                        await asyncio.sleep(0)  # the source yields to the loop only when it waits
                    yield each
        finally:
            num_prompt_tokens = sum(len(prompt.ids) for prompt in self.prompts)
            self.endpoints.metrics.count_tokens(num_prompt_tokens, num_tokens)

    async def _read_next_events(
        self, scores: Sequence[RowScores | None]
    ) -> AsyncGenerator[tuple[int, TokenEvent], None]:
        top, stop_ids = self.settings.logprobs or 0, self.settings.sampling.stop_ids
        for index in range(len(self.prompts) * self.settings.count):
            score = scores[index // self.settings.count]
            assert score is not None, "the prompts were scored"
            yield index, build_next_event(self.form.id, score, top, stop_ids)

    async def _sample_events(self) -> AsyncGenerator[tuple[int, TokenEvent], None]:
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
        try:
            while any(left.values()):
                event = await queue.get()
                if isinstance(event, Exception):
                    raise event
                left[event.id] -= event.finish is not None
                yield places[event.id] * n + event.k, event
        finally:
            for id, count in left.items():
                if count:
                    worker.cancel(id)

    def _build_job(
        self, index: int, tell: Callable[[TokenEvent | Exception], None]
    ) -> CompletionJob:
        settings = self.settings
        named = None if settings.seed is None else f"seed {settings.seed}"
        id = f"{self.form.id}-{index}"
        prompt = self.prompts[index].ids
        return CompletionJob(
            id, prompt, settings.count, self.limits[index], settings.sampling, tell, named
        )

    def _build_texts(self) -> list[GrowingText]:
        tokenizer = self.endpoints.policy.tokenizer
        pieces = self.endpoints.policy.pieces
        result: list[GrowingText] = []
        for prompt in self.prompts:
            for _ in range(self.settings.count):
                before = [] if self.form.chat else prompt.ids
                # Clients of `echo` expect a log-prob for each token, also for an end token.
                text = GrowingText(
                    tokenizer,
                    before,
                    self.settings.stops,
                    pieces,
                    every_token=self.settings.echo,
                )
                if not self.settings.max_new_tokens:
                    text.finish = "length"
                result.append(text)
        return result

    def _count_usage(self, texts: Sequence[GrowingText]) -> dict[str, int]:
        prompt = sum(len(prompt.ids) for prompt in self.prompts)
        completion = sum(text.count for text in texts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }


def _move_tokens(tokens: Sequence[EmittedToken], size: int) -> list[EmittedToken]:
    """Return the tokens of a text that follows `size` other characters."""
    return [replace(token, offset=token.offset + size) for token in tokens]
