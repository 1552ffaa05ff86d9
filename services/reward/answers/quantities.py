"""Reads a value: a number or an expression, with its unit."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from services.reward.answers.expressions import Node, Parser
from services.reward.answers.notation import (
    CLOSE,
    DEGREE,
    OPEN,
    NotUnderstood,
    Token,
    Tokens,
    texts_of,
    words,
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

_CALCULUS = words("\\int \\iint \\oint \\sum \\prod \\lim \\det \\partial \\begin \\end")
_TRIGONOMETRIC = words("\\sin \\cos \\tan \\cot \\sec \\csc")
_REMARKS = words(
    "total all left leftover remaining each apiece now together combined altogether overall times "
    "exactly"
)
_ORDINALS = words("st nd rd th")
_SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9}
_PARTS = {
    "half": 2, "halves": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6,
    "seventh": 7, "eighth": 8, "ninth": 9, "tenth": 10, "twelfth": 12,
}  # fmt: skip


@dataclass(frozen=True)
class Value:
    """An expression with its unit; `node` is None for an expression that only sympy can read."""

    node: Node | None
    unit: Unit | None
    source: Tokens = field(compare=False)


def read_value(part: Tokens) -> Value:
    """Returns a number or expression with its unit. Raises NotUnderstood."""
    part, unit = _without_unit(_without_remark(_in_digits(part)))
    factor = Fraction(1)
    while len(part) > 1 and (times := scale(part[-1])) is not None:
        factor *= times
        part = part[:-1]
    texts = texts_of(part)
    if unit is None and DEGREE in texts and not _TRIGONOMETRIC & {*texts}:
        unit = read_unit((Token("op", DEGREE),))
        part = tuple(token for token in part if token.text != DEGREE)
    part = _cardinal(part)
    if not part:
        raise NotUnderstood
    if any(token.text in _CALCULUS for token in part):
        if factor != 1 or any(_is_prose(token, part[i - 1].text) for i, token in enumerate(part)):
            raise NotUnderstood
        return Value(None, unit, part)
    return Value(_times(Parser(part).whole(), factor), unit, part)


def _in_digits(part: Tokens) -> Tokens:
    """Returns tokens with a number in words, at the start, in digits."""
    if not part or part[0].kind != "word":
        return part
    if part[0].text.lower() in ("negative", "minus"):
        return (Token("op", "-"), *_in_digits(part[1:]))
    names: list[str] = []
    best: tuple[Fraction, int] | None = None
    for i, token in enumerate(part[:12], 1):
        if token.kind != "word" and token.text != "-":
            break
        names += token.text.lower().replace("-", " ").split()
        value = _number(names)
        if value is not None:
            best = (value, i)
    if best is None:
        return part
    value, length = best
    return (Token("num", str(value), part[0].spaced), *part[length:])


def _number(names: Sequence[str]) -> Fraction | None:
    """Returns the value of a number in words, such as twenty-one or two and a half; else None."""
    last = names[-1].removesuffix("s") if names else ""
    if last in _PARTS:
        *before, _ = names
        whole = before[: before.index("and")] if "and" in before else []
        above = [name for name in before[len(whole) :] if name not in ("and", "a", "one")]
        count = _number(above) if above else Fraction(1)
        base = _number(whole) if whole else Fraction(0)
        is_known = count is not None and base is not None and (before or last == "half")
        return base + count / _PARTS[last] if is_known else None  # type: ignore[operator]

    total = current = 0
    for i, name in enumerate(names):
        size = NUMBERS.get(name, -1)
        room = 100 if current % 100 == 0 else 10 if current % 10 == 0 else 0
        if 0 <= size < room and (current or i == 0 or names[i - 1] in (*_SCALES, "and")):
            current += size
        elif name == "hundred" and 0 < current < 100:
            current *= 100
        elif name in _SCALES and current:
            total += current * _SCALES[name]
            current = 0
        elif name != "and" or i in (0, len(names) - 1):
            return None
    return Fraction(total + current) if names else None


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
    is_negative = node[0] == "neg"
    if is_negative:
        node = node[1]
    kind, *parts = node
    if kind == "num" or _is_power_of_ten(node):
        return True
    if kind not in ("*", "/"):
        return False
    above, below = _integer(parts[0]), _integer(parts[1])
    if kind == "/" and above is not None and below is not None:
        signs = is_negative + (above < 0) + (below < 0)
        return signs < 2 and (below in (0, 1) or above % below != 0)
    number = parts[0][1] if parts[0][0] == "neg" and not is_negative else parts[0]
    return number[0] == "num" and _is_power_of_ten(parts[1])


def _is_power_of_ten(node: Node) -> bool:
    return node[0] == "^" and node[1] == ("num", 10) and _integer(node[2]) is not None


def _integer(node: Node) -> int | None:
    """Returns the value of an integer, with or without a sign; None for anything else."""
    if node[0] == "neg":
        value = _integer(node[1])
        return None if value is None else -value
    return int(node[1]) if node[0] == "num" and node[1].denominator == 1 else None


def _without_remark(part: Tokens) -> Tokens:
    """Returns a quantity without remarks about it: 18 eggs left, $5 each, 12 in all, 3/4 of the
    cake.
    """
    texts = texts_of(part)
    if "of" in texts[1:]:
        at = texts.index("of", 1)
        if part[at - 1].kind != "word" and len(part) > at + 1 and is_remark(part[at + 1 :]):
            return part[:at]
    if len(part) > 1 and texts[-1] in _REMARKS:
        part = part[:-1]
        return part[:-1] if part[-1].text in ("in", "left") else part
    return part[:-2] if texts[-2:] == ["left", "over"] else part


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
    front = next((i for i, token in enumerate(part[:2]) if token.text.lower() in CURRENCIES), None)
    if front is not None and len(part) > 1 and (front == 0 or part[0].text in ("-", "+")):
        currency = part[front]
        rest = tuple(token for token in part if token.text not in (currency.text, "."))
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
        if token.kind in ("op", "cmd"):
            depth += (token.text in OPEN) - (token.text in CLOSE)
        begins = i and depth == 0 and (starts_unit(token, part[i - 1]) or token.text == "\\frac")
        if not begins or (token.text == DEGREE and has_angle):
            continue
        unit = read_unit(part[i:], single=part[0].text == "1" and i == 1)
        if unit is not None:
            return part[:i], unit
    return part, None
