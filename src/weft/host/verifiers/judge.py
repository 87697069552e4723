"""The verifier `judge`: scores completions with a language model on an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.errors import ConfigError, UserError
from weft.host.verifiers._judge_server import (
    KEY_VARIABLE,
    RUBRIC,
    SCORE,
    JudgeAnswer,
    JudgeEndpoint,
    JudgeSession,
    JudgeTemplate,
    RequestLimits,
    ScoreScale,
    UnansweredRequest,
    check_integer,
    check_number,
    find_cache_file,
    hash_request,
    open_cache,
    shorten,
)
from weft.registry import register_verifier

Rewards = tuple[list[float | None], dict[str, float]]
OWN_FIELDS = ("model", "messages", "temperature", "max_tokens")  # fields that other options set
# Request fields that the option `extra` must not contain -> hint in the error message
FORBIDDEN_FIELDS = {
    "stream": "streaming is not supported",
    "n": "use votes",
    "api_key": "use api_key_env",
}


@register_verifier("judge")
def judge(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    completion_ids: Sequence[Sequence[int]],
    url: str | None = None,
    model: str | None = None,
    prompt: str = RUBRIC,
    system: str | None = None,
    pattern: str = SCORE,
    low: float = 1.0,
    high: float = 10.0,
    temperature: float | None = 0.0,
    max_tokens: int | None = 512,
    extra: Mapping[str, Any] | None = None,
    votes: int = 1,
    concurrency: int = 16,
    timeout_s: float = 30.0,
    retries: int = 4,
    on_failure: float | None = None,
    on_unreadable: float | None = None,
    cache: str | bool | None = None,
    api_key_env: str | None = KEY_VARIABLE,
    insecure: bool = False,
    input_price: float | None = None,
    output_price: float | None = None,
    **columns: Sequence[Any],
) -> Rewards | Coroutine[Any, Any, Rewards]:
    """Return a judge model's scores of the completions, mapped from `low`..`high` to 0..1.

    The reward is None for rows in which a column used in `prompt` is null.

    docs/judge-reward.md describes the options. Metrics: `calls` (requests sent), `cached`,
    `failed`, `unreadable`, `input_tokens`, `output_tokens`, and `cost` if a price is set. Raises
    `ConfigError` for invalid options, `DataError` if a placeholder does not name a column, and,
    unless a fallback reward is set, `UserError` if the server fails or an answer has no score.
    """
    scale = ScoreScale(pattern, low, high)
    model_judge = Judge(
        endpoint=JudgeEndpoint.from_options(url, api_key_env, insecure),
        policy=RequestLimits(concurrency, timeout_s, retries),
        template=JudgeTemplate(prompt, scale, system),
        request=JudgeRequest(model, temperature, max_tokens, {} if extra is None else extra, votes),
        fallback=FallbackRewards(on_failure, on_unreadable),
        prices=TokenPrices(input_price, output_price),
        cache_file=find_cache_file(cache),
    )
    if completions:
        return model_judge.compute_rewards(prompts, completions, columns)
    return ([], {})


@dataclass(frozen=True)
class JudgeRequest:
    """Settings of a judge's requests, and the number of votes per completion.

    The settings are all fields of a request except its messages.
    """

    model: str | None
    temperature: float | None
    max_tokens: int | None
    extra: Mapping[str, Any]
    votes: int

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(
                f"judge: model={self.model!r} must be the name of the model on the server"
            )
        if self.temperature is not None:
            check_number(
                "temperature",
                self.temperature,
                "0 or more, or null to leave it to the server",
                minimum=0,
            )
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1)
        check_integer("votes", self.votes, 1)
        if self.votes > 1 and self.temperature == 0:
            raise ConfigError(
                f"judge: votes={self.votes} at temperature=0 would give equal votes; set "
                f"temperature to 1"
            )
        self._check_extra()

    def _check_extra(self) -> None:
        if not isinstance(self.extra, Mapping) or not all(
            isinstance(name, str) for name in self.extra
        ):
            raise ConfigError(
                "judge: extra must be a mapping from names of request fields to values"
            )
        for name in self.extra:
            if name in OWN_FIELDS or name in FORBIDDEN_FIELDS:
                raise ConfigError(
                    f"judge: extra must not contain {name!r}; "
                    f"{FORBIDDEN_FIELDS.get(name, f'use the option {name}')}"
                )
        try:
            json.dumps(self.extra, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"judge: extra must contain only plain JSON values: {error}"
            ) from None

    def build_body(self, messages: Sequence[Mapping[str, str]]) -> dict[str, Any]:
        """Return the JSON body of a request with these messages."""
        sampling = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        set_options = {}
        for name, value in sampling.items():
            if value is not None:
                set_options[name] = value
        return {"model": self.model, "messages": messages, **set_options, **self.extra}


@dataclass(frozen=True)
class FallbackRewards:
    """Rewards for completions that get no score from the judge.

    `on_failure` is the reward if a request fails, and `on_unreadable` the reward if the answer has
    no score. If the reward is None, the run stops instead.
    """

    on_failure: float | None
    on_unreadable: float | None

    def __post_init__(self) -> None:
        for name in ("on_failure", "on_unreadable"):
            if (value := getattr(self, name)) is not None:
                check_number(name, value, "a finite number, or null to stop the run")


@dataclass(frozen=True)
class TokenPrices:
    """Prices per million input and output tokens, in any currency; None if not set."""

    input: float | None
    output: float | None

    def __post_init__(self) -> None:
        for name, value in (("input_price", self.input), ("output_price", self.output)):
            if value is not None:
                check_number(name, value, "0 or more, for a million tokens", minimum=0)

    def compute_cost(self, counts: Mapping[str, float]) -> dict[str, float]:
        """Return the metric `cost` for the counted tokens, or {} if no price is set."""
        if self.input is None and self.output is None:
            return {}
        cost = counts["input_tokens"] * (self.input or 0.0) + counts["output_tokens"] * (
            self.output or 0.0
        )
        return {"cost": cost / 1e6}


@dataclass(frozen=True)
class VoteResult:
    """Result of one vote of the judge on a completion.

    `reward` is None if the vote has no score. In that case, `fallback` is the reward to use
    instead; if `fallback` is None too, the run stops with the message `problem`.
    """

    reward: float | None
    fallback: float | None = None
    problem: str = ""


@dataclass(frozen=True)
class Judge:
    """Model on a server that judges completions, with its prompt template and all other options."""

    endpoint: JudgeEndpoint
    policy: RequestLimits
    template: JudgeTemplate
    request: JudgeRequest
    fallback: FallbackRewards
    prices: TokenPrices
    cache_file: Path | None

    async def compute_rewards(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
    ) -> Rewards:
        """Return the rewards and the metrics of some completions.

        With a cache, completions that lead to equal requests share one answer.
        """
        # Build one request per completion, and one cache key per vote.
        bodies = []
        for messages in self.template.build_messages(prompts, completions, columns):
            bodies.append(None if messages is None else self.request.build_body(messages))
        keys = [self._compute_cache_keys(index, body) for index, body in enumerate(bodies)]
        requests = {}
        for body, vote_keys in zip(bodies, keys, strict=True):
            if body is not None:
                for vote, key in enumerate(vote_keys):
                    requests[key] = (body, vote)
        # Collect the votes, each distinct key once.
        async with JudgeSession(self.endpoint, self.policy) as session:
            call = JudgeCall(self, session)
            vote_results = await _gather_results(
                [call.vote(key, *request) for key, request in requests.items()]
            )
        verdicts = dict(zip(requests, vote_results, strict=True))
        # Count repeated votes as cached, and average the votes of each completion.
        readable = []
        for vote_keys in keys:
            for key in vote_keys:
                if verdicts[key].reward is not None:
                    readable.append(key)
        counts = call.counts | {"calls": session.num_requests}
        counts["cached"] += len(readable) - len(set(readable))
        rewards: list[float | None] = []
        for vote_keys in keys:
            if vote_keys:
                rewards.append(_average_votes([verdicts[key] for key in vote_keys]))
            else:
                rewards.append(None)
        return rewards, counts | self.prices.compute_cost(counts)

    def _compute_cache_keys(self, index: int, body: Mapping[str, Any] | None) -> list[str]:
        """Return one cache key per vote, or an empty list for a completion that is not judged.

        Without a cache file, the keys contain `index`, the index of the completion, so that
        completions with equal requests do not share answers.
        """
        if body is None:
            return []
        suffix = "" if self.cache_file else f" {index}"
        cache_keys: list[str] = []
        for vote in range(self.request.votes):
            cache_keys.append(hash_request(self.endpoint.url, body, vote) + suffix)
        return cache_keys


COUNTS = ("calls", "cached", "failed", "unreadable", "input_tokens", "output_tokens")


@dataclass
class JudgeCall:
    """State of one `Judge.compute_rewards` call: the server session and the metric counts."""

    judge: Judge
    session: JudgeSession
    counts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))

    async def vote(self, key: str, body: Mapping[str, Any], vote: int) -> VoteResult:
        """Return the result of one vote, from the cache or the server.

        `key` is the vote's key in the cache, `body` the request to send if it is not cached, and
        `vote` the index of the vote.

        Raises `UserError` if the request fails and `on_failure` is not set.
        """
        # Look the answer up in the cache.
        scale = self.judge.template.scale
        fallback = self.judge.fallback
        file = self.judge.cache_file
        cache = None if file is None else open_cache(file)
        cached_answer = None if cache is None else cache.get(key)
        if cached_answer is not None and (reward := scale.parse_reward(cached_answer)) is not None:
            self.counts["cached"] += 1
            return VoteResult(reward)
        # Ask the server.
        try:
            answer = await self.session.ask(body)
        except UnansweredRequest as error:
            if fallback.on_failure is None:
                raise UserError(
                    f"{error}, or set on_failure to the reward of completions without an answer"
                ) from None
            self.counts["failed"] += 1
            message = f"judge: url={self.judge.endpoint.url}: {error.cause}; the reward is on_failure={fallback.on_failure:g}"
            warnings.warn(message, RuntimeWarning, stacklevel=1)  # equal warnings are shown once
            return VoteResult(None, fallback.on_failure)
        # Parse the score; only answers with a score are cached.
        self.counts["input_tokens"] += answer.input_tokens
        self.counts["output_tokens"] += answer.output_tokens
        reward = scale.parse_reward(answer.text)
        if reward is None:
            self.counts["unreadable"] += 1
            return VoteResult(None, fallback.on_unreadable, self._explain_unreadable(answer))
        if cache is not None:
            cache.put(key, answer.text)
        return VoteResult(reward)

    def _explain_unreadable(self, answer: JudgeAnswer) -> str:
        scale = self.judge.template.scale
        if answer.is_truncated:
            cut = f", which was cut at max_tokens={self.judge.request.max_tokens}"
        else:
            cut = ""
        end = shorten(answer.text[::-1])[::-1]  # the part where a score is expected
        return (
            f"judge: url={self.judge.endpoint.url}: no score from {scale.low:g} to {scale.high:g} "
            f"in the answer {end!r}{cut}; "
            "change prompt, pattern or max_tokens, or set on_unreadable to the reward of such "
            "completions"
        )


def _average_votes(verdicts: Sequence[VoteResult]) -> float:
    """Return the mean reward of the votes that have a score.

    If no vote has a score, returns the fallback reward of the first vote. In this case, raises
    `UserError` if any of the votes has no fallback reward.
    """
    rewards = []
    for verdict in verdicts:
        if verdict.reward is not None:
            rewards.append(verdict.reward)
    if rewards:
        return sum(rewards) / len(rewards)
    decisive = next((verdict for verdict in verdicts if verdict.fallback is None), verdicts[0])
    if decisive.fallback is None:
        raise UserError(decisive.problem)
    return decisive.fallback


async def _gather_results(
    coroutines: Sequence[Coroutine[Any, Any, VoteResult]],
) -> list[VoteResult]:
    """Run the coroutines concurrently, and return all results.

    If a coroutine raises an error, all other coroutines are cancelled before the error is raised.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
