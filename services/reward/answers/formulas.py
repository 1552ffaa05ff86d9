"""Compares two values: numerically, and with math-verify if that cannot decide. Runs in worker
processes.
"""

import re
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended import latex2sympy
from math_verify import verify

from services.reward.answers.expressions import Number, operation
from services.reward.answers.notation import DEGREE, Tokens
from services.reward.answers.quantities import Value
from services.reward.answers.units import ratio
from services.reward.answers.values import Undecided, is_enormous, same_value

_LATEX = {
    DEGREE: "^\\circ",
    "\\root": "\\sqrt",
    "\\lt": "<",
    "\\gt": ">",
    "\\times": "\\cdot",
    "\\mod": "\\bmod",
}
_TOLERANCE = sympy.Rational(1, 10**30)


def same_values(expected: Value, given: Value) -> bool:
    """Returns whether two values are the same, with compatible units."""
    factor = ratio(expected.unit, given.unit)
    if factor is None:
        return False
    nodes = [value.node for value in (expected, given) if value.node is not None]
    if len(nodes) == 2:
        left, right = nodes
        try:
            # An equal node is equal even where it has no value, so it is not multiplied by 1.
            return same_value(left, right if factor == 1 else operation("*", right, Number(factor)))
        except Undecided:
            pass
    # sympy would compute what is enormous all the same
    if factor != 1 or any(map(is_enormous, nodes)):
        return False
    return same_formulas(expected.source, given.source)


def _latex(part: Tokens) -> str:
    text = " ".join(_LATEX.get(token.text, token.text) for token in part)
    text = text.replace(" { ", "{").replace(" }", "}")
    return re.sub(r"\\frac (\d) ?(\d)", r"\\frac{\1}{\2}", text)


@lru_cache(maxsize=256)
def _parsed(latex: str) -> object:
    """Returns the sympy expression that math-verify reads, evaluated: verify() would evaluate it
    again for each of its comparisons.
    """
    found = latex2sympy(latex)
    return found.doit() if isinstance(found, sympy.Basic) else found


def same_formulas(gold: Tokens, answer: Tokens) -> bool:
    """Returns whether math-verify finds two formulas equal; its verdict on numbers is checked
    again.

    Raises MemoryError and RecursionError. It has no time limit: the process that calls it is killed
    instead.
    """
    try:
        expected = _parsed(_latex(gold))
        given = _parsed(_latex(answer))
        same = verify(expected, given, timeout_seconds=None, raise_on_error=True)
        return bool(same) and _close(expected, given)
    except (MemoryError, RecursionError):  # not a verdict: math-verify itself would return "wrong"
        raise
    except Exception:  # sympy may raise anything when it cannot read or compare
        return False


def _close(a: Any, b: Any) -> bool:
    """Returns False if two expressions are numbers that differ. math-verify rounds to 6 decimals,
    and so takes 10^-20 for 10^-30.
    """
    if not all(isinstance(item, sympy.Expr) and item.is_number for item in (a, b)):
        return True
    if (a.is_Rational and b.is_Rational) or not (a.is_finite and b.is_finite):
        return bool(a == b)
    difference = abs(sympy.N(a - b, 50, maxn=400))
    size = max(abs(sympy.N(a)), abs(sympy.N(b)))
    return bool(difference <= _TOLERANCE * size)
