"""The units that may follow a number: a closed list. A word that is not in it is no unit."""

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
am 1: am a.m.; pm 1: pm p.m.; unit 1: unit
"""
_THINGS = """
adult animal answer apple appointment apricot arrangement avocado babies baby bag bagel ball balloon banana bar
barrel basket bat bean bear beat bed bee bicycle bike bill bird biscuit blanket block boat book bookmark bottle
bouquet bowl box boxes boy bracelet branch branches brick brother brownie brush brushes bucket bug building bulb bun
bus buses bush bushes butterflies butterfly button cabinet cake call camel can candies candle candy car card carrot
cartoon case cat chair chapter cherries cherry chicken child children chip chocolate choice circle clam class
classes clock clown coat coconut coin color colour combination computer container cookie corner couple cow crab
cracker crate crayon cube cupcake customer dancer deer desk diamond dice digit dinosaur dish dishes dog doll dolphin
donkey donut door doughnut draw drawing dress dresses drink duck edge egg element elephant employee envelope episode
eraser event face factor families family fan farmer feather fence fish fishes flag flavor flight flower folder fork
frog fruit function game girl glass glasses glove goal goat goldfish grade graduate grape group guest guitar hat
hedgehog hen hole home homework horse hotdog house integer invitation item jacket jar jellybean job juice key kid
kite kitten ladder lamp lap lawn leaf leaves lemon lesson letter light lilies lily line lion liter locker log
lollipop lunch machine magazine man mango map marble marker match matches meal medal member men message mice mile
milkshake minute monkey mouse movie muffin mug multiple mushroom nail name necklace neighbor note notebook number
nut onion option orange order outcome outfit package packet page painting pair pancake paper parent participant
passenger path pattern peach peaches pear pebble peg pen pencil people permutation person pet phone photo photograph
picture pie piece pig pigeon pill pillow pineapple pizza place plane planet plant plate player plum point polygon
portion possibilities possibility post postcard pot potato potatoes present problem program project puppies puppy
purse puzzle question rabbit raffle rectangle response revolution ribbon ring river road rock roll room root rope
rose round row ruler sale sandwich sandwiches seashell seat section seed serving set sheep sheet shelf shell shelves
ship shirt shoe shop sibling side sister skirt slice snack snowball sock soldier solution song spider spoon square
stamp star step stick sticker stone store stories story straw strawberries strawberry student subset sweater table
tablet target task taxi teacher team term test text ticket tile time tire toe tomato tomatoes tool toothpick topping
tourist towel toy trail train tray tree triangle trip truck turtle vacation value van vase vegetable vehicle vertex
vertices video visitor vote wall watermelon way wheel window woman women word worker yogurt zebra
"""
_ADJECTIVES = words(
    "large small big whole full different distinct possible total more extra additional real positive negative red "
    "blue green white black yellow old new female male sq square cubic cu us u.s. american fluid ordered"
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
_POWERS = {"squared": 2, "cubed": 3}


class Unit(NamedTuple):
    """A unit: powers of its dimensions, sorted by name, and its size in their base units."""

    dimensions: tuple[tuple[str, int], ...]
    size: Fraction


def _table() -> dict[str, tuple[str, Fraction]]:
    table = {word: (_singular(word), Fraction(1)) for word in words(_THINGS)}
    for entry in _MEASURES.replace("\n", ";").split(";"):
        head, _, names = entry.partition(":")
        if names:
            dimension, size = head.split()
            table |= {name: (dimension, Fraction(size)) for name in names.split()}
    return table


def _singular(word: str) -> str:
    return {"children": "child", "men": "man", "women": "woman", "people": "person", "mice": "mouse"}.get(word, word)


_TABLE = _table()
_CASED = words("m g s h l L K N J W V A c C F t")
CURRENCIES = frozenset("$€£¥₹")
_SIGNS = CURRENCIES | {"%", "\x04"}
_BARE = frozenset(["m", "g", "s", "h", "L"])
"""Letters that are a unit after a number and a space; other letters are variables outside \\text."""


def _named(token: Token) -> tuple[str, Fraction] | None:
    """Returns the dimension and the size that a token names."""
    text = token.text
    if len(text) == 1:
        return _TABLE.get(text)
    found = _TABLE.get(text) or _TABLE.get(text.lower())
    if found is None and len(text) > 3 and text.lower().endswith("s"):
        found = _TABLE.get(text[:-1].lower())
    return found


def scale(token: Token) -> Fraction | None:
    """Returns the number that a word such as million multiplies by."""
    word = token.text.lower()
    found = _SCALES.get(word) or (_SCALES.get(word[:-1]) if word.endswith("s") else None)
    return found if token.kind == "word" else None


def starts_unit(token: Token, first: bool = True) -> bool:
    """Returns whether a unit may begin with this token."""
    if token.kind == "word":
        return (
            _named(token) is not None
            or token.text.lower() in _ADJECTIVES
            or token.text.lower() in _SPEEDS
            or token.text == "per"
        )
    if token.kind == "name":
        return token.text in _CASED and (not first or (token.spaced and token.text in _BARE))
    return token.text in _SIGNS


def read_unit(part: Sequence[Token]) -> Unit | None:
    """Returns the unit that all of these tokens state, or None."""
    powers: dict[str, int] = {}
    size = Fraction(1)
    sign, power, pending, i = 1, 1, 0, 0
    texts = [token.text for token in part]
    if texts[:2] == ["\\frac", "{"]:
        middle = next((k for k in range(2, len(part) - 1) if texts[k] == "}" and texts[k + 1] == "{"), 0)
        if not middle or texts[-1] != "}":
            return None
        part = (*part[2:middle], Token("op", "/"), *part[middle + 2 : -1])
    while i < len(part):
        token, word = part[i], part[i].text.lower()
        i += 1
        if word in ("/", "per", "a", "an") and token.kind != "cmd" and pending:
            sign, pending = -1, 0
            continue
        if word == "\\times" and pending:
            continue
        if word in ("square", "sq") and i < len(part):
            power = 2
            i += part[i].text == "."
            continue
        if word in ("cubic", "cu") and i < len(part):
            power = 3
            continue
        if word in _ADJECTIVES | _AFTER:
            if word in _AFTER and i == len(part) and pending:
                continue
            if i == len(part):
                return None
            continue
        if word == "." and pending:
            continue
        if word in _SPEEDS and not powers:
            for name, exponent in zip(_SPEEDS[word], (1, -1), strict=True):
                dimension, each = _TABLE[name]
                powers[dimension] = exponent
                size *= each**exponent
            pending = 1
            continue
        named = _named(token) if token.kind in ("word", "name") or token.text in _SIGNS else None
        if named is None:
            return None
        dimension, each = named
        if dimension == "degree" and i < len(part) and part[i].text.lower() in ("c", "f", "celsius", "fahrenheit"):
            dimension, each = ("celsius" if part[i].text.lower()[0] == "c" else "fahrenheit"), Fraction(1)
            i += 1
        exponent, i = _power(part, i)
        if exponent == 0 or (pending and _is_thing(named[0]) and sign > 0 and not _is_thing(dimension)):
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


def _is_thing(dimension: str) -> bool:
    return _TABLE.get(dimension, ("",))[0] == dimension and dimension not in ("unit",)


def _power(part: Sequence[Token], i: int) -> tuple[int, int]:
    """Returns the exponent written at `i`, 0 for one that is no unit's, and where it ends."""
    if i < len(part) and part[i].text.lower() in _POWERS:
        return _POWERS[part[i].text.lower()], i + 1
    if i >= len(part) or part[i].text != "^":
        return 1, i
    digits = [token.text for token in part[i + 1 : i + 5]]
    for pattern, value in ((["{", "-", None, "}"], -1), (["{", None, "}"], 1), (["-", None], -1), ([None], 1)):
        if len(digits) >= len(pattern) and all(a is None or a == b for a, b in zip(pattern, digits, strict=False)):
            number = digits[pattern.index(None)]
            if number in ("1", "2", "3", "4"):
                return value * int(number), i + 1 + len(pattern)
    return 0, i


def ratio(expected: Unit | None, given: Unit | None) -> Fraction | None:
    """Returns the factor from `given` to `expected`: 1 where one side has no unit, None between different kinds."""
    if expected is None or given is None:
        return Fraction(1)
    if expected.dimensions == given.dimensions:
        return given.size / expected.size
    for one, other in ((expected, given), (given, expected)):
        if [name for name, _ in one.dimensions] == ["unit"] and [name for name, _ in other.dimensions] in (
            ["length"],
            ["unit"],
        ):
            return Fraction(1) if one.dimensions[0][1] == other.dimensions[0][1] else None
    return None
