"""The kinds of answers besides a single value, and the arithmetic of intervals."""

from dataclasses import dataclass, field
from typing import Any

from services.reward.answers.expressions import Node, symbols
from services.reward.answers.notation import NotUnderstood
from services.reward.answers.quantities import Value
from services.reward.answers.values import Undecided, constant

Interval = tuple[Node, bool, Node, bool]
"""Lower end, whether it belongs to the interval, upper end, whether it belongs to the interval."""
INFINITY: Node = ("infty",)
MINUS_INFINITY: Node = ("neg", INFINITY)


@dataclass(frozen=True)
class Words:
    """Text that is not mathematics, unless it is compared with mathematics: then `ab` may be a
    times b.
    """

    text: str
    product: Node | None = field(default=None, compare=False)
    """The product of its letters as a node; None when the text is too long to be a product."""


@dataclass(frozen=True)
class Choice:
    """An option letter, with the value next to it."""

    letter: str
    value: "Reading | None"


@dataclass(frozen=True)
class Many:
    """Several values in any order. `braces`: written as a set."""

    items: tuple["Reading", ...]
    braces: bool


@dataclass(frozen=True)
class TupleOrInterval:
    """A tuple, or with two items an interval."""

    opening: str
    closing: str
    items: tuple["Reading", ...]


@dataclass(frozen=True)
class Ratio:
    """Three or more numbers in proportion."""

    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Named:
    """Values of named unknowns, in the order of the names."""

    values: tuple[tuple[str, "Reading"], ...]


@dataclass(frozen=True)
class Relation:
    """An equation or inequality that is not a solution; `operator` is the text of its token."""

    operator: str
    left: Node
    right: Node


@dataclass(frozen=True)
class Region:
    """A union of disjoint intervals of real numbers, in order."""

    intervals: tuple[Interval, ...]
    name: str = ""


@dataclass(frozen=True)
class Based:
    """Digits in a number base."""

    digits: str
    base: str


@dataclass(frozen=True)
class Matrix:
    """Rows of values."""

    rows: tuple[tuple["Reading", ...], ...]


@dataclass(frozen=True)
class Untrue:
    """A chain of equations that does not hold, and therefore equals nothing."""


Reading = (
    Value
    | Words
    | Choice
    | Many
    | TupleOrInterval
    | Ratio
    | Named
    | Relation
    | Region
    | Based
    | Matrix
    | Untrue
)
REALS = Region(((MINUS_INFINITY, False, INFINITY, False),))


def as_region(reading: Reading) -> Region | None:
    """Returns an interval of two constants as a region, or None."""
    if isinstance(reading, Region):
        return reading
    if isinstance(reading, TupleOrInterval) and len(reading.items) == 2:
        low, high = reading.items
        if (
            isinstance(low, Value)
            and isinstance(high, Value)
            and low.node
            and high.node
            and not symbols(low.node) | symbols(high.node)
        ):
            return Region(((low.node, reading.opening == "[", high.node, reading.closing == "]"),))
    return None


def _at(node: Node) -> Any:
    """Returns a number by which interval ends can be ordered."""
    if node == INFINITY:
        return float("inf")
    if node == MINUS_INFINITY:
        return float("-inf")
    try:
        return constant(node)[0]
    except Undecided:
        raise NotUnderstood from None


def combined(regions: list[Region], any_of: bool) -> Region:
    """Returns the union of the regions, or else their intersection; "x < 1, x > 3" has none and is
    a union.
    """
    name = regions[0].name
    if any_of:
        intervals = [interval for region in regions for interval in region.intervals]
        return Region(tuple(sorted(intervals, key=lambda interval: _at(interval[0]))), name)
    kept = regions[0].intervals
    for region in regions[1:]:
        kept = tuple(
            both
            for one in kept
            for other in region.intervals
            if (both := _overlap(one, other)) is not None
        )
    return Region(kept, name) if kept else combined(regions, True)


def _overlap(one: Interval, other: Interval) -> Interval | None:
    low = max(one[:2], other[:2], key=lambda end: (_at(end[0]), not end[1]))
    high = min(one[2:], other[2:], key=lambda end: (_at(end[0]), end[1]))
    return (*low, *high) if _at(low[0]) < _at(high[0]) else None


def without(item: Reading) -> Region:
    """Returns the real numbers without this one."""
    node = node_of(item)
    return Region(((MINUS_INFINITY, False, node, False), (node, False, INFINITY, False)))


def node_of(item: Reading) -> Node:
    """Returns the expression of a constant. Raises NotUnderstood for another reading."""
    if isinstance(item, Value) and item.node is not None and not symbols(item.node):
        return item.node
    raise NotUnderstood
