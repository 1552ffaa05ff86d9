"""The program's side of a test in another process. Source for the Python of the sandbox, like
`inside`.

The program's process executes the requests of `remote` in the test's process: it looks up names,
calls functions, and uses objects, to which the test holds references.
"""

from __future__ import annotations  # its Python may be older than the server's

import base64
import collections
import io
import json
import operator
import os
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

from services.sandbox.values import encoded

_PLAIN: tuple[Any, ...] = (
    bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict, type(None), type(...),
    type({}.keys()), type({}.items())
)  # fmt: skip
MUTABLE = (list, dict, set, bytearray, collections.deque)
PURE = (
    "bisect cmath collections copy datetime decimal fractions functools heapq itertools json math numpy operator random re "
    "statistics string typing"
)
"""Modules whose functions a test may find among the program's names; the test's process imports
them itself."""
BINARY = "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift"
COMPARED = "lt le gt ge eq ne"
UNARY = "neg pos invert abs"
# The operations of a test on an object of the program.
ACTIONS: dict[str, Callable[..., Any]] = {
    name: getattr(operator, name)
    for name in f"{BINARY} {COMPARED} {UNARY} getitem setitem delitem contains".split()
}
ACTIONS.update(
    (function.__name__, function)
    for function in (iter, next, len, bool, str, repr, format, isinstance)
)
ACTIONS.update((function.__name__, function) for function in (getattr, setattr, delattr))
ACTIONS.update(
    call=lambda function, *args, **kwargs: function(*args, **kwargs),
    enter=lambda manager: type(manager).__enter__(manager),
    exit=lambda manager: type(manager).__exit__(manager, None, None, None),
)


class _Local:
    """A function or an object of the test, in the program's process."""

    def __init__(self, program: Program, key: int) -> None:
        self.__dict__.update(_program=program, _key=key)

    def __call__(self, *args: Any) -> Any:
        return self._program.ask("call", self._key, *args)

    def __getattr__(self, name: str) -> Any:
        return self._program.ask("getattr", self._key, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._program.ask("setattr", self._key, name, value)


class Program:
    """The program's side: executes the requests of the test's process."""

    def __init__(self, namespace: dict[str, Any], read_fd: int, write_fd: int) -> None:
        self._namespace, self._in, self._out = namespace, os.fdopen(read_fd, "rb"), write_fd
        self._objects: dict[int, Any] = {}
        self._locals: dict[int, _Local] = {}

    def serve(self, until: str = "") -> Any:
        """Answers until the test's process ends or sends a message of the kind `until`, which is
        returned.
        """
        while line := self._in.readline():
            kind, *content = json.loads(line)
            if kind == until:
                return content
            self._send(self._done(kind, content))
        os._exit(0)

    def ask(self, action: str, key: int, *args: Any) -> Any:
        """Returns the result of an action on an object of the test."""
        self._send(["ask", action, key, [self._encoded(arg) for arg in args]])
        [result] = self.serve("answer")
        value, error = self._loads(result)
        if error is not None:
            raise error
        return value

    def _send(self, message: Any) -> None:
        content = json.dumps(message).encode() + b"\n"
        while content:
            content = content[os.write(self._out, content) :]

    def _done(self, kind: str, content: list[Any]) -> list[Any]:
        try:
            if kind == "names":
                return [
                    "ok",
                    {
                        name: self._named(self._namespace[name])
                        for name in content[0]
                        if name in self._namespace
                    },
                ]
            args, kwargs = self._loads(content[1])
            before = [
                (i, arg, self._encoded(arg)) for i, arg in enumerate(args) if type(arg) in MUTABLE
            ]
            value = ACTIONS[content[0]](*args, **kwargs)
            changed = [[i, now] for i, arg, was in before if (now := self._encoded(arg)) != was]
            return ["ok", self._encoded(value), changed]
        except BaseException as error:
            return [
                "raise",
                self._encoded(type(error)),
                [encoded(arg) for arg in error.args if isinstance(arg, (str, int))],
            ]

    def _named(self, value: Any) -> list[Any]:
        if isinstance(value, types.ModuleType):
            return ["import", value.__name__, ""]
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
        if (
            isinstance(module, str)
            and module in sys.modules
            and getattr(sys.modules[module], str(name), None) is value
        ):
            return (
                ["import", module, name]
                if module.lstrip("_") in PURE.split()
                else self._encoded(value)
            )
        return self._encoded(value)

    def _encoded(self, value: Any, depth: int = 0) -> list[Any]:
        if isinstance(value, _Local):
            return ["local", value._key]
        if type(value) in _PLAIN:
            return encoded(value, depth, self._encoded)
        self._objects[id(value)] = value
        if isinstance(value, type) and issubclass(value, BaseException):
            base = next(kind for kind in value.__mro__ if kind.__module__ == "builtins")
            return [
                "exception",
                id(value) if base is not value else 0,
                value.__name__,
                base.__name__,
            ]
        plain = isinstance(value, _PLAIN) or any(
            hasattr(type(value), name) for name in ("tolist", "__index__", "__float__")
        )
        return ["object", id(value), encoded(value) if plain else None]

    def _loads(self, content: str) -> Any:
        return _Unpickler(io.BytesIO(base64.b64decode(content)), self).load()

    def referred(self, kind: str, key: int) -> Any:
        """Returns an object of the program, or a stand-in for an object of the test."""
        return (
            self._objects[key]
            if kind == "object"
            else self._locals.setdefault(key, _Local(self, key))
        )


class _Unpickler(pickle.Unpickler):
    """Reads values of the test, in the program's process."""

    def __init__(self, file: Any, program: Program) -> None:
        super().__init__(file)
        self._program = program

    def persistent_load(self, reference: Any) -> Any:
        return self._program.referred(*reference)


def serve(namespace: dict[str, Any], read_fd: int, write_fd: int) -> NoReturn:
    """Answers the test's process; runs in the program's process."""
    Program(namespace, read_fd, write_fd).serve()
    raise AssertionError
