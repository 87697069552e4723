"""Parser of expressions in normalized answers (`_latex.to_plain_form`)."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

# Node of an expression tree: ("number", Fraction), ("letter", name), ("constant", name), or the
# name of an operation and its operands; operands of "sum" and "product" are (1 or -1, node), where
# -1 means subtracted or divided.
Node = tuple[Any, ...]

MAX_CHARACTERS = 1000  # maximum length of an expression
MAX_DEPTH = 50  # maximum nesting
MAX_EXPONENT = 400  # largest exponent of a number such as 1e400
FUNCTIONS = (
    "sin",
    "cos",
    "tan",
    "sec",
    "csc",
    "cot",
    "arcsin",
    "arccos",
    "arctan",
    "ln",
    "log",
    "exp",
)
INVERSES = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}
CONSTANTS = {"pi": "pi", r"\pi": "pi", "e": "e", "i": "i"}
GREEK = (
    "alpha",
    "beta",
    "gamma",
    "delta",
    "epsilon",
    "varepsilon",
    "zeta",
    "eta",
    "theta",
    "vartheta",
    "kappa",
    "lambda",
    "mu",
    "nu",
    "xi",
    "rho",
    "sigma",
    "tau",
    "phi",
    "varphi",
    "chi",
    "psi",
    "omega",
    "Gamma",
    "Delta",
    "Theta",
    "Lambda",
    "Xi",
    "Sigma",
    "Phi",
    "Psi",
    "Omega",
)
# Functions that are also recognised without a backslash
BARE = (
    "sin",
    "cos",
    "tan",
    "ln",
    "log",
    "exp",
)
# Names that runs of letters are split into; hyperbolic functions are included so that `\sinh` is
# not read as `\sin h`.
KNOWN = sorted(
    [
        rf"\{name}"
        for name in (
            *FUNCTIONS,
            *GREEK,
            "sinh",
            "cosh",
            "tanh",
            "frac",
            "sqrt",
            "binom",
            "dbinom",
            "tbinom",
        )
    ]
    + [r"\lfloor", r"\rfloor", r"\lceil", r"\rceil", "pi", "sqrt", "inf", *BARE],
    key=len,
    reverse=True,
)
TOKEN = re.compile(r"\d+\.?\d*(?:[eE]\d+)?|\.\d+|\\?[A-Za-z]+|_\{[A-Za-z0-9,]*\}|[-+*/^(){}\[\]!|]")
CLOSING = {"(": ")", "{": "}", "[": "]", "|": "|", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil"}
ENDS = {"+", "-", *CLOSING.values()}  # tokens that end a product


@dataclass(frozen=True)
class ParsedExpression:
    """Parsed expression, with properties that matter for comparisons.

    `letters` are the variables of the expression (without e and i). `decimal` is true if the
    expression contains a number that is not whole, such as 0.5.
    """

    root: Node
    letters: frozenset[str]
    decimal: bool


@functools.lru_cache(maxsize=4096)
def parse(text: str) -> ParsedExpression | None:
    """Parse a normalized answer, as returned by `_latex.to_plain_form`.

    Returns None if the text is not an expression.
    """
    if len(text) > MAX_CHARACTERS:
        return None
    try:
        parser = _ExpressionParser(text)
        root = parser.parse_sum(0)
        parser.expect("")
    except _ExpressionSyntaxError:
        return None
    return ParsedExpression(root, frozenset(parser.letters), parser.decimal)


class _ExpressionSyntaxError(Exception):
    """Raised if a text is not a valid expression."""


class _ExpressionParser:
    """Recursive-descent parser of normalized expressions (`_latex.to_plain_form`).

    The grammar, without the rules for atoms (numbers, names, groups, functions):

        sum     = product (("+" | "-") product)*
        product = ("+" | "-")* power (("*" | "/")? power)*
        power   = atom "!"? ("^" "-"? atom)?

    The methods parse from the current position and return nodes of the expression tree. They raise
    `_ExpressionSyntaxError` for text that does not match. The argument `depth` is the current depth
    of nesting.
    """

    def __init__(self, text: str) -> None:
        self._tokens = [
            token for match in TOKEN.finditer(text) for token in _split_letters(match.group())
        ]
        if "".join(self._tokens) != text:
            raise _ExpressionSyntaxError
        self._position = 0
        self.letters: set[str] = set()
        self.decimal = False

    def _peek(self) -> str:
        return self._tokens[self._position] if self._position < len(self._tokens) else ""

    def _take(self, *expected: str) -> str:
        token = self._peek()
        if not token or token not in expected:
            return ""
        self._position += 1
        return token

    def expect(self, token: str) -> None:
        """Consume the next token, which must equal `token`; "" means the end of the text.

        Raises `_ExpressionSyntaxError` for any other token.
        """
        if self._peek() != token:
            raise _ExpressionSyntaxError
        self._position += 1

    def parse_sum(self, depth: int) -> Node:
        """Parse a sum of products, starting at the current position.

        Raises `_ExpressionSyntaxError` if there is no sum, or if the sum is nested deeper than
        `MAX_DEPTH`.
        """
        if depth > MAX_DEPTH:
            raise _ExpressionSyntaxError
        parts = [(1, self._parse_product(depth))]
        while sign := self._take("+", "-"):
            parts.append((1 if sign == "+" else -1, self._parse_product(depth)))
        return parts[0][1] if len(parts) == 1 else ("sum", *parts)

    def _parse_product(self, depth: int) -> Node:
        sign = 1
        while sign_token := self._take("-", "+"):
            sign = -sign if sign_token == "-" else sign
        parts = [(1, self._parse_power(depth))]
        while self._peek() and self._peek() not in ENDS:
            if self._take("/"):
                parts.append((-1, self._parse_power(depth)))
            else:
                if (
                    not self._take("*")
                    and self._peek()[0] in ".0123456789"
                    and parts[-1][1][0] == "number"
                ):
                    raise _ExpressionSyntaxError  # two numbers in a row
                parts.append((1, self._parse_power(depth)))
        node: Node = parts[0][1] if len(parts) == 1 else ("product", *parts)
        return node if sign == 1 else ("negative", node)

    def _parse_power(self, depth: int) -> Node:
        base = self._parse_atom(depth)
        if self._take("!"):
            if self._peek() == "!":
                raise _ExpressionSyntaxError  # double factorials are not supported
            base = ("factorial", base)
        return ("power", base, self._parse_exponent(depth)) if self._take("^") else base

    def _parse_exponent(self, depth: int) -> Node:
        if self._take("-"):
            return ("negative", self._parse_atom(depth))
        return self._parse_atom(depth)

    def _parse_group(self, opening: str, depth: int) -> Node:
        self.expect(opening)
        node = self.parse_sum(depth + 1)
        self.expect(CLOSING[opening])
        return node

    def _parse_atom(self, depth: int) -> Node:
        token = self._peek()
        if token in ("(", "{", "["):
            return self._parse_group(token, depth)
        if token in ("|", r"\lfloor", r"\lceil"):
            return (
                {"|": "abs", r"\lfloor": "floor", r"\lceil": "ceil"}[token],
                self._parse_group(token, depth),
            )
        self._position += 1
        if token[:1].isdigit() or token[:1] == ".":
            return ("number", self._parse_number(token))
        # LaTeX commands with their arguments.
        if token == r"\frac":
            return (
                "product",
                (1, self._parse_group("{", depth)),
                (-1, self._parse_group("{", depth)),
            )
        if token in (r"\binom", r"\dbinom", r"\tbinom"):
            return ("binom", self._parse_group("{", depth), self._parse_group("{", depth))
        if token in (r"\sqrt", "sqrt"):
            if self._peek() == "[":
                degree = self._parse_group("[", depth)
            else:
                degree = ("number", Fraction(2))
            return ("root", self._parse_group("{" if self._peek() == "{" else "(", depth), degree)
        # Names: functions, constants, variables with an optional subscript.
        name = token.lstrip("\\")
        if name in FUNCTIONS:
            return self._parse_function(name, depth)
        if token in CONSTANTS and not self._peek().startswith("_"):
            return ("constant", CONSTANTS[token])
        if (len(token) == 1 and token.isalpha()) or name in GREEK:
            letter = token + (self._take(self._peek()) if self._peek().startswith("_") else "")
            self.letters.add(letter)
            return ("letter", letter)
        raise _ExpressionSyntaxError

    def _parse_number(self, token: str) -> Fraction:
        exponent = re.split("[eE]", token)[1:]
        if exponent and int(exponent[0]) > MAX_EXPONENT:
            raise _ExpressionSyntaxError
        number = Fraction(token)
        self.decimal = self.decimal or number.denominator > 1
        return number

    def _parse_function(self, name: str, depth: int) -> Node:
        """Parse the rest of a function call such as `\\sin^2 x`, `\\log_2 8` or `\\sin 2x`.

        An argument without brackets extends to the next sign or function.
        """
        # Parse the base of a logarithm, the exponent, and the argument.
        if name == "log" and self._peek().startswith("_{"):
            base = self._peek()
        else:
            base = ""
        if base:
            self._position += 1
            if not base[2:-1].isdigit():
                raise _ExpressionSyntaxError
        exponent = self._parse_exponent(depth + 1) if self._take("^") else None
        if exponent == ("negative", ("number", Fraction(1))):
            name = INVERSES.get(name, "")
            exponent = None
            if not name:
                raise _ExpressionSyntaxError
        argument = self._parse_argument(depth)
        node: Node = ("function", name, argument)
        if base:
            scale = ("function", "ln", ("number", Fraction(base[2:-1])))
            node = ("product", (1, ("function", "ln", argument)), (-1, scale))
        return node if exponent is None else ("power", node, exponent)

    def _parse_argument(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise _ExpressionSyntaxError
        if self._peek() in CLOSING and self._peek() not in "|[":
            return self._parse_atom(depth + 1)
        parts = [(1, self._parse_power(depth + 1))]
        while (
            (token := self._peek())
            and token not in ENDS
            and token not in "*("
            and token.lstrip("\\") not in FUNCTIONS
        ):
            if token == "/":
                raise _ExpressionSyntaxError  # ambiguous: it divides the function or its argument
            parts.append((1, self._parse_power(depth + 1)))
        return parts[0][1] if len(parts) == 1 else ("product", *parts)


def _split_letters(token: str) -> list[str]:
    """Split a run of letters into known names and variables; return other tokens unchanged.

    For example, xy becomes x and y, and \\sinx becomes \\sin and x.
    """
    if not token.lstrip("\\").isalpha():
        return [token]
    cut = []
    while token:
        name = next(
            (known for known in KNOWN if token.startswith(known)),
            token if token[0] == "\\" else token[0],
        )
        cut.append(name)
        token = token[len(name) :]
    return cut
