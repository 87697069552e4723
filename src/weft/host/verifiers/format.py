"""The verifier `format`: matches a completion against a regular expression."""

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
    """Return 1 for completions that match the regular expression `pattern`, else 0.

    With `match` "full", the pattern must match the whole completion; with "search", a match of any
    part is enough.

    The syntax is the same as in Python's `re`; `.` also matches line breaks. The default pattern
    requires <think>...</think><answer>...</answer>. A pattern with nested repetition can take
    exponential time, which is limited by the batch's deadline. Raises `ConfigError` for an invalid
    pattern.
    """
    if match not in ("full", "search"):
        raise ConfigError(f"format: match={match!r} must be full or search")
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(
            f"format: pattern={pattern!r} is not a regular expression: {error}"
        ) from error
    matches = compiled.fullmatch if match == "full" else compiled.search
    return [float(matches(completion) is not None) for completion in completions]
