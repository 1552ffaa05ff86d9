"""Reads a value: a number or an expression, with its unit."""

from dataclasses import dataclass, field
from fractions import Fraction

from services.reward.answers.expressions import Node, Parser
from services.reward.answers.notation import (
    CLOSE,
    OPEN,
    NotUnderstood,
    Token,
    Tokens,
    texts_of,
    words,
)
from services.reward.answers.units import CURRENCIES, PER, Unit, read_unit, scale, starts_unit

_CALCULUS = words("\\int \\iint \\oint \\sum \\prod \\lim \\det \\partial \\begin \\end")
_TRIGONOMETRIC = words("\\sin \\cos \\tan \\cot \\sec \\csc")
_REMARKS = [tuple(remark.split()) for remark in (
    "in total", "in all", "left over", "left", "leftover", "remaining", "each", "apiece", "now", "together", "combined",
    "altogether", "total", "overall", "times",
)]  # fmt: skip
_ORDINALS = frozenset(("st", "nd", "rd", "th"))


@dataclass(frozen=True)
class Value:
    """An expression with its unit; `node` is None for an expression that only sympy can read."""

    node: Node | None
    unit: Unit | None
    source: Tokens = field(compare=False)


def read_value(part: Tokens) -> Value:
    """Returns a number or expression with its unit. Raises NotUnderstood."""
    part, unit = _without_unit(_without_remark(part))
    factor = Fraction(1)
    while len(part) > 1 and (times := scale(part[-1])) is not None:
        factor, part = factor * times, part[:-1]
    part = _cardinal(part)
    if not part:
        raise NotUnderstood
    if any(token.text in _CALCULUS for token in part):
        if factor != 1 or any(_is_prose(token, part[i - 1].text) for i, token in enumerate(part)):
            raise NotUnderstood
        return Value(None, unit, part)
    return Value(_times(Parser(part).whole(), factor), unit, part)


def _times(node: Node, factor: Fraction) -> Node:
    """Multiplies by a factor such as a dozen or million: a number stays a number, other expressions
    become products.
    """
    if factor == 1:
        return node
    if node[0] == "neg":
        return ("neg", _times(node[1], factor))
    if node[0] == "/" and node[1][0] == node[2][0] == "num" and written_out(node):
        node = ("num", node[1][1] / node[2][1])
    return ("num", node[1] * factor) if node[0] == "num" else ("*", node, ("num", factor))


def written_out(node: Node) -> bool:
    """Returns whether an expression is a fully evaluated number.

    That is an integer, a decimal, a fraction that is not an integer (reduced or not), or an integer
    or decimal times a power of ten, with at most one minus sign.
    """
    minus = node[0] == "neg"
    kind, *parts = node[1] if minus else node
    if kind not in ("*", "/"):
        return kind == "num" or _power_of_ten((kind, *parts))
    if (
        kind == "/"
        and (above := _integer(parts[0])) is not None
        and (below := _integer(parts[1])) is not None
    ):
        return (below == 1 or below == 0 or above % below != 0) and minus + (above < 0) + (
            below < 0
        ) < 2
    number = parts[0][1] if parts[0][0] == "neg" and not minus else parts[0]
    return bool(number[0] == "num") and _power_of_ten(parts[1])


def _power_of_ten(node: Node) -> bool:
    return node[0] == "^" and node[1] == ("num", 10) and _integer(node[2]) is not None


def _integer(node: Node) -> int | None:
    """Returns the value of an integer, with or without a sign; None for anything else."""
    sign, node = (-1, node[1]) if node[0] == "neg" else (1, node)
    return sign * int(node[1]) if node[0] == "num" and node[1].denominator == 1 else None


def _without_remark(part: Tokens) -> Tokens:
    """Returns a quantity without remarks about it: 18 eggs left, $5 each, 12 in all."""
    for remark in _REMARKS:
        if tuple(texts_of(part[-len(remark) :])) == remark:
            return part[: -len(remark)]
    return part


def _is_prose(token: Token, before: str) -> bool:
    return token.kind == "other" or (token.kind == "word" and before != "{" and len(token.text) > 2)


def _cardinal(part: Tokens) -> Tokens:
    """Returns a number without its ordinal ending: 5^{th} is 5."""
    if len(part) < 2 or part[0].kind != "num":
        return part
    ending = [token.text for token in part[1:] if token.text not in ("^", "{", "}")]
    return part[:1] if len(ending) == 1 and ending[0] in _ORDINALS else part


def _without_unit(part: Tokens) -> tuple[Tokens, Unit | None]:
    """Splits off the unit: a currency sign in front, or the text after the value."""
    last = part[-1] if len(part) > 1 else None
    if last and last.text in ("\\min", "\\sec"):
        part = (*part[:-1], Token("word", last.text[1:], True))
    front = next((i for i, token in enumerate(part[:2]) if token.text in CURRENCIES), None)
    if front is not None and (front == 0 or part[0].text in ("-", "+")):
        currency = part[front]
        rest = tuple(token for token in part if token.text != currency.text)
        for i, token in enumerate(rest):
            if token.text in PER and (unit := read_unit((currency, *rest[i:]))) is not None:
                return rest[:i], unit
        named, unit = _without_unit(rest)
        if unit is not None and unit != read_unit((currency,)):
            raise NotUnderstood
        return named, read_unit((currency,))
    has_angle = any(token.text in _TRIGONOMETRIC for token in part)
    depth = 0
    for i, token in enumerate(part):
        opens = token.kind in ("op", "cmd") and token.text in OPEN
        depth += opens - (token.kind in ("op", "cmd") and token.text in CLOSE)
        begins = i and depth == 0 and (starts_unit(token, part[i - 1]) or token.text == "\\frac")
        if (
            begins
            and not (token.text == "\x04" and has_angle)
            and (unit := read_unit(part[i:], single=part[0].text == "1" and i == 1))
        ):
            return part[:i], unit
    return part, None
