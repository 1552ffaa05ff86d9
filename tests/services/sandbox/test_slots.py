"""What the server asks a sandbox and makes of its answers, with processes whose lines are given."""

import ast
import io
import json
import os
import random
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import InvalidInput
from services.sandbox import sandbox
from services.sandbox.case_formats import parse_cases
from services.sandbox.cases import Case
from services.sandbox.command import Interpreter
from services.sandbox.sandbox import Limits, Sandbox, SandboxFault

PYTHON = Interpreter(sys.executable, (), (), frozenset(["numpy"]))
CASES = [Case({"kind": "stdin", "input": str(i)}, str(i)) for i in range(4)]


class Input(io.BytesIO):
    """Keeps what was written when it is closed."""

    content = b""

    def close(self) -> None:
        self.content = self.getvalue()
        super().close()


class Process:
    """A sandbox that says these lines and ends with a status."""

    returncode = 0
    pid = 0

    def __init__(self, lines: Sequence[bytes], status: int = 0) -> None:
        self.stdin = Input()
        self.stdout = io.BytesIO(b"".join(lines))
        reader, writer = os.pipe()
        os.write(writer, b" why \n")
        os.close(writer)
        self.stderr = os.fdopen(reader, "rb")
        self._status = status

    def wait(self, timeout: float | None = None) -> int:
        return self._status

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.stderr.close()


class Scripted(Sandbox):
    """Starts the given processes, one after the other."""

    def __init__(self, *processes: Process, slots: int = 1) -> None:
        super().__init__(Limits(timeout_s=2.0, memory_mb=3, output_kb=5), slots, "none")
        self.left = list(processes)

    def _start(self, slot: int, has_tests: bool) -> Any:
        self.has_tests = has_tests
        return self.left.pop(0)


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(sandbox, "interpreters", lambda _: [PYTHON])
    monkeypatch.setattr(sandbox, "time", SimpleNamespace(sleep=found.append))
    return found


def line(output: str, status: str = "done") -> bytes:
    done = {"status": status, "output": output, "value": "null", "seconds": 0, "detail": ""}
    return json.dumps(done).encode() + b"\n"


READY = b"ready\n"


def works() -> Process:
    return Process([READY, *(line(str(i)) for i in range(4))])


def statuses(slots: Sandbox, **options: Any) -> list[str]:
    return [result.status for result in slots.run("x = 1", CASES, **options)]


def test_a_sandbox_gets_the_requests_without_what_is_expected() -> None:
    process = works()
    slots = Scripted(process)
    assert statuses(slots) == ["passed"] * 4
    assert not slots.has_tests
    assert json.loads(process.stdin.content) == {
        "source": "x = 1",
        "cases": [{"kind": "stdin", "input": str(i)} for i in range(4)],
        "timeout_s": 2.0,
        "total_s": 8.0,
        "memory_bytes": 3 << 20,
        "output_bytes": 5 << 10,
        "threads": None,
        "filter": "",
    }


@pytest.mark.parametrize(("count", "total_s"), [(1, 2.0), (5, 10.0), (6, 10.0), (50, 10.0)])
def test_all_cases_share_five_times_the_time_of_one(count: int, total_s: float) -> None:
    process = Process([READY])
    assert len(Scripted(process).run("", CASES[:1] * count)) == count
    assert json.loads(process.stdin.content)["total_s"] == total_s


@pytest.mark.parametrize("stops", [False, True])
def test_the_cases_after_a_failure_run_unless_it_decides(stops: bool) -> None:
    process = Process([READY, line("0"), line("7"), line("2", "timeout"), line("3")])
    after = ["skipped", "skipped"] if stops else ["timeout", "passed"]
    assert statuses(Scripted(process), stop_at_failure=stops) == ["passed", "wrong", *after]


def test_cases_for_which_no_time_was_left_are_skipped() -> None:
    process = Process([READY, line("0")])
    assert statuses(Scripted(process)) == ["passed", "skipped", "skipped", "skipped"]


FAULTS: dict[str, Callable[[], Process]] = {
    "it does not start": lambda: Process([b"no\n"]),
    "it says nothing": lambda: Process([]),
    "it ends with a status": lambda: Process([READY, line("0")], status=-9),
    "it is killed within a line": lambda: Process([READY, line("0")[:-1]]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_sandbox_that_fails_is_tried_again_and_gives_its_slot_back(
    fault: str, pauses: list[float]
) -> None:
    failing = FAULTS[fault]
    slots = Scripted(failing(), failing(), works(), failing(), failing(), failing(), works())
    assert statuses(slots) == ["passed"] * 4
    with pytest.raises(SandboxFault):
        statuses(slots)
    assert statuses(slots) == ["passed"] * 4
    assert pauses == [0.1, 0.2, 0.1, 0.2, 0.4]


def test_a_test_is_sent_when_its_case_begins() -> None:
    process = Process([READY, line("0"), b'"test"\n', line("")])
    test = Case({"kind": "code"}, test={"text": "assert f()"})
    slots = Scripted(process)
    with slots._process(0, 60.0, True) as running:
        sandbox._send(running, sandbox._line([1, test.test]))
        assert running.stdin is not None
        sent: Any = running.stdin
        assert sent.getvalue() == b'[1, {"text": "assert f()"}]\n'
    process = Process([READY, line("0"), b'"test"\n', line("")])
    slots = Scripted(process)
    assert [result.status for result in slots.run("", [CASES[0], test])] == ["passed", "passed"]
    assert slots.has_tests


def test_a_case_that_no_program_passes_here_is_refused() -> None:
    slots = Scripted()
    slots.check(Case({"kind": "code"}, imports=frozenset(["numpy", "mine"])), "here")
    slots.check(Case({"kind": "stdin"}, "x" * 5120), "here")
    refused: list[tuple[Case, object]] = [
        (Case({"kind": "code"}, imports=frozenset(["torch", "pandas"])), "pandas"),
        (Case({"kind": "stdin"}, "x" * 5121), "5121"),
    ]
    deep: Any = 0
    for _ in range(101):
        deep = [deep]
    refused.append((Case({"kind": "call"}, deep), "100"))
    for case, value in refused:
        with pytest.raises(InvalidInput) as caught:
            slots.check(case, "here")
        assert (caught.value.field, str(caught.value.value)) == ("here", value)


CALL = {"kind": "call", "function": "f", "args": [1], "kwargs": {}}
FORMS: list[tuple[Any, list[Case]]] = [
    ({"input": "1", "output": "2"}, [Case({"kind": "stdin", "input": "1"}, "2")]),
    ({"output": 2}, [Case({"kind": "stdin", "input": ""}, "2")]),
    (
        {"input": ["1", 2], "expected": ["3", "4"], "type": "stdin_stdout"},
        [Case({"kind": "stdin", "input": "1\n2"}, "3\n4")],
    ),
    ({"function": "f", "args": [1], "expected_output": [2]}, [Case(CALL, [2], "close")]),
    (
        {"fn_name": "f", "input": [1], "output": 2, "type": "function_call"},
        [Case(CALL, 2, "close or wrapped")],
    ),
    (
        {"func_name": "f", "args": [1], "kwargs": {"b": 3}, "output": 2},
        [Case(CALL | {"kwargs": {"b": 3}}, 2, "close")],
    ),
    (
        {"fn_name": "f", "inputs": [[1], [1]], "outputs": [2, 3]},
        [Case(CALL, 2, "close or wrapped"), Case(CALL, 3, "close or wrapped")],
    ),
    (
        {"inputs": ["1", "2"], "outputs": ["3", "4"]},
        [
            Case({"kind": "stdin", "input": "1"}, "3"),
            Case({"kind": "stdin", "input": "2"}, "4"),
        ],
    ),
    (
        {
            "input": '1\n\n{"a": 2}\n',
            "output": "[3]",
            "testtype": "functional",
            "metadata": {"func_name": "f"},
        },
        [Case(CALL | {"args": [1, {"a": 2}]}, [3], "close")],
    ),
    ("assert f(1) == 2", [Case({"kind": "value", "expression": "f(1)"}, 2, "==")]),
    ("assert 2 != f(1)", [Case({"kind": "value", "expression": "f(1)"}, 2, "!=")]),
    ("assert f(1) is None", [Case({"kind": "value", "expression": "f(1)"}, None, "is")]),
    (
        "assert Solution().f(1) == -2",
        [Case({"kind": "value", "expression": "Solution().f(1)"}, -2, "==")],
    ),
]


@pytest.mark.parametrize("number", range(len(FORMS)))
def test_the_forms_of_a_case(number: int) -> None:
    column, expected = FORMS[number]
    assert parse_cases(column) == expected
    assert parse_cases([column, column]) == expected * 2
    if not isinstance(column, str):
        assert parse_cases(json.dumps([column])) == expected


@pytest.mark.parametrize(
    "test",
    [
        "assert len(f(1)) == 2",  # the builtin is evaluated in the test's process
        "assert f(g(1)) == 2",
        "assert f(1) is 2",
        "assert f(1) == 2 == 2",
        "assert f(1) + 1 == 2",
        "assert f(1) == 2\nassert f(2) == 3",
        "assert f(1) < 2",
        "assert f(1) == x",
    ],
)
def test_any_other_comparison_is_a_test_in_python(test: str) -> None:
    [case] = parse_cases([test], entry_point="g")
    assert case.request == {"kind": "code"}
    assert case.test == {"text": test, "tests": [], "entry_point": "g"}
    assert case.imports == frozenset()
    with_imports = f"import numpy.linalg as la, json\nfrom a.b import c\nfrom . import d\n{test}"
    assert parse_cases([with_imports])[0].imports == {"numpy", "json", "a", "None"}


def junk(draws: random.Random, depth: int = 2) -> Any:
    """Returns what a column of a data set may hold by mistake."""
    names = ["input", "output", "expected", "function", "args", "inputs", "outputs", "type"]
    names += ["testtype", "metadata", "test", "entry_point", "kwargs", "fn_name", "other"]
    kind = draws.randrange(8 if depth else 5)
    if kind < 5:
        texts = ["", "1", "f", "[1", "stdin", "functional", "function_call", "assert f(1) == 2"]
        return [None, draws.choice([True, 0, 2.5]), *[draws.choice(texts)] * 3][kind]
    if kind == 5:
        return [junk(draws, depth - 1) for _ in range(draws.randrange(3))]
    count = draws.randrange(1, 4)
    return {draws.choice(names): junk(draws, depth - 1) for _ in range(count)}


def read_or_refused(column: Any) -> list[Case] | InvalidInput:
    try:
        return parse_cases(column, "column")
    except InvalidInput as error:
        return error


def test_a_column_is_read_or_refused() -> None:
    draws = random.Random(0)
    read = 0
    for _ in range(1500):
        found = read_or_refused(junk(draws))
        if isinstance(found, InvalidInput):
            assert str(found.field).startswith("column")
            assert found.message
            continue
        read += 1
        assert found
        for case in found:
            assert case.request["kind"] in ("stdin", "call", "value", "code")
            assert (case.test is None) == (case.request["kind"] != "code")
    assert read > 50


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ([5], "not a test case"),
        ([], "no test cases"),
        ("[]", "no test cases"),
        (5, "no test cases"),
        ({"inputs": ["1"], "outputs": []}, "one length"),
        ({"inputs": ["1"]}, "one length"),
        ({"inputs": "1", "outputs": ["1"]}, "one length"),
        ({"input": "1"}, "output: "),
        ({"input": "1", "output": "2", "more": 3}, "more: "),
        ({"input": {}, "output": "2"}, "input."),
        ({"function": "f", "args": 5, "output": 2}, "args: "),
        ({"type": "functional", "input": "[1", "output": "2"}, "Expecting"),
        ({"function": "f", "kwargs": [], "output": 2}, "kwargs: "),
        ({"test": 5}, "test: "),
        ({"type": "other", "input": "1", "output": "2"}, "type: "),
    ],
)
def test_a_case_that_is_none_says_why(column: Any, words: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        parse_cases(column, "tests")
    assert words in refused.value.message
    is_empty = "no test cases" in words
    assert refused.value.field == ("tests" if is_empty else "tests[0]")
    if not is_empty and isinstance(column, dict):
        assert ast.literal_eval(str(refused.value.value)) == column


def test_a_case_of_livecodebench_may_have_values_of_json() -> None:
    case = {"testtype": "functional", "input": [1, 2], "output": [3], "function": "f"}
    [parsed] = parse_cases([case])
    assert (parsed.request["args"], parsed.expected) == ([1, 2], [3])
