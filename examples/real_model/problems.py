"""Writes one-step word problems: `python examples/real_model/problems.py DIRECTORY`.

`train.jsonl` is for training, `test.jsonl` for evaluation. A hash of the calculation decides the
split, so no test calculation occurs in training, in any wording.
"""

import hashlib
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_NAMES = ("Ann", "Ben", "Cara", "Dan", "Eve", "Finn", "Gia", "Hugo")
_THINGS = ("apples", "books", "coins", "eggs", "pens", "shells")
_WORDINGS = {
    "+": (
        "{n} has {a} {t} and finds {b} more. How many {t} now?",
        "{n} had {a} {t} and bought {b}. How many is that?",
    ),
    "-": (
        "{n} has {a} {t} and loses {b}. How many {t} are left?",
        "{n} had {a} {t} and sold {b}. How many has {n} now?",
    ),
    "*": (
        "{n} has {a} boxes with {b} {t} each. How many {t} in all?",
        "{n} buys {a} bags of {b} {t}. How many {t} is that?",
    ),
    "/": (
        "{n} shares {a} {t} among {b} friends. How many {t} does each get?",
        "{n} packs {a} {t} into {b} boxes. How many {t} are in each?",
    ),
}
_HELD_OUT = 0.25
SIZES = {"train": 2000, "test": 256}


class Problem(NamedTuple):
    """A problem and the split it belongs to."""

    held_out: bool
    question: str
    calculation: str
    """What the problem asks for, such as `470 / 10`."""
    answer: str


def problems(seed: int = 0) -> Iterator[Problem]:
    """Yields problems endlessly: a random operation of the four, on numbers from 11 to 99 or ten
    times as large.
    """
    rng = random.Random(seed)
    while True:
        operation = rng.choice("+-*/")
        name = rng.choice(_NAMES)
        thing = rng.choice(_THINGS)
        a = rng.randint(11, 99)
        b = 1
        if operation in "*/":
            a *= 10
            b = 10
        answer = {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[operation]
        question = rng.choice(_WORDINGS[operation]).format(n=name, t=thing, a=a, b=b)
        calculation = f"{a} {operation} {b}"
        held_out = hashlib.sha256(calculation.encode()).digest()[0] < 256 * _HELD_OUT
        yield Problem(held_out, question, calculation, answer=str(answer))


def main(directory: Path) -> None:
    """Writes the files."""
    directory.mkdir(parents=True, exist_ok=True)
    stream = problems()
    lines: dict[str, list[str]] = {name: [] for name in SIZES}
    while any(len(lines[name]) < size for name, size in SIZES.items()):
        problem = next(stream)
        name = "test" if problem.held_out else "train"
        if len(lines[name]) < SIZES[name]:
            row = {
                "question": problem.question,
                "calculation": problem.calculation,
                "answer": problem.answer,
            }
            lines[name].append(json.dumps(row) + "\n")
    for name, content in lines.items():
        (directory / f"{name}.jsonl").write_text("".join(content), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
