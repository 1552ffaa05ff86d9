"""Reads tests that are written in Python, and refuses those that cannot fail.

A test has one of four forms: statements that run (asserts, also behind a main guard), functions
`test_*` and classes `Test*` (pytest), cases of unittest, or `check(candidate)` (HumanEval). Which
functions and classes run is decided here alone; `services.sandbox.suite` runs them.
"""

import ast
import builtins
import itertools
import re
import sys
from collections.abc import Iterator
from typing import NoReturn

from common.errors import InvalidInput
from services.sandbox.cases import Case
from services.sandbox.command import PACKAGES

_CHECKS = re.compile(r"assert|raises\Z|fail|_?exit\Z|quit\Z", re.IGNORECASE)
"""Names of functions that may end a test (`self.assertEqual`, `pytest.raises`, `sys.exit`)."""
_UNCOUNTED = re.compile(r"\b(?:skip|xfail|expectedFailure)\b")
"""Decorators of a test that no program can fail."""
_MOCK = ("mock", "unittest.mock")
_PYTEST = frozenset(("approx", "fail", "fixture", "main", "mark", "param", "raises"))
"""What there is of pytest: the names in `services.sandbox.pytest_names`."""
_SKIPS = frozenset(("importorskip", "skip", "skipTest", "SkipTest"))
_STREAMS = ("sys.stdin", "sys.stdout", "sys.stderr")
_NUMPY_ASSERTS = ("assert_allclose", "assert_array_equal")
"""Functions of numpy that a test has without an import (`services.sandbox.program_names`)."""
_CATCHING = ("AssertionError", "Exception", "BaseException")
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Definition = _Function | ast.ClassDef


def parse_test(text: str, where: str, entry_point: str = "") -> Case:
    """Returns the case of a Python test.

    `assert f(…) == literal` is compared outside the sandbox, which never sees the literal.
    Anything else runs inside.

    Raises:
        InvalidInput: the text is not Python, nothing in it can fail, or it needs what is not here.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        _refuse(f"the test is not valid Python: {error}", text, where, "correct the test")

    comparison = _parse_comparison(tree.body)
    if comparison is not None:
        return comparison
    undefined = _undefined_asserts(tree)
    if undefined:
        _refuse(
            f"{min(undefined)} is not defined in the test, so the program would define it",
            text,
            where,
            "define it in the test, or use assert",
        )
    for node in ast.walk(tree):
        problem = _patched(node) or _skipped(node) or _always_true(node) or _swallowed(node, tree)
        if problem is not None:
            _refuse(problem[0], text, where, problem[1])
    tests = _tests(tree, text, where)
    _refuse_idle(tree, tests, text, where)
    code = {"text": text, "tests": tests, "entry_point": entry_point}
    return Case({"kind": "code", "code": code}, imports=_imports(tree))


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
        is_identity = isinstance(operator, ast.Is)
        is_single = expected is None or isinstance(expected, bool)
        if not _is_call(expression) or (is_identity and not is_single):
            return None
        request = {"kind": "value", "expression": ast.unparse(expression)}
        equal = not isinstance(operator, ast.NotEq)
        return Case(request, expected, equal=equal, identical=is_identity)
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


# Which functions and classes run


def _tests(tree: ast.Module, text: str, where: str) -> list[str]:
    """Returns the names of the functions and classes that run after the statements of a test.

    The cases of unittest are not among them: unittest finds them itself. Raises InvalidInput for a
    test function whose argument nothing provides.
    """
    fixtures = _fixtures(tree)
    names: list[str] = []
    for definition in _definitions(tree):
        if _never_counts(definition):
            continue
        if isinstance(definition, ast.ClassDef):
            if definition.name.startswith("Test") and not _is_unittest(definition, tree):
                names.append(definition.name)
                for method in _methods(definition):
                    _refuse_missing(method, fixtures, text, where)
        elif definition.name == "check":
            # `check(candidate)` gets the tested function; with other arguments it is a helper.
            if len(_required(definition)) == 1 and not _is_used(definition, tree):
                names.append(definition.name)
        elif definition.name.startswith("test"):
            if _is_used(definition, tree) and _missing(definition, fixtures):
                continue  # others call it with arguments
            _refuse_missing(definition, fixtures, text, where)
            names.append(definition.name)
    return names


def _definitions(tree: ast.Module) -> list[_Definition]:
    return [statement for statement in tree.body if isinstance(statement, _Definition)]


def _never_counts(definition: _Definition) -> bool:
    """Whether a test is skipped, or may fail: then any program passes it."""
    decorators = map(ast.unparse, definition.decorator_list)
    return any(_UNCOUNTED.search(decorator) for decorator in decorators)


def _is_unittest(definition: ast.ClassDef, tree: ast.Module) -> bool:
    """Whether a class derives from `unittest.TestCase`, perhaps by another class of the text."""
    classes = {each.name: each for each in _definitions(tree) if isinstance(each, ast.ClassDef)}
    for base in map(ast.unparse, definition.bases):
        if base.endswith("TestCase"):
            return True
        if base in classes and base != definition.name and _is_unittest(classes[base], tree):
            return True
    return False


def _methods(definition: ast.ClassDef) -> list[_Function]:
    """Returns the methods of a class that are tests."""
    methods = [item for item in definition.body if isinstance(item, _Function)]
    named = [method for method in methods if method.name.startswith("test")]
    return [method for method in named if not _never_counts(method)]


def _is_used(definition: _Definition, tree: ast.Module) -> bool:
    """Whether another statement of the module names a function."""
    others = (statement for statement in tree.body if statement is not definition)
    nodes = itertools.chain.from_iterable(map(ast.walk, others))
    return any(isinstance(node, ast.Name) and node.id == definition.name for node in nodes)


def _required(function: _Function) -> list[str]:
    """Returns the names of the arguments without a default, but for `self`."""
    arguments = function.args.posonlyargs + function.args.args
    required = arguments[: len(arguments) - len(function.args.defaults)]
    return [argument.arg for argument in required if argument.arg not in ("self", "cls")]


def _fixtures(tree: ast.Module) -> set[str]:
    """Returns the names of the fixtures that a test defines."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if not isinstance(node, _Function):
            continue
        for decorator in node.decorator_list:
            if "fixture" in ast.unparse(decorator):
                names |= {node.name, *_texts(decorator)}
    return names


def _missing(function: _Function, fixtures: set[str]) -> list[str]:
    """Returns the arguments that neither a fixture nor `parametrize` provides."""
    provided = set(fixtures)
    for decorator in function.decorator_list:
        provided.update(_texts(decorator))
    return [name for name in _required(function) if name not in provided]


def _texts(decorator: ast.expr) -> Iterator[str]:
    """Yields the words in the texts of a decorator, such as the names of `parametrize`."""
    for node in ast.walk(decorator):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.split(r"[,\s]+", node.value)


def _refuse_missing(function: _Function, fixtures: set[str], text: str, where: str) -> None:
    for name in _missing(function, fixtures):
        _refuse(
            f"the fixture {name!r} of {function.name} does not exist here",
            text,
            where,
            "define it in the test with @pytest.fixture",
        )


# Tests that cannot work


def _refuse_idle(tree: ast.Module, tests: list[str], text: str, where: str) -> None:
    """Raises InvalidInput when nothing that runs can fail."""
    caught = set(_caught_checks(tree))
    reached = (node for node in _reached(tree, tests) if node not in caught)
    if any(map(_can_fail, reached)):
        return
    if any(map(_can_fail, ast.walk(tree))):
        _refuse(
            "the test's asserts are in functions that nothing calls, or that are skipped",
            text,
            where,
            "call them, or name the functions test_…, or one of them check(candidate)",
        )
    _refuse("the test asserts nothing", text, where, "add an assert, or remove the test")


def _reached(tree: ast.Module, tests: list[str]) -> Iterator[ast.AST]:
    """Yields the nodes that run: the statements of the module, the tests, and what these name."""
    named: dict[str, list[_Function]] = {}
    for node in ast.walk(tree):
        if isinstance(node, _Function):
            named.setdefault(node.name, []).append(node)

    waiting = _roots(tree, tests)
    seen: set[int] = set()
    while waiting:
        root = waiting.pop()
        if id(root) in seen:
            continue
        seen.add(id(root))
        for node in ast.walk(root):
            yield node
            if isinstance(node, ast.Name):
                waiting += named.get(node.id, [])
            elif isinstance(node, ast.Attribute):
                waiting += named.get(node.attr, [])


def _roots(tree: ast.Module, tests: list[str]) -> list[ast.AST]:
    """Returns what runs by itself; of a class only its tests."""
    roots: list[ast.AST] = []
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef):
            runs = statement.name in tests or _is_unittest(statement, tree)
            if runs and not _never_counts(statement):
                roots += _methods(statement)
        elif not isinstance(statement, _Function) or statement.name in tests:
            roots.append(statement)
    return roots


def _can_fail(node: ast.AST) -> bool:
    if isinstance(node, ast.Assert):
        return not isinstance(node.test, ast.Constant) or not node.test.value
    if isinstance(node, ast.Call):
        function = node.func
        if isinstance(function, ast.Attribute):
            return bool(_CHECKS.match(function.attr))
        return isinstance(function, ast.Name) and bool(_CHECKS.match(function.id))
    return isinstance(node, ast.Raise)


_Problem = tuple[str, str] | None
"""What is wrong with a test, and the remedy."""


def _patched(node: ast.AST) -> _Problem:
    """Finds what changes the test's process alone, as `unittest.mock.patch` does."""
    is_redirected = isinstance(node, ast.Name) and node.id.startswith("redirect_std")
    is_redirected |= isinstance(node, ast.Attribute) and node.attr.startswith("redirect_std")
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        is_redirected |= ast.unparse(node) in _STREAMS
    if is_redirected or _patches(node):
        return (
            "patches do not reach the program, which runs in a process of its own",
            "test what the program returns, or give it input and compare its output",
        )
    return None


def _patches(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom) and node.module in _MOCK:
        return "patch" in [alias.name for alias in node.names]
    is_patch = isinstance(node, ast.Attribute) and node.attr == "patch"
    return is_patch and ast.unparse(node).removesuffix(".patch") in _MOCK


def _skipped(node: ast.AST) -> _Problem:
    """Finds a test that skips itself while it runs, and what is missing of pytest."""
    names: list[str] = []
    owner: str | None = None
    if isinstance(node, ast.ImportFrom):
        owner = node.module
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.Attribute):
        owner = getattr(node.value, "id", None)
        names = [node.attr]
    if owner not in ("pytest", "unittest", "self"):
        return None
    # With the decorator `unittest.skip` a test never counts.
    if _SKIPS.intersection(names) and (owner, names) != ("unittest", ["skip"]):
        return "a test that skips itself checks nothing", "remove the skip, or the test"
    missing = [name for name in names if owner == "pytest" and name not in _PYTEST]
    if missing:
        return f"there is no pytest.{missing[0]} here", f"use only {', '.join(sorted(_PYTEST))}"
    return None


def _undefined_asserts(tree: ast.Module) -> set[str]:
    """Returns the functions `assert…` that a test calls and that nobody but the program has."""
    called: set[str] = set()
    known: set[str] = set(_NUMPY_ASSERTS)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called.add(node.func.id)
        elif isinstance(node, _Function):
            known |= {node.name, *_required(node)}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            known.add(node.id)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            root = str(node.module).partition(".")[0]
            if root in sys.stdlib_module_names or root in PACKAGES.split():
                known |= {alias.asname or alias.name for alias in node.names}
    return {name for name in called - known if name.startswith("assert")}


def _always_true(node: ast.AST) -> _Problem:
    """Finds an assert that no value fails, such as `assert (x == y, "message")`."""
    condition: ast.expr | None = None
    if isinstance(node, ast.Assert):
        condition = node.test
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        condition = node.args[0] if node.func.attr in ("assertTrue", "assert_") else None
    if condition is None or isinstance(condition, ast.Constant) or not _is_true(condition):
        return None
    shown = ast.unparse(node)
    return f"no program fails `{shown:.60}`", "remove the parentheses, or what makes it true"


def _is_true(expression: ast.expr) -> bool:
    """Whether an expression is true whatever the values in it."""
    if isinstance(expression, ast.Constant):
        return bool(expression.value)
    if isinstance(expression, (ast.Tuple, ast.List, ast.Set)):
        return any(not isinstance(item, ast.Starred) for item in expression.elts)
    if isinstance(expression, ast.Dict):
        return any(key is not None for key in expression.keys)
    if isinstance(expression, ast.JoinedStr):
        return any(map(_is_true, expression.values))
    if isinstance(expression, ast.BoolOp):
        parts = map(_is_true, expression.values)
        return any(parts) if isinstance(expression.op, ast.Or) else all(parts)
    if isinstance(expression, ast.NamedExpr):
        return _is_true(expression.value)
    return isinstance(expression, (ast.Lambda, ast.GeneratorExp))


def _swallowed(node: ast.AST, tree: ast.Module) -> _Problem:
    """Finds an assert whose failure nobody learns of."""
    for check, handler in _handlers(node, tree):
        if handler is None or not _tells(handler, tree):
            return (
                f"nobody learns that `{ast.unparse(check):.60}` has failed",
                "remove the `try` or `suppress` around it, or catch less than AssertionError",
            )
    return None


def _caught_checks(tree: ast.Module) -> Iterator[ast.AST]:
    """Yields the asserts whose failure a test catches and only notes."""
    for node in ast.walk(tree):
        for check, handler in _handlers(node, tree):
            if handler is not None and not any(map(_can_fail, ast.walk(handler))):
                yield check


def _handlers(
    node: ast.AST, tree: ast.Module
) -> Iterator[tuple[ast.AST, ast.ExceptHandler | None]]:
    """Yields the asserts in a `try`, and the calls of functions with asserts, with the handler of
    their failure; for those below a `suppress`, None.
    """
    handler: ast.ExceptHandler | None = None
    if isinstance(node, ast.Try):
        catching = [each for each in node.handlers if each.type is None or _catches(each.type)]
        if not catching:
            return
        handler = catching[0]
    elif isinstance(node, ast.With):
        calls = [item.context_expr for item in node.items]
        if not any(isinstance(call, ast.Call) and _suppresses(call) for call in calls):
            return
    else:
        return
    # A function test… runs by itself, too.
    checking = {
        each.name
        for each in _definitions(tree)
        if not each.name.startswith("test") and any(map(_is_check, ast.walk(each)))
    }
    for statement in node.body:
        for inner in ast.walk(statement):
            called = isinstance(inner, ast.Call) and getattr(inner.func, "id", "") in checking
            if called or _is_check(inner):
                yield inner, handler


def _is_check(node: ast.AST) -> bool:
    """Whether a node raises AssertionError when a program is wrong."""
    if isinstance(node, ast.Raise):
        return node.exc is not None and "AssertionError" in ast.unparse(node.exc)
    return isinstance(node, (ast.Assert, ast.Call)) and _can_fail(node) and not _exits(node)


def _exits(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("exit", "quit"))


def _catches(kind: ast.expr) -> bool:
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(ast.unparse(each).removeprefix("builtins.") in _CATCHING for each in kinds)


def _suppresses(call: ast.Call) -> bool:
    return ast.unparse(call.func).endswith("suppress") and any(map(_catches, call.args))


def _tells(handler: ast.ExceptHandler, tree: ast.Module) -> bool:
    """Whether a handler ends the test, or notes the failure where the test looks for it."""
    inside = list(ast.walk(handler))
    noted: set[str] = set()
    for node in inside:
        if _can_fail(node):
            return True
        if isinstance(node, ast.Return) and node.value is not None:
            return True
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            noted.add(node.id)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            noted |= {each.id for each in ast.walk(node.func) if isinstance(each, ast.Name)}
    outside = set(ast.walk(tree)).difference(inside)
    return any(
        isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in noted
        for node in outside
    )


def _imports(tree: ast.Module) -> frozenset[str]:
    """Returns the names of the modules that a test imports."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(str(node.module).partition(".")[0])
    return frozenset(names)
