"""Runs a test in a different process from the tested program. Source for the Python of the sandbox,
like `inside`.

The test's process was forked before the program ran, so it contains nothing that the program
patches or reads. It reaches the program's functions and objects by messages. It receives only data:
plain values, which it compares itself, and references to objects, whose methods run in the
program's process. A program can forge a message, but with any message it can only define what the
test asks it for, return data, or raise an exception; anything else ends the test.

The run decides: a check that does not hold fails the test, whoever catches its AssertionError, and
so does a test of which no check was executed.
"""

from __future__ import annotations  # its Python may be older than the server's

import ast
import base64
import builtins
import contextlib
import io
import json
import os
import pickle
import re
import sys
import threading
import types
from collections.abc import Callable
from typing import Any, NoReturn

from services.sandbox.library_values import made, make_strict, same, strict_array
from services.sandbox.program import ACTIONS, BINARY, COMPARED, UNARY, is_mutable
from services.sandbox.program_names import PROGRAM, Names, is_public, names_of, public_functions
from services.sandbox.pytest_names import install
from services.sandbox.suite import run_suite
from services.sandbox.values import decoded

# The module of the test, so that what stands behind its main guard runs.
_TEST = "__main__"


_CHECKED = "__checked__"
_CAUGHT = "__caught__"
_SAME = "__same__"
_TYPE = "__type__"
_COMPUTING = frozenset(("dict", "len", "list", "max", "min", "reversed", "set", "sorted", "sum"))
# Attributes of the test's functions that a decorator of the program keeps.
_NAMING = ("__name__", "__qualname__", "__doc__")


class _Checks(ast.NodeTransformer):
    """Compares arrays strictly, lets no handler of the test hide a failed check, and counts the
    checks that were executed: a program that returns nothing to loop over, or that never calls a
    function of the test, can keep every check from being executed.
    """

    def __init__(self) -> None:
        self.written = 0
        self.executed = 0

    def count_one(self, value: Any) -> Any:
        self.executed += 1
        return value

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        self.generic_visit(node)
        # `assert False` is what only a wrong program reaches.
        if not isinstance(node.test, ast.Constant):
            node.test = self._counted(node.test)
        return node

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        written = self.written
        self.generic_visit(node)
        # A handler with a check of its own has another idea of what is right.
        if self.written == written:
            node.body.insert(0, ast.Expr(ast.Call(ast.Name(_CAUGHT, ast.Load()), [], [])))
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if isinstance(node.func, ast.Name) and name == "type" and len(node.args) == 1:
            node.func = ast.Name(_TYPE, ast.Load())
        return self._counted(node) if name.startswith(("assert", "raises")) else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr != "__class__" or not isinstance(node.ctx, ast.Load):
            return node
        return ast.Call(ast.Name(_TYPE, ast.Load()), [node.value], [])

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if len(node.ops) > 1 or not isinstance(node.ops[0], ast.Eq):
            return node
        sides = [node.left, *node.comparators]
        # What a test computes from an argument of the program is computed before the program runs,
        # which may change the argument: `f(a) == sorted(a)`.
        if _computes(node.comparators[0]) and isinstance(node.left, ast.Call):
            sides.reverse()
        return ast.Call(ast.Name(_SAME, ast.Load()), sides, [])

    def _counted(self, node: ast.expr) -> ast.expr:
        self.written += 1
        return ast.Call(ast.Name(_CHECKED, ast.Load()), [node], [])


class _Missing:
    """A name that the program does not define. Its use ends the test, which must not take it for an
    exception that it expects.
    """

    def __init__(self, name: str, end: Callable[[str, str], NoReturn]) -> None:
        self._name = name
        self._end = end

    def __call__(self, *_: object, **__: object) -> NoReturn:
        self._end("error", f"the program does not define {self._name}")

    def __getattr__(self, _: str) -> NoReturn:
        self()


def _computes(expression: ast.expr) -> bool:
    """Whether an expression only calls builtins, and one at least."""
    calls = [node for node in ast.walk(expression) if isinstance(node, ast.Call)]
    names = {getattr(call.func, "id", "") for call in calls}
    return bool(calls) and names.issubset(_COMPUTING)


class _Solution(types.ModuleType):
    """The program's module, as the test imports it: it asks the program for every name."""

    def __init__(self, test: Test, names: Names, found: dict[str, Any]) -> None:
        super().__init__(PROGRAM)
        self.__dict__.update(names.library, _test=test, _names=names)
        self.__all__ = [*found, *names.library]

    def __getattr__(self, name: str) -> Any:
        if not is_public(name):
            raise AttributeError(name)
        found = self._test.globals_of_program({name})
        if name in found:
            return found[name]
        if name in self._names.stand_ins:
            return self
        if name in self._names.members:
            return _Missing(name, self._test.end)
        raise AttributeError(name)


def _is_mock(value: Any) -> bool:
    return type(value).__module__ == "unittest.mock"


class _Pickler(pickle.Pickler):
    """Writes values of the test for the program."""

    def __init__(self, file: Any, test: Test) -> None:
        super().__init__(file)
        self._test = test

    def persistent_id(self, value: Any) -> Any:
        kind = type(value)
        if kind is Remote:
            return "object", value._Remote__key
        if kind is type and _KEY in vars(value):
            return "object", vars(value)[_KEY]
        is_function_of_test = getattr(value, "__module__", None) == _TEST and callable(value)
        # A method such as `seen.append`: a copy of it would change a copy of the list.
        is_bound = kind is types.BuiltinMethodType and is_mutable(value.__self__)
        if kind.__module__ == _TEST or is_function_of_test or is_bound or _is_mock(value):
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

    def __init__(
        self, read_fd: int, write_fd: int, limit: int, end: Callable[[str, str], NoReturn]
    ) -> None:
        self._in = os.fdopen(read_fd, "rb")
        self._out = os.fdopen(write_fd, "wb")
        # Bytes of one message of the program.
        self._limit = limit
        # Ends this process with a status and its reason.
        self.end = end
        self._lock = threading.RLock()
        self._remotes: dict[int, Any] = {}
        self._exceptions: dict[int, Any] = {}
        self.locals: dict[int, Any] = {}
        """Objects of the test to which the program has references."""
        self.generators: set[int] = set()
        """Which objects of the program are generators."""

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
        install()
        json.JSONEncoder.default = _json_value  # type: ignore[assignment]
        leave = contextlib.suppress.__exit__

        def suppress(manager: Any, kind: Any, error: Any, trace: Any) -> bool:
            self._caught()
            return bool(leave(manager, kind, error, trace))

        contextlib.suppress.__exit__ = suppress  # type: ignore[method-assign]
        if re.search(r"\b(?:np|numpy)\b", text):  # which takes long to import
            make_strict()
        tree = ast.parse(text)
        names = names_of(text, tree, source, has_candidate="check" in tests)
        checks = _Checks()
        checks.visit(tree)
        ast.fix_missing_locations(tree)

        found = self.globals_of_program(names.asked)
        sys.modules[PROGRAM] = _Solution(self, names, found)
        module = types.ModuleType(_TEST)
        module.__dict__.update(
            {
                **{name: _Missing(name, self.end) for name in names.needed},
                **found,
                **names.library,
                "__file__": "/test_solution.py",
                _CHECKED: checks.count_one,
                _CAUGHT: self._caught,
                _SAME: same,
                _TYPE: _type_of,
            }
        )
        sys.modules[_TEST] = module
        try:
            exec(compile(tree, "<test>", "exec"), module.__dict__)  # noqa: S102
        except SystemExit as error:
            if error.code not in (None, 0):
                raise AssertionError(f"the test ended with status {error.code}") from None

        def candidate() -> Any:
            functions = [entry_point] if entry_point else public_functions(source)
            if not functions:
                raise AssertionError("the program defines no function")
            expression = functions[-1]
            root = re.split(r"\W", expression)[0]
            return eval(expression, self.globals_of_program({root}))  # noqa: S307

        run_suite(module, tests, candidate)
        if checks.written and not checks.executed:
            raise AssertionError("the program kept the test from checking anything")

    def _caught(self) -> None:
        """Ends the test when a check of it has failed, and an `except` clause of the test or an
        exception of the program is about to hide that.
        """
        error = sys.exc_info()[1]
        if isinstance(error, AssertionError) and _TEXT not in vars(error):
            self.end("error", f"AssertionError: {error}"[:200])

    def globals_of_program(self, asked: set[str]) -> dict[str, Any]:
        """Returns what the program binds to these names."""

        def decode_names(values: dict[str, Any]) -> dict[str, Any]:
            return {name: self._decoded(value) for name, value in values.items() if name in asked}

        found: dict[str, Any] = self._request(["names", sorted(asked)], decode_names)
        return found

    def do(self, action: str, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of an action in the program's process; mutable arguments get the
        program's changes.
        """

        def result(value: Any, changed: list[Any]) -> Any:
            for i, content in changed:
                if is_mutable(args[i]):
                    _overwrite(args[i], self._decoded(content))
            return self._decoded(value)

        request = ["do", action, self._dumps((args, kwargs))]
        return self._request(request, result, may_stop=action == "next")

    def operate(self, action: str, *args: Any) -> Any:
        """Returns the result of an operator: computed here for plain values, else in the program's
        process. An object of the program never equals a value of the test.
        """
        plain = [_plain(arg) for arg in args]
        compares = action in ("eq", "ne")
        if compares and args[0] is args[1]:  # one object of the program
            return action == "eq"
        if all(value is not _ABSENT for value in plain):
            return ACTIONS[action](*plain)
        some_are_plain = any(map(_is_plain, args))
        # Its class may say that the object is equal to everything.
        if some_are_plain and compares:
            return action == "ne"

        result = self.do(action, *args)
        # `4 - f(x)` would be the 0 that its class makes of it.
        if _is_plain(result) and (some_are_plain or len(args) == 1):
            raise TypeError(
                f"an object of the program and a value of the test do not support {action}"
            )
        return result

    def query(self, action: str, remote: Any, *args: Any) -> Any:
        """Asks the program for a property of its object, such as its length; a plain value is asked
        here.
        """
        plain = _plain(remote)
        return self.do(action, remote, *args) if plain is _ABSENT else ACTIONS[action](plain, *args)

    def convert(self, action: str, remote: Any, *args: Any) -> Any:
        """Returns the plain value of an object as an int, a float or another number."""
        plain = _plain(remote)
        if plain is _ABSENT:
            raise TypeError(f"an object of the program does not support {action}")
        return getattr(builtins, action)(plain, *args)

    async def _awaitable(self, key: int) -> Any:
        """Awaits a coroutine of the program, in the program's process."""
        return self.do("await", Remote(self, key))

    def _request(self, message: Any, result: Callable[..., Any], may_stop: bool = False) -> Any:
        """Sends a request and returns the `result` of its reply, or raises what the program raised.

        Whatever else the program sends ends the test here: it must not take that, or the end of the
        program, for an exception that it expects.

        `may_stop`: it may raise StopIteration, which ends a loop of the test.
        """
        with self._lock:
            self._send(message)
            raised: Exception | None = None
            while raised is None:
                line = self._in.readline(self._limit + 1)
                if len(line) > self._limit:
                    self.end("output", f"a value takes more than {self._limit} bytes")
                if not line.endswith(b"\n"):
                    self.end("died", "the program has ended")
                try:
                    kind, *content = json.loads(line)
                    if kind == "ok":
                        return result(*content)
                    if kind == "raise":
                        raised = self._error(*content, may_stop=may_stop)
                    else:
                        self._send(["answer", self._dumps(self._asked(*content))])
                except Exception as error:
                    self.end("died", f"the program sent what is no answer: {error!r:.80}")
            # In `finally` or `__exit__` it would take the place of a check that has failed.
            self._caught()
            raise raised

    def _send(self, message: Any) -> None:
        try:
            self._out.write(json.dumps(message).encode() + b"\n")
            self._out.flush()
        except OSError:
            self.end("died", "the program has ended")

    def _error(
        self, kind: Any, args: list[Any], attributes: Any, text: Any, *, may_stop: bool
    ) -> Exception:
        """Returns the exception that the program raised."""
        error_class = self._decoded(kind)
        stops = issubclass(error_class, (StopIteration, StopAsyncIteration)) and not may_stop
        if stops or not issubclass(error_class, Exception):
            return RuntimeError(error_class.__name__)
        values = [decoded(arg) for arg in args]
        try:
            error: Exception = error_class(*values)
        except Exception:  # a class whose constructor wants something else, as UnicodeError's
            error = error_class.__new__(error_class, *values)
        for name, value in attributes.items():
            vars(error)[name] = decoded(value)
        vars(error)[_TEXT] = str(text)  # whoever reads it need not fear another type
        return error

    def _asked(self, action: str, key: int, content: list[Any]) -> tuple[Any, Exception | None]:
        """Executes the program's request on an object of the test: a call, or access to a public
        attribute.
        """
        try:
            target = self.locals[key]
            args = [self._decoded(arg) for arg in content]
            if action == "call":
                positional, named = args
                return target(*positional, **named), None
            name = args[0]
            value = getattr(target, name, None)
            if action == "getattr" and isinstance(target, types.FunctionType) and name in _NAMING:
                return value, None
            is_mock = _is_mock(target)
            is_of_test = type(target).__module__ == _TEST or is_mock
            # What a mock has recorded, and how it is set up, is not the program's to change.
            is_hidden = is_mock and (
                action == "setattr" or (callable(value) and not _is_mock(value))
            )
            if name.startswith("_") or not is_of_test or is_hidden:
                raise AttributeError(name)
            if action == "setattr":
                setattr(target, name, args[1])
                return None, None
            return getattr(target, name), None
        except AssertionError as error:
            # A program that catches it would hide that the test has failed.
            self.end("error", f"AssertionError: {error}"[:200])
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
        if kind == "made":
            name, *parts = content
            arguments, items = [[self._decoded(item) for item in part] for part in parts]
            value = made(key, name, arguments, items)
            return strict_array(value) if name == "array" else value
        if kind == "coroutine":
            return self._awaitable(key)
        if kind == "exception":
            return self._exception(key, *content)
        if kind != "object":
            raise ValueError(f"there is no such kind: {kind}")
        remote = self._remotes.setdefault(key, Remote(self, key))
        plain, is_generator = content
        if is_generator:
            self.generators.add(key)
        current = self._decoded(plain[0]) if plain else _ABSENT
        object.__setattr__(remote, "_Remote__plain", current)
        return remote

    def _exception(self, key: int, module: str, name: str, bases: list[Any]) -> Any:
        """Returns a class of exceptions: one of Python's, or one that is like the program's."""
        if module in _WITH_EXCEPTIONS and hasattr(sys.modules.get(module), name):
            error_class = getattr(sys.modules[module], name)
            if not issubclass(error_class, BaseException):
                raise TypeError(f"{name} is no exception")
            return error_class
        if key not in self._exceptions:
            own_bases = tuple(self._decoded(base) for base in bases)
            members = {"__str__": _text_of_error, _KEY: key}
            self._exceptions[key] = type(name, own_bases, members)
        return self._exceptions[key]


# Modules with exceptions that a test may expect. One of `unittest` would skip the test.
_WITH_EXCEPTIONS = (
    "asyncio.exceptions", "binascii", "builtins", "configparser", "copy", "dataclasses", "decimal",
    "ipaddress", "json.decoder", "queue", "_queue", "re", "statistics", "struct", "zlib",
)  # fmt: skip
# Attribute of a class of exceptions with the key of the program's.
_KEY = "_key of the program"
# Attribute with the text of an exception that the program raised.
_TEXT = "_text of the program"


def _text_of_error(error: Any) -> str:
    text = vars(error).get(_TEXT)
    return Exception.__str__(error) if text is None else str(text)


# The plain value of an object that has none.
_ABSENT: Any = object()


def _overwrite(local: Any, content: Any) -> None:
    """Replaces the content of a list, dictionary, … by that of the program's copy."""
    if hasattr(local, "dtype"):  # an array
        local[...] = content
        return
    local.clear()
    fill = local.extend if hasattr(local, "extend") else local.update
    fill(content)


# Methods that change a list, a set, a bytearray, a dictionary or a deque. The program's objects
# change in its process; all other methods of plain values are computed in this one.
_CHANGES = frozenset((
    "add", "append", "appendleft", "clear", "difference_update", "discard", "extend", "extendleft",
    "insert", "intersection_update", "move_to_end", "pop", "popitem", "popleft", "remove",
    "reverse", "rotate", "setdefault", "sort", "subtract", "symmetric_difference_update", "update",
))  # fmt: skip


class Remote:
    """An object of the program, in the test's process."""

    # Its key in the program's process, and its plain value, which is `_ABSENT` if it has none.
    __slots__ = ("_Remote__key", "_Remote__plain", "_Remote__test")

    def __init__(self, test: Test, key: int) -> None:
        # Attributes of a Remote are the program's, so its own are set behind its back.
        object.__setattr__(self, "_Remote__test", test)
        object.__setattr__(self, "_Remote__key", key)
        object.__setattr__(self, "_Remote__plain", _ABSENT)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # so that an int of the program is an instance of int
        if self.__key in self.__test.generators:
            return types.GeneratorType
        plain = _plain(self)
        return Remote if plain is _ABSENT else type(plain)

    @property
    def __doc__(self) -> Any:  # type: ignore[override]
        return _do("getattr", self, "__doc__")

    def __getattr__(self, name: str) -> Any:
        plain = _plain(self)
        if plain is not _ABSENT and name not in _CHANGES and hasattr(plain, name):
            return getattr(plain, name)
        return _do("getattr", self, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__test.do("call", self, *args, **kwargs)

    def __exit__(self, *_: object) -> None:
        _do("exit", self)

    def __instancecheck__(self, value: Any) -> bool:
        return type(value) is Remote and _do("isinstance", value, self) is True

    def __deepcopy__(self, _: object) -> Any:
        return _do("deepcopy", self)


def _plain(value: Any) -> Any:
    """Returns the plain value of an object, such as one of a subclass of int or list; `_ABSENT` for
    any other.
    """
    if type(value) is not Remote:
        return value
    plain = value._Remote__plain
    if not is_mutable(plain) and type(plain) is not bytes:  # a bytearray arrives as bytes
        return plain
    # It may have changed since. Decoding a reference updates its plain value.
    now = _do("itself", value)
    return value._Remote__plain if now is value else now


def _is_plain(value: Any) -> bool:
    """Whether this is a value of the test, or an object with a plain value."""
    return type(value) is not Remote or _plain(value) is not _ABSENT


def _json_value(_: object, value: Any) -> Any:
    """Returns the plain value of an object, for `json.dumps`."""
    if _is_plain(value) and type(value) is Remote:
        return _plain(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _type_of(value: Any) -> Any:
    """Returns the type of a value; of an object of the program, the program's class."""
    itself = _do("itself", value) if type(value) is Remote else value
    return _do("type", value) if type(itself) is Remote else type(itself)


def _do(action: str, remote: Any, *args: Any) -> Any:
    return remote._Remote__test.do(action, remote, *args)


# The special methods of Remote: Python looks them up in the class, so all of them must exist.


def _special(run: Callable[..., Any], action: str, *, reflected: bool = False) -> Any:
    """Returns a special method that calls a method of `Test` with this action."""

    def method(self: Any, *args: Any) -> Any:
        arguments = (*args, self) if reflected else (self, *args)
        return run(self._Remote__test, action, *arguments)

    return method


for _action in BINARY:
    reflected_name = f"__r{_action.rstrip('_')}__"
    setattr(Remote, reflected_name, _special(Test.operate, _action, reflected=True))
_ACTIONS_BY_WAY: tuple[tuple[Callable[..., Any], tuple[str, ...]], ...] = (
    (Test.operate, BINARY + COMPARED + UNARY),
    (Test.do, ("next", "setitem", "delitem", "enter", "copy", "setattr", "delattr")),
    (
        Test.query,
        ("len", "iter", "bool", "str", "repr", "format", "contains", "getitem", "hash"),
    ),
    (Test.convert, ("int", "float", "complex", "bytes", "round")),
)
for _run, _actions in _ACTIONS_BY_WAY:
    for _action in _actions:
        setattr(Remote, f"__{_action.rstrip('_')}__", _special(_run, _action))
Remote.__index__ = _special(Test.convert, "int")  # type: ignore[attr-defined]
