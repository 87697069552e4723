"""What verifiers share: the column that holds the right answer, and numbers in text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

COLUMNS = ("answer", "ground_truth", "solution", "target")

# A sign counts where no word, digit or bracket stands before it ("5-3" is a difference); commas group three digits.
SIGN = r"(?:(?<![\w.)])-)?\$?"
WHOLE = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?=\.\d))"
NUMBER = re.compile(rf"{SIGN}{WHOLE}(?:\.\d+)?(?:\s?/\s?\d+)?")


def references(columns: Mapping[str, Sequence[Any]], column: str | None, count: int) -> Sequence[Any]:
    """The right answers: the named column, or the first of `COLUMNS` there is; None for rows that have none."""
    for name in (column,) if column else COLUMNS:
        if name in columns:
            return columns[name]
    return [None] * count


def parse_number(text: str) -> Fraction | None:
    """The exact value of one number: 1,234 and $5 and 12.50 and 3/4 and -7; None for anything else."""
    plain = text.replace(",", "").replace("$", "").replace(" ", "")
    top, slash, bottom = plain.partition("/")
    try:
        value = Fraction(top)
        return value / Fraction(bottom) if slash else value
    except (ValueError, ZeroDivisionError):
        return None


def numbers(text: str) -> list[Fraction]:
    """Every number in a text, in order. A minus may be the sign U+2212."""
    found = (parse_number(match.group()) for match in NUMBER.finditer(text.replace("\u2212", "-")))
    return [value for value in found if value is not None]
