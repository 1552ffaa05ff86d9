"""Reads equations, assignments and inequalities."""

import operator
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction

from services.reward.answers.expressions import Node, substituted, symbols
from services.reward.answers.formulas import same_values
from services.reward.answers.notation import (
    GREEK,
    NotUnderstood,
    Tokens,
    matched,
    split,
    written,
)
from services.reward.answers.quantities import Value, read_value, written_out
from services.reward.answers.shapes import (
    Based,
    Many,
    Named,
    Reading,
    Region,
    Relation,
    TupleOrInterval,
    Untrue,
    Words,
    as_region,
    combined,
    without,
)
from services.reward.answers.units import has_doubts
from services.reward.answers.values import (
    INFINITY,
    MINUS_INFINITY,
    Undecided,
    roughly,
    same_value,
)

Read = Callable[[Tokens, int], Reading]
RELATIONS = frozenset(("=", "\\lt", "\\gt", "\\le", "\\ge", "\\ne", "\\in", "\\approx"))
_REVERSED = {"\\gt": "\\lt", "\\ge": "\\le"}
_WORD = rf"(?:[^\W\d_]+|\\(?:{'|'.join(GREEK)}))"
_NAME = re.compile(
    # not a product: ab, x y
    rf"(?![a-z]{{2}}\b|[xyz]{{2,}}\b|(?:[A-Za-z] )+[A-Za-z]$)"
    rf"(?P<stem>(?:\\(?:angle|triangle|vec) (?:\{{ )?)?{_WORD}(?: {_WORD})*(?: \}})?"
    r"(?: _ (?:\{ [^{}]+ \}|\w+))?(?: ')*)(?: \( [a-z](?: , [a-z])* \))?"
)
_UNKNOWN = rf"{_WORD}(?: _ (?:\{{ [^{{}}]+ \}}|\w+))?"
_ROW = re.compile(
    rf"(?:(?P<open>[(\[]|\\langle) )?(?P<names>{_UNKNOWN}(?: , {_UNKNOWN})+)"
    r"(?(open) (?:[)\]]|\\rangle)) = (?P<values>[^=]+)"
)
_LABEL = re.compile(r"(?=.*[A-Za-z])[\x00-\x7f]+")
_CALL = re.compile(r"[A-Za-z] \( [-0-9 ,]+ \)")


def read_relation(part: Tokens, depth: int, read: Read) -> Reading | None:
    """Returns the reading of tokens with a relation sign; None without one. `read` reads one
    side.
    """
    pieces, operators = split(part, RELATIONS)
    if not operators:
        return None
    if not all(pieces):
        raise NotUnderstood
    kinds = set(operators)
    if "\\approx" in kinds:
        return _approximate(pieces, operators, depth, read)
    if kinds == {"="}:
        return _chain(pieces, depth, read)
    if kinds == {"\\in"} and len(pieces) == 2:
        name = name_of(pieces[0])
        found = read(pieces[1], depth)
        region = as_region(found) if not isinstance(found, Many) else None
        return replace(region, name=name) if region and name else found
    if kinds <= {"\\gt", "\\ge"}:
        pieces = pieces[::-1]
        operators = [_REVERSED[text] for text in operators[::-1]]
    elif not kinds <= {"\\lt", "\\le"} and kinds != {"\\ne"}:
        raise NotUnderstood
    return _inequality(pieces, operators)


def _inequality(pieces: list[Tokens], operators: list[str]) -> Reading:
    nodes = [read_value(piece).node or () for piece in pieces]
    if not all(nodes):
        raise NotUnderstood
    closed = [text == "\\le" for text in operators]
    names = [symbols(node) for node in nodes]
    if len(nodes) == 3:  # a < x < b
        lower = _inequality(pieces[:2], operators[:1])
        upper = _inequality(pieces[1:], operators[1:])
        if not isinstance(lower, Region) or not isinstance(upper, Region):
            raise NotUnderstood
        return combined([lower, upper], operator.and_)
    if len(nodes) != 2:
        raise NotUnderstood
    left, right = nodes
    found: Region | None = None
    if operators == ["\\ne"] and left[0] == "sym" and not names[1]:
        found = without(Region(((right, True, right, True),), str(left[1])))
    elif operators != ["\\ne"] and not names[1]:
        found = _below(left, right, closed[0])
    elif operators != ["\\ne"] and not names[0]:
        # a < x is what is left without x <= a
        found = _below(right, left, not closed[0])
        found = found and without(found)
    return found or Relation(operators[0], left, right)


def _below(side: Node, bound: Node, is_closed: bool) -> Region | None:
    """Returns the region where x, -x or |x| is below a constant; None for other sides."""
    opposite = bound[1] if bound[0] == "neg" else ("neg", bound)
    match side:
        case ("sym", name):
            return Region(((MINUS_INFINITY, False, bound, is_closed),), name)
        case ("neg", ("sym", name)):
            return Region(((opposite, is_closed, INFINITY, False),), name)
        case ("abs", ("sym", name)):
            return Region(((opposite, is_closed, bound, is_closed),), name)
    return None


def line(node: Node, name: str) -> tuple[Node, Node] | None:
    """Returns a and b for an expression a + bx in one unknown x; None for any other."""
    before = substituted(node, name, ("num", Fraction(-7, 4)))
    start = substituted(node, name, ("num", Fraction(0)))
    after = substituted(node, name, ("num", Fraction(1)))
    step = ("-", after, start)
    try:
        is_straight = same_value(("-", start, before), ("*", ("num", Fraction(7, 4)), step))
        is_straight = is_straight and not same_value(start, after)
    except Undecided:
        return None
    return (start, step) if is_straight and symbols(node) == {name} else None


def _approximate(pieces: list[Tokens], operators: list[str], depth: int, read: Read) -> Reading:
    """Returns the side before the sign, or the approximate value of a name. The values must be
    close.
    """
    *exact, rough = pieces
    if operators.index("\\approx") != len(exact) - 1 or {*operators} - {"=", "\\approx"}:
        raise NotUnderstood
    if name_of(exact[-1]):
        return _chain([exact[-1], rough], depth, read)
    found = _chain(exact, depth, read) if len(exact) > 1 else read(exact[0], depth)
    value = found.values[0][1] if isinstance(found, Named) else found
    with suppress(Undecided):
        match value, read_value(rough):
            case Value(tuple(node)), Value(tuple(other)):
                return found if roughly(node, other) else Untrue()
    raise NotUnderstood


def name_of(part: Tokens) -> str:
    """Returns the name of an unknown, a function or a quantity; "" for anything else."""
    match = _NAME.fullmatch(written(part))
    if match is None or has_doubts(part):
        return ""
    return re.sub("[{} ]", "", match["stem"])


def read_row(part: Tokens, depth: int, read: Read) -> Reading | None:
    """Returns the reading of (x, y) = (1, 2), also of several rows of values, in the order that the
    names state; None for anything else.
    """
    found = matched(_ROW, part)
    if found is None:
        return None
    names = [re.sub("[{} ]", "", name) for name in written(found["names"]).split(" , ")]
    values = read(found["values"], depth)
    if isinstance(values, Many) and all(isinstance(item, TupleOrInterval) for item in values.items):
        return replace(values, items=tuple(_row(names, item) for item in values.items))
    return _row(names, values)


def _row(names: list[str], values: Reading) -> Named:
    items = values.items if isinstance(values, TupleOrInterval | Many) else ()
    if len(items) != len(names) or len(set(names)) < len(names):
        raise NotUnderstood
    return Named(tuple(zip(names, items, strict=True)))


def _chain(pieces: list[Tokens], depth: int, read: Read) -> Reading:
    """Returns the reading of a = b = c: all its constants must be equal, and the last fully
    evaluated one counts.
    """
    names: set[str] = set()
    while len(pieces) > 1 and (name := name_of(pieces[0])):
        names.add(name)
        pieces = pieces[1:]
    is_reversed = not names and len(pieces) == 2 and name_of(pieces[1]) != ""  # 5 = x
    if is_reversed and not isinstance(read(pieces[0], depth), Words):
        names.add(name_of(pieces[1]))
        pieces = pieces[:1]
    last = read(pieces[-1], depth)
    if isinstance(last, Words) and not names:
        raise NotUnderstood
    if len(pieces) == 1:
        return _named(names, last)
    if isinstance(last, Based):
        sides = [read(piece, depth) for piece in pieces]
        based = [side for side in sides if isinstance(side, Based)]
        is_true = len({int(number.digits, number.base) for number in based}) == 1
        # of equal numbers in different bases, base ten is the explanation
        return min(based, key=lambda number: number.base == 10) if is_true else Untrue()
    return _equal_sides(pieces, names, last)


def _sides(pieces: list[Tokens]) -> tuple[list[Value], bool]:
    """Returns the values among the sides of a chain, and whether others are labels, which name what
    the value after them measures.
    """
    values: list[Value] = []
    for piece in pieces:
        is_label = bool(_CALL.fullmatch(written(piece)))
        try:
            value = read_value(piece)
        except NotUnderstood:
            if has_doubts(piece) or not _LABEL.fullmatch(written(piece)):
                raise
            continue
        if value.node is not None and not is_label:
            values.append(value)
    return values, len(values) < len(pieces)


def _equal_sides(pieces: list[Tokens], names: set[str], last: Reading) -> Reading:
    values, is_label = _sides(pieces[:-1])
    if not isinstance(last, Value):
        if values and not all(value.node and symbols(value.node) for value in values):
            raise NotUnderstood
        return Named((("", last),))

    values.append(last)
    constants = [value for value in values if not value.node or not symbols(value.node)]
    unknowns = [value.node for value in values if value.node and symbols(value.node)]
    if unknowns and not is_label:
        left = values[-2].node
        is_equation = not names and len(values) == 2
        if left and last.node and (is_equation or (last in constants and last.node == _ZERO)):
            return Relation("=", left, last.node)
    same_kind = constants if last in constants else values
    if (is_label or not names) and last not in constants:
        raise NotUnderstood
    if not all(same_values(last, value) for value in same_kind):
        return Untrue()
    numbers = [value for value in same_kind if value.node and written_out(value.node)]
    last = numbers[-1] if numbers else last
    if is_label or (unknowns and not names):
        return Named((("", last),))
    return _named(names, last) if names else last


_ZERO: Node = ("num", Fraction(0))


def _named(names: set[str], value: Reading) -> Named:
    return Named(tuple((name, value) for name in sorted(names)))
