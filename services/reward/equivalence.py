"""Compares two answers with math-verify. Runs in the processes of `services.reward.worker`, not in the server."""

import itertools
import json
import logging
import re
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

import sympy
from math_verify import parse, verify

_HUNDRED = sympy.Integer(100)
_TOLERANCE = 1e-6
_POWER = re.compile(r"\*\*\s*(-?\w+|\([^()]*\))")
_WARM_UP = (
    ("\\frac{x+1}{2}", "(1+x)/2"),
    ("\\sqrt{2}", "1.4"),
    ("y=2x+1", "y=2x-1"),
    ("2\\sqrt{3}+\\sqrt[3]{5}", "\\sqrt{12}+5^{1/3}"),
    ("2\\pi", "2 pi"),
    ("(-\\infty, 2] \\cup [3, 5)", "[3,5) \\cup (-\\infty,2]"),
    ("\\{1, 2, 3\\}", "3, 2, 1"),
    ("(1, \\frac{2}{3})", "(1, 0.5)"),
    ("\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}", "\\begin{pmatrix} 1 & 2 \\\\ 3 & 5 \\end{pmatrix}"),
    ("x \\le 3", "3 \\ge x"),
    ("\\sin(2x) + \\cos x", "2\\sin x \\cos x + \\cos x"),
    ("\\ln 2 + \\log_{3} 5", "\\ln(2) + \\frac{\\ln 5}{\\ln 3}"),
    ("\\binom{6}{2}", "5!"),
    ("3+4i", "4i+3"),
    ("5.4 \\text{ cents}", "5 \\text{ cents}"),
    ("90^\\circ", "\\frac{\\pi}{2}"),
    ("|x-1|", "|1-x|"),
    ("x^2+2xy+y^2", "(x+y)^2"),
    ("\\int_0^1 x dx", "\\sum_{i=1}^{3} i"),
    ("\\text{east}", "west"),
)
"""Comparisons of most kinds of answers."""
_PI = re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])")


def equivalent(gold: str, answer: str) -> bool:
    """Returns whether math-verify finds two answers equal; its verdict on numbers is checked again.

    Raises MemoryError and RecursionError. It has no time limit: the process that calls it is killed instead.
    """
    expected, given = _parse(gold), _parse(answer)
    if not any(_verify(a, b) for a, b in itertools.product(expected, given)):
        return False
    return not (expected and given) or _close(expected[0], given[0])


def _verify(expected: object, given: object) -> bool:
    try:
        return bool(verify(expected, given, timeout_seconds=None, raise_on_error=True))
    except (MemoryError, RecursionError):  # no verdict: math-verify alone would return "wrong"
        raise
    except Exception:  # sympy cannot compare the two
        return False


def _parse(text: str) -> list[object]:
    percent = text.endswith("%")
    bare = text.removesuffix("%").removesuffix("\\").strip() if percent else text
    # LaTeX has no ** and pi; math-verify would read the 2 of 2**3 and ignore the rest.
    latex = _PI.sub(r"\\pi ", _POWER.sub(r"^{\1}", bare))
    try:
        found: list[object] = parse(f"${latex}$", parsing_timeout=None, raise_on_error=True)
    except (MemoryError, RecursionError):
        raise
    except Exception:  # sympy raises anything for text that is not mathematics: then only the text can match
        return [text]
    return [item / _HUNDRED if isinstance(item, sympy.Expr) else text for item in found] if percent else found


def _close(expected: object, given: object) -> bool:
    """Returns False for two numbers that differ: math-verify rounds to 6 decimals, so it takes 10^-20 for 10^-30."""
    numbers = [item.doit() for item in (expected, given) if isinstance(item, sympy.Expr) and item.is_number]
    if len(numbers) < 2:
        return True
    a, b = numbers
    if a.is_Rational and b.is_Rational:
        return bool(a == b)
    if not (a.is_finite and b.is_finite):
        return bool(a == b)
    difference, size = abs(sympy.N(a - b, 30, maxn=400)), max(abs(sympy.N(a)), abs(sympy.N(b)))
    return bool(difference <= _TOLERANCE * size)


def prepare(arguments: dict[str, Any]) -> Callable[[], Callable[[str], str]]:
    """Loads and warms up math-verify; a worker's handler answers `[gold, answer]` with `right` or `wrong`.

    Args:
        arguments: `memory_mb`, the address space of a worker, and `alarm_s`, the seconds of a processor after which a worker
            that nobody kills ends itself.
    """
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    for gold, given in _WARM_UP:  # fills the caches that every worker inherits
        equivalent(gold, given)
    memory_bytes, alarm_s = int(arguments["memory_mb"]) << 20, int(arguments["alarm_s"])

    def handle(line: str) -> str:
        gold, answer = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, alarm_s)  # ends a hanging worker when no other process is left to kill it
        verdict = "right" if equivalent(gold, answer) else "wrong"
        signal.setitimer(signal.ITIMER_PROF, 0)
        if verdict == "wrong" and _used_bytes() > memory_bytes // 2:
            raise MemoryError  # in many places math-verify returns "wrong" when it runs out of memory
        return verdict

    def make() -> Callable[[str], str]:
        for gold, given in _WARM_UP[:3]:  # copies the memory that a new process shares with its parent
            equivalent(gold, given)
        return handle

    return make


def _used_bytes() -> int:
    """Returns the peak memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10
