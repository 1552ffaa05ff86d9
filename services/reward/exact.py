"""Compares plain numbers exactly, as fractions: nearly every answer of GSM8K, and most of MATH, without sympy."""

import re
from fractions import Fraction

_NUM = r"[+-]?\s*(?:[0-9]{1,3}(?:[, ][0-9]{3})+|[0-9]+)?(?:\.[0-9]*)?"
_ARG = rf"(?:\{{\s*(?:{_NUM})\s*\}}|[0-9])"
_DECIMAL = re.compile(rf"({_NUM})(?:[eE]([+-]?[0-9]{{1,3}}))?(\s*\\?%)?")
_SLASH = re.compile(rf"({_NUM})\s*/\s*({_NUM})")
_MIXED = re.compile(rf"([+-]?)\s*([0-9]+)(?:\s+([0-9]+)/([0-9]+)|\s*\\[dt]?frac\s*({_ARG})\s*({_ARG}))")
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_WORD = r"(?!(?:pi|sqrt|percent|or|and|to|plus|minus|times|over|by)\b)[a-z]{2,}"
_UNIT = re.compile(rf"({_NUM})\s+({_WORD})(?:\s+{_WORD}){{0,2}}", re.IGNORECASE)
_METRIC = frozenset(("mm", "cm", "dm", "m", "km", "mg", "g", "kg", "t", "ms", "s", "min", "h", "ml", "cl", "l", "mL", "L"))
_METERED = re.compile(rf"({_NUM})\s+([a-zA-Z]{{1,3}})")
_REPEATING = re.compile(r"([+-]?)\s*([0-9]*)\.([0-9]*)\\overline\{([0-9]+)\}")
_BASED = re.compile(r"([0-9A-Za-z]+)\s*_\s*(?:\{\s*([0-9]{1,2})\s*\}|([0-9]))")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}")
_FRAC = re.compile(rf"([+-]?)\s*\\[dt]?frac\s*({_ARG})\s*({_ARG})")


def same_answer(gold: str, answer: str) -> bool | None:
    """Returns whether two cleaned answers are the same, or None when this module cannot decide.

    Equal texts are equal answers. Numbers are compared exactly: 0.333 is not 1/3, and 18% is 0.18, not 18.
    """
    if gold == answer:
        return bool(gold)
    if _differ(gold, answer):
        return False
    expected = parse_number(gold)
    if expected is None:
        return None
    given = _measured(_TEXT.sub(r" \1", answer).strip())
    return None if given is None else expected == given


def _differ(gold: str, answer: str) -> bool:
    """Returns whether the answers differ in what math-verify ignores: the base, the unit, or both sides of an equation."""
    bases = [_BASED.fullmatch(text) for text in (gold, answer)]
    if bases[0] and bases[1]:
        return (bases[0][1], bases[0][2] or bases[0][3]) != (bases[1][1], bases[1][2] or bases[1][3])
    units = [match[2] for text in (gold, answer) if (match := _METERED.fullmatch(_TEXT.sub(r" \1", text).strip()))]
    if len(units) == 2 and units[0] != units[1] and _METRIC.issuperset(units):
        return True
    sides = [parse_number(side.strip()) for side in answer.split("=", 3)] if "=" in answer else []
    return len(sides) > 1 and None not in sides and len(set(sides)) > 1


def parse_number(text: str) -> Fraction | None:
    """Returns the value of an integer, a (repeating) decimal, a simple or mixed fraction or a percentage; else None."""
    if match := _DECIMAL.fullmatch(text):
        number, exponent, percent = match.groups()
        value = _value(number)
        if value is None:
            return None
        if exponent:
            value *= Fraction(10) ** int(exponent)
        return value / 100 if percent else value
    if match := _FRAC.fullmatch(text):
        sign, above, below = match.groups()
        value = _ratio(above.strip("{}"), below.strip("{}"))
        return -value if value is not None and sign == "-" else value
    if match := _MIXED.fullmatch(text):
        sign, whole, *parts = match.groups()
        above, below = (part.strip("{}") for part in parts if part is not None)
        part = _ratio(above, below)
        if part is None or not 0 < part < 1:  # 3 4/2 may be a product
            return None
        return (-1 if sign == "-" else 1) * (int(whole) + part)
    if match := _SLASH.fullmatch(text):
        return _ratio(match.group(1), match.group(2))
    if match := _REPEATING.fullmatch(text):
        sign, whole, before, digits = match.groups()
        value = Fraction(int(f"0{whole}{before}")) + Fraction(int(digits), 10 ** len(digits) - 1)
        return value * Fraction(-1 if sign == "-" else 1, 10 ** len(before))
    return None


def _measured(text: str) -> Fraction | None:
    """Returns the value of a number that words may follow: 18 dollars is 18, 5 million is 5000000."""
    if match := _UNIT.fullmatch(text):
        value = _value(match.group(1))
        return None if value is None else value * _SCALES.get(match.group(2).lower(), 1)
    return parse_number(text)


def _ratio(above: str, below: str) -> Fraction | None:
    numerator, denominator = _value(above), _value(below)
    return numerator / denominator if numerator is not None and denominator else None


def _value(number: str) -> Fraction | None:
    digits = re.sub(r"[\s,]", "", number).rstrip(".")
    if not any(character.isdigit() for character in digits):
        return None
    sign = "-" if digits.startswith("-") else ""
    digits = digits.lstrip("+-")
    return Fraction(sign + ("0" + digits if digits.startswith(".") else digits))
