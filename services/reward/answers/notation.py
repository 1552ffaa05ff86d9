"""Tokenises an answer: LaTeX, ASCII and Unicode notations of the same thing become the same tokens.

Nothing is dropped silently. A character without a meaning here becomes a token of kind `other`,
which no reader accepts. Every step takes time linear in the length of the text.
"""

import re
import unicodedata
from collections.abc import Sequence
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
OPEN = frozenset(("(", "[", "{", "\\{", "\\langle", "\\begin"))
CLOSE = frozenset((")", "]", "}", "\\}", "\\rangle", "\\end"))


def words(text: str) -> frozenset[str]:
    """Returns the words of a text."""
    return frozenset(text.split())


FUNCTIONS = words(
    "sin cos tan cot sec csc sinh cosh tanh coth arcsin arccos arctan ln log lg exp sqrt cbrt abs gcd lcm max min"
)
_ALIASES = {
    "arcsin": ("asin",), "arccos": ("acos",), "arctan": ("atan",), "infty": ("inf", "infinity", "oo"), "log": ("log10",),
    "csc": ("cosec",), "floor": ("floor",), "ceil": ("ceil", "ceiling"), "pi": ("pi",),
    "union": ("cup", "bigcup"), "cap": ("bigcap",), "frac": ("dfrac", "tfrac", "cfrac"), "binom": ("dbinom", "tbinom", "C"),
    "le": ("leq", "leqslant", "leqq"), "ge": ("geq", "geqslant", "geqq"), "ne": ("neq",), "lt": ("lt",), "gt": ("gt",),
    "approx": ("approx", "simeq", "thickapprox"), "times": ("cdot", "ast", "cdotp", "bullet"), "emptyset": ("varnothing",),
    "setminus": ("smallsetminus", "backslash"), "epsilon": ("varepsilon",), "phi": ("varphi",), "theta": ("vartheta",),
    "{": ("lbrace",), "}": ("rbrace",), "|": ("vert", "lvert", "rvert", "mid"), "(": ("lparen",), ")": ("rparen",),
    "[": ("lbrack",), "]": ("rbrack",), "land": ("wedge",), "lor": ("vee",), "bar": ("overline",),
}  # fmt: skip
_SAME = {alias: name for name, aliases in _ALIASES.items() for alias in aliases if alias != "C"}
_GREEK = words(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega "
    "Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega ell hbar"
)
_LETTERS = {unicodedata.lookup(f"GREEK {'CAPITAL' if name[0].isupper() else 'SMALL'} LETTER {name.upper()}"): name
            for name in _GREEK - {"ell", "hbar", "lambda", "Lambda"}} | {"λ": "lambda", "Λ": "Lambda"}  # fmt: skip
_SPACING = words(
    "quad qquad displaystyle textstyle limits left right big Big bigl bigr Bigl Bigr bigg Bigg biggl biggr middle rm "
    "bf it boxed fbox underline enspace thinspace medspace thickspace negthinspace nobreakspace hfill boldmath scriptstyle"
)
_UNICODE = {
    "−": "-", "‐": "-", "‑": "-", "﹣": "-", "⁄": "/", "∕": "/", "÷": "/", "×": "*", "⋅": "*", "·": "*", "∙": "*",
    "•": "*", "∗": "*", "✕": "*", "π": r"\pi ", "𝜋": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≦": r"\le ", "⩽": r"\le ",
    "≥": r"\ge ", "≧": r"\ge ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "±": r"\pm ", "∓": r"\mp ", "∪": r"\cup ",
    "∩": r"\cap ", "∅": r"\emptyset ", "⌀": r"\emptyset ", "∈": r"\in ", "ℝ": r"\mathbb{R} ", "∖": r"\setminus ",
    "°": r"^\circ ", "º": r"^\circ ", "˚": r"^\circ ", "′": "'", "’": "'", "√": r"\root ", "∛": r"\cuberoot ",
    "∜": r"\fourthroot ",
    "₊": "_+", "₋": "_-", "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "∣": "|", "ℓ": r"\ell ",
    "¢": r"\text{ cents}", "٪": "%", "″": "''", "∧": r"\land ", "∨": r"\lor ", "∑": r"\sum ", "∏": r"\prod ", "∫": r"\int ",
}  # fmt: skip
_ZERO_WIDTH = dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff\u00ad"))
_TABLE = (
    {ord(char): text for char, text in _UNICODE.items()}
    | {ord(char): f"\\{name} " for char, name in _LETTERS.items() if name not in ("Pi", "Sigma")}
    | dict.fromkeys((160, 5760, *range(8192, 8203), 8239, 8287, 12288), " ")
    | {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}
    | {ord("。"): ".", ord("、"): ", "}
    | _ZERO_WIDTH
)
_RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱˣ"
_LOWERED = "₀₁₂₃₄₅₆₇₈₉₍₎ₐₙₓ"
_DOWN = str.maketrans(_RAISED + _LOWERED, "0123456789+-()nix" + "0123456789()anx")
_UP_RUN, _LOW_RUN = re.compile(f"[{_RAISED}]+"), re.compile(f"[{_LOWERED}]+")
_DASH = re.compile(r"(?:^|(?<=[\s(,=\[{$]))[–—](?=\s|[0-9.\\a-z√π∞])")
_CLOCK = re.compile(r"(?<=[0-9 ])([AaPp])\.\s?[Mm]\b\.?")
_VULGAR = re.compile("[¼-¾⅐-⅞↉]")
_TEXT = re.compile(
    r"\\(text(?:bf|it|rm|sf|tt|normal|up)?|math(?:rm|bf|it|sf|tt|normal)|mbox|hbox|operatorname\*?|boldsymbol|bm|emph|textsc)"
    r"\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
)
_JOINED = re.compile(r"(?<=[0-9])(?:\s?\{,\s?\}|,\s?\\!|\\!,|\\[,!;: ]|~)\s*(?=[0-9]{3}(?![0-9]))")
_SCAN = re.compile(
    r"(?P<space>[\s~]+|\\[,;:!>\s]|\\hspace\*?\{[^{}]*\})"
    r"|(?P<num>[0-9]+(?:\.[0-9]+)?(?:\.(?![0-9.]))?|\.[0-9]+)"
    r"|(?P<letters>[A-Za-z]+)"
    r"|\\(?P<cmd>[A-Za-z]+|\\)"
    r"|(?P<op><=|>=|=>|!=|==|\*\*|!!|\\[{}|$%]|[-+*/^_=<>(){}\[\]|,;:!%&$'.\x02\x03\x04€£¥₹#?@\"`])"
    r"|(?P<other>\\?.)",
    re.DOTALL,
)
_GROUPED = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]{1,3}(?: [0-9]{3})+(?![0-9])")
_AFTER_POINT = re.compile(r"[\x03\s$]*(?:$|\\(?:overline|bar|dot)(?![A-Za-z]))")
_EXPONENT = re.compile(r"[eE]([+-]?[0-9]{1,6})(?![0-9A-Za-z.])")
_OPERATORS = {
    "<=": "\\le", ">=": "\\ge", "!=": "\\ne", "==": "=", "**": "^", "<": "\\lt", ">": "\\gt", "*": "\\times", "\\|": "|",
    "\\$": "$", "\\%": "%",
}  # fmt: skip
_TEXT_WORD = re.compile(r"[^\W\d_]+(?:[-'’][^\W\d_]+)*")
_DEGREE = re.compile(
    r"\^\s*(?:\\(?:circ|degree)(?![A-Za-z])|\{\s*\\(?:circ|degree)\s*\})|\\(?:degree|textdegree)(?![A-Za-z])"
)


def canonical(text: str) -> str:
    """Returns the text with Unicode notations written as LaTeX."""
    if not text.isascii():
        text = _DASH.sub("-", text)
        text = _UP_RUN.sub(lambda run: f"^{{{run.group().translate(_DOWN)}}}", text)
        text = _LOW_RUN.sub(lambda run: f"_{{{run.group().translate(_DOWN)}}}", text)
        text = _VULGAR.sub(_vulgar, text)
        text = text.translate(_TABLE)
    text = _CLOCK.sub(r"\1m", text)
    return _JOINED.sub("", text).replace("US\\$", "$").replace("US$", "$")


def _vulgar(match: re.Match[str]) -> str:
    above, _, below = unicodedata.normalize("NFKD", match.group()).partition("⁄")
    return f"\\frac{{{above}}}{{{below}}}"


def tokens(text: str) -> Tokens:
    """Returns the tokens of an answer."""
    text = _DEGREE.sub("\x04", canonical(text))
    text = _TEXT.sub(_marked_text, text)
    return tuple(_merged(_scan(text)))


def _marked_text(match: re.Match[str]) -> str:
    command, content = match.groups()
    inner = content.strip()
    if inner in FUNCTIONS:
        return f"\\{inner} "
    if command in ("mathbf", "boldsymbol", "bm", "mathit") or (
        command == "mathrm" and inner in ("e", "i")
    ):
        return f" {content} "
    return f"\x02{content}\x03"


def _scan(text: str) -> list[Token]:
    found: list[Token] = []
    spaced = in_text = False
    depth = position = 0
    loose = ", " in text
    while position < len(text):
        if in_text and (word := _TEXT_WORD.match(text, position)):
            found.append(_text_word(word.group(), spaced))
            position, spaced = word.end(), False
            continue
        match = _SCAN.match(text, position)
        assert match is not None
        kind, piece = str(match.lastgroup), match.group()
        position = match.end()
        if kind == "space":
            spaced = True
            continue
        if kind == "num":
            if (depth == 0 or loose) and (grouped := _GROUPED.match(text, match.start())):
                piece = re.sub("[, ]", "", grouped.group())
                position = grouped.end()
                if tail := re.compile(r"\.[0-9]+").match(text, position):
                    piece, position = piece + tail.group(), tail.end()
            found.append(Token("num", piece.rstrip(".") if piece != "." else piece, spaced))
            if piece.endswith(".") and not _AFTER_POINT.match(text, position):
                found.append(Token("op", "."))
            if exponent := _EXPONENT.match(text, position):
                found += [
                    Token("op", "\\times"),
                    Token("num", "10"),
                    Token("op", "^"),
                    Token("op", "{"),
                ]
                found += [Token("op", "-")] * exponent[1].startswith("-") + [
                    Token("num", exponent[1].lstrip("+-"))
                ]
                found.append(Token("op", "}"))
                position = exponent.end()
        elif kind == "letters":
            found += _letters(piece, spaced)
        elif kind == "cmd":
            token = _command(match["cmd"], spaced)
            if token is None:
                spaced = True
                continue
            found.append(token)
        elif kind == "op":
            if piece in "\x02\x03":
                in_text, spaced = piece == "\x02", True
                continue
            depth += (piece in ("(", "[", "\\{")) - (piece in (")", "]", "\\}") and depth > 0)
            found.append(Token("op", _OPERATORS.get(piece, piece), spaced))
        else:
            found.append(Token("other", piece, spaced))
        spaced = False
    return found


def _text_word(word: str, spaced: bool) -> Token:
    if word in ("pi", "infinity"):
        return Token("cmd", "\\" + _SAME.get(word, word), spaced)
    return Token("word", word, spaced)


def _command(name: str, spaced: bool) -> Token | None:
    """Returns the token of a command; None for a command that only affects typesetting."""
    name = _SAME.get(name, name)
    if name in _SPACING:
        return None
    if name in _GREEK:
        return Token("name", "\\" + name, spaced)
    if name in ("le", "ge", "ne", "lt", "gt", "times"):
        return Token("op", "\\" + name, spaced)
    if name in ("div", "colon"):
        return Token("op", "/" if name == "div" else ":", spaced)
    if name in "{}":
        return Token("op", "\\" + name, spaced)
    if name in "|()[]":
        return Token("op", name, spaced)
    return Token("cmd", "\\" + name, spaced)


def _letters(run: str, spaced: bool) -> list[Token]:
    """Returns the tokens of letters in math mode: a variable, a function, or a word."""
    if len(run) == 1:
        return [Token("name", run, spaced)]
    known = _SAME.get(run, run)
    if known in FUNCTIONS or known in ("pi", "infty", "floor", "ceil") or known in _GREEK:
        return [Token("name" if known in _GREEK else "cmd", "\\" + known, spaced)]
    if run in ("cup", "union"):
        return [Token("cmd", "\\union", spaced)]
    if run[:3] in FUNCTIONS and len(run) == 4:  # sinx
        return [Token("cmd", "\\" + run[:3], spaced), Token("name", run[3])]
    if len(run) == 3 and run.endswith("pi"):  # xpi
        return [Token("name", run[0], spaced), Token("cmd", "\\pi")]
    return [Token("word", run, spaced)]


def _merged(found: list[Token]) -> list[Token]:
    """Joins ordinals, repeating decimals and the x of `4.5 x 10^3` with their numbers, and drops a
    final full stop.
    """
    merged: list[Token] = []
    for i, token in enumerate(found):
        after = found[i + 1] if i + 1 < len(found) else None
        if (
            token == ("name", "x", token.spaced)
            and merged
            and merged[-1].kind == "num"
            and after is not None
            and after.kind == "num"
            and after.text == "10"
            and found[i + 2 : i + 3]
            and found[i + 2].text == "^"
        ):
            token = Token("op", "\\times", token.spaced)
        if token.text == "cent" and merged and merged[-1].text == "per":
            token = Token("word", "percent", merged.pop().spaced)
        if (
            token.text == "to"
            and merged
            and merged[-1].kind == "num"
            and after is not None
            and after.kind == "num"
        ):
            token = Token("op", ":", token.spaced)
        merged.append(token)
    while merged and merged[-1].text == "." and merged[-1].kind == "op":
        merged.pop()
    return merged


def texts_of(part: Sequence[Token]) -> list[str]:
    """Returns the texts of tokens."""
    return [token.text for token in part]


def split(part: Tokens, separators: frozenset[str]) -> tuple[list[Tokens], list[str]]:
    """Splits at separators outside all brackets. Raises NotUnderstood for brackets that do not
    match.
    """
    pieces: list[Tokens] = []
    found: list[str] = []
    depth = start = 0
    for i, token in enumerate(part):
        if token.kind in ("op", "cmd") and token.text in OPEN:
            depth += 1
        elif token.kind in ("op", "cmd") and token.text in CLOSE:
            depth -= 1
            if depth < 0:
                raise NotUnderstood
        elif (
            depth == 0
            and (token.text.lower() if token.kind == "word" else token.text) in separators
        ):
            pieces.append(part[start:i])
            found.append(token.text.lower() if token.kind == "word" else token.text)
            start = i + 1
    if depth:
        raise NotUnderstood
    return [*pieces, part[start:]], found


def inner(part: Tokens) -> Tokens | None:
    """Returns the tokens between an opening bracket at the start and its closing bracket at the
    very end, or None.
    """
    if (
        len(part) < 2
        or part[0].text not in OPEN
        or part[-1].text not in CLOSE
        or part[0].text == "\\begin"
    ):
        return None
    depth = 0
    for i, token in enumerate(part):
        depth += (token.text in OPEN) - (token.text in CLOSE) if token.kind in ("op", "cmd") else 0
        if depth == 0 and i < len(part) - 1:
            return None
    return part[1:-1]
