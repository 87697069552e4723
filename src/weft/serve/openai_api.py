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

PAUSE = 16  # a request yields to the event loop after this many tokens
MAX_PROMPT_VALUES = 1 << 20  # maximum tokens and log-probs of prompts in an answer


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
        settings = read_settings(body, self.limits.max_new_tokens, self._stop_ids, chat=chat)
        prompts = await self.background.run(self._read_prompts, body, chat)
        limits = await self.background.run(self._check_prompts, prompts, settings)
        # Refuse the request if its completions and scored prompts exceed the load limit.
        load_per_prompt = settings.count if settings.max_new_tokens else 0
        if settings.scores_prompt:
            load_per_prompt += 1
        if self.policy.worker.load + load_per_prompt * len(prompts) > self.limits.max_load:
            raise RequestRefused(
                429, "the server is at its load limit; try again later", code="overloaded"
            )
        # Generate the answer.
        form = OpenAIResponseForm.make_new(self.policy.name, chat)
        run = CompletionRun(self, settings, prompts, limits, form)
        if settings.stream:
            await exchange.await_unless_disconnected(run.stream(exchange))
        else:
            await exchange.reply(200, await exchange.await_unless_disconnected(run.complete()))

    @property
    def _stop_ids(self) -> Sequence[int]:
        """Stop ids of the policy."""
        return self.policy.spec.stop_ids if self.policy.spec is not None else ()

    @property
    def reader(self) -> PromptReader:
        """Reader of prompts for the policy."""
        return PromptReader(self.policy, self.limits, self.background)

    @property
    def describer(self) -> PromptDescriber:
        """Describer of prompts for the calling worker thread."""
        tokenizer = self.background.get_tokenizer(self.policy.tokenizer)
        return PromptDescriber(tokenizer, self.policy.pieces)

    def _read_prompts(self, body: Mapping[str, Any], chat: bool) -> list[EncodedPrompt]:
        """Return the prompts of a request: one conversation, or one or more texts."""
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
        if values > MAX_PROMPT_VALUES:
            raise RequestRefused(
                400,
                f"the answer would have {values} tokens and log-probs of prompts; the limit is "
                f"{MAX_PROMPT_VALUES}: send fewer prompts in a request, or lower n or logprobs",
                param="prompt",
            )
        return limits

    def compute_limit(self, prompt: Sequence[int], settings: CompletionSettings) -> int:
        """Return the maximum number of completion tokens for a prompt, given as token ids.

        Raises `RequestRefused` if the prompt is invalid or leaves too little room in the context.
        """
        self.reader.check_ids(prompt, "prompt")
        max_scored = self.policy.worker.max_tokens
        if settings.scores_prompt and len(prompt) > max_scored:
            message = (
                f"the prompt has {len(prompt)} tokens; log-probs of a prompt are computed for at "
                f"most {max_scored}, the server's --max-tokens-per-pass"
            )
            raise RequestRefused(400, message, code="context_length_exceeded")
        context = self.policy.context
        available = settings.max_new_tokens if context is None else context - len(prompt)
        required = settings.max_new_tokens
        if settings.allows_fewer_tokens:
            required = min(1, required)
        if available < required:
            message = (
                f"{len(prompt)} prompt tokens and {settings.max_new_tokens} new tokens exceed the "
                f"context of {context}"
            )
            raise RequestRefused(400, message, code="context_length_exceeded")
        return min(available, settings.max_new_tokens)


@dataclass(frozen=True)
class CompletionRun:
    """Completion request that is being answered.

    The answer has n completions of each prompt. Completion k of prompt p is the choice with index
    `p * n + k` in the answer.
    """

    endpoints: CompletionEndpoints
    settings: CompletionSettings
    prompts: Sequence[EncodedPrompt]
    limits: Sequence[int]  # maximum number of completion tokens for each prompt
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
            prompt_fields = self._build_prompt_fields(prompt, score)
            if self.form.chat:
                head |= prompt_fields
                prompt_fields = {}
            for _ in range(self.settings.count):
                index = len(choices)
                choice = self._build_choice(index, texts[index], echo, prompt_fields)
                choices.append(encode_json(choice))
        return f'{encode_json(head)[:-1]}, "choices": [{", ".join(choices)}]}}'.encode()

    def _build_choice(
        self, index: int, text: GrowingText, echo: EchoedPrompt, fields: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return a choice of a complete answer: the repeated prompt and the completion.

        `fields` are further fields of the choice.
        """
        if self.settings.return_token_ids:
            fields = {**fields, "token_ids": text.take_ids()}
        tokens = None
        if self.settings.logprobs is not None:
            tokens = [*echo.tokens, *_move_tokens(text.take(), len(echo.text))]
        full_text = echo.text + text.final_text
        return self.form.build_choice(index, full_text, text.finish, tokens, fields)

    def _build_echo(self, prompt: EncodedPrompt, score: RowScores | None) -> EchoedPrompt:
        """Return the prompt that the answer repeats, which is empty if `echo` is not set."""
        if not self.settings.echo:
            return EchoedPrompt("", [])
        logprobs = self.settings.logprobs
        echoed_scores = None if logprobs is None else score
        return self.endpoints.describer.build_echo(prompt, echoed_scores, logprobs or 0)

    def _build_prompt_fields(
        self, prompt: EncodedPrompt, score: RowScores | None
    ) -> dict[str, Any]:
        """Return the requested ones of vLLM's fields that describe a prompt."""
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
                new_text = texts[index].feed(event)
                tokens = _move_tokens(texts[index].take(), sizes[index])
                if new_text or tokens:
                    tokens_with_logprobs = tokens if shows_logprobs else None
                    await self._send_delta(
                        exchange, index, texts[index], new_text, tokens_with_logprobs
                    )
                if event.finish is not None:
                    await self._send_delta(exchange, index, texts[index], None, None)
        if not self.settings.max_new_tokens:
            for index, text in enumerate(texts):
                await self._send_delta(exchange, index, text, None, None)
        if self.settings.usage_at_end:
            chunk = {**self.form.build_head(chunk=True), "choices": []}
            await self._send_event(exchange, {**chunk, "usage": self._count_usage(texts)})
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
        echo_sizes = []
        for index in range(count):
            prompt_index = index // self.settings.count
            echo, text = await self.endpoints.background.run(
                self._encode_first_chunk, index, self.prompts[prompt_index], scores[prompt_index]
            )
            echo_sizes.append(len(echo.text))
            await exchange.send_event(text)
        return echo_sizes

    def _encode_first_chunk(
        self, index: int, prompt: EncodedPrompt, score: RowScores | None
    ) -> tuple[EchoedPrompt, str]:
        """Return the prompt that the choice repeats, and the choice's first chunk as JSON."""
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
        new_text: str | None,
        tokens: Sequence[EmittedToken] | None,
    ) -> None:
        """Send new text of a choice, or, if `new_text` is None, its finish reason."""
        fields = {"token_ids": text.take_ids()} if self.settings.return_token_ids else {}
        delta = {} if new_text is None else {"content": new_text}
        finish = text.finish if new_text is None else None
        await self._send_event(
            exchange, self.form.build_chunk(index, delta, finish, tokens, fields)
        )

    async def _send_event(self, exchange: HttpExchange, value: Mapping[str, Any]) -> None:
        await exchange.send_event(json.dumps(value))

    @property
    def _reads_next(self) -> bool:
        """True if the pass that scores the prompts also computes the completions.

        This is possible if each completion is the most likely next token.
        """
        longest = max(len(prompt.ids) for prompt in self.prompts)
        fits_in_pass = longest + 1 <= self.endpoints.policy.worker.max_tokens
        return fits_in_pass and self.settings.scores_prompt and self.settings.takes_likeliest_next

    async def _score_prompts(self) -> Sequence[RowScores | None]:
        """Return the log-probs of each prompt's tokens, or None for each if not requested."""
        if not self.settings.scores_prompt:
            return [None] * len(self.prompts)
        top = self.settings.prompt_top
        rows = [prompt.ids for prompt in self.prompts]
        # Append a placeholder, at which the next token's log-probs are computed.
        if self._reads_next:
            top = max(top, self.settings.logprobs or 0, 1)
            rows = [[*row, NEXT] for row in rows]
        # Count the completions that will be sampled later as load.
        num_later = 0
        if self.settings.max_new_tokens and not self._reads_next:
            num_later = self.settings.count * len(rows)
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
                async for indexed_event in events:
                    num_tokens += 1
                    # `events` yields to the event loop only if it has to wait, so do it here.
                    if num_tokens % PAUSE == 0:
                        await asyncio.sleep(0)
                    yield indexed_event
        finally:
            num_prompt_tokens = sum(len(prompt.ids) for prompt in self.prompts)
            self.endpoints.metrics.count_tokens(num_prompt_tokens, num_tokens)

    async def _read_next_events(
        self, scores: Sequence[RowScores | None]
    ) -> AsyncGenerator[tuple[int, TokenEvent], None]:
        """Yield the events of completions that are read from the `scores` of the prompts."""
        top = self.settings.logprobs or 0
        stop_ids = self.settings.sampling.stop_ids
        for index in range(len(self.prompts) * self.settings.count):
            score = scores[index // self.settings.count]
            assert score is not None, "the prompts were scored"
            yield index, build_next_event(self.form.id, score, top, stop_ids)

    async def _sample_events(self) -> AsyncGenerator[tuple[int, TokenEvent], None]:
        """Sample the completions with the policy's worker, and yield their events."""
        queue: asyncio.Queue[TokenEvent | Exception] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        worker = self.endpoints.policy.worker
        n = self.settings.count

        def put_event(event: TokenEvent | Exception) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, event)

        # Queue one job per prompt.
        jobs = [self._build_job(index, put_event) for index in range(len(self.prompts))]
        num_unfinished = {job.id: n for job in jobs}
        prompt_indices = {job.id: index for index, job in enumerate(jobs)}
        for job in jobs:
            worker.generate(job)
        # Yield events until all completions are finished, or cancel those that are not.
        try:
            while any(num_unfinished.values()):
                event = await queue.get()
                if isinstance(event, Exception):
                    raise event
                if event.finish is not None:
                    num_unfinished[event.id] -= 1
                yield prompt_indices[event.id] * n + event.k, event
        finally:
            for id, count in num_unfinished.items():
                if count:
                    worker.cancel(id)

    def _build_job(
        self, index: int, on_event: Callable[[TokenEvent | Exception], None]
    ) -> CompletionJob:
        """Return the job that samples the completions of one prompt."""
        settings = self.settings
        return CompletionJob(
            id=f"{self.form.id}-{index}",
            prompt=self.prompts[index].ids,
            count=settings.count,
            max_new_tokens=self.limits[index],
            sampling=settings.sampling,
            on_event=on_event,
            draws_as=None if settings.seed is None else f"seed {settings.seed}",
        )

    def _build_texts(self) -> list[GrowingText]:
        """Return a decoder for each choice."""
        tokenizer = self.endpoints.policy.tokenizer
        pieces = self.endpoints.policy.pieces
        result: list[GrowingText] = []
        for prompt in self.prompts:
            for _ in range(self.settings.count):
                preceding_ids = [] if self.form.chat else prompt.ids
                # Clients of `echo` expect a log-prob for each token, also for an end token.
                text = GrowingText(
                    tokenizer,
                    preceding_ids,
                    self.settings.stops,
                    pieces,
                    every_token=self.settings.echo,
                )
                if not self.settings.max_new_tokens:
                    text.finish = "length"
                result.append(text)
        return result

    def _count_usage(self, texts: Sequence[GrowingText]) -> dict[str, int]:
        """Return the numbers of tokens, as in OpenAI's field `usage`."""
        prompt = sum(len(prompt.ids) for prompt in self.prompts)
        completion = sum(text.count for text in texts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }


def _move_tokens(tokens: Sequence[EmittedToken], size: int) -> list[EmittedToken]:
    """Return the tokens with their offsets increased by `size` characters."""
    return [replace(token, offset=token.offset + size) for token in tokens]
