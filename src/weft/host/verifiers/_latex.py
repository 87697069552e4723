"""Mathematical answers as people and models write them in LaTeX: one plain form for each, and its numeric value."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction

WORDS = "left|right|big|Big|bigg|Bigg|displaystyle|limits|quad|qquad"
AND = re.compile(
    r",?\s*\\(?:text|mbox|mathrm)\{[\s,]*(?:and|or)[\s,]*\},?\s*"
    r"|(?<=[\w)}\]$]),?\s+(?:and|or)\s+|(?<=[\d)}\]]),?\s*(?:and|or)\s*(?=[-\d\\(])"
)
NAMED = re.compile(
    r"\s*(\\?[A-Za-z]+(?:_\{?\w+\}?)?(?:\s*\([a-z](?:,\s*[a-z])*\))?|\([A-Za-z](?:,\s*[A-Za-z])+\))\s*(?:=(?!=)|\\in(?![A-Za-z]))"
)
SUCH_THAT = re.compile(r"^\\\{\s*[a-z]\s*(?:\\in\s*\\mathbb\{?R\}?\s*)?(?:\\mid|:|\|)\s*(.+?)\s*\\\}$")
WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
SIZES = re.compile(r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|limits)(?![A-Za-z])\.?")
NUMBER = re.compile(r"([-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)(?:/(\d+))?")
FUNCTION_OF_DEGREES = re.compile(r"\\?(sin|cos|tan)\s*[({]?\s*([\d.]+)\s*(?:\^\{?\\circ\}?|°|\\degree)\s*[)}]?")
DROPPED = re.compile(rf"(?<!\\)\\(?:(?:{WORDS})(?![A-Za-z])|boxed|[\s!,;:])|~|\\?\$|\\?%")
UNIT = re.compile(r"(?<=[\d})])\s*\\(?:text|mbox|mathrm|textrm)\{\s*[A-Za-z][^{}]*\}(?:\^\{?\d\}?)?$")
UNITS = (
    "cm|mm|km|ft|in|yd|mi|kg|mg|lb|lbs|oz|ml|cl|hr|hrs|min|sec|mph|kmh|kph|pm|am|cents?|dollars?|euros?|percent|degrees?|radians?|"
    "units?|square|cubic|meters?|metres?|inch(?:es)?|feet|foot|miles?|yards?|hours?|minutes?|seconds?|days?|weeks?|months?|"
    "years?|times|people|ways|sq|th|st|nd|rd"
)
# A unit stands behind a number: a known one, or a word of four letters or more behind a blank.
PLAIN_UNIT = re.compile(
    rf"(?<=\d)(?:\s*(?:{UNITS})(?![A-Za-z])|\s+[A-Za-z]{{4,}}(?![A-Za-z]))[A-Za-z ./]*(?:\^\{{?\d\}}?)?$"
)
WRAPPED = re.compile(r"\\(?:text|mbox|mathrm|mathbf|textbf|textrm|operatorname)\{([^{}]*)\}")
NAMES = {
    r"\dfrac": r"\frac", r"\tfrac": r"\frac", r"\cfrac": r"\frac", r"\infty": "inf", r"\pi": "pi", r"\cdot": "*",
    r"\times": "*", r"\div": "/", r"\leq": "<=", r"\le": "<=", r"\geq": ">=", r"\ge": ">=", r"\neq": "!=", r"\ne": "!=",
    r"\lbrace": r"\{", r"\rbrace": r"\}", r"\lparen": "(", r"\rparen": ")", "π": "pi", "∞": "inf", "√": r"\sqrt",
    "−": "-", "×": "*", "·": "*", "÷": "/", "≤": "<=", "≥": ">=",
}  # fmt: skip
NAME = re.compile("|".join(rf"{re.escape(name)}(?![A-Za-z])" for name in sorted(NAMES, key=len, reverse=True)))
FUNCTIONS: Mapping[str, Callable[[float], float]] = {
    "sin": math.sin, "cos": math.cos, "tan": math.tan, "ln": math.log, "log": math.log10, "exp": math.exp,
}  # fmt: skip
KNOWN = (r"\frac", r"\sqrt", *(rf"\{name}" for name in FUNCTIONS), "pi", "sqrt", *FUNCTIONS)
MOST_DEEP = 50


def tidy(answer: str) -> str:
    """An answer in its own LaTeX, without what says nothing: dollar signs, sizes of brackets, spacing. Commas part members
    only, as do "and" and "or" between them."""
    text = answer.strip()
    while len(text) > 1 and text[0] == text[-1] == "$":
        text = text[1:-1].strip()
    text = SIZES.sub("", text.rstrip(".")).replace(r"\lbrace", r"\{").replace(r"\rbrace", r"\}")
    text = re.sub(r",\\!\s*|(?<=\d)\{,\}(?=\d)", ",", text)
    text = re.sub(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])", lambda match: match.group().replace(",", ""), text)
    text = re.sub(r"(?<!\\)\\[!,;: ]|~|\\q?quad(?![A-Za-z])", " ", text)
    text = SUCH_THAT.sub(r"\1", AND.sub(", ", text).strip())
    return re.sub(r"(?<![\w.])(\d+)\s+(\d+/\d+)(?![\w.])", r"(\1+\2)", text.replace(r"\varnothing", r"\emptyset"))


def named(text: str) -> tuple[str | None, str]:
    """(what stands before "=" or "is in", in plain form, what stands behind it): x=5 answers with 5."""
    match = NAMED.match(text)
    return (plain(match[1]), text[match.end() :].strip()) if match else (None, text)


def is_formula(text: str) -> bool:
    """Whether a text holds no words beside the names of functions."""
    return not any(word not in FUNCTIONS and word not in ("sqrt", "pi", "inf") for word in WORD.findall(text))


def plain(answer: str) -> str:
    """One spelling of a tidy answer: no spacing, units, dollar or percent signs; fractions and roots with braces."""
    text = answer.strip().strip("$").rstrip(".").strip()
    text = FUNCTION_OF_DEGREES.sub(r"\\\1(\2*pi/180)", text)
    text = re.sub(r"\^\{?\\circ\}?|°|\\degree", "", text)
    text = UNIT.sub("", text)
    text = WRAPPED.sub(lambda match: match.group(1).strip(), text)
    text = DROPPED.sub(" ", text)
    text = NAME.sub(lambda match: NAMES[match.group()], text)
    text = PLAIN_UNIT.sub("", text.strip())
    text = re.sub(r"\s+", "", text)
    text = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac(\d|[a-z])\{", r"\\frac{\1}{", text)
    text = re.sub(r"(\\frac\{[^{}]*\})(\d|[a-z])", r"\1{\2}", text)
    text = re.sub(r"\\sqrt(\d+|[a-z])", r"\\sqrt{\1}", text)
    text = re.sub(r"(?<![\w}])(\d+)\\frac\{(\d+)\}\{(\d+)\}", r"(\1+\\frac{\2}{\3})", text)  # 1\frac{1}{2} is 3/2
    text = re.sub(r"_\{?(\w+)\}?", r"_\1", text)
    return re.sub(r"^\(([A-Za-z])\)$", r"\1", text)  # choice (C)


def exact(text: str) -> Fraction | None:
    """The value of a number in plain form, decimal point and fraction bar included; None for anything else."""
    match = NUMBER.fullmatch(text)
    if match is None:
        return None
    top, bottom = Fraction(match[1]), Fraction(match[2] or 1)
    return top / bottom if bottom else None


def split_top(text: str, separator: str) -> list[str]:
    """The parts of a text between separators that stand in no bracket."""
    parts, depth, start = [], 0, 0
    for index, sign in enumerate(text):
        depth += (sign in "([{") - (sign in ")]}")
        if depth == 0 and text.startswith(separator, index):
            parts.append(text[start:index])
            start = index + len(separator)
    return [*parts, text[start:]]


def value(text: str, seed: int = 0) -> float | None:
    """The value of an expression in plain form, with every letter standing for a fixed number that `seed` picks.

    Two expressions that agree for two seeds are the same function of their letters. None where the text is no expression or
    has no finite real value.
    """
    try:
        parser = _Parser(text, seed)
        number = parser.sum(0)
        return number if parser.done and math.isfinite(number) else None
    except (_Syntax, ArithmeticError, ValueError, TypeError):
        return None


class _Syntax(Exception):
    """The text is no expression."""


TOKEN = re.compile(r"\d+\.?\d*(?:[eE]\d+)?|\.\d+|\\?[A-Za-z]+|[-+*/^(){}\[\]!|]")


class _Parser:
    """sum = product (+|- product)*; product = power ((*|/)? power)*; power = atom (^ atom)? !*."""

    def __init__(self, text: str, seed: int) -> None:
        self._tokens = [token for match in TOKEN.finditer(text) for token in _letters(match.group())]
        if "".join(self._tokens) != text:
            raise _Syntax
        self._seed, self._at = seed, 0

    @property
    def done(self) -> bool:
        return self._at == len(self._tokens)

    def _peek(self) -> str:
        return "" if self.done else self._tokens[self._at]

    def _take(self, *wanted: str) -> str:
        token = self._peek()
        if wanted and token not in wanted:
            return ""
        self._at += 1
        return token

    def _need(self, wanted: str) -> None:
        if self._take(wanted) != wanted:
            raise _Syntax

    def sum(self, depth: int) -> float:
        if depth > MOST_DEEP:
            raise _Syntax
        total = self._product(depth)
        while sign := self._take("+", "-"):
            total += self._product(depth) if sign == "+" else -self._product(depth)
        return total

    def _product(self, depth: int) -> float:
        sign = 1.0
        while minus := self._take("-", "+"):
            sign = -sign if minus == "-" else sign
        total = sign * self._power(depth)
        while self._peek() and self._peek() not in "+-)}]|":
            if self._take("/"):
                total /= self._power(depth)
            else:
                self._take("*")
                total *= self._power(depth)
        return total

    def _power(self, depth: int) -> float:
        base = self._atom(depth)
        while self._take("!"):
            if not (base.is_integer() and 0 <= base <= 170):
                raise _Syntax
            base = float(math.factorial(int(base)))
        if self._take("^"):
            sign = -1.0 if self._take("-") else 1.0
            base = base ** (sign * self._atom(depth))
        if isinstance(base, complex):
            raise _Syntax
        return float(base)

    def _group(self, opening: str, depth: int) -> float:
        self._need(opening)
        inside = self.sum(depth + 1)
        self._need({"(": ")", "{": "}", "[": "]", "|": "|"}[opening])
        return inside

    def _atom(self, depth: int) -> float:
        token = self._peek()
        if token in ("(", "{", "["):
            return self._group(token, depth)
        if token == "|":
            return abs(self._group("|", depth))
        self._take()
        if token[:1].isdigit() or token[:1] == ".":
            return float(token)
        if token == r"\frac":
            return self._group("{", depth) / self._group("{", depth)
        if token in (r"\sqrt", "sqrt"):
            degree = self._group("[", depth) if self._peek() == "[" else 2.0
            radicand = self._group("{" if self._peek() == "{" else "(", depth)
            if radicand < 0 and degree == 3.0:
                return -((-radicand) ** (1.0 / 3.0))
            root = radicand ** (1.0 / degree)
            if isinstance(root, complex):
                raise _Syntax
            return float(root)
        if token.lstrip("\\") in FUNCTIONS:
            return FUNCTIONS[token.lstrip("\\")](self._power(depth + 1))
        if token == "pi":
            return math.pi
        if len(token) == 1 and token.isalpha():
            return _letter(token, self._seed)
        raise _Syntax


def _letters(token: str) -> list[str]:
    """Letters in a row, cut into names that are known and variables: xy is x times y, and \\sinx the sine of x."""
    if not token.lstrip("\\").isalpha():
        return [token]
    cut = []
    while token:
        name = next((known for known in KNOWN if token.startswith(known)), token if token[0] == "\\" else token[0])
        cut.append(name)
        token = token[len(name) :]
    return cut


def _letter(name: str, seed: int) -> float:
    """A fixed number between 1 and 3 for a variable, below 0 for every third seed."""
    digest = hashlib.blake2b(f"{seed}|{name}".encode(), digest_size=4).digest()
    size = 1.0 + 2.0 * int.from_bytes(digest, "little") / 2**32
    return -size if seed % 3 == 0 else size
