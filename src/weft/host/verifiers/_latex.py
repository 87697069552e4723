"""Normalisation of mathematical answers in LaTeX, in two steps, and parsing of answers with members.

`tidy` removes markup that has no mathematical meaning; its result is still LaTeX. `to_plain_form`
then rewrites equivalent notations in the same way; its result is called a normalized answer.
"""

from __future__ import annotations

import re
from fractions import Fraction

from weft.host.verifiers._expression import FUNCTIONS

WORDS = "left|right|big|Big|bigg|Bigg|displaystyle|limits|quad|qquad"
STYLE = re.compile(r"\\(?:boldsymbol|bm|mathbf|textbf|mathit|textit)(?![A-Za-z])\s*")
AND = re.compile(
    r",?\s*\\(?:text|mbox|mathrm)\{[\s,]*(?:and|or)[\s,]*\},?\s*"
    r"|(?<=[\w)}\]$]),?\s+(?:and|or)\s+|(?<=[\d)}\]]),?\s*(?:and|or)\s*(?=[-\d\\(])"
)
NAME_PREFIX = re.compile(
    r"\s*(\\?[A-Za-z]+(?:_\{?\w+\}?)?(?:\s*\([a-z](?:,\s*[a-z])*\))?|\([A-Za-z](?:,\s*[A-Za-z])+\))\s*(?:=(?!=)|\\in(?![A-Za-z]))"
)
SUCH_THAT = re.compile(
    r"^\\\{\s*[a-z]\s*(?:\\in\s*\\mathbb\{?R\}?\s*)?(?:\\mid|:|\|)\s*(.+?)\s*\\\}$"
)
# A word: at least three letters in a row, or a short English word.
WORD = re.compile(
    r"(?<![\\A-Za-z])(?:[A-Za-z]{3,}|(?:am|an|as|at|be|by|do|he|if|in|is|it|me|my|no|of|on|or|so|to|up|us|we)(?![A-Za-z]))",
    re.IGNORECASE,
)
CHOOSE = re.compile(r"\{([^{}]*?)\s*\\choose\s*([^{}]*)\}|^([^{}\\]*?)\s*\\choose\s*([^{}\\]*)$")
SIZES = re.compile(r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|limits)(?![A-Za-z])\.?")
NUMBER = re.compile(r"([-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{1,3})?)(?:/(\d+))?")
HEXADECIMAL = re.compile(r"0[xX][0-9A-Fa-f]{1,200}")
MAX_DIGITS = 1000  # maximum number of characters of a number
REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*(?:\{(\d+)\}|(\d))")
FUNCTION_OF_DEGREES = re.compile(
    r"\\?(sin|cos|tan|sec|csc|cot)\s*[({]?\s*([\d.]+)\s*(?:\^\s*\{?\s*\\circ\s*\}?|°|\\degree)\s*[)}]?"
)
IGNORED = re.compile(rf"(?<!\\)\\(?:(?:{WORDS})(?![A-Za-z])|boxed|[\s!,;:])|~|\\?\$|\\?%")
# Negative lookahead for words that change the meaning of an answer; a unit has none of them.
NO_WORDS = (
    r"(?![^{}]*\b(?:half|halves|thirds?|quarters?|and|or|if|when|where|for|is|are|not|mod|remainder|R|even|odd|dozens?|"
    r"matrix|matrices|more|less|than)\b)"
)
UNIT = re.compile(
    # 10\ \Omega
    rf"(?<=[\d}})])\s*(?:\\(?:text|mbox|mathrm|textrm)\{{{NO_WORDS}\s*[A-Za-z][^{{}}]*\}}"
    r"(?:\^\{?\d\}?)?|\\Omega)$"
)
SCALE = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
SCALED = re.compile(
    rf"(?<=\d)\s*(?:\\(?:text|mbox|mathrm|textrm)\{{\s*)?({'|'.join(SCALE)})\b([^{{}}]*\}})?",
    re.IGNORECASE,
)
UNITS = (
    "cm|mm|km|ft|in|yd|mi|kg|mg|lb|lbs|oz|ml|cl|hr|hrs|min|sec|mph|kmh|kph|pm|am|cents?|dollars?|euros?|percent|degrees?|radians?|"
    "units?|square|cubic|meters?|metres?|inch(?:es)?|feet|foot|miles?|yards?|hours?|minutes?|seconds?|days?|weeks?|months?|"
    "years?|times|people|ways|sq|th|st|nd|rd"
)
# Standard spelling of each unit -> patterns of its other spellings. Answers in different units
# differ.
SPELLINGS = {
    "cm": "centimeters? centimetres?",
    "mm": "millimeters? millimetres?",
    "km": "kilometers? kilometres?",
    "m": "meters? metres?",
    "ft": "feet foot",
    "in": "inch inches",
    "yd": "yards?",
    "mi": "miles?",
    "kg": "kilograms?",
    "g": "grams?",
    "mg": "milligrams?",
    "lb": "lbs pounds?",
    "oz": "ounces?",
    "ml": "milliliters?",
    "l": "liters? litres?",
    "hr": "h hrs hours?",
    "min": "minutes?",
    "sec": "s seconds?",
    "day": "days",
    "week": "weeks",
    "month": "months",
    "year": "years?",
    "cent": "cents",
    "dollar": "dollars",
    "euro": "euros",
    "percent": "",
    "degree": "degrees",
    "radian": "radians",
    "am": "",
    "pm": "",
}
MEASURE = re.compile(
    r"(?<=[\d})])\s*(square|sq|cubic)?\.?\s*([A-Za-z]+)\s*(?:\^\s*\{?\s*(\d)\s*\}?)?\.?$"
)
RATES = r"(?:[kcm]?m|ft|mi|[km]?g|l|L|mol|rad|J|N|V|W)\s*/\s*(?:s|h|hr|min|[cm]?m|k?g|l|L|mol|K)"
# A unit follows a number: a known unit, or, after a blank, a rate or a word of at least four
# letters.
PLAIN_UNIT = re.compile(
    rf"(?<=\d){NO_WORDS}(?:\s*(?:{UNITS})(?![A-Za-z])|\s+(?:{RATES}|[A-Za-z]{{4,}})(?![A-Za-z]))"
    r"[A-Za-z ./]*(?:\^\{?\d\}?)?$"
)
QUANTITY = re.compile(
    rf"(\d+(?:\.\d+)?)\s*({UNITS}|[A-Za-z]{{4,}})(?![A-Za-z])\.?[\s,]*(?:and\s)?\s*"
)
WRAPPED = re.compile(r"\\(?:text|mbox|mathrm|textrm|operatorname)\{([^{}]*)\}")
SUBSCRIPT = re.compile(r"\s*_\s*(?:\{([^{}]*)\}|(\d+|[A-Za-z]))")
# Name or sign -> its spelling in plain form
NAMES = {
    r"\dfrac": r"\frac",
    r"\tfrac": r"\frac",
    r"\cfrac": r"\frac",
    r"\infty": "inf",
    r"\pi": "pi",
    r"\cdot": "*",
    r"\times": "*",
    r"\div": "/",
    r"\leq": "<=",
    r"\le": "<=",
    r"\geq": ">=",
    r"\ge": ">=",
    r"\neq": "!=",
    r"\ne": "!=",
    r"\lbrace": r"\{",
    r"\rbrace": r"\}",
    r"\lparen": "(",
    r"\rparen": ")",
    "π": "pi",
    "∞": "inf",
    "√": r"\sqrt",
    "−": "-",
    "×": "*",
    "·": "*",
    "÷": "/",
    "≤": "<=",
    "≥": ">=",
}
NAME = re.compile(
    "|".join(rf"{re.escape(name)}(?![A-Za-z])" for name in sorted(NAMES, key=len, reverse=True))
)


def extract_braced(text: str) -> str | None:
    """Return the content of the braces at the start of `text`, or None if they are not closed."""
    depth = 0
    for index, sign in enumerate(text):
        depth += (sign == "{") - (sign == "}")
        if depth == 0:
            return text[1:index]
    return None


def tidy(answer: str) -> str:
    """Return a LaTeX answer without markup that has no mathematical meaning.

    Dollar signs, sizes of brackets, bold type and spacing are removed. Commas between digit groups
    are removed, and the words "and" and "or" between the members of a list become commas, so that
    every comma separates two members.
    """
    # Marks around the answer, and styles
    text = answer.strip()
    while len(text) > 1 and text[0] == text[-1] == "$":
        text = text[1:-1].strip()
    text = SIZES.sub("", text.rstrip(".")).replace(r"\lbrace", r"\{").replace(r"\rbrace", r"\}")
    text = _remove_style(text)
    # Commas in numbers, and spacing
    text = re.sub(r",\\!\s*|(?<=\d)\{,\}(?=\d)", ",", text)
    text = re.sub(
        r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])",
        lambda match: match.group().replace(",", ""),
        text,
    )
    text = re.sub(r"(?<!\\)\\[!,;: ]|~|\\q?quad(?![A-Za-z])", " ", text)
    # Words, and other spellings of operations
    text = SCALED.sub(_expand_scale, text)
    text = CHOOSE.sub(r"\\binom{\1\3}{\2\4}", text)
    text = SUCH_THAT.sub(r"\1", AND.sub(", ", text).strip())
    return re.sub(
        r"(?<![\w.])(\d+)\s+(\d+/\d+)(?![\w.])",
        r"(\1+\2)",
        text.replace(r"\varnothing", r"\emptyset"),
    )


def _expand_scale(match: re.Match[str]) -> str:
    r"""Replace a scale word: `5\text{ million dollars}` becomes `5 \cdot 10^6\text{ dollars}`."""
    rest = (match[2] or "").removesuffix("}").strip()
    return rf" \cdot 10^{SCALE[match[1].lower()]}" + (rf"\text{{ {rest}}}" if rest else "")


def _remove_style(text: str) -> str:
    r"""Remove bold and italic type: `\boldsymbol{7}` and `\bm 7` become 7."""
    match = STYLE.search(text)
    while match:
        rest = text[match.end() :]
        content = extract_braced(rest) if rest.startswith("{") else None
        if content is not None:
            rest = f"{content} {rest[len(content) + 2 :]}"
        text = f"{text[: match.start()]} {rest}".strip()
        match = STYLE.search(text)
    return text


def split_name(text: str) -> tuple[str | None, str]:
    r"""Split a text such as `x=5` or `x \in A` into a normalized name and a value.

    For example, these texts have the name `x`, and the values `5` and `A`. The name is None if the
    text does not begin with one; the value is then the whole text.
    """
    match = NAME_PREFIX.match(text)
    if match and match[1].count("{") != match[1].count("}"):
        return None, text  # the bound of a sum
    if match:
        return (to_plain_form(match[1]), text[match.end() :].strip())
    return (None, text)


def is_formula(text: str) -> bool:
    """Return whether a text contains no words, except names of functions and constants."""
    return not any(
        word not in FUNCTIONS and word not in ("sqrt", "pi", "inf") for word in WORD.findall(text)
    )


def parse_quantities(text: str) -> list[tuple[Fraction, str]] | None:
    """Return the number and the unit of each part of a quantity such as "3 hours 20 minutes".

    Returns None if the text has fewer than two parts, or contains anything else.
    """
    unwrapped = WRAPPED.sub(r" \1 ", text).strip()
    parts = []
    position = 0
    while match := QUANTITY.match(unwrapped, position):
        parts.append((Fraction(match[1]), match[2].lower()))
        position = match.end()
    return parts if len(parts) > 1 and position == len(unwrapped) else None


def measure(text: str) -> tuple[str, int] | None:
    """Return the unit of measure at the end of an answer, and the unit's power.

    The unit is in its standard spelling, such as "cm". The power is 2 for square units and 3 for
    cubic ones. `text` is the result of `tidy`. Returns None if the answer does not end in a known
    unit.
    """
    match = MEASURE.search(WRAPPED.sub(r" \1", text).strip())
    if match is None:
        return None
    power = {"square": 2, "sq": 2, "cubic": 3}.get(match[1] or "", int(match[3] or 1))
    for unit, others in SPELLINGS.items():
        if re.fullmatch("|".join([unit, *others.split()]), match[2].lower()):
            return unit, power
    return None


def are_spelled_alike(first: str, second: str) -> bool:
    r"""Return whether two normalized answers are equal, ignoring letter case.

    Case is not ignored if it has a meaning in one of the answers, as in `\Delta`, which is not
    `\delta`. `first` and `second` are results of `to_plain_form`.
    """
    if first == second:
        return True
    return first.casefold() == second.casefold() and not (
        _is_case_significant(first) or _is_case_significant(second)
    )


def _is_case_significant(text: str) -> bool:
    """Return whether the letter case of a formula has a meaning.

    Case has a meaning in `A-a`, where a letter occurs in both cases, and in `\\Delta`, which is not
    `\\delta`.
    """
    if re.search(r"\\[A-Z]", text):
        return True
    letters = set(re.findall("[A-Za-z]", re.sub(r"[A-Za-z]{3,}", " ", text)))
    return any(letter.swapcase() in letters for letter in letters)


def to_plain_form(answer: str) -> str:
    """Return an answer in normalized form, in which equivalent notations look the same.

    `answer` is the result of `tidy`. Units, dollar signs, percent signs and LaTeX spacing are
    removed, and digit groups are joined. Other white space is kept only between two numbers. The
    arguments of fractions and roots are in braces.
    """
    # Degrees, units and names
    text = answer.strip().strip("$").rstrip(".").strip()
    text = FUNCTION_OF_DEGREES.sub(r"\\\1(\2*pi/180)", text)
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?|°|\\degree", "", text)
    text = UNIT.sub("", text)
    text = WRAPPED.sub(lambda match: match.group(1).strip(), text)
    text = IGNORED.sub(" ", text)
    text = NAME.sub(lambda match: NAMES[match.group()], text)
    text = REPEATING.sub(_convert_repeating_decimal, text)
    text = PLAIN_UNIT.sub("", text.strip())
    # Subscripts, digit groups, blanks and braces
    text = SUBSCRIPT.sub(lambda match: f"_{{{(match[1] or match[2] or '').strip()}}}", text)
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(
        r"(?<![\d.])\d{1,3}(?:\s\d{3})+(?!\d)", lambda match: re.sub(r"\s", "", match.group()), text
    )
    text = re.sub(r"(?<![\d.])\s+|\s+(?![\d.])", "", text)
    text = re.sub(r"\\frac(\d|[a-z])\{", r"\\frac{\1}{", text)
    text = re.sub(r"(\\frac\{[^{}]*\})(\d|[a-z])", r"\1{\2}", text)
    text = re.sub(r"\\sqrt(\[[^\]]*\])?(\d+|[a-z])", r"\\sqrt\1{\2}", text)
    # Mixed numbers: 1\frac{1}{2} is 3/2
    text = re.sub(r"(?<![\w}])(\d+)\\frac\{(\d+)\}\{(\d+)\}", r"(\1+\\frac{\2}{\3})", text)
    return re.sub(r"^\(([A-Za-z])\)$", r"\1", text.removeprefix("+"))  # a choice such as (C)


def _convert_repeating_decimal(match: re.Match[str]) -> str:
    r"""Convert a repeating decimal such as `0.1\overline{6}` to a fraction."""
    whole = match[1] or "0"
    fixed = match[2]
    period = match[3] or match[4]
    scale = 10 ** len(fixed)
    cycle = 10 ** len(period) - 1
    value = Fraction(int(whole + fixed), scale) + Fraction(int(period), scale * cycle)
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def parse_exact(text: str) -> Fraction | None:
    """Return the exact value of a text that is a number, or None for other texts.

    The text is normalized by `to_plain_form`. The number can have a decimal point and a fraction
    bar, or be hexadecimal (0x1F).
    """
    if HEXADECIMAL.fullmatch(text):
        return Fraction(int(text, 16))
    match = NUMBER.fullmatch(text) if len(text) <= MAX_DIGITS else None
    if match is None:
        return None
    top = Fraction(match[1])
    bottom = Fraction(match[2] or 1)
    return top / bottom if bottom else None


def split_top(text: str, separator: str) -> list[str]:
    """Split a text at each `separator` that is outside of all brackets."""
    parts = []
    depth = 0
    start = 0
    for index, sign in enumerate(text):
        depth += (sign in "([{") - (sign in ")]}")
        if depth == 0 and text.startswith(separator, index):
            parts.append(text[start:index])
            start = index + len(separator)
    return [*parts, text[start:]]


OPENING_BRACKETS = ("(", "[")
CLOSING_BRACKETS = (")", "]")
RELATION_SIGNS = {
    r"\leq": "≤",
    r"\le": "≤",
    r"\geq": "≥",
    r"\ge": "≥",
    r"\lt": "<",
    r"\gt": ">",
    "<=": "≤",
    ">=": "≥",
}
RELATION = re.compile(r"\\(?:leq?|geq?|lt|gt)(?:slant)?(?![A-Za-z])|[<>]=")
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
            content = text[len(opening) : -len(closing)]
            if (
                _is_balanced(content)
                and not re.search(r"\\mid|[:|]", content)
                and (opening == r"\{" or "," in content)
            ):
                return content.strip()
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
        text[:1] in OPENING_BRACKETS
        and text[-1] in CLOSING_BRACKETS
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
        r"([<>≤≥])",
        RELATION.sub(lambda match: RELATION_SIGNS[match.group().removesuffix("slant")], text),
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
        is_closed = signs[0] in "≤≥"
        if signs[0] in "<≤":
            return terms[0], ["(", r"-\infty", terms[1], "]" if is_closed else ")"]
        return terms[0], ["[" if is_closed else "(", terms[1], r"\infty", ")"]
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
