"""Writes one-step word problems: `python examples/real_model/problems.py DIRECTORY`.

`train.jsonl` and `test.jsonl` are for training from rewards and for evaluation, `worked.jsonl` for SFT before that. A hash of
the operation and its numbers decides the split, so that nothing of the test split occurs in training in any wording.
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
    "*": ("{n} has {a} boxes with {b} {t} each. How many {t} in all?", "{n} buys {a} bags of {b} {t}. How many {t} is that?"),
}
_HELD_OUT = 0.15
SIZES = {"train": 2000, "test": 256, "worked": 120}


class Problem(NamedTuple):
    """A problem, the part it belongs to, and its answer as the base model shall write it."""

    held_out: bool
    question: str
    worked: str
    answer: str


def problems(seed: int = 0) -> Iterator[Problem]:
    """Yields problems without end."""
    rng = random.Random(seed)
    while True:
        kind, name, thing = rng.choice("+-*"), rng.choice(_NAMES), rng.choice(_THINGS)
        a, b = (rng.randint(2, 9), rng.randint(2, 9)) if kind == "*" else (rng.randint(2, 20), rng.randint(2, 20))
        if kind == "-" and b >= a:
            continue
        answer = {"+": a + b, "-": a - b, "*": a * b}[kind]
        text = rng.choice(_WORDINGS[kind]).format(n=name, t=thing, a=a, b=b)
        held_out = hashlib.sha256(f"{kind} {a} {b}".encode()).digest()[0] < 256 * _HELD_OUT
        worked = f" {a} {kind} {b} = {answer}. The answer is \\boxed{{{answer}}}."
        yield Problem(held_out, f"Question: {text}\nAnswer:", worked, str(answer))


def main(directory: Path) -> None:
    """Writes the files."""
    directory.mkdir(parents=True, exist_ok=True)
    stream, files = problems(), {name: list[Problem]() for name in SIZES}
    while any(len(files[name]) < size for name, size in SIZES.items()):
        problem = next(stream)
        name = "test" if problem.held_out else "worked" if len(files["worked"]) < SIZES["worked"] else "train"
        if len(files[name]) < SIZES[name]:
            files[name].append(problem)
    for name, found in files.items():
        rows = [{"question": each.question, "worked": each.worked, "answer": each.answer} for each in found]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
