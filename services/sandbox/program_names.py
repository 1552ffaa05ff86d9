"""Decides what the names of a test mean: the library's, or the program's. Source for the Python of
the sandbox, like `inside`.

A test takes from the program what it uses and does not define itself, and what it imports from a
module that nobody has. It takes nothing else: no builtin, and no function that only judges.
"""

from __future__ import annotations  # its Python may be older than the server's

import ast
import builtins
import importlib
import importlib.util
import re
import symtable
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from services.sandbox.library_values import make_strict

PROGRAM = "solution"
"""The module by which a test imports the program, whatever it calls it."""
_PURE = (
    "bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools",
    "heapq", "itertools", "json", "math", "numpy", "operator", "random", "re", "statistics",
    "string", "typing",
)  # fmt: skip
"""Modules from which a test may use what only the program imports."""
_MODULES = {"np": "numpy", "pytest": "pytest", **{name: name for name in _PURE}}
_JUDGES = {
    "allclose": "numpy", "approx": "pytest", "array_equal": "numpy",
    "assert_allclose": "numpy.testing", "assert_array_equal": "numpy.testing",
    "deepcopy": "copy", "isclose": "math", "raises": "pytest",
}  # fmt: skip
"""Functions with which a test judges a result. A program may define one of these names, but not
for a test of something else."""

_TESTED_BUILTINS = frozenset((
    "ascii", "bin", "chr", "divmod", "enumerate", "filter", "format", "hash", "hex", "len", "map",
    "max", "min", "oct", "ord", "pow", "reversed", "round", "sorted", "sum", "zip",
))  # fmt: skip
"""Builtins that a program may define for a test of nothing else. `abs`, `all`, `any`, … judge."""


class Names(NamedTuple):
    """The names of a test that it does not define."""

    asked: set[str]
    """What the program defines for it."""
    needed: set[str]
    """What the test cannot do without."""
    members: set[str]
    """What the program's module has for it, besides `asked`."""
    stand_ins: set[str]
    """Members that stand for the program's module itself, unless the program defines them."""
    library: dict[str, Any]
    """What the test uses without an import, of the library."""


def names_of(text: str, tree: ast.Module, source: str, *, has_candidate: bool) -> Names:
    """Returns the names of a test, and changes its imports of the program to those of `PROGRAM`.

    Args:
        text: the test.
        tree: the same, parsed.
        source: the program; what it only imports is the library's.
        has_candidate: the test gets a function of the program as an argument.

    Raises:
        AssertionError: the test uses nothing of the program, so that any program would pass it.
    """
    bases: set[str] = set()
    attributes: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            attributes.add(node.attr)
            if isinstance(node.value, ast.Name):
                bases.add(node.value.id)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            # No other text of a test: the program learns what it is asked for.
            attributes |= {str(getattr(name, "value", "")) for name in node.args[1:2]}
    imported, stand_ins = _import_program(tree, bases)

    builtin_names = set(dir(builtins))
    table = symtable.symtable(text, "<test>", "exec")
    used = _global_names(table) - _defined(tree.body)
    own = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned()}
    own -= _wrapped(tree.body)
    asked = _public(used - builtin_names)
    library = dict(_imported_by(source, asked | imported))
    for name in asked & bases & set(_MODULES):
        library.update(_found(name, _MODULES[name], ""))
    unbound = asked - own - set(library)
    judges = unbound & set(_JUDGES)
    if unbound - judges or imported or has_candidate:
        for name in judges:
            library.update(_found(name, _JUDGES[name], name))

    if not (unbound or imported or stand_ins or has_candidate):
        # A test of a function that has the name of a builtin.
        program = ast.parse(source).body
        tested = used & _TESTED_BUILTINS & (_defined(program) | _assigned(program))
        asked |= tested
        if not tested:
            raise AssertionError("the test uses nothing of the program")
    return Names(
        asked=asked - set(library),
        needed=(unbound | imported | _members(tree)) - stand_ins - set(library),
        members=_public(imported | attributes),
        stand_ins=stand_ins,
        library=library,
    )


def _wrapped(statements: list[ast.stmt]) -> set[str]:
    """Returns the names that a test takes from the program and binds anew: `f = cache(f)`."""
    wrapped: set[str] = set()
    bound: set[str] = set()
    for statement in statements:
        if isinstance(statement, ast.Assign):
            targets = _assigned([statement])
            loaded = {node.id for node in ast.walk(statement.value) if isinstance(node, ast.Name)}
            wrapped |= (targets & loaded) - bound
            bound |= targets
    return wrapped


def _global_names(table: symtable.SymbolTable) -> set[str]:
    """Returns the global names that a scope and the scopes in it use."""
    is_module = table.get_type() == "module"
    names: set[str] = set()
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (is_module or symbol.is_global()):
            names.add(symbol.get_name())
    for inner in table.get_children():
        names |= _global_names(inner)
    return names


def _public(names: set[str]) -> set[str]:
    """Returns the names that a program may define: no `__name__`, and no `assert_equal`."""
    return {name for name in names if not name.startswith(("__", "assert"))}


# Imports of the program


def _import_program(tree: ast.Module, bases: set[str]) -> tuple[set[str], set[str]]:
    """Changes the imports of modules that nobody has. Returns the names that are imported from
    them, and those that stand for a module.

    Args:
        tree: the test.
        bases: names with attributes.
    """
    names: set[str] = set()
    modules: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and _is_of_program(node):
            node.module = PROGRAM
            node.level = 0
            for alias in node.names:
                names.add(alias.name)
                if (alias.asname or alias.name) in bases:
                    modules.add(alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if is_missing(alias.name.split(".")[0]):
                    modules |= set(alias.name.split("."))
                    alias.asname = alias.asname or alias.name.split(".")[0]
                    alias.name = PROGRAM
    return names, modules


def _members(tree: ast.Module) -> set[str]:
    """Returns the names that a test takes from the program's module: `solution.f`."""
    modules: set[str | None] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname for alias in node.names if alias.name == PROGRAM}
    members: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in modules:
            members.add(node.attr)
    return _public(members)


def _is_of_program(node: ast.ImportFrom) -> bool:
    """Whether an import is one of the program: relative, or of what no module has."""
    root = str(node.module).split(".")[0]
    if node.level or is_missing(str(node.module)):
        return bool(node.level) or root not in _PURE
    if root in (*_PURE, "pytest"):
        return False
    try:
        module = importlib.import_module(str(node.module))
    except Exception:
        return False
    return not any(_has(module, alias.name) for alias in node.names)


def _has(module: types.ModuleType, name: str) -> bool:
    if name == "*" or hasattr(module, name):
        return True
    return hasattr(module, "__path__") and not is_missing(f"{module.__name__}.{name}")


def is_missing(module: str) -> bool:
    """Whether nobody has a module, but for the program."""
    if module.split(".")[0] == PROGRAM:
        return True
    if module == "pytest":
        return False
    try:
        return importlib.util.find_spec(module) is None
    except (ImportError, ValueError):
        return True


# The library's names


def _imported_by(source: str, wanted: set[str]) -> Iterator[tuple[str, Any]]:
    """Yields the wanted names that a program imports from a pure module and binds in no other way,
    with their values.
    """
    body = ast.parse(source).body
    others = [each for each in body if not isinstance(each, (ast.Import, ast.ImportFrom))]
    wanted = wanted - _defined(others) - _assigned(others)
    for statement in body:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                name = alias.asname or alias.name
                if name in wanted and alias.name in _PURE:
                    yield from _found(name, alias.name, "")
        elif isinstance(statement, ast.ImportFrom) and statement.module in _PURE:
            for alias in statement.names:
                names = wanted if alias.name == "*" else {alias.asname or alias.name} & wanted
                for name in names:
                    wants = name if alias.name == "*" else alias.name
                    yield from _found(name, statement.module, wants)


def _found(name: str, module_name: str, attribute: str) -> Iterator[tuple[str, Any]]:
    """Yields a name with a module, or with a public function of it, where there is one."""
    if module_name.startswith("numpy"):
        make_strict()
    try:
        module = importlib.import_module(module_name)
    except ImportError:
        return
    value = getattr(module, attribute, None) if attribute else module
    is_private = attribute.startswith("_") or (attribute and isinstance(value, types.ModuleType))
    if value is not None and not is_private:
        yield name, value


def _defined(statements: list[ast.stmt]) -> set[str]:
    """Returns the names of the functions, classes and modules that statements bind."""
    names: set[str] = set()
    for statement in statements:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(statement.name)
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in statement.names}
        else:
            inner = [each for each in ast.walk(statement) if isinstance(each, ast.stmt)]
            names |= _defined([each for each in inner if each is not statement])
    return names


def _assigned(statements: list[ast.stmt]) -> set[str]:
    """Returns the names that statements assign anywhere, also in functions."""
    names: set[str] = set()
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                names.add(node.id)
    return names


# The function that `check` gets


def public_functions(source: str) -> list[str]:
    """Returns an expression for every function that a program defines and every method of its
    `Solution`.
    """
    names = []
    for statement in ast.parse(source).body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names.append(statement.name)
        elif isinstance(statement, ast.ClassDef) and statement.name == "Solution":
            methods = [item for item in statement.body if isinstance(item, ast.FunctionDef)]
            names += [f"Solution().{method.name}" for method in methods]
    hidden = ("_", "test", "Solution()._")
    return [name for name in names if not name.startswith(hidden)]


def root_of(expression: str) -> str:
    """Returns the name with which an expression begins."""
    match = re.match(r"\w+", expression)
    return match[0] if match else ""
