"""The built-in task: templated two-step word problems in GSM8K's format, generated on demand. Needs
no hub or torch.

A tiny model learns it on two CPU cores. The split is by a hash of (kind, operands), so no
combination of the held-out split occurs in training in any wording.
"""

import hashlib
import operator
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "test"]
HELD_OUT = 0.15
"""Share of the (kind, operands) combinations that only the test split uses."""
SIZES: dict[Split, int] = {"train": 8192, "test": 1024}

_NAMES = ("Ann", "Ben", "Cara", "Dan", "Eve", "Finn", "Gia", "Hugo")
_THINGS = ("apples", "books", "coins", "eggs", "pens", "shells")
_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
# Wordings of each kind of problem; the kind is evaluated from left to right.
_WORDINGS = {
    "a+b+c": (
        "{n} has {a} {t}, buys {b} more and finds {c} more. How many {t} now?",
        "{n} had {a} {t}. A friend gave {b} and another gave {c}. How many {t} in total?",
    ),
    "a+b-c": (
        "{n} has {a} {t}, buys {b} more and loses {c}. How many {t} now?",
        "{n} had {a} {t}. A friend gave {b}, then {n} sold {c}. How many {t} are left?",
    ),
    "a-b+c": (
        "{n} has {a} {t}, loses {b} and finds {c} more. How many {t} now?",
        "{n} had {a} {t}, sold {b}, then a friend gave {c}. How many {t} are left?",
    ),
    "a*b+c": (
        "{n} has {a} bags with {b} {t} each and {c} more. How many {t} now?",
        "{n} buys {a} boxes of {b} {t} and finds {c} more. How many {t} in total?",
    ),
}


@dataclass(frozen=True)
class TinyProblem:
    """One problem: question, worked solution (`#### N` last) and N."""

    question: str
    solution: str
    answer: int


def split_of(kind: str, a: int, b: int, c: int) -> Split:
    """Returns the split that a combination belongs to, in every wording."""
    digest = hashlib.sha256(f"{kind} {a} {b} {c}".encode()).digest()
    return "test" if digest[0] < 256 * HELD_OUT else "train"


def problems(split: Split, seed: int = 0) -> Iterator[TinyProblem]:
    """Yields an endless stream of problems of a split; a seed always gives the same problems."""
    rng = random.Random(f"tiny {split} {seed}")
    kinds = list(_WORDINGS)
    while True:
        kind = rng.choice(kinds)
        a, b, c = (rng.randint(2, 9) for _ in range(3))
        first = kind[1]
        second = kind[3]
        middle = _OPERATORS[first](a, b)
        answer = _OPERATORS[second](middle, c)
        if middle < 0 or answer < 0 or split_of(kind, a, b, c) != split:
            continue
        wording = rng.choice(_WORDINGS[kind])
        question = wording.format(n=rng.choice(_NAMES), t=rng.choice(_THINGS), a=a, b=b, c=c)
        yield TinyProblem(
            question,
            f"{a}{first}{b}={middle}. {middle}{second}{c}={answer}.\n#### {answer}",
            answer,
        )
