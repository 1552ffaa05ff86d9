"""Compares expressions by their values.

Rational values are exact. Others have 150 digits, or more when they are mixed with longer rational
numbers, and are equal when they agree in all but the last 40. Expressions with unknowns are equal
when their values at random points are. Only verdicts leave this module, never numbers, so that
nobody mixes two precisions.
"""

import math
import operator
import random
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

import mpmath
from mpmath import mp

from services.reward.answers.expressions import Node, symbols

INFINITY: Node = ("infty",)
MINUS_INFINITY: Node = ("neg", INFINITY)
_MAX_BITS = 200_000
_MAX_LOG = 1e7
_MAX_EXPONENT = 10**15
"""Of an unknown's value: its power is rounded."""
_DIGITS = 150
_MAX_DIGITS = 3000
_UNSURE_DIGITS = 40
_SPARE_DIGITS = 60
_POINTS = 8
_MAX_MAGNITUDE = 10_000
"""Bits of an argument of a function; sin(10^3000) needs as many digits of pi."""
_MAX_GROWTH = 40


class Undecided(ArithmeticError):
    """The value exceeds the bounds of this module, or does not exist."""


class Enormous(Undecided):
    """The value exceeds the bounds: it is no number that anyone writes as an answer."""


class Sample(NamedTuple):
    """The values of two expressions at one point, and the largest term of their sums."""

    one: Any
    other: Any
    largest: Any


def _has(node: Node, kind: str) -> bool:
    return node[0] == kind or any(_has(part, kind) for part in node[1:] if isinstance(part, tuple))


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


class _Evaluator:
    """Evaluates expressions at one point."""

    def __init__(self, point: Mapping[str, Fraction], is_complex: bool) -> None:
        self._point = point
        self._complex = is_complex
        self.largest: Any = mpmath.mpf(0)
        """The largest term of any sum; rounding errors are relative to it."""
        self.digits = _DIGITS
        """Digits with which no exact number loses what tells it from another."""

    def value(self, node: Node) -> Any:
        """Returns a Fraction, or a real or complex mpmath number. Raises Undecided when there is no
        value.
        """
        kind = node[0]
        if kind == "num":
            return node[1]
        if kind == "sym":
            return self._point[node[1]]
        if kind in ("pi", "e"):
            return +getattr(mpmath, kind)
        if kind == "i":
            return mpmath.mpc(0, 1)
        if kind == "infty":
            raise Undecided
        operands = [self.value(part) for part in node[1:]]
        try:
            return self._checked(self._apply(kind, operands))
        except (ValueError, ZeroDivisionError, OverflowError, TypeError) as error:
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
            if self._point and not self._complex:
                raise Undecided
        return value

    def _real(self, value: Any) -> Any:
        if not isinstance(value, Fraction):
            return value
        self.digits = max(self.digits, _DIGITS + _bits(value) * 3 // 10 - _SPARE_DIGITS)
        return mpmath.mpf(value.numerator) / value.denominator

    def _apply(self, kind: str, operands: list[Any]) -> Any:
        exact = all(isinstance(value, Fraction) for value in operands)
        if kind == "^":
            return self._power(*operands)
        if kind == "root":
            return self._power(operands[0], 1 / operands[1])
        if kind == "factorial" and not exact:
            return self._function("factorial", operands[0])
        if kind == "binomial":
            return self._binomial(*operands)
        if kind in _EXACT:
            if not exact:
                raise Undecided
            return _EXACT[kind](*operands)
        if kind in ("floor", "ceil"):
            self._bounded(operands[0], _MAX_BITS)
            rounded = getattr(math if exact else mpmath, kind)(operands[0])
            return Fraction(int(rounded))
        if kind in _FUNCTIONS:
            return self._function(kind, operands[0])
        if not exact and kind not in ("abs", "norm"):
            operands = [self._real(value) for value in operands]
            if kind in ("+", "-"):
                self.largest = max(self.largest, *(abs(value) for value in operands))
        return _ARITHMETIC[kind](*operands)

    def _bounded(self, value: Any, bits: int) -> None:
        if mpmath.mag(self._real(value)) > bits:
            raise Enormous

    def _function(self, kind: str, value: Any) -> Any:
        if (kind == "ln" and value == 1) or (kind in ("sin", "tan") and value == 0):
            return Fraction(0)
        if kind == "factorial" and not self._point:
            raise Undecided
        self._bounded(value, _MAX_GROWTH if kind in _GROWING else _MAX_MAGNITUDE)
        return _FUNCTIONS[kind](self._real(value))

    def _power(self, base: Any, exponent: Any) -> Any:
        if isinstance(base, Fraction) and isinstance(exponent, Fraction):
            try:
                exact = _rational_power(base, exponent)
            except Enormous:
                if not self._point or abs(exponent) > _MAX_EXPONENT:
                    raise
                return mpmath.power(self._real(base), self._real(exponent))
            if exact is not None:
                return exact

        is_negative = not isinstance(base, mpmath.mpc) and base < 0
        has_real_root = isinstance(exponent, Fraction) and exponent.denominator % 2 == 1
        if is_negative and has_real_root and not self._complex:
            return (-1) ** exponent.numerator * self._power(-base, exponent)
        if abs(exponent) * (1 + abs(mpmath.log(abs(self._real(base)) or 1))) > _MAX_LOG:
            raise Enormous
        return mpmath.power(self._real(base), self._real(exponent))

    def _binomial(self, n: Any, k: Any) -> Any:
        if not isinstance(k, Fraction) or k.denominator != 1:
            return mpmath.binomial(self._real(n), self._real(k))
        if isinstance(n, Fraction) and n.denominator == 1 and n >= k >= 0:
            if _bits(n) * min(k, n - k) > _MAX_BITS:
                raise Enormous
            return Fraction(math.comb(int(n), int(k)))
        product: Any = Fraction(1)
        for j in range(_small(k)):
            product = self._checked(product * (n - j) / Fraction(j + 1))
        return product


def _rounding() -> Any:
    """Returns the relative error up to which two rounded numbers are the same."""
    return mpmath.mpf(10) ** (_UNSURE_DIGITS - mp.dps)


def _small(value: Fraction) -> int:
    if value.denominator != 1 or value < 0:
        raise Undecided
    if value > 5000:
        raise Enormous
    return int(value)


def _rational_power(base: Fraction, exponent: Fraction) -> Fraction | None:
    """Returns a power if it is rational, else None. Raises Enormous."""
    if exponent.denominator == 1:
        if _bits(base) * abs(exponent) > _MAX_BITS and abs(base) not in (0, 1):
            raise Enormous
        return base ** int(exponent)
    if exponent.denominator >= 1000 or (base < 0 and exponent.denominator % 2 == 0):
        return None
    parts = []
    for part in (abs(base.numerator), base.denominator):
        root = int(mpmath.nint(mpmath.root(part, exponent.denominator)))
        if part.bit_length() >= 480 or root**exponent.denominator != part:
            return None
        parts.append(root)
    root_of_base = Fraction(-parts[0] if base < 0 else parts[0], parts[1])
    return _rational_power(root_of_base, Fraction(exponent.numerator))


def _integers(values: tuple[Fraction, ...]) -> list[int]:
    if any(value.denominator != 1 for value in values):
        raise Undecided
    return [int(value) for value in values]


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "neg": operator.neg,
    "abs": abs,
    "norm": abs,
}
_EXACT: dict[str, Callable[..., Any]] = {
    "gcd": lambda *values: Fraction(math.gcd(*_integers(values))),
    "lcm": lambda *values: Fraction(math.lcm(*_integers(values))),
    "max": max,
    "min": min,
    "mod": operator.mod,
    "factorial": lambda value: Fraction(math.factorial(_small(value))),
    "double factorial": lambda value: Fraction(math.prod(range(_small(value), 0, -2))),
}
_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    **{
        name: getattr(mpmath, name)
        for name in "sin cos tan cot sec csc sinh cosh tanh coth exp".split()
    },
    "arcsin": mpmath.asin,
    "arccos": mpmath.acos,
    "arctan": mpmath.atan,
    "ln": mpmath.log,
    "factorial": mpmath.factorial,
}
_GROWING = frozenset(("exp", "sinh", "cosh", "tanh", "coth", "factorial"))


def _agree(sample: Sample) -> bool:
    one, other, largest = sample
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return one == other
    real = _Evaluator({}, False)._real
    return _close(real(one), real(other), largest)


def _close(a: Any, b: Any, largest: Any = 0) -> bool:
    return bool(abs(a - b) <= max(abs(a), abs(b), largest) * _rounding())


def _compared(a: Node, b: Node, verdict: Callable[[list[Sample]], bool]) -> bool:
    """Returns the verdict on the values of two expressions at points where both have one: at one
    point if there are no unknowns. Raises Undecided for too few points.
    """
    digits = _DIGITS
    while True:
        with mp.workdps(digits):
            samples, needed = _sampled(a, b)
            if needed <= digits:
                return verdict(samples)
        digits = needed
        if digits > _MAX_DIGITS:
            raise Enormous


def _sampled(a: Node, b: Node) -> tuple[list[Sample], int]:
    """Returns samples, and the digits that they need. Raises Undecided for too few of them."""
    names = sorted(symbols(a) | symbols(b))
    is_complex = _has(a, "i") or _has(b, "i")
    rng = random.Random(7)
    samples: list[Sample] = []
    digits = _DIGITS
    failure = Undecided()
    for i in range(3 * _POINTS if names else 1):
        signs = (1,) if i < _POINTS else (-1, 1)
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
        digits = max(digits, evaluator.digits)
        samples.append(Sample(one, other, evaluator.largest))
    if len(samples) < (3 if names else 1):
        raise failure
    return samples, digits


def same_value(a: Node, b: Node) -> bool:
    """Returns whether two expressions have the same value. Raises Undecided."""
    if a == b:
        return True
    infinite = (INFINITY, MINUS_INFINITY)
    if a in infinite or b in infinite:
        return False
    try:
        return _compared(a, b, lambda samples: all(map(_agree, samples)))
    except Enormous:
        return (
            False  # what is too large to be computed is not the other, which is written otherwise
        )


def same_ratio(a: Node, b: Node, is_positive: bool) -> bool:
    """Returns whether b is a multiple of a, by a positive number if `is_positive`."""

    def verdict(samples: list[Sample]) -> bool:
        real = _Evaluator({}, False)._real
        pairs = [(real(one), real(other)) for one, other, _ in samples]
        first, second = pairs[0]
        if first == 0 or second == 0:
            return False
        if is_positive and (mpmath.im(first * second) != 0 or first * second < 0):
            return False
        return all(_close(first * other, second * one) for one, other in pairs)

    try:
        return _compared(a, b, verdict)
    except Undecided:
        return False


def order(a: Node, b: Node) -> int:
    """Returns -1, 0 or 1 for a number that is less than, the same as or more than the other. Raises
    Undecided.
    """
    if same_value(a, b):
        return 0
    if a == MINUS_INFINITY or b == INFINITY:
        return -1
    if b == MINUS_INFINITY or a == INFINITY:
        return 1
    if symbols(a) | symbols(b):
        raise Undecided
    with mp.workdps(_DIGITS):
        difference = _Evaluator({}, is_complex=False).value(("-", a, b))
        if isinstance(difference, mpmath.mpc):
            raise Undecided
        return -1 if difference < 0 else 1


def simplified(node: Node) -> Node:
    """Returns an expression as a number if its value is rational."""
    try:
        with mp.workdps(_DIGITS):
            value = _Evaluator({}, is_complex=False).value(node)
    except (Undecided, KeyError):
        return node
    return ("num", value) if isinstance(value, Fraction) else node


def roughly(a: Node, b: Node) -> bool:
    """Returns whether two numbers differ by 5 % at most. Raises Undecided."""
    twentieth = ("*", ("num", Fraction(1, 20)), ("abs", a))
    return order(("abs", ("-", a, b)), twentieth) <= 0
