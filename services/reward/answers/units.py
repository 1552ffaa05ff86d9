"""The units that may follow a number: measures, from a closed list, and counted things, as in 18
red apples.

A thing is a plural, or any noun after 1 or "per". Words that state another number, negate or
compare are never part of it.
"""

import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from services.reward.answers.notation import DEGREE, Token, texts_of, words, written

_MEASURES = """
length 1: m meter metre 米 metro mètre метр метров; length 1/1000: mm millimeter millimetre 毫米
length 1/100: cm centimeter centimetre 厘米 zentimeter centímetro centimètre см
length 1/10: dm decimeter decimetre
length 1000: km kilometer kilometre 千米 公里 kilómetro kilomètre км
length 1/1000000: µm micrometer micrometre micron; length 1/1000000000: nm nanometer nanometre
length 127/5000: in inch inches; length 381/1250: ft foot feet; length 1143/1250: yd yard
length 201168/125: mi mile; length 1852: nmi; mass 1: g gram gramme 克; mass 1/1000: mg milligram
mass 1000: kg kilogram kilo 千克 公斤; mass 1000000: tonne 吨; mass 45359237/100000: lb lbs pound
mass 45359237/1600000: oz ounce; mass 90718474/100: ton
time 1: s sec second 秒 sekunde sekunden segundo seconde секунд; time 1/1000: ms millisecond
time 60: min mins minute 分钟 minuten minuto минут
time 3600: h hr hrs hour 小时 stunde stunden heure hora часов часа
time 86400: day 天 tag tage jour día дней
time 604800: week wk 周 woche wochen semaine semana недель; month 1: month mo 个月 monat monate mois
month 12: year yr 年 岁 jahr jahre année año лет; month 120: decade; month 1200: century centuries
volume 1: L l \\ell liter litre 升; volume 1/1000: mL ml milliliter millilitre cc 毫升
volume 1/100: cL cl centiliter centilitre; volume 1/10: dL dl
volume 473176473/125000000: gal gallon; volume 473176473/500000000: qt quart
volume 473176473/1000000000: pint; volume 473176473/2000000000: cup
volume 473176473/32000000000: tbsp tablespoon; volume 473176473/96000000000: tsp teaspoon
area 1: 平方米; area 1/10000: 平方厘米; area 40468564224/10000000: acre; area 10000: hectare ha
dollar 1: $ dollar usd cad aud nzd buck 美元 dólar доллар долларов; dollar 1/100: cent ¢ c
coin 1/100: penny pennies; coin 1/20: nickel; coin 1/10: dime; coin 1/4: quarter
euro 1: € euro eur 欧元; gbp 1: £ gbp; gbp 1/100: pence; yen 1: ¥ yen jpy 円 日元
rupee 1: ₹ rupee rs inr; peso 1: peso php; yuan 1: yuan rmb cny 元 块; won 1: ₩ krw 원
percent 1: % percent percentage pct prozent procent pourcent
degree 1: \x04 degree deg 度 grad grado degré grau градусов; charge 1: C coulomb
degree 1/60: arcminute; radian 1: rad radian; celsius 1: celsius; fahrenheit 1: fahrenheit
kelvin 1: K kelvin; newton 1: N newton; energy 1: J joule; energy 1000: kJ kilojoule
energy 4184: kcal; electron 1: eV; electron 1000: keV; electron 1000000: MeV; field 1: T tesla
capacitance 1: F farad; inductance 1: H henry; flux 1: Wb weber; parsec 1: pc parsec
parsec 1000: kpc; parsec 1000000: Mpc; length 1/10000000000: Å angstrom; force 1: dyn dyne
work 1: erg; calorie 1: calorie cal; power 1: W watt; power 1000: kW kilowatt; voltage 1: V volt
current 1: A amp ampere; resistance 1: Ω ohm; pressure 1: Pa pascal; pressure 1000: kPa kilopascal
pressure 101325: atm; frequency 1: Hz hertz; frequency 1000: kHz kilohertz; amount 1: mol mole
byte 1: byte; byte 1000: KB kilobyte; byte 1000000: MB megabyte; byte 1000000000: GB gigabyte
bit 1: bit; am 1: am a.m.; pm 1: pm p.m.; unit 1: unit; beat 1: beat; revolution 1: revolution
"""
_PLURALS = words(
    "children men women people mice geese teeth sheep fish deer dice shrimp trout cattle oxen "
    "aircraft"
)
_PLURAL = re.compile(
    r"(?=.*[aeiouy])[a-z'’-]{3,}s(?<![su]s)|(?:cd|dvd|tv|ad)s|[个個只名位件本张支条辆块颗枚次人棵页]\w{0,6}"
)
_WORD = re.compile(r"[^\W\d_]{2,}(?:[-'’][^\W\d_]+)*|[^\x00-\x7f]")
_SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
NUMBERS = {name: value for value, name in enumerate(_SMALL.split())}
for _value, _name in enumerate(_TENS.split(), 2):
    NUMBERS[_name] = 10 * _value
    for _unit in _SMALL.split()[1:10]:
        NUMBERS[f"{_name} {_unit}"] = 10 * _value + NUMBERS[_unit]
# Words that name no thing.
_GLUE = words("""
a across after afterwards again all along also always am among an any are as at be because been
behind beside besides between both by during each every for from gives had has have he her here
hers him his how i in inside into is it its just let like me mine my now of on onto our ours past
please remainder remainders shall she since so some somewhat such that the their theirs them then
there these they this those through throughout thus to together toward towards u upon upwards us
was we were what where which while who whom whose why will with within would yes you your yours
""")
# Words that hedge, deny, compare, state a verdict, another number or an operation.
DOUBTS = words("""
? \\ne \\neg \\lnot \\approx about above against almost and anything approximate approximately
around backwards base bases before below beneath but can can't cannot close correct could couldn't
couples cubed deci did didn't different divided do does doesn't doing don't double doubled doubles
down downwards dubious eighth eighths either eleventh elevenths eliminated else equals error exceeds
except excluded factor factorial factorials fails false few fewer fifth fifths fifties forties
forwards fourth fourths giga greater gross guess half halves hardly hundreds if incorrect infinity
instead invalid inverse inverses isn't kilo lacks larger least less likely logarithms logs loses
makes many max maximum may maybe means mega micro might milli min minimum minus mod mods modulo more
most multiples multiplied must nano near nearly negative negatives neither never nineties ninth
ninths no nobody none nor not nothing off once ones only opposite opposites or other others
otherwise out outside over pairs per percent perhaps plus possible possibly powers probably quarter
quarters rather reciprocal reciprocals rejected remains right root roots roughly ruled same
satisfies score scores seventh sevenths seventies several should shouldn't sixth sixths sixties
smaller sometimes squared still tens tenth tenths tera than third thirds thirties though thrice till
times too trios triple true twelfth twelfths twenties twentieth twentieths twice unclear undone
unknown unless unlike unlikely unsure until unto up versus very via vs wasn't when whether without
won't works wrong xor yet
""")
_SCALES = {
    "dozen": "12", "hundred": "100", "thousand": "1e3", "million": "1e6", "billion": "1e9",
    "trillion": "1e12", "tenth": "0.1", "hundredth": "0.01", "thousandth": "0.001",
    "millionth": "1e-6",
}  # fmt: skip
_SIZES = {*NUMBERS, *_SCALES}
_NO_THINGS = _GLUE | DOUBTS | _SIZES | {"sixes", *(f"{name}s" for name in _SIZES)}
_ADJECTIVES = words(
    "full whole total more extra additional different distinct possible real positive negative old "
    "new sq square cubic cu us u.s. american fluid"
)
_AFTER = words("old long tall wide high deep apart away")
PER = words("/ per a an each every")
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
# A dimension as a power of another one, and its unit as a share of that one's: a litre is 1/1000 of
# a cubic metre.
_DERIVED = {"volume": ("length", 3, 1000), "area": ("length", 2, 1), "coin": ("dollar", 1, 1)}
_NOTATIONS = tuple(
    (re.compile(pattern, re.IGNORECASE), text)
    for pattern, text in (
        (r"\\frac \{ ([^{}]+) \} \{ ([^{}]+) \}", r"\1 / \2"),
        (r" [{}]", ""),
        (r" \^ - ", "^-"),
        (r" \^ | (?=(?:squared|cubed)\b)", "^"),
        (r"\^squared\b", "^2"),
        (r"\^cubed\b", "^3"),
        (rf"(?:{DEGREE}|degrees?) (?:celsius|c)\b", "celsius"),
        (rf"(?:{DEGREE}|degrees?) (?:fahrenheit|f)\b", "fahrenheit"),
        (r"\b(?:kph|kmh|kmph)\b", "km / hour"),
        (r"\bmph\b", "mile / hour"),
        (r"\bmpg\b", "mile / gallon"),
        (r"\bfps\b", "ft / second"),
        (r"\bbpm\b", "beat / minute"),
        (r"\brpm\b", "revolution / minute"),
    )
)


class Unit(NamedTuple):
    """A unit: powers of its dimensions, sorted by name, and its size in their base units."""

    dimensions: tuple[tuple[str, int], ...]
    size: Fraction
    is_coin: bool = False
    """Whether its number counts coins: 5 dimes are not 5, and not $5."""


_TABLE: dict[str, Unit] = {}
for _entry in _MEASURES.strip().replace("\n", ";").split(";"):
    _head, _, _names = _entry.partition(":")
    _dimension, _size = _head.split()
    _base, _power, _parts = _DERIVED.get(_dimension, (_dimension, 1, 1))
    for _name in _names.split():
        _TABLE[_name] = Unit(((_base, _power),), Fraction(_size) / _parts, _dimension == "coin")
# Names of measures that are no other words, without coins, which are counted.
_IN_PROSE = (
    r"[mgshL]|(?!(?:in|am|pm|won|beat|mole|grad|unit|deg\w*|penn\w+|nickel|dime|quarter)$)[a-z]{2,}"
)
_measures = filter(re.compile(_IN_PROSE).fullmatch, _TABLE)
MEASURE = f"(?:{'|'.join(sorted(_measures, key=len, reverse=True))})"
CURRENCIES = words("$ € £ ¥ ₹ ₩ usd cad aud nzd eur gbp inr cny rmb jpy krw php rs")
_SIGNS = CURRENCIES | {"%", DEGREE}
# Letters that are units after a space or a decimal; outside \\text, other letters are variables.
_BARE = words("m g s h L")


def _named(text: str) -> Unit | None:
    """Returns the unit with a name, or None."""
    if len(text) == 1:
        return _TABLE.get(text)
    lowered = text.lower()
    return _TABLE.get(text) or _TABLE.get(lowered) or _TABLE.get(lowered.removesuffix("s"))


def scale(token: Token) -> Fraction | None:
    """Returns the factor that a word such as million stands for, or None."""
    word = token.text.lower()
    found = _SCALES.get(word) or _SCALES.get(word.removesuffix("s"))
    return Fraction(found) if found and token.kind == "word" else None


def is_plain(text: str) -> bool:
    """Returns whether a word may be part of a thing's name."""
    return bool(_WORD.fullmatch(text)) and text.lower() not in _NO_THINGS


def is_remark(part: Sequence[Token]) -> bool:
    """Returns whether tokens are words that neither change a number nor doubt it."""
    texts = texts_of(part)
    return bool(part) and all(is_plain(t) or t.lower() in _GLUE or t in "-'," for t in texts)


def has_doubts(part: Sequence[Token]) -> bool:
    """Returns whether words hedge, deny or state something else."""
    return any(token.text.lower() in DOUBTS for token in part)


def _thing(text: str, single: bool) -> Unit | None:
    """Returns the unit that counts what a noun denotes; None for any other word. `single`: it may
    be singular.
    """
    word = text.lower()
    is_plural = word in _PLURALS or _PLURAL.fullmatch(word)
    is_thing = is_plain(word) and (is_plural or (single and len(word) > 2))
    return Unit(((re.sub("(?:e?s|e)$", "", word), 1),), Fraction(1)) if is_thing else None


def starts_unit(token: Token, before: Token) -> bool:
    """Returns whether a unit may begin with this token, after `before`."""
    text = token.text
    if token.kind == "word":
        return text in ("per", *_ADJECTIVES) or is_plain(text) or _named(text) is not None
    if token.kind == "name":
        return text in _BARE and (token.spaced or "." in before.text)
    return text in _SIGNS or text == "\\frac"


def read_unit(part: Sequence[Token], single: bool = False) -> Unit | None:
    """Returns the unit that all of these tokens form, or None. `single`: they follow the number 1,
    so that a thing may be singular.
    """
    text = written(part)
    for pattern, replacement in _NOTATIONS:
        text = pattern.sub(replacement, text)
    of = text.find(" of ")
    if of > 0 and is_remark(part[-len(text[of + 4 :].split()) :]):
        text = text[:of]  # 5 cups of brown sugar
    pieces = text.split()
    powers: Counter[str] = Counter()
    size = Fraction(1)
    sign = 1
    power = 1
    is_complete = False
    is_described = False
    is_coin = False
    for i, piece in enumerate(pieces):
        factor = re.fullmatch(r"(?P<name>[^^]+)(?:\^(?P<exponent>-?[1-4]))?", piece)
        if factor is None:
            return None
        name = factor["name"]
        is_last = i + 1 == len(pieces)
        word = name.lower()
        if word == "per" or (word in PER and is_complete):
            sign = -1
            is_complete = False
            continue
        is_dot = word in ("\\times", ".") and (is_complete or power > 1)
        if is_dot or (is_complete and is_last and word in _AFTER):
            continue
        if word in _POWERS and not is_last:
            power = _POWERS[word]
            continue

        unit = _named(name)
        if unit is None:
            unit = _thing(name, single or sign < 0)
            is_described = is_described and unit is None  # things may be: red apples
        if unit is None and not is_last and (is_plain(word) or word in _ADJECTIVES):
            is_described = is_described or word not in _ADJECTIVES
            continue
        if unit is None or is_described:  # light years are not years
            return None

        raised = int(factor["exponent"] or 1) * sign * power
        size *= unit.size**raised
        is_coin = is_coin or unit.is_coin
        for dimension, exponent in unit.dimensions:
            powers[dimension] += exponent * raised
        power = 1
        is_complete = True
    dimensions = sorted((name, value) for name, value in powers.items() if value)
    return Unit(tuple(dimensions), size, is_coin) if is_complete else None


def ratio(expected: Unit | None, given: Unit | None) -> Fraction | None:
    """Returns the factor that converts `given` to `expected`: 100 from m to cm, 1 if a side has no
    unit. Returns None if they measure different things.
    """
    if expected is None and given is not None and given.is_coin:
        return None
    if expected is None or given is None:
        return Fraction(1)
    if expected.dimensions == given.dimensions:
        return given.size / expected.size
    # units of length, area or volume that are not named
    names, powers = map(set, zip(*expected.dimensions, *given.dimensions, strict=True))
    return Fraction(1) if names == {"unit", "length"} and len(powers) == 1 else None
