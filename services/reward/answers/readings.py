"""Determines the kind of an answer: a value with a unit, a tuple, a set, an interval, an equation,
a choice, or words.

A reading covers all tokens of the answer, or `read` raises NotUnderstood.
"""

import calendar
import re
from collections.abc import Sequence
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise, product

from services.reward.answers.expressions import Node, Parser
from services.reward.answers.formulas import same_values
from services.reward.answers.notation import (
    CLOSE,
    DEGREE,
    NotUnderstood,
    Token,
    Tokens,
    inner,
    split,
    texts_of,
    tokens,
    words,
)
from services.reward.answers.quantities import Value, read_value, written_out
from services.reward.answers.shapes import (
    REALS,
    Based,
    Choice,
    Clock,
    Family,
    Many,
    Matrix,
    Named,
    Ratio,
    Reading,
    Region,
    Residue,
    TupleOrInterval,
    Untrue,
    Words,
    as_region,
    combined,
)
from services.reward.answers.statements import name_of, read_relation
from services.reward.answers.units import DOUBTS, NUMBERS, is_remark, read_unit

_LETTERS = "ABCDEFGH"
_JOINING = words("+ \\times / ^ _ =")
_LABELS = words("the final answer option choice is = :")
_VERBS = words("is are was were equals :")
_MAX_DEPTH = 8
_FILLERS = words(
    "a an the is are it its this that function graph curve figure shape number answer value "
    "equation conic person student direction day on st nd rd th"
)
"""Words that say no more about an answer of words."""
_REALS = (
    "all real numbers", "all reals", "any real number", "real numbers", "all real values",
    "the real numbers", "all real x",
)  # fmt: skip
_NO_SOLUTIONS = (
    "empty set", "the empty set", "no solution", "no solutions", "no real solution",
    "no real solutions", "there are no solutions", "there is no solution",
)  # fmt: skip
_UNDEFINED = r"(?:(?:the|it|its|limit) )*(?:does not exist|doesn't exist|dne|not defined)"
_CONFIRMED = ("is correct", "is the answer", "is the correct answer", "is right")
_DATES = {
    name[:length].lower(): name.lower()
    for name in (*calendar.day_name, *calendar.month_name)
    for length in (3, 4)
}
_HALVES = {
    "am": 0, "in the morning": 0, "pm": 12, "in the afternoon": 12, "in the evening": 12,
    "at night": 12,
}  # fmt: skip
_INTEGERS = words("\\setZ Z integer integers \\setN N")
_MATRICES = words("pmatrix bmatrix matrix Bmatrix smallmatrix psmallmatrix bsmallmatrix array")
_LISTS = words("cases aligned align gathered rcases")
_SETS = {"\\union": set.union, "\\cap": set.intersection, "\\setminus": set.difference}


@lru_cache(maxsize=1024)
def read(text: str) -> Reading | None:
    """Returns the reading of an answer; None when a part of it is not understood."""
    try:
        return _read(_unlabelled(tokens(text)))
    except (NotUnderstood, RecursionError):
        return None


def _unlabelled(part: Tokens) -> Tokens:
    names = [token.text.lower() for token in part[:6]]
    i = 0
    while i < len(names) and names[i] in _LABELS:
        i += 1
    if names[:i] == ["="] or {"answer", "option", "choice"} & {*names[:i]}:
        part = part[i:]
    is_intro = bool(part) and re.fullmatch(r"\\approx|[^不]*[是为]", part[0].text)
    return part[1:] if is_intro else part


def _read(part: Tokens, depth: int = 0) -> Reading:
    if depth > _MAX_DEPTH or not part:
        raise NotUnderstood
    for reader in (
        _choice,
        _words,
        _residue,
        _based,
        _clock,
        _annotated,
        _mixed_units,
        _family,
        _several,
        _labelled,
        _set,
        _statement,
        _bracketed,
        _matrix,
        _ratio,
        _vector,
    ):
        found = reader(part, depth + 1)
        if found is not None:
            return found
    return read_value(part)


def _choice(part: Tokens, depth: int) -> Reading | None:
    texts = texts_of(part[:3])
    if texts[0] == "(" and len(texts) == 3 and texts[2] == ")":
        letter = texts[1]
        rest = part[3:]
    elif len(texts) > 1 and texts[1] in (")", ".", ":"):
        letter = texts[0]
        rest = part[2:]
    else:
        return None
    is_joined = bool(rest) and (not rest[0].spaced or rest[0].text in _JOINING)
    if len(letter) != 1 or letter not in _LETTERS or is_joined:
        return None
    said = " ".join(texts_of(rest)).lower()
    if not rest or said in _CONFIRMED:
        return Choice(letter, None)
    try:
        value = _read(rest, depth)
    except NotUnderstood:
        value = None
    is_text = value is None or isinstance(value, Words)
    names_other = _names_choice(value) or (is_text and _has_letter(rest))
    if names_other or any(token.text.lower() in DOUBTS for token in rest):
        raise NotUnderstood
    return Choice(letter, value)


def _names_choice(reading: Reading | None) -> bool:
    if isinstance(reading, Many | TupleOrInterval):
        return any(map(_names_choice, reading.items))
    is_letter = isinstance(reading, Value) and texts_of(reading.source) in [*map(list, _LETTERS)]
    return is_letter or isinstance(reading, Choice)


def _has_letter(part: Tokens) -> bool:
    """Returns whether text next to an option names another one."""
    texts = texts_of(part)
    return any(text in [*_LETTERS] and (text != "A" or i) for i, text in enumerate(texts))


def _words(part: Tokens, _: int) -> Reading | None:
    part = tuple(token for token in part if token.text not in ('"', "`")) or part
    has_date = any(token.text.lower() in (*_DATES, *_DATES.values()) for token in part)
    kinds = ("word", "name", "num") if has_date else ("word", "name")
    if not all(token.kind in kinds or token.text in "-'" for token in part):
        return None
    runs = [token.text for token in part if token.kind == "word"]
    if len(part) == 1 and runs and len(runs[0]) == 1:
        return Value(("sym", runs[0]), None, part)
    if part[0].kind == "name" and part[0].text not in ("a", "A", "I") and read_unit(part[1:]):
        return None
    is_derivative = any(token.text == "'" for token in part[:2])
    if not runs or is_derivative or all(set(run) <= set("xyz") for run in runs):
        return None
    text = " ".join(texts_of(part)).replace(" - ", " ").replace("-", " ").lower()
    if text in _REALS:
        return REALS
    if text in _NO_SOLUTIONS:
        return Many((), True)
    if text in ("noon", "midnight"):
        return Clock(720 if text == "noon" else 0)
    first = text.split()[0]
    if first in NUMBERS or first in ("negative", "minus", "half", "a"):
        with suppress(NotUnderstood):
            return read_value(part)
    text = _content(text)
    with suppress(NotUnderstood):
        return Words(text, Parser(part).whole())
    return Words(text)


def _content(text: str) -> str:
    """Returns what words say: "The function is even" says "even"."""
    names = text.split()
    at = max((i for i, name in enumerate(names) if name in ("is", "are", "was")), default=-1)
    if at < len(names) - 1 and not DOUBTS & {*names[:at]}:
        names = names[at + 1 :]
    if re.fullmatch(_UNDEFINED, " ".join(names)):
        return "undefined"
    kept = [name for name in names if name not in _FILLERS] or names
    return " ".join(_DATES.get(name, name) for name in kept)


def _residue(part: Tokens, _: int) -> Reading | None:
    """Reads 7 mod 11, x ≡ 7 (mod 11)."""
    texts = texts_of(part)
    at = next((i for i, text in enumerate(texts) if text in ("\\mod", "mod", "modulo")), 0)
    if not at:
        return None
    modulus = part[at + 1 :]
    head = part[:at]
    if head[-1].text == "(" and texts[-1] == ")":
        head = head[:-1]
        modulus = modulus[:-1]
    pieces, _ = split(head, frozenset(("\\equiv", "=")))
    if not pieces[-1]:
        raise NotUnderstood
    value = read_value(pieces[-1]).node
    size = read_value(inner(modulus) or modulus).node
    if value is None or size is None or not written_out(value):
        return None
    is_reduced = value[0] == size[0] == "num" and value[1] < size[1]
    return Residue(value, size) if is_reduced or len(pieces) > 1 else None


def _based(part: Tokens, _: int) -> Reading | None:
    texts = [text for text in texts_of(part) if text not in "(){}"]
    at = next((i for i, text in enumerate(texts) if text in ("_", "base")), 0)
    if not at:
        return None
    name = "".join(texts[at + 1 :]).removeprefix("base").lower()
    base = NUMBERS.get(name, int(name) if name.isdigit() and len(name) < 3 else 0)
    number = "".join(texts[: at - 1 if texts[at - 1] == "in" else at])
    digits = number.upper()
    if not 2 <= base <= 36 or not (digits.isalnum() and digits.isascii()):
        return None
    has_digit = any(character.isdigit() for character in digits)
    if not has_digit and (len(digits) < 2 or not number.isupper()):
        return None
    if any(int(digit, 36) >= base for digit in digits):
        raise NotUnderstood
    return Based(digits.lstrip("0") or "0", base)


def _clock(part: Tokens, _: int) -> Reading | None:
    texts = texts_of(part)
    minutes = texts[2] if texts[1:2] == [":"] and len(texts) > 2 else "00"
    rest = texts[3 if texts[1:2] == [":"] else 1 :]
    half = _HALVES.get(" ".join(text for text in rest if text != ".").lower())
    is_time = texts[0].isdigit() and minutes.isdigit() and len(minutes) == 2
    if half is None or not is_time or not 1 <= int(texts[0]) <= 12 or int(minutes) > 59:
        return None
    return Clock((int(texts[0]) % 12 + half) * 60 + int(minutes))


def _annotated(part: Tokens, depth: int) -> Reading | None:
    """Reads an answer without the note in parentheses after it: 8 (in simplest form), 3 (three)."""
    if part[-1].text != ")":
        return None
    start = max(i for i, token in enumerate(part) if token.text == "(" or i == 0)
    note = part[start + 1 : -1]
    head = part[:start]
    if not head or not part[start].spaced:
        return None
    if head[-1].kind == "num" and note and note[0].kind == "word" and read_unit(note):
        return read_value((*head, *note))
    if not any(token.kind == "word" and len(token.text) > 3 for token in note):
        return None
    found = _read(head, depth)
    if is_remark(note):
        return found
    value = _read(note, depth)
    if not isinstance(value, Value) or not isinstance(found, Value):
        raise NotUnderstood
    return found if same_values(found, value) else Untrue()


def _mixed_units(part: Tokens, _: int) -> Reading | None:
    """Reads 5 feet 6 inches, 5'6", 1 hour and 30 minutes: each part must be less than one unit of
    the part before.
    """
    texts = texts_of(part)
    if texts[1:2] == ["'"] and "".join(texts[3:]) in ('"', "''"):
        part = (part[0], Token("word", "feet"), part[2], Token("word", "inches"))
    if texts[1:2] == [DEGREE] and texts[-1] == "'":
        part = (*part[:-1], Token("word", "arcminute"))
    starts = [i for i, token in enumerate(part) if token.kind == "num" and i > 1]
    if not starts or "num" not in (part[0].kind, part[1].kind):
        return None
    measured: list[Value] = []
    for start, end in pairwise((0, *starts, len(part))):
        piece = part[start : end - (part[end - 1].text in ("and", ","))]
        if any(token.kind in ("cmd", "other") for token in piece):
            return None
        with suppress(NotUnderstood):
            measured.append(read_value(piece))
    total = Fraction(0)
    smallest: Fraction | None = None
    for value in measured:
        if value.node is None or value.node[0] != "num" or value.unit is None:
            return None
        size = value.node[1] * value.unit.size
        if value.unit.dimensions != measured[0].unit.dimensions:  # type: ignore[union-attr]
            return None
        if smallest is not None and size >= smallest:
            return None
        smallest = value.unit.size
        total += size
    if len(measured) <= len(starts):
        return None
    largest = measured[0].unit
    assert largest is not None
    return Value(("num", total / largest.size), largest, part)


def _family(part: Tokens, depth: int) -> Reading | None:
    """Reads x = a + kb, k ∈ ℤ."""
    texts = texts_of(part)
    content = inner(part) if texts[0] == "\\{" else part
    texts = texts_of(content or ())
    if content is None or len(content) < 4:
        return None
    if texts[-2] in ("integer", "integers"):  # for any integer k
        texts[-2:] = [texts[-1], "is", "integer"]
        content = (*content[:-2], *(Token("word", text) for text in texts[-3:]))
    if texts[-1] not in _INTEGERS:
        return None
    at = -3 if texts[-2] in ("an", "any", "all") else -2
    if content[at].text not in ("\\in", "is", "integer", "integers"):
        return None
    parameter = texts[at - 1]
    rest = content[: at - 1]
    while rest and rest[-1].text in (
        ",",
        ";",
        ":",
        "|",
        "where",
        "for",
        "with",
        "and",
        "any",
        "all",
    ):
        rest = rest[:-1]
    found = _read(rest, depth)
    items = found.items if isinstance(found, Many) else (found,)
    nodes: list[Node] = []
    for item in items:
        value = item.values[0][1] if isinstance(item, Named) else item
        if not isinstance(value, Value) or value.node is None:
            raise NotUnderstood
        nodes.append(value.node)
    return Family(tuple(nodes), parameter)


def _several(part: Tokens, depth: int) -> Reading | None:
    pieces, separators = split(part, frozenset((",", ";", "and", "or", "\\land", "\\lor")))
    pieces = [
        piece
        for i, piece in enumerate(pieces)
        if piece or i + 1 == len(pieces) or separators[i] == ","
    ]
    has_signs = any(token.text in ("\\pm", "\\mp") for token in part)
    if len(pieces) == 1 and ("\\{" in texts_of(part) or not has_signs):
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
    regions = [item for item in items if isinstance(item, Region)]
    if len(regions) == len(items) and len({region.name for region in regions}) == 1:
        if {"or", "\\lor"} & {*separators}:
            return combined(regions)
        both = combined(regions, set.intersection)
        is_list = {*separators} <= {",", ";"}
        return both if both.intervals or not is_list else combined(regions)
    named = [item.values[0] for item in items if isinstance(item, Named) and len(item.values) == 1]
    names = [name for name, _ in named]
    if named and len(named) == len(items):
        if len(set(names)) == len(names) and not _are_roots(names):
            return Named(tuple(sorted(named, key=lambda pair: pair[0])))
        if len(set(names)) > 1 and not _are_roots(names):
            raise NotUnderstood
        return Many(tuple(value for _, value in named), False)
    rest = items[1:]
    is_list = all(isinstance(item, Value | TupleOrInterval) for item in rest)
    if len(named) == 1 and isinstance(items[0], Named) and is_list:
        return Many((named[0][1], *rest), False)  # x = 1, 2
    return Many(tuple(items), False)


def _are_roots(names: Sequence[str]) -> bool:
    """Returns whether the names are x_1, x_2, …: solutions of one unknown."""
    stems = {name.partition("_")[0] for name in names}
    return len(stems) == 1 and all("_" in name for name in names)


def _variants(part: Tokens) -> list[Tokens]:
    """Returns the answers that ± stands for."""
    places = [i for i, token in enumerate(part) if token.text in ("\\pm", "\\mp")]
    if len(places) > 3:
        raise NotUnderstood
    is_tied = any(part[i].text == "\\mp" for i in places)
    found: list[Tokens] = []
    for signs in product("+-", repeat=1 if is_tied else len(places)):
        variant = list(part)
        for k, i in enumerate(places):
            sign = signs[0] if is_tied else signs[k]
            if part[i].text == "\\mp":
                sign = "-" if sign == "+" else "+"
            variant[i] = Token("op", sign, part[i].spaced)
        found.append(tuple(variant))
    return found


def _labelled(part: Tokens, depth: int) -> Reading | None:
    """Reads "The remainder is 42" and "Total: 42"."""
    at = next((i for i, token in enumerate(part) if token.text.lower() in _VERBS), 0)
    label = part[:at]
    has_words = any(token.kind == "word" and len(token.text) > 2 for token in label)
    is_text = all(token.kind in ("word", "name") for token in label)
    if not at or not is_text or at + 1 == len(part) or not (has_words or part[at].text != ":"):
        return None
    if any(token.text.lower() in DOUBTS for token in label):
        raise NotUnderstood
    return Named((("", _read(part[at + 1 :], depth)),), is_label=True)


def _set(part: Tokens, depth: int) -> Reading | None:
    texts = texts_of(part)
    if texts == ["\\emptyset"]:
        return Many((), True)
    if texts == ["\\setR"]:
        return REALS
    if "except" in texts and " ".join(texts[: texts.index("except")]).lower() in _REALS:
        rest = part[texts.index("except") + 1 :]
        part = (Token("cmd", "\\setR"), Token("cmd", "\\setminus"), *_braced(rest))
    else:
        part = tuple(_set_operator(token, part[i - 1].text) for i, token in enumerate(part))
    pieces, operators = split(part, frozenset(_SETS))
    if not operators:
        return None
    regions: list[Region] = []
    for piece in pieces:
        region = as_region(_read(piece, depth))
        if region is None:
            raise NotUnderstood
        regions.append(region)
    found = regions[0]
    for operator, region in zip(operators, regions[1:], strict=True):
        found = combined([found, region], _SETS[operator])
    return found


def _braced(part: Tokens) -> Tokens:
    return (Token("op", "\\{"), *part, Token("op", "\\}"))


def _set_operator(token: Token, before: str) -> Token:
    if token.text in ("U", "union") and before in CLOSE:
        return Token("cmd", "\\union")
    return Token("cmd", "\\setminus") if token.text == "-" and before == "\\setR" else token


def _statement(part: Tokens, depth: int) -> Reading | None:
    return read_relation(part, depth, _read)


def _bracketed(part: Tokens, depth: int) -> Reading | None:
    content = inner(part)
    if content is None:
        return None
    brackets = (part[0].text, part[-1].text)
    if brackets == ("\\{", "\\}"):
        return _in_braces(content, depth)
    if "{" in brackets or "}" in brackets or not content:
        return _read(content, depth) if brackets == ("{", "}") else None
    pieces, separators = split(content, frozenset((",", ";")))
    if separators:
        items = tuple(_read(piece, depth) for piece in pieces)
        opening, closing = ("(", ")") if brackets[0] == "\\langle" else brackets
        return TupleOrInterval(opening, closing, items)
    found = _read(content, depth)
    is_group = brackets in (("(", ")"), ("[", "]")) and not isinstance(found, Words)
    return found if is_group else None


def _in_braces(content: Tokens, depth: int) -> Reading | None:
    if not content:
        return Many((), True)
    pieces, separators = split(content, frozenset((":", "|")))
    if len(separators) == 1 and all(pieces):
        (head, *_), _ = split(pieces[0], frozenset(("\\in",)))
        return _read(pieces[1], depth) if name_of(head) else None
    found = _read(content, depth)
    if isinstance(found, Named | Untrue):
        return found
    is_list = isinstance(found, Many) and not found.braces
    return Many(found.items if is_list else (found,), True)  # type: ignore[union-attr]


def _matrix(part: Tokens, depth: int) -> Reading | None:
    texts = texts_of(part)
    if texts[:2] != ["\\begin", "{"] or texts.count("\\begin") > 1 or "\\end" not in texts:
        return None
    kind = texts[2]
    end = texts.index("\\end")
    after = "".join(texts[end + 4 :]).strip("{}").replace("{", "")
    if texts[end + 1 : end + 4] != ["{", kind, "}"] or after not in ("", "^T", "^\\top", "^t"):
        return None
    start = texts.index("}", 4) + 1 if kind == "array" and texts[4:5] == ["{"] else 4
    lines, _ = split(part[start:end], frozenset(("\\\\",)))
    lines = [line for line in lines if line]
    if kind in _LISTS and not (kind.endswith("cases") and "&" in texts):
        rows = [tuple(token for token in line if token.text != "&") for line in lines]
        rows = [row[:-1] if row[-1].text in (",", ".") else row for row in rows]
        return _joined([_read(row, depth) for row in rows], ["and"])
    if kind not in _MATRICES and kind not in _LISTS:
        return None
    cells: list[tuple[Reading, ...]] = []
    for line in lines:
        pieces, _ = split(line, frozenset(("&",)))
        cells.append(tuple(_read(piece, depth) for piece in pieces))
    if after:
        cells = list(zip(*cells, strict=True))
    if len(cells) > 1 and all(len(row) == 1 for row in cells):
        return TupleOrInterval("(", ")", tuple(row[0] for row in cells))
    return Matrix(tuple(cells))


def _ratio(part: Tokens, _: int) -> Reading | None:
    pieces, separators = split(part, frozenset((":",)))
    if len(separators) < 2 or not all(pieces):
        return None
    nodes = [read_value(piece).node for piece in pieces]
    return Ratio(tuple(node for node in nodes if node))


def _vector(part: Tokens, _: int) -> Reading | None:
    """Reads 2i + 3j - k with unit vectors as a tuple."""
    if "\\hat" not in texts_of(part):
        return None
    found: dict[str, Node] = {}
    for sign, term in _terms(Parser(part).whole()):
        factor, vector = term[1:] if term[0] == "*" else (("num", Fraction(1)), term)
        if vector[0] != "sym" or vector[1] not in ("\\hat i", "\\hat j", "\\hat k"):
            return None
        found[vector[1][-1]] = factor if sign == "+" else ("neg", factor)
    zero: Node = ("num", Fraction(0))
    names = "ijk" if "k" in found else "ij"
    values = [Value(found.get(name, zero), None, ()) for name in names]
    return TupleOrInterval("(", ")", tuple(values))


def _terms(node: Node, sign: str = "+") -> list[tuple[str, Node]]:
    opposite = "-" if sign == "+" else "+"
    if node[0] in ("+", "-"):
        right = sign if node[0] == "+" else opposite
        return _terms(node[1], sign) + _terms(node[2], right)
    return _terms(node[1], opposite) if node[0] == "neg" else [(sign, node)]
