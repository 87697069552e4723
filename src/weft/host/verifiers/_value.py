r"""Comparison of the values of two expressions, with limits on size and time.

Rational values are compared exactly, others to more digits than can agree by chance. Ratios,
`a:b:c`, and congruences, `n \equiv 1 \pmod 4`, are compared too.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import mpmath

from weft.host.verifiers._expression import Node, ParsedExpression, parse
from weft.host.verifiers._latex import parse_exact, split_top, to_plain_form

Number = Any  # a Fraction, or a real or complex number of mpmath

SEEDS = (1, 2, 3)  # seeds of the values of letters
MOST_BITS = 20_000  # maximum number of bits of a fraction's numerator and denominator
MOST_FACTORIAL = 2000  # largest operand of factorials and binomials
MOST_POWER = 10**6  # largest exponent of a number that is not a fraction
MOST_SIZE = 800  # rounded numbers are between 2^-800 and 2^800
# Relative distances of a decimal from a number. Above FAR, the decimal does not approximate the
# number; up to NEAR, it does if all its digits are right; between them, this is undecided.
FAR = Fraction(1, 10**4)
NEAR = Fraction(1, 10**9)
DECIMAL = re.compile(r"[-+]?\d*\.\d+")
_local = threading.local()


class _UndecidedValue(Exception):
    """Raised if an expression is undefined, or its value cannot be computed within the limits."""


def have_same_value(one: str, other: str) -> bool | None:
    """Return whether two normalized answers are expressions with the same value.

    The answers are results of `_latex.to_plain_form`. Expressions with letters (variables) are
    compared for several values of the letters. A decimal with many digits equals the number that it
    approximates if all its digits are right. Returns None if the comparison is undecided.
    """
    a = parse(one)
    b = parse(other)
    if a is None or b is None:
        return None
    if a.letters or b.letters:
        return _are_same_function(a, b)
    distances = _measure_distance(a, b, 0)
    if distances is None:
        return None
    distance, relative = distances
    if not distance or not (a.decimal or b.decimal):
        return not distance
    if relative > FAR:
        return False
    if relative > NEAR:
        return None
    if DECIMAL.fullmatch(one):
        return _is_rounded_or_truncated(one, a, b)
    return _is_rounded_or_truncated(other, b, a) if DECIMAL.fullmatch(other) else None


def _is_rounded_or_truncated(
    text: str, decimal: ParsedExpression, number: ParsedExpression
) -> bool:
    """Return whether `decimal` equals `number`, rounded or truncated to the decimal's digits.

    `text` is the decimal as written.
    """
    stated = _evaluate(decimal, 0, 0)
    meant = _evaluate(number, 0, 0)
    assert stated and meant, "their difference is known"
    last = Fraction(1, 10 ** len(text.partition(".")[2]))
    apart = abs(stated.real - meant.real)
    return 2 * apart <= last or (apart < last and abs(stated.real) < abs(meant.real))


def _are_same_function(a: ParsedExpression, b: ParsedExpression) -> bool | None:
    """Return whether two expressions agree for several values of their variables.

    Returns None if the comparison is undecided.
    """
    # Compute the distances for all seeds.
    seen: list[Fraction] = []  # relative distances
    rational = True
    for seed in SEEDS:
        there = _evaluate(a, seed, 0), _evaluate(b, seed, 0)
        if there[0] is None or there[1] is None:
            if there[0] is not there[1]:
                return None  # such as the root of a letter below 0
            continue
        rational = rational and there[0].size < 0 and there[1].size < 0
        distances = _measure_distance(a, b, seed)
        if distances is None:
            return None
        seen.append(distances[1])
    # Decide from at least two distances.
    if len(seen) < 2:
        return None
    if not any(seen):
        return True
    if a.decimal or b.decimal:
        return None
    # Values that are near but not equal come from different functions. Values that are far apart
    # are left to computer algebra, which knows more names of functions.
    if (rational and a.letters == b.letters) or max(seen) < FAR:
        return False
    return None


def _measure_distance(
    a: ParsedExpression, b: ParsedExpression, seed: int
) -> tuple[Fraction, Fraction] | None:
    """Return the absolute and the relative distance between the values of two expressions.

    The relative distance is the absolute distance divided by the larger of the two absolute values.
    Both distances are 0 for equal values. If a value cannot be computed exactly, a distance that is
    small enough to be a rounding error counts as 0. `seed` determines the values of the variables.
    Returns None if one of the values is unknown.
    """
    one = _evaluate(a, seed, 0)
    other = _evaluate(b, seed, 0)
    size = max(one.size, other.size) if one and other else -1
    if size >= 0:
        one = _evaluate(a, seed, size)
        other = _evaluate(b, seed, size)
    if one is None or other is None:
        return None
    apart = max(abs(one.real - other.real), abs(one.imaginary - other.imaginary))
    if size >= 0 and apart < Fraction(1, 2 ** (100 + 3 * size)):
        apart = Fraction(0)
    largest = max(abs(part) for value in (one, other) for part in (value.real, value.imaginary))
    return apart, apart / largest if apart else apart


@dataclass(frozen=True)
class _ComplexValue:
    """Complex value of an expression, and a measure of the precision that its computation requires.

    Attributes:
        real: Real part.
        imaginary: Imaginary part.
        size: Measure of the required precision. It is -1 if all numbers were exact fractions.
            Otherwise, it is the larger of two numbers: the largest absolute binary exponent of a
            floating-point number, and the largest bit length of a numerator or denominator that
            was converted to floating point.
    """

    real: Fraction
    imaginary: Fraction
    size: int


@functools.lru_cache(maxsize=4096)
def _evaluate(expression: ParsedExpression, seed: int, size: int) -> _ComplexValue | None:
    """Return the value of an expression, or None if no value can be computed within the limits.

    Each letter has a fixed value that depends on `seed`. Numbers that are not exact are computed
    with 300 + 8 * `size` bits. The `size` of the result is a measure of the precision that was
    needed. If it is larger than the argument `size`, the value is inaccurate: call this function
    again with the result's `size`.
    """
    calculator = _TreeCalculator(seed, 300 + 8 * size, real=bool(expression.letters))
    try:
        number = calculator.evaluate(expression.root)
    except (_UndecidedValue, ArithmeticError, ValueError, TypeError):
        return None
    if isinstance(number, Fraction):
        return _ComplexValue(number, Fraction(0), calculator.size)
    return _ComplexValue(_to_fraction(number.real), _to_fraction(number.imag), calculator.size)


def _to_fraction(number: Any) -> Fraction:
    man, exp = number.man_exp  # man has no sign
    return Fraction(-man if number < 0 else man) * Fraction(2) ** exp


def _get_context() -> Any:
    """Return the mpmath context that belongs to this thread.

    Threads cannot share a context, because the precision is set in the context.
    """
    if not hasattr(_local, "context"):
        _local.context = mpmath.MPContext()
    return _local.context


class _TreeCalculator:
    """Calculator of the value of an expression tree, which is exact if possible.

    Exact values are fractions. All other values are `mpmath` numbers with a precision of `bits`
    bits. `size` is the largest absolute binary exponent of the `mpmath` numbers so far, or -1 if
    there were none.

    Letters of the expression get pseudorandom values, which depend on `seed`. With `real`, square
    roots of negative numbers and complex exponents raise `_UndecidedValue`.
    """

    def __init__(self, seed: int, bits: int, *, real: bool) -> None:
        self._seed = seed
        self._real = real
        self.size = -1
        self._mp = _get_context()
        self._mp.prec = bits

    def evaluate(self, node: Node) -> Number:
        """Return the value of an expression tree.

        Raises `_UndecidedValue`, or the error of an invalid operation, such as `ZeroDivisionError`.
        """
        kind, *parts = node
        if kind == "number":
            return parts[0]
        if kind == "letter":
            return _choose_letter_value(parts[0], self._seed)
        if kind == "constant":
            return self._check_limits(
                {"pi": +self._mp.pi, "e": +self._mp.e, "i": self._mp.mpc(0, 1)}[parts[0]]
            )
        if kind == "sum":
            return self._add((sign, self.evaluate(part)) for sign, part in parts)
        if kind == "product":
            return self._multiply((sign, self.evaluate(part)) for sign, part in parts)
        if kind == "function":
            return self._check_limits(
                self._apply_function(
                    parts[0],
                    self._to_rounded_real(self.evaluate(parts[1]), complexes=parts[0] == "exp"),
                )
            )
        values = [self.evaluate(part) for part in parts]
        return self._check_limits(getattr(self, f"_{kind}")(*values))

    def _check_limits(self, number: Number) -> Number:
        """Return a number, or raise `_UndecidedValue` if it is not finite or exceeds the limits.

        If it is a floating-point number of `mpmath`, the attribute `size` (the largest absolute
        binary exponent so far) is updated.
        """
        if isinstance(number, Fraction):
            if max(number.numerator.bit_length(), number.denominator.bit_length()) > MOST_BITS:
                raise _UndecidedValue
            return number
        if not self._mp.isfinite(number):
            raise _UndecidedValue
        if isinstance(number, self._mp.mpc) and number.imag == 0:
            number = number.real
        size = 0 if number == 0 else abs(int(self._mp.mag(number)))
        # A difference of equal numbers leaves a rounding error of about 2^-prec, so allow for it
        if size > MOST_SIZE + self._mp.prec:
            raise _UndecidedValue
        self.size = max(self.size, size)
        return number

    def _add(self, parts: Iterable[tuple[int, Number]]) -> Number:
        total: Number = Fraction(0)
        for sign, part in parts:
            one, other = self._convert_pair(total, part)
            total = self._check_limits(one + sign * other)
        return total

    def _multiply(self, parts: Iterable[tuple[int, Number]]) -> Number:
        total: Number = Fraction(1)
        for sign, part in parts:
            one, other = self._convert_pair(total, part)
            total = self._check_limits(one * other if sign == 1 else one / other)
        return total

    def _convert_pair(self, one: Number, other: Number) -> tuple[Number, Number]:
        """Convert two numbers to the same type.

        Two fractions are returned unchanged. In all other cases, both numbers are returned as
        floating-point numbers of `mpmath`.
        """
        if isinstance(one, Fraction) and isinstance(other, Fraction):
            return one, other
        return self._to_rounded(one), self._to_rounded(other)

    def _to_rounded(self, number: Number) -> Number:
        """Convert an exact fraction to a floating-point number of `mpmath`.

        If the numerator or the denominator has more bits than the calculator's `size`, `size` is
        raised to this number of bits. If `number` is already a floating-point number, it is only
        checked by `_check_limits`. Raises `_UndecidedValue` if the number exceeds the limits.
        """
        if not isinstance(number, Fraction):
            return self._check_limits(number)
        bits = max(number.numerator.bit_length(), number.denominator.bit_length())
        if bits > MOST_SIZE:
            raise _UndecidedValue
        self.size = max(self.size, bits)
        return self._mp.mpf(number.numerator) / number.denominator

    def _to_rounded_real(self, number: Number, *, complexes: bool = False) -> Number:
        number = self._to_rounded(number)
        if isinstance(number, self._mp.mpc) and not complexes:
            raise _UndecidedValue
        return number

    def _negative(self, number: Number) -> Number:
        return -number

    def _abs(self, number: Number) -> Number:
        return abs(number)

    def _floor(self, number: Number) -> Number:
        if isinstance(number, Fraction):
            return Fraction(math.floor(number))
        number = self._to_rounded_real(number)
        if abs(number - self._mp.nint(number)) < self._mp.mpf(2) ** -100:
            raise _UndecidedValue  # the side of the integer is unknown
        return Fraction(int(self._mp.floor(number)))

    def _ceil(self, number: Number) -> Number:
        return -self._floor(-number)

    def _factorial(self, number: Number) -> Number:
        return Fraction(math.factorial(_to_integer(number)))

    def _binom(self, n: Number, k: Number) -> Number:
        return Fraction(math.comb(_to_integer(n), _to_integer(k)))

    def _root(self, number: Number, degree: Number) -> Number:
        if degree == 2 and isinstance(number, Fraction) and number >= 0:
            top = math.isqrt(number.numerator)
            bottom = math.isqrt(number.denominator)
            if top * top == number.numerator and bottom * bottom == number.denominator:
                return Fraction(top, bottom)
        number = self._to_rounded(number)
        if degree == 2:
            if self._real and (isinstance(number, self._mp.mpc) or number < 0):
                raise _UndecidedValue
            return self._mp.sqrt(number)
        n = _to_integer(degree)
        if isinstance(number, self._mp.mpc) or n == 0 or (number < 0 and n % 2 == 0):
            raise _UndecidedValue
        if number >= 0:
            return self._mp.root(number, n)
        return -self._mp.root(-number, n)

    def _power(self, base: Number, exponent: Number) -> Number:
        if isinstance(exponent, Fraction) and exponent.denominator == 1:
            times = int(exponent)
            if isinstance(base, Fraction):
                bits = max(base.numerator.bit_length(), base.denominator.bit_length())
                if bits * abs(times) > MOST_BITS + bits:
                    raise _UndecidedValue
                return base**times
            if abs(times) > MOST_POWER:
                raise _UndecidedValue
            return base**times
        base = self._to_rounded_real(base)
        exponent = self._to_rounded_real(exponent, complexes=not self._real)
        if base < 0 or abs(exponent) * max(1, abs(self._mp.mag(base) if base else 0)) > MOST_POWER:
            raise _UndecidedValue
        return self._mp.power(base, exponent)

    def _apply_function(self, name: str, number: Number) -> Number:
        mp = self._mp
        if name == "exp" and abs(number) > MOST_POWER:
            raise _UndecidedValue
        if (name in ("ln", "log") and number <= 0) or (
            name in ("arcsin", "arccos") and abs(number) > 1
        ):
            raise _UndecidedValue
        names = {"ln": "log", "log": "log10", "arcsin": "asin", "arccos": "acos", "arctan": "atan"}
        return getattr(mp, names.get(name, name))(number)


def _to_integer(number: Number) -> int:
    if not (
        isinstance(number, Fraction) and number.denominator == 1 and 0 <= number <= MOST_FACTORIAL
    ):
        raise _UndecidedValue
    return int(number)


def _choose_letter_value(name: str, seed: int) -> Fraction:
    """Return a pseudorandom value for the variable `name`.

    The value is determined by `name` and `seed`. It is between 1 and 3, or between -3 and -1 if
    `seed` is divisible by 3.
    """
    digest = hashlib.blake2b(f"{seed}|{name}".encode(), digest_size=2).digest()
    size = 1 + Fraction(2 * (int.from_bytes(digest, "little") % 512) + 1, 512)
    return -size if seed % 3 == 0 else size


MODULUS = re.compile(
    r"^(?P<rest>.*?)\s*,?\s*(?:\(\s*)?(?:\\pmod|\\[bp]?mod|\\(?:text|mathrm|operatorname)\{\s*mod(?:ulo)?\s*\}"
    r"|(?<![A-Za-z\\])mod(?:ulo)?(?![A-Za-z]))\s*(?P<modulus>\{[^{}]*\}|[^{}()]+?)\s*\)?$"
)
CONGRUENT = re.compile(r"\\equiv(?![A-Za-z])|≡")


def compare_ratios(one: str, other: str) -> bool | None:
    """Return whether two ratios, normalized by `_latex.to_plain_form`, are proportional.

    Returns None if neither text is a ratio, or if the comparison is undecided.
    """
    parts = _split_ratio(one)
    others = _split_ratio(other)
    if parts is None and others is None:
        return None
    if parts is None or others is None:
        return False if max(len(parts or ()), len(others or ())) > 2 else None  # 3:4 may be 3/4
    if len(parts) != len(others):
        return False
    verdicts = []
    for part, match in zip(parts[1:], others[1:], strict=True):
        verdicts.append(have_same_value(f"({part})*({others[0]})", f"({match})*({parts[0]})"))
    if False in verdicts:
        return False
    if None not in verdicts:
        return True
    return None if len(parts) == 2 else False


def _split_ratio(text: str) -> list[str] | None:
    parts = split_top(text, ":")
    if len(parts) < 2 or any(not part or parse(part) is None for part in parts):
        return None
    return parts


def compare_congruences(one: str, other: str, equal: Callable[[str, str], bool]) -> bool | None:
    """Return whether two answers are equivalent congruences, or None if neither is a congruence.

    The answers are results of `_latex.tidy`. Congruences are equivalent if the left sides are equal
    or one of them is missing, the moduli are equal, and the residues are equal up to multiples of
    the modulus. `equal` is a function that returns whether two such parts are equal.
    """
    first = _split_congruence(one)
    second = _split_congruence(other)
    if first is None and second is None:
        return None
    if first is None or second is None:
        return False
    (left, residue, modulus), (other_left, other_residue, other_modulus) = first, second
    if left and other_left and not equal(left, other_left):
        return False
    return equal(modulus, other_modulus) and _have_same_residues(
        residue, other_residue, modulus, equal
    )


def _split_congruence(text: str) -> tuple[str, str, str] | None:
    """Return the left side, the residue and the modulus of a congruence; None for other texts.

    The left side is "" if it is missing.
    """
    match = MODULUS.match(text)
    if match is None or not match["rest"].strip():
        return None
    sides = CONGRUENT.split(match["rest"])
    if len(sides) > 2:
        return None
    left = sides[0].strip() if len(sides) == 2 else ""
    return left, sides[-1].strip(), match["modulus"].strip("{} ")


def _have_same_residues(
    one: str, other: str, modulus: str, equal: Callable[[str, str], bool]
) -> bool:
    residues = [_parse_residues(text, modulus) for text in (one, other)]
    if None not in residues:
        return residues[0] == residues[1]
    return equal(one, other)


def _parse_residues(text: str, modulus: str) -> set[Fraction] | None:
    size = parse_exact(to_plain_form(modulus))
    values = [parse_exact(to_plain_form(part)) for part in split_top(text, ",")]
    if not size or None in values:
        return None
    return {value % size for value in values if value is not None}
