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
        status, seconds, detail = done["status"], float(done["seconds"]), str(done["detail"])
        if status != "done":
            return CaseResult(status, seconds, detail)
        kind = self.request["kind"]
        if kind == "code":
            right = True
        elif kind == "stdin":
            right = _lines(done["output"]) == _lines(self.expected)
        else:
            try:
                value = decoded(json.loads(done["value"]))
                same = value == self.expected if self.exact else _close(value, self.expected)
                right = bool(same) == self.equal
            except (
                ValueError,
                TypeError,
                LookupError,
                AttributeError,
                RecursionError,
                MemoryError,
            ):
                right = False  # the program forged the report
        return CaseResult("passed" if right else "wrong", seconds, detail)


def parse_cases(cases: Any, where: str = "test_cases") -> list[Case]:
    """Returns the test cases of one problem.

    Args:
        cases: the column of the data set: a list, or JSON text of one, or one text of Python tests.
            Each is `{"input": text, "output": text}` (or `expected_output`): a program that reads
            standard input; `{"function": name, "args": [...], "kwargs": {...}, "output": value}`: a
            call;
            or a text: Python tests, usually one `assert` line.
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
    return [_parsed(case, f"{where}[{i}]") for i, case in enumerate(cases)]


def _parsed(case: Any, where: str) -> Case:
    if isinstance(case, str):
        return _from_python(case, where)
    if isinstance(case, dict):
        key = next((key for key in ("output", "expected_output", "expected") if key in case), "")
        expected = case.get(key)
        name = case.get("function", case.get("fn_name"))
        if isinstance(name, str) and key and isinstance(case.get("args", []), list):
            request = {
                "kind": "call",
                "function": name,
                "args": case.get("args", []),
                "kwargs": case.get("kwargs", {}),
            }
            return Case(request, expected, exact=False)
        if name is None and isinstance(expected, str) and isinstance(case.get("input", ""), str):
            return Case({"kind": "stdin", "input": case.get("input", "")}, expected)
    raise InvalidInput(
        "this is not a test case",
        field=where,
        value=case,
        remedy='give {"input": text, "output": text}, {"function": name, "args": [...], "output": value}, or an assert line',
    )


def _from_python(text: str, where: str) -> Case:
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
    test = (
        tree.body[0].test if len(tree.body) == 1 and isinstance(tree.body[0], ast.Assert) else None
    )
    if (
        isinstance(test, ast.Compare)
        and len(test.ops) == 1
        and isinstance(test.ops[0], (ast.Eq, ast.NotEq, ast.Is))
    ):
        for expression, literal in (
            (test.left, test.comparators[0]),
            (test.comparators[0], test.left),
        ):
            try:
                expected = ast.literal_eval(literal)
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                continue
            if not _is_call(expression):
                break
            request = {"kind": "value", "expression": ast.unparse(expression)}
            return Case(request, expected, equal=not isinstance(test.ops[0], ast.NotEq))
    return Case({"kind": "code", "code": text})


def _is_call(expression: ast.expr) -> bool:
    """Whether an expression only calls a function of the program. Anything else is evaluated in the
    test's process.
    """
    if not isinstance(expression, ast.Call) or (
        isinstance(expression.func, ast.Name) and hasattr(builtins, expression.func.id)
    ):
        return False
    arguments = [*expression.args, *(keyword.value for keyword in expression.keywords)]
    return not any(
        isinstance(node, ast.Call) for argument in arguments for node in ast.walk(argument)
    )


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
        keyed = {
            key if isinstance(key, str) else json.dumps(key, default=repr): item
            for key, item in value.items()
        }
        return keyed.keys() == expected.keys() and all(
            _close(keyed[key], item) for key, item in expected.items()
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
