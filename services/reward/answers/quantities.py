"""Reads a value: a number or an expression, with its unit."""

from dataclasses import dataclass, field
from fractions import Fraction

from services.reward.answers.expressions import Node, Parser
from services.reward.answers.notation import CLOSE, OPEN, NotUnderstood, Token, Tokens, words
from services.reward.answers.units import CURRENCIES, Unit, read_unit, scale, starts_unit

_CALCULUS = words("\\int \\iint \\oint \\sum \\prod \\lim \\det \\partial \\begin \\end")
_TRIGONOMETRIC = words("\\sin \\cos \\tan \\cot \\sec \\csc")
_ORDINALS = frozenset(("st", "nd", "rd", "th"))


@dataclass(frozen=True)
class Value:
    """An expression with its unit; `node` is None for one that only sympy reads."""

    node: Node | None
    unit: Unit | None
    source: Tokens = field(compare=False)


def read_value(part: Tokens) -> Value:
    """Returns a number or expression with its unit. Raises NotUnderstood."""
    part, unit = _without_unit(part)
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
    node = Parser(part).whole()
    return Value(node if factor == 1 else ("*", node, ("num", factor)), unit, part)


def _is_prose(token: Token, before: str) -> bool:
    return token.kind == "other" or (token.kind == "word" and before != "{" and len(token.text) > 2)


def _cardinal(part: Tokens) -> Tokens:
    """Returns a number without its ordinal ending: 5^{th} is 5."""
    if len(part) < 2 or part[0].kind != "num":
        return part
    ending = [token.text for token in part[1:] if token.text not in ("^", "{", "}")]
    return part[:1] if len(ending) == 1 and ending[0] in _ORDINALS else part


def _without_unit(part: Tokens) -> tuple[Tokens, Unit | None]:
    """Splits off the unit: a currency sign in front, or what follows the value."""
    last = part[-1] if len(part) > 1 else None
    if last and last.text in ("\\min", "\\sec"):
        part = (*part[:-1], Token("word", last.text[1:], True))
    front = next((i for i, token in enumerate(part[:2]) if token.text in CURRENCIES), None)
    if front is not None and (front == 0 or part[0].text in ("-", "+")):
        currency = part[front]
        rest = tuple(token for token in part if token.text != currency.text)
        for i, token in enumerate(rest):
            if token.text in ("/", "per", "a", "an") and (unit := read_unit((currency, *rest[i:]))) is not None:
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
        begins = i and depth == 0 and (starts_unit(token) or token.text == "\\frac")
        if begins and not (token.text == "\x04" and has_angle) and (unit := read_unit(part[i:])) is not None:
            return part[:i], unit
    return part, None
