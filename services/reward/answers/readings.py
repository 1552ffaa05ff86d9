"""Determines the kind of an answer: a value with a unit, a tuple, a set, an interval, an equation,
an inequality, a choice, or words.

A reading covers all tokens of the answer, or `read` returns None. The patterns match what `written`
returns: the texts of the tokens, with spaces between them.
"""

import calendar
import operator
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache, partial
from itertools import chain, pairwise, product

from services.reward.answers.expressions import (
    ZERO,
    Expression,
    Number,
    Parser,
    Unknown,
    number,
    operation,
    substituted,
    unknowns,
)
from services.reward.answers.formulas import same_values
from services.reward.answers.kinds import (
    REALS,
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
    Untrue,
    Words,
    as_region,
    combined,
    without,
)
from services.reward.answers.notation import (
    GREEK,
    NotUnderstood,
    Token,
    Tokens,
    in_brackets,
    matched,
    split,
    texts_of,
    tokens,
    trimmed,
    words,
    written,
)
from services.reward.answers.quantities import Value, node_of, read_value, written_out
from services.reward.answers.units import DOUBTS, NUMBERS, Unit, has_doubts, is_remark, read_unit
from services.reward.answers.values import (
    INFINITY,
    MINUS_INFINITY,
    Undecided,
    roughly,
    same_value,
    simplified,
)

# Reads a part of an answer.
ReadPart = Callable[[Tokens], Reading]
_MAX_DEPTH = 8
# 12 of "the final answer is: 12", "option B", "= 12", "答案是 12"
_INTRODUCED = r"""(?xi)
    (?: (?=(?:\S+[ ]){0,3}(?:answer|option|choice)\b)  # "the" alone may belong to the answer
        (?:(?:the|final|answer|option|choice|is|=|:)[ ])+
    | =[ ] | \\approx[ ] | [^ 不]*[是为][ ] )?  # 不是 12 says what it is not
    (?P<value>.+)"""
# Yes of "Yes, because 4 is even". A reason that says more, as "Yes, but not if x = 0", is kept,
# and then the answer is not read.
_WITH_A_REASON = r"""(?xi)
    (?P<value> (?:yes|true|ja|oui|sí|sì|sim|да)(?!.*[ ](?:no|not)[ ])
    | no|false|nein|non|não|нет )
    [ ][,;:.][ ]
    (?: (?!\b(?:yes|true|false|if|unless|or|else|otherwise|maybe|perhaps|but|except|sometimes
        |however|depends|depending|wait|when|only)\b). )+"""
_LISTS = re.compile(r"r?cases|aligned|align|gathered")
# x > 0 of "if x > 0,"
_CELL = r"(?:(?:if|for|when|where) )?(?P<value>.+?)(?: [,;.])*"
# Words that say no more about an answer of words.
_FILLERS = words(
    "a an the is are it its this that function graph curve figure shape number answer value "
    "equation conic person student direction day on st nd rd th"
)
_DATES = {
    name[:length].lower(): name.lower()
    for name in (*calendar.day_name, *calendar.month_name)
    for length in (3, 4, 9)
    if name
}
_MONTHS = frozenset(map(str.lower, calendar.month_name))
_DATE_GLUE = words("the of on st nd rd th , . ^ { }")
_SETS = {"\\union": operator.or_, "\\cap": operator.and_, "\\setminus": operator.sub}


_RELATIONS = "= \\lt \\gt \\le \\ge \\ne \\in \\approx"
_REVERSED = {"\\gt": "\\lt", "\\ge": "\\le"}
_WORD = rf"(?:[^\W\d_]+|\\(?:{'|'.join(GREEK)}))"
_D = r"(?:d|\\partial)"
_NAME = re.compile(
    # not a product: ab, x y
    rf"(?!(?!d[a-z] /)[a-z]{{2}}\b|[xyz]{{2,}}\b|(?:[A-Za-z] )+[A-Za-z]$)"
    rf"(?P<stem>(?:\\(?:angle|triangle|vec) (?:\{{ )?)?{_WORD}(?: {_WORD})*(?: \}})?"
    r"(?: _ (?:\{ [^{}]+ \}|\w+))?(?: ')*"
    # a derivative: dy/dx
    rf"|\\frac \{{ {_D}(?: \^ 2)?(?: ?[A-Za-z])? \}} \{{ {_D} ?[a-z](?: \^ 2)? \}}(?: [A-Za-z])?"
    r"|d[a-z] / d[a-z])(?: (?:\^ \{ - 1 \} )?\( [a-z](?: , [a-z])* \))?"
)
_UNKNOWN = rf"{_WORD}(?: _ (?:\{{ [^{{}}]+ \}}|\w+))?"


@lru_cache(maxsize=1024)
def read(text: str) -> Reading | None:
    """Returns the reading of an answer; None when a part of it is not understood."""
    part = tokens(text)
    try:
        return _read(trimmed(_WITH_A_REASON, trimmed(_INTRODUCED, part)))
    except (NotUnderstood, RecursionError):
        return None


def _read(part: Tokens, depth: int = 0) -> Reading:
    """Returns the reading by the first reader that recognises its kind of answer, else a value.

    A reader returns None for other kinds. It raises NotUnderstood for an answer of its kind of
    which it does not understand a part.
    """
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
        _row,
        _several,
        _labelled,
        _set,
        _relation,
        _bracketed,
        _matrix,
        _ratio,
    ):
        found = reader(part, partial(_read, depth=depth + 1))
        if found is not None:
            return found
    return read_value(part)


def _choice(part: Tokens, read_part: ReadPart) -> Reading | None:
    """Reads an option with or without text: (B), (B) 12, B. seat."""
    found = matched(
        r"(?:\( (?P<letter>[A-H]) \)|(?P<bare>[A-H]) [).:])"
        r"(?: is (?:the )?(?:correct|right|answer)(?: answer)?)?(?: (?P<rest>.+))?",
        part,
    )
    rest = found["rest"] if found else ()
    if not found or (rest and (not rest[0].spaced or rest[0].text in "+/^_=" + "\\times")):
        return None
    [letter] = found["letter"] or found["bare"]
    if has_doubts(rest) and not re.fullmatch(
        r"none(?: of (?:the|these|those|them)\b.*)?", written(rest), flags=re.IGNORECASE
    ):
        raise NotUnderstood
    value: Reading | None = None
    with suppress(NotUnderstood):
        value = read_part(rest)
    is_text = value is None or isinstance(value, Words)
    # "(C) D" and "(B), (C)" name two options.
    if _names_choice(value) or (is_text and re.search(r"\b(?<!^)[A-H]\b|^[B-H]\b", written(rest))):
        raise NotUnderstood
    return Choice(letter.text, value)


def _names_choice(reading: Reading | None) -> bool:
    """Returns whether a reading is an option, or several values of which one is."""
    if isinstance(reading, Many | TupleOrInterval):
        return any(map(_names_choice, reading.items))
    is_letter = isinstance(reading, Value) and re.fullmatch("[A-H]", written(reading.source))
    return bool(is_letter) or isinstance(reading, Choice)


def _date(part: Tokens, _: ReadPart) -> Reading | None:
    """Reads 7th of March, 2024, in any order."""
    names = [name for name in written(part).lower().split() if name not in _DATE_GLUE]
    months = [_DATES[name] for name in names if _DATES.get(name) in _MONTHS]
    numbers = [name for name in names if name.isdigit()]
    is_date = len(months) == 1 and 0 < len(numbers) == len(names) - 1 < 3
    return Words(" ".join((*months, *sorted(numbers, key=len)))) if is_date else None


def _words(part: Tokens, _: ReadPart) -> Reading | None:
    """Reads words: a number in words, "no solution", or what words say."""
    part = tuple(token for token in part if token.text not in ('"', "`")) or part
    has_date = any(token.text.lower() in _DATES for token in part)
    kinds = ("word", "name", "num") if has_date else ("word", "name")
    if not all(token.kind in kinds or token.text in "-'" for token in part):
        return None
    runs = [token.text for token in part if token.kind == "word"]
    if len(part) == 1 and runs and len(runs[0]) == 1:
        return Value(Unknown(runs[0]), source=part)
    # x apples: an unknown with its unit
    if part[0].kind == "name" and part[0].text not in ("a", "A", "I") and read_unit(part[1:]):
        return None
    is_derivative = any(token.text == "'" for token in part[:2])
    if not runs or is_derivative or all(set(run) <= set("xyz") for run in runs):
        return None
    text = written(part).replace(" - ", " ").replace("-", " ").lower()
    if re.fullmatch(
        r"(?:the |any )?real numbers?|all (?:real numbers|reals|real values|real x)", text
    ):
        return REALS
    if re.fullmatch(r"(?:the )?empty set|(?:there (?:is|are) )?no (?:real )?solutions?", text):
        return Many((), True)
    if text.split()[0] in (*NUMBERS, "negative", "minus", "half", "a"):
        with suppress(NotUnderstood):
            return read_value(part)
    content = _content(text)
    with suppress(NotUnderstood):
        return Words(content, product=Parser(part).whole())
    return Words(content)


def _content(text: str) -> str:
    """Returns the part of a sentence that answers: "even" of "The function is even"."""
    match = re.fullmatch(r"(?P<subject>.+) (?:is|are|was) (?P<said>.+)", text)
    if match and DOUBTS.isdisjoint(match["subject"].split()):
        text = match["said"]
    if re.fullmatch(
        r"(?:(?:the|it|its|limit) )*(?:does not exist|doesn't exist|dne|not defined)", text
    ):
        return "undefined"
    return " ".join(_DATES.get(name, name) for name in content_words(text))


def content_words(text: str) -> list[str]:
    """Returns the words of a text without fillers, or all if there are no others."""
    names = text.split()
    return [name for name in names if name.lower() not in _FILLERS] or names


def _residue(part: Tokens, _: ReadPart) -> Reading | None:
    """Reads 7 mod 11, x ≡ 7 (mod 11)."""
    found = matched(
        r"(?:(?P<name>.+) (?:\\equiv|=) )?(?P<value>(?:(?!\\equiv|=).)+?)(?: \()?"
        r" (?:\\mod|modulo|mod)(?: \{)? (?P<modulus>[^(){}]+?)(?: \})?(?: \))?",
        part,
    )
    if found is None:
        return None
    value = read_value(found["value"]).node
    modulus = read_value(found["modulus"]).node
    match value, modulus:
        case Number(rest), Number(divisor) if rest < divisor:
            return Residue(value, modulus)
        case Expression(), Expression() if found["name"] and written_out(value):
            return Residue(value, modulus)
    return None


def _based(part: Tokens, _: ReadPart) -> Reading | None:
    """Reads 52_8, 52 base eight."""
    match = re.fullmatch(
        r"(?:\( )?(?P<digits>[0-9A-Za-z][0-9A-Za-z ]*?)(?: \))?(?: in| \()? (?:base|_)(?: [{(])*"
        r"(?: base)? (?P<base>[0-9]{1,2}|[a-z]+)(?: [})])*",
        written(part),
    )
    if match is None:
        return None
    base = int(match["base"]) if match["base"].isdigit() else NUMBERS.get(match["base"], 0)
    digits = match["digits"].replace(" ", "")
    has_digit = any(character.isdigit() for character in digits)
    # x_{10} is an unknown; AB_{16} is a number.
    if not 2 <= base <= 36 or not (has_digit or (len(digits) > 1 and digits.isupper())):
        return None
    if any(int(digit, 36) >= base for digit in digits):
        raise NotUnderstood
    return Based(digits.upper().lstrip("0") or "0", base)


def _clock(part: Tokens, _: ReadPart) -> Reading | None:
    """Reads 3:30 PM, 3 in the afternoon."""
    match = re.fullmatch(
        r"(?P<hour>[0-9]{1,2})(?: : (?P<minute>[0-5][0-9]))? "
        r"(?:(?P<am>am|in the morning)|pm|in the (?:afternoon|evening)|at night)",
        written(part).replace(" . ", ""),
        flags=re.IGNORECASE,
    )
    if match is None or not 0 < int(match["hour"]) < (13 if match["am"] else 24):
        return None
    hour = int(match["hour"]) % 12 + (0 if match["am"] else 12)
    return Clock(hour * 60 + int(match["minute"] or 0))


def _annotated(part: Tokens, read_part: ReadPart) -> Reading | None:
    """Reads an answer without the note in parentheses after it: 8 (in simplest form), 3 (three)."""
    found = matched(r"(?P<head>.+) (?P<mark>\() (?P<note>[^()]+) \)", part)
    if found is None or not found["mark"][0].spaced:
        return None
    head = found["head"]
    note = found["note"]
    if note[0].kind != "word":
        return _computed(head, note, read_part)
    if head[-1].kind == "num" and read_unit(note):
        return read_value((*head, *note))
    if not any(len(token.text) > 3 for token in note):
        return None
    main = read_part(head)
    if is_remark(note):
        return main
    value = read_part(note)
    if not isinstance(value, Value) or not isinstance(main, Value):
        raise NotUnderstood
    return main if same_values(main, value) else Untrue()


def _computed(head: Tokens, note: Tokens, read_part: ReadPart) -> Value | None:
    """Reads 9 (3 x 3), 9 (3 x 3 = 9), 1/2 (50%): a number with what it is equal to.
    Returns None for a product, such as 2 (3 + 4).
    """
    note = tuple(Token("op", "\\times") if token.text == "x" else token for token in note)
    with suppress(NotUnderstood):
        main = read_value(head)
        if note[-1].text == "%" and main.unit is None:
            note = (*note[:-1], Token("op", "/"), Token("num", "100"))
        value = read_part(note)
        if not isinstance(value, Value):
            return None
        if value.unit is None:  # 9 apples (3 x 3)
            value = Value(value.node, main.unit, value.source)
        is_number = main.node is not None and written_out(main.node)
        return main if is_number and same_values(main, value) else None
    return None


def _mixed_units(part: Tokens, _: ReadPart) -> Reading | None:
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
        if not isinstance(value.node, Number) or unit is None:
            return None
        size = value.node.value * unit.size
        if largest and (unit.dimensions != largest.dimensions or size >= smallest):
            return None
        largest = largest or unit
        smallest = unit.size
        total += size
    return Value(Number(total / largest.size), largest, part) if largest else None


def _family(part: Tokens, read_part: ReadPart) -> Reading | None:
    """Reads x = a + kb, k ∈ ℤ."""
    found = matched(
        r"(?:(?:\S+ \\in )?\\\{ )?(?P<values>.+?)(?: (?:[,;:|]|where|for|with|and|any|all))*"
        r"(?: (?P<k>\S+) (?:\\in|is)(?: an| any| all)? (?:\\?set[ZN]|[ZN]|integers?)"
        r"| integers? (?P<n>\S+))(?: \\\})?",
        part,
    )
    if found is None:
        return None
    reading = read_part(found["values"])
    nodes: list[Expression] = []
    for item in reading.items if isinstance(reading, Many) else (reading,):
        value = item.values[0][1] if isinstance(item, Named) else item
        if not isinstance(value, Value) or value.node is None:
            raise NotUnderstood
        nodes.append(value.node)
    return Family(tuple(nodes), written(found["k"] or found["n"]))


def _row(part: Tokens, read_part: ReadPart) -> Reading | None:
    """Reads (x, y) = (1, 2), also with several rows of values, in the order that the names
    state.
    """
    found = matched(
        rf"(?:(?P<open>[(\[]|\\langle) )?(?P<names>{_UNKNOWN}(?: , {_UNKNOWN})+)"
        r"(?(open) (?:[)\]]|\\rangle)) = (?P<values>[^=]+)",
        part,
    )
    if found is None:
        return None
    names = [re.sub("[{} ]", "", name) for name in written(found["names"]).split(" , ")]
    values = read_part(found["values"])
    if isinstance(values, Many) and all(isinstance(item, TupleOrInterval) for item in values.items):
        return values._replace(items=tuple(_named_row(names, item) for item in values.items))
    return _named_row(names, values)


def _named_row(names: list[str], values: Reading) -> Named:
    items = values.items if isinstance(values, TupleOrInterval | Many) else ()
    if len(items) != len(names) or len(set(names)) < len(names):
        raise NotUnderstood
    return Named(tuple(zip(names, items, strict=True)))


def _several(part: Tokens, read_part: ReadPart) -> Reading | None:
    """Reads several values: between commas, "and" or "or", or joined by ±."""
    pieces, separators = split(part, ", ; and or \\land \\lor")
    texts = texts_of(part)
    if not separators and ("\\{" in texts or not {"\\pm", "\\mp"} & {*texts}):
        return None
    variants = chain.from_iterable(map(_variants, pieces))
    items = list(map(read_part, variants))
    if separators and 0 < sum(isinstance(item, Words) for item in items) < len(items):
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
        if len({name.partition("_")[0] for name in names}) == 1:  # x = 1 or x = 2
            return Many(tuple(values), False)
        if len(names) < len(named):
            raise NotUnderstood
        # The order of the alphabet, Latin letters before Greek ones.
        named.sort(key=lambda pair: (pair[0].startswith("\\"), pair[0].casefold()))
        return Named(tuple(named))
    if len(named) == 1 and isinstance(items[0], Named):  # x = 1, 2
        items = [*values, *items[1:]]
    return Many(tuple(items), False)


def _variants(part: Tokens) -> list[Tokens]:
    """Returns the two, four or eight answers for which ± and ∓ stand."""
    places = [i for i, token in enumerate(part) if token.text in ("\\pm", "\\mp")]
    if len(places) > 3:
        raise NotUnderstood
    # With ∓, all signs change together: ++ or --, else also +- and -+.
    is_tied = "\\mp" in texts_of(part)
    count = len(places)
    found: list[Tokens] = []
    for signs in zip(*["+-"] * count, strict=True) if is_tied else product("+-", repeat=count):
        variant = list(part)
        for i, sign in zip(places, signs, strict=True):
            is_negative = (sign == "-") != (part[i].text == "\\mp")
            variant[i] = Token("op", "-" if is_negative else "+", part[i].spaced)
        found.append(tuple(variant))
    return found


def _labelled(part: Tokens, read_part: ReadPart) -> Reading | None:
    """Reads "The remainder is 42" and "Total: 42"."""
    found = matched(
        r"(?P<label>[^\W\d_]+(?: [^\W\d_]+)*)"
        r" (?:is|are|was|were|equals|(?<=[^\W\d_]{3} ):) (?P<rest>.+)",
        part,
    )
    if found is None:
        return None
    if has_doubts(found["label"]):
        raise NotUnderstood
    return _named({""}, read_part(found["rest"]))


def _set(part: Tokens, read_part: ReadPart) -> Reading | None:
    """Reads ∅, ℝ, "all real numbers except 2", and unions, intersections and differences."""
    text = written(part)
    if text in ("\\emptyset", "\\setR"):
        return REALS if text == "\\setR" else Many((), True)
    found = matched(r"all real (?:numbers|values|x) except (?P<points>.+)", part)
    if found:
        points = as_region(_joined([read_part(found["points"])], ","))
        return points and combined([REALS, points], operator.sub)
    pieces, signs = split(part, " ".join(_SETS))
    if not signs:
        return None
    known = None
    for piece, sign in zip(pieces, ("", *signs), strict=True):
        region = as_region(read_part(piece))
        if region is None:
            raise NotUnderstood
        known = combined([known, region], _SETS[sign]) if known else region
    return known


def _relation(part: Tokens, read_part: ReadPart) -> Reading | None:
    """Reads equations, assignments and inequalities."""
    pieces, signs = split(part, _RELATIONS)
    if not signs:
        return None
    if not all(pieces):
        raise NotUnderstood
    kinds = set(signs)
    if "\\approx" in kinds:
        return _approximate(pieces, signs, read_part)
    if kinds == {"="}:
        return _chain(pieces, read_part)
    if kinds == {"\\in"} and len(pieces) == 2:
        name = name_of(pieces[0])
        found = read_part(pieces[1])
        region = as_region(found) if not isinstance(found, Many) else None
        return region._replace(name=name) if region and name else found
    if kinds <= {"\\gt", "\\ge"}:  # a > b is b < a
        pieces = pieces[::-1]
        signs = [_REVERSED[text] for text in signs[::-1]]
    elif not kinds <= {"\\lt", "\\le"} and kinds != {"\\ne"}:
        raise NotUnderstood
    return _inequality([node_of(piece) for piece in pieces], signs)


def _inequality(nodes: list[Expression], signs: list[str]) -> Reading:
    """Reads an inequality with the signs <, ≤ or ≠: as a region if it bounds one unknown by
    constants, else as a relation.
    """
    if len(nodes) == 3:  # a < x < b
        lower = _inequality(nodes[:2], signs[:1])
        upper = _inequality(nodes[1:], signs[1:])
        if not isinstance(lower, Region) or not isinstance(upper, Region):
            raise NotUnderstood
        return combined([lower, upper], operator.and_)
    if len(nodes) != 2:
        raise NotUnderstood
    [sign] = signs
    left, right = nodes
    is_closed = sign == "\\le"
    found: Region | None = None
    if sign == "\\ne":
        if isinstance(left, Unknown) and not unknowns(right):
            found = without(Region(((right, True, right, True),), left.name))
    elif not unknowns(right):
        found = _below(left, right, is_closed)
    elif not unknowns(left):
        # a < x is what is left without x <= a
        found = _below(right, left, not is_closed)
        found = found and without(found)
    return found or Relation(sign, left, right)


def _below(side: Expression, bound: Expression, is_closed: bool) -> Region | None:
    """Returns the region where x, -x or |x| is below a constant; None for other sides."""
    sign = side.name if side.operands else ""
    inner = side.operands[0] if sign in ("neg", "abs") else side
    if not isinstance(inner, Unknown):
        return None
    opposite = bound.operands[0] if bound.name == "neg" else operation("neg", bound)
    low = (opposite, is_closed) if sign else (MINUS_INFINITY, False)
    high = (INFINITY, False) if sign == "neg" else (bound, is_closed)
    return Region(((*low, *high),), inner.name)


def as_line(node: Expression, name: str) -> tuple[Expression, Expression] | None:
    """Returns a and b for an expression a + bx in one unknown x; None for any other."""
    before = substituted(node, name, number(Fraction(-7, 4)))
    start = substituted(node, name, ZERO)
    after = substituted(node, name, number(1))
    step = operation("-", after, start)
    # On a line, from -7/4 to 0 it rises 7/4 times as much as from 0 to 1.
    rise = operation("*", number(Fraction(7, 4)), step)
    try:
        is_straight = same_value(operation("-", start, before), rise)
        is_straight = is_straight and not same_value(start, after)
    except Undecided:
        return None
    return (start, step) if is_straight and unknowns(node) == {name} else None


def _approximate(pieces: list[Tokens], signs: list[str], read_part: ReadPart) -> Reading:
    """Reads π ≈ 3.14 as π, and x ≈ 3.14 as the value of x. Both values must be close."""
    *exact, rough = pieces
    if signs.index("\\approx") != len(exact) - 1 or {*signs} - {"=", "\\approx"}:
        raise NotUnderstood
    if name_of(exact[-1]):
        return _chain([exact[-1], rough], read_part)
    found = _chain(exact, read_part) if len(exact) > 1 else read_part(exact[0])
    value = found.values[0][1] if isinstance(found, Named) else found
    with suppress(Undecided):
        match value, read_value(rough):
            case Value(Expression() as node), Value(Expression() as other):
                return found if roughly(node, other) else Untrue()
    raise NotUnderstood


def name_of(part: Tokens) -> str:
    """Returns the name of an unknown, a function or a quantity; "" for anything else."""
    match = _NAME.fullmatch(written(part))
    return "" if match is None or has_doubts(part) else re.sub("[{} ]", "", match["stem"])


def _chain(pieces: list[Tokens], read_part: ReadPart) -> Reading:
    """Reads a = b = c. All its constants must be equal; the last fully evaluated one is the answer:
    7 in 3 + 4 = 7.
    """
    names: set[str] = set()
    while len(pieces) > 1 and (name := name_of(pieces[0])):
        names.add(name)
        pieces = pieces[1:]
    reversed_name = name_of(pieces[1]) if not names and len(pieces) == 2 else ""  # 5 = x
    if reversed_name and not isinstance(read_part(pieces[0]), Words):
        names.add(reversed_name)
        pieces = pieces[:1]
    last = read_part(pieces[-1])
    if isinstance(last, Words) and not names:
        raise NotUnderstood
    if len(pieces) == 1:
        return _named(names, last)
    if isinstance(last, Based):
        sides = list(map(read_part, pieces))
        based = [side for side in sides if isinstance(side, Based)]
        is_true = len({int(side.digits, side.base) for side in based}) == 1
        # of equal numbers in different bases, base ten is the explanation
        return min(based, key=lambda side: side.base == 10) if is_true else Untrue()
    return _equal_sides(pieces, names, last)


def _equal_sides(pieces: list[Tokens], names: set[str], last: Reading) -> Reading:
    """Reads a chain of which the last side has been read, and `names` were sides that are names."""
    values = _side_values(pieces[:-1])
    # A label names what the value after it measures: |AB|, f(3).
    is_label = len(values) < len(pieces) - 1
    if not isinstance(last, Value):
        if any(map(_is_constant, values)):
            raise NotUnderstood
        return _named({""}, last)

    left = values[-1].node if values else None
    values.append(last)
    constants = [value for value in values if _is_constant(value)]
    has_unknowns = len(constants) < len(values)
    if has_unknowns and not is_label:
        is_equation = not names and len(values) == 2
        if left and last.node and (is_equation or (last in constants and last.node == ZERO)):
            return Relation("=", left, last.node)
    same_kind = constants if last in constants else values
    if (is_label or not names) and last not in constants:
        raise NotUnderstood
    if not all(same_values(last, value) for value in same_kind):
        return Untrue()
    numbers = [value for value in same_kind if value.node and written_out(value.node)]
    last = numbers[-1] if numbers else last
    if is_label or (has_unknowns and not names):
        return _named({""}, last)
    return _named(names, last) if names else last


def _side_values(pieces: list[Tokens]) -> list[Value]:
    """Returns the values among the sides of a chain; the other sides are labels."""
    values: list[Value] = []
    for piece in pieces:
        try:
            value = read_value(piece)
        except NotUnderstood:
            if has_doubts(piece) or not re.fullmatch(r"(?=.*[A-Za-z])[\x00-\x7f]+", written(piece)):
                raise
            continue
        if value.node is not None and not re.fullmatch(
            r"[A-Za-z](?: ')* \( [-0-9 ,]+ \)", written(piece)
        ):
            values.append(value)
    return values


def _is_constant(value: Value) -> bool:
    return value.node is None or not unknowns(value.node)


def _named(names: set[str], value: Reading) -> Named:
    return Named(tuple((name, value) for name in sorted(names)))


def _bracketed(part: Tokens, read_part: ReadPart) -> Reading | None:
    """Reads what stands in one pair of brackets: a set, a tuple, an interval, or a group."""
    content = in_brackets(part)
    if content is None:
        return None
    brackets = (part[0].text, part[-1].text)
    if brackets == ("\\{", "\\}"):
        return _in_braces(content, read_part)
    if "{" in brackets or "}" in brackets or not content:
        return read_part(content) if brackets == ("{", "}") else None
    pieces, separators = split(content, ", ;")
    if separators:
        items = tuple(map(read_part, pieces))
        opening, closing = ("(", ")") if brackets[0] == "\\langle" else brackets
        return TupleOrInterval(opening, closing, items)
    found = read_part(content)
    is_group = brackets in (("(", ")"), ("[", "]")) and not isinstance(found, Words)
    return found if is_group else None


def _in_braces(content: Tokens, read_part: ReadPart) -> Reading | None:
    if not content:
        return Many((), True)
    built = matched(r"(?P<name>[^:|]+?)(?: \\in [^:|]+)? [:|] (?P<condition>[^:]+)", content)
    if built:  # {x : x > 3}
        return read_part(built["condition"]) if name_of(built["name"]) else None
    found = read_part(content)
    if isinstance(found, Named | Untrue):
        return found
    items = found.items if isinstance(found, Many) and not found.braces else (found,)
    return Many(items, True)


def _matrix(part: Tokens, read_part: ReadPart) -> Reading | None:
    """Reads a matrix as a tuple of rows, a column as a tuple, and `cases` as joined statements."""
    found = matched(
        r"\\begin \{ (?P<kind>[A-Za-z]+) \}(?: \{ [clr| ]+ \})? (?P<body>(?:(?!\\begin).)+?)"
        r" \\end \{ (?P=kind) \}(?: \^(?: \{)? (?P<turned>T|\\top|t)(?: \})?)?",
        part,
    )
    if found is None:
        return None
    kind = written(found["kind"])
    lines = [line for line in split(found["body"], "\\\\")[0] if line]
    if _LISTS.fullmatch(kind) and not ("cases" in kind and "&" in texts_of(part)):
        sides = [tuple(token for token in line if token.text != "&") for line in lines]
        return _joined(list(map(read_part, sides)), ["and"])
    is_matrix = re.fullmatch(r"(?:[pbB]?|p?small|bsmall)matrix|array", kind)
    if not is_matrix and not _LISTS.fullmatch(kind):
        return None
    cells = [split(line, "&")[0] for line in lines]
    if found["turned"]:
        cells = [list(column) for column in zip(*cells, strict=False)]
    rows: list[Reading] = []
    for row in cells:
        items = tuple(read_part(trimmed(_CELL, cell)) for cell in row)
        rows.append(items[0] if len(items) == 1 else TupleOrInterval("&", "&", items))
    if "cases" in kind:
        return Many(tuple(rows), False)
    is_column = not isinstance(rows[0], TupleOrInterval) and len(rows) > 1
    return TupleOrInterval("(" if is_column else "&", ")" if is_column else "&", tuple(rows))


def _ratio(part: Tokens, _: ReadPart) -> Reading | None:
    """Reads 2:4:6 as 1, 2, 3 in order."""
    pieces, separators = split(part, ":")
    if len(separators) < 2 or not all(pieces):
        return None
    nodes = [node_of(piece) for piece in pieces]
    parts = tuple(Value(simplified(operation("/", node, nodes[0]))) for node in nodes)
    return TupleOrInterval(":", ":", parts)
