"""The program's side of a test in another process. Source for the Python of the sandbox, like
`inside`.

The program's process executes the requests of `remote` in the test's process: it looks up names,
calls functions, and uses objects, to which the test holds references.
"""

from __future__ import annotations  # its Python may be older than the server's

import base64
import builtins
import collections
import copy
import io
import json
import operator
import os
import pickle
import types
from collections.abc import Callable
from typing import Any

from services.sandbox.library_values import recipe
from services.sandbox.values import encoded, finished

_PLAIN: tuple[Any, ...] = (
    bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict,
    type(None), type({}.keys()), type({}.items())
)  # fmt: skip
_MUTABLE = (
    list, dict, set, bytearray, collections.deque, collections.Counter, collections.OrderedDict,
    collections.defaultdict
)  # fmt: skip
BINARY = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor",
    "lshift", "rshift",
)  # fmt: skip
COMPARED = ("lt", "le", "gt", "ge", "eq", "ne")
UNARY = ("neg", "pos", "invert", "abs")
_ITEMS = ("getitem", "setitem", "delitem", "contains")
_BUILTINS = (
    "iter", "next", "len", "bool", "str", "repr", "format", "hash", "isinstance", "getattr",
    "setattr", "delattr",
)  # fmt: skip


ACTIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, *args, **kwargs: function(*args, **kwargs),
    "itself": lambda value: value,
    "enter": lambda manager: type(manager).__enter__(manager),
    "exit": lambda manager: type(manager).__exit__(manager, None, None, None),
    "await": finished,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "type": type,
}
"""The operations of a test on an object of the program."""
for _name in BINARY + COMPARED + UNARY + _ITEMS:
    ACTIONS[_name] = getattr(operator, _name)
for _name in _BUILTINS:
    ACTIONS[_name] = getattr(builtins, _name)


def is_mutable(value: Any) -> bool:
    """Whether a function may change an argument in place, so that its caller sees it."""
    kind = type(value)
    return kind in _MUTABLE or (kind.__module__, kind.__qualname__) == ("numpy", "ndarray")


class _Local:
    """A function or an object of the test, in the program's process."""

    def __init__(self, program: Program, key: int) -> None:
        self.__dict__.update(_program=program, _key=key)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._program.ask("call", self._key, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return self._program.ask("getattr", self._key, name)

    @property
    def __doc__(self) -> Any:  # type: ignore[override]
        return self._program.ask("getattr", self._key, "__doc__")

    def __setattr__(self, name: str, value: Any) -> None:
        self._program.ask("setattr", self._key, name, value)


class Program:
    """The program's side: executes the requests of the test's process."""

    def __init__(self, namespace: dict[str, Any], read_fd: int, write_fd: int) -> None:
        self._namespace = namespace
        self._in = os.fdopen(read_fd, "rb")
        self._out = write_fd
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
            self._send(self._reply(kind, content))
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

    def _reply(self, kind: str, content: list[Any]) -> list[Any]:
        """Returns the reply to a request: `ok` with its result, or `raise` with the error."""
        try:
            if kind == "names":
                [names] = content
                known = self._namespace.keys() & names
                return ["ok", {name: self._shared(self._namespace[name]) for name in known}]
            return self._act(*content)
        except BaseException as error:
            return ["raise", *self._error(error)]

    def _error(self, error: BaseException) -> list[Any]:
        """Returns an exception's class, arguments, attributes and text."""
        args = [encoded(arg) for arg in error.args if type(arg) in _PLAIN]
        plain = {name: value for name, value in vars(error).items() if type(value) in _PLAIN}
        attributes = {name: encoded(value) for name, value in plain.items()}
        return [self._encoded(type(error)), args, attributes, str(error)]

    def _act(self, action: str, arguments: str) -> list[Any]:
        """Performs an action; the reply has its value, and the arguments that it changed."""
        args, kwargs = self._loads(arguments)
        before = {i: self._encoded(arg) for i, arg in enumerate(args) if is_mutable(arg)}

        value = ACTIONS[action](*args, **kwargs)
        changed = []
        for i, content in before.items():
            now = self._encoded(args[i])
            if now != content:
                changed.append([i, now])
        result = self._shared(value) if action == "getattr" else self._encoded(value)
        return ["ok", result, changed]

    def _shared(self, value: Any) -> Any:
        """Encodes what the program keeps: the test may change a list or dictionary, and sees what
        the program changes later.
        """
        content = self._encoded(value)
        if type(value) not in _MUTABLE:
            return content
        self._objects[id(value)] = value
        return ["object", id(value), [content], False]

    def _encoded(self, value: Any, depth: int = 0) -> Any:
        """Encodes a value for the test: plain ones as data, any other as a reference."""
        if isinstance(value, _Local):
            return ["local", value._key]
        if type(value) in _PLAIN:
            return encoded(value, depth, self._encoded)
        data = recipe(value)
        if data is not None:
            module, name, *parts = data
            sent = [[self._encoded(item, depth + 1) for item in part] for part in parts]
            return ["made", module, name, *sent]
        self._objects[id(value)] = value
        if isinstance(value, types.CoroutineType):
            return ["coroutine", id(value)]
        if isinstance(value, type) and issubclass(value, BaseException):
            bases = [base for base in value.__bases__ if issubclass(base, BaseException)]
            return [
                "exception",
                id(value),
                value.__module__,
                value.__name__,
                [self._encoded(base) for base in bases],
            ]
        converts = any(hasattr(type(value), name) for name in ("tolist", "__index__", "__float__"))
        has_plain_value = converts or isinstance(value, _PLAIN)
        plain = [encoded(value)] if has_plain_value else []
        return ["object", id(value), plain, isinstance(value, types.GeneratorType)]

    def _loads(self, content: str) -> Any:
        return _Unpickler(io.BytesIO(base64.b64decode(content)), self).load()

    def referred(self, kind: str, key: int) -> Any:
        """Returns an object of the program, or a stand-in for an object of the test."""
        if kind == "object":
            return self._objects[key]
        return self._locals.setdefault(key, _Local(self, key))


class _Unpickler(pickle.Unpickler):
    """Reads values of the test, in the program's process."""

    def __init__(self, file: Any, program: Program) -> None:
        super().__init__(file)
        self._program = program

    def persistent_load(self, reference: Any) -> Any:
        return self._program.referred(*reference)
