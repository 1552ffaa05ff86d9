"""Reads the test cases of one problem, in the formats in which public data sets keep them."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NoReturn

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, StrictStr, ValidationError

from common import Json
from common.errors import InvalidInput
from services.sandbox.cases import Case
from services.sandbox.python_tests import parse_test

_FUNCTION = ("function", "fn_name", "func_name")
_OUTPUT = AliasChoices("output", "expected_output", "expected")
_Words = StrictStr | int | float
_FORMS = (
    'give {"input": text, "output": text}, {"function": name, "args": [...], "output": value}, '
    '{"inputs": [...], "outputs": [...]}, {"test": text, "entry_point": name} or Python tests'
)


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Test(_Row):
    """A test in Python."""

    test: str
    entry_point: str = ""


class _Comparison(_Row):
    """What all other cases may have."""

    kind: Literal["stdin", "stdin_stdout", "function_call", "functional"] | None = Field(
        None, validation_alias=AliasChoices("type", "testtype")
    )
    metadata: Any = None


class _Program(_Comparison):
    """A program that reads standard input. APPS keeps lines in lists."""

    input: _Words | list[_Words] = ""
    expected: _Words | list[_Words] = Field(validation_alias=_OUTPUT)


class _Call(_Comparison):
    """A call of a function; its arguments are `args`, or a list called `input`."""

    function: str
    args: list[Any] = Field([], validation_alias=AliasChoices("args", "input"))
    named: Json = Field({}, validation_alias=AliasChoices("kwargs"))
    expected: Any = Field(validation_alias=_OUTPUT)


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
        try:
            for one in _split(case):
                parsed.append(_parse_case(one, here, entry_point))
        except ValidationError as error:
            problem = error.errors()[0]
            place = ".".join(map(str, problem["loc"]))
            _refuse(f"{place}: {problem['msg']}", case, here)
        except ValueError as error:
            _refuse(str(error), case, here)
    if not parsed:
        raise InvalidInput(
            "there are no test cases",
            field=where,
            value=cases,
            remedy="give a list of at least one case",
        )
    return parsed


def _split(case: Any) -> Iterator[Any]:
    """Yields the cases of `{"inputs": [...], "outputs": [...]}`, the form of APPS and TACO, and any
    other case as it is. Raises ValueError when the two lists differ in length.
    """
    if not isinstance(case, Mapping) or "inputs" not in case:
        yield case
        return
    common = dict(case)
    inputs = common.pop("inputs")
    outputs = common.pop("outputs", None)
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError("inputs and outputs are not two lists of one length")
    if any(name in common for name in _FUNCTION):
        common.setdefault("type", "function_call")
    for given, expected in zip(inputs, outputs, strict=True):
        yield {**common, "input": given, "output": expected}


def _parse_case(case: Any, where: str, entry_point: str) -> Case:
    """Returns the case of one form. Raises InvalidInput, ValidationError or ValueError."""
    if isinstance(case, str):
        return parse_test(case, where, entry_point)
    if not isinstance(case, Mapping):
        raise ValueError("this is not a test case")
    if "test" in case:
        test = _Test.model_validate(case)
        return parse_test(test.test, where, test.entry_point or entry_point)

    kind = case.get("type", case.get("testtype"))
    metadata = case.get("metadata")
    places = (case, metadata if isinstance(metadata, Mapping) else {})
    names = [place[key] for place in places for key in _FUNCTION if key in place]
    if not names and kind not in ("function_call", "functional"):
        program = _Program.model_validate(case)
        return Case({"kind": "stdin", "input": _text(program.input)}, _text(program.expected))

    content = {key: value for key, value in case.items() if key not in _FUNCTION}
    if names:
        content["function"] = names[0]
    call = _Call.model_validate(_read_lines(content) if kind == "functional" else content)
    request = {
        "kind": "call",
        "function": call.function,
        "args": call.args,
        "kwargs": call.named,
    }
    may_be_wrapped = kind == "function_call"
    return Case(request, call.expected, "close or wrapped" if may_be_wrapped else "close")


def _text(lines: Any) -> str:
    return "\n".join(map(str, lines if isinstance(lines, list) else [lines]))


def _read_lines(content: Json) -> Json:
    """Reads the JSON of LiveCodeBench: the output, and one argument a line of the input. Raises
    ValueError.
    """
    read = dict(content)
    if isinstance(read.get("output"), str):
        read["output"] = json.loads(read["output"])
    if isinstance(read.get("input"), str):
        read["input"] = [json.loads(line) for line in read["input"].splitlines() if line.strip()]
    return read


def _refuse(problem: str, case: Any, where: str) -> NoReturn:
    raise InvalidInput(problem, field=where, value=case, remedy=_FORMS) from None
