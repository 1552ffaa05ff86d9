"""Reads a value: a number or an expression, with its unit."""

import re
from dataclasses import dataclass, field
from fractions import Fraction

from services.reward.answers.expressions import Expression, Number, Operation, Parser, operation
from services.reward.answers.notation import (
    DEGREE,
    NotUnderstood,
    Token,
    Tokens,
    bracket_step,
    matched,
    texts_of,
    trimmed,
    words,
    written,
)
from services.reward.answers.units import (
    CURRENCIES,
    NUMBERS,
    PER,
    Unit,
    is_remark,
    read_unit,
    scale,
    starts_unit,
)
from services.reward.answers.values import simplified

_MONEY = (
    rf"(?i)(?:(?P<sign>[-+]) )?(?P<currency>{'|'.join(map(re.escape, CURRENCIES))})"
    r" (?P<rest>.+)"
)
_CALCULUS = words("\\int \\iint \\oint \\sum \\prod \\lim \\det \\partial \\begin \\end")
_PROSE = re.compile(r"[^\x00-\x7f]|(?<![\\A-Za-z])(?<!\{ )[A-Za-z]{3,}")
# What may stand after a quantity: 18 eggs left, $5 each, 12 in all.
_REMARK = (
    r"(?P<value>.+?) (?:(?:in )?(?:total|all)|left(?: over)?|leftover|remaining|each|apiece|now"
    r"|together|combined|altogether|overall|times|exactly)"
)
_LITRES = words("l L \\ell")
_FRACTIONS = words("- / \\frac { }")
_TRIGONOMETRIC = words("\\cis \\sin \\cos \\tan \\cot \\sec \\csc")
_SIZES = {"million": 10**6, "thousand": 1000, "hundred": 100, "dozen": 12}
_PARTS = {
    **dict.fromkeys(("half", "halve"), 2), "third": 3, "quarter": 4, "fourth": 4, "fifth": 5,
    "sixth": 6, "seventh": 7, "eighth": 8, "ninth": 9, "tenth": 10, "twelfth": 12,
}  # fmt: skip
_MAX_WORDS = 12


@dataclass(frozen=True)
class Value:
    """An expression with its unit; `node` is None for an expression that only sympy can read."""

    node: Expression | None
    unit: Unit | None = None
    source: Tokens = field(default=(), compare=False)


def read_value(part: Tokens) -> Value:
    """Returns a number or expression with its unit. Raises NotUnderstood."""
    part = _in_digits(part)
    share = matched(r"(?P<value>.*[^ a-z]) of (?P<whole>.+)", part)
    if share and is_remark(share["whole"]):  # 3/4 of the cake
        part = share["value"]
    part, unit = _without_unit(trimmed(_REMARK, part))
    factor = Fraction(1)
    while len(part) > 1 and (times := scale(part[-1])) is not None:
        factor *= times
        part = part[:-1]
    texts = texts_of(part)
    if unit is None and DEGREE in texts and not _TRIGONOMETRIC & {*texts}:
        unit = read_unit((Token("op", DEGREE),))
        part = tuple(token for token in part if token.text != DEGREE)
    part = trimmed(r"(?P<value>[0-9]+)(?: \^)?(?: \{)? (?:st|nd|rd|th)(?: \})?", part)  # 5th
    if not part:
        raise NotUnderstood
    if _CALCULUS & {*texts}:
        if factor != 1 or _PROSE.search(written(part)):
            raise NotUnderstood
        return Value(None, unit, part)
    node = Parser(part).whole()
    if factor != 1:
        # A number stays a number: 5 million is written out.
        scaled = operation("*", node, Number(factor))
        node = simplified(scaled) if written_out(node) else scaled
    return Value(node, unit, part)


def node_of(part: Tokens) -> Expression:
    """Returns the expression of a value. Raises NotUnderstood, also where only sympy can read
    it.
    """
    node = read_value(part).node
    if node is None:
        raise NotUnderstood
    return node


def _in_digits(part: Tokens) -> Tokens:
    """Replaces a number in words at the start of the tokens by digits: twenty-one becomes 21."""
    negated = matched(r"(?i)(?:negative|minus) (?P<value>.+)", part)
    if negated:
        return (Token("op", "-"), *_in_digits(negated["value"]))
    length = min(len(part), _MAX_WORDS) if part and part[0].kind == "word" else 0
    for end in range(length, 0, -1):
        value = _number(written(part[:end]).lower().replace(" - ", " ").replace("-", " "))
        if value is not None:
            return (Token("num", str(value), part[0].spaced), *part[end:])
    return part


def _number(text: str) -> Fraction | None:
    """Returns the value of a number in words, such as twenty one or two and a half; else None."""
    if text in NUMBERS:
        return Fraction(NUMBERS[text])
    for name, size in _SIZES.items():
        count, found, rest = f"{text} ".partition(f" {name} ")
        if found:
            above = _number(count.removeprefix("a") or "one")
            below = _number(rest.strip().removeprefix("and ") or "zero")
            return None if above is None or below is None else above * size + below
    match = re.fullmatch(
        r"(?:(?P<whole>.+) and )?(?:(?P<count>.+) )?(?P<part>half|halve|third|quarter|[a-z]+th)s?",
        text,
    )
    if match is None or match["part"] not in _PARTS:
        return None
    is_one = match["count"] in ("a", None)
    count_of_parts = _number("one" if is_one else match["count"])
    whole = _number(match["whole"] or "zero")
    is_half = match["part"] == "half" or match["count"]
    if count_of_parts is None or whole is None or not is_half:
        return None
    return whole + count_of_parts / _PARTS[match["part"]]


def written_out(node: Expression) -> bool:
    """Returns whether an expression is a fully evaluated number.

    That is an integer, a decimal, a fraction that is not an integer (reduced or not), or an integer
    or decimal times a power of ten, with at most one minus sign.
    """
    is_negative = node.name == "neg"
    match node.operands[0] if is_negative else node:
        case Number() | Operation("^", (Number(10), Number() | Operation("neg", (Number(),)))):
            return True
        case Operation("*" | "/", (factor, Operation("^") as power)):
            is_number = isinstance(factor, Number) or (factor.name == "neg" and not is_negative)
            return is_number and written_out(factor) and written_out(power)
        case Operation("/", (above, below)):
            numerator = _integer(above)
            denominator = _integer(below)
            if numerator is None or denominator is None:
                return False
            signs = is_negative + (numerator < 0) + (denominator < 0)
            return signs < 2 and (denominator in (0, 1) or numerator % denominator != 0)
    return False


def _integer(node: Expression) -> int | None:
    """Returns the value of an integer, with or without a sign; None for anything else."""
    match node:
        case Operation("neg", (positive,)):
            value = _integer(positive)
            return None if value is None else -value
        case Number(Fraction(denominator=1) as value):
            return int(value)
    return None


def _without_unit(part: Tokens) -> tuple[Tokens, Unit | None]:
    """Returns a value without its unit, and the unit: a currency in front, or the text after it."""
    front = matched(_MONEY, part)
    if front:
        currency = read_unit(front["currency"])
        sign = texts_of(front["currency"])
        rest = (*front["sign"], *(token for token in front["rest"] if token.text not in sign))
        for i, token in enumerate(rest):
            price = read_unit((*front["currency"], *rest[i:])) if token.text in PER else None
            if price is not None:
                return rest[:i], price
        rest, unit = _without_unit(rest)
        if unit not in (None, currency):
            raise NotUnderstood
        return rest, currency

    has_angle = bool(_TRIGONOMETRIC & {*texts_of(part)})
    depth = 0
    for i, token in enumerate(part):
        depth += bracket_step(token)
        if i == 0 or depth != 0 or (token.text == DEGREE and has_angle):
            continue
        # 2l is 2 litres, but 2w + 2l is an expression.
        is_number = all(each.kind == "num" or each.text in _FRACTIONS for each in part[:i])
        is_litre = is_number and token.text in _LITRES
        if is_litre or starts_unit(token, part[i - 1]):
            unit = read_unit(part[i:], single=part[0].text == "1" and i == 1)
            if unit is not None:
                return part[:i], unit
    return part, None
