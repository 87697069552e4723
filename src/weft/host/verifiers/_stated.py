"""Extraction of the answer that a text states: in a box, in tags, or after "the answer is"."""

from __future__ import annotations

import re

from weft.host.verifiers._latex import extract_braced

BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=[{\w\\-])")
MOST_BOXES = 20  # maximum number of boxes that are examined, counted from the last one
GAP = r"(?:[\s$,;.]|\\[()\[\],;]|\\q?quad)*"
# Text between the boxes of one answer
JOINT = re.compile(rf"{GAP}(?:and|or|\\text\{{\s*(?:and|or)\s*\}})?{GAP}")
MOST_JOINT = 40  # maximum number of characters of that text
SAID = re.compile(r"(?:final answer|answer)\s*(?:is|are|:|=)[\s*:]*(?=\S)", re.IGNORECASE)
NEGATED = re.compile(r"not\b(?:.{0,80}?\bbut\s+(?:rather\s+)?(?=\S))?", re.IGNORECASE)
FORMULA = re.compile(r"\s*(?:\$\$?(.+?)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\])", re.DOTALL)
# Text between the formulas of one answer
NEXT = re.compile(r"\s*(?:,\s*(?:and\s|or\s)?|and\s|or\s)\s*(?=\$|\\[(\[])")
ENDED = re.compile(
    r"\.(?:\s|$)|[,;]?\s+(?:because|since|as|so|which|where|when|for)\s", re.IGNORECASE
)


def count_boxes(text: str) -> int:
    """Return the number of boxed expressions in a text."""
    return len(BOX.findall(text))


def extract_boxed(text: str) -> str | None:
    r"""Return the content of the last box in a text, or None for a text without a box.

    A box is `\boxed{...}` or `\boxed 5`. Braces in the content are balanced. The contents of
    adjacent boxes are joined into one list.
    """
    answer: list[str] = []
    begin = 0  # start of the following box
    for match in reversed(list(BOX.finditer(text))[-MOST_BOXES:]):
        rest = text[match.end() :]
        in_braces = rest.startswith("{")
        if in_braces:
            inside = extract_braced(rest)
        else:
            inside = re.split(r"[\s$.]", rest, maxsplit=1)[0]
        if not inside:
            continue
        end = match.end() + len(inside) + 2 * in_braces
        if answer and not (begin - end <= MOST_JOINT and JOINT.fullmatch(text[end:begin])):
            break
        answer.insert(0, inside)
        begin = match.start()
    return ", ".join(dict.fromkeys(answer)) if answer else None


def extract_stated(text: str) -> str | None:
    """Return the answer in the last `<answer>` tag, or after the last "answer is" or "Answer:".

    If the text found there begins with formulas, the answer consists of these formulas. Otherwise,
    it consists of the words up to the end of the sentence. Returns None if the text states no
    answer, and "" if the text only says what the answer is not.
    """
    # Find the statement.
    rest = _extract_tagged(text) or ""
    negated = False
    if not rest:
        for match in SAID.finditer(text):
            other = NEGATED.match(text, match.end())
            if other and other.group().lower() == "not":
                negated = True
            else:
                rest = text[other.end() if other else match.end() :]
    rest = rest.strip()
    if not rest:
        return "" if negated else None
    # Extract the answer from it.
    formulas = _extract_formulas(rest)
    if formulas:
        return formulas
    line = rest.replace("**", "").strip().split("\n", 1)[0]
    return ENDED.split(line, maxsplit=1)[0].lstrip(" *_`").rstrip(" .*_`") or None


def _extract_tagged(text: str) -> str | None:
    end = text.rfind("</answer>")
    begin = text.rfind("<answer>", 0, max(end, 0))
    return text[begin + len("<answer>") : end] if 0 <= begin < end else None


def _extract_formulas(text: str) -> str | None:
    """Return the formulas at the beginning of a text, joined by commas.

    Returns None if the text does not begin with a formula.
    """
    formulas = []
    at = 0
    while match := FORMULA.match(text, at):
        formulas.append(next(group for group in match.groups() if group is not None).strip())
        joint = NEXT.match(text, match.end())
        if joint is None:
            break
        at = joint.end()
    return ", ".join(formulas) or None
