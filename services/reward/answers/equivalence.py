"""Compares two answers by their meaning. Runs in the processes of `services.reward.worker`, not in
the server.
"""

import json
import logging
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

from services.reward.answers.expressions import Node, symbols
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
    if _texts(gold) == _texts(answer):
        return "right"
    given = read(answer)
    if given is None:
        return "unparsable"
    expected = read(gold)
    if expected is None:
        return "wrong"
    uncomputable = _is_uncomputable(expected) or _is_uncomputable(given)
    right = same_formulas(tokens(gold), tokens(answer)) if uncomputable else same(expected, given)
    if right and _unevaluated(expected, given):
        return "unevaluated"
    return "right" if right else "wrong"


def _texts(answer: str) -> list[str]:
    return [token.text for token in tokens(answer)]


def _is_uncomputable(reading: Reading) -> bool:
    return isinstance(reading, Value) and reading.node is None


def equivalent(gold: str, answer: str) -> bool:
    """Returns whether two answers are equal."""
    return verdict(gold, answer) == "right"


def _unevaluated(expected: Reading, given: Reading) -> bool:
    """Returns whether a part of an answer is an uncomputed expression where the gold answer has a
    number.
    """
    numbers: list[Value] = []
    for value in _values(expected):
        is_ratio = any(token.text == ":" for token in value.source)
        if _is_number(value) and not is_ratio:
            numbers.append(value)

    for value in _values(given):
        if _is_number(value):
            continue
        if any(same_values(number, value) for number in numbers):
            return True
    return False


def _is_number(value: Value) -> bool:
    return value.node is not None and written_out(value.node)


def _values(reading: Reading) -> Iterator[Value]:
    """Yields the values in a reading."""
    if isinstance(reading, Value):
        yield reading
    elif isinstance(reading, Choice):
        if reading.value is not None:
            yield from _values(reading.value)
    elif isinstance(reading, Many | TupleOrInterval):
        for item in reading.items:
            yield from _values(item)
    elif isinstance(reading, Named):
        for _, value in reading.values:
            yield from _values(value)
    elif isinstance(reading, Matrix):
        for cell in chain.from_iterable(reading.rows):
            yield from _values(cell)
    elif isinstance(reading, Region):
        for start, _, end, _ in reading.intervals:
            yield Value(start, None, ())
            yield Value(end, None, ())


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
        same_brackets = expected.opening == given.opening and expected.closing == given.closing
        # Only a pair can be an interval.
        if len(expected.items) <= 2 and not same_brackets:
            return False
        return _in_order(expected.items, given.items)
    for row, many in ((expected, given), (given, expected)):
        if isinstance(row, TupleOrInterval) and isinstance(many, Many):
            return _in_order(_listed(row), _listed(many))
        if isinstance(many, Many) and many.braces and len(many.items) == 1:
            return same(many.items[0], row)
    if isinstance(expected, Matrix) and isinstance(given, Matrix):
        if len(expected.rows) != len(given.rows):
            return False
        return all(map(_in_order, expected.rows, given.rows))
    if isinstance(expected, Ratio) and isinstance(given, Ratio):
        return _same_ratio(expected.nodes, given.nodes)
    return isinstance(expected, Words | Based) and expected == given


def _same_ratio(expected: Sequence[Node], given: Sequence[Node]) -> bool:
    """Compares a : b : c to x : y : z by cross products with the first terms."""
    if len(expected) != len(given):
        return False
    return all(
        _same_node(("*", one, given[0]), ("*", other, expected[0]))
        for one, other in zip(expected, given, strict=True)
    )


def _listed(reading: Reading) -> tuple[Reading, ...]:
    """Returns the values of (1, 2) or of 1, 2; empty for an interval or a set."""
    if isinstance(reading, TupleOrInterval):
        is_tuple = reading.opening == "(" and reading.closing == ")"
        return reading.items if is_tuple else ()
    return reading.items if isinstance(reading, Many) and not reading.braces else ()


def _same_node(a: Any, b: Any) -> bool:
    return same_values(Value(a, None, ()), Value(b, None, ()))


def _in_order(expected: Sequence[Reading], given: Sequence[Reading]) -> bool:
    return 0 < len(expected) == len(given) and all(map(same, expected, given))


def _in_any_order(expected: Sequence[Reading], given: Sequence[Reading]) -> bool:
    if len(expected) != len(given):
        return False
    left = list(given)
    for item in expected:
        found = next((i for i, other in enumerate(left) if same(item, other)), None)
        if found is None:
            return False
        del left[found]
    return True


def _same_choice(expected: Reading, given: Reading) -> bool:
    """Compares the letters if both have one, else the values next to the letters."""
    expected_letter = _letter(expected)
    given_letter = _letter(given)
    expected_value = expected.value if isinstance(expected, Choice) else None
    given_value = given.value if isinstance(given, Choice) else None
    if expected_letter and given_letter:
        if expected_letter != given_letter:
            return False
        if expected_value is None or given_value is None:
            return True
        return same(expected_value, given_value)

    if isinstance(expected, Choice):
        return expected_value is not None and same(expected_value, given)
    return given_value is not None and same(given_value, expected)


def _letter(reading: Reading) -> str:
    if isinstance(reading, Choice):
        return reading.letter
    if isinstance(reading, Value) and reading.node is not None and reading.node[0] == "sym":
        name = str(reading.node[1])
        return name if len(name) == 1 else ""
    return ""


def _same_statement(expected: Named | Relation, given: Named | Relation) -> bool:
    if isinstance(expected, Named) and isinstance(given, Named):
        if len(expected.values) != 1 or len(given.values) != 1:
            expected_names, expected_values = _unzipped(expected)
            given_names, given_values = _unzipped(given)
            return expected_names == given_names and _in_order(expected_values, given_values)

        name, value = expected.values[0]
        other_name, other_value = given.values[0]
        if name == other_name or len(name) > 1 or len(other_name) > 1:
            return same(value, other_value)

    expected_relation = _as_relation(expected)
    given_relation = _as_relation(given)
    if expected_relation is None or given_relation is None:
        return False
    return _same_relation(expected_relation, given_relation)


def _unzipped(named: Named) -> tuple[list[str], list[Reading]]:
    names = [name for name, _ in named.values]
    values = [value for _, value in named.values]
    return names, values


def _same_relation(expected: Relation, given: Relation) -> bool:
    """Returns whether the differences of both sides are proportional at random points, with a
    positive factor for an inequality.
    """
    if expected.operator != given.operator:
        return False
    names = symbols(expected.left) | symbols(expected.right)
    if names != symbols(given.left) | symbols(given.right):
        return False

    expected_difference = ("-", expected.left, expected.right)
    given_difference = ("-", given.left, given.right)
    try:
        points = list(sampled(expected_difference, given_difference, sorted(names)))
    except Undecided:
        return False
    one, other, _ = points[0]
    if one == 0 or other == 0:
        return False
    is_inequality = expected.operator in ("\\lt", "\\le")
    if is_inequality and (isinstance(one, complex) or one * other < 0):
        return False
    return all(_same_product(one * v, other * u) for u, v, _ in points)


def _same_product(a: Any, b: Any) -> bool:
    return bool(a == b or abs(a - b) <= 1e-40 * max(abs(a), abs(b)))


def _as_relation(statement: Named | Relation) -> Relation | None:
    """Returns y = 2x + 1 as an equation; None for x = 5, which is a solution and not an equation to
    solve.
    """
    if isinstance(statement, Relation):
        return statement
    name, value = statement.values[0]
    if len(statement.values) > 1 or not isinstance(value, Value):
        return None
    if value.node is None or not symbols(value.node):
        return None
    return Relation("=", ("sym", name), value.node)


def _same_region(expected: Region | None, given: Region | None) -> bool:
    if expected is None or given is None or len(expected.intervals) != len(given.intervals):
        return False
    if expected.name and given.name and expected.name != given.name:
        return False
    for one, other in zip(expected.intervals, given.intervals, strict=True):
        start, includes_start, end, includes_end = one
        other_start, other_includes_start, other_end, other_includes_end = other
        if includes_start != other_includes_start or includes_end != other_includes_end:
            return False
        if not _same_node(start, other_start) or not _same_node(end, other_end):
            return False
    return True


def prepare(arguments: dict[str, Any]) -> Callable[[], Callable[[str], str]]:
    """Loads and warms up the grader; a worker's handler answers `[gold, answer]` with a verdict.

    Args:
        arguments: `memory_mb`, the address space of a worker, and `alarm_s`, the CPU seconds after
            which a worker ends itself if nobody kills it.
    """
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    for gold, given in _WARM_UP:  # fills the caches, which every worker inherits
        verdict(gold, given)
    memory_bytes = int(arguments["memory_mb"]) << 20
    alarm_s = int(arguments["alarm_s"])

    def handle(line: str) -> str:
        gold, answer = json.loads(line)
        # Ends a hanging worker when no other process is left to kill it.
        signal.setitimer(signal.ITIMER_PROF, alarm_s)
        found = verdict(gold, answer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if found != "right" and _used_bytes() > memory_bytes // 2:
            raise MemoryError  # in many places sympy returns "wrong" when it runs out of memory
        return found

    def make() -> Callable[[str], str]:
        # A new process shares its parent's memory: this triggers the copy.
        for gold, given in _WARM_UP[:3]:
            verdict(gold, given)
        return handle

    return make


def _used_bytes() -> int:
    """Returns the peak memory of this process in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10
