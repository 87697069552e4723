"""Parsing and validation of the fields of requests to the OpenAI-compatible endpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.engine.spec import GenerationSpec
from weft.errors import find_nearest
from weft.serve.exchange import RequestRefused

MOST_CHOICES = 128
MOST_STOPS = 16
MOST_TOP = 5
MOST_TOP_OF_CHAT = 20  # limit of `top_logprobs`, as in OpenAI's API, and of `prompt_logprobs`
COMPLETION_TOKENS = 16  # default `max_tokens` of `/v1/completions`, as in OpenAI's API

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "stop", "seed", "n", "max_tokens")
# `prompt_logprobs` and `return_token_ids` are vLLM's.
PROMPT = ("prompt_logprobs", "return_token_ids")
COMMON = ("model", "stream", "stream_options", "user", "logprobs", *SAMPLING, *PROMPT)
CHAT = (*COMMON, "messages", "max_completion_tokens", "top_logprobs")
COMPLETION = (*COMMON, "prompt", "echo")
# OpenAI fields that an endpoint does not support -> values that have no effect and are accepted.
UNSUPPORTED_FIELDS: Mapping[str, Sequence[Any]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "web_search_options": (),
    "prompt_cache_key": (),
    "safety_identifier": (),
}


@dataclass(frozen=True)
class CompletionSettings:
    """Validated settings of a completion request."""

    sampling: GenerationSpec
    max_new_tokens: int
    # Fewer tokens are allowed if the context is full, since the request gave no number.
    may_be_fewer: bool
    count: int
    seed: int | None
    stops: tuple[str, ...]
    stream: bool
    usage_at_end: bool  # a stream ends with token counts
    # Number of likeliest alternatives per token; None returns no log-probs at all.
    logprobs: int | None
    echo: bool = False  # the answer begins with the prompt
    # Number of likeliest alternatives per token of the prompt; None returns no log-probs of it.
    prompt_logprobs: int | None = None
    return_token_ids: bool = False

    @property
    def scores_prompt(self) -> bool:
        """True if the answer has log-probs of the prompt's tokens."""
        return self.prompt_logprobs is not None or (self.echo and self.logprobs is not None)

    @property
    def top_of_prompt(self) -> int:
        """Largest number of alternatives that the answer has per token of the prompt."""
        return max(self.prompt_logprobs or 0, (self.logprobs or 0) if self.echo else 0)

    @property
    def takes_likeliest_next(self) -> bool:
        """True if a completion is the most likely next token, with its unrestricted log-prob.

        That token can be read from the pass that scores the prompt.
        """
        spec = self.sampling
        unrestricted = spec.top_p == 1.0 and spec.top_k == 0 and spec.min_p == 0.0
        return spec.greedy and self.max_new_tokens == 1 and unrestricted and not self.stops

    def count_prompt_values(self, num_tokens: int) -> int:
        """Return how many values an answer has for prompts of `num_tokens` tokens in total.

        These are tokens and log-probs that the answer repeats in each choice.
        """
        if not (self.echo or self.scores_prompt or self.return_token_ids):
            return 0
        return num_tokens * self.count * (1 + self.top_of_prompt)


def read_settings(
    body: Mapping[str, Any], most_new_tokens: int, stop_ids: Sequence[int], *, chat: bool
) -> CompletionSettings:
    """Validate the fields of a completion request, and return the settings.

    `most_new_tokens` is the server's limit per completion, `stop_ids` are the policy's stop ids,
    and `chat` selects the endpoint. Raises a `RequestRefused` that states the field, its value and
    the rule that it violates.
    """
    check_names(body, CHAT if chat else COMPLETION, UNSUPPORTED_FIELDS, (*CHAT, *COMPLETION))
    temperature = read_number(body, "temperature", 1.0, 0.0, 2.0)
    stops = _read_stops(body.get("stop"))
    stream = read_flag(body, "stream")
    greedy = temperature == 0.0
    logprobs = _read_logprobs(body, chat=chat)
    echo = read_flag(body, "echo")
    prompt_logprobs = _read_prompt_logprobs(body, stream)
    repeats = echo or prompt_logprobs is not None
    sampling = GenerationSpec(
        max_new_tokens=most_new_tokens,
        temperature=1.0 if greedy else temperature,
        greedy=greedy,
        top_p=read_number(body, "top_p", 1.0, 0.0, 1.0, above=True),
        top_k=read_integer(body, "top_k", 0, 0, 2**31),
        min_p=read_number(body, "min_p", 0.0, 0.0, 1.0),
        stop=list(stops),
        stop_ids=list(stop_ids),
        top_logprobs=logprobs or 0,
    )
    return CompletionSettings(
        sampling=sampling,
        max_new_tokens=_read_max_tokens(body, most_new_tokens, chat=chat, may_be_0=repeats),
        may_be_fewer=body.get("max_tokens") is None and body.get("max_completion_tokens") is None,
        count=read_integer(body, "n", 1, 1, MOST_CHOICES),
        seed=read_integer(body, "seed", 0, -(2**63), 2**63 - 1)
        if body.get("seed") is not None
        else None,
        stops=stops,
        stream=stream,
        usage_at_end=_read_usage_at_end(body, stream),
        logprobs=logprobs,
        echo=echo,
        prompt_logprobs=prompt_logprobs,
        return_token_ids=read_flag(body, "return_token_ids"),
    )


def read_number(
    body: Mapping[str, Any],
    name: str,
    default: float,
    least: float,
    most: float,
    *,
    above: bool = False,
) -> float:
    """Return the value of a numeric field, or `default` if the field is absent.

    Raises `RequestRefused` unless the value is a number from `least` to `most`. With `above`,
    `least` itself is also refused.
    """
    value = body.get(name)
    if value is None:
        return default
    fits = type(value) in (int, float) and least <= value <= most and not (above and value == least)
    if not fits:
        raise build_field_error(
            name,
            value,
            f"must be a number {'above' if above else 'from'} {least:g} "
            f"{'up ' if above else ''}to {most:g}",
        )
    return float(value)


def read_integer(body: Mapping[str, Any], name: str, default: int, least: int, most: int) -> int:
    """Return the value of an integer field, or `default` if the field is absent.

    Raises `RequestRefused` unless the value is an integer from `least` to `most`.
    """
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or not least <= value <= most:
        raise build_field_error(name, value, f"must be a whole number from {least} to {most}")
    return value


def read_flag(body: Mapping[str, Any], name: str) -> bool:
    """Return the value of a Boolean field, or False if the field is absent.

    Raises `RequestRefused` for other values.
    """
    value = body.get(name)
    if value is not None and type(value) is not bool:
        raise build_field_error(name, value, "must be true or false")
    return bool(value)


def build_field_error(name: str, value: Any, rule: str) -> RequestRefused:
    """Return the error for a field with an invalid value.

    `rule` is a phrase that says which values are valid.
    """
    text = repr(value)
    return RequestRefused(
        400, f"{name}={text if len(text) <= 80 else text[:77] + '...'}: {rule}", param=name
    )


def check_names(
    body: Mapping[str, Any],
    taken: Sequence[str],
    unsupported: Mapping[str, Sequence[Any]],
    elsewhere: Sequence[str] = (),
) -> None:
    """Raise `RequestRefused` for a field that the endpoint does not take.

    `taken` are the endpoint's fields. `unsupported` maps known fields that it does not support to
    the values that have no effect, which are accepted. `elsewhere` are fields of other endpoints.
    """
    for name, value in body.items():
        if name in taken or value is None or (name in unsupported and value in unsupported[name]):
            continue
        if name in unsupported or name in elsewhere:
            raise RequestRefused(
                400,
                f"{name} is not supported by this endpoint; leave it out",
                param=name,
                code="unsupported_parameter",
            )
        close = find_nearest(name, taken)
        if close:
            hint = f"did you mean {' or '.join(close)}?"
        else:
            hint = f"known: {', '.join(sorted(taken))}"
        raise RequestRefused(
            400, f"unknown field {name!r}; {hint}", param=name, code="unknown_parameter"
        )


def _read_stops(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    texts = [value] if isinstance(value, str) else value
    if (
        not isinstance(texts, list)
        or len(texts) > MOST_STOPS
        or not all(isinstance(t, str) and t for t in texts)
    ):
        raise build_field_error(
            "stop",
            value,
            f"must be a string or a list of up to {MOST_STOPS} strings, none of them empty",
        )
    return tuple(dict.fromkeys(texts))


def _read_max_tokens(body: Mapping[str, Any], most: int, *, chat: bool, may_be_0: bool) -> int:
    """Return the maximum number of new tokens, which may be 0 if the answer repeats the prompt."""
    names = []
    for name in ("max_tokens", "max_completion_tokens"):
        if body.get(name) is not None:
            names.append(name)
    if len(names) > 1:
        raise RequestRefused(
            400,
            "max_tokens and max_completion_tokens cannot both be set; set one of them",
            param=names[0],
        )
    if not names:
        return most if chat else min(COMPLETION_TOKENS, most)
    if body[names[0]] == 0 and type(body[names[0]]) is int and not may_be_0:
        raise build_field_error(
            names[0], 0, f"requires echo=true or prompt_logprobs; else write 1 to {most}"
        )
    return read_integer(body, names[0], most, 0 if may_be_0 else 1, most)


def _read_usage_at_end(body: Mapping[str, Any], stream: bool) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    if not stream or not isinstance(options, Mapping) or set(options) - {"include_usage"}:
        raise build_field_error(
            "stream_options", options, "must be {include_usage: true}, and requires stream=true"
        )
    return read_flag(options, "include_usage")


def _read_prompt_logprobs(body: Mapping[str, Any], stream: bool) -> int | None:
    if body.get("prompt_logprobs") is None:
        return None
    if stream:
        raise build_field_error(
            "prompt_logprobs", body["prompt_logprobs"], "cannot be streamed; leave stream out"
        )
    return read_integer(body, "prompt_logprobs", 0, 0, MOST_TOP_OF_CHAT)


def _read_logprobs(body: Mapping[str, Any], *, chat: bool) -> int | None:
    """Return the number of most likely tokens whose log-probs are reported at each position.

    Returns None if the request asks for no log-probs at all.
    """
    if not chat:
        if body.get("logprobs") is not None:
            return read_integer(body, "logprobs", 0, 0, MOST_TOP)
        return None
    top = read_integer(body, "top_logprobs", 0, 0, MOST_TOP_OF_CHAT)
    if read_flag(body, "logprobs"):
        return top
    if top:
        raise build_field_error("top_logprobs", top, "requires logprobs=true")
    return None
