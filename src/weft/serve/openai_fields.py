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
MOST_TOP_OF_CHAT = 20  # limit of `top_logprobs`, as in OpenAI's API
COMPLETION_TOKENS = 16  # default `max_tokens` of `/v1/completions`, as in OpenAI's API

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "stop", "seed", "n", "max_tokens")
COMMON = ("model", "stream", "stream_options", "user", "logprobs", *SAMPLING)
CHAT = (*COMMON, "messages", "max_completion_tokens", "top_logprobs")
COMPLETION = (*COMMON, "prompt")
# OpenAI fields that weft does not support -> values that have no effect and are accepted.
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


def read_settings(
    body: Mapping[str, Any], most_new_tokens: int, stop_ids: Sequence[int], *, chat: bool
) -> CompletionSettings:
    """Validate the fields of a completion request, and return the settings.

    `most_new_tokens` is the server's limit per completion, `stop_ids` are the policy's stop ids,
    and `chat` selects the endpoint. Raises a `RequestRefused` that states the field, its value and
    the rule that it violates.
    """
    _check_names(body, CHAT if chat else COMPLETION)
    temperature = read_number(body, "temperature", 1.0, 0.0, 2.0)
    stops = _read_stops(body.get("stop"))
    stream = read_flag(body, "stream")
    greedy = temperature == 0.0
    logprobs = _read_logprobs(body, chat=chat)
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
        max_new_tokens=_read_max_tokens(body, most_new_tokens, chat=chat),
        may_be_fewer=body.get("max_tokens") is None and body.get("max_completion_tokens") is None,
        count=read_integer(body, "n", 1, 1, MOST_CHOICES),
        seed=read_integer(body, "seed", 0, -(2**63), 2**63 - 1)
        if body.get("seed") is not None
        else None,
        stops=stops,
        stream=stream,
        usage_at_end=_read_usage_at_end(body, stream),
        logprobs=logprobs,
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


def _check_names(body: Mapping[str, Any], taken: Sequence[str]) -> None:
    for name, value in body.items():
        if (
            name in taken
            or value is None
            or (name in UNSUPPORTED_FIELDS and value in UNSUPPORTED_FIELDS[name])
        ):
            continue
        if name in UNSUPPORTED_FIELDS or name in CHAT or name in COMPLETION:
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


def _read_max_tokens(body: Mapping[str, Any], most: int, *, chat: bool) -> int:
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
    return read_integer(body, names[0], most, 1, most)


def _read_usage_at_end(body: Mapping[str, Any], stream: bool) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    if not stream or not isinstance(options, Mapping) or set(options) - {"include_usage"}:
        raise build_field_error(
            "stream_options", options, "must be {include_usage: true}, and requires stream=true"
        )
    return read_flag(options, "include_usage")


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
