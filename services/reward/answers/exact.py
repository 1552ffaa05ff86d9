"""Compares plain numbers exactly, as fractions: nearly every answer of GSM8K, and most of MATH,
without a worker process.
"""

import re
from fractions import Fraction
from functools import lru_cache

from services.reward.answers.expressions import Expression, Number, Operation
from services.reward.answers.notation import NotUnderstood, tokens
from services.reward.answers.quantities import read_value, written_out
from services.reward.answers.units import Unit, ratio

_PLAIN = re.compile(r"[+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?")
_MAX_TOKENS = 40
_MAX_EXPONENT = 400


def same_answer(gold: str, answer: str) -> bool | None:
    """Returns whether two cleaned answers are the same, or None when this module cannot decide.

    Numbers are compared exactly: 0.333 is not 1/3. Units count if both sides have one. An
    expression such as 46/2 with the right value is not decided here.
    """
    if gold == answer:
        return bool(gold)
    if _PLAIN.fullmatch(gold) and (match := _PLAIN.fullmatch(answer.removeprefix("$"))):
        return Fraction(gold.replace(",", "")) == Fraction(match.group().replace(",", ""))
    expected = quantity(gold)
    given = quantity(answer) if expected else None
    if expected is None or given is None:
        return None
    factor = ratio(expected[1], given[1])
    same = factor is not None and expected[0] == given[0] * factor
    return None if same and expected[2] and not given[2] else same


@lru_cache(maxsize=1024)
def quantity(text: str) -> tuple[Fraction, Unit | None, bool] | None:
    """Returns the number that a text is, its unit, and whether the number is written out (23 is,
    46/2 is not).

    The number is an integer, a (repeating) decimal, a simple or mixed fraction or a power of ten.
    Returns None for any other text, and for a number that takes long to compute.
    """
    part = tokens(text)
    # A ratio; 9 (3 x 3), which is no product.
    if (
        ":" in text
        or " (" in text
        or len(part) > _MAX_TOKENS
        or not any(token.kind == "num" for token in part)
    ):
        return None
    try:
        value = read_value(part)
        if value.node is None:
            return None
        return _rational(value.node), value.unit, written_out(value.node)
    except (NotUnderstood, ZeroDivisionError):
        return None


def _rational(node: Expression) -> Fraction:
    """Returns the value of numbers, joined by + - * /, and of powers of ten. Raises NotUnderstood
    for any other expression.
    """
    match node:
        case Number(value):
            return value
        case Operation("neg", (part,)):
            return -_rational(part)
        case Operation("/", (above, below)):
            return _rational(above) / _rational(below)
        case Operation("*", (one, other)):
            return _rational(one) * _rational(other)
        case Operation("+", (one, other)):
            return _rational(one) + _rational(other)
        case Operation("-", (one, other)):
            return _rational(one) - _rational(other)
        case Operation("^", (Number(10), power)):
            exponent = _rational(power)
            if exponent.denominator == 1 and abs(exponent) <= _MAX_EXPONENT:
                return Fraction(10) ** int(exponent)
    raise NotUnderstood
