r"""Process that compares answers with the library `math_verify`, and checks the library's verdicts.

A verdict must depend on every letter and number of both answers.

The library drops input that its grammar does not know, and evaluates expressions that it considers
constant: `1 \bmod 4` is read as 4, and `\frac{dy}{dx}` becomes 0. It would then find two answers
equal that differ only in the dropped parts. A verdict of "equal" therefore counts only if each
letter, number and mark matters: when any one of them is replaced, the two answers must differ.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import math_verify
import sympy

from weft.host.verifiers._answers import FORMULA, extract_boxed
from weft.host.verifiers._expression import FUNCTIONS, GREEK
from weft.host.verifiers._latex import UNIT, split_name, split_top

MAX_TOKENS = 200  # maximum number of tokens of an answer
# Commands that only change type or spacing, and operations whose operands the library keeps
KNOWN_COMMANDS = {
    *FUNCTIONS,
    "sinh",
    "cosh",
    "tanh",
    "max",
    "min",
    "frac",
    "dfrac",
    "tfrac",
    "cfrac",
    "sqrt",
    "cdot",
    "times",
    "div",
    "pm",
    "mp",
    "le",
    "leq",
    "leqslant",
    "ge",
    "geq",
    "geqslant",
    "lt",
    "gt",
    "ne",
    "neq",
    "in",
    "cup",
    "cap",
    "setminus",
    "emptyset",
    "varnothing",
    "infty",
    "pi",
    "binom",
    "dbinom",
    "tbinom",
    "begin",
    "end",
    "lfloor",
    "rfloor",
    "lceil",
    "rceil",
    "int",
    "sum",
    "prod",
    "lim",
    "to",
    "partial",
    "circ",
    "degree",
    "overline",
    "vec",
    "hat",
    "text",
    "mbox",
    "textrm",
    "mathrm",
    "operatorname",
    "mathbb",
    "lbrace",
    "rbrace",
    "lvert",
    "rvert",
    "left",
    "right",
    "quad",
    "qquad",
    "displaystyle",
    "limits",
    "boxed",
    "fbox",
}
ENVIRONMENT = re.compile(r"\\(begin|end)\s*\{[a-zA-Z]*\*?\}(?:\{[clr|]*\})?")
COMMAND = re.compile(r"\\([A-Za-z]+)")
# A command that names a letter is one token.
TOKEN = re.compile(
    rf"\\(?:{'|'.join(sorted(GREEK, key=len, reverse=True))}|pi)(?![A-Za-z])|\d+(?:\.\d+)?|\.\d+|[A-Za-z]|['′!:]"
)
# Formulas that the library misreads: it multiplies numbers with a blank between them, and drops the
# T of a transposed matrix and the side of a limit.
MISREAD = re.compile(
    r"(?<![\^\d])\d+(?:\s|\\[ ,;:!]|~)+\d|\^\s*(?:\{\s*)?(?:T|\\top)(?![A-Za-z])"
    r"|\^\s*(?:\{\s*[-+]\s*\}|[-+](?!\s*[\dA-Za-z\\({.]))"
)
# The words of a sentence up to the verb before its formula, as in "The probability is \frac{3}{4}."
INTRODUCTION = re.compile(r"^[A-Za-z][A-Za-z ,']*\b(?:is|are|equals)\s+(?=\\)")
LETTER_COMMAND = re.compile(rf"\\(?:{'|'.join(GREEK)}|pi)(?![A-Za-z])")
CAPITAL = re.compile(rf"\\(?:{'|'.join(name for name in GREEK if name[0].isupper())})(?![A-Za-z])")
SIGN = re.compile(r"[-+]")
# Operations that the library compares by all of their operands.
SIMPLE = (
    sympy.Add,
    sympy.Mul,
    sympy.Pow,
    sympy.FiniteSet,
    sympy.Tuple,
    sympy.Interval,
    sympy.Union,
    sympy.UnevaluatedExpr,
    sympy.core.relational.Relational,
    sympy.Abs,
    sympy.floor,
    sympy.ceiling,
    sympy.factorial,
    sympy.binomial,
    sympy.log,
    sympy.exp,
    sympy.sin,
    sympy.cos,
    sympy.tan,
    sympy.sec,
    sympy.csc,
    sympy.cot,
    sympy.asin,
    sympy.acos,
    sympy.atan,
    sympy.sinh,
    sympy.cosh,
    sympy.tanh,
    sympy.Max,
    sympy.Min,
)
# Operations with a bound variable
BOUND = (sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit)
CONSTANTS = {sympy.pi: "pi", sympy.E: "e", sympy.I: "i"}
INFINITE = (sympy.oo, -sympy.oo)


def is_fully_parsed(
    reference: str,
    answer: str,
    are_same: Callable[[str, str], bool],
    parse: Callable[[str], tuple[Any, ...]],
) -> bool:
    """Return whether `math_verify` found two texts equal without ignoring letters or numbers.

    The library ignores what it cannot parse, so texts that differ in the ignored parts can count as
    equal. Therefore, this function replaces letters and numbers one at a time, and compares the
    texts again: they must then differ. `are_same` is the function that has found the two texts
    equal. `parse` is a function that returns the expressions that `math_verify` finds in a text.
    """
    # Extract the formulas to compare.
    first = extract_formula(reference, parse)
    second = extract_formula(answer, parse)
    if first == second:
        return True
    first, second = extract_result(first, second), extract_result(second, first)
    # Reject formulas that the library can misread, and those that differ in what it ignores.
    if not (is_understood(first) and is_understood(second)) or CAPITAL.findall(
        first
    ) != CAPITAL.findall(second):
        return False
    if (wrap_formula(first), wrap_formula(second)) != (reference, answer) and not are_same(
        wrap_formula(first), wrap_formula(second)
    ):
        return False
    if len(split_top(first, "=")) != len(split_top(second, "=")):
        return False
    letters = {_find_assigned_letter(first, parse), _find_assigned_letter(second, parse)} - {None}
    if len(letters) > 1:
        return False
    # Replace each token in turn.
    return _are_all_tokens_needed(first, second, are_same, parse) and _are_all_tokens_needed(
        second, first, lambda left, right: are_same(right, left), parse
    )


def wrap_formula(formula: str) -> str:
    """Return the formula with a dollar sign before and after it: `x` becomes `$x$`."""
    return f"${formula}$"


def extract_formula(text: str, parse: Callable[[str], tuple[Any, ...]]) -> str:
    """Return the formula that states the answer of a text, without the unit.

    The formula is the first of these that exists:

    - the content of the last box;
    - the last marked formula, such as `$x$`;
    - the text without introductory words, if it contains LaTeX commands;
    - the last expression that `math_verify` finds in the text;
    - the whole text.

    `parse` is a function that returns the expressions that `math_verify` finds in a text.
    """
    formula = extract_boxed(text)
    if formula is None and len(text) > 1 and text[0] == text[-1] == "$" and text.count("$") == 2:
        formula = text[1:-1]
    if formula is None:
        formulas = list(FORMULA.finditer(text))
        if formulas:
            formula = next(group for group in formulas[-1].groups() if group is not None)
    if formula is None and "\\" in text:
        formula = INTRODUCTION.sub("", text).rstrip(".")
    if formula is None:
        expressions = parse(text)
        formula = str(expressions[-1]) if expressions else text
    return UNIT.sub("", formula.strip()).strip()


def extract_result(formula: str, other: str) -> str:
    """Return the part after the last `=` of an equation such as `2 + 3 = 5`, or the whole formula.

    The whole formula is returned if it is not an equation, if `other` is an equation, too, or if
    the omitted part is more than a computation or a name.
    """
    before, equals, after = formula.rpartition("=")
    is_in_braces = before.count("{") != before.count("}")
    if not equals or is_in_braces or "=" in other or before[-1:] in ("<", ">", "!"):
        return formula
    name, _ = split_name(formula)
    has_letters = re.search("[A-Za-z]", COMMAND.sub("", before)) or LETTER_COMMAND.search(before)
    if not has_letters or (name is not None and "=" not in before):
        return after.strip()
    return formula


def _find_assigned_letter(formula: str, parse: Callable[[str], tuple[Any, ...]]) -> Any:
    """Return the letter on the left side of an equation such as `x = 5`.

    Returns None for other formulas. The letters must be compared separately, because `math_verify`
    compares only the values.
    """
    expressions = parse(wrap_formula(formula))
    expression = expressions[0] if expressions else None
    if isinstance(expression, sympy.Eq) and expression.lhs.is_Symbol:
        return expression.lhs
    return None


def is_understood(formula: str) -> bool:
    """Return whether `math_verify` knows all commands of a formula and does not misread it.

    Also returns False if a letter occurs in the formula both as a capital and as a small letter.
    """
    if MISREAD.search(formula):
        return False
    if any(name not in KNOWN_COMMANDS and name not in GREEK for name in COMMAND.findall(formula)):
        return False
    letters = set(re.findall("[A-Za-z]", COMMAND.sub(" ", ENVIRONMENT.sub(" ", formula))))
    return not any(letter.swapcase() in letters for letter in letters)


def _are_all_tokens_needed(
    formula: str,
    other: str,
    are_same: Callable[[str, str], bool],
    parse: Callable[[str], tuple[Any, ...]],
) -> bool:
    """Return whether each token of `formula` matters when it is compared with `other`.

    Tokens are letters, numbers, plus and minus signs, and marks such as `!`. Each token in turn is
    replaced or removed. The changed formula must not be equal to `other`, and must be parsed
    differently from `formula`. `are_same` returns whether two texts are equal, and `parse` returns
    the expressions that `math_verify` finds in a text.

    If parsing `formula` loses none of its letters and numbers (see `_has_all_tokens`), returns True
    without replacing any token. Returns False if there are more than `MAX_TOKENS` tokens, or if
    there is no unused letter to put in place of a token.
    """
    spans = list(_find_tokens(formula))
    if len(spans) > MAX_TOKENS:
        return False
    expressions = parse(wrap_formula(formula))
    if expressions and _has_all_tokens(
        expressions[0], [formula[begin:end] for begin, end in spans]
    ):
        return True
    for match in SIGN.finditer(formula):
        spans.append(match.span())
    used = {formula[begin:end].lower() for begin, end in spans} | set(other.lower())
    letter = next(
        (candidate for candidate in "qwzuvjkrstghbcmnopyxaf" if candidate not in used), None
    )
    if letter is None:
        return False
    for begin, end in spans:
        changed = formula[:begin] + _replace_token(formula[begin:end], letter) + formula[end:]
        if parse(wrap_formula(changed))[:1] == expressions[:1] or are_same(
            wrap_formula(changed), wrap_formula(other)
        ):
            return False
    return True


def _find_tokens(formula: str) -> Iterator[tuple[int, int]]:
    """Yield the spans of a formula's letters, numbers and marks such as `!` and `'`.

    Names of commands and functions are excluded.
    """
    hidden = [match.span() for match in ENVIRONMENT.finditer(formula)]
    for match in COMMAND.finditer(formula):
        if match[1] not in GREEK and match[1] != "pi":
            hidden.append(match.span())
    for match in TOKEN.finditer(formula):
        if not any(begin <= match.start() < end for begin, end in hidden):
            yield match.span()


def _replace_token(token: str, letter: str) -> str:
    if token in "'′!":
        return ""
    if token in "+-:":
        return {"+": "-", "-": "+", ":": "+"}[token]
    if token[0] in ".0123456789":
        return str(int(token.partition(".")[0] or 0) + 11) + token[len(token.partition(".")[0]) :]
    return f" {letter} " if token[0] == "\\" else letter


def _has_all_tokens(expression: Any, tokens: list[str]) -> bool:
    """Return whether a parsed expression has exactly the letters and numbers of its formula.

    `tokens` are the tokens of the formula from which `expression` was parsed. Returns False if the
    expression has an operation that is in neither of two lists: `SIMPLE`, the operations that
    `math_verify` compares by all their operands, and `BOUND`, the operations with a bound variable,
    such as sums.
    """
    leaves: Counter[str] = Counter()
    implied: Counter[str] = Counter()
    if not isinstance(expression, (sympy.Basic, sympy.MatrixBase)) or not _collect(
        expression, leaves, implied
    ):
        return False
    formula_tokens = Counter(token.lstrip("\\").lower() for token in tokens)
    return not leaves - formula_tokens and not (formula_tokens - leaves) - implied


def _collect(node: Any, leaves: Counter[str], implied: Counter[str]) -> bool:
    """Count the letters and numbers (leaves) of an expression tree, and add the counts to `leaves`.

    Leaves that are not always written in the formula are counted in `implied` instead. Examples are
    the 1 in the tree of `-x`, and the exponent 1/2 in the tree of a square root.

    Returns False if the tree has an operation that sympy may have evaluated or simplified. Some
    operands may then be missing, so the counts cannot be compared with the tokens of the formula.
    """
    if isinstance(node, sympy.MatrixBase):
        return all(_collect(entry, leaves, implied) for entry in node)
    if node in CONSTANTS:
        leaves[CONSTANTS[node]] += 1
    elif isinstance(node, sympy.Rational):
        counter = implied if node == -1 else leaves
        counter.update([str(abs(node.p))] + ([str(node.q)] if node.q != 1 else []))
    elif isinstance(node, sympy.Symbol):
        leaves.update(
            [node.name.lower()]
            if len(node.name) > 3
            else re.findall(r"\d+|[a-z]+", node.name.lower())
        )
    elif (
        isinstance(node, sympy.Pow)
        and isinstance(node.exp, sympy.Rational)
        and abs(node.exp.p) == 1 != node.exp.q
    ):
        implied.update(["1", str(node.exp.q)])
        return _collect(node.base, leaves, implied)
    elif isinstance(node, sympy.exp):
        implied["e"] += 1
    elif isinstance(node, BOUND):
        body, *limits = node.args[:3] if isinstance(node, sympy.Limit) else node.args
        if isinstance(node, sympy.Limit):
            variables = limits[:1]
        else:
            variables = [limit.args[0] for limit in limits]
        implied["d"] += isinstance(node, sympy.Integral) * len(variables)
        # A body without its variable, such as `a_n`, is evaluated as a constant.
        return set(variables) <= body.free_symbols and all(
            _collect(part, leaves, implied) for part in (body, *limits)
        )
    elif not isinstance(node, SIMPLE):
        return node in INFINITE
    return all(_collect(argument, leaves, implied) for argument in node.args)


MAX_MEMORY = 4 << 30  # limit of the address space in bytes
TARGETS = (
    math_verify.LatexExtractionConfig(boxed_match_priority=0),
    math_verify.ExprExtractionConfig(),
)


def main(descriptor: int) -> None:
    """Fork a child that compares texts on request, and replace it whenever it is killed.

    The requests come over the connection with the file descriptor `descriptor`. The kernel kills
    the child if a comparison exceeds its time limit. Returns when the connection closes.
    """
    connection = Connection(descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to end
    # Silence the libraries' warnings about texts that are not mathematics.
    for name in (
        "math_verify",
        "latex2sympy2_extended",
    ):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    are_surely_equal("$1$", "$1$")  # triggers lazy imports
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.send("ready")
        while True:
            child = os.fork()
            if child == 0:
                _serve(connection)
            _, status = os.waitpid(child, 0)
            if status == 0:
                return
            connection.send((None, False, 0.0))


def _serve(connection: Connection) -> None:
    """Answer requests to compare two texts until the connection closes, then exit this process.

    This runs in the child that `main` forks.
    """
    try:
        while True:
            number, reference, answer, seconds = connection.recv()
            begin = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, seconds)
            is_equal = are_surely_equal(reference, answer)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send((number, is_equal, time.process_time() - begin))
    except (EOFError, OSError):
        os._exit(0)
    finally:
        os._exit(1)


@functools.lru_cache(maxsize=4096)
def are_surely_equal(reference: str, answer: str) -> bool:
    """Return whether `math_verify` finds two texts equal and this verdict can be trusted.

    The verdict is trusted if the library has parsed both texts completely. The texts are formulas,
    or sentences that contain one.
    """
    return are_equal(reference, answer) and is_fully_parsed(
        reference, answer, are_equal, parse_answer
    )


def are_equal(reference: str, answer: str) -> bool:
    """Return whether `math_verify` finds the answers in two texts equal."""
    reference_expressions = parse_answer(reference)
    answer_expressions = parse_answer(answer)
    return bool(
        reference_expressions
        and answer_expressions
        and math_verify.verify(
            list(reference_expressions),
            list(answer_expressions),
            timeout_seconds=None,
            allow_set_relation_comp=True,
        )
    )


@functools.lru_cache(maxsize=4096)
def parse_answer(text: str) -> tuple[Any, ...]:
    """Return the expressions that `math_verify` finds in the last box, formula or number of a text.

    The result is empty if the text has none of these.
    """
    return tuple(math_verify.parse(text, TARGETS, parsing_timeout=None))


if __name__ == "__main__":
    main(int(sys.argv[1]))
