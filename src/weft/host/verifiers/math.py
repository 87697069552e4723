"""MATH-style answers: the last boxed expression, compared as mathematics."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from weft.host.verifiers._answers import references
from weft.host.verifiers._latex import plain, split_top, value
from weft.registry import register_verifier

BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=[{\w\\-])")
SAID = re.compile(r"(?:final answer|answer)\s*(?:is|:)\s*:?\s*(.+)", re.IGNORECASE)
OPEN, CLOSED = ("(", "["), (")", "]")


def boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}` (braces balanced) or `\boxed 5`; None where there is none."""
    found = None
    for match in BOX.finditer(text):
        rest = text[match.end() :]
        inside = _braced(rest) if rest.startswith("{") else re.split(r"[\s$.]", rest, maxsplit=1)[0]
        found = inside or found
    return found


def _braced(text: str) -> str | None:
    """What stands between the brace that a text begins with and the one that closes it."""
    depth = 0
    for index, sign in enumerate(text):
        depth += (sign == "{") - (sign == "}")
        if depth == 0:
            return text[1:index]
    return None


def said(text: str) -> str | None:
    """What follows the last "answer is" or "Answer:" on its line; None where nobody says so."""
    found = SAID.findall(text)
    return found[-1].strip() if found else None


def equal(one: str, other: str) -> bool:
    """Whether two answers are the same: 1/2 = 0.5 = \\frac12, (x+1)^2 = x^2+2x+1, {1,2} = {2,1}; [0,1) differs from (0,1]."""
    return _equal(plain(one), plain(other))


def _equal(one: str, other: str) -> bool:
    if one.casefold() == other.casefold():
        return True
    if not one or not other:
        return False
    for split in (_union, _set, _bracketed):
        parts, others = split(one), split(other)
        if (parts is None) != (others is None):
            return False
        if parts is not None and others is not None:
            ordered = split is not _set
            same_kind = parts[0] == others[0] and len(parts[1]) == len(others[1])
            return same_kind and (_all_equal if ordered else _same_members)(parts[1], others[1])
    members, other_members = _listed(one), _listed(other)
    if len(members) > 1 or len(other_members) > 1:
        return len(members) == len(other_members) and _same_members(members, other_members)
    return _same_number(one, other)


Parts = tuple[str, list[str]]  # what kind, and the members


def _union(text: str) -> Parts | None:
    parts = split_top(text.replace(r"\cup", "∪"), "∪")
    return ("union", parts) if len(parts) > 1 else None


def _set(text: str) -> Parts | None:
    if text.startswith(r"\{") and text.endswith(r"\}"):
        return "set", split_top(text[2:-2], ",")
    return None


def _bracketed(text: str) -> Parts | None:
    """A tuple or an interval: brackets around two members or more."""
    if text[0] in OPEN and text[-1] in CLOSED:
        members = split_top(text[1:-1], ",")
        if len(members) > 1:
            return text[0] + text[-1], members
    return None


def _listed(text: str) -> list[str]:
    """Members of a list without brackets; `1 \\pm 2` lists two numbers."""
    members = [
        plain(part) for part in re.split(r"(?<=[\d})])(?:or|and)(?=[-\d\\(])", text) for part in split_top(part, ",")
    ]
    made = []
    for member in members:
        made += [member.replace(r"\pm", sign) for sign in "+-"] if r"\pm" in member else [member]
    return made


def _all_equal(one: Sequence[str], other: Sequence[str]) -> bool:
    return all(_equal(plain(a), plain(b)) for a, b in zip(one, other, strict=True))


def _same_members(one: Sequence[str], other: Sequence[str]) -> bool:
    """The same members in any order."""
    left = list(other)
    for member in one:
        match = next((n for n, candidate in enumerate(left) if _equal(plain(member), plain(candidate))), None)
        if match is None:
            return False
        del left[match]
    return True


def _same_number(one: str, other: str) -> bool:
    """Whether two expressions agree for two choices of their letters, up to float rounding."""
    for seed in (1, 2):
        a, b = value(one, seed), value(other, seed)
        if a is None or b is None or not math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12):
            return False
    return True


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
    r"""1 where the completion's answer equals the reference's, else 0; None for rows without a reference.

    The answer is what the last `\boxed{}` holds; without one (and without `strict`) what follows "the answer is". The reference
    is the column `answer` or `ground_truth` (or `column`): the answer itself, or a solution that boxes it. Fractions, roots,
    percent signs, degrees, units, tuples, intervals, sets and lists are compared for what they mean; an expression that was
    not simplified counts.
    """
    rewards: list[float | None] = []
    for completion, reference in zip(completions, references(columns, column, len(completions)), strict=True):
        if reference is None:
            rewards.append(None)
            continue
        expected = boxed(str(reference)) or str(reference)
        answer = boxed(completion)
        if answer is None and not strict:
            answer = said(completion)
        rewards.append(float(answer is not None and equal(answer, expected)))
    return rewards
