"""Python source of a model: any text is read or refused, whatever else the process does."""

import ast
import gc
from collections.abc import Iterator

import pytest

from services.sandbox.python_source import parse_python

PROGRAM = "def f(a):\n    return [a[i] + (1 if a else 2) for i in range(10)]\n" * 40


@pytest.fixture
def early_garbage() -> Iterator[None]:
    """The garbage collector runs while a tree is made."""
    threshold = gc.get_threshold()
    gc.enable()
    gc.set_threshold(100)
    yield
    gc.set_threshold(*threshold)


class ParsesAtItsEnd:
    """As the log of an error that nobody retrieved does, to mark its place in a line."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        ast.parse("a + (b * [1, 2])")


def test_garbage_that_parses_does_not_disturb(early_garbage: None) -> None:
    for _ in range(20):
        ParsesAtItsEnd()
        assert len(parse_python(PROGRAM).body) == 40


@pytest.mark.parametrize("source", ["f(", "a\0b", "-" * 100_000 + "1", "(" * 1_000])
def test_what_is_no_program_is_refused(source: str) -> None:
    with pytest.raises(SyntaxError):
        parse_python(source)
