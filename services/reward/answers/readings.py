"""Determines the kind of an answer: a value with a unit, a tuple, a set, an interval, an equation,
a choice, or words.

A reading covers all tokens of the answer, or `read` raises NotUnderstood.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise, product

from services.reward.answers.expressions import Parser
from services.reward.answers.notation import (
    CLOSE,
    NotUnderstood,
    Token,
    Tokens,
    inner,
    split,
    texts_of,
    tokens,
)
from services.reward.answers.quantities import Value, read_value
from services.reward.answers.shapes import (
    REALS,
    Based,
    Choice,
    Many,
    Matrix,
    Named,
    Ratio,
    Reading,
    Region,
    TupleOrInterval,
    Untrue,
    Words,
    as_region,
    combined,
    node_of,
    without,
)
from services.reward.answers.statements import name_of, read_relation
from services.reward.answers.units import read_unit

_JOINING = ("+", "\\times", "/", "^", "_", "=")
_LABELS = ("the", "final", "answer", "option", "choice", "is", "=", ":")
_MAX_DEPTH = 8
_ALL_REALS = frozenset(
    (
        "all real numbers",
        "all reals",
        "any real number",
        "real numbers",
        "all real values",
        "the real numbers",
    )
)
_BASES = {
    "two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9", "ten": "10",
    "eleven": "11", "twelve": "12", "sixteen": "16",
}  # fmt: skip


@lru_cache(maxsize=1024)
def read(text: str) -> Reading | None:
    """Returns the reading of an answer; None when a part of it is not understood."""
    try:
        return _read(_unlabelled(tokens(text)))
    except (NotUnderstood, RecursionError):
        return None


def _unlabelled(part: Tokens) -> Tokens:
    words = [token.text.lower() for token in part[:6]]
    i = 0
    while i < len(words) and words[i] in _LABELS:
        i += 1
    if i and (
        any(word in words[:i] for word in ("answer", "option", "choice")) or words[:i] == ["="]
    ):
        part = part[i:]
    return part[1:] if part and part[0].text == "\\approx" else part


def _read(part: Tokens, depth: int = 0) -> Reading:
    if depth > _MAX_DEPTH or not part:
        raise NotUnderstood
    for reader in (
        _choice,
        _words,
        _based,
        _mixed_units,
        _several,
        _union,
        _statement,
        _bracketed,
        _matrix,
        _ratio,
    ):
        found = reader(part, depth + 1)
        if found is not None:
            return found
    return read_value(part)


def _choice(part: Tokens, depth: int) -> Reading | None:
    texts = texts_of(part[:3])
    if texts[0] == "(" and len(texts) == 3 and texts[2] == ")":
        letter, rest = texts[1], part[3:]
    elif len(texts) > 1 and texts[1] in (")", ".", ":"):
        letter, rest = texts[0], part[2:]
    else:
        return None
    if (
        len(letter) != 1
        or letter not in "ABCDEFGH"
        or (rest and (not rest[0].spaced or rest[0].text in _JOINING))
    ):
        return None
    return Choice(letter, _read(rest, depth) if rest else None)


def _words(part: Tokens, depth: int) -> Reading | None:
    if not all(token.kind in ("word", "name") or token.text in "-'" for token in part):
        return None
    runs = [token.text for token in part if token.kind == "word"]
    if len(part) == 1 and runs and len(runs[0]) == 1:
        return Value(("sym", runs[0]), None, part)
    if part[0].kind == "name" and part[0].text not in ("a", "A", "I") and read_unit(part[1:]):
        return None
    if (
        not runs
        or any(texts_of(part)[i : i + 1] == ["'"] for i in (0, 1))
        or all(set(run) <= set("xyz") for run in runs)
    ):
        return None
    text = " ".join(texts_of(part)).replace(" - ", " ").replace("-", " ").lower()
    if text in _ALL_REALS:
        return REALS
    if text in ("empty set", "the empty set"):
        return Many((), True)
    with suppress(NotUnderstood):
        return Words(text, Parser(part).whole())
    return Words(text)


def _based(part: Tokens, _: int) -> Reading | None:
    texts = texts_of(part)
    if "_" in texts[1:]:
        at = texts.index("_")
        base = [text for text in texts[at + 1 :] if text not in ("{", "}")]
    elif "base" in texts[1:]:
        at = texts.index("base")
        base = texts[at + 1 :]
    else:
        return None
    base = [text for text in base if text not in "()"]
    name = _BASES.get("".join(base).lower(), "".join(base))
    number = "".join(text for text in texts[:at] if text not in "()")
    digits = number.upper()
    if not (name.isdigit() and 2 <= int(name) <= 36 and digits.isalnum() and digits.isascii()):
        return None
    if not any(character.isdigit() for character in digits) and (
        len(digits) < 2 or not number.isupper()
    ):
        return None
    if any(int(digit, 36) >= int(name) for digit in digits):
        raise NotUnderstood
    return Based(digits.lstrip("0") or "0", name)


def _mixed_units(part: Tokens, _: int) -> Reading | None:
    """Reads 5 feet 6 inches, 5'6", 1 hour and 30 minutes: each part must be less than one unit of
    the part before.
    """
    texts = texts_of(part)
    if texts[1:2] == ["'"] and "".join(texts[3:]) in ('"', "''"):
        part = (part[0], Token("word", "feet"), part[2], Token("word", "inches"))
    starts = [i for i, token in enumerate(part) if token.kind == "num" and i > 1]
    pieces = [part[i:j] for i, j in pairwise((0, *starts, len(part)))]
    pieces = [piece[:-1] if piece[-1].text in ("and", ",") else piece for piece in pieces]
    plain = all(
        token.kind in ("num", "word", "name") or token.text == "$"
        for piece in pieces
        for token in piece
    )
    if not starts or not plain or "num" not in (part[0].kind, part[1].kind):
        return None
    values = [read_value(piece) for piece in pieces]
    measured = [
        (value.node[1], value.unit)
        for value in values
        if value.node and value.node[0] == "num" and value.unit
    ]
    if len(measured) < len(values):
        return None
    for (_, one), (number, other) in pairwise(measured):
        if one.dimensions != other.dimensions or number * other.size >= one.size:
            return None
    largest = measured[0][1]
    return Value(
        ("num", sum(number * unit.size for number, unit in measured) / largest.size), largest, part
    )


def _several(part: Tokens, depth: int) -> Reading | None:
    pieces, separators = split(part, frozenset((",", ";", "and", "or", "\\land", "\\lor")))
    pieces = [
        piece
        for i, piece in enumerate(pieces)
        if piece or i + 1 == len(pieces) or separators[i] == ","
    ]
    if len(pieces) == 1 and (
        part[0].text == "\\{" or not any(token.text in ("\\pm", "\\mp") for token in part)
    ):
        return None
    if len(pieces) > 1 and len(separators) > len(pieces) - 1:  # "1, 2, and 3"
        separators = [text for text in separators if text != ","] or separators
    items: list[Reading] = []
    for piece in pieces:
        for variant in _variants(piece):
            items.append(_read(variant, depth))
    if any(isinstance(item, Untrue) for item in items):
        return Untrue()
    if len(pieces) > 1 and 0 < sum(isinstance(item, Words) for item in items) < len(items):
        raise NotUnderstood
    return _joined(items, separators)


def _joined(items: list[Reading], separators: list[str]) -> Reading:
    if all(isinstance(item, Region) for item in items):
        regions = [item for item in items if isinstance(item, Region)]
        if len({region.name for region in regions}) == 1:
            return combined(regions, "or" in separators or "\\lor" in separators)
    named = [item.values[0] for item in items if isinstance(item, Named) and len(item.values) == 1]
    if named and len(named) == len(items):
        names = [name for name, _ in named]
        if len(set(names)) == len(names) and not _roots(names):
            return Named(tuple(sorted(named, key=lambda pair: pair[0])))
        if len(set(names)) > 1 and not _roots(names):
            raise NotUnderstood
        return Many(tuple(value for _, value in named), False)
    if (
        len(named) == 1
        and isinstance(items[0], Named)
        and all(isinstance(item, Value | TupleOrInterval) for item in items[1:])
    ):
        return Many((named[0][1], *items[1:]), False)  # x = 1, 2
    return Many(tuple(items), False)


def _roots(names: Sequence[str]) -> bool:
    """Returns whether the names are x_1, x_2, …: solutions of one unknown."""
    return (
        all("_" in name for name in names) and len({name.partition("_")[0] for name in names}) == 1
    )


def _variants(part: Tokens) -> list[Tokens]:
    places = [i for i, token in enumerate(part) if token.text in ("\\pm", "\\mp")]
    if not places:
        return [part]
    if len(places) > 3:
        raise NotUnderstood
    tied = any(part[i].text == "\\mp" for i in places)
    found = []
    for signs in (
        [("+",) * len(places), ("-",) * len(places)] if tied else product("+-", repeat=len(places))
    ):
        variant = list(part)
        for i, sign in zip(places, signs, strict=True):
            text = sign if part[i].text == "\\pm" else {"+": "-", "-": "+"}[sign]
            variant[i] = Token("op", text, part[i].spaced)
        found.append(tuple(variant))
    return found


def _union(part: Tokens, depth: int) -> Reading | None:
    texts = texts_of(part)
    if texts == ["\\emptyset"]:
        return Many((), True)
    part = tuple(
        Token("cmd", "\\union")
        if token.text in ("U", "union") and i > 0 and texts[i - 1] in CLOSE
        else token
        for i, token in enumerate(part)
    )
    if texts[:1] == ["\\mathbb"] and (texts[1:4] == ["{", "R", "}"] or texts[1:2] == ["R"]):
        rest = part[4 if texts[1] == "{" else 2 :]
        if not rest:
            return REALS
        excluded = _read(rest[1:], depth) if rest[0].text in ("\\setminus", "-") else None
        if not isinstance(excluded, Many):
            raise NotUnderstood
        return combined([without(item) for item in excluded.items], False)
    pieces, separators = split(part, frozenset(("\\union",)))
    if not separators:
        return None
    regions = []
    for piece in pieces:
        found = _read(piece, depth)
        if isinstance(found, Many):
            nodes = [node_of(item) for item in found.items]
            regions.append(Region(tuple((node, True, node, True) for node in nodes)))
        elif (region := as_region(found)) is not None:
            regions.append(region)
        else:
            raise NotUnderstood
    return combined(regions, True)


def _statement(part: Tokens, depth: int) -> Reading | None:
    return read_relation(part, depth, _read)


def _bracketed(part: Tokens, depth: int) -> Reading | None:
    content = inner(part)
    if content is None:
        return None
    opening, closing = part[0].text, part[-1].text
    if opening == "\\{" and closing == "\\}":
        if not content:
            return Many((), True)
        pieces, separators = split(content, frozenset((":", "|")))
        if len(separators) == 1 and all(pieces):
            return (
                _read(pieces[1], depth)
                if name_of(split(pieces[0], frozenset(("\\in",)))[0][0])
                else None
            )
        found = _read(content, depth)
        if isinstance(found, Named | Untrue):
            return found
        if isinstance(found, Many) and not found.braces:
            return Many(found.items, True)
        return Many((found,), True)
    if opening == "{" or closing == "}" or not content:
        return _read(content, depth) if opening == "{" and closing == "}" else None
    pieces, separators = split(content, frozenset((",", ";")))
    if separators:
        items = [_read(piece, depth) for piece in pieces]
        opening, closing = ("(", ")") if opening == "\\langle" else (opening, closing)
        return TupleOrInterval(opening, closing, tuple(items))
    found = _read(content, depth)
    return (
        found
        if (opening, closing) in (("(", ")"), ("[", "]")) and not isinstance(found, Words)
        else None
    )


def _matrix(part: Tokens, depth: int) -> Reading | None:
    texts = texts_of(part)
    if texts[:2] != ["\\begin", "{"] or texts.count("\\begin") > 1 or len(texts) < 8:
        return None
    kind = texts[2]
    if kind not in ("pmatrix", "bmatrix", "matrix", "Bmatrix", "smallmatrix", "array") or texts[
        -4:
    ] != [
        "\\end",
        "{",
        kind,
        "}",
    ]:
        return None
    rows: list[list[list[Token]]] = [[[]]]
    start = texts.index("}", 4) + 1 if kind == "array" and texts[4:5] == ["{"] else 4
    for token in part[start:-4]:
        if token.text == "\\\\":
            rows.append([[]])
        elif token.text == "&":
            rows[-1].append([])
        else:
            rows[-1][-1].append(token)
    if rows[-1] == [[]]:
        rows.pop()
    return Matrix(tuple(tuple(_read(tuple(cell), depth) for cell in row) for row in rows))


def _ratio(part: Tokens, _: int) -> Reading | None:
    pieces, separators = split(part, frozenset((":",)))
    if len(separators) < 2 or not all(pieces):
        return None
    nodes = [read_value(piece).node for piece in pieces]
    return Ratio(tuple(node for node in nodes if node))
