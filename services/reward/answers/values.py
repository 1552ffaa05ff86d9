"""Compares expressions by their values.

Rational values are exact. Others have `_DIGITS` digits and are equal when they agree in `_AGREE` of
them. Expressions with unknowns are equal when their values at random points are.
"""

import math
import operator
import random
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

import mpmath
from mpmath import mp

from services.reward.answers.expressions import Node, symbols

_MAX_BITS = 200_000
_MAX_LOG = 1e7
_DIGITS = 150
_AGREE = 110
_POINTS = 8


class Undecided(ArithmeticError):
    """The value exceeds the bounds of this module, or does not exist."""


def _has(node: Node, kind: str) -> bool:
    return node[0] == kind or any(_has(part, kind) for part in node[1:] if isinstance(part, tuple))


def _checked(value: Any) -> Any:
    """Returns a value, as a real number if its imaginary part is a rounding error. Raises Undecided
    for a fraction that is too large.
    """
    if isinstance(value, Fraction):
        if _bits(value) > _MAX_BITS:
            raise Undecided
        return value
    if isinstance(value, mpmath.mpc):
        rounding = abs(value.real) * mpmath.mpf(10) ** -_AGREE
        return value.real if abs(value.imag) <= rounding else value
    return value


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _real(value: Any) -> Any:
    return mpmath.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


class PointEvaluator:
    """Evaluates expressions at one point."""

    def __init__(self, point: Mapping[str, Fraction], is_complex: bool) -> None:
        self._point = point
        self._complex = is_complex
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
            base, exponent = operands
            return self._power(base, exponent)
        if kind == "root":
            value, degree = operands
            return self._power(value, 1 / degree)
        if kind in _EXACT:
            if not exact:
                raise Undecided
            return _EXACT[kind](operands)
        if kind == "abs":
            return abs(operands[0])
        if kind == "floor":
            value = operands[0]
            return Fraction(math.floor(value) if exact else int(mpmath.floor(value)))
        if kind == "ceil":
            value = operands[0]
            return Fraction(math.ceil(value) if exact else int(mpmath.ceil(value)))
        if kind == "factorial":
            return self._factorial(operands[0])
        if kind == "double factorial":
            return Fraction(math.prod(range(_small(operands[0]), 0, -2)))
        if kind == "binomial":
            n, k = operands
            return _binomial(n, k)
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
        if isinstance(base, Fraction) and isinstance(exponent, Fraction):
            exact = _rational_power(base, exponent)
            if exact is not None:
                return exact

        is_negative = not isinstance(base, mpmath.mpc) and base < 0
        has_real_root = isinstance(exponent, Fraction) and exponent.denominator % 2 == 1
        if is_negative and has_real_root and not self._complex:
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


def _binomial(n: Any, k: Any) -> Any:
    is_countable = isinstance(k, Fraction) and k.denominator == 1 and 0 <= k <= 5000
    if not is_countable:
        return mpmath.binomial(_real(n), _real(k))
    if isinstance(n, Fraction) and n.denominator == 1 and k <= n <= 5000:
        return Fraction(math.comb(int(n), int(k)))
    product: Any = Fraction(1)
    for j in range(int(k)):
        product *= (n - j) / Fraction(j + 1)
    return product


def _rational_power(base: Fraction, exponent: Fraction) -> Fraction | None:
    """Returns a power if it is rational, else None. Raises Undecided when it is too large."""
    if exponent.denominator == 1:
        if _bits(base) * abs(exponent) > _MAX_BITS and abs(base) not in (0, 1):
            raise Undecided
        return base ** int(exponent)
    if base == 0:
        return Fraction(0)
    if exponent.denominator >= 1000:
        return None
    root = _exact_root(base, exponent.denominator)
    return None if root is None else _rational_power(root, Fraction(exponent.numerator))


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
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "neg": operator.neg,
}
_EXACT: dict[str, Callable[[list[Any]], Any]] = {
    "gcd": _gcd,
    "lcm": _lcm,
    "max": max,
    "min": min,
    "mod": lambda values: values[0] % values[1],
}
_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "sin": mpmath.sin,
    "cos": mpmath.cos,
    "tan": mpmath.tan,
    "cot": mpmath.cot,
    "sec": mpmath.sec,
    "csc": mpmath.csc,
    "sinh": mpmath.sinh,
    "cosh": mpmath.cosh,
    "tanh": mpmath.tanh,
    "coth": mpmath.coth,
    "arcsin": mpmath.asin,
    "arccos": mpmath.acos,
    "arctan": mpmath.atan,
    "ln": mpmath.log,
    "exp": mpmath.exp,
    "norm": abs,
}


def _agree(a: Any, b: Any, largest: Any) -> bool:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    a = _real(a)
    b = _real(b)
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
            value_a, largest_a = constant(a)
            value_b, largest_b = constant(b)
            return _agree(value_a, value_b, max(largest_a, largest_b))
    return all(_agree(x, y, largest) for x, y, largest in sampled(a, b, names))


def sampled(a: Node, b: Node, names: list[str]) -> Iterator[tuple[Any, Any, Any]]:
    """Yields the values of two expressions at points where both have one, and the largest term of
    their sums. Raises Undecided after fewer than three points.
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
                value_a = evaluator.value(a)
                value_b = evaluator.value(b)
        except Undecided:
            continue
        found += 1
        yield value_a, value_b, evaluator.largest
    if found < 3:
        raise Undecided
