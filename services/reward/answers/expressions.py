"""Parses the tokens of one mathematical expression: all of them, or none.

`2x + 1` becomes `Operation("+", (Operation("*", (Number(2), Unknown("x"))), Number(1)))`.
"""

from dataclasses import dataclass
from fractions import Fraction
from itertools import chain

from services.reward.answers.notation import (
    CLOSE,
    DEGREE,
    FUNCTIONS,
    NotUnderstood,
    Token,
    Tokens,
    words,
)


class Expression:
    """A mathematical expression: a number, an unknown, or an operation."""

    name: str = ""
    operands: tuple["Expression", ...] = ()


@dataclass(frozen=True)
class Number(Expression):
    """A rational number."""

    value: Fraction


@dataclass(frozen=True)
class Unknown(Expression):
    """An unknown."""

    name: str


@dataclass(frozen=True)
class Operation(Expression):
    """An operator or function with its operands; a constant such as pi has none."""

    name: str
    operands: tuple[Expression, ...]


_MAX_DEPTH = 60  # expression trees are walked recursively
_MAX_TOKENS = 300
# A word of letters that belong together, such as xyz, is a product.
_PRODUCTS = tuple(map(frozenset, ("abcd", "ijklmn", "pqrs", "uvwxyz")))
_ENDS = CLOSE | words(
    f"+ - | , ; / \\times : ! !! ^ % & \\\\ {DEGREE} \\rfloor \\rceil \\mod \\over"
)
_BRACKETS = {"(": ")", "[": "]", "{": "}"}
_WRAPPERS = {
    "\\lfloor": ("\\rfloor", "floor"),
    "\\lceil": ("\\rceil", "ceil"),
    "\\lVert": ("\\rVert", "abs"),
}
_DEGREES = {"\\sqrt": 2, "\\root": 2, "\\cuberoot": 3, "\\cbrt": 3, "\\fourthroot": 4}
_ACCENTS = words("\\vec \\bar \\hat \\tilde \\mathcal")
_OPERATORS = {"\\times": "*", "/": "/", ":": "/", "\\mod": "mod"}
_LISTING = words("gcd lcm max min floor ceil")
_POSTFIX = {"!!": "double factorial", "!": "factorial"}
_END = Token("", "")


def number(value: int | Fraction) -> Number:
    """Returns a number as a node."""
    return Number(Fraction(value))


def operation(name: str, *operands: Expression) -> Operation:
    """Returns an operation as a node."""
    return Operation(name, operands)


ZERO = number(0)
ONE = number(1)
_FACTORS: dict[str, Expression] = {
    DEGREE: operation("/", operation("pi"), number(180)),
    "%": number(Fraction(1, 100)),
}


class Parser:
    """Recursive descent over the tokens of one expression.

    From loose to tight: a sum, a term (a product), a power, and what stands alone (`_primary`).
    """

    def __init__(self, tokens: Tokens) -> None:
        """Raises NotUnderstood for more tokens than an expression may have, and for 1:2:3."""
        colons = sum(token.text == ":" for token in tokens)
        if len(tokens) > _MAX_TOKENS or colons > 1:
            raise NotUnderstood
        # The parser looks at most two tokens ahead.
        self._tokens = [*chain.from_iterable(map(_letters_of, tokens)), _END, _END, _END]
        self._i = 0
        self._depth = 0
        # Open bars: a bar then closes an absolute value.
        self._bars = 0

    def whole(self) -> Expression:
        """Parses all tokens as one expression. Raises NotUnderstood."""
        node = self._sum()
        if self._next is not _END:
            raise NotUnderstood
        return node

    @property
    def _next(self) -> Token:
        return self._tokens[self._i]

    @property
    def _text(self) -> str:
        """The text of the next token if it is an operator or a command, else empty."""
        return self._next.text if self._next.kind in ("op", "cmd") else ""

    def _take(self, text: str) -> bool:
        found = self._text == text
        self._i += found
        return found

    def _need(self, text: str) -> None:
        if not self._take(text):
            raise NotUnderstood

    def _sum(self) -> Expression:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise NotUnderstood
        node = self._term()
        while (sign := self._text) in ("+", "-"):
            self._i += 1
            node = operation(sign, node, self._term())
        if self._take("\\over"):
            node = operation("/", node, self._sum())
        self._depth -= 1
        return node

    def _term(self) -> Expression:
        node = self._signed()
        while True:
            text = self._text
            if text in _OPERATORS:
                self._i += 1
                node = operation(_OPERATORS[text], node, self._signed())
            elif self._starts_factor():
                node = operation("*", node, self._powered())
            else:
                return node

    def _signed(self) -> Expression:
        is_negative = False
        while self._text in ("+", "-"):
            is_negative ^= self._text == "-"
            self._i += 1
        node = self._powered()
        return operation("neg", node) if is_negative else node

    def _starts_factor(self, plain: bool = False) -> bool:
        """Returns whether a factor without a preceding operator may begin here; numbers never
        do. `plain`: it continues the argument of a function without brackets.
        """
        text = self._text
        if not text:
            return self._next.kind in ("name", "word")
        if plain and (text[1:] in FUNCTIONS or text == "("):
            return text == "\\sqrt"
        if text == "|":
            return self._bars == 0
        return text not in _ENDS and (self._next.kind == "cmd" or text in _BRACKETS)

    def _powered(self) -> Expression:
        node = self._postfix(self._primary())
        if self._take("^"):
            node = self._postfix(operation("^", node, self._exponent()))
        return node

    def _exponent(self) -> Expression:
        if self._take("-"):
            return operation("neg", self._exponent())
        if self._take("+"):
            return self._exponent()
        node = self._primary()
        return operation("^", node, self._exponent()) if self._take("^") else node

    def _postfix(self, node: Expression) -> Expression:
        while True:
            text = self._text
            if text in _POSTFIX:
                node = operation(_POSTFIX[text], node)
            elif text in _FACTORS:
                node = operation("*", node, _FACTORS[text])
            else:
                return node
            self._i += 1

    def _primary(self) -> Expression:
        kind, text, _ = self._next
        self._i += 1
        if kind == "num":
            return Number(Fraction(text))
        if kind == "name":
            return self._letter(text)
        if kind == "op" and text in _BRACKETS:
            bars = self._bars
            self._bars = 0
            node = self._sum()
            self._bars = bars
            self._need(_BRACKETS[text])
            return node
        if text == "|":
            self._bars += 1
            node = operation("abs", self._sum())
            self._bars -= 1
            self._need("|")
            return node
        if kind == "cmd":
            return self._command(text)
        raise NotUnderstood

    def _letter(self, name: str) -> Expression:
        if name == "C" and self._text == "(" and self._tokens[self._i + 2].text == ",":  # C(5,2)
            node = operation("binomial", *self._listed())
            if len(node.operands) != 2:
                raise NotUnderstood
            return node
        if self._take("_"):
            name += "_" + self._subscript()
        while self._take("'"):
            name += "'"
        return operation(name) if name in ("e", "i") else Unknown(name)

    def _subscript(self) -> str:
        is_group = self._take("{")
        text = ""
        while not (is_group and self._take("}")):
            kind, piece, _ = self._next
            if kind not in ("num", "name", "word") and piece not in ("+", "-", ","):
                raise NotUnderstood
            self._i += 1
            text += piece
            if not is_group:
                break
        return text

    def _argument(self) -> Expression:
        """Returns a braced group, or what LaTeX accepts without braces: one digit, one letter, or
        one command.
        """
        kind, text, _ = self._next
        if kind == "num" and text.isdigit() and len(text) > 1:  # \frac12: the rest stays
            self._tokens[self._i] = Token("num", text[1:])
            return Number(Fraction(text[0]))
        return self._primary()

    def _listed(self) -> list[Expression]:
        self._need("(")
        values = [self._sum()]
        while self._take(","):
            values.append(self._sum())
        self._need(")")
        return values

    def _command(self, text: str) -> Expression:
        name = text[1:]
        if name in ("pi", "infty"):
            return operation(name)
        if name in ("frac", "binom"):
            kind = "/" if name == "frac" else "binomial"
            return operation(kind, self._argument(), self._argument())
        if text in _DEGREES:
            return self._root(text)
        if text in _WRAPPERS:
            closing, name = _WRAPPERS[text]
            node = self._sum()
            self._need(closing)
            return operation(name, node)
        if name in _LISTING:
            return operation(name, *self._listed())
        if name.startswith("set"):
            return Unknown(text)
        if text in _ACCENTS:
            return Unknown(f"{text} {self._subscript()}")
        if name in FUNCTIONS:
            return self._function(name)
        raise NotUnderstood

    def _root(self, text: str) -> Expression:
        degree: Expression = number(_DEGREES[text])
        if text == "\\sqrt" and self._take("["):
            degree = self._sum()
            self._need("]")
        return operation("root", self._primary(), degree)  # √12 is not √1 times 2

    def _function(self, name: str) -> Expression:
        base: Expression | None = None
        power: Expression | None = None
        while self._text in ("_", "^"):
            if self._take("_"):
                base = self._primary()
            else:
                self._i += 1
                power = self._exponent()
        if base is not None and name != "log":
            raise NotUnderstood

        if self._text == "(" or (self._text == "[" and name != "exp"):
            argument = self._primary()
        else:
            argument = self._signed()
            while self._starts_factor(plain=True):
                argument = operation("*", argument, self._powered())

        # sin^{-1} is the inverse function, not a reciprocal.
        if power == operation("neg", ONE) and name in ("sin", "cos", "tan"):
            return operation("arc" + name, argument)
        node = operation(name, argument)
        if name in ("log", "lg"):
            node = operation("/", operation("ln", argument), operation("ln", base or number(10)))
        return node if power is None else operation("^", node, power)


def _letters_of(token: Token) -> list[Token]:
    """Returns the letters of a product such as xy, or the word if it is one."""
    run = token.text
    is_product = len(run) <= 2 or any(set(run) <= group for group in _PRODUCTS)
    if token.kind != "word" or not is_product or not run.isascii():
        return [token]
    return [Token("name", letter) for letter in run]


def unknowns(node: Expression) -> frozenset[str]:
    """Returns the names of the unknowns in an expression."""
    if isinstance(node, Unknown):
        return frozenset((node.name,))
    return frozenset().union(*map(unknowns, node.operands))


def substituted(node: Expression, name: str, value: Expression) -> Expression:
    """Returns an expression with `value` in the place of an unknown."""
    if not node.operands:
        return value if node == Unknown(name) else node
    return operation(node.name, *(substituted(part, name, value) for part in node.operands))
