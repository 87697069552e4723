"""MATH-style answers: the last boxed expression, compared as mathematics."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from weft.host.verifiers import _symbolic as symbolic
from weft.host.verifiers._answers import references
from weft.host.verifiers._latex import exact, is_formula, named, plain, split_top, tidy, value
from weft.registry import register_verifier

BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=[{\w\\-])")
GAP = r"(?:[\s$,;.]|\\[()\[\],;]|\\q?quad)*"
JOINT = re.compile(rf"{GAP}(?:and|or|\\text\{{\s*(?:and|or)\s*\}})?{GAP}")  # between the boxes of one answer
SAID = re.compile(r"(?:final answer|answer)\s*(?:is|are|:|=)[\s*:]*(.+)", re.IGNORECASE)
TAGGED = re.compile(r"<answer>(.+?)</answer>", re.DOTALL)
FORMULA = re.compile(r"\s*(?:\$\$?(.+?)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\])", re.DOTALL)
ENDED = re.compile(r"\.(?:\s|$)|[,;]?\s+(?:because|since|as|so|which|where|when|for)\s", re.IGNORECASE)
OPEN, CLOSED = ("(", "["), (")", "]")
BASE = re.compile(r"\w+_\d+")
SEEDS = (1, 2, 3)
SHORT = 200  # characters of a text that may be an answer and nothing else


def boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}` (braces balanced) or `\boxed 5`, None where there is none; several side by side
    are a list."""
    found: list[tuple[int, int, str]] = []  # (begin, end, inside)
    for match in BOX.finditer(text):
        rest = text[match.end() :]
        braced = rest.startswith("{")
        inside = _braced(rest) if braced else re.split(r"[\s$.]", rest, maxsplit=1)[0]
        if inside:
            found.append((match.start(), match.end() + len(inside) + 2 * braced, inside))
    if not found:
        return None
    answer = [found[-1]]
    for box in reversed(found[:-1]):
        if not JOINT.fullmatch(text[box[1] : answer[0][0]]):
            break
        answer.insert(0, box)
    return ", ".join(dict.fromkeys(inside for _, _, inside in answer))


def _braced(text: str) -> str | None:
    """What stands between the brace that a text begins with and the one that closes it."""
    depth = 0
    for index, sign in enumerate(text):
        depth += (sign == "{") - (sign == "}")
        if depth == 0:
            return text[1:index]
    return None


def said(text: str) -> str | None:
    """What stands in the last `<answer>`, or follows the last "answer is" or "Answer:": the formula that this begins with, or
    its words up to the end of the sentence. None where nobody says so."""
    tagged, found = TAGGED.findall(text), SAID.findall(text)
    if not (tagged or found):
        return None
    rest = (tagged or found)[-1].strip().replace("**", "")
    formula = FORMULA.match(rest)
    if formula:
        return next(group for group in formula.groups() if group is not None).strip()
    return ENDED.split(rest, maxsplit=1)[0].strip(" .*_`")


def equal(answer: str, reference: str) -> bool:
    """Whether an answer is the reference: 1/2 = 0.5 = \\frac12, (x+1)^2 = x^2+2x+1, {1,2} = {2,1}; [0,1) differs from (0,1].

    What can be told without doubt (numbers, lists, tuples, intervals, the same spelling) is decided here; computer algebra
    (`math_verify`) decides the rest.
    """
    one, other = tidy(answer), tidy(reference)
    known = _known(one, other)
    return symbolic.same(symbolic.formula(other), symbolic.formula(one)) if known is None else known


def _known(one: str, other: str) -> bool | None:
    """Whether two tidy answers are the same; None where this cannot be told without doubt."""
    if not one or not other:
        return one == other
    a, b = plain(one), plain(other)
    if a.casefold() == b.casefold():
        return True
    numbers = exact(a), exact(b)
    if None not in numbers:
        return numbers[0] == numbers[1]
    bases = BASE.fullmatch(a), BASE.fullmatch(b)
    if bases[0] and bases[1]:
        return False  # other digits, or another base
    if _listed(one) or _listed(other):
        return _known_list(one, other)
    (name, one), (other_name, other) = named(one), named(other)
    if (name is None) != (other_name is None) or (name is not None and name == other_name):
        return _known(one, other)
    parts, others = _union(one), _union(other)
    if parts and others:
        return True if _same_members(parts, others) else None
    parts, others = _bracketed(one), _bracketed(other)
    if parts and others:
        return len(parts) == len(others) and _all_equal(parts, others)
    return _same_value(a, b)


def _known_list(one: str, other: str) -> bool | None:
    parts, others = _listed(one), _listed(other)
    if parts and others:
        return _same_members(parts, others) if len(parts) == len(others) else None
    listed, single = (one, other) if parts else (other, one)
    if _bracketed(single):
        return False
    number = exact(plain(single))
    return (
        True if number is not None and exact(listed.replace(",", ".")) == number else None
    )  # 1,22 where commas are points


def _union(text: str) -> list[str] | None:
    parts = split_top(text.replace(r"\cup", "∪"), "∪")
    return parts if len(parts) > 1 else None


def _bracketed(text: str) -> list[str] | None:
    """A tuple or an interval: brackets around two members or more, with the brackets as members."""
    if text[0] in OPEN and text[-1] in CLOSED and len(split_top(text, ",")) == 1:
        members = split_top(text[1:-1], ",")
        if len(members) > 1:
            return [text[0], *members, text[-1]]
    return None


def _listed(text: str) -> list[str] | None:
    """Members of a list without brackets; `1 \\pm 2` lists two numbers."""
    made: list[str] = []
    for part in split_top(text, ","):
        made += [part.replace(r"\pm", sign) for sign in "+-"] if r"\pm" in part else [part]
    return made if len(made) > 1 else None


def _all_equal(one: Sequence[str], other: Sequence[str]) -> bool:
    return all(equal(a, b) for a, b in zip(one, other, strict=True))


def _same_members(one: Sequence[str], other: Sequence[str]) -> bool:
    """The same members in any order."""
    left = list(other)
    for member in one:
        match = next((n for n, candidate in enumerate(left) if equal(member, candidate)), None)
        if match is None:
            return False
        del left[match]
    return not left


def _same_value(one: str, other: str) -> bool | None:
    """Whether two expressions agree for several choices of their letters, up to float rounding: none has a value where the
    other has not, such as the root of a letter below 0. None where they differ, unless both are numbers that are far apart."""
    values = [(value(one, seed), value(other, seed)) for seed in SEEDS]
    there = [(a, b) for a, b in values if a is not None and b is not None]
    if len(there) < 2:
        return None
    both = len(there) == sum(a is not None or b is not None for a, b in values)
    if both and all(math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12) for a, b in there):
        return True
    numbers = len(set(there)) == 1 and len(there) == len(SEEDS)  # no letter in them
    return False if numbers and not math.isclose(*there[0], rel_tol=1e-4, abs_tol=1e-9) else None


def right(completion: str, reference: str, *, strict: bool = False) -> bool:
    """Whether a completion answers with the reference."""
    expected, inside = boxed(reference) or reference, boxed(completion)
    answer = inside
    if inside is None:
        if strict:
            return False
        answer = said(completion) or (completion if len(completion) <= SHORT else None)
    if answer is not None:
        one_box = max(len(BOX.findall(text)) for text in (reference, completion)) < 2
        one, other = tidy(answer), tidy(expected)
        known = _known(one, other)
        if known is not None and (known or one_box):
            return known
        if symbolic.same(symbolic.formula(other), symbolic.formula(one)):
            return True
        if inside is None and one_box and is_formula(answer):
            return False
    if symbolic.same(symbolic.formula(reference), completion):
        return True
    return not is_formula(reference) and symbolic.same(reference, completion)


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

    The answer is what the last `\boxed{}` holds; without one (and without `strict`) what follows "the answer is", or the last
    formula or number. The reference is the column `answer` or `ground_truth` (or `column`): the answer itself, or a solution
    that boxes it. Fractions, roots, percent signs, degrees, units, tuples, intervals, sets and lists are compared for what
    they mean; an expression that was not simplified counts.
    """
    rewards: list[float | None] = []
    for completion, reference in zip(completions, references(columns, column, len(completions)), strict=True):
        if reference is None:
            rewards.append(None)
            continue
        rewards.append(float(right(completion, str(reference), strict=strict)))
    return rewards
