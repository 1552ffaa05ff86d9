"""Determines the kind of an answer: a value with a unit, a tuple, a set, an interval, an equation,
a choice, or words.

A reading covers all tokens of the answer, or `read` raises NotUnderstood. The patterns match what
`written` returns: the texts of the tokens, with spaces between them.
"""

import calendar
import operator
import re
from collections.abc import Sequence
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache, partial
from itertools import pairwise, product

from services.reward.answers.expressions import Node, Parser
from services.reward.answers.formulas import same_values
from services.reward.answers.notation import (
    NotUnderstood,
    Token,
    Tokens,
    inner,
    matched,
    split,
    texts_of,
    tokens,
    words,
    written,
)
from services.reward.answers.quantities import Value, read_value, written_out
from services.reward.answers.shapes import (
    REALS,
    Based,
    Choice,
    Clock,
    Family,
    Many,
    Named,
    Reading,
    Region,
    Residue,
    TupleOrInterval,
    Untrue,
    Words,
    as_region,
    combined,
)
from services.reward.answers.statements import name_of, read_relation, read_row
from services.reward.answers.units import DOUBTS, NUMBERS, Unit, has_doubts, is_remark, read_unit
from services.reward.answers.values import simplified

_MAX_DEPTH = 8
_INTRODUCED = re.compile(
    r"(?:(?=(?:\S+ ){0,3}(?:answer|option|choice)\b)"
    r"(?:(?:the|final|answer|option|choice|is|=|:) )+|= |\\approx |[^ 不]*[是为] )(?P<rest>.+)",
    re.IGNORECASE,
)
_CHOICE = re.compile(
    r"(?:\( (?P<letter>[A-H]) \)|(?P<bare>[A-H]) [).:])"
    r"(?: is (?:the )?(?:correct|right|answer)(?: answer)?)?(?: (?P<rest>.+))?"
)
_NONE = re.compile(r"none(?: of (?:the|these|those|them)\b.*)?", re.IGNORECASE)
_RESIDUE = re.compile(
    r"(?:(?P<name>.+) (?:\\equiv|=) )?(?P<value>(?:(?!\\equiv|=).)+?)(?: \()? (?:\\mod|modulo|mod)"
    r"(?: \{)? (?P<modulus>[^(){}]+?)(?: \})?(?: \))?"
)
_BASED = re.compile(
    r"(?:\( )?(?P<digits>[0-9A-Za-z][0-9A-Za-z ]*?)(?: \))?(?: in| \()? (?:base|_)(?: [{(])*"
    r"(?: base)? (?P<base>[0-9]{1,2}|[a-z]+)(?: [})])*"
)
_CLOCK = re.compile(
    r"(?P<hour>[0-9]{1,2})(?: : (?P<minute>[0-5][0-9]))? "
    r"(?:(?P<am>am|in the morning)|pm|in the (?:afternoon|evening)|at night)",
    re.IGNORECASE,
)
_ANNOTATED = re.compile(r"(?P<head>.+) (?P<mark>\() (?P<note>[^()]+) \)")
_FAMILY = re.compile(
    r"(?:(?:\S+ \\in )?\\\{ )?(?P<values>.+?)(?: (?:[,;:|]|where|for|with|and|any|all))*"
    r"(?: (?P<k>\S+) (?:\\in|is)(?: an| any| all)? (?:\\?set[ZN]|[ZN]|integers?)"
    r"| integers? (?P<n>\S+))(?: \\\})?"
)
_LABELLED = re.compile(
    r"(?P<label>[^\W\d_]+(?: [^\W\d_]+)*)"
    r" (?:is|are|was|were|equals|(?<=[^\W\d_]{3} ):) (?P<rest>.+)"
)
_BUILT = re.compile(r"(?P<name>[^:|]+?)(?: \\in [^:|]+)? [:|] (?P<condition>[^:]+)")
_EXCEPT = re.compile(r"all real (?:numbers|values|x) except (?P<points>.+)")
_MATRIX = re.compile(
    r"\\begin \{ (?P<kind>[A-Za-z]+) \}(?: \{ [clr| ]+ \})? (?P<body>(?:(?!\\begin).)+?)"
    r" \\end \{ (?P=kind) \}(?: \^(?: \{)? (?P<turned>T|\\top|t)(?: \})?)?"
)
_MATRICES = re.compile(r"(?:[pbB]?|p?small|bsmall)matrix|array")
_LISTS = re.compile(r"r?cases|aligned|align|gathered")
_REALS = re.compile(r"(?:the |any )?real numbers?|all (?:real numbers|reals|real values|real x)")
_NO_SOLUTIONS = re.compile(r"(?:the )?empty set|(?:there (?:is|are) )?no (?:real )?solutions?")
_SAYS = re.compile(r"(?P<subject>.+) (?:is|are|was) (?P<said>.+)")
_UNDEFINED = re.compile(
    r"(?:(?:the|it|its|limit) )*(?:does not exist|doesn't exist|dne|not defined)"
)
_FILLERS = words(
    "a an the is are it its this that function graph curve figure shape number answer value "
    "equation conic person student direction day on st nd rd th"
)
"""Words that say no more about an answer of words."""
_DATES = {
    name[:length].lower(): name.lower()
    for name in (*calendar.day_name, *calendar.month_name)
    for length in (3, 4, 9)
    if name
}
_MONTHS = frozenset(filter(None, map(str.lower, calendar.month_name)))
_DATE_GLUE = words("the of on st nd rd th , . ^ { }")
_TIMES = {"noon": 720, "midnight": 0}
_SETS = {"\\union": operator.or_, "\\cap": operator.and_, "\\setminus": operator.sub}


@lru_cache(maxsize=1024)
def read(text: str) -> Reading | None:
    """Returns the reading of an answer; None when a part of it is not understood."""
    part = tokens(text)
    try:
        return _read((matched(_INTRODUCED, part) or {"rest": part})["rest"])
    except (NotUnderstood, RecursionError):
        return None


def _read(part: Tokens, depth: int = 0) -> Reading:
    if depth > _MAX_DEPTH or not part:
        raise NotUnderstood
    for reader in (
        _choice,
        _date,
        _words,
        _residue,
        _based,
        _clock,
        _annotated,
        _mixed_units,
        _family,
        partial(read_row, read=_read),
        _several,
        _labelled,
        _set,
        partial(read_relation, read=_read),
        _bracketed,
        _matrix,
        _ratio,
    ):
        found = reader(part, depth + 1)
        if found is not None:
            return found
    return read_value(part)


def _choice(part: Tokens, depth: int) -> Reading | None:
    found = matched(_CHOICE, part)
    rest = found["rest"] if found else ()
    if not found or (rest and (not rest[0].spaced or rest[0].text in "+/^_=" + "\\times")):
        return None
    [letter] = found["letter"] or found["bare"]
    if has_doubts(rest) and not _NONE.fullmatch(written(rest)):
        raise NotUnderstood
    value: Reading | None = None
    with suppress(NotUnderstood):
        value = _read(rest, depth)
    is_text = value is None or isinstance(value, Words)
    if _names_choice(value) or (is_text and re.search(r"\b(?<!^)[A-H]\b|^[B-H]\b", written(rest))):
        raise NotUnderstood
    return Choice(letter.text, value)


def _names_choice(reading: Reading | None) -> bool:
    if isinstance(reading, Many | TupleOrInterval):
        return any(map(_names_choice, reading.items))
    is_letter = isinstance(reading, Value) and re.fullmatch("[A-H]", written(reading.source))
    return bool(is_letter) or isinstance(reading, Choice)


def _date(part: Tokens, _: int) -> Reading | None:
    """Reads 7th of March, 2024, in any order."""
    names = [name for name in (token.text.lower() for token in part) if name not in _DATE_GLUE]
    months = [_DATES[name] for name in names if _DATES.get(name) in _MONTHS]
    numbers = [name for name in names if name.isdigit()]
    is_date = len(months) == 1 and 0 < len(numbers) == len(names) - 1 < 3
    return Words(" ".join((*months, *sorted(numbers, key=len)))) if is_date else None


def _words(part: Tokens, _: int) -> Reading | None:
    part = tuple(token for token in part if token.text not in ('"', "`")) or part
    has_date = any(token.text.lower() in _DATES for token in part)
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
    text = written(part).replace(" - ", " ").replace("-", " ").lower()
    if _REALS.fullmatch(text):
        return REALS
    if _NO_SOLUTIONS.fullmatch(text):
        return Many((), True)
    if text in _TIMES:
        return Clock(_TIMES[text])
    if text.split()[0] in (*NUMBERS, "negative", "minus", "half", "a"):
        with suppress(NotUnderstood):
            return read_value(part)
    text = _content(text)
    with suppress(NotUnderstood):
        return Words(text, Parser(part).whole())
    return Words(text)


def _content(text: str) -> str:
    """Returns what words say: "The function is even" says "even"."""
    match = _SAYS.fullmatch(text)
    if match is not None and DOUBTS.isdisjoint(match["subject"].split()):
        text = match["said"]
    if _UNDEFINED.fullmatch(text):
        return "undefined"
    return " ".join(_DATES.get(name, name) for name in content_words(text))


def content_words(text: str) -> list[str]:
    """Returns the words of a text without fillers, or all if there are no others."""
    names = text.split()
    return [name for name in names if name.lower() not in _FILLERS] or names


def _residue(part: Tokens, _: int) -> Reading | None:
    """Reads 7 mod 11, x ≡ 7 (mod 11)."""
    found = matched(_RESIDUE, part)
    if found is None:
        return None
    value = read_value(found["value"]).node
    modulus = read_value(found["modulus"]).node
    if value is None or modulus is None or not written_out(value):
        return None
    is_reduced = value[0] == modulus[0] == "num" and value[1] < modulus[1]
    return Residue(value, modulus) if is_reduced or found["name"] else None


def _based(part: Tokens, _: int) -> Reading | None:
    match = _BASED.fullmatch(written(part))
    if match is None:
        return None
    base = int(match["base"]) if match["base"].isdigit() else NUMBERS.get(match["base"], 0)
    number = match["digits"].replace(" ", "")
    has_digit = any(character.isdigit() for character in number)
    if not 2 <= base <= 36 or not (has_digit or (len(number) > 1 and number.isupper())):
        return None
    if any(int(digit, 36) >= base for digit in number):
        raise NotUnderstood
    return Based(number.upper().lstrip("0") or "0", base)


def _clock(part: Tokens, _: int) -> Reading | None:
    match = _CLOCK.fullmatch(written(part).replace(" . ", ""))
    if match is None or not 0 < int(match["hour"]) < (13 if match["am"] else 24):
        return None
    hour = int(match["hour"]) % 12 + (0 if match["am"] else 12)
    return Clock(hour * 60 + int(match["minute"] or 0))


def _annotated(part: Tokens, depth: int) -> Reading | None:
    """Reads an answer without the note in parentheses after it: 8 (in simplest form), 3 (three)."""
    found = matched(_ANNOTATED, part)
    if found is None or not found["mark"][0].spaced or found["note"][0].kind != "word":
        return None
    head = found["head"]
    note = found["note"]
    if head[-1].kind == "num" and read_unit(note):
        return read_value((*head, *note))
    if not any(len(token.text) > 3 for token in note):
        return None
    main = _read(head, depth)
    if is_remark(note):
        return main
    value = _read(note, depth)
    if not isinstance(value, Value) or not isinstance(main, Value):
        raise NotUnderstood
    return main if same_values(main, value) else Untrue()


def _mixed_units(part: Tokens, _: int) -> Reading | None:
    """Reads 5 feet 6 inches, 1 hour and 30 minutes: each part must be less than one unit of the
    part before.
    """
    starts = [i for i, token in enumerate(part) if token.kind == "num" and i > 1]
    if not starts or any(token.kind in ("cmd", "other") for token in part):
        return None
    largest: Unit | None = None
    smallest = Fraction(0)
    total = Fraction(0)
    for start, end in pairwise((0, *starts, len(part))):
        try:
            value = read_value(part[start : end - (part[end - 1].text in ("and", ","))])
        except NotUnderstood:
            return None
        unit = value.unit
        if value.node is None or value.node[0] != "num" or unit is None:
            return None
        size = value.node[1] * unit.size
        if largest and (unit.dimensions != largest.dimensions or size >= smallest):
            return None
        largest = largest or unit
        smallest = unit.size
        total += size
    return Value(("num", total / largest.size), largest, part) if largest else None


def _family(part: Tokens, depth: int) -> Reading | None:
    """Reads x = a + kb, k ∈ ℤ."""
    found = matched(_FAMILY, part)
    if found is None:
        return None
    reading = _read(found["values"], depth)
    nodes: list[Node] = []
    for item in reading.items if isinstance(reading, Many) else (reading,):
        value = item.values[0][1] if isinstance(item, Named) else item
        if not isinstance(value, Value) or value.node is None:
            raise NotUnderstood
        nodes.append(value.node)
    return Family(tuple(nodes), written(found["k"] or found["n"]))


def _several(part: Tokens, depth: int) -> Reading | None:
    pieces, separators = split(part, words(", ; and or \\land \\lor"))
    texts = texts_of(part)
    if len(pieces) == 1 and ("\\{" in texts or not {"\\pm", "\\mp"} & {*texts}):
        return None
    items: list[Reading] = []
    for piece in pieces:
        items += [_read(variant, depth) for variant in _variants(piece)]
    if any(isinstance(item, Untrue) for item in items):
        return Untrue()
    if len(pieces) > 1 and 0 < sum(isinstance(item, Words) for item in items) < len(items):
        raise NotUnderstood
    return _joined(items, separators)


def _joined(items: list[Reading], separators: Sequence[str]) -> Reading:
    regions = [item for item in items if isinstance(item, Region)]
    if len(regions) == len(items) and len({region.name for region in regions}) == 1:
        if {"or", "\\lor"} & {*separators}:
            return combined(regions)
        both = combined(regions, operator.and_)
        # "x < 1, x > 3" has no intersection and is a union
        return both if both.intervals or not {*separators} <= {",", ";"} else combined(regions)

    named = [item.values[0] for item in items if isinstance(item, Named) and len(item.values) == 1]
    values = [value for _, value in named]
    names = {name for name, _ in named}
    if len(named) == len(items) > 1:
        is_one_unknown = len({name.partition("_")[0] for name in names}) == 1
        if not is_one_unknown and len(names) < len(named):
            raise NotUnderstood
        if is_one_unknown:
            return Many(tuple(values), False)
        return Named(tuple(sorted(named, key=_alphabetical)))
    if len(named) == 1 and isinstance(items[0], Named):  # x = 1, 2
        items = [*values, *items[1:]]
    return Many(tuple(items), False)


def _alphabetical(named: tuple[str, Reading]) -> tuple[bool, str]:
    """Returns the place of a name in the alphabet: Latin letters precede Greek ones."""
    name, _ = named
    return name.startswith("\\"), name.casefold()


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
            is_negative = (signs[0 if is_tied else k] == "-") != (part[i].text == "\\mp")
            variant[i] = Token("op", "-" if is_negative else "+", part[i].spaced)
        found.append(tuple(variant))
    return found


def _labelled(part: Tokens, depth: int) -> Reading | None:
    """Reads "The remainder is 42" and "Total: 42"."""
    found = matched(_LABELLED, part)
    if found is None:
        return None
    if has_doubts(found["label"]):
        raise NotUnderstood
    return Named((("", _read(found["rest"], depth)),))


def _set(part: Tokens, depth: int) -> Reading | None:
    text = written(part)
    if text in ("\\emptyset", "\\setR"):
        return REALS if text == "\\setR" else Many((), True)
    found = matched(_EXCEPT, part)
    if found:
        points = as_region(_joined([_read(found["points"], depth)], ","))
        return points and combined([REALS, points], operator.sub)
    pieces, signs = split(part, frozenset(_SETS))
    regions = [as_region(_read(piece, depth)) for piece in pieces] if signs else []
    known = [region for region in regions if region is not None]
    if len(known) < len(regions):
        raise NotUnderstood
    for sign, region in zip(signs, known[1:], strict=bool(signs)):
        known[0] = combined([known[0], region], _SETS[sign])
    return known[0] if known else None


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
    built = matched(_BUILT, content)
    if built:
        return _read(built["condition"], depth) if name_of(built["name"]) else None
    found = _read(content, depth)
    if isinstance(found, Named | Untrue):
        return found
    items = found.items if isinstance(found, Many) and not found.braces else (found,)
    return Many(items, True)


def _matrix(part: Tokens, depth: int) -> Reading | None:
    found = matched(_MATRIX, part)
    if found is None:
        return None
    kind = written(found["kind"])
    is_list = _LISTS.fullmatch(kind) and not ("cases" in kind and "&" in texts_of(part))
    lines, _ = split(found["body"], frozenset(("\\\\",)))
    lines = [line for line in lines if line]
    if is_list:
        sides = [tuple(token for token in line if token.text != "&") for line in lines]
        return _joined([_read(side, depth) for side in sides], ["and"])
    if not _MATRICES.fullmatch(kind) and not _LISTS.fullmatch(kind):
        return None
    cells = [split(line, frozenset(("&",)))[0] for line in lines]
    if found["turned"]:
        cells = [list(column) for column in zip(*cells, strict=False)]
    rows: list[Reading] = []
    for row in cells:
        items = tuple(_read(cell, depth) for cell in row)
        rows.append(items[0] if len(items) == 1 else TupleOrInterval("&", "&", items))
    is_column = not isinstance(rows[0], TupleOrInterval) and len(rows) > 1
    return TupleOrInterval("(" if is_column else "&", ")" if is_column else "&", tuple(rows))


def _ratio(part: Tokens, _: int) -> Reading | None:
    """Reads 2:4:6 as 1, 2, 3 in order."""
    pieces, separators = split(part, frozenset((":",)))
    if len(separators) < 2 or not all(pieces):
        return None
    nodes = [read_value(piece).node or () for piece in pieces]
    if not all(nodes):
        raise NotUnderstood
    parts = tuple(Value(simplified(("/", node, nodes[0])), None, ()) for node in nodes)
    return TupleOrInterval(":", ":", parts)
