"""Answers of verifiers: reference answers in the data, and answers that a text states.

Extraction of the answer that a text states: in a box, in tags, or after "the answer is".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from weft.host.verifiers._latex import extract_braced

COLUMNS = ("answer", "ground_truth", "solution", "target")  # names of the column, in this order
MAX_EXPONENT = 400  # largest exponent of a power or of scientific notation
MAX_DIGITS = 1000  # maximum number of characters of a number

SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
SUPERSCRIPT = re.compile("(?<=[0-9)])[⁻⁺]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
FRACTION_SIGNS = {
    "½": "1/2",
    "⅓": "1/3",
    "⅔": "2/3",
    "¼": "1/4",
    "¾": "3/4",
    "⅕": "1/5",
    "⅖": "2/5",
    "⅗": "3/5",
    "⅘": "4/5",
    "⅙": "1/6",
    "⅚": "5/6",
    "⅛": "1/8",
    "⅜": "3/8",
    "⅝": "5/8",
    "⅞": "7/8",
}
FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}|(\d)\s*(\d))")
# Word -> power of ten
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}

# A minus is a sign unless it follows a word, digit or bracket ("5-3" is a difference). Commas,
# blanks, apostrophes and LaTeX's spaces group three digits ("1,000", "1 000", "1{,}000",
# "1\\,000").
GROUP = r"(?:,|\{,\}|\\,|\\ |,\\!|['’]|[ \u00a0\u2007\u2009\u202f])"
GROUPED = rf"[1-9]\d{{0,2}}(?P<group>{GROUP})\d{{3}}(?:(?P=group)\d{{3}})*(?!\d)"
POWER = r"\s*(?:\^|\*\*)\s*(?:\{{\s*(?P<{0}_braced>[-+]?\d+)\s*\}}|(?P<{0}>[-+]?\d+))"
# The 2 of cm^2, which is not a number
UNIT_POWER = re.compile(r"(?<=[A-Za-z])\s*\^\s*(?:\{\s*-?\d+\s*\}|-?\d+)")
NUMBER = re.compile(
    rf"(?P<root>(?:√|\\sqrt|\bsqrt)\s*[({{]?\s*)?"
    rf"(?P<sign>(?<![\w.)])-)?(?:\\?\$(?P<inner>-(?=\d))?)?"
    rf"(?P<whole>(?:{GROUPED}|\d+)(?:\.\d+)?|\.\d+)"
    rf"(?:[eE](?P<exponent>[-+]?\d+)(?![\w.]*[A-Za-z])"
    rf"|\s*(?:\\times|\\cdot|[x×·*])\s*10{POWER.format('ten')}"
    rf"|{POWER.format('power')})?"
    rf"(?:\s(?P<top>\d+)\s?/\s?(?P<under>\d+)|\s?/\s?(?P<bottom>\d+))?"
    rf"(?:\s+(?P<scale>{'|'.join(SCALES)})\b)?",
    re.IGNORECASE,
)


def find_references(
    columns: Mapping[str, Sequence[Any]], column: str | None, count: int
) -> Sequence[Any]:
    """Return the reference answers in the column `column`, or in the first known answer column.

    If `column` is None, the first of `answer`, `ground_truth`, `solution` and `target` that the
    data have is used. An entry is None if its row has no answer. If there is no such column, all
    `count` entries are None.
    """
    for name in (column,) if column else COLUMNS:
        if name in columns:
            return columns[name]
    return [None] * count


def find_numbers(text: str) -> list[Fraction | None]:
    """Return all numbers in a text in order; unsupported numbers, such as 1/0 or a root, are None.

    Each of these is one number: 1,234.50, 1 000, $5, -7, 3/4, 1 1/2, 1e-05, 10^3, 2.5 x 10^3,
    \\frac{1}{2}, 5 million. The minus sign U+2212 is understood, too.
    """
    return [_parse_match(match) for match in NUMBER.finditer(_normalize_spelling(text))]


def parse_number(text: str) -> Fraction | None:
    """Return the value of a text that consists of one number, or None for any other text."""
    plain = _normalize_spelling(text).strip()
    match = NUMBER.fullmatch(plain)
    return _parse_match(match) if match else None


def _normalize_spelling(text: str) -> str:
    """Return a text with normalized minus signs, superscript digits and fractions.

    Exponents of units are removed, such as the 2 in `cm^2`.
    """
    text = text.replace("\u2212", "-")
    text = SUPERSCRIPT.sub(lambda match: f"^{match.group().translate(SUPERSCRIPTS)}", text)
    text = UNIT_POWER.sub(" ", text)
    text = FRACTION.sub(lambda match: f" {match[1] or match[3]}/{match[2] or match[4]}", text)
    return re.sub(
        f"[{''.join(FRACTION_SIGNS)}]", lambda match: f" {FRACTION_SIGNS[match.group()]}", text
    )


def _parse_match(match: re.Match[str]) -> Fraction | None:
    if match["root"] or len(match.group()) > MAX_DIGITS:
        return None
    value = Fraction(re.sub(GROUP, "", match["whole"]))
    if match["scale"]:
        value *= 10 ** SCALES[match["scale"].lower()]
    exponent = int(match["exponent"] or match["ten"] or match["ten_braced"] or 0)
    power = int(match["power"] or match["power_braced"] or 1)
    if abs(exponent) > MAX_EXPONENT or abs(power) > MAX_EXPONENT:
        return None
    try:
        value = value**power * Fraction(10) ** exponent
        if match["top"]:
            value += Fraction(int(match["top"]), int(match["under"]))
        value /= int(match["bottom"] or 1)
    except ZeroDivisionError:
        return None
    return -value if match["sign"] or match["inner"] else value


BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=[{\w\\-])")
MAX_BOXES = 20  # maximum number of boxes that are examined, counted from the last one
GAP = r"(?:[\s$,;.]|\\[()\[\],;]|\\q?quad)*"
# Text between the boxes of one answer
SEPARATOR = re.compile(rf"{GAP}(?:and|or|\\text\{{\s*(?:and|or)\s*\}})?{GAP}")
MAX_SEPARATOR = 40  # maximum number of characters of that text
STATEMENT = re.compile(r"(?:final answer|answer)\s*(?:is|are|:|=)[\s*:]*(?=\S)", re.IGNORECASE)
NEGATED = re.compile(r"not\b(?:.{0,80}?\bbut\s+(?:rather\s+)?(?=\S))?", re.IGNORECASE)
FORMULA = re.compile(r"\s*(?:\$\$?(.+?)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\])", re.DOTALL)
# Text between the formulas of one answer
FORMULA_SEPARATOR = re.compile(r"\s*(?:,\s*(?:and\s|or\s)?|and\s|or\s)\s*(?=\$|\\[(\[])")
ANSWER_END = re.compile(
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
    contents: list[str] = []
    begin = 0  # start of the following box
    for match in reversed(list(BOX.finditer(text))[-MAX_BOXES:]):
        rest = text[match.end() :]
        in_braces = rest.startswith("{")
        if in_braces:
            content = extract_braced(rest)
        else:
            content = re.split(r"[\s$.]", rest, maxsplit=1)[0]
        if not content:
            continue
        end = match.end() + len(content) + 2 * in_braces
        if contents and not (begin - end <= MAX_SEPARATOR and SEPARATOR.fullmatch(text[end:begin])):
            break
        contents.insert(0, content)
        begin = match.start()
    return ", ".join(dict.fromkeys(contents)) if contents else None


def extract_stated(text: str) -> str | None:
    """Return the answer in the last `<answer>` tag, or after the last "answer is" or "Answer:".

    If the text found there begins with formulas, the answer consists of these formulas. Otherwise,
    it consists of the words up to the end of the sentence. Returns None if the text states no
    answer, and "" if the text only says what the answer is not.
    """
    # Find the statement.
    rest = _extract_tagged(text) or ""
    is_negated = False
    if not rest:
        for match in STATEMENT.finditer(text):
            negation = NEGATED.match(text, match.end())
            if negation and negation.group().lower() == "not":
                is_negated = True
            else:
                rest = text[negation.end() if negation else match.end() :]
    rest = rest.strip()
    if not rest:
        return "" if is_negated else None
    # Extract the answer from it.
    formulas = _extract_formulas(rest)
    if formulas:
        return formulas
    line = rest.replace("**", "").strip().split("\n", 1)[0]
    return ANSWER_END.split(line, maxsplit=1)[0].lstrip(" *_`").rstrip(" .*_`") or None


def _extract_tagged(text: str) -> str | None:
    end = text.rfind("</answer>")
    begin = text.rfind("<answer>", 0, max(end, 0))
    return text[begin + len("<answer>") : end] if 0 <= begin < end else None


def _extract_formulas(text: str) -> str | None:
    """Return the formulas at the beginning of a text, joined by commas.

    Returns None if the text does not begin with a formula.
    """
    formulas = []
    position = 0
    while match := FORMULA.match(text, position):
        formulas.append(next(group for group in match.groups() if group is not None).strip())
        separator = FORMULA_SEPARATOR.match(text, match.end())
        if separator is None:
            break
        position = separator.end()
    return ", ".join(formulas) or None
