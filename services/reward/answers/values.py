"""Compares expressions by their values.

Rational values are exact. Others have `_DIGITS` digits and are equal when they agree in `_AGREE` of
them. Expressions with unknowns are equal when their values at random points are.
"""

import math
import operator
import random
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from functools import reduce
from typing import Any

import mpmath
from mpmath import mp

from services.reward.answers.expressions import Node, symbols

_MAX_BITS = 200_000
_MAX_LOG = 1e7
_DIGITS, _AGREE = 150, 110
_POINTS = 8


class Undecided(ArithmeticError):
    """The value exceeds the bounds of this module, or does not exist."""


def _has(node: Node, kind: str) -> bool:
    return node[0] == kind or any(_has(part, kind) for part in node[1:] if isinstance(part, tuple))


def _checked(value: Any) -> Any:
    if isinstance(value, Fraction):
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
            raise Undecided
        return value
    if (
        isinstance(value, mpmath.mpc)
        and abs(value.imag) <= abs(value.real) * mpmath.mpf(10) ** -_AGREE
    ):
        return value.real
    return value


def _real(value: Any) -> Any:
    return mpmath.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


class PointEvaluator:
    """Evaluates expressions at one point."""

    def __init__(self, point: Mapping[str, Fraction], is_complex: bool) -> None:
        self._point, self._complex = point, is_complex
        self.largest: Any = mpmath.mpf(0)
        """The largest term of any sum; rounding errors are relative to it."""

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
            found = _checked(self._apply(kind, operands))
        except (ValueError, ZeroDivisionError, OverflowError, TypeError) as error:
            raise Undecided from error
        if not isinstance(found, Fraction) and not mpmath.isfinite(found):
            raise Undecided
        return found

    def _apply(self, kind: str, operands: list[Any]) -> Any:
        exact = all(isinstance(value, Fraction) for value in operands)
        if kind in _ARITHMETIC:
            if not exact:
                operands = [_real(value) for value in operands]
                if kind in ("+", "-"):
                    self.largest = max(self.largest, *(abs(value) for value in operands))
            return _ARITHMETIC[kind](*operands)
        if kind == "^":
            return self._power(*operands)
        if kind == "root":
            value, degree = operands
            return self._power(value, 1 / degree)
        if kind in _EXACT:
            if not exact:
                raise Undecided
            return _EXACT[kind](operands)
        if kind == "abs":
            return abs(operands[0])
        if kind in ("floor", "ceil"):
            value = operands[0]
            if exact:
                return Fraction(
                    operands[0].__floor__() if kind == "floor" else operands[0].__ceil__()
                )
            return Fraction(int((mpmath.floor if kind == "floor" else mpmath.ceil)(value)))
        if kind == "factorial":
            return self._factorial(operands[0])
        if kind == "double factorial":
            return Fraction(math.prod(range(_small(operands[0]), 0, -2)))
        if kind == "binomial":
            n, k = operands
            if isinstance(k, Fraction) and k.denominator == 1 and 0 <= k <= 5000:
                if isinstance(n, Fraction) and n.denominator == 1 and k <= n <= 5000:
                    return Fraction(math.comb(int(n), int(k)))
                return reduce(
                    operator.mul, ((n - j) / Fraction(j + 1) for j in range(int(k))), Fraction(1)
                )
            return mpmath.binomial(_real(n), _real(k))
        if (kind == "ln" and operands[0] == 1) or (kind in ("sin", "tan") and operands[0] == 0):
            return Fraction(0)
        return self._domain(_FUNCTIONS[kind](_real(operands[0])))

    def _domain(self, value: Any) -> Any:
        """Returns a value, unless it leaves the real numbers at a point of a real expression."""
        value = _checked(value)
        if isinstance(value, mpmath.mpc) and self._point and not self._complex:
            raise Undecided
        return value

    def _power(self, base: Any, exponent: Any) -> Any:
        if (
            isinstance(exponent, Fraction)
            and exponent.denominator == 1
            and isinstance(base, Fraction)
        ):
            size = max(base.numerator.bit_length(), base.denominator.bit_length()) * abs(exponent)
            if size > _MAX_BITS and abs(base) not in (0, 1):
                raise Undecided
            return base ** int(exponent)
        if isinstance(base, Fraction) and isinstance(exponent, Fraction):
            if base == 0:
                return Fraction(0)
            if (
                abs(exponent.denominator) < 1000
                and (exact := _exact_root(base, exponent.denominator)) is not None
            ):
                return self._power(exact, Fraction(exponent.numerator))
        negative = not isinstance(base, mpmath.mpc) and base < 0
        if (
            negative
            and isinstance(exponent, Fraction)
            and exponent.denominator % 2
            and not self._complex
        ):
            return (-1) ** exponent.numerator * self._power(-base, exponent)
        if abs(exponent) * (1 + abs(mpmath.log(abs(_real(base)) or 1))) > _MAX_LOG:
            raise Undecided
        return self._domain(mpmath.power(_real(base), _real(exponent)))

    def _factorial(self, value: Any) -> Any:
        if isinstance(value, Fraction) and value.denominator == 1:
            return Fraction(math.factorial(_small(value)))
        if not self._point:
            raise Undecided
        return mpmath.gamma(_real(value) + 1)


def _small(value: Any) -> int:
    if not isinstance(value, Fraction) or value.denominator != 1 or not 0 <= value <= 5000:
        raise Undecided
    return int(value)


def _exact_root(value: Fraction, degree: int) -> Fraction | None:
    """Returns the real root of a rational number if it is rational, else None."""
    sign = -1 if value < 0 else 1
    if sign < 0 and degree % 2 == 0:
        return None
    roots = []
    for part in (abs(value.numerator), value.denominator):
        found = int(mpmath.nint(mpmath.root(part, degree))) if part.bit_length() < 480 else 0
        if found**degree != part:
            return None
        roots.append(found)
    return Fraction(sign * roots[0], roots[1])


def _integers(values: list[Any]) -> list[int]:
    if any(value.denominator != 1 for value in values):
        raise Undecided
    return [int(value) for value in values]


def _lcm(values: list[Any]) -> Fraction:
    return Fraction(math.lcm(*_integers(values)))


def _gcd(values: list[Any]) -> Fraction:
    return Fraction(math.gcd(*_integers(values)))


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "neg": operator.neg
}  # fmt: skip
_EXACT: dict[str, Callable[[list[Any]], Any]] = {
    "gcd": _gcd, "lcm": _lcm, "max": max, "min": min, "mod": lambda values: values[0] % values[1]
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "sin": mpmath.sin, "cos": mpmath.cos, "tan": mpmath.tan, "cot": mpmath.cot, "sec": mpmath.sec, "csc": mpmath.csc,
    "sinh": mpmath.sinh, "cosh": mpmath.cosh, "tanh": mpmath.tanh, "coth": mpmath.coth, "arcsin": mpmath.asin,
    "arccos": mpmath.acos, "arctan": mpmath.atan, "ln": mpmath.log, "exp": mpmath.exp, "norm": abs,
}  # fmt: skip


def _agree(a: Any, b: Any, largest: Any) -> bool:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    a, b = _real(a), _real(b)
    return bool(abs(a - b) <= max(abs(a), abs(b), largest) * mpmath.mpf(10) ** -_AGREE)


def constant(node: Node) -> tuple[Any, Any]:
    """Returns the value of an expression without unknowns, and the largest term of its sums. Raises
    Undecided.
    """
    with mp.workdps(_DIGITS):
        evaluator = PointEvaluator({}, _has(node, "i"))
        try:
            return evaluator.value(node), evaluator.largest
        except RecursionError:
            raise Undecided from None


def same_value(a: Node, b: Node) -> bool:
    """Returns whether two expressions have the same value. Raises Undecided."""
    if a == b:
        return True
    if a[0] == "infty" or b[0] == "infty" or ("neg", ("infty",)) in (a, b):
        return False
    names = sorted(symbols(a) | symbols(b))
    if not names:
        with mp.workdps(_DIGITS):
            (x, largest), (y, other) = constant(a), constant(b)
            return _agree(x, y, max(largest, other))
    return all(_agree(x, y, largest) for x, y, largest in sampled(a, b, names))


def sampled(a: Node, b: Node, names: list[str]) -> Iterator[tuple[Any, Any, Any]]:
    """Yields the values of two expressions at points where both have one. Raises Undecided after
    fewer than three points.
    """
    rng = random.Random(7)
    found = 0
    is_complex = _has(a, "i") or _has(b, "i")
    for i in range(3 * _POINTS):
        signs = (1,) if i < _POINTS else (-1, 1)
        point = {name: Fraction(rng.choice(signs) * rng.randint(30, 300), 97) for name in names}
        evaluator = PointEvaluator(point, is_complex)
        try:
            with mp.workdps(_DIGITS):
                values = evaluator.value(a), evaluator.value(b), evaluator.largest
        except Undecided:
            continue
        found += 1
        yield values
    if found < 3:
        raise Undecided
