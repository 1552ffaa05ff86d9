"""Every folder stays at its weight, so that a change which adds code says what it replaces.

The weight of a folder is the number of syntax nodes of its Python files, without contexts and
operators: comments, docstrings' length, line breaks and long names are free. `weights.toml` has the
most that each may weigh.

    .venv/bin/python -m tests.package.test_weight > tests/package/weights.toml   # after a cut
"""

import ast
import math
import tomllib
from collections import Counter
from pathlib import Path

from tests.support.paths import ROOT

PACKAGES = ("common", "jobgroup", "learning", "rlhf_math", "services", "trainer")
FIGURES = Path(__file__).with_name("weights.toml")
FREE = (ast.expr_context, ast.operator, ast.cmpop, ast.boolop, ast.unaryop)
STEP = 100


def weights() -> Counter[str]:
    """Returns the weight of every folder of a package, and of the files directly in a package."""
    found = Counter[str]()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).parts
            folder = "/".join(parts[:2]) if len(parts) > 2 else parts[0]
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found[folder] += sum(not isinstance(node, FREE) for node in ast.walk(tree))
    return found


def test_every_folder_stays_at_its_weight() -> None:
    allowed = tomllib.loads(FIGURES.read_text(encoding="utf-8"))
    found = weights()
    too_heavy = [
        f"{folder} weighs {weight:,} nodes, {allowed.get(folder, 0):,} are allowed"
        for folder, weight in sorted(found.items())
        if weight > allowed.get(folder, 0)
    ]
    assert not too_heavy, (
        "\n".join(too_heavy) + f"\nmake it lighter; {FIGURES.name} is raised only with a reason in "
        "the commit's message"
    )
    gone = allowed.keys() - found.keys()
    assert not gone, f"remove what is gone from {FIGURES.name}: {', '.join(gone)}"


if __name__ == "__main__":
    for folder, weight in sorted(weights().items()):
        print(f'"{folder}" = {STEP * math.ceil(weight / STEP)}')
