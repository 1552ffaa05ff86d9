"""Runs a test in a different process from the tested program. Source for the Python of the sandbox,
like `inside`.

The test's process was forked before the program ran, so it contains nothing that the program
patches or reads. It reaches the program's functions and objects by messages. It receives only data:
plain values, which it compares itself, and references to objects, whose methods run in the
program's process.
"""

from __future__ import annotations  # its Python may be older than the server's

import base64
import builtins
import collections
import importlib
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
from services.sandbox.values import decoded

_TEST = "test"


class _Pickler(pickle.Pickler):
    """Writes values of the test for the program."""

    def __init__(self, file: Any, test: Test) -> None:
        super().__init__(file)
        self._test = test

    def persistent_id(self, value: Any) -> Any:
        kind = type(value)
        if kind is Remote:
            return "object", _key(value)
        if kind.__module__ == _TEST or (
            getattr(value, "__module__", None) == _TEST and callable(value)
        ):
            self._test.locals[id(value)] = value
            return "local", id(value)
        return None

    def reducer_override(self, value: Any) -> Any:
        return (iter, (list(value),)) if isinstance(value, types.GeneratorType) else NotImplemented


class Test:
    """The test's side: runs the test, and requests what the program defines from the program's
    process.
    """

    def __init__(self, read_fd: int, write_fd: int, limit: int) -> None:
        self._in, self._out, self._limit = (
            os.fdopen(read_fd, "rb"),
            os.fdopen(write_fd, "wb"),
            limit,
        )
        self._remotes: dict[int, Any] = {}
        self.locals: dict[int, Any] = {}

    def run(self, text: str) -> None:
        """Runs a test. Raises whatever the test raises."""
        code = compile(text, "<test>", "exec")
        names = sorted(_names(code) - set(dir(builtins)))
        found = self._request(
            ["names", names],
            lambda reply: {name: self._decoded(value) for name, value in reply[0].items()},
        )
        module = types.ModuleType("solution")
        namespace = {
            name: value for name, value in found.items() if name in names and value is not _ABSENT
        }
        module.__dict__.update(namespace)
        sys.modules["solution"] = module
        exec(code, {**namespace, "__name__": _TEST})  # noqa: S102

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
        if action in ("eq", "ne") and args[0] is args[1]:
            return action == "eq"
        if all(arg is not _ABSENT for arg in plain):
            return ACTIONS[action](*plain)
        mine = any(type(arg) is not Remote or _plain(arg) is not _ABSENT for arg in args)
        if mine and action in ("eq", "ne"):
            return action == "ne"
        result = self.do(action, *args)
        if (mine or len(args) == 1) and (
            type(result) is not Remote or _plain(result) is not _ABSENT
        ):
            raise TypeError(
                f"an object of the program and a value of the test do not support {action}"
            )
        return result

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
                kind, args = self._decoded(reply[0]), [decoded(arg) for arg in reply[1]]
                raise kind(*args) if issubclass(kind, Exception) else RuntimeError(kind.__name__)
            self._out.write(
                json.dumps(["answer", self._dumps(self._asked(*reply))]).encode() + b"\n"
            )
            self._out.flush()

    def _asked(self, action: str, key: int, content: list[Any]) -> tuple[Any, Exception | None]:
        """Executes the program's request on an object of the test: a call, or access to a public
        attribute.
        """
        try:
            target, args = self.locals[key], [self._decoded(arg) for arg in content]
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
        if kind == "exception" and key == 0:
            found = getattr(builtins, str(content[0]))
            return found if issubclass(found, BaseException) else RuntimeError
        if key not in self._remotes:
            if kind == "exception":
                base = self._other(kind, 0, content[1])
                self._remotes[key] = type(
                    str(content[0]), (base if issubclass(base, Exception) else Exception,), {}
                )
            else:
                self._remotes[key] = Remote(self, int(key), _ABSENT)
        found = self._remotes[key]
        if kind == "object" and type(found) is Remote:
            _note(found, _ABSENT if content[0] is None else decoded(content[0]))
        return found


_ABSENT: Any = object()


def _names(code: types.CodeType) -> set[str]:
    inner = [
        _names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)
    ]
    return set(code.co_names).union(*inner)


def _imported(module: str, name: str) -> Any:
    if not re.fullmatch(r"[A-Za-z_][\w.]*", module) or (
        name and module.lstrip("_") not in PURE.split()
    ):
        return _ABSENT
    try:
        found = importlib.import_module(module)
        return getattr(found, name) if name else found
    except (ImportError, AttributeError):
        return _ABSENT


def _overwrite(local: Any, content: Any) -> None:
    """Replaces the content of a list, dictionary, … by that of the program's copy."""
    if isinstance(local, bytearray):
        local[:] = content
        return
    local.clear()
    getattr(local, "extend" if isinstance(local, (list, collections.deque)) else "update")(content)


class Remote:
    """An object of the program, in the test's process."""

    __slots__ = ("_Remote__key", "_Remote__plain", "_Remote__test")

    def __init__(self, test: Test, key: int, plain: Any) -> None:
        for name, value in (("test", test), ("key", key), ("plain", plain)):
            object.__setattr__(self, f"_Remote__{name}", value)

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
    found: int = object.__getattribute__(remote, "_Remote__key")
    return found


def _plain(value: Any) -> Any:
    """Returns the plain value of an object: a subclass of int or list, an array; `_ABSENT` for any
    other.
    """
    return object.__getattribute__(value, "_Remote__plain") if type(value) is Remote else value


def _note(remote: Any, plain: Any) -> None:
    """Records the current plain value."""
    object.__setattr__(remote, "_Remote__plain", plain)


def _test(remote: Any) -> Test:
    found: Test = object.__getattribute__(remote, "_Remote__test")
    return found


def _do(action: str, remote: Any, *args: Any) -> Any:
    return _test(remote).do(action, remote, *args)


def _method(action: str, how: str) -> Callable[..., Any]:
    def operated(self: Any, *args: Any) -> Any:
        return _test(self).operate(action, self, *args)

    def reflected(self: Any, other: Any) -> Any:
        return _test(self).operate(action, other, self)

    def asked(self: Any, *args: Any) -> Any:
        plain = _plain(self)
        return _do(action, self, *args) if plain is _ABSENT else ACTIONS[action](plain, *args)

    def converted(self: Any, *args: Any) -> Any:
        plain = _plain(self)
        if plain is _ABSENT:
            raise TypeError(f"an object of the program does not support {action}")
        return getattr(builtins, action)(plain, *args)

    return {"operated": operated, "reflected": reflected, "asked": asked, "converted": converted}[
        how
    ]


for _how, _actions in (
    ("operated", f"{BINARY} {COMPARED} {UNARY}"),
    ("asked", "len iter bool str repr format contains getitem"),
    ("converted", "int float complex round"),
):
    for _action in _actions.split():
        setattr(Remote, f"__{_action.rstrip('_')}__", _method(_action, _how))
for _action in BINARY.split():
    setattr(Remote, f"__r{_action.rstrip('_')}__", _method(_action, "reflected"))
for _action in ("next", "setitem", "delitem", "enter"):
    setattr(
        Remote, f"__{_action}__", lambda self, *args, _action=_action: _do(_action, self, *args)
    )
Remote.__index__ = _method("int", "converted")  # type: ignore[attr-defined]
