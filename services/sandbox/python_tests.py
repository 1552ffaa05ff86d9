"""Reads tests that are written in Python, and refuses those that cannot fail.

A test has one of four forms: statements that run (asserts, also behind a main guard), functions
`test_*` and classes `Test*` (pytest), cases of unittest, or `check(candidate)` (HumanEval). Which
functions and classes run is decided here alone; `services.sandbox.suite` runs them.

Only what the text alone shows is refused here. Whether the checks of a test hold, and whether any
was executed, is decided by the run (`services.sandbox.remote`).
"""

import ast
import builtins
import re
import symtable
import sys
from collections.abc import Iterator

from common.errors import InvalidInput
from services.sandbox.cases import Case, Comparison
from services.sandbox.command import PACKAGES
from services.sandbox.program_names import global_names
from services.sandbox.python_source import parse_python

# Names of functions that may end a test (`self.assertEqual`, `pytest.raises`, `sys.exit`).
_CHECKS = re.compile(r"assert|raises\Z|fail|_?exit\Z|quit\Z", re.IGNORECASE)
# Decorators of a test that no program can fail.
_UNCOUNTED = re.compile(r"\b(?:skip|xfail|expectedFailure)\b")
# What there is of pytest: the names in `services.sandbox.pytest_names`.
_PYTEST = ("approx", "fail", "fixture", "main", "mark", "param", "raises")
# Names that a test cannot use, as `_used_names` writes them; the problem; the remedy.
_UNSUPPORTED = (
    (
        r"(?:unittest\.)?mock\.patch|.*\bredirect_std\w+|sys\.std(?:in|out|err) =",
        "patches do not reach the program, which runs in a process of its own",
        "test what the program returns, or give it input and compare its output",
    ),
    (
        r"(?:pytest|self)\.skip(?:Test)?|pytest\.importorskip|unittest\.SkipTest",
        "a test that skips itself checks nothing",
        "remove the skip, or the test",
    ),
    (
        rf"pytest\.(?!(?:{'|'.join(_PYTEST)})\Z)[^.]+",
        "there is no {name} here",
        f"of pytest use only {', '.join(_PYTEST)}",
    ),
)
# Functions of numpy that a test has without an import (`services.sandbox.program_names`).
_NUMPY_ASSERTS = {"assert_allclose", "assert_array_equal"}
_COMPARISONS: dict[type[ast.cmpop], Comparison] = {ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is"}
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Definition = _Function | ast.ClassDef


class _Refused(Exception):
    """What is wrong with a test, and the remedy."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.remedy = remedy


def parse_test(text: str, where: str, entry_point: str) -> Case:
    """Returns the case of a Python test.

    `assert f(…) == literal` is compared outside the sandbox, which never sees the literal.
    Anything else runs inside.

    Raises:
        InvalidInput: the text is not Python, nothing in it can fail, or it needs what is not here.
    """
    try:
        try:
            tree = parse_python(text)
        except SyntaxError as error:
            raise _Refused(f"the test is not valid Python: {error}", "correct the test") from None
        comparison = _parse_comparison(tree.body)
        if comparison is not None:
            return comparison
        _refuse_unsupported(tree)
        _refuse_undefined_asserts(text, tree)
        tests = _tests(tree)
        _refuse_always_true(tree)
        _refuse_idle(tree, tests)
    except _Refused as refused:
        raise InvalidInput(str(refused), field=where, value=text, remedy=refused.remedy) from None
    return Case(
        {"kind": "code"},
        test={"text": text, "tests": tests, "entry_point": entry_point},
        imports=_imports(tree),
    )


# A single comparison


def _parse_comparison(statements: list[ast.stmt]) -> Case | None:
    """Returns the case of a single `assert f(…) == literal`, in either order; None for anything
    else.
    """
    first = statements[0] if len(statements) == 1 else None
    test = first.test if isinstance(first, ast.Assert) else None
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return None
    comparison = _COMPARISONS.get(type(test.ops[0]))
    if comparison is None:
        return None

    left = test.left
    right = test.comparators[0]
    for expression, literal in ((left, right), (right, left)):
        try:
            expected = ast.literal_eval(literal)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
        is_single = expected is None or isinstance(expected, bool)
        if not _is_call(expression) or (comparison == "is" and not is_single):
            return None
        request = {"kind": "value", "expression": ast.unparse(expression)}
        return Case(request, expected, comparison)
    return None


def _is_call(expression: ast.expr) -> bool:
    """Whether an expression is one call, of a function of the program. Anything else is evaluated
    in the test's process.
    """
    calls = [node for node in ast.walk(expression) if isinstance(node, ast.Call)]
    # A call as the function (`Solution().f(x)`) is one of the program too.
    if not calls or calls[0] is not expression:
        return False
    function = calls[0].func
    is_builtin = isinstance(function, ast.Name) and hasattr(builtins, function.id)
    within = set(ast.walk(function))
    return not is_builtin and within.issuperset(calls[1:])


# Which functions and classes run


def _tests(tree: ast.Module) -> list[str]:
    """Returns the names of the functions and classes that run after the statements of a test.

    The cases of unittest are not among them: unittest finds them itself. Raises _Refused for a
    test function whose argument nothing provides.
    """
    fixtures = _fixtures(tree)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names: list[str] = []
    for definition in _definitions(tree):
        if _never_counts(definition):
            continue
        functions: list[_Function] = []
        if isinstance(definition, ast.ClassDef):
            if not definition.name.startswith("Test") or _is_unittest(definition, tree):
                continue
            functions = _methods(definition)
        elif definition.name == "check":
            # `check(candidate)` gets the tested function; with other arguments it is a helper.
            if len(_required(definition)) != 1 or definition.name in used:
                continue
        elif definition.name.startswith("test"):
            if definition.name in used and _missing(definition, fixtures):
                continue  # others call it with arguments
            functions = [definition]
        else:
            continue
        for function in functions:
            _refuse_missing(function, fixtures)
        names.append(definition.name)
    return names


def _definitions(tree: ast.Module) -> list[_Definition]:
    return [statement for statement in tree.body if isinstance(statement, _Definition)]


def _never_counts(definition: _Definition) -> bool:
    """Whether a test is skipped, or may fail: then any program passes it."""
    return bool(_UNCOUNTED.search(_decoration(definition)))


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


def _required(function: _Function) -> list[str]:
    """Returns the names of the arguments without a default, but for `self`."""
    arguments = function.args.posonlyargs + function.args.args
    required = arguments[: len(arguments) - len(function.args.defaults)]
    return [argument.arg for argument in required if argument.arg not in ("self", "cls")]


def _fixtures(tree: ast.Module) -> set[str]:
    """Returns the names of the fixtures that a test defines. Raises _Refused for one whose argument
    nothing provides.
    """
    names: set[str] = set()
    fixtures: list[_Function] = []
    for node in ast.walk(tree):
        if isinstance(node, _Function) and "fixture" in _decoration(node):
            names |= {node.name, *_words(node)}  # it may have another name
            fixtures.append(node)
    for fixture in fixtures:
        has_parameters = "params=" in _decoration(fixture)
        _refuse_missing(fixture, {*names, "request"} if has_parameters else names)
    return names


def _missing(function: _Function, fixtures: set[str]) -> list[str]:
    """Returns the arguments that neither a fixture nor `parametrize` provides."""
    provided = {*fixtures, *_words(function)}
    return [name for name in _required(function) if name not in provided]


def _words(function: _Function) -> list[str]:
    """Returns all identifiers in a function's decorators, among them the names that `parametrize`
    sets.
    """
    return re.findall(r"\w+", _decoration(function))


def _decoration(definition: _Definition) -> str:
    return " ".join(map(ast.unparse, definition.decorator_list))


def _refuse_missing(function: _Function, fixtures: set[str]) -> None:
    for name in _missing(function, fixtures):
        raise _Refused(
            f"the fixture {name!r} of {function.name} does not exist here",
            "define it in the test with @pytest.fixture",
        )


# Tests that cannot work


def _refuse_unsupported(tree: ast.Module) -> None:
    """Raises _Refused for a name of `_UNSUPPORTED`."""
    for name in _used_names(tree):
        for pattern, problem, remedy in _UNSUPPORTED:
            if re.fullmatch(pattern, name):
                raise _Refused(problem.format(name=name), remedy)


def _used_names(tree: ast.Module) -> Iterator[str]:
    """Yields the dotted names that a test imports or uses, and `a.b =` where it assigns one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node) + (" =" if isinstance(node.ctx, ast.Store) else "")


def _refuse_undefined_asserts(text: str, tree: ast.Module) -> None:
    """Raises _Refused for a function `assert…` that a test uses and that only the program could
    define.
    """
    symbols = symtable.symtable(text, "<test>", "exec")
    known = {symbol.get_name() for symbol in symbols.get_symbols() if symbol.is_assigned()}
    for node in tree.body:
        root = str(getattr(node, "module", "")).partition(".")[0]
        is_known = root in sys.stdlib_module_names or root in PACKAGES.split()
        if isinstance(node, ast.ImportFrom) and (node.level or not is_known):
            known -= {alias.asname or alias.name for alias in node.names}
    for name in sorted(global_names(symbols) - known - _NUMPY_ASSERTS):
        if name.startswith("assert"):
            raise _Refused(
                f"{name} is not defined in the test, so the program would define it",
                "define it in the test, or use assert",
            )


def _refuse_always_true(tree: ast.Module) -> None:
    """Raises _Refused for an assert that no value fails, such as `assert (x == y, "message")`."""
    for node in ast.walk(tree):
        condition: ast.expr | None = None
        if isinstance(node, ast.Assert):
            condition = node.test
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "assertTrue":
            condition = node.args[0] if node.args else None
        is_constant = isinstance(condition, ast.Constant)
        if condition is not None and not is_constant and _is_true(condition):
            shown = ast.unparse(node)
            raise _Refused(
                f"no program fails `{shown:.60}`", "remove the parentheses, or what makes it true"
            )


def _is_true(expression: ast.expr) -> bool:
    """Whether an expression is true whatever the values in it."""
    if isinstance(expression, ast.Constant):
        return bool(expression.value)
    if isinstance(expression, (ast.Tuple, ast.List, ast.Set)):
        return any(not isinstance(item, ast.Starred) for item in expression.elts)
    if isinstance(expression, ast.JoinedStr):
        return any(map(_is_true, expression.values))
    if isinstance(expression, ast.BoolOp):
        return isinstance(expression.op, ast.Or) and any(map(_is_true, expression.values))
    return isinstance(expression, (ast.Dict, ast.Lambda, ast.GeneratorExp))


def _refuse_idle(tree: ast.Module, tests: list[str]) -> None:
    """Raises _Refused when nothing that runs can fail."""
    if any(map(_can_fail, _reached(tree, tests))):
        return
    if any(map(_can_fail, ast.walk(tree))):
        raise _Refused(
            "the test's asserts are in functions that nothing calls, or that are skipped",
            "call them, or name the functions test_…, or one of them check(candidate)",
        )
    raise _Refused("the test asserts nothing", "add an assert, or remove the test")


def _reached(tree: ast.Module, tests: list[str]) -> Iterator[ast.AST]:
    """Yields the nodes that may run: the statements of the module, the tests, and every function
    that is named anywhere.
    """
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef):  # only its tests run by themselves
            runs = statement.name in tests or _is_unittest(statement, tree)
            if runs and not _never_counts(statement):
                for method in _methods(statement):
                    yield from ast.walk(method)
        elif not isinstance(statement, _Function) or statement.name in tests:
            yield from ast.walk(statement)

    used = {getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(tree)}
    for node in ast.walk(tree):
        if isinstance(node, _Function) and node.name in used:
            yield from ast.walk(node)


def _can_fail(node: ast.AST) -> bool:
    if isinstance(node, ast.Assert):
        return not isinstance(node.test, ast.Constant) or not node.test.value
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        return bool(_CHECKS.match(name))
    return isinstance(node, ast.Raise)


def _imports(tree: ast.Module) -> frozenset[str]:
    """Returns the names of the modules that a test imports."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [str(getattr(node, "module", alias.name)) for alias in node.names]
            names |= {module.partition(".")[0] for module in modules}
    return frozenset(names)
