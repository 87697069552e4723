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
MAX_BITS = 20_000  # maximum number of bits of a fraction's numerator and denominator
MAX_FACTORIAL = 2000  # largest operand of factorials and binomials
MAX_POWER = 10**6  # largest exponent of a number that is not a fraction
MAX_SIZE = 800  # rounded numbers are between 2^-800 and 2^800
# Relative distances of a decimal from a number. Above FAR, the decimal does not approximate the
# number; up to NEAR, it does if all its digits are right; between them, this is undecided.
FAR = Fraction(1, 10**4)
NEAR = Fraction(1, 10**9)
DECIMAL = re.compile(r"[-+]?\d*\.\d+")
_local = threading.local()


class _UndecidedValue(Exception):
    """Raised if an expression is undefined, or its value cannot be computed within the limits."""


def have_same_value(first_text: str, second_text: str) -> bool | None:
    """Return whether two normalized answers are expressions with the same value.

    The answers are results of `_latex.to_plain_form`. Expressions with letters (variables) are
    compared for several values of the letters. A decimal with many digits equals the number that it
    approximates if all its digits are right. Returns None if the comparison is undecided.
    """
    first = parse(first_text)
    second = parse(second_text)
    if first is None or second is None:
        return None
    if first.letters or second.letters:
        return _are_same_function(first, second)
    distances = _measure_distance(first, second, 0)
    if distances is None:
        return None
    distance, relative = distances
    if not distance or not (first.decimal or second.decimal):
        return not distance
    if relative > FAR:
        return False
    if relative > NEAR:
        return None
    if DECIMAL.fullmatch(first_text):
        return _is_rounded_or_truncated(first_text, first, second)
    if DECIMAL.fullmatch(second_text):
        return _is_rounded_or_truncated(second_text, second, first)
    return None


def _is_rounded_or_truncated(
    text: str, decimal: ParsedExpression, number: ParsedExpression
) -> bool:
    """Return whether `decimal` equals `number`, rounded or truncated to the decimal's digits.

    `text` is the decimal as written.
    """
    decimal_value = _evaluate(decimal, 0, 0)
    number_value = _evaluate(number, 0, 0)
    assert decimal_value and number_value, "their difference is known"
    unit = Fraction(1, 10 ** len(text.partition(".")[2]))
    distance = abs(decimal_value.real - number_value.real)
    return 2 * distance <= unit or (
        distance < unit and abs(decimal_value.real) < abs(number_value.real)
    )


def _are_same_function(a: ParsedExpression, b: ParsedExpression) -> bool | None:
    """Return whether two expressions agree for several values of their variables.

    Returns None if the comparison is undecided.
    """
    # Compute the distances for all seeds.
    distances: list[Fraction] = []  # relative distances
    are_rational = True
    for seed in SEEDS:
        values = _evaluate(a, seed, 0), _evaluate(b, seed, 0)
        if values[0] is None or values[1] is None:
            if values[0] is not values[1]:
                return None  # such as the root of a letter below 0
            continue
        are_rational = are_rational and values[0].size < 0 and values[1].size < 0
        distance_pair = _measure_distance(a, b, seed)
        if distance_pair is None:
            return None
        distances.append(distance_pair[1])
    # Decide from at least two distances.
    if len(distances) < 2:
        return None
    if not any(distances):
        return True
    if a.decimal or b.decimal:
        return None
    # Values that are near but not equal come from different functions. Values that are far apart
    # are left to computer algebra, which knows more names of functions.
    if (are_rational and a.letters == b.letters) or max(distances) < FAR:
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
    first = _evaluate(a, seed, 0)
    second = _evaluate(b, seed, 0)
    size = max(first.size, second.size) if first and second else -1
    if size >= 0:
        first = _evaluate(a, seed, size)
        second = _evaluate(b, seed, size)
    if first is None or second is None:
        return None
    distance = max(abs(first.real - second.real), abs(first.imaginary - second.imaginary))
    if size >= 0 and distance < Fraction(1, 2 ** (100 + 3 * size)):
        distance = Fraction(0)
    largest = max(abs(part) for value in (first, second) for part in (value.real, value.imaginary))
    return distance, distance / largest if distance else distance


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
                    self._to_rounded_real(self.evaluate(parts[1]), allow_complex=parts[0] == "exp"),
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
            if max(number.numerator.bit_length(), number.denominator.bit_length()) > MAX_BITS:
                raise _UndecidedValue
            return number
        if not self._mp.isfinite(number):
            raise _UndecidedValue
        if isinstance(number, self._mp.mpc) and number.imag == 0:
            number = number.real
        size = 0 if number == 0 else abs(int(self._mp.mag(number)))
        # A difference of equal numbers leaves a rounding error of about 2^-prec, so allow for it
        if size > MAX_SIZE + self._mp.prec:
            raise _UndecidedValue
        self.size = max(self.size, size)
        return number

    def _add(self, parts: Iterable[tuple[int, Number]]) -> Number:
        total: Number = Fraction(0)
        for sign, part in parts:
            left, right = self._convert_pair(total, part)
            total = self._check_limits(left + sign * right)
        return total

    def _multiply(self, parts: Iterable[tuple[int, Number]]) -> Number:
        total: Number = Fraction(1)
        for sign, part in parts:
            left, right = self._convert_pair(total, part)
            total = self._check_limits(left * right if sign == 1 else left / right)
        return total

    def _convert_pair(self, left: Number, right: Number) -> tuple[Number, Number]:
        """Convert two numbers to the same type.

        Two fractions are returned unchanged. In all other cases, both numbers are returned as
        floating-point numbers of `mpmath`.
        """
        if isinstance(left, Fraction) and isinstance(right, Fraction):
            return left, right
        return self._to_rounded(left), self._to_rounded(right)

    def _to_rounded(self, number: Number) -> Number:
        """Convert an exact fraction to a floating-point number of `mpmath`.

        If the numerator or the denominator has more bits than the calculator's `size`, `size` is
        raised to this number of bits. If `number` is already a floating-point number, it is only
        checked by `_check_limits`. Raises `_UndecidedValue` if the number exceeds the limits.
        """
        if not isinstance(number, Fraction):
            return self._check_limits(number)
        bits = max(number.numerator.bit_length(), number.denominator.bit_length())
        if bits > MAX_SIZE:
            raise _UndecidedValue
        self.size = max(self.size, bits)
        return self._mp.mpf(number.numerator) / number.denominator

    def _to_rounded_real(self, number: Number, *, allow_complex: bool = False) -> Number:
        number = self._to_rounded(number)
        if isinstance(number, self._mp.mpc) and not allow_complex:
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
                if bits * abs(times) > MAX_BITS + bits:
                    raise _UndecidedValue
                return base**times
            if abs(times) > MAX_POWER:
                raise _UndecidedValue
            return base**times
        base = self._to_rounded_real(base)
        exponent = self._to_rounded_real(exponent, allow_complex=not self._real)
        if base < 0 or abs(exponent) * max(1, abs(self._mp.mag(base) if base else 0)) > MAX_POWER:
            raise _UndecidedValue
        return self._mp.power(base, exponent)

    def _apply_function(self, name: str, number: Number) -> Number:
        mp = self._mp
        if name == "exp" and abs(number) > MAX_POWER:
            raise _UndecidedValue
        if (name in ("ln", "log") and number <= 0) or (
            name in ("arcsin", "arccos") and abs(number) > 1
        ):
            raise _UndecidedValue
        names = {"ln": "log", "log": "log10", "arcsin": "asin", "arccos": "acos", "arctan": "atan"}
        return getattr(mp, names.get(name, name))(number)


def _to_integer(number: Number) -> int:
    if not (
        isinstance(number, Fraction) and number.denominator == 1 and 0 <= number <= MAX_FACTORIAL
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


def compare_ratios(first: str, second: str) -> bool | None:
    """Return whether two ratios, normalized by `_latex.to_plain_form`, are proportional.

    Returns None if neither text is a ratio, or if the comparison is undecided.
    """
    first_parts = _split_ratio(first)
    second_parts = _split_ratio(second)
    if first_parts is None and second_parts is None:
        return None
    if first_parts is None or second_parts is None:
        # A ratio of two numbers can equal a number: 3:4 may be 3/4.
        return False if len(first_parts or second_parts or ()) > 2 else None
    if len(first_parts) != len(second_parts):
        return False
    verdicts = []
    for first_part, second_part in zip(first_parts[1:], second_parts[1:], strict=True):
        verdicts.append(
            have_same_value(
                f"({first_part})*({second_parts[0]})", f"({second_part})*({first_parts[0]})"
            )
        )
    if False in verdicts:
        return False
    if None not in verdicts:
        return True
    return None if len(first_parts) == 2 else False


def _split_ratio(text: str) -> list[str] | None:
    parts = split_top(text, ":")
    if len(parts) < 2 or any(not part or parse(part) is None for part in parts):
        return None
    return parts


def compare_congruences(
    first_text: str, second_text: str, are_equal: Callable[[str, str], bool]
) -> bool | None:
    """Return whether two answers are equivalent congruences, or None if neither is a congruence.

    The answers are results of `_latex.tidy`. Congruences are equivalent if the left sides are equal
    or one of them is missing, the moduli are equal, and the residues are equal up to multiples of
    the modulus. `are_equal` is a function that returns whether two such parts are equal.
    """
    first = _split_congruence(first_text)
    second = _split_congruence(second_text)
    if first is None and second is None:
        return None
    if first is None or second is None:
        return False
    (left, residue, modulus), (other_left, other_residue, other_modulus) = first, second
    if left and other_left and not are_equal(left, other_left):
        return False
    return are_equal(modulus, other_modulus) and _have_same_residues(
        residue, other_residue, modulus, are_equal
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
    first: str, second: str, modulus: str, are_equal: Callable[[str, str], bool]
) -> bool:
    residues = [_parse_residues(text, modulus) for text in (first, second)]
    if None not in residues:
        return residues[0] == residues[1]
    return are_equal(first, second)


def _parse_residues(text: str, modulus: str) -> set[Fraction] | None:
    size = parse_exact(to_plain_form(modulus))
    values = [parse_exact(to_plain_form(part)) for part in split_top(text, ",")]
    if not size or None in values:
        return None
    return {value % size for value in values if value is not None}
