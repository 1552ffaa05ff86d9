"""`python -m examples.coding_agent.tasks DIRECTORY [--seed N]`: makes repositories to repair, as
tasks in Harbor's format.

Each is a small package with one function that computes the wrong number; the instruction says what
it has to do, and tests that the agent never sees check it.
"""

import argparse
import random
import shutil
from pathlib import Path
from typing import NamedTuple

TRAIN = 24
HELD_OUT = 8
OPERATORS = {"adds": "+", "subtracts": "-", "multiplies": "*", "divides": "/"}
NAMES = (  # noqa: SIM905
    "area bill change cost count dose fare force gain heat length loss mass margin mean pace price"
    " profit range rate ratio rent share score size speed tax tip total volume wage weight"
).split()
MODULE = "def {name}(a, b):\n    return a {operator} b\n"
DOCKERFILE = "FROM python:3.11-slim\nWORKDIR /app\nCOPY lib lib\n"
CONFIG = """\
schema_version = "1.1"

[task]
name = "examples/repair-{name}"

[agent]
timeout_sec = 120.0

[verifier]
timeout_sec = 60.0

[environment]
cpus = 1
memory_mb = 1024
"""
TEST = """\
#!/bin/sh
# What the tests import may have been written by the agent: the reward is written after they ended.
timeout 30 python3 -B /tests/test_{name}.py
passed=$?
rm -rf /logs/verifier/*
if [ $passed -eq 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
CASES = """\
import sys

sys.path.insert(0, "/app")
from lib.{name} import {name}

for a, b in (12, 3), (7, 2), (-4, 5):
    assert {name}(a, b) == a {operator} b, (a, b, {name}(a, b))
"""


class Repair(NamedTuple):
    """A function that uses one operator and should use another."""

    name: str
    verb: str
    wrong: str

    @property
    def instruction(self) -> str:
        return f"lib/{self.name}.py: {self.name} {self.verb}, but its result is wrong."

    def command(self, operator: str) -> str:
        """Returns the shell command that puts an operator into the function."""
        return f"sed -i 's|a . b|a {operator} b|' lib/{self.name}.py"


def repairs(seed: int) -> list[Repair]:
    """Returns different repairs, the held-out ones last."""
    rng = random.Random(f"repairs {seed}")
    names = rng.sample(NAMES, TRAIN + HELD_OUT)
    made = []
    for number, name in enumerate(names):
        verb = list(OPERATORS)[number % len(OPERATORS)]
        wrong = rng.choice([each for each in OPERATORS.values() if each != OPERATORS[verb]])
        made.append(Repair(name, verb, wrong))
    return made


def write(repair: Repair, folder: Path) -> None:
    """Writes a task."""
    operator = OPERATORS[repair.verb]
    files = {
        "task.toml": CONFIG.format(name=repair.name),
        "instruction.md": repair.instruction + "\n",
        "environment/Dockerfile": DOCKERFILE,
        "environment/lib/__init__.py": "",
        f"environment/lib/{repair.name}.py": MODULE.format(name=repair.name, operator=repair.wrong),
        "tests/test.sh": TEST.format(name=repair.name),
        f"tests/test_{repair.name}.py": CASES.format(name=repair.name, operator=operator),
        "solution/solve.sh": f"#!/bin/sh\n{repair.command(operator)}\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def write_all(directory: Path, seed: int = 0) -> list[Repair]:
    """Writes the tasks into `directory`/train and `directory`/test; returns those to train on."""
    shutil.rmtree(directory, ignore_errors=True)
    made = repairs(seed)
    for repair in made[:TRAIN]:
        write(repair, directory / "train" / repair.name)
    for repair in made[TRAIN:]:
        write(repair, directory / "test" / repair.name)
    return made[:TRAIN]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="examples.coding_agent.tasks", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write_all(options.directory, options.seed)
