"""The units that may follow a number: measures, from a closed list, and counted things, as in 18
red apples.

A thing is a plural, or any noun after 1 or "per". Words that state another number, negate or
compare are never part of it.
"""

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from services.reward.answers.notation import Token, words

_MEASURES = """
length 1: m meter metre; length 1/1000: mm millimeter millimetre; length 1/100: cm centimeter centimetre
length 1/10: dm decimeter decimetre; length 1000: km kilometer kilometre; length 1/1000000: µm micrometer micrometre micron
length 1/1000000000: nm nanometer nanometre; length 127/5000: in inch inches; length 381/1250: ft foot feet
length 1143/1250: yd yard; length 201168/125: mi mile; length 1852: nmi
mass 1: g gram gramme; mass 1/1000: mg milligram; mass 1000: kg kilogram kilo; mass 1000000: tonne
mass 45359237/100000: lb lbs pound; mass 45359237/1600000: oz ounce; mass 90718474/100: ton
time 1: s sec second; time 1/1000: ms millisecond; time 60: min mins minute; time 3600: h hr hrs hour; time 86400: day
time 604800: week wk; month 1: month mo; month 12: year yr; month 120: decade; month 1200: century centuries
volume 1: L l liter litre; volume 1/1000: mL ml milliliter millilitre cc; volume 1/100: cL cl centiliter centilitre
volume 1/10: dL dl; volume 473176473/125000000: gal gallon; volume 473176473/500000000: qt quart
volume 473176473/1000000000: pint; volume 473176473/2000000000: cup; volume 473176473/32000000000: tbsp tablespoon
volume 473176473/96000000000: tsp teaspoon
area 1: acre; area 10000: hectare ha
dollar 1: $ dollar usd buck; dollar 1/100: cent penny pennies ¢ c; dollar 1/20: nickel; dollar 1/10: dime; dollar 1/4: quarter
euro 1: € euro eur; gbp 1: £ gbp; gbp 1/100: pence; yen 1: ¥ yen; rupee 1: ₹ rupee rs; peso 1: peso; yuan 1: yuan rmb
percent 1: % percent percentage pct; degree 1: \x04 degree deg; degree 1/60: arcminute
radian 1: rad radian; celsius 1: celsius; fahrenheit 1: fahrenheit; kelvin 1: K kelvin
newton 1: N newton; energy 1: J joule; energy 1000: kJ kilojoule; energy 4184: kcal; calorie 1: calorie cal
power 1: W watt; power 1000: kW kilowatt; voltage 1: V volt; current 1: A amp ampere; resistance 1: Ω ohm
pressure 1: Pa pascal; pressure 1000: kPa kilopascal; pressure 101325: atm; frequency 1: Hz hertz; frequency 1000: kHz kilohertz
amount 1: mol mole; byte 1: byte; byte 1000: KB kilobyte; byte 1000000: MB megabyte; byte 1000000000: GB gigabyte; bit 1: bit
am 1: am a.m.; pm 1: pm p.m.; unit 1: unit; beat 1: beat; revolution 1: revolution
"""
_PLURALS = words(
    "children men women people mice geese teeth sheep fish deer dice shrimp trout cattle oxen aircraft"
)
_PLURAL = re.compile(r"(?=.*[aeiouy])[a-z'’-]{3,}s(?<![su]s)|(?:cd|dvd|tv|ad)s")
_NO_THINGS = words("""
a about above across after afterwards again against all almost along also always am among an and any are around as at
backwards be because becomes been before behind below beneath beside besides between beyond both but by can cannot could did
do does doing down downwards during either else equals every exceeds except fails few for forwards from gives had has have he
her here hers him his holds how i if in inside into is it its just lacks like loses makes many may maybe me means might
mine must my near nearly neither never no nobody none nor not nothing of off on once only onto or other others our ours out
outside over past per perhaps please plus possibly probably rather remains same satisfies several shall she should since so
some sometimes somewhat still such than that the their theirs them then there these they this those though through throughout
thus till to too toward towards under unless unlike until unto up upon upwards us versus very via vs was we were what when
where whether which while who whom whose why will with within without works would yes yet you your yours
correct false incorrect invalid right true unknown wrong zero one two three four five six seven eight nine ten eleven twelve
ones tens twenty thirty forty fifty sixty seventy eighty ninety half halves third thirds quarter quarters fourth fourths fifth
fifths sixth sixths seventh sevenths eighth eighths ninth ninths eleventh elevenths twelfth twelfths twentieth twentieths
score scores gross double triple twice thrice factor factorial factorials mod mods modulo minus negative times divided
multiplied squared cubed root less least most max maximum min minimum approximately roughly nano micro milli centi deci kilo
mega giga tera
""")
"""Words that are not nouns, and words that state a verdict, a number or an operation."""
_ADJECTIVES = words(
    "full whole total more extra additional different distinct possible real positive negative old new sq square cubic cu us "
    "u.s. american fluid"
)
_SCALES = {
    name: Fraction(size)
    for name, size in (entry.split() for entry in (
        "dozen 12", "hundred 100", "thousand 1e3", "million 1e6", "billion 1e9", "trillion 1e12",
        "tenth 0.1", "hundredth 0.01", "thousandth 0.001", "millionth 1e-6",
    ))
}  # fmt: skip
_SPEEDS = {
    "mph": ("mile", "hour"), "kph": ("km", "hour"), "kmh": ("km", "hour"), "kmph": ("km", "hour"), "mpg": ("mile", "gallon"),
    "fps": ("ft", "second"), "bpm": ("beat", "minute"), "rpm": ("revolution", "minute"),
}  # fmt: skip
_AFTER = words("old long tall wide high deep apart away")
PER = words("/ per a an each every")
_POWERS = {"squared": 2, "cubed": 3}


class Unit(NamedTuple):
    """A unit: powers of its dimensions, sorted by name, and its size in their base units."""

    dimensions: tuple[tuple[str, int], ...]
    size: Fraction


def _table() -> dict[str, tuple[str, Fraction]]:
    table: dict[str, tuple[str, Fraction]] = {}
    for entry in _MEASURES.replace("\n", ";").split(";"):
        head, _, names = entry.partition(":")
        if names:
            dimension, size = head.split()
            table |= {name: (dimension, Fraction(size)) for name in names.split()}
    return table


_TABLE = _table()
CURRENCIES = frozenset("$€£¥₹")
_SIGNS = CURRENCIES | {"%", "\x04"}
_BARE = frozenset(["m", "g", "s", "h", "L"])
"""Letters that are units after a space or a decimal; outside \\text, other letters are
variables."""


def _named(token: Token) -> tuple[str, Fraction] | None:
    """Returns the dimension and the size of the unit named by a token, or None."""
    text = token.text
    if len(text) == 1:
        return _TABLE.get(text)
    found = _TABLE.get(text) or _TABLE.get(text.lower())
    if found is None and len(text) > 2 and text.lower().endswith("s"):
        found = _TABLE.get(text[:-1].lower())
    return found


def scale(token: Token) -> Fraction | None:
    """Returns the factor that a word such as million stands for, or None."""
    word = token.text.lower()
    found = _SCALES.get(word) or (_SCALES.get(word[:-1]) if word.endswith("s") else None)
    return found if token.kind == "word" else None


def _is_plain(token: Token) -> bool:
    """Returns whether a word may be part of a thing's name."""
    return token.kind == "word" and token.text.lower() not in _NO_THINGS and scale(token) is None


def _thing(token: Token, single: bool) -> str:
    """Returns the name of the thing that a noun denotes; "" for any other word. `single`: it may be
    singular.
    """
    word = token.text.lower()
    plural = word in _PLURALS or _PLURAL.fullmatch(word)
    return (
        re.sub("(?:e?s|e)$", "", word)
        if _is_plain(token) and (plural or (single and len(word) > 2))
        else ""
    )


def starts_unit(token: Token, before: Token) -> bool:
    """Returns whether a unit may begin with this token, after `before`."""
    if token.kind == "word":
        return token.text == "per" or _named(token) is not None or _is_plain(token)
    if token.kind == "name":
        return token.text in _BARE and (token.spaced or "." in before.text)
    return token.text in _SIGNS


def read_unit(part: Sequence[Token], single: bool = False) -> Unit | None:
    """Returns the unit formed by all of these tokens, or None. `single`: they follow a 1, as in 1
    apple.
    """
    powers: dict[str, int] = {}
    size = Fraction(1)
    sign, power, pending, i = 1, 1, 0, 0
    described = False
    texts = [token.text for token in part]
    if texts[:2] == ["\\frac", "{"]:
        middle = next(
            (k for k in range(2, len(part) - 1) if texts[k] == "}" and texts[k + 1] == "{"), 0
        )
        if not middle or texts[-1] != "}":
            return None
        part = (*part[2:middle], Token("op", "/"), *part[middle + 2 : -1])
    while i < len(part):
        token, word = part[i], part[i].text.lower()
        i += 1
        if word == "per" or (word in PER and token.kind != "cmd" and pending):
            sign, pending = -1, 0
            continue
        if pending and (word in ("\\times", ".") or (word in _AFTER and i == len(part))):
            continue
        if (
            word == "of"
            and pending
            and i < len(part)
            and all(_is_plain(each) or each.text == "the" for each in part[i:])
        ):
            break  # 5 cups of brown sugar
        if word in ("square", "sq", "cubic", "cu") and i < len(part):
            power = 2 if word.startswith("s") else 3
            i += part[i].text == "."
            continue
        if word in _SPEEDS and not powers:
            for name, exponent in zip(_SPEEDS[word], (1, -1), strict=True):
                dimension, each = _TABLE[name]
                powers[dimension] = exponent
                size *= each**exponent
            pending = 1
            continue
        named = _named(token) if token.kind in ("word", "name") or token.text in _SIGNS else None
        if named is None and (thing := _thing(token, single or sign < 0)):
            named, described = (thing, Fraction(1)), False
        if named is None and i < len(part) and (_is_plain(token) or word in _ADJECTIVES):
            described = described or word not in _ADJECTIVES
            continue
        if named is None or described:  # light years are not years
            return None
        dimension, each = named
        if (
            dimension == "degree"
            and i < len(part)
            and part[i].text.lower() in ("c", "f", "celsius", "fahrenheit")
        ):
            dimension, each = (
                ("celsius" if part[i].text.lower()[0] == "c" else "fahrenheit"),
                Fraction(1),
            )
            i += 1
        exponent, i = _power(part, i)
        if exponent == 0:
            return None
        exponent *= sign * power
        if dimension in ("volume", "area"):  # in metres
            size *= (each / (1000 if dimension == "volume" else 1)) ** exponent
            dimension, exponent = "length", exponent * (3 if dimension == "volume" else 2)
        else:
            size *= each**exponent
        powers[dimension] = powers.get(dimension, 0) + exponent
        power, pending = 1, 1
    if not pending:
        return None
    return Unit(tuple(sorted((name, value) for name, value in powers.items() if value)), size)


def _power(part: Sequence[Token], i: int) -> tuple[int, int]:
    """Returns the exponent at `i` (0 if a unit cannot have it) and where it ends."""
    if i < len(part) and part[i].text.lower() in _POWERS:
        return _POWERS[part[i].text.lower()], i + 1
    if i >= len(part) or part[i].text != "^":
        return 1, i
    digits = [token.text for token in part[i + 1 : i + 5]]
    for pattern, value in (
        (["{", "-", None, "}"], -1),
        (["{", None, "}"], 1),
        (["-", None], -1),
        ([None], 1),
    ):
        if len(digits) >= len(pattern) and all(
            a is None or a == b for a, b in zip(pattern, digits, strict=False)
        ):
            number = digits[pattern.index(None)]
            if number in ("1", "2", "3", "4"):
                return value * int(number), i + 1 + len(pattern)
    return 0, i


def ratio(expected: Unit | None, given: Unit | None) -> Fraction | None:
    """Returns the factor from `given` to `expected`: 1 if one side has no unit, None for different
    kinds.
    """
    if expected is None or given is None:
        return Fraction(1)
    if expected.dimensions == given.dimensions:
        return given.size / expected.size
    for one, other in ((expected, given), (given, expected)):
        if [name for name, _ in one.dimensions] == ["unit"] and [
            name for name, _ in other.dimensions
        ] in (
            ["length"],
            ["unit"],
        ):
            return Fraction(1) if one.dimensions[0][1] == other.dimensions[0][1] else None
    return None
