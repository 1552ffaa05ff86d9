"""Tokenises an answer: LaTeX, ASCII, HTML and Unicode notations of the same thing become the same
tokens.

Only typesetting is dropped. A character without a meaning here becomes a token of kind `other`,
which no reader accepts. Every step takes time linear in the length of the text.
"""

import html
import re
import unicodedata
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from html.entities import name2codepoint
from typing import NamedTuple


class NotUnderstood(ValueError):
    """Part of an answer is not understood."""


class Token(NamedTuple):
    """One token. `kind` is num, name (one letter or a Greek one), word, cmd, op or other."""

    kind: str
    text: str
    spaced: bool = False
    """Whether white space precedes it."""


Tokens = tuple[Token, ...]
Replacement = str | Callable[[re.Match[str]], str]
OPEN = frozenset(("(", "[", "{", "\\{", "\\langle", "\\begin"))
CLOSE = frozenset((")", "]", "}", "\\}", "\\rangle", "\\end"))
DEGREE = "\x04"


def words(text: str) -> frozenset[str]:
    """Returns the words of a text."""
    return frozenset(text.split())


FUNCTIONS = words(
    "cis sin cos tan cot sec csc sinh cosh tanh coth arcsin arccos arctan ln log lg exp sqrt cbrt "
    "abs gcd lcm max min"
)
_ALIASES = """
arcsin asin; arccos acos; arctan atan; infty inf infinity oo; log log10; csc cosec; floor floor
ceil ceil ceiling; pi pi; union cup bigcup union; cap bigcap;
binom dbinom tbinom; le leq leqslant leqq; ge geq geqslant geqq; ne neq; lt lt; gt gt
approx approx simeq thickapprox; times cdot ast cdotp bullet; emptyset varnothing
setminus smallsetminus backslash; epsilon varepsilon; phi varphi; theta vartheta; { lbrace
} rbrace; | vert lvert rvert mid; ( lparen; ) rparen; [ lbrack; ] rbrack; land wedge; lor vee
bar overline; i imath; j jmath; dots ldots cdots dotsc; setR R reals Reals; setZ Z
$ textdollar; £ pounds; € euro; ¥ yen; / div; : colon
setN N; mod pmod bmod
"""
_SAME = {
    alias: entry.split()[0]
    for entry in _ALIASES.replace("\n", ";").split(";")
    for alias in entry.split()[1:]
}
GREEK = words(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau "
    "upsilon phi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega ell hbar"
)
# Commands that only affect typesetting; what their braces hold stays.
_TYPESETTING = (
    "quad|qquad|(?:display|text|script|scriptscript)style|(?:no)?limits|left|right|middle"
    "|[bB]ig+[lr]?|rm|bf|it|sf|tt|cal|boxed|fbox|framebox|underline"
    "|(?:en|thin|med|thick|negthin|nobreak)space|hfill?|boldmath|ensuremath"
    "|[lL]arge|LARGE|[hH]uge|small|footnotesize|normalsize|tiny|mathstrut"
    "|strut|smash|null|relax|bold|pmb|math(?:op|ord|rel|bin|open|close|inner)|bfseries|centering"
    "|newline|nonumber|notag|mathbf|boldsymbol|bm|mathit"
)
# A notation, then the characters that stand for it.
_UNICODE = r"""
- − ‐ ‑ ﹣; / ⁄ ∕ ÷; * × ⋅ · ∙ • ∗ ✕; \pi π 𝜋; \infty ∞; \le ≤ ≦ ⩽; \ge ≥ ≧ ⩾; \ne ≠; \approx ≈
\pm ±; \mp ∓; \cup ∪; \cap ∩; \emptyset ∅ ⌀; \in ∈; \setR ℝ; \setZ ℤ; \setN ℕ; \setQ ℚ
\setminus ∖; ^\circ ° º ˚; ' ′ ’ ‘ ‚ ‹ ›; " “ ” „ « » 「 」 『 』; _+ ₊; _- ₋
\root √; \cuberoot ∛; \fourthroot ∜
\lfloor ⌊; \rfloor ⌋; \lceil ⌈; \rceil ⌉; | ∣; \ell ℓ; \text{~cents} ¢; % ٪; '' ″; \land ∧; \lor ∨
\sum ∑; \prod ∏; \int ∫; \equiv ≡; \dots …; \langle ⟨; \rangle ⟩; . 。
"""
_INVISIBLE = (*range(10), *range(11, 32), 127, 0xAD, *range(0x200B, 0x200E), 0x2060, 0xFEFF)
_SPACES = (9, *range(11, 14), 160, 5760, *range(8192, 8203), 8239, 8287, 12288)
_TABLE = {
    **{code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)},
    **dict.fromkeys(_INVISIBLE, ""),
    **dict.fromkeys(_SPACES, " "),
    **{name2codepoint[name]: f"\\{name} " for name in GREEK if name in name2codepoint},
}
for _entry in _UNICODE.strip().replace("\n", ";").split(";"):
    _notation, *_characters = _entry.split()
    for _character in _characters:
        _TABLE[ord(_character)] = _notation + " " * _notation[-1].isalpha()
_RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱˣ"
_LOWERED = "₀₁₂₃₄₅₆₇₈₉₍₎ₐₙₓ"
_DOWN = str.maketrans(_RAISED + _LOWERED, "0123456789+-()nix" + "0123456789()anx")


def _on_the_line(match: re.Match[str]) -> str:
    mark = "^" if match.group()[0] in _RAISED else "_"
    return f"{mark}{{{match.group().translate(_DOWN)}}}"


def _vulgar(match: re.Match[str]) -> str:
    above, _, below = unicodedata.normalize("NFKD", match.group()).partition("⁄")
    return f"\\frac{{{above}}}{{{below}}}"


def _repeating(match: re.Match[str]) -> str:
    """Returns the exact value of a decimal with repeating digits, between two control characters.

    0.1 with 6 repeating is (16 - 1) / 90: the digits with one period, minus those before it, over a
    nine for each repeating digit and a zero for each fixed one.
    """
    before = match["whole"] + match["fixed"]
    period = match["period"] or match["bracketed"] or match["again"]
    nines = (10 ** len(period) - 1) * 10 ** len(match["fixed"])
    value = Fraction(int(before + period) - int(before or 0), nines)
    return f"\x05{value.numerator}/{value.denominator}\x05"


def _mixed(match: re.Match[str]) -> str:
    """Returns the exact value of 2 1/2, 5/2, between two control characters."""
    whole, *parts = (int(part.replace(",", "")) for part in match.groups() if part)
    if not 0 < parts[0] < parts[1]:
        return match.group()
    return f"\x05{whole * parts[1] + parts[0]}/{parts[1]}\x05"


def _marked_text(match: re.Match[str]) -> str:
    command, content = match.groups()
    inner = content.strip()
    is_upright = command in ("mathrm", "operatorname", "operatorname*")
    if inner in FUNCTIONS and (is_upright or inner not in ("min", "max", "sec")):
        return f"\\{inner} "
    if command == "mathrm" and inner in ("e", "i", "T"):
        return f" {content} "
    return f"\x02{content}\x03"


# The whole number of a mixed one: 4 of (1,4 1/2), and 1,400 of 1,400 1/2.
_WHOLE = r"(?<![0-9.^])(?<![0-9],(?=[0-9]{3}))([0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,30})"
_GAP = r"(?: |~|\\[,;:! ]|\\q?quad(?![A-Za-z])|\\text *\{ *\}){0,9}"
_DOTS = r"(?:\\[lc]?dots[cb]?(?![A-Za-z])|\.{2,})"
_TEXTS = (
    "text(?:bf|it|rm|sf|tt|sc|normal|up)?|math(?:rm|sf|tt|normal)|[mh]box|operatorname\\*?|emph"
)
_UNICODE_STEPS: tuple[tuple[str, Replacement], ...] = (
    (r"(?:^|(?<=[\s(,=\[{$]))[–—](?=\s|[0-9.\\a-z√π∞])", "-"),
    (f"[{_RAISED}]+|[{_LOWERED}]+", _on_the_line),
    ("[¼-¾⅐-⅞↉]", _vulgar),
)
_STEPS: tuple[tuple[str, str, Replacement], ...] = (
    # What a text must contain for the step to be tried, a pattern, and what replaces it. The steps
    # are applied in this order: some rely on what earlier ones have written.
    # HTML
    ("&", r"&#?\w{1,8};", lambda match: html.unescape(match.group()).translate(_TABLE)),
    ("<su", r"<(?P<how>su[pb])>([^<>]*)</(?P=how)>", r"<\1 \2>"),
    ("<sup ", r"<sup ([^<>]*)>", r"^{\1}"),
    ("<sub ", r"<sub ([^<>]*)>", r"_{\1}"),
    ("</", r"</?(?:b|strong|i|em|u|span|p|div|font|mark|code|center|h[1-6])(?:\s[^<>]*)?>", ""),
    # Signs and words with several spellings
    ("$", r"(?:US|\b(?:A|AU|C|CA|NZ|HK|S))\\?\$(?=[\s}]*[0-9])", "$"),
    ("Rs", r"\bRs\.?(?=[\s}]*[0-9])", "₹"),
    ('\\"', r'\\"', '"'),
    ("``", r"``([^`']*)''", r'"\1"'),
    (".", r"\\(?:left|right)\.", ""),
    (".", r"(?<=[0-9 {])([AaPp])\.\s?[Mm]\b\.?", r"\1m"),
    (
        "\\",
        r"\\(?:(?:text)?color|[hv]?phantom|[hv]space\*?|tag\*?|label|mspace|rule\{[^{}]*\}"
        r"|colorbox|fcolorbox\{[^{}]*\})\s*\{[^{}]*\}|\\[hk](?:skip|ern)\s*[0-9.]+\s*[a-z]{2}",
        " ",
    ),
    # Other commands for fractions, quantities (siunitx) and letters
    ("\\", r"\\(?:[dtc]frac|nicefrac|sfrac)(?![A-Za-z])", r"\\frac"),
    ("\\", r"\\(?:SI|qty|si|unit|num)\s*\{([^{}]*)\}(?:\s*\{([^{}]*)\})?", r" \1 \2"),
    ("\\ang", r"\\ang\s*\{([^{}]*)\}", r"{\1}^\\circ"),
    ("\\", r"\\(?:mathbb|Bbb|mathds)\s*(?:\{\s*([A-Z])\s*\}|([A-Z])(?![A-Za-z]))", r"\\set\1\2 "),
    (
        "\\",
        r"\\(?:hat|vec|mathbf|boldsymbol|bm)\s*(?:\{\s*)?(?:\\hat\s*\{?)?"
        r"(?:(?<=\{)\s*([ijk])|\\([ij])math)\s*\}{0,2}",
        r"\\hat{\1\2}",
    ),
    ("\\mathbf", r"\\mathbf\s*\{\s*R\s*\}", r"\\setR "),
    # Separators of thousands
    (
        "",
        r"(?<=[0-9])(?:\s?(?:\\text)?\{\s*(?:,|\\[,;:! ]|~)?\s*\}|,\s?\\!|\\!,|\\[,!;: ]|[~'])\s*"
        r"(?=[0-9]{3}(?![0-9]))",
        "",
    ),
    # A decimal comma, unless several numbers are joined by it
    ("{", r"(?<![0-9.}])([0-9]+)\{\s*,\s*\}([0-9]{1,2}|[0-9]{4,})(?![0-9{])", r"\1.\2"),
    ("{", r"(?:\\text\s*)?\{\s*([:,;])\s*\}", r"\1"),
    (
        "\\dot",
        r"\\dot\s*\{?([0-9])\}?([0-9]{0,50})\\dot\s*\{?([0-9])\}?",
        r"\\overline{\1\2\3}",
    ),
    (
        ".",
        r"(?<![0-9.,])(?P<whole>[0-9]{0,30})\.(?:(?P<fixed>[0-9]{0,30}?)(?:"
        r"\\(?:overline|bar|dot)\s*(?:\{\s*)?(?P<period>[0-9]{1,50})(?:\s*\})?"
        r"|\((?P<bracketed>[0-9]{1,50})\)"
        rf"|(?P<again>[0-9]{{1,12}}?)(?P=again)+(?=\s*{_DOTS}))(?:\s*{_DOTS})?)",
        _repeating,
    ),
    ("{\\frac", r"(?<=[0-9])\s*\{\s*(\\frac\s*\{[0-9]+\}\s*\{[0-9]+\})\s*\}", r"\1"),
    # $12k, and a 1 in 4 chance
    ("$", r"(?<=\$)(\s?[0-9][0-9.,]*)\s?[kK]\b(?![^$]*\$)", r"\1 thousand"),
    (
        "",
        r"([0-9])\s*(?:\\text\s*\{)?\s*(?:in|out of)\s*\}?\s*([0-9]+)\s*(?:chance)?\s*$",
        r"\1/\2",
    ),
    # Mixed numbers, also "2 and 3/4 cups". Not over a line break: that joins two numbers
    (
        "/",
        rf"{_WHOLE}(?:(?: |~|\\[,;: ])+| and (?=[0-9]+/[0-9]+ [a-z]{{2}}))"
        r"([0-9]{1,30})/([0-9]{1,30})(?![0-9.])",
        _mixed,
    ),
    (
        "\\frac",
        rf"{_WHOLE}{_GAP}\\frac *(?:\{{ *([0-9]{{1,30}}) *\}}|([0-9]))"
        r" *(?:\{ *([0-9]{1,30}) *\}|([0-9]))",
        _mixed,
    ),
    # Degrees
    ("\\", r"\^\s*(?:\\(?:circ|degree)(?![A-Za-z])|\{\s*\\(?:circ|degree)\s*\})", DEGREE),
    ("\\", r"\\(?:text)?degree(?![A-Za-z])", DEGREE),
    # Typesetting goes, and upright text is marked
    ("\\", rf"\\(?:{_TYPESETTING})(?![A-Za-z])", " "),
    ("(", r"^\s*\{\s*(\([A-H]\))(?:[\s~]|\\ )*\}", r" \1 "),
    ("\\", rf"\\({_TEXTS})\s*\{{((?:[^{{}}]|\{{[^{{}}]*\}})*)\}}", _marked_text),
    (
        "'",
        r"(?<=[0-9])\s*'\s*([0-9.]+)\s*(?:\"|'')",
        "\x02 feet \x03\\1\x02 inches\x03",
    ),
    (DEGREE, rf"({DEGREE}\s*[0-9.]+)\s*'", "\\1\x02 arcminute\x03"),
    # Sets; ]2, 5[ is the interval (2, 5)
    (" U", r"(?<=[)\]}]) U (?=[(\[\\])", r"\\cup "),
    ("-", r"(\\setR\s*)-", r"\1\\setminus "),
    ("]", r"((?:^|\\(?:big)?c[ua]p|\\setminus|\\in|[=,;\x03])\s*)\]", r"\1("),
    ("[", r"\[(?=\s*(?:$|\\(?:big)?c[ua]p|\\setminus|[.,;\x02]))", ")"),
    (
        "{",  # braces around a whole side, which colours leave
        r"(?:^|(?<=[=,;(\[]))\s*\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}\s*(?=$|[=,;)\].])",
        r" \1 ",
    ),
    ("", r"(?<=[0-9/])\s?(min|sec)s?(?![A-Za-z_])(?!\s*[(\\A-Za-z])", "\x02 \\1\x03"),
    ("", r"[,;](?=\s*(?:\x02\s*)?(?:and|or)\b)", " "),  # 1, 2, and 3
    # before a set, "in" does not mean inch
    ("in", r"(?:\x02\s*)?(?<!\\)\bin\b(?:\s*\x03)?(?=\s*(?:[(\[]|\\\{|\\set))", r"\\in "),
    ("x", r"(?<=[0-9]) ?x ?(?=10\s*\^)", "*"),
    ("noon", r"\b(?:12 )?noon\b", "12 pm"),
    ("midnight", r"\b(?:12 )?midnight\b", "12 am"),
    ("cent", r"\bper\s?cent\b", "percent"),
    ("to", r"(?<=[0-9])[\s\x02]{0,9}\bto\b[\s\x03]{0,9}(?=[0-9])", ":"),
)
_UNICODE_NOTATIONS = [(re.compile(pattern), to) for pattern, to in _UNICODE_STEPS]
_NOTATIONS = [(needle, re.compile(pattern), to) for needle, pattern, to in _STEPS]
_SCAN = re.compile(
    r"(?P<space>[\s~]+|\\[,;:!>\s])"
    r"|\x05(?P<exact>[0-9]+/[0-9]+)\x05"
    r"|(?P<num>(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:[eE][+-]?[0-9]{1,3}(?![0-9A-Za-z.])|\.(?![0-9.]))?)"
    r"|(?P<letters>[^\W\d_]+)"
    r"|\\(?P<cmd>[A-Za-z]+|\\)"
    r"|(?P<op><=|>=|=>|!=|==|\*\*|!!|\\[{}|$%]"
    r"|[-+*/^_=<>(){}\[\]|,;:!%&$'.\x02\x03\x04€£¥₹₩#?@\"`])"
    r"|(?P<other>\\?.)",
    re.DOTALL,
)
# 58,500, 58 500, and 1,50,000, which is a lakh and a half
_GROUPED = re.compile(
    r"(?:[0-9]{1,3}(?:(?:,[0-9]{3})+|(?: [0-9]{3})+)|[0-9]{1,2}(?:,[0-9]{2})+,[0-9]{3})"
    r"(?![0-9])(?:\.[0-9]+)?"
)
# sinx, xpi
_GLUED = re.compile(
    r"((?:sin|cos|tan|cot|sec|csc|log|exp|abs|gcd|lcm|max|min)(?=[a-z]$)|[A-Za-z](?=pi$))([a-z]+)"
)
_TEXT_WORD = re.compile(r"[^\W\d_]+(?:[-'’][^\W\d_]+)*")
_OPERATORS = {
    "<=": "\\le", ">=": "\\ge", "!=": "\\ne", "==": "=", "**": "^", "<": "\\lt", ">": "\\gt",
    "*": "\\times", "\\|": "|", "\\$": "$", "\\%": "%",
}  # fmt: skip
_QUOTES = words("\" ' `")
_RELATED = words("\\le \\ge \\ne \\lt \\gt \\times")
# Commands that may lack their backslash.
_SPELLED = FUNCTIONS | GREEK | {"pi", "infty", "floor", "ceil", "union"}


def canonical(text: str) -> str:
    r"""Rewrites all notations of a thing as one, mostly LaTeX. Upright text such as \text{apples}
    stands between two control characters.
    """
    if not text.isascii():
        for pattern, to in _UNICODE_NOTATIONS:
            text = pattern.sub(to, text)
    if not (text.isascii() and text.isprintable()):
        text = text.translate(_TABLE)
    for needle, compiled, replacement in _NOTATIONS:
        if needle in text:
            text = compiled.sub(replacement, text)
    return text


@lru_cache(maxsize=1024)
def tokens(text: str) -> Tokens:
    """Returns the tokens of an answer."""
    found = _scan(canonical(text))
    while found and found[-1].kind == "op" and found[-1].text == ".":
        found.pop()
    if found and found[0].text in _QUOTES:
        inside = [i for i, token in enumerate(found) if token.text not in _QUOTES]
        found = found[inside[0] : inside[-1] + 1] if inside else []
    return tuple(found)


def _scan(text: str) -> list[Token]:
    """Returns the tokens of a canonical text."""
    found: list[Token] = []
    spaced = False
    in_text = False
    depth = 0
    position = 0
    is_loose = re.search(r"(?<!\\), ", text) is not None
    while position < len(text):
        if in_text and (match := _TEXT_WORD.match(text, position)):
            word = match.group()
            is_command = word in ("pi", "infinity")
            found.append(_command(word, spaced) if is_command else Token("word", word, spaced))
            position = match.end()
            spaced = False
            continue

        match = _SCAN.match(text, position)
        assert match is not None
        kind = str(match.lastgroup)
        piece = match[kind]
        position = match.end()
        if kind == "space":
            spaced = True
            continue
        if kind in ("num", "exact"):
            grouped = _GROUPED.match(text, match.start()) if depth == 0 or is_loose else None
            if grouped:
                piece = re.sub("[, ]", "", grouped.group())
                position = grouped.end()
            found.append(Token("num", piece.rstrip("."), spaced))
            if piece.endswith(".") and text[position:].strip("\x03 $"):
                found.append(Token("op", "."))
        elif kind == "letters":
            found += _letters(piece, spaced)
        elif kind == "cmd":
            found.append(_command(piece, spaced))
        elif piece in ("\x02", "\x03"):
            in_text = piece == "\x02"
            spaced = True
            continue
        else:
            depth = max(0, depth + (piece in ("(", "[", "\\{")) - (piece in (")", "]", "\\}")))
            found.append(Token(kind, _OPERATORS.get(piece, piece), spaced))
        spaced = False
    return found


def _command(name: str, spaced: bool) -> Token:
    name = _SAME.get(name, name)
    if name in GREEK:
        return Token("name", "\\" + name, spaced)
    if name in ("i", "j"):
        return Token("name", name, spaced)
    if name in "|()[]/:$£€¥":
        return Token("op", name, spaced)
    is_operator = "\\" + name in _RELATED or name in "{}"
    return Token("op" if is_operator else "cmd", "\\" + name, spaced)


def _letters(run: str, spaced: bool) -> list[Token]:
    """Returns the tokens of letters in math mode: a variable, a function, or a word."""
    if _SAME.get(run, run) in _SPELLED and len(run) > 1:
        return [_command(run, spaced)]
    if match := _GLUED.fullmatch(run):
        return _letters(match[1], spaced) + _letters(match[2], spaced=False)
    is_name = len(run) == 1 and run.isascii()
    return [Token("name" if is_name else "word", run, spaced)]


def texts_of(part: Sequence[Token]) -> list[str]:
    """Returns the texts of tokens."""
    return [token.text for token in part]


def written(part: Sequence[Token]) -> str:
    """Returns the texts of tokens, with spaces between them."""
    return " ".join(token.text for token in part)


def matched(pattern: str, part: Tokens) -> dict[str, Tokens] | None:
    """Returns the tokens of each named group of a pattern that matches what is `written`; None if
    it does not match all of it.
    """
    text = written(part)
    match = re.fullmatch(pattern, text)
    if match is None:
        return None
    found: dict[str, Tokens] = {}
    for name, group in match.groupdict().items():
        start = text.count(" ", 0, max(match.start(name), 0))
        found[name] = part[start : start + group.count(" ") + 1] if group else ()
    return found


def trimmed(pattern: str, part: Tokens) -> Tokens:
    """Returns the group `value` of a pattern, or all tokens where the pattern does not match."""
    found = matched(pattern, part)
    return found["value"] if found else part


def bracket_step(token: Token) -> int:
    """Returns 1 for an opening bracket, -1 for a closing one, else 0."""
    if token.kind not in ("op", "cmd"):
        return 0
    return (token.text in OPEN) - (token.text in CLOSE)


def split(part: Tokens, separators: str) -> tuple[list[Tokens], list[str]]:
    """Splits at separators outside all brackets; `separators` is a text with spaces between them.
    Raises NotUnderstood for brackets that do not match.
    """
    marks = separators.split()
    pieces: list[Tokens] = []
    found: list[str] = []
    depth = 0
    start = 0
    for i, token in enumerate(part):
        depth += bracket_step(token)
        if depth < 0:
            raise NotUnderstood
        text = token.text.lower() if token.kind == "word" else token.text
        if depth == 0 and text in marks:
            pieces.append(part[start:i])
            found.append(text)
            start = i + 1
    if depth:
        raise NotUnderstood
    return [*pieces, part[start:]], found


def in_brackets(part: Tokens) -> Tokens | None:
    """Returns the tokens between an opening bracket at the start and its closing bracket at the
    very end, or None.
    """
    if not part or part[0].text not in OPEN or part[0].text == "\\begin":
        return None
    depth = 0
    for i, token in enumerate(part):
        depth += bracket_step(token)
        if depth == 0:
            return part[1:-1] if i == len(part) - 1 and i > 0 else None
    return None
