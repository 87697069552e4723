"""The verifier `exact`: compares a completion with the reference, ignoring white space and case."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from weft.host.verifiers._answers import find_references, parse_number
from weft.registry import register_verifier

EXPONENT = re.compile(r"\d\s*(?:[eE][-+]?\d|\^|\*\*|[⁻⁺⁰¹²³⁴⁵⁶⁷⁸⁹])")


@register_verifier("exact")
def exact(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    completion_ids: Sequence[Sequence[int]],
    column: str | None = None,
    case: bool = False,
    **columns: Sequence[Any],
) -> list[float | None]:
    """Return 1 for completions that equal the reference, else 0.

    The reward is None for rows without a reference. The reference is in `column` or, by default, in
    the first of the columns `answer`, `ground_truth`, `solution` and `target` that is present.

    A run of white space counts as one blank, and white space at the ends is ignored. Letter case
    matters only if `case` is set. The comparison is numeric if the reference is a number rather
    than a string, or a string with an exponent such as "5e-05" or "10^3".
    """
    answers = find_references(columns, column, len(completions))
    result: list[float | None] = []
    for completion, answer in zip(completions, answers, strict=True):
        result.append(None if answer is None else float(_is_match(completion, answer, case)))
    return result


def _is_match(completion: str, answer: Any, case: bool) -> bool:
    is_number = isinstance(answer, (int, float)) and not isinstance(answer, bool)
    if is_number or EXPONENT.search(str(answer)):
        expected = parse_number(str(answer))
        actual = parse_number(completion)
        if expected is not None and actual is not None:
            return expected == actual
    return _normalize(completion, case) == _normalize(str(answer), case)


def _normalize(text: str, case: bool) -> str:
    joined = " ".join(text.split())
    return joined if case else joined.casefold()
