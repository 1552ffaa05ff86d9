"""The code stays unpacked: one idea a line, what it means before how short it is.

A limit is what the code had when it was last lowered. Lower it when you unpack a file; never raise it.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("common", "learning", "services", "trainer", "jobgroup")
POSITIONAL = 5
"""From this many positional arguments on, a call is counted: a reader cannot tell which is which."""
LIMITS = {
    "assignments of several values at once": 3,
    "walruses outside while and matches": 0,
    "calls with five and more positional arguments": 15,
}


def counted() -> Counter[str]:
    found = Counter[str]()
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            found.update(packed(ast.parse(path.read_text(encoding="utf-8"))))
    return found


def packed(tree: ast.AST) -> Iterator[str]:
    """Yields a name of `LIMITS` for each packed place."""
    allowed = set[ast.NamedExpr]()
    for node in ast.walk(tree):
        if isinstance(node, ast.While):
            allowed |= {each for each in ast.walk(node.test) if isinstance(each, ast.NamedExpr)}
        if isinstance(node, ast.NamedExpr) and _is_match(node.value):
            allowed.add(node)

    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            if isinstance(node.value, ast.Tuple | ast.GeneratorExp):
                yield "assignments of several values at once"
        elif isinstance(node, ast.NamedExpr) and node not in allowed:
            yield "walruses outside while and matches"
        elif isinstance(node, ast.Call) and len(node.args) >= POSITIONAL:
            yield "calls with five and more positional arguments"


def _is_match(value: ast.expr) -> bool:
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return False
    return value.func.attr in ("match", "fullmatch", "search")


def test_the_code_is_not_packed() -> None:
    over = {name: count for name, count in counted().items() if count > LIMITS[name]}
    assert not over, f"unpack what you wrote: {over}, limits {LIMITS}"


def test_packed_places_are_found() -> None:
    source = """
a, b = 1, 2
c, d = (x for x in y)
e, f = pair()
if n := g(1, 2, 3, 4, 5):
    pass
while chunk := read():
    pass
if m := re.match("a", text):
    pass
"""
    assert Counter(packed(ast.parse(source))) == {
        "assignments of several values at once": 2,
        "walruses outside while and matches": 1,
        "calls with five and more positional arguments": 1,
    }
