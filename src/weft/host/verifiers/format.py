"""Format: whether a completion matches a regular expression."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from weft.errors import ConfigError
from weft.registry import register_verifier

THINK_ANSWER = r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*"


@register_verifier("format")
def format_match(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    completion_ids: Sequence[Sequence[int]],
    pattern: str = THINK_ANSWER,
    match: str = "full",
    **columns: Sequence[Any],
) -> list[float | None]:
    """1 where `pattern` matches the whole completion (`match` "full") or a part of it ("search"),
    else 0.

    Python's `re`; `.` matches line ends too. The default asks for
    <think>...</think><answer>...</answer>. A pattern with nested repetition can take exponential
    time; the batch's deadline ends that. Raises `ConfigError` for a bad pattern.
    """
    if match not in ("full", "search"):
        raise ConfigError(f"format: match={match!r} must be full or search")
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(
            f"format: pattern={pattern!r} is no regular expression: {error}"
        ) from error
    matches = compiled.fullmatch if match == "full" else compiled.search
    return [float(matches(completion) is not None) for completion in completions]
