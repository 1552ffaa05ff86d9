"""Runs a test in a different process from the tested program. Source for the Python of the sandbox,
like `inside`.

The test's process was forked before the program ran, so it contains nothing that the program
patches or reads. It reaches the program's functions and objects by messages. It receives only data:
plain values, which it compares itself, and references to objects, whose methods run in the
program's process.
"""

from __future__ import annotations  # its Python may be older than the server's

import ast
import base64
import builtins
import collections
import importlib
import importlib.util
import io
import json
import os
import pickle
import re
import sys
import types
from collections.abc import Callable
from typing import Any

from services.sandbox.program import ACTIONS, BINARY, COMPARED, MUTABLE, PURE, UNARY
from services.sandbox.pytest_names import install
from services.sandbox.suite import run_suite
from services.sandbox.values import decoded

_TEST = "__main__"
"""The module of the test, so that what stands behind its main guard runs."""


class _Pickler(pickle.Pickler):
    """Writes values of the test for the program."""

    def __init__(self, file: Any, test: Test) -> None:
        super().__init__(file)
        self._test = test

    def persistent_id(self, value: Any) -> Any:
        kind = type(value)
        if kind is Remote:
            return "object", _key(value)
        is_function_of_test = getattr(value, "__module__", None) == _TEST and callable(value)
        if kind.__module__ == _TEST or is_function_of_test:
            self._test.locals[id(value)] = value
            return "local", id(value)
        return None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, types.GeneratorType):
            return iter, (list(value),)
        return NotImplemented


class Test:
    """The test's side: runs the test, and requests what the program defines from the program's
    process.
    """

    def __init__(self, read_fd: int, write_fd: int, limit: int) -> None:
        self._in = os.fdopen(read_fd, "rb")
        self._out = os.fdopen(write_fd, "wb")
        self._limit = limit
        """Bytes of one message of the program."""
        self._remotes: dict[int, Any] = {}
        self.locals: dict[int, Any] = {}
        """Objects of the test to which the program has references."""

    def run(self, text: str, tests: list[str], source: str, entry_point: str) -> None:
        """Runs a test: its statements, then the functions and classes that are tests.

        Args:
            text: the test.
            tests: the names of these functions and classes.
            source: the program, for the names of its functions.
            entry_point: the function that `check(candidate)` gets; when empty, the last one that
                the program defines.

        Raises:
            Exception: whatever the test raises.
        """
        code = compile(text, "<test>", "exec")
        names = _names(code)
        namespace = {
            name: value for name, value in self._globals(names).items() if value is not _ABSENT
        }
        solution = types.ModuleType("solution")
        solution.__dict__.update(namespace)
        for name in _missing_modules(ast.parse(text)):
            sys.modules[name] = solution
        install()

        module = types.ModuleType(_TEST)
        module.__dict__.update(namespace)
        sys.modules[_TEST] = module
        try:
            exec(code, module.__dict__)  # noqa: S102
        except SystemExit as error:
            if error.code not in (None, 0):
                raise AssertionError(f"the test ended with status {error.code}") from None

        def candidate() -> Any:
            functions = [entry_point] if entry_point else _public_functions(source)
            if not functions:
                raise AssertionError("the program defines no function")
            roots = set(re.findall(r"^\w+", functions[-1]))
            return eval(functions[-1], self._globals(roots))  # noqa: S307

        run_suite(module, tests, candidate)

    def _globals(self, names: set[str]) -> dict[str, Any]:
        """Returns what the program binds to these names, but for those of builtins."""

        def decode_names(reply: list[Any]) -> dict[str, Any]:
            return {name: self._decoded(value) for name, value in reply[0].items()}

        asked = sorted(names - set(dir(builtins)))
        values: dict[str, Any] = self._request(["names", asked], decode_names)
        return {name: value for name, value in values.items() if name in names}

    def do(self, action: str, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of an action in the program's process; mutable arguments get the
        program's changes.
        """

        def result(reply: list[Any]) -> Any:
            for i, content in reply[1]:
                if type(args[i]) in MUTABLE:
                    _overwrite(args[i], self._decoded(content))
            return self._decoded(reply[0])

        return self._request(["do", action, self._dumps((args, kwargs))], result)

    def operate(self, action: str, *args: Any) -> Any:
        """Returns the result of an operator; for plain values it is computed here. The program's
        objects equal none.
        """
        plain = [_plain(arg) for arg in args]
        compares = action in ("eq", "ne")
        if compares and args[0] is args[1]:
            return action == "eq"
        if all(value is not _ABSENT for value in plain):
            return ACTIONS[action](*plain)
        some_are_plain = any(map(_is_plain, args))
        if some_are_plain and compares:
            return action == "ne"

        result = self.do(action, *args)
        if _is_plain(result) and (some_are_plain or len(args) == 1):
            raise TypeError(
                f"an object of the program and a value of the test do not support {action}"
            )
        return result

    async def _awaitable(self, key: int) -> Any:
        """Awaits a coroutine of the program, in the program's process."""
        return self.do("await", Remote(self, key, _ABSENT))

    def _request(self, message: Any, result: Callable[[list[Any]], Any]) -> Any:
        self._out.write(json.dumps(message).encode() + b"\n")
        self._out.flush()
        while True:
            line = self._in.readline(self._limit)
            if not line.endswith(b"\n"):
                raise EOFError("the program has ended, or its answer is too long")
            kind, *reply = json.loads(line)
            if kind == "ok":
                return result(reply)
            if kind == "raise":
                raise self._error(reply[0], reply[1])
            action, key, content = reply
            answer = self._dumps(self._asked(action, key, content))
            self._out.write(json.dumps(["answer", answer]).encode() + b"\n")
            self._out.flush()

    def _error(self, kind: Any, args: list[Any]) -> Exception:
        """Returns the exception that the program raised."""
        error_class = self._decoded(kind)
        if not issubclass(error_class, Exception):
            return RuntimeError(error_class.__name__)
        error: Exception = error_class(*[decoded(arg) for arg in args])
        return error

    def _asked(self, action: str, key: int, content: list[Any]) -> tuple[Any, Exception | None]:
        """Executes the program's request on an object of the test: a call, or access to a public
        attribute.
        """
        try:
            target = self.locals[key]
            args = [self._decoded(arg) for arg in content]
            if action == "call":
                return target(*args), None
            name = str(args[0])
            value = getattr(target, name, None)
            if name.startswith("_") or type(target).__module__ != _TEST:
                raise AttributeError(name)
            if action == "setattr" and not callable(value):
                setattr(target, name, args[1])
                return None, None
            value = getattr(target, name)
            if isinstance(value, types.MethodType):
                self.locals[id(value)] = value
            return value, None
        except Exception as error:
            return None, error

    def _dumps(self, value: Any) -> str:
        file = io.BytesIO()
        _Pickler(file, self).dump(value)
        return base64.b64encode(file.getvalue()).decode()

    def _decoded(self, tagged: Any) -> Any:
        return decoded(tagged, self._other)

    def _other(self, kind: str, key: Any, *content: Any) -> Any:
        """Decodes a non-literal: a reference, or something that this process imports itself."""
        if kind == "local":
            return self.locals[key]
        if kind == "import":
            return _imported(str(key), str(content[0]))
        if kind == "coroutine":
            return self._awaitable(int(key))
        if kind == "exception" and key == 0:
            error_class = getattr(builtins, str(content[0]))
            return error_class if issubclass(error_class, BaseException) else RuntimeError
        if key not in self._remotes:
            if kind == "exception":
                base = self._other(kind, 0, content[1])
                bases = (base if issubclass(base, Exception) else Exception,)
                self._remotes[key] = type(str(content[0]), bases, {})
            else:
                self._remotes[key] = Remote(self, int(key), _ABSENT)
        remote = self._remotes[key]
        if kind == "object" and type(remote) is Remote:
            _set_plain(remote, _ABSENT if content[0] is None else decoded(content[0]))
        return remote


def _public_functions(source: str) -> list[str]:
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


def _missing_modules(tree: ast.Module) -> list[str]:
    """Returns the modules that a test imports and nobody has: they stand for the program."""
    imported = ["solution"]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            imported.append(str(node.module))
        elif isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
    roots = {name for name in imported if "." not in name and name != "pytest"}
    return [name for name in roots if name == "solution" or not importlib.util.find_spec(name)]


_ABSENT: Any = object()
"""The plain value of an object that has none."""


def _names(code: types.CodeType) -> set[str]:
    """Returns all names in a test, also those in its functions."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


def _imported(module_name: str, name: str) -> Any:
    """Returns a module, or the function `name` of a pure one; `_ABSENT` for anything else."""
    if not re.fullmatch(r"[A-Za-z_][\w.]*", module_name):
        return _ABSENT
    if name and module_name.lstrip("_") not in PURE:
        return _ABSENT
    try:
        module = importlib.import_module(module_name)
        return getattr(module, name) if name else module
    except (ImportError, AttributeError):
        return _ABSENT


def _overwrite(local: Any, content: Any) -> None:
    """Replaces the content of a list, dictionary, … by that of the program's copy."""
    if isinstance(local, bytearray):
        local[:] = content
        return
    local.clear()
    if isinstance(local, (list, collections.deque)):
        local.extend(content)
    else:
        local.update(content)


class Remote:
    """An object of the program, in the test's process."""

    __slots__ = ("_Remote__key", "_Remote__plain", "_Remote__test")

    def __init__(self, test: Test, key: int, plain: Any) -> None:
        # Attributes of a Remote are the program's, so its own are set behind its back.
        object.__setattr__(self, "_Remote__test", test)
        object.__setattr__(self, "_Remote__key", key)
        object.__setattr__(self, "_Remote__plain", plain)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # so that an int of the program is an instance of int
        plain = _plain(self)
        return Remote if plain is _ABSENT else type(plain)

    def __getattr__(self, name: str) -> Any:
        return _do("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _do("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        _do("delattr", self, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _test(self).do("call", self, *args, **kwargs)

    def __exit__(self, *_: object) -> None:
        _do("exit", self)

    def __instancecheck__(self, value: Any) -> bool:
        return type(value) is Remote and _do("isinstance", value, self) is True

    def __hash__(self) -> int:
        plain = _plain(self)
        return hash(_key(self) if plain is _ABSENT else plain)


def _key(remote: Any) -> int:
    """Returns the object's key in the program's process."""
    key: int = object.__getattribute__(remote, "_Remote__key")
    return key


def _plain(value: Any) -> Any:
    """Returns the plain value of an object: a subclass of int or list, an array; `_ABSENT` for any
    other.
    """
    return object.__getattribute__(value, "_Remote__plain") if type(value) is Remote else value


def _is_plain(value: Any) -> bool:
    """Whether this is a value of the test, or an object with a plain value."""
    return type(value) is not Remote or _plain(value) is not _ABSENT


def _set_plain(remote: Any, plain: Any) -> None:
    """Records the current plain value."""
    object.__setattr__(remote, "_Remote__plain", plain)


def _test(remote: Any) -> Test:
    test: Test = object.__getattribute__(remote, "_Remote__test")
    return test


def _do(action: str, remote: Any, *args: Any) -> Any:
    return _test(remote).do(action, remote, *args)


# The special methods of Remote: Python looks them up in the class, so all of them must exist.


def _operator(action: str) -> Callable[..., Any]:
    def operate(self: Any, *args: Any) -> Any:
        return _test(self).operate(action, self, *args)

    return operate


def _reflected_operator(action: str) -> Callable[..., Any]:
    def operate(self: Any, other: Any) -> Any:
        return _test(self).operate(action, other, self)

    return operate


def _request_of_program(action: str) -> Callable[..., Any]:
    def request(self: Any, *args: Any) -> Any:
        return _do(action, self, *args)

    return request


def _request_unless_plain(action: str) -> Callable[..., Any]:
    def request(self: Any, *args: Any) -> Any:
        plain = _plain(self)
        return _do(action, self, *args) if plain is _ABSENT else ACTIONS[action](plain, *args)

    return request


def _conversion(action: str) -> Callable[..., Any]:
    def convert(self: Any, *args: Any) -> Any:
        plain = _plain(self)
        if plain is _ABSENT:
            raise TypeError(f"an object of the program does not support {action}")
        return getattr(builtins, action)(plain, *args)

    return convert


for _action in BINARY + COMPARED + UNARY:
    setattr(Remote, f"__{_action.rstrip('_')}__", _operator(_action))
for _action in BINARY:
    setattr(Remote, f"__r{_action.rstrip('_')}__", _reflected_operator(_action))
for _action in ("next", "setitem", "delitem", "enter"):
    setattr(Remote, f"__{_action}__", _request_of_program(_action))
for _action in ("len", "iter", "bool", "str", "repr", "format", "contains", "getitem"):
    setattr(Remote, f"__{_action}__", _request_unless_plain(_action))
for _action in ("int", "float", "complex", "round"):
    setattr(Remote, f"__{_action}__", _conversion(_action))
Remote.__index__ = _conversion("int")  # type: ignore[attr-defined]
