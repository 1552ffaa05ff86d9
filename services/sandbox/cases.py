"""Parses the test cases of a program, and compares its results with what they expect."""

import ast
import builtins
import json
import math
from dataclasses import dataclass
from typing import Any, Literal

from common.errors import InvalidInput
from services.sandbox.values import decoded

CaseStatus = Literal[
    "passed", "wrong", "error", "timeout", "memory", "output", "died", "starved", "skipped"
]
"""`wrong`: another output or value. `error`: it raised. `timeout`, `memory`, `output`: over a
limit. `died`: its process ended before the test. `starved`: it got too little CPU to use its time.
`skipped`: not run, because the score was decided or the time for all cases was used up."""

_RELATIVE = 1e-9
_FORGED = (ValueError, TypeError, LookupError, AttributeError, RecursionError, MemoryError)
"""What the report of a program that forged it can raise."""


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

    request: dict[str, Any]
    expected: Any = None
    exact: bool = True
    """Compare with Python's `==`; otherwise floats may differ by a relative 1e-9, and any iterable
    matches a list."""
    equal: bool = True
    """False for `assert … != literal`."""

    def verdict(self, done: dict[str, Any]) -> CaseResult:
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
            is_right = _lines(done["output"]) == _lines(self.expected)
        else:
            is_right = self._matches(done["value"])
        return CaseResult("passed" if is_right else "wrong", seconds, detail)

    def _matches(self, reported: str) -> bool:
        """Whether the value that the program reported is as expected."""
        try:
            value = decoded(json.loads(reported))
            same = value == self.expected if self.exact else _close(value, self.expected)
            return bool(same) == self.equal
        except _FORGED:
            return False


def parse_cases(cases: Any, where: str = "test_cases") -> list[Case]:
    """Returns the test cases of one problem.

    Args:
        cases: the column of the data set: a list, or JSON text of one, or one text of Python tests.
            Each is `{"input": text, "output": text}` (or `expected_output`): a program that reads
            standard input; `{"function": name, "args": [...], "kwargs": {...}, "output": value}`: a
            call; or a text: Python tests, usually one `assert` line.
        where: the field, for errors.

    Raises:
        InvalidInput: a case is none of these.
    """
    if isinstance(cases, str):
        try:
            cases = json.loads(cases)
        except ValueError:
            cases = [cases]
    if isinstance(cases, dict):
        cases = [cases]
    if not isinstance(cases, (list, tuple)) or not cases:
        raise InvalidInput(
            "there are no test cases",
            field=where,
            value=cases,
            remedy="give a list of at least one case",
        )
    return [_parse_case(case, f"{where}[{i}]") for i, case in enumerate(cases)]


def _parse_case(case: Any, where: str) -> Case:
    if isinstance(case, str):
        return _parse_python_test(case, where)
    parsed = _parse_mapping(case) if isinstance(case, dict) else None
    if parsed is None:
        raise InvalidInput(
            "this is not a test case",
            field=where,
            value=case,
            remedy='give {"input": text, "output": text}, {"function": name, "args": [...], '
            '"output": value}, or an assert line',
        )
    return parsed


def _parse_mapping(case: dict[str, Any]) -> Case | None:
    """Returns a case that calls a function or reads standard input; None for anything else."""
    keys = [key for key in ("output", "expected_output", "expected") if key in case]
    expected = case[keys[0]] if keys else None
    name = case.get("function", case.get("fn_name"))
    arguments = case.get("args", [])
    text = case.get("input", "")

    if isinstance(name, str) and keys and isinstance(arguments, list):
        request = {
            "kind": "call",
            "function": name,
            "args": arguments,
            "kwargs": case.get("kwargs", {}),
        }
        return Case(request, expected, exact=False)
    if name is None and isinstance(expected, str) and isinstance(text, str):
        return Case({"kind": "stdin", "input": text}, expected)
    return None


def _parse_python_test(text: str, where: str) -> Case:
    """Parses a test in Python. `assert f(…) == literal` is compared outside; the sandbox never sees
    the literal.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidInput(
            f"the test is not valid Python: {error}",
            field=where,
            value=text,
            remedy="correct the test",
        ) from None
    if not tree.body:
        raise InvalidInput("the test is empty", field=where, value=text, remedy="remove the test")
    return _parse_comparison(tree.body) or Case({"kind": "code", "code": text})


def _parse_comparison(statements: list[ast.stmt]) -> Case | None:
    """Returns the case of a single `assert f(…) == literal`, in either order; None for anything
    else.
    """
    first = statements[0]
    test = first.test if isinstance(first, ast.Assert) and len(statements) == 1 else None
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return None
    operator = test.ops[0]
    if not isinstance(operator, (ast.Eq, ast.NotEq, ast.Is)):
        return None

    left = test.left
    right = test.comparators[0]
    for expression, literal in ((left, right), (right, left)):
        try:
            expected = ast.literal_eval(literal)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
        if not _is_call(expression):
            return None
        request = {"kind": "value", "expression": ast.unparse(expression)}
        return Case(request, expected, equal=not isinstance(operator, ast.NotEq))
    return None


def _is_call(expression: ast.expr) -> bool:
    """Whether an expression only calls a function of the program. Anything else is evaluated in the
    test's process.
    """
    if not isinstance(expression, ast.Call):
        return False
    function = expression.func
    if isinstance(function, ast.Name) and hasattr(builtins, function.id):
        return False
    arguments = [*expression.args, *(keyword.value for keyword in expression.keywords)]
    return not any(_contains_call(argument) for argument in arguments)


def _contains_call(expression: ast.expr) -> bool:
    return any(isinstance(node, ast.Call) for node in ast.walk(expression))


def _close(value: Any, expected: Any) -> bool:
    """Compares with a value from JSON: any iterable matches a list, text matches keys, floats match
    to 9 digits.
    """
    if isinstance(expected, bool) or isinstance(value, bool):
        return value is expected
    if isinstance(expected, (int, float)) and isinstance(value, (int, float)):
        if isinstance(value, int) and isinstance(expected, int):
            return value == expected
        try:
            return math.isclose(value, expected, rel_tol=_RELATIVE, abs_tol=_RELATIVE)
        except OverflowError:
            return False
    if isinstance(expected, list) and isinstance(value, (list, tuple)):
        return len(value) == len(expected) and all(
            _close(a, b) for a, b in zip(value, expected, strict=True)
        )
    if isinstance(expected, list) and isinstance(value, (set, frozenset)):  # in any order
        return len(value) == len(expected) and _close(
            sorted(value, key=_order), sorted(expected, key=_order)
        )
    if isinstance(expected, dict) and isinstance(value, dict):
        by_text: dict[str, Any] = {}
        for key, item in value.items():
            by_text[key if isinstance(key, str) else json.dumps(key, default=repr)] = item
        return by_text.keys() == expected.keys() and all(
            _close(by_text[key], item) for key, item in expected.items()
        )
    return type(value) is type(expected) and bool(value == expected)


def _order(item: Any) -> tuple[str, Any]:
    """Returns a key that can sort items of mixed types; lists and tuples are equal."""
    if isinstance(item, (int, float)):
        return "", item
    return "text", json.dumps(item, default=sorted)


def _lines(text: str) -> list[str]:
    """Returns the lines without trailing spaces, and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
