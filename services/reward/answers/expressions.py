"""Parses the tokens of one mathematical expression: all of them, or none."""

from fractions import Fraction
from typing import Any

from services.reward.answers.notation import FUNCTIONS, NotUnderstood, Token, Tokens

Node = tuple[Any, ...]
"""(operator, operand, …): operands are nodes, the value of "num", or the name of "sym"."""
_MAX_DEPTH, _MAX_TOKENS = 60, 300  # expression trees are walked recursively
_PRODUCTS = tuple(map(frozenset, ("abcd", "ijklmn", "pqrs", "uvwxyz")))
_ENDS = frozenset(
    (
        "+",
        "-",
        ")",
        "]",
        "}",
        "\\}",
        "|",
        ",",
        ";",
        "/",
        "\\times",
        ":",
        "!",
        "!!",
        "^",
        "%",
        "&",
        "\\\\",
        "\x04",
    )
)
_WRAPPERS = {
    "\\lfloor": ("\\rfloor", "floor"),
    "\\lceil": ("\\rceil", "ceil"),
    "\\lVert": ("\\rVert", "norm"),
}
_DEGREES = {"\\root": 2, "\\cuberoot": 3, "\\cbrt": 3, "\\fourthroot": 4}
_ACCENTS = frozenset(("\\vec", "\\bar", "\\hat", "\\tilde", "\\mathcal", "\\mathbb"))


class Parser:
    """Recursive descent over the tokens of one expression."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = [single for token in tokens for single in _singles(token)]
        self._i = self._depth = self._bars = 0
        if (
            len(tokens) > _MAX_TOKENS or sum(token.text == ":" for token in tokens) > 1
        ):  # 1:2:3 is not a quotient
            raise NotUnderstood

    def whole(self) -> Node:
        """Parses all tokens as one expression. Raises NotUnderstood."""
        node = self._sum()
        if self._i != len(self._tokens):
            raise NotUnderstood
        return node

    def _text(self, ahead: int = 0) -> str:
        i = self._i + ahead
        return (
            self._tokens[i].text
            if i < len(self._tokens) and self._tokens[i].kind in ("op", "cmd")
            else ""
        )

    def _kind(self, ahead: int = 0) -> str:
        i = self._i + ahead
        return self._tokens[i].kind if i < len(self._tokens) else ""

    def _take(self, text: str) -> bool:
        found = self._text() == text
        self._i += found
        return found

    def _need(self, text: str) -> None:
        if not self._take(text):
            raise NotUnderstood

    def _sum(self) -> Node:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise NotUnderstood
        node = self._term()
        while self._text() in ("+", "-"):
            sign = self._text()
            self._i += 1
            node = (sign, node, self._term())
        self._depth -= 1
        return node

    def _term(self) -> Node:
        node = self._signed()
        while True:
            if self._text() in ("\\times", "/", ":"):
                sign = "*" if self._text() == "\\times" else "/"
                self._i += 1
                node = (sign, node, self._signed())
            elif self._text() in ("\\bmod", "\\mod"):
                self._i += 1
                node = ("mod", node, self._signed())
            elif self._starts_factor():
                node = ("*", node, self._powered())
            else:
                return node

    def _signed(self) -> Node:
        signs = 0
        while self._text() in ("+", "-"):
            signs += self._text() == "-"
            self._i += 1
        node = self._powered()
        return ("neg", node) if signs % 2 else node

    def _starts_factor(self, plain: bool = False) -> bool:
        """Returns whether a factor without a preceding operator may begin here; numbers never
        do.
        """
        kind, text = self._kind(), self._text()
        if kind in ("name", "word"):
            return True
        if kind in ("num", "other", ""):
            return False
        if plain and (text[1:] in FUNCTIONS or text == "("):
            return text == "\\sqrt"
        if text == "|":
            return self._bars == 0
        return (
            text not in _ENDS
            and (kind == "cmd" or text in ("(", "[", "{"))
            and text not in ("\\rfloor", "\\rceil")
        )

    def _powered(self) -> Node:
        node = self._postfix(self._primary())
        if self._take("^"):
            node = self._postfix(("^", node, self._exponent()))
        return node

    def _exponent(self) -> Node:
        if self._text() in ("-", "+"):
            sign = self._text()
            self._i += 1
            return ("neg", self._exponent()) if sign == "-" else self._exponent()
        node = self._primary()
        return ("^", node, self._exponent()) if self._take("^") else node

    def _postfix(self, node: Node) -> Node:
        while True:
            if self._take("!!"):
                node = ("double factorial", node)
            elif self._take("!"):
                node = ("factorial", node)
            elif self._take("\x04"):
                node = ("*", node, ("/", ("pi",), ("num", Fraction(180))))
            elif self._take("%"):
                node = ("/", node, ("num", Fraction(100)))
            else:
                return node

    def _primary(self) -> Node:
        kind, text = self._kind(), self._text()
        if kind == "num":
            return self._number()
        if kind in ("name", "word"):
            return self._letters()
        for opening, closing in (("(", ")"), ("[", "]"), ("{", "}")):
            if self._take(opening):
                bars, self._bars = self._bars, 0
                node = self._sum()
                self._bars = bars
                self._need(closing)
                return node
        if self._take("|"):
            self._bars += 1
            node = ("abs", self._sum())
            self._bars -= 1
            self._need("|")
            return node
        if kind != "cmd":
            raise NotUnderstood
        self._i += 1
        return self._command(text)

    def _number(self) -> Node:
        token = self._tokens[self._i]
        self._i += 1
        value = Fraction(token.text)
        if (
            self._text() in ("\\bar", "\\dot")
            and self._text(1) == "{"
            and self._text(3) == "}"
            and self._kind(2) == "num"
        ):
            digits = self._tokens[self._i + 2].text
            self._i += 4
            return ("num", repeating(token.text, digits))
        whole = token.text.isdigit()
        ahead = [t.text for t in self._tokens[self._i : self._i + 7]]
        if (
            whole
            and ahead[:2] == ["\\frac", "{"]
            and ahead[3:5] == ["}", "{"]
            and ahead[6:] == ["}"]
        ):
            if ahead[2].isdigit() and ahead[5].isdigit() and 0 < int(ahead[2]) < int(ahead[5]):
                self._i += 7
                value += Fraction(int(ahead[2]), int(ahead[5]))
        elif (
            whole
            and len(ahead) > 2
            and ahead[1] == "/"
            and ahead[0].isdigit()
            and ahead[2].isdigit()
        ):
            if not 0 < int(ahead[0]) < int(ahead[2]):
                raise NotUnderstood
            self._i += 3
            value += Fraction(int(ahead[0]), int(ahead[2]))
        elif whole and ahead[:1] == ["\\frac"] and len(ahead) > 1 and ahead[1][:1].isdigit():
            self._i += 1
            above, below = self._argument(), self._argument()
            if above[0] == below[0] == "num" and 0 < above[1] < below[1]:
                value += above[1] / below[1]
            else:
                return ("*", ("num", value), ("/", above, below))
        return ("num", value)

    def _letters(self) -> Node:
        token = self._tokens[self._i]
        self._i += 1
        if token.kind == "word":
            raise NotUnderstood
        name = token.text
        if (
            name == "C" and self._text() == "(" and self._text(2) == "," and self._text(4) == ")"
        ):  # C(5,2)
            self._i += 5
            inside = (
                Parser(tuple(self._tokens[self._i - 4 : self._i - 3])),
                Parser(tuple(self._tokens[self._i - 2 : self._i - 1])),
            )
            return ("binomial", inside[0].whole(), inside[1].whole())
        if self._text() == "_":
            name += self._subscript()
        while self._take("'"):
            name += "'"
        return {"e": ("e",), "i": ("i",)}.get(name, ("sym", name))

    def _subscript(self) -> str:
        self._need("_")
        if not self._take("{"):
            self._i += 1
            if self._kind(-1) not in ("num", "name", "word"):
                raise NotUnderstood
            return "_" + self._tokens[self._i - 1].text
        parts = []
        while not self._take("}"):
            if self._kind() not in ("num", "name", "word") and self._text() not in ("+", "-", ","):
                raise NotUnderstood
            parts.append(self._tokens[self._i].text)
            self._i += 1
        return "_" + "".join(parts)

    def _argument(self) -> Node:
        """Returns a braced group, or what LaTeX accepts without braces: one digit, one letter, or
        one command.
        """
        if self._kind() == "num":
            token = self._tokens[self._i]
            if len(token.text) > 1 and token.text.isdigit():  # \frac12: the rest stays
                self._tokens[self._i] = Token("num", token.text[1:])
            else:
                self._i += 1
            return ("num", Fraction(token.text[0] if token.text.isdigit() else token.text))
        return self._primary()

    def _command(self, text: str) -> Node:
        if text in ("\\pi", "\\infty"):
            return (text[1:],)
        if text == "\\frac":
            return ("/", self._argument(), self._argument())
        if text == "\\binom":
            return ("binomial", self._argument(), self._argument())
        if text in ("\\sqrt", *_DEGREES):
            return self._root(text)
        if text in _WRAPPERS:
            closing, name = _WRAPPERS[text]
            node = self._sum()
            self._need(closing)
            return (name, node)
        if text in ("\\floor", "\\ceil"):
            self._need("(")
            self._i -= 1
            return (text[1:], self._primary())
        if text in _ACCENTS:
            name = "".join(token.text for token in self._group())
            return ("sym", f"{text} {name}")
        if text[1:] in FUNCTIONS:
            return self._function(text[1:])
        raise NotUnderstood

    def _group(self) -> list[Token]:
        if not self._take("{"):
            self._i += 1
            return self._tokens[self._i - 1 : self._i]
        start = self._i
        while self._kind() in ("name", "word", "num"):
            self._i += 1
        self._need("}")
        return self._tokens[start : self._i - 1]

    def _root(self, text: str) -> Node:
        degree: Node = ("num", Fraction(_DEGREES.get(text, 2)))
        if text == "\\sqrt" and self._take("["):
            degree = self._sum()
            self._need("]")
        node = (
            self._primary()
            if self._kind() == "num" or self._text() in ("{", "(")
            else self._argument()
        )
        return ("root", node, degree)

    def _function(self, name: str) -> Node:
        base: Node | None = None
        power: Node | None = None
        while self._text() in ("_", "^"):
            if self._take("_"):
                base = self._primary()
            else:
                self._i += 1
                power = self._exponent()
        if name in ("gcd", "lcm", "max", "min"):
            self._need("(")
            values = [self._sum()]
            while self._take(","):
                values.append(self._sum())
            self._need(")")
            return (name, *values)
        if (self._text() in ("(", "[") and name != "exp") or self._text() == "(":
            argument = self._primary()
        else:
            argument = self._signed()
            while self._starts_factor(plain=True):
                argument = ("*", argument, self._powered())
        if base is not None and name != "log":
            raise NotUnderstood
        inverse = power == ("neg", ("num", Fraction(1)))
        if name == "log":
            node: Node = ("/", ("ln", argument), ("ln", base or ("num", Fraction(10))))
        elif name == "lg":
            node = ("/", ("ln", argument), ("ln", ("num", Fraction(10))))
        elif inverse and name in ("sin", "cos", "tan"):
            return ("arc" + name, argument)
        else:
            node = (name, argument)
        return node if power is None else ("^", node, power)


def _singles(token: Token) -> tuple[Token, ...]:
    """Returns the letters of a product such as xy, or the word if it is one."""
    run = token.text
    if token.kind != "word" or not (len(run) <= 2 or any(set(run) <= group for group in _PRODUCTS)):
        return (token,)
    return tuple(Token("name", letter) for letter in run)


def repeating(before: str, digits: str) -> Fraction:
    """Returns the value of a decimal with repeating digits."""
    whole, _, places = before.partition(".")
    shift = 10 ** len(places)
    return Fraction(int(f"{whole or 0}{places}"), shift) + Fraction(
        int(digits), (10 ** len(digits) - 1) * shift
    )


def symbols(node: Node) -> frozenset[str]:
    """Returns the names of the unknowns in an expression."""
    if node[0] == "sym":
        return frozenset((node[1],))
    return frozenset().union(*(symbols(part) for part in node[1:] if isinstance(part, tuple)))
