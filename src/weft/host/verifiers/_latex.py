"""Mathematical answers as people and models write them in LaTeX: one plain form for each, and its numeric value."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping

WORDS = "left|right|big|Big|bigg|Bigg|displaystyle|limits|quad|qquad"
DROPPED = re.compile(rf"(?<!\\)\\(?:(?:{WORDS})(?![A-Za-z])|boxed|[\s!,;:])|~|\\?\$|\\?%")
UNIT = re.compile(r"(?<=[\d})])\s*\\(?:text|mbox|mathrm|textrm)\{\s*[A-Za-z][^{}]*\}(?:\^\{?\d\}?)?$")
PLAIN_UNIT = re.compile(r"(?<=\d)\s*(?!pi\b|sqrt\b|inf\b)[A-Za-z]{2,}[A-Za-z .]*(?:\^\{?\d\}?)?$")
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


def plain(answer: str) -> str:
    """One spelling of an answer: no spacing, units, dollar or percent signs; fractions and roots with braces."""
    text = answer.strip().strip("$").rstrip(".").strip()
    text = re.sub(r"\^\{?\\circ\}?|°|\\degree", "", text)
    text = UNIT.sub("", text)
    text = WRAPPED.sub(lambda match: match.group(1).strip(), text)
    text = DROPPED.sub(" ", text)
    text = NAME.sub(lambda match: NAMES[match.group()], text)
    text = PLAIN_UNIT.sub("", text.strip())
    text = re.sub(r"(?<=\d)\{,\}(?=\d)", ",", text)
    text = re.sub(
        r"(?<![\d.,])(\d{1,3}(?:,\s*\d{3})+)(?![\d,])", lambda match: re.sub(r",\s*", "", match.group()), text
    )
    text = re.sub(r"\s+", "", text)
    text = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac(\d|[a-z])\{", r"\\frac{\1}{", text)
    text = re.sub(r"(\\frac\{[^{}]*\})(\d|[a-z])", r"\1{\2}", text)
    text = re.sub(r"\\sqrt(\d+|[a-z])", r"\\sqrt{\1}", text)
    text = re.sub(r"(?<![\w}])(\d+)\\frac\{(\d+)\}\{(\d+)\}", r"(\1+\\frac{\2}{\3})", text)  # 1\frac{1}{2} is 3/2
    text = re.sub(r"^\(([A-Za-z])\)$", r"\1", text)  # choice (C)
    return re.sub(r"^[A-Za-z](?:_\{?\w+\}?)?(?:\([a-z]\))?=(?!=)", "", text)  # x=5 answers with 5


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


TOKEN = re.compile(r"\d+\.?\d*|\.\d+|\\?[A-Za-z]+|[-+*/^(){}\[\]!|]")


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
    """A fixed number between 1 and 3 for a variable."""
    digest = hashlib.blake2b(f"{seed}|{name}".encode(), digest_size=4).digest()
    return 1.0 + 2.0 * int.from_bytes(digest, "little") / 2**32
