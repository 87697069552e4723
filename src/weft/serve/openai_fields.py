"""Parsing and validation of the fields of requests to the OpenAI-compatible endpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.engine.spec import GenerationSpec
from weft.errors import find_nearest
from weft.serve.exchange import RequestRefused

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_TOP = 5
MAX_CHAT_TOP = 20  # limit of OpenAI's `top_logprobs`, and of vLLM's `prompt_logprobs`
COMPLETION_TOKENS = 16  # default `max_tokens` of `/v1/completions`, as in OpenAI's API

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "stop", "seed", "n", "max_tokens")
# Fields of vLLM's API.
PROMPT = ("prompt_logprobs", "return_token_ids")
COMMON = ("model", "stream", "stream_options", "user", "logprobs", *SAMPLING, *PROMPT)
CHAT = (*COMMON, "messages", "max_completion_tokens", "top_logprobs")
COMPLETION = (*COMMON, "prompt", "echo")
# OpenAI fields that some endpoint does not support -> values without an effect, which are accepted.
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
    # True if the request sets no maximum; a completion may then be shorter if the context is full.
    allows_fewer_tokens: bool
    count: int
    seed: int | None
    stops: tuple[str, ...]
    stream: bool
    usage_at_end: bool  # True if a stream ends with token counts
    # Number of most likely alternatives per completion token; None returns no log-probs.
    logprobs: int | None
    echo: bool = False  # True if the answer begins with the prompt
    # Number of most likely alternatives per prompt token; None returns no log-probs of the prompt.
    prompt_logprobs: int | None = None
    return_token_ids: bool = False

    @property
    def scores_prompt(self) -> bool:
        """True if the answer has log-probs of the prompt's tokens."""
        return self.prompt_logprobs is not None or (self.echo and self.logprobs is not None)

    @property
    def prompt_top(self) -> int:
        """Largest number of alternatives in the answer per token of the prompt."""
        top = self.prompt_logprobs or 0
        if self.echo:
            top = max(top, self.logprobs or 0)
        return top

    @property
    def takes_likeliest_next(self) -> bool:
        """True if a completion is the most likely next token, with its unrestricted log-prob.

        The pass that scores the prompt can also compute this token.
        """
        spec = self.sampling
        is_unrestricted = spec.top_p == 1.0 and spec.top_k == 0 and spec.min_p == 0.0
        return spec.greedy and self.max_new_tokens == 1 and is_unrestricted and not self.stops

    def count_prompt_values(self, num_tokens: int) -> int:
        """Return the number of tokens and log-probs of prompts in an answer.

        `num_tokens` is the total number of tokens of the prompts. The values are repeated in each
        choice.
        """
        if not (self.echo or self.scores_prompt or self.return_token_ids):
            return 0
        return num_tokens * self.count * (1 + self.prompt_top)


def read_settings(
    body: Mapping[str, Any], new_tokens_limit: int, stop_ids: Sequence[int], *, chat: bool
) -> CompletionSettings:
    """Validate the fields of a completion request, and return the settings.

    `new_tokens_limit` is the server's limit per completion, `stop_ids` are the policy's stop ids,
    and `chat` selects the endpoint. Raises a `RequestRefused` that states the field, its value and
    the violated rule.
    """
    check_names(body, CHAT if chat else COMPLETION, UNSUPPORTED_FIELDS, (*CHAT, *COMPLETION))
    temperature = read_number(body, "temperature", 1.0, 0.0, 2.0)
    stops = _read_stops(body.get("stop"))
    stream = read_flag(body, "stream")
    greedy = temperature == 0.0
    logprobs = _read_logprobs(body, chat=chat)
    echo = read_flag(body, "echo")
    prompt_logprobs = _read_prompt_logprobs(body, stream)
    describes_prompt = echo or prompt_logprobs is not None
    seed = None
    if body.get("seed") is not None:
        seed = read_integer(body, "seed", 0, -(2**63), 2**63 - 1)
    sampling = GenerationSpec(
        max_new_tokens=new_tokens_limit,
        temperature=1.0 if greedy else temperature,
        greedy=greedy,
        top_p=read_number(body, "top_p", 1.0, 0.0, 1.0, exclusive_minimum=True),
        top_k=read_integer(body, "top_k", 0, 0, 2**31),
        min_p=read_number(body, "min_p", 0.0, 0.0, 1.0),
        stop=list(stops),
        stop_ids=list(stop_ids),
        top_logprobs=logprobs or 0,
    )
    return CompletionSettings(
        sampling=sampling,
        max_new_tokens=_read_max_tokens(
            body, new_tokens_limit, chat=chat, allows_zero=describes_prompt
        ),
        allows_fewer_tokens=body.get("max_tokens") is None
        and body.get("max_completion_tokens") is None,
        count=read_integer(body, "n", 1, 1, MAX_CHOICES),
        seed=seed,
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
    minimum: float,
    maximum: float,
    *,
    exclusive_minimum: bool = False,
) -> float:
    """Return the value of a numeric field, or `default` if the field is absent.

    Raises `RequestRefused` unless the value is a number from `minimum` to `maximum`. If
    `exclusive_minimum` is True, `minimum` itself is also refused.
    """
    value = body.get(name)
    if value is None:
        return default
    is_valid = type(value) in (int, float) and minimum <= value <= maximum
    if exclusive_minimum:
        is_valid = is_valid and value != minimum
        rule = f"must be a number above {minimum:g} up to {maximum:g}"
    else:
        rule = f"must be a number from {minimum:g} to {maximum:g}"
    if not is_valid:
        raise build_field_error(name, value, rule)
    return float(value)


def read_integer(
    body: Mapping[str, Any], name: str, default: int, minimum: int, maximum: int
) -> int:
    """Return the value of an integer field, or `default` if the field is absent.

    Raises `RequestRefused` unless the value is an integer from `minimum` to `maximum`.
    """
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or not minimum <= value <= maximum:
        raise build_field_error(name, value, f"must be a whole number from {minimum} to {maximum}")
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

    `rule` is a phrase that describes the valid values.
    """
    text = repr(value)
    if len(text) > 80:
        text = text[:77] + "..."
    return RequestRefused(400, f"{name}={text}: {rule}", param=name)


def check_names(
    body: Mapping[str, Any],
    supported: Sequence[str],
    unsupported: Mapping[str, Sequence[Any]],
    other_fields: Sequence[str] = (),
) -> None:
    """Raise `RequestRefused` for a field that the endpoint does not support.

    `supported` are the endpoint's fields. `unsupported` maps known fields that it does not support
    to the values that have no effect, which are accepted. `other_fields` are the fields of other
    endpoints.
    """
    for name, value in body.items():
        has_no_effect = value is None or (name in unsupported and value in unsupported[name])
        if name in supported or has_no_effect:
            continue
        if name in unsupported or name in other_fields:
            raise RequestRefused(
                400,
                f"{name} is not supported by this endpoint; leave it out",
                param=name,
                code="unsupported_parameter",
            )
        nearest = find_nearest(name, supported)
        if nearest:
            hint = f"did you mean {' or '.join(nearest)}?"
        else:
            hint = f"known: {', '.join(sorted(supported))}"
        raise RequestRefused(
            400, f"unknown field {name!r}; {hint}", param=name, code="unknown_parameter"
        )


def _read_stops(value: Any) -> tuple[str, ...]:
    """Return the distinct stop strings of the field `stop`, whose value is `value`."""
    if value is None:
        return ()
    texts = [value] if isinstance(value, str) else value
    rule = f"must be a string or a list of up to {MAX_STOPS} strings, none of them empty"
    if not isinstance(texts, list) or len(texts) > MAX_STOPS:
        raise build_field_error("stop", value, rule)
    if not all(isinstance(text, str) and text for text in texts):
        raise build_field_error("stop", value, rule)
    return tuple(dict.fromkeys(texts))


def _read_max_tokens(body: Mapping[str, Any], limit: int, *, chat: bool, allows_zero: bool) -> int:
    """Return the maximum number of new tokens per completion, at most `limit`.

    It may be 0 if `allows_zero`, which is True if the answer describes the prompt.
    """
    fields = ("max_tokens", "max_completion_tokens")
    names = [name for name in fields if body.get(name) is not None]
    if len(names) > 1:
        raise RequestRefused(
            400,
            "max_tokens and max_completion_tokens cannot both be set; set one of them",
            param=names[0],
        )
    if not names:
        return limit if chat else min(COMPLETION_TOKENS, limit)
    (name,) = names
    if body[name] == 0 and type(body[name]) is int and not allows_zero:
        raise build_field_error(
            name, 0, f"requires echo=true or prompt_logprobs; else write 1 to {limit}"
        )
    return read_integer(body, name, limit, 0 if allows_zero else 1, limit)


def _read_usage_at_end(body: Mapping[str, Any], stream: bool) -> bool:
    """Return whether the request asks for token counts at the end of the stream."""
    options = body.get("stream_options")
    if options is None:
        return False
    if not stream or not isinstance(options, Mapping) or set(options) - {"include_usage"}:
        raise build_field_error(
            "stream_options", options, "must be {include_usage: true}, and requires stream=true"
        )
    return read_flag(options, "include_usage")


def _read_prompt_logprobs(body: Mapping[str, Any], stream: bool) -> int | None:
    """Return the number of most likely alternatives per prompt token; None for no log-probs."""
    if body.get("prompt_logprobs") is None:
        return None
    if stream:
        raise build_field_error(
            "prompt_logprobs", body["prompt_logprobs"], "cannot be streamed; leave stream out"
        )
    return read_integer(body, "prompt_logprobs", 0, 0, MAX_CHAT_TOP)


def _read_logprobs(body: Mapping[str, Any], *, chat: bool) -> int | None:
    """Return the number of most likely tokens whose log-probs are reported at each position.

    Returns None if the request asks for no log-probs at all.
    """
    if not chat:
        if body.get("logprobs") is not None:
            return read_integer(body, "logprobs", 0, 0, MAX_TOP)
        return None
    top = read_integer(body, "top_logprobs", 0, 0, MAX_CHAT_TOP)
    if read_flag(body, "logprobs"):
        return top
    if top:
        raise build_field_error("top_logprobs", top, "requires logprobs=true")
    return None
