"""A test case of a program, and the comparison of a result with what the case expects."""

import json
import math
import re
from dataclasses import dataclass
from typing import Any, Literal

from common import Json
from services.sandbox.values import decoded, encoded

CaseStatus = Literal[
    "passed", "wrong", "error", "timeout", "memory", "output", "died", "starved", "skipped"
]
"""`wrong`: another output or value. `error`: it raised. `timeout`, `memory`, `output`: over a
limit. `died`: its process ended before the test. `starved`: it got too little CPU to use its time.
`skipped`: not run, because the score was decided or the time for all cases was used up."""

Comparison = Literal["==", "!=", "is", "close", "close or wrapped"]
"""The first three as in a test in Python; `is` for None, True and False: 1 is not True. `close`:
floats may differ by 1e-6, and any iterable matches a list. `close or wrapped`: the expected value
may also stand in a list of one, as in APPS and TACO."""
# Relative and absolute, where a float is expected: programs print six digits by default.
_TOLERANCE = 1e-6
_NUMBER = re.compile(r"[-+]?(?:\d+(\.\d*)?|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)
_MAX_NUMBER_CHARS = 40
_SPACES = re.compile(r"(\s+)")
# What decoding a value that a program has forged can raise.
_FORGED = (ValueError, TypeError, LookupError, AttributeError, RecursionError, MemoryError)


@dataclass(frozen=True, slots=True)
class CaseResult:
    """Result of one test case."""

    status: CaseStatus
    seconds: float = 0.0
    """Wall time of its process."""
    detail: str = ""
    """The exception, at most 200 characters."""


@dataclass(frozen=True, slots=True)
class Case:
    """One test case: the request that enters the sandbox, and the expected value that stays
    outside.
    """

    request: Json
    expected: Any = None
    comparison: Comparison = "=="
    test: Json | None = None
    """A test in Python, which enters the sandbox when the program has its process."""
    imports: frozenset[str] = frozenset()
    """Modules that a test in Python imports."""

    @property
    def expected_bytes(self) -> int:
        """Size of the expected output or value, as the sandbox reports it. Raises RecursionError
        for a value with too many levels.
        """
        if self.request["kind"] == "stdin":
            return len(self.expected.encode("utf-8", "replace"))
        return len(json.dumps(encoded(self.expected)))

    def verdict(self, done: Json) -> CaseResult:
        """Returns the result of the case from the sandbox's report."""
        status = done["status"]
        seconds = float(done["seconds"])
        detail = str(done["detail"])
        if status != "done":
            return CaseResult(status, seconds, detail)

        kind = self.request["kind"]
        if kind == "code":
            is_right = True
        elif kind == "stdin":
            is_right = _same_output(done["output"], self.expected)
        else:
            is_right = self._matches(done["value"])
        return CaseResult("passed" if is_right else "wrong", seconds, detail)

    def _matches(self, reported: str) -> bool:
        """Whether the value that the program reported is as expected."""
        try:
            value = decoded(json.loads(reported))
            if self.comparison == "is":
                return value is self.expected
            if self.comparison in ("==", "!="):
                return bool(value == self.expected) == (self.comparison == "==")
            if _close(value, self.expected):
                return True
            is_list_of_one = isinstance(self.expected, list) and len(self.expected) == 1
            may_be_wrapped = is_list_of_one and self.comparison == "close or wrapped"
            return may_be_wrapped and _close(value, self.expected[0])
        except _FORGED:
            return False


def _close(value: Any, expected: Any) -> bool:
    """Compares with a value from JSON: any iterable matches a list, text matches keys, floats match
    within 1e-6.
    """
    if isinstance(expected, bool) or isinstance(value, bool):
        return value is expected
    if isinstance(expected, (int, float)) and isinstance(value, (int, float)):
        return _same_number(value, expected)
    if isinstance(expected, list) and isinstance(value, (list, tuple)):
        return len(value) == len(expected) and all(
            _close(a, b) for a, b in zip(value, expected, strict=True)
        )
    if isinstance(expected, list) and isinstance(value, (set, frozenset)):  # in any order
        return len(value) == len(expected) and _close(
            sorted(value, key=_order), sorted(expected, key=_order)
        )
    if isinstance(expected, dict) and isinstance(value, dict):
        by_text: Json = {}
        for key, item in value.items():
            by_text[key if isinstance(key, str) else json.dumps(key, default=repr)] = item
        same_keys = len(by_text) == len(value) and by_text.keys() == expected.keys()
        return same_keys and all(_close(by_text[key], item) for key, item in expected.items())
    return type(value) is type(expected) and bool(value == expected)


def _order(item: Any) -> tuple[str, Any]:
    """Returns a key that can sort items of mixed types; lists and tuples are equal."""
    if isinstance(item, (int, float)):
        return "", item
    return "text", json.dumps(item, default=sorted)


def _same_number(value: float, expected: float) -> bool:
    """Compares numbers: an expected integer allows a float no more than its rounding error."""
    if isinstance(value, int) and isinstance(expected, int):
        return value == expected
    try:
        if isinstance(expected, int):
            return math.isclose(value, expected, rel_tol=1e-14, abs_tol=1e-9)
        return math.isclose(value, expected, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    except OverflowError:
        return False


def _same_output(output: str, expected: str) -> bool:
    """Compares standard output line by line and word by word.

    Two words are the same when their texts or their numbers are (`1`, `1.0`).
    """
    lines = _lines(output)
    expected_lines = _lines(expected)
    if lines == expected_lines:
        return True
    if len(lines) != len(expected_lines):
        return False
    for line, expected_line in zip(lines, expected_lines, strict=True):
        # With the spaces between the words, which draw figures.
        words = _SPACES.split(line)
        expected_words = _SPACES.split(expected_line)
        if len(words) != len(expected_words) or not all(map(_same_word, words, expected_words)):
            return False
    return True


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    number = _number(word)
    expected_number = _number(expected)
    if number is None or expected_number is None:
        return False
    # Two integers are compared as texts: 007 is not 7.
    both_integers = isinstance(number, int) and isinstance(expected_number, int)
    return not both_integers and _same_number(number, expected_number)


def _number(word: str) -> float | None:
    """Returns the number that a word is; None for any other word."""
    match = _NUMBER.fullmatch(word) if len(word) <= _MAX_NUMBER_CHARS else None
    if match is None:
        return None
    is_integer = "." not in word and match[2] is None
    return int(word) if is_integer else float(word)


def _lines(text: str) -> list[str]:
    """Returns the lines without trailing spaces, and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
