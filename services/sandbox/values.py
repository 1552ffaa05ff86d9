"""Encodes a program's values as tagged JSON, for the server. The Python of the sandbox runs this
file, as it does `inside`.
"""

from __future__ import annotations  # its Python may be older than the server's

import base64
import operator
import types
from collections.abc import Callable
from typing import Any

MAX_DEPTH = 100
"""Levels of lists in lists."""
_JSON_BITS = 64
_COLLECTIONS: tuple[tuple[str, Any], ...] = (
    ("list", list),
    ("tuple", tuple),
    ("frozenset", frozenset),
    ("set", (set, type({}.keys()), type({}.items()))),
)


def encoded(
    value: Any, depth: int = 0, inner: Callable[[Any, int], Any] | None = None
) -> bool | int | float | str | list[Any] | None:
    """Converts a value to JSON: None, a bool, a number and a text stand for themselves, anything
    else is a list of its kind and its content. A value not consisting of Python literals becomes
    the name of its type.
    """
    inner = inner or encoded
    if depth > MAX_DEPTH:
        raise RecursionError(f"the value has more than {MAX_DEPTH} levels")
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, int):
        # Python refuses to read decimal integers of thousands of digits.
        return value if int.bit_length(value) <= _JSON_BITS else ["int", hex(value)]
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", base64.b64encode(value).decode()]
    for kind, types_ in _COLLECTIONS:
        if isinstance(value, types_):
            return [kind, [inner(item, depth + 1) for item in list(value)]]
    if isinstance(value, dict):
        # Not value.items(): a subclass may have its own.
        pairs = dict.items(value)
        return ["dict", [[inner(key, depth + 1), inner(item, depth + 1)] for key, item in pairs]]
    if hasattr(value, "tolist"):  # arrays
        return inner(value.tolist(), depth + 1)
    if hasattr(type(value), "__index__"):
        return encoded(operator.index(value))
    if hasattr(type(value), "__float__"):
        return float(value)
    if hasattr(type(value), "__iter__"):  # a range, a deque, a generator, dict.values()
        return ["iterable", [inner(item, depth + 1) for item in value]]
    return ["other", type(value).__name__]


def finished(value: Any) -> Any:
    """Returns the result of a coroutine, and any other value as it is."""
    if not isinstance(value, types.CoroutineType):
        return value
    import asyncio

    return asyncio.run(value)


class Iterable_(list):  # type: ignore[type-arg]
    """The items of a range, a deque, a generator, …, which are equal to no literal under Python's
    `==`.
    """

    def __eq__(self, other: object) -> bool:
        return self is other


_DECODERS: dict[str, Callable[..., Any]] = {
    "int": lambda content: int(content, 16),
    "complex": complex,
    "bytes": base64.b64decode,
    "other": lambda _: object(),  # not a literal: equal to nothing
}
_MAKERS: dict[str, Callable[..., Any]] = {
    "list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "iterable": Iterable_
}  # fmt: skip


def decoded(value: Any, other: Callable[..., Any] | None = None) -> Any:
    """Decodes a value that `encoded` made. A program may have forged it, so any error about types
    or values is possible.

    `other` decodes the kinds that are no literals.
    """
    if not isinstance(value, list):
        if isinstance(value, dict):
            raise TypeError("a dictionary is no value")
        return value
    kind, *content = value
    if kind in _MAKERS:
        return _MAKERS[kind](decoded(item, other) for item in content[0])
    if kind == "dict":
        return {decoded(key, other): decoded(item, other) for key, item in content[0]}
    if kind in _DECODERS:
        return _DECODERS[kind](*content)
    if other is None:
        raise ValueError(f"there is no such kind: {kind}")
    return other(kind, *content)
