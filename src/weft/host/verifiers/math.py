"""The verifier `math`: the last boxed expression, compared as mathematics."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from weft.host.verifiers import _symbolic as symbolic
from weft.host.verifiers._answers import references
from weft.host.verifiers._latex import (
    exact,
    is_formula,
    measure,
    named,
    plain,
    quantities,
    spelled_alike,
    tidy,
)
from weft.host.verifiers._relations import known_congruence, known_ratio
from weft.host.verifiers._sets import braces, bracketed, inequality, listed, united
from weft.host.verifiers._stated import boxed, boxes, said
from weft.host.verifiers._value import same_value
from weft.registry import register_verifier

# A number and its base: 101_2, (2A)_{16}.
BASE = re.compile(
    r"\(?\d+\)?_\{(?:[2-9]|[1-3]\d)\}|\(?(?:[\dA-F]{2,}|\d[\da-f]+)\)?_\{(?:1[1-9]|[23]\d)\}"
)
TEXT = re.compile(r"\\(?:text|mbox|mathrm|textrm)\{\s*[A-Za-z][A-Za-z ]+\}")
EITHER = re.compile(r"\d\W*\sor\s\W*\d")  # 5 or 6
SHORT = 200  # most characters of a text that can be an answer as a whole
MOST_CHARACTERS = 2000  # longest answer that is compared as mathematics
MOST_MEMBERS = 30  # longest list whose members are compared pairwise


def equal(answer: str, reference: str) -> bool:
    """Return whether an answer equals the reference as mathematics.

    1/2 = 0.5 = \\frac12, (x+1)^2 = x^2+2x+1, {1,2} = {2,1}; [0,1) differs from (0,1].

    Cases that can be decided with certainty (numbers, lists, tuples, intervals, the same spelling,
    the same value) are decided here; computer algebra (`math_verify`) decides the rest, and its
    verdict counts only if it lost no letter or number of either.
    """
    symbolic.engine().begin()
    return _equal(answer, reference)


def _equal(answer: str, reference: str) -> bool:
    one = tidy(answer)
    other = tidy(reference)
    known = _known(one, other)
    if known is None:
        return symbolic.same(symbolic.formula(other), symbolic.formula(one))
    return known


def _known(one: str, other: str) -> bool | None:
    """Return whether two tidy answers are equal, or None if that is not certain."""
    if not one or not other or max(len(one), len(other)) > MOST_CHARACTERS:
        return one == other
    known = _known_quantities(one, other)
    if known is not None:
        return known
    known = known_congruence(one, other, _equal)
    if known is not None:
        return known
    units = measure(one), measure(other)
    if None not in units and units[0] != units[1]:
        return False
    a = plain(one)
    b = plain(other)
    if spelled_alike(a, b):
        return True
    known = known_ratio(a, b)
    if known is not None:
        return known
    numbers = exact(a), exact(b)
    if None not in numbers:
        return numbers[0] == numbers[1]
    if BASE.fullmatch(a) or BASE.fullmatch(b):
        return False  # different digits or bases
    if a.isalpha() and b.isalpha() and (TEXT.fullmatch(one) or TEXT.fullmatch(other)):
        return False  # different words
    inside = braces(one)
    other_inside = braces(other)
    if inside is not None or other_inside is not None:
        if _set_and_tuple(inside, other) or _set_and_tuple(other_inside, one):
            return False
        return _known(
            one if inside is None else inside, other if other_inside is None else other_inside
        )
    parts = united(one)
    others = united(other)
    if parts and others:
        return True if _same_members(parts, others) else None
    if listed(one) or listed(other):
        return _known_list(one, other)
    (name, one), (other_name, other) = named(one), named(other)
    if (name is None) != (other_name is None) or (name is not None and name == other_name):
        return _known(one, other)
    if name is not None and other_name is not None:
        return False if name[0] == other_name[0] == "(" else None  # different letters
    known = _known_interval(one, other)
    return same_value(a, b) if known is None else known


def _set_and_tuple(inside: str | None, other: str) -> bool:
    return inside is not None and listed(inside) is not None and bracketed(other) is not None


def _known_quantities(one: str, other: str) -> bool | None:
    """Compare quantities with several units, such as 3 hours 20 minutes (which is not 3)."""
    found = quantities(one), quantities(other)
    if found[0] is None and found[1] is None:
        return None
    if found[0] is None or found[1] is None:
        if exact(plain(other if found[1] is None else one)) is not None:
            return False
        return None
    if [number for number, _ in found[0]] != [number for number, _ in found[1]]:
        return False
    if [unit[0] for _, unit in found[0]] == [unit[0] for _, unit in found[1]]:
        return True
    return None


def _known_interval(one: str, other: str) -> bool | None:
    """Compare tuples and intervals, and inequalities that are intervals."""
    conditions = inequality(one), inequality(other)
    if conditions[0] and conditions[1] and conditions[0][0] != conditions[1][0]:
        return None  # different letters
    parts, others = (
        found[1] if found else bracketed(text)
        for found, text in zip(conditions, (one, other), strict=True)
    )
    if parts and others:
        return len(parts) == len(others) and all(
            _equal(a, b) for a, b in zip(parts, others, strict=True)
        )
    return None


def _known_list(one: str, other: str) -> bool | None:
    parts = listed(one)
    others = listed(other)
    if parts and others:
        return _same_members(parts, others) if len(parts) == len(others) else None
    text, single = (one, other) if parts else (other, one)
    if bracketed(single):
        return None if united(text) else False
    number = exact(plain(single))
    commas_are_points = number is not None and exact(text.replace(",", ".")) == number  # 1,22
    return True if commas_are_points else None


def _same_members(one: Sequence[str], other: Sequence[str]) -> bool:
    """Return whether two lists have the same members in any order."""
    mine = list(one)
    left = list(other)
    for member in one:
        spelled = next(
            (n for n, candidate in enumerate(left) if candidate.strip() == member.strip()), None
        )
        if spelled is not None:
            mine.remove(member)
            del left[spelled]
    if len(mine) > MOST_MEMBERS:
        return False
    for member in mine:
        match = next((n for n, candidate in enumerate(left) if _equal(member, candidate)), None)
        if match is None:
            return False
        del left[match]
    return not left


def right(completion: str, reference: str, *, strict: bool = False) -> bool:
    """Return whether the answer of a completion equals the reference."""
    symbolic.engine().begin()
    expected = boxed(reference) or reference
    inside = boxed(completion)
    stated = inside if inside is not None or strict else said(completion)
    if stated == "" or (stated is None and strict):
        return False
    if stated is None and len(completion) <= SHORT:
        answer: str | None = completion
    else:
        answer = stated
    several = max(boxes(reference), boxes(completion)) > 1
    if answer is not None:
        if (
            inside is None
            and stated is not None
            and answer.endswith("!")
            and _equal(answer[:-1], expected)
        ):
            return True  # an exclamation mark, not a factorial
        one = tidy(answer)
        other = tidy(expected)
        known = _known(one, other)
        if known is not None and (known or not several):
            return known
        if symbolic.same(symbolic.formula(other), symbolic.formula(one)):
            return True
        undecided = EITHER.search(answer) is not None and listed(other) is None
        if inside is None and not several and (undecided or is_formula(one)):
            return False
    text = completion if inside is None or several else rf"\boxed{{{inside}}}"
    return symbolic.same(symbolic.formula(reference), text) or (
        not is_formula(reference) and symbolic.same(reference, text)
    )


@register_verifier("math")
def math_answer(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    completion_ids: Sequence[Sequence[int]],
    column: str | None = None,
    strict: bool = False,
    **columns: Sequence[Any],
) -> list[float | None]:
    r"""Return 1 if the completion's answer equals the reference's, else 0.

    None for rows without a reference.

    The answer is the content of the last `\boxed{}`; without one (and without `strict`) the text
    after "the answer is", or the last formula or number. The reference is the column `answer` or
    `ground_truth` (or `column`): the answer itself, or a solution that boxes it. Fractions, roots,
    percent signs, degrees, units, tuples, intervals, sets and lists are compared by their meaning;
    an expression need not be simplified. Computer algebra finds two answers equal only if every
    letter and number of both took part; if its parser drops something, only the same spelling
    counts. An answer that algebra does not decide in time (two seconds, less if many are slow) gets
    0.
    """
    rewards: list[float | None] = []
    for completion, reference in zip(
        completions, references(columns, column, len(completions)), strict=True
    ):
        if reference is None:
            rewards.append(None)
            continue
        rewards.append(float(right(completion, str(reference), strict=strict)))
    return rewards
