"""Compares expressions by their values.

Rational values are exact. Others have 150 digits, or more when they are mixed with longer rational
numbers, and are equal when they agree in all but the last 40 digits. Expressions with unknowns are
equal when they have equal values at random points.

This module returns verdicts, never rounded numbers, so that nobody mixes two precisions.
"""

import math
import operator
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any

import mpmath
from mpmath import mp
from sympy import integer_nthroot

from services.reward.answers.expressions import (
    Expression,
    Number,
    Unknown,
    number,
    operation,
    unknowns,
)
from services.reward.answers.notation import words

INFINITY = operation("infty")
MINUS_INFINITY = operation("neg", INFINITY)
_MAX_BITS = 200_000
_MAX_LOG = 1e7
# Largest exponent of an expression at a random point, where its power is rounded.
_MAX_EXPONENT = 10**15
_DIGITS = 150
_MAX_DIGITS = 3000
_UNSURE_DIGITS = 40
_SPARE_DIGITS = 60
_POINTS = 10
_ATTEMPTS = 24
# Bits of an argument of a function; sin(10^3000) needs as many digits of pi.
_MAX_MAGNITUDE = 10_000
# Bits of an argument of a function that grows as exp does.
_MAX_GROWTH = 40
_MAX_COUNT = 5000


class Undecided(ArithmeticError):
    """The value exceeds the bounds of this module, or does not exist."""


class Enormous(Undecided):
    """The value exceeds the bounds: it is no number that anyone writes as an answer."""


# The values of two expressions at one point, and the largest term of their sums.
Sample = tuple[Any, Any, Any]


def _is_complex(node: Expression) -> bool:
    """Returns whether the imaginary unit occurs in an expression."""
    return node.name in ("i", "cis") or any(map(_is_complex, node.operands))


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


@dataclass
class _Evaluator:
    """Evaluates expressions at one point."""

    point: Mapping[str, Fraction] = field(default_factory=dict)
    is_complex: bool = False
    largest: Any = 0
    """The largest term of any sum; rounding errors are relative to it."""
    digits: int = _DIGITS
    """Digits with which no exact number is rounded to another one."""

    def value(self, node: Expression) -> Any:
        """Returns a Fraction, or a real or complex mpmath number. Raises Undecided when there is no
        value.
        """
        try:
            if isinstance(node, Number):
                return node.value
            if isinstance(node, Unknown):
                return self.point[node.name]
            operands = [self.value(part) for part in node.operands]
            return self._checked(self._apply(node.name, operands))
        except (ValueError, KeyError, ZeroDivisionError, OverflowError, TypeError) as error:
            raise Undecided from error

    def _checked(self, value: Any) -> Any:
        """Returns a value, as a real number if its imaginary part is a rounding error. Raises
        Undecided for one that is too large, infinite, or complex at a point of a real expression.
        """
        if isinstance(value, Fraction):
            if _bits(value) > _MAX_BITS:
                raise Enormous
            return value
        if not mpmath.isfinite(value):
            raise Undecided
        if isinstance(value, mpmath.mpc):
            if abs(value.imag) <= abs(value.real) * _rounding():
                return value.real
            if self.point and not self.is_complex:
                raise Undecided
        return value

    def real(self, value: Any) -> Any:
        """Returns a value as an mpmath number, and counts the digits that it needs."""
        if not isinstance(value, Fraction):
            return value
        # A bit has 0.3 decimal digits.
        self.digits = max(self.digits, _DIGITS + _bits(value) * 3 // 10 - _SPARE_DIGITS)
        return mpmath.mpf(value.numerator) / value.denominator

    def _apply(self, name: str, operands: list[Any]) -> Any:
        if name in ("^", "root"):
            base, exponent = operands
            return self._power(base, exponent if name == "^" else 1 / exponent)
        if all(isinstance(value, Fraction) for value in operands):
            if name in _ARITHMETIC:
                return _ARITHMETIC[name](*operands)
            is_integer = all(value.denominator == 1 for value in operands)
            if name in _EXACT and (is_integer or name in _ROUNDING):
                return Fraction(_EXACT[name](*operands))

        reals = [self.real(value) for value in operands]
        if name in _ARITHMETIC:
            if name in ("+", "-"):
                self.largest = max(self.largest, *map(abs, reals))
            return _ARITHMETIC[name](*reals)
        limit = _MAX_GROWTH if name in _GROWING else _MAX_MAGNITUDE
        if any(mpmath.mag(value) > limit for value in reals):
            raise Enormous
        return _FUNCTIONS[name](*reals)

    def _power(self, base: Any, exponent: Any) -> Any:
        if isinstance(base, Fraction) and isinstance(exponent, Fraction):
            try:
                exact = _rational_power(base, exponent)
            except Enormous:
                if not self.point or abs(exponent) > _MAX_EXPONENT:
                    raise
                return mpmath.power(self.real(base), self.real(exponent))
            if exact is not None:
                return exact

        # (-8)^(1/3) is -2 among real numbers; mpmath takes the complex root.
        is_negative = not isinstance(base, mpmath.mpc) and base < 0
        has_real_root = isinstance(exponent, Fraction) and exponent.denominator % 2 == 1
        if is_negative and has_real_root and not self.is_complex:
            return (-1) ** exponent.numerator * self._power(-base, exponent)
        if abs(exponent) * (1 + abs(mpmath.log(abs(self.real(base)) or 1))) > _MAX_LOG:
            raise Enormous
        return mpmath.power(self.real(base), self.real(exponent))


def _rounding() -> Any:
    """Returns the relative error up to which two rounded numbers are the same."""
    return mpmath.mpf(10) ** (_UNSURE_DIGITS - mp.dps)


def _rational_power(base: Fraction, exponent: Fraction) -> Fraction | None:
    """Returns a power if it is rational, else None. Raises Enormous."""
    degree = exponent.denominator
    if degree == 1:
        if _bits(base) * abs(exponent) > _MAX_BITS and abs(base) not in (0, 1):
            raise Enormous
        return base ** int(exponent)
    if degree >= 1000 or (base < 0 and degree % 2 == 0):
        return None
    above, is_root_above = integer_nthroot(abs(base.numerator), degree)
    below, is_root_below = integer_nthroot(base.denominator, degree)
    if not (is_root_above and is_root_below):
        return None
    root = Fraction(-above if base < 0 else above, below)
    return _rational_power(root, Fraction(exponent.numerator))


def _factorial(n: Fraction, step: int = 1) -> int:
    if n < 0:
        raise Undecided
    if n > _MAX_COUNT:
        raise Enormous
    return math.prod(range(int(n), 0, -step))


def _binomial(n: Fraction, k: Fraction) -> int:
    if _bits(n) * min(k, abs(n - k)) > _MAX_BITS:
        raise Enormous
    return math.comb(int(n), int(k))


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "neg": operator.neg,
    "abs": abs,
}
_EXACT: dict[str, Callable[..., Any]] = {
    "gcd": lambda *values: math.gcd(*map(int, values)),
    "lcm": lambda *values: math.lcm(*map(int, values)),
    "max": max,
    "min": min,
    "mod": operator.mod,
    "floor": math.floor,
    "ceil": math.ceil,
    "factorial": _factorial,
    "double factorial": partial(_factorial, step=2),
    "binomial": _binomial,
}
# These take any rational numbers; the other functions take integers.
_ROUNDING = frozenset(("max", "min", "mod", "floor", "ceil"))
# Functions of real and complex numbers, but not of infinity.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "pi": lambda: +mp.pi,
    "e": lambda: +mp.e,
    "i": lambda: mpmath.mpc(0, 1),
    "max": max,
    "min": min,
    "arcsin": mpmath.asin,
    "arccos": mpmath.acos,
    "arctan": mpmath.atan,
    "ln": mpmath.log,
    "cis": mpmath.expj,
}
for _name in words("sin cos tan cot sec csc sinh cosh tanh coth exp floor ceil factorial binomial"):
    _FUNCTIONS[_name] = getattr(mpmath, _name)
_GROWING = words("exp sinh cosh tanh coth factorial binomial")


def _agree(sample: Sample) -> bool:
    one, other, largest = sample
    return one == other if isinstance(one, Fraction) else _close(one, other, largest)


def _close(a: Any, b: Any, largest: Any = 0) -> bool:
    return bool(abs(a - b) <= max(abs(a), abs(b), largest) * _rounding())


def _compared(
    a: Expression,
    b: Expression,
    verdict: Callable[[list[Sample]], bool],
    is_plausible: Callable[[Sample], bool] = lambda _: True,
) -> bool:
    """Returns the verdict on samples of two expressions, computed with as many digits as they need.
    Raises Undecided if too few samples have values.
    """
    digits = _DIGITS
    while digits <= _MAX_DIGITS:
        with mp.workdps(digits):
            samples, needed = _sampled(a, b, is_plausible)
            if needed <= digits:
                return verdict(samples)
        digits = needed
    raise Enormous


def _sampled(
    a: Expression, b: Expression, is_plausible: Callable[[Sample], bool]
) -> tuple[list[Sample], int]:
    """Returns samples, and the digits that they need. Raises Undecided if too few have values.

    Expressions without unknowns have one sample. Others have up to ten, at random points; the first
    one that is not plausible is the last. Both values of a sample are fractions, or both real or
    complex numbers.
    """
    names = sorted(unknowns(a) | unknowns(b))
    is_complex = _is_complex(a) or _is_complex(b)
    rng = random.Random(7)
    samples: list[Sample] = []
    digits = _DIGITS
    failure = Undecided()
    for i in range(_ATTEMPTS if names else 1):
        # Every other point is positive, where roots and logarithms exist.
        signs = (1,) if i % 2 == 0 else (-1, 1)
        point = {name: Fraction(rng.choice(signs) * rng.randint(30, 300), 97) for name in names}
        evaluator = _Evaluator(point, is_complex)
        try:
            one = evaluator.value(a)
            other = evaluator.value(b)
        except Undecided as error:
            failure = error
            continue
        except RecursionError:
            raise Undecided from None
        if not (isinstance(one, Fraction) and isinstance(other, Fraction)):
            one = evaluator.real(one)
            other = evaluator.real(other)
        digits = max(digits, evaluator.digits)
        samples.append((one, other, evaluator.largest))
        if len(samples) == _POINTS or not is_plausible(samples[-1]):
            return samples, digits
    if len(samples) < (3 if names else 1):
        raise failure
    return samples, digits


def same_value(a: Expression, b: Expression) -> bool:
    """Returns whether two expressions have the same value. Raises Undecided."""
    if a == b:
        return True
    if {a, b} & {INFINITY, MINUS_INFINITY}:
        return False
    try:
        return _compared(a, b, lambda samples: all(map(_agree, samples)), is_plausible=_agree)
    except Enormous:
        # What is too large to be computed equals only what is written in the same way.
        return False


def same_ratio(a: Expression, b: Expression, is_positive: bool) -> bool:
    """Returns whether b is a multiple of a, by a positive number if `is_positive`."""

    def verdict(samples: list[Sample]) -> bool:
        real = _Evaluator().real
        pairs = [(real(one), real(other)) for one, other, _ in samples]
        first, second = pairs[0]
        factor = first * second
        if factor == 0 or (is_positive and (mpmath.im(factor) != 0 or factor < 0)):
            return False
        return all(_close(first * other, second * one) for one, other in pairs)

    try:
        return _compared(a, b, verdict)
    except Undecided:
        return False


def _constant(node: Expression) -> Any:
    """Returns the value of an expression without unknowns. Raises Undecided."""
    with mp.workdps(_DIGITS):
        return _Evaluator().value(node)


def order(a: Expression, b: Expression) -> int:
    """Returns -1, 0 or 1 for a number that is less than, the same as or more than the other. Raises
    Undecided.
    """
    if same_value(a, b):
        return 0
    infinite: dict[Expression, int] = {MINUS_INFINITY: -1, INFINITY: 1}
    if a in infinite or b in infinite:
        return 1 if infinite.get(a, 0) > infinite.get(b, 0) else -1
    difference = _constant(operation("-", a, b))
    if isinstance(difference, mpmath.mpc):
        raise Undecided
    return -1 if difference < 0 else 1


def simplified(node: Expression) -> Expression:
    """Returns an expression as a number if its value is rational."""
    try:
        value = _constant(node)
    except Undecided:
        return node
    return Number(value) if isinstance(value, Fraction) else node


def is_enormous(node: Expression) -> bool:
    """Returns whether the value of an expression without unknowns exceeds the bounds."""
    try:
        _constant(node)
    except Undecided as error:
        return isinstance(error, Enormous)
    return False


def roughly(a: Expression, b: Expression) -> bool:
    """Returns whether two numbers differ by 5 % at most. Raises Undecided."""
    tolerance = operation("*", number(Fraction(1, 20)), operation("abs", a))
    return order(operation("abs", operation("-", a, b)), tolerance) <= 0
