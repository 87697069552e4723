"""The answer that a text states: in a box, between tags, or behind "the answer is"."""

from __future__ import annotations

import re

from weft.host.verifiers._latex import braced

BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=[{\w\\-])")
MOST_BOXES = 20  # that are looked at, from the last one
GAP = r"(?:[\s$,;.]|\\[()\[\],;]|\\q?quad)*"
# between the boxes of one answer
JOINT = re.compile(rf"{GAP}(?:and|or|\\text\{{\s*(?:and|or)\s*\}})?{GAP}")
MOST_JOINT = 40  # characters of it
SAID = re.compile(r"(?:final answer|answer)\s*(?:is|are|:|=)[\s*:]*(?=\S)", re.IGNORECASE)
NEGATED = re.compile(r"not\b(?:.{0,80}?\bbut\s+(?:rather\s+)?(?=\S))?", re.IGNORECASE)
FORMULA = re.compile(r"\s*(?:\$\$?(.+?)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\])", re.DOTALL)
# between formulas that are one answer
NEXT = re.compile(r"\s*(?:,\s*(?:and\s|or\s)?|and\s|or\s)\s*(?=\$|\\[(\[])")
ENDED = re.compile(
    r"\.(?:\s|$)|[,;]?\s+(?:because|since|as|so|which|where|when|for)\s", re.IGNORECASE
)


def boxes(text: str) -> int:
    """How many boxes a text has."""
    return len(BOX.findall(text))


def boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}` (braces balanced) or `\boxed 5`, None where there is
    none; several side by side are a list.
    """
    answer: list[str] = []
    begin = 0  # of the box that comes next
    for match in reversed(list(BOX.finditer(text))[-MOST_BOXES:]):
        rest = text[match.end() :]
        in_braces = rest.startswith("{")
        if in_braces:
            inside = braced(rest)
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


def said(text: str) -> str | None:
    """What stands in the last `<answer>`, or follows the last "answer is" or "Answer:": the
    formulas that this begins with, or its words up to the end of the sentence. None where nobody
    says so, and nothing ("") where it only says what it is not.
    """
    rest = _tagged(text) or ""
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
    formulas = _formulas(rest)
    if formulas:
        return formulas
    line = rest.replace("**", "").strip().split("\n", 1)[0]
    return ENDED.split(line, maxsplit=1)[0].lstrip(" *_`").rstrip(" .*_`") or None


def _tagged(text: str) -> str | None:
    end = text.rfind("</answer>")
    begin = text.rfind("<answer>", 0, max(end, 0))
    return text[begin + len("<answer>") : end] if 0 <= begin < end else None


def _formulas(text: str) -> str | None:
    """The formulas that a text begins with, as a list."""
    found = []
    at = 0
    while match := FORMULA.match(text, at):
        found.append(next(group for group in match.groups() if group is not None).strip())
        joint = NEXT.match(text, match.end())
        if joint is None:
            break
        at = joint.end()
    return ", ".join(found) or None
