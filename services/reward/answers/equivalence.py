"""Compares two answers by their meaning. Runs in the processes of `services.reward.worker`, not in
the server.
"""

import json
import logging
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from services.reward.answers.expressions import symbols
from services.reward.answers.formulas import same_formulas, same_values
from services.reward.answers.notation import tokens
from services.reward.answers.quantities import Value, written_out
from services.reward.answers.readings import read
from services.reward.answers.shapes import (
    Based,
    Choice,
    Many,
    Matrix,
    Named,
    Ratio,
    Reading,
    Region,
    Relation,
    TupleOrInterval,
    Words,
    as_region,
)
from services.reward.answers.values import Undecided, sampled

_WARM_UP = (
    ("\\frac{x+1}{2}", "(1+x)/2"),
    ("\\sqrt{2}", "1.4"),
    ("y=2x+1", "y=2x-1"),
    ("2\\sqrt{3}+\\sqrt[3]{5}", "\\sqrt{12}+5^{1/3}"),
    ("2\\pi", "2 pi"),
    ("(-\\infty, 2] \\cup [3, 5)", "[3,5) \\cup (-\\infty,2]"),
    ("\\{1, 2, 3\\}", "3, 2, 1"),
    ("(1, \\frac{2}{3})", "(1, 0.5)"),
    (
        "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}",
        "\\begin{pmatrix} 1 & 2 \\\\ 3 & 5 \\end{pmatrix}",
    ),
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
"""Example comparisons for most kinds of answers."""


def verdict(gold: str, answer: str) -> str:
    """Returns "right", "wrong", "unparsable" for an answer that is not understood completely, or
    "unevaluated".

    Unevaluated is an expression with the right value when the gold answer is a number: `5 + 18` or
    `46/2` for 23.

    Raises MemoryError and RecursionError. It has no time limit: the process that calls it is killed
    instead.
    """
    if [token.text for token in tokens(gold)] == [token.text for token in tokens(answer)]:
        return "right"
    given = read(answer)
    if given is None:
        return "unparsable"
    expected = read(gold)
    if expected is None:
        return "wrong"
    if any(isinstance(reading, Value) and reading.node is None for reading in (expected, given)):
        right = same_formulas(tokens(gold), tokens(answer))
    else:
        right = same(expected, given)
    if right and _unevaluated(expected, given):
        return "unevaluated"
    return "right" if right else "wrong"


def equivalent(gold: str, answer: str) -> bool:
    """Returns whether two answers are equal."""
    return verdict(gold, answer) == "right"


def _unevaluated(expected: Reading, given: Reading) -> bool:
    """Returns whether a part of an answer is an uncomputed expression where the gold answer has a
    number.
    """
    numbers = [
        value
        for value in _values(expected)
        if _is_number(value) and not any(t.text == ":" for t in value.source)
    ]
    computations = [value for value in _values(given) if not _is_number(value)]
    return any(same_values(number, value) for value in computations for number in numbers)


def _is_number(value: Value) -> bool:
    return value.node is not None and written_out(value.node)


def _values(reading: Reading) -> Iterator[Value]:
    """Yields the values in a reading."""
    parts: Sequence[Reading | None] = ()
    if isinstance(reading, Value):
        yield reading
    elif isinstance(reading, Choice):
        parts = (reading.value,)
    elif isinstance(reading, Many | TupleOrInterval):
        parts = reading.items
    elif isinstance(reading, Named):
        parts = [value for _, value in reading.values]
    elif isinstance(reading, Matrix):
        parts = [cell for row in reading.rows for cell in row]
    elif isinstance(reading, Region):
        parts = [
            Value(end, None, ())
            for interval in reading.intervals
            for end in (interval[0], interval[2])
        ]
    for part in parts:
        if part is not None:
            yield from _values(part)


def same(expected: Reading, given: Reading) -> bool:
    """Returns whether two readings have the same value."""
    if isinstance(expected, Choice) or isinstance(given, Choice):
        return _same_choice(expected, given)
    if isinstance(expected, Named | Relation) and isinstance(given, Named | Relation):
        return _same_statement(expected, given)
    for one, other in ((expected, given), (given, expected)):
        if isinstance(one, Named):
            values = [value for _, value in one.values]
            if len(values) == 1:
                return same(values[0], other) if one is expected else same(other, values[0])
            return _in_order(values, _listed(other))
        if isinstance(one, Words) and isinstance(other, Value) and one.product is not None:
            return _same_node(one.product, other.node)
    if isinstance(expected, Value) and isinstance(given, Value):
        return same_values(expected, given)
    if isinstance(expected, Many) and isinstance(given, Many):
        return _in_any_order(expected.items, given.items)
    if isinstance(expected, Region) or isinstance(given, Region):
        return _same_region(as_region(expected), as_region(given))
    if isinstance(expected, TupleOrInterval) and isinstance(given, TupleOrInterval):
        brackets = len(expected.items) > 2 or (expected.opening, expected.closing) == (
            given.opening,
            given.closing,
        )
        return brackets and _in_order(expected.items, given.items)
    for row, many in ((expected, given), (given, expected)):
        if isinstance(row, TupleOrInterval) and isinstance(many, Many):
            return _in_order(_listed(row), _listed(many))
        if isinstance(many, Many) and many.braces and len(many.items) == 1:
            return same(many.items[0], row)
    if isinstance(expected, Matrix) and isinstance(given, Matrix):
        return len(expected.rows) == len(given.rows) and all(
            map(_in_order, expected.rows, given.rows)
        )
    if isinstance(expected, Ratio) and isinstance(given, Ratio):
        a, b = expected.nodes, given.nodes
        return len(a) == len(b) and all(
            _same_node(("*", x, b[0]), ("*", y, a[0])) for x, y in zip(a, b, strict=True)
        )
    return isinstance(expected, Words | Based) and expected == given


def _listed(reading: Reading) -> tuple[Reading, ...]:
    """Returns the values of (1, 2) or of 1, 2; empty for an interval or a set."""
    if isinstance(reading, TupleOrInterval):
        return reading.items if (reading.opening, reading.closing) == ("(", ")") else ()
    return reading.items if isinstance(reading, Many) and not reading.braces else ()


def _same_node(a: Any, b: Any) -> bool:
    return same_values(Value(a, None, ()), Value(b, None, ()))


def _in_order(expected: Sequence[Reading], given: Sequence[Reading]) -> bool:
    return 0 < len(expected) == len(given) and all(map(same, expected, given))


def _in_any_order(expected: Sequence[Reading], given: Sequence[Reading]) -> bool:
    left = list(given)
    for item in expected if len(expected) == len(given) else ():
        found = next((i for i, other in enumerate(left) if same(item, other)), None)
        if found is None:
            return False
        del left[found]
    return len(expected) == len(given)


def _same_choice(expected: Reading, given: Reading) -> bool:
    """Compares the letters if both have one, else the values next to the letters."""
    letters = [_letter(expected), _letter(given)]
    values = [
        reading.value if isinstance(reading, Choice) else None for reading in (expected, given)
    ]
    if all(letters):
        return letters[0] == letters[1] and (
            values[0] is None or values[1] is None or same(values[0], values[1])
        )
    one, other = (values[0], given) if isinstance(expected, Choice) else (values[1], expected)
    return one is not None and same(one, other)


def _letter(reading: Reading) -> str:
    if isinstance(reading, Choice):
        return reading.letter
    if (
        isinstance(reading, Value)
        and reading.node is not None
        and reading.node[0] == "sym"
        and len(reading.node[1]) == 1
    ):
        return str(reading.node[1])
    return ""


def _same_statement(expected: Named | Relation, given: Named | Relation) -> bool:
    if isinstance(expected, Named) and isinstance(given, Named):
        if len(expected.values) == len(given.values) == 1:
            (name, value), (other, said) = expected.values[0], given.values[0]
            if name == other or len(name) > 1 or len(other) > 1:
                return same(value, said)
        else:
            names = [[name for name, _ in statement.values] for statement in (expected, given)]
            return names[0] == names[1] and _in_order(
                [v for _, v in expected.values], [v for _, v in given.values]
            )
    a, b = _as_relation(expected), _as_relation(given)
    if a is None or b is None or a.operator != b.operator:
        return False
    names_a, names_b = symbols(a.left) | symbols(a.right), symbols(b.left) | symbols(b.right)
    if names_a != names_b:
        return False
    try:
        points = list(sampled(("-", a.left, a.right), ("-", b.left, b.right), sorted(names_a)))
    except Undecided:
        return False
    x, y, _ = points[0]
    if x == 0 or y == 0:
        return False
    if a.operator in ("\\lt", "\\le") and (isinstance(x, complex) or x * y < 0):
        return False
    return all(_proportional(x, y, u, v) for u, v, _ in points)


def _proportional(x: Any, y: Any, u: Any, v: Any) -> bool:
    a, b = x * v, y * u
    return bool(a == b or abs(a - b) <= 1e-40 * max(abs(a), abs(b)))


def _as_relation(statement: Named | Relation) -> Relation | None:
    """Returns y = 2x + 1 as an equation; None for x = 5, which is a solution and not an equation to
    solve.
    """
    if isinstance(statement, Relation):
        return statement
    name, value = statement.values[0]
    if (
        len(statement.values) > 1
        or not isinstance(value, Value)
        or value.node is None
        or not symbols(value.node)
    ):
        return None
    return Relation("=", ("sym", name), value.node)


def _same_region(expected: Region | None, given: Region | None) -> bool:
    if expected is None or given is None or len(expected.intervals) != len(given.intervals):
        return False
    if expected.name and given.name and expected.name != given.name:
        return False
    return all(
        one[1] == other[1]
        and one[3] == other[3]
        and _same_node(one[0], other[0])
        and _same_node(one[2], other[2])
        for one, other in zip(expected.intervals, given.intervals, strict=True)
    )


def prepare(arguments: dict[str, Any]) -> Callable[[], Callable[[str], str]]:
    """Loads and warms up the grader; a worker's handler answers `[gold, answer]` with a verdict.

    Args:
        arguments: `memory_mb`, the address space of a worker, and `alarm_s`, the CPU seconds after
            which a worker ends itself if nobody kills it.
    """
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    for gold, given in _WARM_UP:  # fills the caches, which every worker inherits
        verdict(gold, given)
    memory_bytes, alarm_s = int(arguments["memory_mb"]) << 20, int(arguments["alarm_s"])

    def handle(line: str) -> str:
        gold, answer = json.loads(line)
        signal.setitimer(
            signal.ITIMER_PROF, alarm_s
        )  # ends a hanging worker when no other process is left to kill it
        found = verdict(gold, answer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if found != "right" and _used_bytes() > memory_bytes // 2:
            raise MemoryError  # in many places sympy returns "wrong" when it runs out of memory
        return found

    def make() -> Callable[[str], str]:
        for gold, given in _WARM_UP[
            :3
        ]:  # triggers the copy of memory that a new process shares with its parent
            verdict(gold, given)
        return handle

    return make


def _used_bytes() -> int:
    """Returns the peak memory of this process in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10
