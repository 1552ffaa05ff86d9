"""Reads equations, assignments and inequalities."""

from collections.abc import Callable
from dataclasses import replace

from services.reward.answers.expressions import symbols
from services.reward.answers.formulas import same_values
from services.reward.answers.notation import NotUnderstood, Token, Tokens, inner, split, texts_of
from services.reward.answers.quantities import Value, read_value, written_out
from services.reward.answers.shapes import (
    INFINITY,
    MINUS_INFINITY,
    Many,
    Named,
    Reading,
    Region,
    Relation,
    TupleOrInterval,
    Untrue,
    Words,
    as_region,
    without,
)
from services.reward.answers.values import Undecided, constant

Read = Callable[[Tokens, int], Reading]
RELATIONS = frozenset(("=", "\\lt", "\\gt", "\\le", "\\ge", "\\ne", "\\in", "\\approx"))
_REVERSED = {"\\gt": "\\lt", "\\ge": "\\le", "\\lt": "\\gt", "\\le": "\\ge"}


def read_relation(part: Tokens, depth: int, read: Read) -> Reading | None:
    """Returns the reading of tokens with a relation sign; None without one. `read` reads one
    side.
    """
    part = tuple(
        Token("cmd", "\\in") if _is_in(part[i : i + 2]) else token for i, token in enumerate(part)
    )
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
        name, found = name_of(pieces[0]), read(pieces[1], depth)
        region = as_region(found)
        return replace(region, name=name) if region and name else found
    if kinds <= {"\\gt", "\\ge"}:
        pieces, operators = pieces[::-1], [_REVERSED[text] for text in operators[::-1]]
    elif not kinds <= {"\\lt", "\\le"} and kinds != {"\\ne"}:
        raise NotUnderstood
    return _inequality(pieces, operators)


def _is_in(part: Tokens) -> bool:
    """Returns whether the word "in" precedes a set, and does not mean inch."""
    return (
        len(part) == 2
        and part[0].kind == "word"
        and part[0].text == "in"
        and part[1].text in ("(", "[", "\\{")
    )


def _inequality(pieces: list[Tokens], operators: list[str]) -> Reading:
    nodes = [read_value(piece).node for piece in pieces]
    if any(node and node[0] == "neg" and node[1][0] == "sym" for node in nodes):  # -x > -1 is x < 1
        nodes = [
            node and (node[1] if node[0] == "neg" else ("neg", node)) for node in reversed(nodes)
        ]
        operators = operators[::-1]
    free = [symbols(node) if node else {""} for node in nodes]
    closed = [text == "\\le" for text in operators]
    ends = [node for node in nodes if node]
    if len(ends) != len(nodes):
        raise NotUnderstood
    if len(pieces) == 3 and not free[0] | free[2] and ends[1][0] == "sym":
        return Region(((ends[0], closed[0], ends[2], closed[1]),), str(ends[1][1]))
    if len(pieces) != 2:
        raise NotUnderstood
    if operators == ["\\ne"]:
        if ends[0][0] == "sym" and not free[1]:
            return replace(without(Value(ends[1], None, ())), name=str(ends[0][1]))
        return Relation("\\ne", *ends)
    if ends[0][0] == "sym" and not free[1]:
        return Region(((MINUS_INFINITY, False, ends[1], closed[0]),), str(ends[0][1]))
    if ends[1][0] == "sym" and not free[0]:
        return Region(((ends[0], closed[0], INFINITY, False),), str(ends[1][1]))
    return Relation(operators[0], *ends)


def _approximate(pieces: list[Tokens], operators: list[str], depth: int, read: Read) -> Reading:
    """Returns the side before the sign, or the approximate value of a name. The values must be
    close.
    """
    at = operators.index("\\approx")
    if at != len(operators) - 1 or set(operators[:at]) - {"="}:
        raise NotUnderstood
    exact = pieces[: at + 1]
    name = name_of(exact[-1])
    if name:
        return _chain([exact[-1], pieces[-1]], depth, read)
    found = _chain(exact, depth, read) if at else read(exact[0], depth)
    value = found.values[0][1] if isinstance(found, Named) else found
    other = read_value(pieces[-1])
    if (
        not isinstance(value, Value)
        or not value.node
        or not other.node
        or symbols(value.node) | symbols(other.node)
    ):
        raise NotUnderstood
    try:
        a, b = complex(constant(value.node)[0]), complex(constant(other.node)[0])
    except (Undecided, OverflowError):
        raise NotUnderstood from None
    return found if abs(a - b) <= 0.05 * abs(a) else Untrue()


def name_of(part: Tokens) -> str:
    """Returns the name of an unknown, a function or a quantity; "" for anything else."""
    texts = texts_of(part)
    if part[0].kind not in ("name", "word") and texts[0] not in ("\\angle", "\\triangle", "\\vec"):
        return ""
    if (part[0].kind == "word" and len(texts[0]) < 3 and texts[0].islower()) or (
        set(texts[0]) <= set("xyz") and len(texts[0]) > 1
    ):
        return ""  # a product
    subscript = False
    for i, token in enumerate(part):
        if token.kind == "num" and not subscript:
            return ""
        subscript = (subscript and token.text != "}") or token.text == "_"
        if (token.kind in ("cmd", "other") and i) or (
            token.kind == "op" and token.text not in "_{}'(),"
        ):
            return ""
    if "(" in texts:
        at = texts.index("(")
        return (
            "".join(texts[:at])
            if at
            and texts[-1] == ")"
            and all(t.kind == "name" or t.text == "," for t in part[at + 1 : -1])
            else ""
        )
    if len(part) > 1 and all(token.kind == "name" and len(token.text) == 1 for token in part):
        return ""  # a product
    return "".join(text for text in texts if text not in "{}")


def _chain(pieces: list[Tokens], depth: int, read: Read) -> Reading:
    """Returns the reading of a = b = c: all its constants must be equal, and the last fully
    evaluated one counts.
    """
    if len(pieces) == 2 and (names := _row_of_names(pieces[0])):
        found = read(pieces[1], depth)
        items = found.items if isinstance(found, TupleOrInterval | Many) else ()
        if len(items) != len(names):
            raise NotUnderstood
        return Named(tuple(sorted(zip(names, items, strict=True), key=lambda pair: pair[0])))
    names = []
    while len(pieces) > 1 and (name := name_of(pieces[0])):
        names.append(name)
        pieces = pieces[1:]
    if (
        not names
        and len(pieces) == 2
        and (name := name_of(pieces[1]))
        and not isinstance(read(pieces[0], depth), Words)
    ):
        names, pieces = [name], pieces[:1]
    if len(pieces) == 1:
        value = read(pieces[0], depth)
        if isinstance(value, Words) and not names:
            raise NotUnderstood
        return Named(tuple((name, value) for name in sorted(set(names))))
    values = [read_value(piece) for piece in pieces]
    nodes = [value.node for value in values]
    constants = [value for value in values if value.node is None or not symbols(value.node)]
    last = values[-1]
    if not names and len(nodes) == 2 and len(constants) < 2 and nodes[0] and nodes[1]:
        return Relation("=", nodes[0], nodes[1])
    same_kind = constants if last in constants else values
    if not all(same_values(last, value) for value in same_kind):
        return Untrue()
    if len(constants) < len(values) and not names:
        raise NotUnderstood
    last = next(
        (value for value in reversed(same_kind) if value.node and written_out(value.node)), last
    )
    return Named(tuple((name, last) for name in sorted(set(names)))) if names else last


def _row_of_names(part: Tokens) -> list[str]:
    content = inner(part)
    if content is None:
        return []
    pieces, separators = split(content, frozenset((",",)))
    names = [name_of(piece) if piece else "" for piece in pieces]
    return names if separators and all(names) and len(set(names)) == len(names) else []
