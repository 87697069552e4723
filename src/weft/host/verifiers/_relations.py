"""Comparison of ratios, `a:b:c`, and of congruences, `n \\equiv 1 \\pmod 4`."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

from weft.host.verifiers._expression import parse
from weft.host.verifiers._latex import parse_exact, split_top, to_plain_form
from weft.host.verifiers._value import have_same_value

MODULUS = re.compile(
    r"^(?P<rest>.*?)\s*,?\s*(?:\(\s*)?(?:\\pmod|\\[bp]?mod|\\(?:text|mathrm|operatorname)\{\s*mod(?:ulo)?\s*\}"
    r"|(?<![A-Za-z\\])mod(?:ulo)?(?![A-Za-z]))\s*(?P<modulus>\{[^{}]*\}|[^{}()]+?)\s*\)?$"
)
CONGRUENT = re.compile(r"\\equiv(?![A-Za-z])|≡")


def compare_ratios(one: str, other: str) -> bool | None:
    """Return whether two ratios, normalized by `_latex.to_plain_form`, are proportional.

    Returns None if neither text is a ratio, or if the comparison is undecided.
    """
    parts = _split_ratio(one)
    others = _split_ratio(other)
    if parts is None and others is None:
        return None
    if parts is None or others is None:
        return False if max(len(parts or ()), len(others or ())) > 2 else None  # 3:4 may be 3/4
    if len(parts) != len(others):
        return False
    verdicts = []
    for part, match in zip(parts[1:], others[1:], strict=True):
        verdicts.append(have_same_value(f"({part})*({others[0]})", f"({match})*({parts[0]})"))
    if False in verdicts:
        return False
    if None not in verdicts:
        return True
    return None if len(parts) == 2 else False


def _split_ratio(text: str) -> list[str] | None:
    parts = split_top(text, ":")
    if len(parts) < 2 or any(not part or parse(part) is None for part in parts):
        return None
    return parts


def compare_congruences(one: str, other: str, equal: Callable[[str, str], bool]) -> bool | None:
    """Return whether two answers are equivalent congruences, or None if neither is a congruence.

    The answers are results of `_latex.tidy`. Congruences are equivalent if the left sides are equal
    or one of them is missing, the moduli are equal, and the residues are equal up to multiples of
    the modulus. `equal` is a function that returns whether two such parts are equal.
    """
    first = _split_congruence(one)
    second = _split_congruence(other)
    if first is None and second is None:
        return None
    if first is None or second is None:
        return False
    (left, residue, modulus), (other_left, other_residue, other_modulus) = first, second
    if left and other_left and not equal(left, other_left):
        return False
    return equal(modulus, other_modulus) and _have_same_residues(
        residue, other_residue, modulus, equal
    )


def _split_congruence(text: str) -> tuple[str, str, str] | None:
    """Return the left side, the residue and the modulus of a congruence; None for other texts.

    The left side is "" if it is missing.
    """
    match = MODULUS.match(text)
    if match is None or not match["rest"].strip():
        return None
    sides = CONGRUENT.split(match["rest"])
    if len(sides) > 2:
        return None
    left = sides[0].strip() if len(sides) == 2 else ""
    return left, sides[-1].strip(), match["modulus"].strip("{} ")


def _have_same_residues(
    one: str, other: str, modulus: str, equal: Callable[[str, str], bool]
) -> bool:
    residues = [_parse_residues(text, modulus) for text in (one, other)]
    if None not in residues:
        return residues[0] == residues[1]
    return equal(one, other)


def _parse_residues(text: str, modulus: str) -> set[Fraction] | None:
    size = parse_exact(to_plain_form(modulus))
    values = [parse_exact(to_plain_form(part)) for part in split_top(text, ",")]
    if not size or None in values:
        return None
    return {value % size for value in values if value is not None}
