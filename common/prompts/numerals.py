"""Converts numbers in other scripts to the digits 0 to 9.

Every step takes time linear in the length of any text: responses are untrusted.
"""

import re
from fractions import Fraction

# Each takes all digits on its left: 3 ten-thousands and 6000.
_SIZES = {"亿": 10**8, "億": 10**8, "万": 10**4, "萬": 10**4, "千": 1000, "百": 100, "十": 10}
_DIGITS = {digit: value for value, digit in enumerate("零一二三四五六七八九")} | {"〇": 0, "两": 2}
_SEPARATORS = str.maketrans("٫٬．，－", ".,.,-")
_SPACE = re.compile("[\u00a0\u2007\u2009\u202f]")  # those that do not break a line
_GROUPED = re.compile(rf"(?<![0-9.,])[0-9]{{1,3}}(?:{_SPACE.pattern}[0-9]{{3}})+(?![0-9])")
_ONES = "零〇一二两三四五六七八九"
_TENS = "十百千万萬亿億"
_NUMERAL = rf"(?:[0-9]{{1,15}}(?:\.[0-9]{{1,15}})?\ ?(?=[{_TENS}]))?[0-9{_ONES}{_TENS}]{{1,20}}"
_CHINESE = re.compile(
    rf"""(?<![0-9.{_ONES}{_TENS}])(?P<sign>负)?
    (?!(?<=[一-鿿])(?<![是为负])[{_ONES}](?![{_TENS}点分]))  # 星期二
    (?!一[一-鿿](?<![{_TENS}点分]))  # 一个整数 is an integer
    (?:百分之(?P<percent>{_NUMERAL}) | (?P<below>{_NUMERAL})分之(?P<above>{_NUMERAL})
    | (?P<whole>{_NUMERAL})(?:点(?P<decimals>[{_ONES}]+))?)
    (?!(?<=千)[克米瓦])(?=[^一-鿿]|\Z|千[克米瓦]|[个個只名位件本张支条辆块颗枚人棵页元美米克厘毫公天岁年分小度吨升平])""",
    re.VERBOSE,
)


def in_digits(text: str) -> str:
    """Converts foreign digits (٣٧), Chinese numerals (二十四, 3万6000), and digits that no-break
    spaces group (1 250).
    """
    if text.isascii():
        return text
    text = re.sub(r"\d(?<![0-9])", lambda digit: str(int(digit.group())), text)
    text = text.translate(_SEPARATORS)
    if _SPACE.search(text):
        text = _GROUPED.sub(lambda number: re.sub(r"\D", "", number.group()), text)
    return _CHINESE.sub(_converted, text) if re.search(f"[{_ONES}{_TENS}]", text) else text


def _converted(match: re.Match[str]) -> str:
    numerals = filter(None, match.group("whole", "above", "below", "percent"))
    try:
        values = [_value(numeral.replace(" ", "")) for numeral in numerals]
    except ValueError:
        return match.group()
    if match.group().isascii():
        return match.group()
    found = "/".join(map(_decimal, values))
    if match["decimals"]:
        found += "." + "".join(str(_DIGITS[digit]) for digit in match["decimals"])
    return ("-" if match["sign"] else "") + found + ("%" if match["percent"] else "")


def _value(numeral: str) -> Fraction:
    """Returns the value of a Chinese numeral. Raises ValueError for one that leaves out its last
    unit: 三百五 (three hundred five) means 350.
    """
    if re.fullmatch(r"[0-9]+(?:\.[0-9]+)?", numeral):
        return Fraction(numeral)
    if numeral in _DIGITS:
        return Fraction(_DIGITS[numeral])
    for name, size in _SIZES.items():
        left, found, right = numeral.rpartition(name)
        if found:
            rest = _value(right.lstrip("零〇") or "0")
            is_short = len(right) == 1 and right not in "零〇十" and size > 10
            if is_short or rest >= size:
                break
            return _value(left or "1") * size + rest
    raise ValueError(numeral)


def _decimal(value: Fraction) -> str:
    return str(value if value.denominator == 1 else float(value))
