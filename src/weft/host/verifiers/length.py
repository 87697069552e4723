"""The verifier `length`: rewards a completion for a length within a range."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.errors import ConfigError
from weft.registry import register_verifier

UNITS = ("tokens", "words", "chars")


@register_verifier("length")
def length(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    completion_ids: Sequence[Sequence[int]],
    min: int = 0,
    max: int | None = None,
    slack: int = 0,
    unit: str = "tokens",
    **columns: Sequence[Any],
) -> list[float | None]:
    """Return 1 for completions with a length from `min` to `max`, and less for all others.

    Outside of this range, the reward falls linearly, and is 0 at a distance of `slack` from the
    nearest bound. With `slack` 0, every length outside of the range gets 0.

    `unit` is "tokens" (of the policy's tokenizer, including the end token), "words" (separated by
    white space) or "chars".
    """
    if unit not in UNITS:
        raise ConfigError(f"length: unit={unit!r} must be one of {', '.join(UNITS)}")
    if min < 0 or slack < 0 or (max is not None and max < min):
        raise ConfigError(
            f"length: min={min}, max={max}, slack={slack} must satisfy 0 <= min <= max and slack "
            f">= 0"
        )
    if unit == "tokens":
        lengths = [len(ids) for ids in completion_ids]
    else:
        lengths = [len(text.split()) if unit == "words" else len(text) for text in completions]
    return [_score_length(n, min, max, slack) for n in lengths]


def _score_length(count: int, low: int, high: int | None, slack: int) -> float:
    distance = max(low - count, 0 if high is None else count - high, 0)
    return max(0.0, 1.0 - distance / slack) if slack else float(distance == 0)
