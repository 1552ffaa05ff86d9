"""The kinds of answers besides a single value, and set operations on regions of real numbers."""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cmp_to_key
from typing import NamedTuple

from services.reward.answers.expressions import Expression, unknowns
from services.reward.answers.notation import NotUnderstood
from services.reward.answers.quantities import Value
from services.reward.answers.values import INFINITY, MINUS_INFINITY, Undecided, order

# Lower end, whether it belongs to the interval, upper end, whether it belongs to the interval.
Interval = tuple[Expression, bool, Expression, bool]


@dataclass(frozen=True)
class Words:
    """Text. Compared with a value, a short word such as `ab` is the product of its letters."""

    text: str
    product: Expression | None = field(default=None, compare=False)
    """The product of its letters as a node; None when the text is too long to be a product."""


class Choice(NamedTuple):
    """An option letter, with the value next to it."""

    letter: str
    value: "Reading | None"


class Many(NamedTuple):
    """Several values in any order. `braces`: written as a set."""

    items: tuple["Reading", ...]
    braces: bool


class TupleOrInterval(NamedTuple):
    """A tuple, or if it has two items perhaps an interval. A matrix is a tuple of rows with & for
    brackets, and a proportion such as 1:2:3 one with colons.
    """

    opening: str
    closing: str
    items: tuple["Reading", ...]


class Named(NamedTuple):
    """Values of named unknowns, such as x = 1, y = 2. They are in the order that the answer states,
    as (x, y) = (1, 2) does, else in alphabetical order of the names.
    """

    values: tuple[tuple[str, "Reading"], ...]
    """The name is empty if it only labels the value: |AB|, f(2), the remainder."""


class Relation(NamedTuple):
    """An equation or inequality that is not a solution; `operator` is the text of its token."""

    operator: str
    left: Expression
    right: Expression


class Region(NamedTuple):
    """A union of disjoint intervals of real numbers, in order."""

    intervals: tuple[Interval, ...]
    name: str = ""


class Family(NamedTuple):
    """Values that depend on an integer parameter, such as π/4 + kπ."""

    values: tuple[Expression, ...]
    parameter: str


class Residue(NamedTuple):
    """A value modulo another, such as 7 mod 11."""

    value: Expression
    modulus: Expression


class Clock(NamedTuple):
    """A time of day in minutes after midnight."""

    minutes: int


class Based(NamedTuple):
    """Digits in a number base, such as 52 in base 8."""

    digits: str
    base: int


@dataclass(frozen=True, eq=False)
class Untrue:
    """A chain of equations that does not hold, and therefore equals nothing."""


Reading = (
    Value
    | Words
    | Choice
    | Many
    | TupleOrInterval
    | Named
    | Relation
    | Region
    | Family
    | Residue
    | Clock
    | Based
    | Untrue
)
REALS = Region(((MINUS_INFINITY, False, INFINITY, False),))


def as_region(reading: Reading) -> Region | None:
    """Returns an interval of two constants, or a set of constants, as a region; else None."""
    match reading:
        case Region():
            return reading
        case Named(((_, value),)):
            return as_region(value)
        case TupleOrInterval(
            opening, closing, (Value(Expression() as low), Value(Expression() as high))
        ):
            if not unknowns(low) | unknowns(high):
                return Region(((low, opening == "[", high, closing == "]"),))
        case Many(items):
            nodes = [item.node for item in items if isinstance(item, Value) and item.node]
            if len(nodes) == len(items) and not any(map(unknowns, nodes)):
                return Region(tuple((node, True, node, True) for node in nodes))
    return None


def combined(
    regions: list[Region], rule: Callable[[set[int], set[int]], set[int]] = operator.or_
) -> Region:
    """Combines regions by a set operation, by default their union; intervals that touch are joined.
    Raises NotUnderstood if the ends cannot be ordered.

    The ends e0 < e1 < … divide the line into cells: {e0}, (e0, e1), {e1}, (e1, e2), … A region is a
    set of cells, to which Python's set operators apply: [e0, e1) is {0, 1}, and (e0, e1] {1, 2}.
    """
    ends: set[Expression] = set()
    for region in regions:
        for low, _, high, _ in region.intervals:
            ends |= {low, high}
    try:
        ordered = sorted(ends, key=cmp_to_key(order))
        place: dict[Expression, int] = {}
        for i, end in enumerate(ordered):
            is_same = i > 0 and order(ordered[i - 1], end) == 0
            place[end] = place[ordered[i - 1]] if is_same else i
    except Undecided:
        raise NotUnderstood from None

    # The end at place i is cell 2i; the numbers between it and the next one are cell 2i + 1.
    sets: list[set[int]] = []
    for region in regions:
        cells: set[int] = set()
        for low, has_low, high, has_high in region.intervals:
            cells |= set(range(2 * place[low] + (not has_low), 2 * place[high] + has_high))
        sets.append(cells)
    kept = sets[0]
    for cells in sets[1:]:
        kept = rule(kept, cells)

    intervals: list[Interval] = []
    for cell in sorted(kept):
        end = ordered[(cell + 1) // 2]
        has_end = cell % 2 == 0
        if cell - 1 in kept:
            low, has_low, _, _ = intervals.pop()
            intervals.append((low, has_low, end, has_end))
        else:
            intervals.append((ordered[cell // 2], has_end, end, has_end))
    return Region(tuple(intervals), regions[0].name)


def without(region: Region) -> Region:
    """Returns the real numbers that are not in a region. Raises NotUnderstood."""
    return combined([Region(REALS.intervals, region.name), region], operator.sub)
