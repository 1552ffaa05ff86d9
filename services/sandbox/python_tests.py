"""Reads tests that are written in Python, and refuses those that cannot fail.

A test has one of four forms: statements that run (asserts, also behind a main guard), functions
`test_*` (pytest), cases of unittest, or `check(candidate)` (HumanEval). `services.sandbox.suite`
runs the functions and classes of the last three.
"""

import ast
import builtins
import re
from collections.abc import Iterable, Iterator
from typing import NoReturn

from common.errors import InvalidInput
from services.sandbox.cases import Case

_CHECKS = re.compile(r"assert|raises\Z|fail|_?exit\Z|quit\Z", re.IGNORECASE)
"""Names of functions that may end a test (`self.assertEqual`, `pytest.raises`, `sys.exit`)."""
_FIXTURES = {"self", "cls", "request"}
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def parse_test(text: str, where: str, entry_point: str = "") -> Case:
    """Returns the case of a Python test.

    `assert f(…) == literal` is compared outside the sandbox, which never sees the literal.
    Anything else runs inside.

    Raises:
        InvalidInput: the text is not Python, or nothing in it can fail.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        _refuse(f"the test is not valid Python: {error}", text, where, "correct the test")

    comparison = _parse_comparison(tree.body)
    if comparison is not None:
        return comparison
    _refuse_idle(tree, text, where)
    _refuse_fixtures(tree, text, where)
    return Case({"kind": "code", "code": text, "entry_point": entry_point})


def _refuse(problem: str, text: str, where: str, remedy: str) -> NoReturn:
    raise InvalidInput(problem, field=where, value=text, remedy=remedy) from None


# A single comparison


def _parse_comparison(statements: list[ast.stmt]) -> Case | None:
    """Returns the case of a single `assert f(…) == literal`, in either order; None for anything
    else.
    """
    first = statements[0] if len(statements) == 1 else None
    test = first.test if isinstance(first, ast.Assert) else None
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


# Tests that check nothing


def _refuse_idle(tree: ast.Module, text: str, where: str) -> None:
    """Raises InvalidInput when nothing that runs can fail."""
    reached = list(_reached(tree))
    if any(map(_can_fail, reached)):
        return
    if any(map(_can_fail, ast.walk(tree))):
        _refuse(
            "the test's asserts are in functions that nothing calls",
            text,
            where,
            "call them, or name the functions test_…, or one of them check(candidate)",
        )
    _refuse("the test asserts nothing", text, where, "add an assert, or remove the test")


def _reached(tree: ast.Module) -> Iterator[ast.AST]:
    """Yields the nodes that run: the statements of the module, the tests, and what these use."""
    definitions: dict[str, ast.AST] = {}
    waiting: list[ast.AST] = []
    for statement in tree.body:
        if isinstance(statement, _DEFINITIONS):
            definitions[statement.name] = statement
        else:
            waiting.append(statement)
    waiting += filter(_is_test, definitions.values())

    seen: set[int] = set()
    while waiting:
        root = waiting.pop()
        if id(root) in seen:
            continue
        seen.add(id(root))
        for node in ast.walk(root):
            yield node
            if isinstance(node, ast.Name) and node.id in definitions:
                waiting.append(definitions[node.id])


def _is_test(definition: ast.AST) -> bool:
    """Whether `services.sandbox.suite` runs a function or class of this name."""
    if isinstance(definition, ast.ClassDef):
        bases = [ast.unparse(base) for base in definition.bases]
        return definition.name.startswith("Test") or any("Test" in base for base in bases)
    if isinstance(definition, _Function):
        # `check` gets the tested function, and nothing else.
        arguments = definition.args.posonlyargs + definition.args.args
        required = len(arguments) - len(definition.args.defaults)
        is_check = definition.name == "check" and required == 1
        return definition.name.startswith("test") or is_check
    return False


def _can_fail(node: ast.AST) -> bool:
    if isinstance(node, ast.Assert):
        return not isinstance(node.test, ast.Constant) or not node.test.value
    if isinstance(node, ast.Call):
        function = node.func
        if isinstance(function, ast.Attribute):
            return bool(_CHECKS.match(function.attr))
        return isinstance(function, ast.Name) and bool(_CHECKS.match(function.id))
    return isinstance(node, ast.Raise)


# Fixtures


def _refuse_fixtures(tree: ast.Module, text: str, where: str) -> None:
    """Raises InvalidInput for a test function whose argument nothing provides."""
    functions = [node for node in ast.walk(tree) if isinstance(node, _Function)]
    provided = _FIXTURES | {function.name for function in functions if function.decorator_list}
    for function in functions:
        if not function.name.startswith("test"):
            continue
        arguments = function.args.posonlyargs + function.args.args
        required = arguments[: len(arguments) - len(function.args.defaults)]
        known = provided | set(_parameters(function.decorator_list))
        for argument in required:
            if argument.arg not in known and not _is_called(function.name, tree):
                _refuse(
                    f"the fixture {argument.arg!r} of {function.name} does not exist here",
                    text,
                    where,
                    "define it in the test with @pytest.fixture",
                )


def _parameters(decorators: Iterable[ast.expr]) -> Iterator[str]:
    """Yields the argument names of `@pytest.mark.parametrize` and of `@patch` decorators."""
    for decorator in decorators:
        for node in ast.walk(decorator):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from re.split(r"[,\s]+", node.value)


def _is_called(name: str, tree: ast.Module) -> bool:
    return any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(tree))
