"""Reads the test cases of one problem, in the formats in which public data sets keep them."""

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from common.errors import InvalidInput
from services.sandbox.cases import Case
from services.sandbox.python_tests import parse_test

_FUNCTION = ("function", "fn_name", "func_name")
_OUTPUT = ("output", "expected_output", "expected")
_KIND = ("type", "testtype")
_CALLS = ("function_call", "functional")
_KINDS = ("stdin", "stdin_stdout", *_CALLS)
_FORMS = (
    'give {"input": text, "output": text}, {"function": name, "args": [...], "output": value}, '
    '{"inputs": [...], "outputs": [...]}, {"test": text, "entry_point": name} or Python tests'
)


def parse_cases(cases: Any, where: str = "test_cases", entry_point: str = "") -> list[Case]:
    """Returns the test cases of one problem.

    Args:
        cases: the column of the data set: a case, a list of cases, JSON text of either, or Python
            tests. docs/how-to/rewards.md lists the forms of a case.
        where: the field, for errors.
        entry_point: the function that `check(candidate)` gets, where the test does not say.

    Raises:
        InvalidInput: a case has none of these forms, or its test checks nothing.
    """
    if isinstance(cases, str):
        try:
            cases = json.loads(cases)
        except ValueError:
            cases = [cases]
    if isinstance(cases, Mapping):
        cases = [cases]
    parsed: list[Case] = []
    for i, case in enumerate(cases if isinstance(cases, (list, tuple)) else []):
        here = f"{where}[{i}]"
        is_table = isinstance(case, Mapping) and "inputs" in case
        for one in _split(case, here) if is_table else [case]:
            parsed.append(_parse_case(one, here, entry_point))
    if not parsed:
        raise InvalidInput(
            "there are no test cases",
            field=where,
            value=cases,
            remedy="give a list of at least one case",
        )
    return parsed


def _split(table: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Returns the cases of `{"inputs": [...], "outputs": [...]}`, the form of APPS and TACO."""
    inputs = table["inputs"]
    outputs = table.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        _refuse("inputs and outputs are not two lists of one length", table, where)

    common = {key: value for key, value in table.items() if key not in ("inputs", "outputs")}
    if any(name in common for name in _FUNCTION):
        common.setdefault("type", "function_call")
    pairs = zip(inputs, outputs, strict=True)
    return [{**common, "input": given, "output": expected} for given, expected in pairs]


def _parse_case(case: Any, where: str, entry_point: str) -> Case:
    if isinstance(case, str):
        return parse_test(case, where, entry_point)
    if not isinstance(case, Mapping):
        _refuse("this is not a test case", case, where)

    left = dict(case)
    if "test" in left:
        text = left.pop("test")
        name = left.pop("entry_point", entry_point)
        _refuse_keys(left, case, where)
        if not isinstance(text, str) or not isinstance(name, str):
            _refuse("test and entry_point are texts", case, where)
        return parse_test(text, where, name)

    kind = _pop(left, _KIND)
    metadata = left.pop("metadata", None) or {}
    name = _pop(left, _FUNCTION)
    if name is None and isinstance(metadata, Mapping):
        name = _pop(dict(metadata), _FUNCTION)
    if kind is not None and kind not in _KINDS:
        _refuse(f"{kind!r} is no type of case; there are {', '.join(_KINDS)}", case, where)
    if not any(key in left for key in _OUTPUT):
        _refuse("there is no expected output", case, where)
    expected = _pop(left, _OUTPUT)

    if name is None and kind not in _CALLS:
        given = left.pop("input", "")
        _refuse_keys(left, case, where)
        return _program_case(given, expected, case, where)
    if not isinstance(name, str):
        _refuse("a call needs the name of its function", case, where)
    request = {
        "kind": "call",
        "function": name,
        "args": _arguments(left, kind, case, where),
        "kwargs": left.pop("kwargs", {}),
    }
    _refuse_keys(left, case, where)
    if kind == "functional":
        expected = _json(expected, case, where)
    return Case(request, expected, exact=False, may_be_wrapped=kind == "function_call")


def _program_case(given: Any, expected: Any, case: Any, where: str) -> Case:
    """Returns the case of a program that reads standard input. APPS keeps lines in lists."""
    texts = []
    for value in (given, expected):
        parts = value if isinstance(value, list) else [value]
        if not all(isinstance(part, (str, int, float)) for part in parts):
            _refuse("the input and the output of a program are texts", case, where)
        texts.append("\n".join(map(str, parts)))
    return Case({"kind": "stdin", "input": texts[0]}, texts[1])


def _arguments(left: dict[str, Any], kind: Any, case: Any, where: str) -> list[Any]:
    """Returns the positional arguments of a call: `args`, or a list called `input`.

    LiveCodeBench (`testtype: functional`) gives one JSON value a line.
    """
    if "args" in left and "input" in left:
        _refuse("a call has either args or input", case, where)
    arguments = left.pop("args", None) if "args" in left else left.pop("input", [])
    if kind == "functional" and isinstance(arguments, str):
        return [_json(line, case, where) for line in arguments.splitlines() if line.strip()]
    if not isinstance(arguments, list):
        _refuse("the arguments of a call are a list", case, where)
    return arguments


def _json(text: Any, case: Any, where: str) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError:
        _refuse(f"{text!r:.80} is not JSON", case, where)


def _pop(mapping: dict[str, Any], names: tuple[str, ...]) -> Any:
    """Removes and returns the value of the first name that is there."""
    for name in names:
        if name in mapping:
            return mapping.pop(name)
    return None


def _refuse_keys(left: Mapping[str, Any], case: Any, where: str) -> None:
    if left:
        _refuse(f"the key {next(iter(left))!r} means nothing here", case, where)


def _refuse(problem: str, case: Any, where: str) -> NoReturn:
    raise InvalidInput(problem, field=where, value=case, remedy=_FORMS)
