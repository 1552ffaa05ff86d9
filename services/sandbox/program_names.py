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
import symtable
import types
from typing import Any, NamedTuple

from services.sandbox.library_values import make_strict

PROGRAM = "solution"
"""The module by which a test imports the program, whatever it calls it."""
# Modules from which a test may use what only the program imports.
_PURE = (
    "bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools",
    "heapq", "itertools", "json", "math", "numpy", "operator", "random", "re", "statistics",
    "string", "typing",
)  # fmt: skip
_MODULES = {"np": "numpy", "pytest": "pytest", **{name: name for name in _PURE}}
# Functions with which a test judges a result. A program may define one of these names, but not for
# a test of something else.
_JUDGES = {
    "allclose": "numpy", "approx": "pytest", "array_equal": "numpy",
    "assert_allclose": "numpy.testing", "assert_array_equal": "numpy.testing",
    "deepcopy": "copy", "isclose": "math", "raises": "pytest",
}  # fmt: skip

# Builtins that a program may define for a test of nothing else. `abs`, `all`, `any`, … judge.
_TESTED_BUILTINS = frozenset((
    "ascii", "bin", "chr", "divmod", "enumerate", "filter", "format", "hash", "hex", "len", "map",
    "max", "min", "oct", "ord", "pow", "reversed", "round", "sorted", "sum", "zip",
))  # fmt: skip
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Names(NamedTuple):
    """The names of a test that it does not define."""

    asked: set[str]
    """What the program may define for it."""
    needed: set[str]
    """What the test cannot do without."""
    members: set[str]
    """What the test imports from the program's module, or uses as an attribute of anything."""
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
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    bases = {getattr(node.value, "id", "") for node in attributes}
    imported, stand_ins = _import_program(tree, bases)

    symbols = symtable.symtable(text, "<test>", "exec")
    defined: set[str] = set()
    assigned: set[str] = set()
    for symbol in symbols.get_symbols():
        if symbol.is_namespace() or symbol.is_imported():
            defined.add(symbol.get_name())
        elif symbol.is_assigned():
            assigned.add(symbol.get_name())
    used = global_names(symbols) - defined
    asked = {name for name in used if is_public(name) and not hasattr(builtins, name)}

    program = ast.parse(source).body
    library = _imports_of_program(program, asked | imported)
    for name in asked & bases & set(_MODULES):
        _add(library, name, _MODULES[name])
    needed = asked - (assigned - _wrapped(tree.body)) - set(library)
    judges = needed & set(_JUDGES)
    needed -= judges
    if not (needed or imported or stand_ins or has_candidate):
        # A test of a function that has the name of a builtin, or else of one that judges.
        own = used & _bound(program)
        needed = own & _TESTED_BUILTINS or own & judges
        if not needed:
            raise AssertionError("the test uses nothing of the program")
    asked = asked - judges | needed
    # With `assert_allclose`, which no program may define.
    for name in used & set(_JUDGES) - asked:
        _add(library, name, _JUDGES[name], name)
    return Names(
        asked=asked - set(library),
        needed=(needed | judges) - set(library),
        members=imported | {node.attr for node in attributes},
        stand_ins=stand_ins,
        library=library,
    )


def is_public(name: str) -> bool:
    """Whether a program may define a name for a test: no `__name__`, and no `assert_equal`."""
    return not name.startswith(("__", "assert"))


def global_names(table: symtable.SymbolTable) -> set[str]:
    """Returns the global names that a scope and the scopes in it use."""
    is_module = table.get_type() == "module"
    names: set[str] = set()
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (is_module or symbol.is_global()):
            names.add(symbol.get_name())
    for inner in table.get_children():
        names |= global_names(inner)
    return names


def _wrapped(statements: list[ast.stmt]) -> set[str]:
    """Returns the names that a test takes from the program and binds anew: `f = cache(f)`."""
    wrapped: set[str] = set()
    bound: set[str] = set()
    for statement in statements:
        if isinstance(statement, ast.Assign):
            targets = _bound([statement])
            loaded = {getattr(node, "id", "") for node in ast.walk(statement.value)}
            wrapped |= (targets & loaded) - bound
            bound |= targets
    return wrapped


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
                root, *parts = alias.name.split(".")
                if _is_missing(root):
                    modules |= {root, *parts}
                    alias.asname = alias.asname or root
                    alias.name = PROGRAM
    return names, modules


def _is_of_program(node: ast.ImportFrom) -> bool:
    """Whether an import is of the program: it is relative, or no installed module has the name."""
    name = str(node.module)
    if node.level:
        return True
    if name.split(".")[0] in (*_PURE, "pytest"):
        return False
    if _is_missing(name):
        return True
    try:
        module = importlib.import_module(name)
    except Exception:
        return False
    return not any(
        alias.name == "*" or hasattr(module, alias.name) or not _is_missing(f"{name}.{alias.name}")
        for alias in node.names
    )


def _is_missing(module: str) -> bool:
    """Whether a module is neither the library's nor installed, so that it is the program."""
    if module == "pytest":
        return False
    try:
        return module == PROGRAM or importlib.util.find_spec(module) is None
    except (ImportError, ValueError):
        return True


# The library's names


def _imports_of_program(program: list[ast.stmt], wanted: set[str]) -> dict[str, Any]:
    """Returns the wanted names that a program imports from a pure module and binds in no other way.

    The imports are executed here, so that these names are the library's and not the program's.
    """
    found: dict[str, Any] = {}
    for statement in program:
        if not isinstance(statement, (ast.Import, ast.ImportFrom)):
            continue
        for alias in list(statement.names):
            module = getattr(statement, "module", alias.name)
            is_wanted = alias.name == "*" or (alias.asname or alias.name) in wanted
            # No `from random import _exit`.
            if module in _PURE and is_wanted and not alias.name.startswith("_"):
                statement.names = [alias]
                try:
                    if module == "numpy":
                        make_strict()
                    exec(compile(ast.Module([statement], []), "<import>", "exec"), found)  # noqa: S102
                except ImportError:
                    continue
    library: dict[str, Any] = {}
    for name in found.keys() & (wanted - _bound(program)):
        value = found[name]
        # No `from statistics import sys`.
        if not isinstance(value, types.ModuleType) or value.__name__ in _PURE:
            library[name] = value
    return library


def _add(library: dict[str, Any], name: str, module_name: str, attribute: str = "") -> None:
    """Adds a module, or a function of it, where there is one."""
    if module_name.startswith("numpy"):
        make_strict()
    try:
        module = importlib.import_module(module_name)
    except ImportError:
        return
    library[name] = getattr(module, attribute) if attribute else module


def _bound(statements: list[ast.stmt]) -> set[str]:
    """Returns the names of functions, classes and variables that statements bind, also inside
    functions.
    """
    names: set[str] = set()
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, _DEFINITIONS):
                names.add(node.name)
            elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
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
