"""Parser of answers with several members: lists, sets, tuples, intervals and unions.

All texts are tidy answers (results of `_latex.tidy`).
"""

from __future__ import annotations

import re

from weft.host.verifiers._latex import split_top

OPEN = ("(", "[")
CLOSED = (")", "]")
SIGN = {
    r"\leq": "≤",
    r"\le": "≤",
    r"\geq": "≥",
    r"\ge": "≥",
    r"\lt": "<",
    r"\gt": ">",
    "<=": "≤",
    ">=": "≥",
}
WRITTEN = re.compile(r"\\(?:leq?|geq?|lt|gt)(?:slant)?(?![A-Za-z])|[<>]=")
LETTER = re.compile(r"[A-Za-z]|\\(?:alpha|beta|theta|lambda|mu)")


def extract_set(text: str) -> str | None:
    """Return the members of a set in braces, such as `\\{1,2\\}`, as one string.

    Returns None for any other text, including a set that is defined by a condition.
    """
    for opening, closing in ((r"\{", r"\}"), ("{", "}")):
        if (
            text.startswith(opening)
            and text.endswith(closing)
            and len(text) > len(opening) + len(closing)
        ):
            inside = text[len(opening) : -len(closing)]
            if (
                _is_balanced(inside)
                and not re.search(r"\\mid|[:|]", inside)
                and (opening == r"\{" or "," in inside)
            ):
                return inside.strip()
    return None


def _is_balanced(text: str, opening: str = "{", closing: str = "}") -> bool:
    depth = 0
    for sign in text:
        depth += (sign in opening) - (sign in closing)
        if depth < 0:
            return False
    return depth == 0


def split_list(text: str) -> list[str] | None:
    r"""Return the members of a comma-separated list without brackets.

    An expression with `\pm` gives two members: `1 \pm 2` becomes `1 + 2` and `1 - 2`. Returns None
    if there are fewer than two members.
    """
    members: list[str] = []
    for part in split_top(text, ","):
        members += [part.replace(r"\pm", sign) for sign in "+-"] if r"\pm" in part else [part]
    return members if len(members) > 1 else None


def split_brackets(text: str) -> list[str] | None:
    """Split a tuple or an interval into its opening bracket, its members and its closing bracket.

    Returns None for other texts, including brackets with fewer than two members.
    """
    if (
        text[:1] in OPEN
        and text[-1] in CLOSED
        and len(split_top(text, ",")) == 1
        and _is_balanced(text[1:-1], "([{", ")]}")
    ):
        members = split_top(text[1:-1], ",")
        if len(members) > 1:
            return [text[0], *members, text[-1]]
    return None


def parse_inequality(text: str) -> tuple[str, list[str]] | None:
    r"""Return the variable and the interval of an inequality, such as `x<5` or `1<x\le 3`.

    The interval is [opening bracket, lower end, upper end, closing bracket]. The variable can also
    be on the right, as in `2 \ge x`. Returns None for other texts.
    """
    # Split the text at its signs.
    parts = re.split(
        r"([<>≤≥])", WRITTEN.sub(lambda match: SIGN[match.group().removesuffix("slant")], text)
    )
    terms = [part.strip() for part in parts[::2]]
    signs = parts[1::2]
    if not all(terms):
        return None
    # Inequality with one sign, such as `x<5` or `5>x`.
    if len(terms) == 2 and LETTER.fullmatch(terms[1]):
        terms = terms[::-1]
        signs = [_flip_sign(signs[0])]
    if len(terms) == 2 and LETTER.fullmatch(terms[0]):
        closed = signs[0] in "≤≥"
        if signs[0] in "<≤":
            return terms[0], ["(", r"-\infty", terms[1], "]" if closed else ")"]
        return terms[0], ["[" if closed else "(", terms[1], r"\infty", ")"]
    # Inequality with two signs in the same direction, such as `1<x<3`.
    if len(terms) == 3 and LETTER.fullmatch(terms[1]) and (signs[0] in "<≤") == (signs[1] in "<≤"):
        if signs[0] in ">≥":
            terms = terms[::-1]
            signs = [_flip_sign(sign) for sign in signs[::-1]]
        return terms[1], [
            "(" if signs[0] == "<" else "[",
            terms[0],
            terms[2],
            ")" if signs[1] == "<" else "]",
        ]
    return None


def _flip_sign(sign: str) -> str:
    return {"<": ">", ">": "<", "≤": "≥", "≥": "≤"}[sign]


def split_union(text: str) -> list[str] | None:
    r"""Return the parts of a union such as `A \cup B`, or of inequalities such as `x<1, x>2`.

    All inequalities must have the same variable. Returns None for other texts.
    """
    parts = split_top(text.replace(r"\cup", "∪"), "∪")
    if len(parts) > 1:
        return parts
    conditions = split_list(text) or []
    letters = {
        inequality[0] if (inequality := parse_inequality(part)) else None for part in conditions
    }
    return conditions if len(letters) == 1 and None not in letters else None
