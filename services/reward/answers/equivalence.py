"""Compares two answers by their meaning. Runs in the processes of `services.reward.worker`, not in
the server.
"""

import json
import logging
import operator
import re
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import TypeVar

from common import Json
from services.reward.answers.expressions import (
    ONE,
    ZERO,
    Expression,
    Operation,
    Unknown,
    number,
    operation,
    substituted,
    unknowns,
)
from services.reward.answers.extract import last_value
from services.reward.answers.formulas import same_formulas, same_values
from services.reward.answers.kinds import (
    Based,
    Choice,
    Clock,
    Family,
    Many,
    Named,
    Reading,
    Region,
    Relation,
    Residue,
    TupleOrInterval,
    Words,
    as_region,
    combined,
)
from services.reward.answers.notation import NotUnderstood, texts_of, tokens, words, written
from services.reward.answers.quantities import Value, written_out
from services.reward.answers.readings import as_line, content_words, read
from services.reward.answers.values import same_ratio

_T = TypeVar("_T")
# Comparisons after which most of what others need is loaded and cached.
_WARM_UP = (
    ("\\frac{x+1}{2}", "(1+x)/2"),
    ("\\sqrt{2}", "1.4"),
    ("2\\sqrt{3}+\\sqrt[3]{5}", "\\sqrt{12}+5^{1/3}"),
    ("(-\\infty, 2] \\cup [3, 5)", "[3,5) \\cup (-\\infty,2]"),
    (
        "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}",
        "\\begin{pmatrix} 1 & 2 \\\\ 3 & 5 \\end{pmatrix}",
    ),
    ("\\sin(2x) + \\cos x", "2\\sin x \\cos x + \\cos x"),
    ("\\ln 2 + \\log_{3} 5", "\\ln(2) + \\frac{\\ln 5}{\\ln 3}"),
    ("\\int_0^1 x dx", "\\sum_{i=1}^{3} i"),
)
# A sentence with one number.
_SENTENCE = re.compile(
    r"(?=.*[a-z]{2}.* .*[a-z]{2})[^0-9]*[0-9][0-9,]*(?:\.[0-9]+)?[^0-9]*",
    re.IGNORECASE | re.DOTALL,
)
# What data sets write where there is no answer.
_NO_VALUE = re.compile(
    r"(?:the )?proof.*|prove[dn]?.*|notfound|no answer.*|(?:see|as shown) .*|unknown|undetermined"
    r"|(?:.* )?(?:not|none) (?:found|provided|available|given|applicable|specified|required).*"
    r"|none|null|nan|n / a|na|tbd|todo|idk|error|qed|omitted"
    r"|(?:the )?(?:answer|solution|explanation)(?: above| below)?|.*(?:证明|解析|略|解答).*|无",
    re.IGNORECASE,
)
# Words of an answer; more are a sentence. Those of MATH-500 have two.
_MAX_WORDS = 3


def verdict(gold: str, answer: str) -> str:
    """Compares an answer with the gold answer, and returns a verdict.

    - "right" or "wrong";
    - "unparsable" if some part of the answer is not understood;
    - "unevaluated" if the gold answer is a number and the answer an expression with its value, such
      as `5 + 18` or `46/2` for 23, or an integral or a sum, of whatever value;
    - "identical" if the answer repeats a gold answer that is no value, such as "see above".

    Raises MemoryError and RecursionError. It has no time limit: the process that calls it is killed
    instead.
    """
    if texts_of(tokens(gold)) == texts_of(tokens(answer)):
        return "right" if _is_value(gold) else "identical"
    given = read(answer)
    if given is None:
        return "unparsable"
    expected = read_gold(gold)
    if expected is None:
        return "wrong"
    match expected, given:
        case Value(Expression() as node), Value(None) if written_out(node):
            return "unevaluated"  # Computing it may take minutes, and earns nothing.
    right = same(expected, given)
    # What only math-verify can read may still be a number, a set or a matrix: it compares any two.
    is_formula = any(isinstance(each, Value) and not each.node for each in (expected, given))
    if not right and is_formula and type(expected) is not type(given):
        right = same_formulas(tokens(gold), tokens(answer))
    if right and _unevaluated(expected, given):
        return "unevaluated"
    return "right" if right else "wrong"


def read_gold(text: str) -> Reading | None:
    """Reads a gold answer. Of JSON such as `["5"]` it reads the item, and of a sentence that it
    does not understand, the only number.
    """
    with suppress(ValueError, TypeError, RecursionError):
        held = json.loads(text)
        [item] = held.values() if isinstance(held, dict) else held
        text = text if isinstance(item, dict | list) else str(item)
    found = read(text)
    if found is None and _SENTENCE.fullmatch(text):
        return read(last_value(text) or "")
    return found


def _is_value(gold: str) -> bool:
    """Returns whether a gold answer is a value, which other texts can state too."""
    found = read_gold(gold)
    text = written(tokens(gold))
    is_sentence = isinstance(found, Words) and len(content_words(text)) > _MAX_WORDS
    return not (found is None or is_sentence or _NO_VALUE.fullmatch(text))


def _unevaluated(expected: Reading, given: Reading) -> bool:
    """Returns whether a part of an answer is an uncomputed expression where the gold answer has a
    number.
    """
    if {type(expected), type(given)} == {Relation}:
        return False  # x² + y² = 3² for x² + y² = 9
    numbers = [
        value
        for value in _values(expected)
        # 2:3 is a ratio, of which the parts may be expressions.
        if _is_number(value) and ":" not in texts_of(value.source)
    ]
    pairs = product(numbers, _values(given))
    return any(not _is_number(value) and same_values(each, value) for each, value in pairs)


def _is_number(value: Value) -> bool:
    return value.node is not None and written_out(value.node)


def _values(reading: object) -> Iterator[Value]:
    """Yields the values in a reading or in a part of one."""
    match reading:
        case Value():
            yield reading
        case Expression():
            yield Value(reading)
        case tuple() if not isinstance(reading, Family | Residue):
            for part in reading:
                yield from _values(part)


def same(expected: Reading, given: Reading) -> bool:
    """Returns whether two readings have the same value."""
    match expected, given:
        case Choice(), _:
            return _same_choice(expected, given)
        case _, Choice():
            return _same_choice(given, expected)
        case Value(), Value():
            return same_values(expected, given)
        case Many(items), Many(others):
            return _in_any_order(items, others, same)
        case TupleOrInterval(opening, closing, items), TupleOrInterval():
            same_brackets = (opening, closing) == (given.opening, given.closing)
            # Only a pair can be an interval, of which the brackets count.
            return (same_brackets or len(items) > 2) and _in_order(items, given.items)
        case Named(), Named():
            return _same_named(expected, given)
        case Relation(), Relation():
            return _same_relation(expected, given)
        case Region(_, name), Region(_, other_name):
            with suppress(NotUnderstood):
                is_same = not combined([expected, given], operator.xor).intervals
                return is_same and (name == other_name or not name or not other_name)
            return False
        case Family(), Family():
            return _in_any_order(_in_k(expected), _in_k(given), _same_progression)
        case Residue(value, modulus), Residue(other, other_modulus):
            rests = [operation("mod", node, modulus) for node in (value, other)]
            return _same_node(modulus, other_modulus) and _same_node(*rests)
    if type(expected) is type(given):
        return expected == given
    converted = _converted(expected, given, is_gold=True)
    if converted is not None:
        return same(converted, given)
    converted = _converted(given, expected, is_gold=False)
    return converted is not None and same(expected, converted)


def _converted(one: Reading, other: Reading, is_gold: bool) -> Reading | None:
    """Converts a reading to the kind of another one; None if that is not possible."""
    match one, other:
        case Named(), Relation():
            return _as_relation(one)
        case Named(((_, value),)), _:
            return value
        case Named(), _:
            return TupleOrInterval("(", ")", tuple(value for _, value in one.values))
        case _, Region():
            return as_region(one)
        case Many((item,), True), _:
            return item
        case TupleOrInterval("(", ")", items), Many(others, False):
            return other if _in_order(items, others) else None
        case TupleOrInterval("(", ")", items), Value() if "\\hat" in texts_of(other.source):
            return _vector(items)
        case (Words(_, Expression() as node), Value()) | (Residue(node, _), _):
            return Value(node)
        case Relation(), Value() if _is_label(one, is_gold):
            return Value(one.right)
        case Value(Operation("binomial", nodes)), TupleOrInterval():
            return TupleOrInterval("(", ")", tuple(map(Value, nodes)))
        case Value(Expression() as node), Family() if len(unknowns(node)) == 1:
            return Family((node,), *unknowns(node))
        case Value(Expression() as node), TupleOrInterval("&", _, rows):
            return other if _is_multiple_of_one(node, rows) else None
        case Based(digits, 10), Value():
            return Value(number(int(digits)))
        case Value(Operation("/")), Clock():
            times = [read(f"{written(one.source)} {half}") for half in ("am", "pm")]
            return other if other in times else None
    return None


def _vector(items: Sequence[Reading]) -> Value | None:
    """Returns (2, 3) as 2i + 3j."""
    found: Expression = ZERO
    for item, name in zip(items, "ijk", strict=False):
        if not isinstance(item, Value) or item.node is None:
            return None
        found = operation("+", found, operation("*", item.node, Unknown(f"\\hat {name}")))
    return Value(found) if len(items) < 4 else None


def _is_multiple_of_one(node: Expression, rows: Sequence[Reading]) -> bool:
    """Returns whether a matrix equals `node`, a multiple of the identity matrix, such as 2I."""
    names = [name for name in unknowns(node) if name[0] == "I" and as_line(node, name)]
    if len(names) != 1:
        return False
    diagonal = Value(substituted(node, names[0], ONE))
    return all(
        same(cell, diagonal if i == j else Value(ZERO))
        for i, row in enumerate(rows)
        for j, cell in enumerate(getattr(row, "items", ()))
    )


def _is_label(relation: Relation, is_gold: bool) -> bool:
    """Returns whether the left side only labels the answer, as in a + b = 7.

    It does not if the equation is linear in one unknown (2x = 7), because that is still to be
    solved, nor in a gold answer in x, y, …, which may be the equation of a curve.
    """
    names = unknowns(relation.left)
    is_statement = relation.operator == "=" and relation.right != ZERO
    if not is_statement or unknowns(relation.right) or not names:
        return False
    if is_gold:
        return not names & _COORDINATES
    is_name = isinstance(relation.left, Unknown)
    return is_name or not any(as_line(relation.left, name) for name in names)


_COORDINATES = words("x y z r t \\theta")


def _same_node(a: Expression, b: Expression) -> bool:
    return same_values(Value(a), Value(b))


def _in_order(expected: Sequence[Reading], given: Sequence[Reading]) -> bool:
    return 0 < len(expected) == len(given) and all(map(same, expected, given))


def _in_any_order(
    expected: Sequence[_T], given: Sequence[_T], rule: Callable[[_T, _T], bool]
) -> bool:
    left = list(given)
    for item in expected:
        found = next((i for i, other in enumerate(left) if rule(item, other)), None)
        if found is None:
            return False
        del left[found]
    return not left


def _same_choice(choice: Choice, other: Reading) -> bool:
    """Compares the letters if both have one, else the values next to the letters."""
    letter = _letter(other)
    if letter and letter != choice.letter:
        return False
    value = None if letter else other
    if isinstance(other, Choice):
        value = other.value
    if choice.value is None or value is None:
        return letter == choice.letter
    return same(choice.value, value)


def _letter(reading: Reading) -> str:
    """Returns the letter of an option, "" for other readings. Compared with an option, `e` and
    `E - 24` are options too.
    """
    if isinstance(reading, Choice):
        return reading.letter
    if not isinstance(reading, Value) or not reading.source:
        return ""
    first, *rest = reading.source
    is_alone = not rest or (rest[0].text == "-" and rest[0].spaced and rest[-1].spaced)
    return first.text.upper() if len(first.text) == 1 and is_alone else ""


def _same_named(expected: Named, given: Named) -> bool:
    values = dict(expected.values)
    others = dict(given.values)
    [name, *more] = values
    [other_name, *_] = others
    if not more and len(others) == 1 and (len(name) != 1 or len(other_name) != 1):
        return same(values[name], others[other_name])
    if values.keys() == others.keys():
        return all(same(values[name], others[name]) for name in values)
    one = _as_relation(expected)
    other = _as_relation(given)
    return one is not None and other is not None and _same_relation(one, other)


def _same_relation(expected: Relation, given: Relation) -> bool:
    """Returns whether two equations or inequalities say the same: left minus right of one is a
    multiple of that of the other, a positive multiple for an inequality.
    """
    if expected.operator != given.operator:
        return False
    return same_ratio(
        operation("-", expected.left, expected.right),
        operation("-", given.left, given.right),
        is_positive=expected.operator in ("\\lt", "\\le"),
    )


def _as_relation(statement: Named) -> Relation | None:
    """Returns y = 2x + 1 as an equation; None for x = 5, which is a solution and not an equation to
    solve.
    """
    match statement.values:
        case ((name, Value(Expression() as node)),) if unknowns(node):
            return Relation("=", Unknown(name), node)
    return None


def _in_k(family: Family) -> list[Expression]:
    """Returns the values of a family as expressions in k."""
    return [substituted(node, family.parameter, Unknown("k")) for node in family.values]


def _same_progression(expected: Expression, given: Expression) -> bool:
    """Returns whether two expressions in k have the same values for all integers k.

    a + bk and c + dk have if |b| = |d| and (a - c) / b is an integer, that is, equal to the nearest
    one.
    """
    one = as_line(expected, "k")
    other = as_line(given, "k")
    if one is None or other is None:
        return _same_node(expected, given)
    start, step = one
    other_start, other_step = other
    steps = operation("/", operation("-", start, other_start), step)
    nearest = operation("floor", operation("+", steps, number(Fraction(1, 2))))
    is_same_step = _same_node(operation("abs", step), operation("abs", other_step))
    return is_same_step and _same_node(steps, nearest)


def prepare(arguments: Json) -> Callable[[], Callable[[str], str]]:
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
        try:
            found = verdict(gold, answer)
        except MemoryError:
            raise
        except Exception as error:
            logging.exception("the grader failed on %r against %r", answer, gold)
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(place.filename).name}, line {place.lineno}"
            found = f"error: {type(error).__name__} in {where}"
        signal.setitimer(signal.ITIMER_PROF, 0)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak_bytes = peak if sys.platform == "darwin" else peak << 10
        if found != "right" and peak_bytes > memory_bytes // 2:
            raise MemoryError  # in many places sympy returns "wrong" when it runs out of memory
        return found

    def make() -> Callable[[str], str]:
        # A new process shares its parent's memory: this triggers the copy.
        for gold, given in _WARM_UP[:3]:
            verdict(gold, given)
        return handle

    return make
