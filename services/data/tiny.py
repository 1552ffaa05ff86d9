"""The built-in task: templated two-step word problems in GSM8K's format, generated on the spot. No hub, no torch.

A tiny model learns it on two CPU cores. The split is by a hash of (kind, operands), so no combination of the held-out
split occurs in training in any wording.
"""

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "test"]
HELD_OUT = 0.15
"""Share of the (kind, operands) combinations that only the test split uses."""
SIZES: dict[Split, int] = {"train": 8192, "test": 1024}

_NAMES = ("Ann", "Ben", "Cara", "Dan", "Eve", "Finn", "Gia", "Hugo")
_THINGS = ("apples", "books", "coins", "eggs", "pens", "shells")


@dataclass(frozen=True)
class TinyProblem:
    """One problem: question, worked solution (`#### N` last) and N."""

    question: str
    solution: str
    answer: int


@dataclass(frozen=True)
class _Kind:
    name: str
    first: Callable[[int, int], int]
    second: Callable[[int, int], int]
    signs: tuple[str, str]
    wordings: tuple[str, ...]


def _plus(x: int, y: int) -> int:
    return x + y


def _minus(x: int, y: int) -> int:
    return x - y


def _times(x: int, y: int) -> int:
    return x * y


_KINDS = (
    _Kind(
        "a+b+c",
        _plus,
        _plus,
        ("+", "+"),
        (
            "{n} has {a} {t}, buys {b} more and finds {c} more. How many {t} now?",
            "{n} had {a} {t}. A friend gave {b} and another gave {c}. How many {t} in total?",
        ),
    ),
    _Kind(
        "a+b-c",
        _plus,
        _minus,
        ("+", "-"),
        (
            "{n} has {a} {t}, buys {b} more and loses {c}. How many {t} now?",
            "{n} had {a} {t}. A friend gave {b}, then {n} sold {c}. How many {t} are left?",
        ),
    ),
    _Kind(
        "a-b+c",
        _minus,
        _plus,
        ("-", "+"),
        (
            "{n} has {a} {t}, loses {b} and finds {c} more. How many {t} now?",
            "{n} had {a} {t}, sold {b}, then a friend gave {c}. How many {t} are left?",
        ),
    ),
    _Kind(
        "a*b+c",
        _times,
        _plus,
        ("*", "+"),
        (
            "{n} has {a} bags with {b} {t} each and {c} more. How many {t} now?",
            "{n} buys {a} boxes of {b} {t} and finds {c} more. How many {t} in total?",
        ),
    ),
)


def split_of(kind: str, a: int, b: int, c: int) -> Split:
    """Which split a combination belongs to, in every wording."""
    digest = hashlib.sha256(f"{kind} {a} {b} {c}".encode()).digest()
    return "test" if digest[0] < 256 * HELD_OUT else "train"


def problems(split: Split, seed: int = 0) -> Iterator[TinyProblem]:
    """Problems of a split without end; the same seed gives the same ones."""
    rng = random.Random(f"tiny {split} {seed}")
    while True:
        kind = rng.choice(_KINDS)
        a, b, c = (rng.randint(2, 9) for _ in range(3))
        middle = kind.first(a, b)
        answer = kind.second(middle, c)
        if middle < 0 or answer < 0 or split_of(kind.name, a, b, c) != split:
            continue
        wording = rng.choice(kind.wordings)
        question = wording.format(n=rng.choice(_NAMES), t=rng.choice(_THINGS), a=a, b=b, c=c)
        steps = f"{a}{kind.signs[0]}{b}={middle}. {middle}{kind.signs[1]}{c}={answer}."
        yield TinyProblem(question, f"{steps}\n#### {answer}", answer)
