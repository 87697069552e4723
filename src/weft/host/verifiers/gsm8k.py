"""The verifier `gsm8k`: compares the final number of a worked solution with the reference."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from weft.host.verifiers._answers import find_numbers, find_references
from weft.registry import register_verifier

MARK = "####"  # GSM8K's reference solutions end in "#### 72"


def find_final_number(text: str, *, strict: bool = False) -> Fraction | None:
    """Return the final number of a solution: the first number after the last "####".

    If the text has no "####", return its last number or, with `strict`, None. Also returns None if
    there is no such number.
    """
    _, mark, after = text.rpartition(MARK)
    if mark:
        numbers = find_numbers(after)
        return numbers[0] if numbers else None
    numbers = [] if strict else find_numbers(text)
    return numbers[-1] if numbers else None


@register_verifier("gsm8k")
def gsm8k(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    completion_ids: Sequence[Sequence[int]],
    column: str | None = None,
    strict: bool = False,
    **columns: Sequence[Any],
) -> list[float | None]:
    """Return 1 for completions whose final number equals the reference's, else 0.

    The reward is None for rows without a reference.

    The reference is in `column` or, by default, in the first of the columns `answer`,
    `ground_truth`, `solution` and `target` that is present. It is a number, or a solution that ends
    in a number. Commas and blanks between groups of three digits, dollar signs, units and trailing
    zeros do not matter; exponents (5e-05, 10^3, 2.5 x 10^3), fractions (3/4, 1 1/2) and words such
    as "million" are understood. Numbers are compared exactly, as fractions. With `strict`, only an
    answer after "####" counts.
    """
    answers = find_references(columns, column, len(completions))
    rewards: list[float | None] = []
    for completion, answer in zip(completions, answers, strict=True):
        expected = None if answer is None else find_final_number(str(answer))
        is_correct = (
            expected is not None and find_final_number(completion, strict=strict) == expected
        )
        rewards.append(None if expected is None else float(is_correct))
    return rewards
