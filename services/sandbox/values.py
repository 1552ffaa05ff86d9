"""Encodes a program's values as tagged JSON, for the server. Source for the Python of the sandbox,
like `inside`.
"""

from __future__ import annotations  # its Python may be older than the server's

import base64
import operator
import types
from collections.abc import Callable
from typing import Any

_MAX_DEPTH = 100
_COLLECTIONS: tuple[tuple[str, Any], ...] = (
    ("list", list),
    ("tuple", tuple),
    ("frozenset", frozenset),
    ("set", (set, type({}.keys()), type({}.items()))),
)


def encoded(
    value: Any, depth: int = 0, inner: Callable[[Any, int], list[Any]] | None = None
) -> list[Any]:
    """Converts a value to tagged JSON; a value not consisting of Python literals becomes the name
    of its type.
    """
    inner = inner or encoded
    if depth > _MAX_DEPTH:
        raise RecursionError("the result is nested too deeply")
    if value is None or value is Ellipsis:
        return ["literal", None]
    if isinstance(value, bool):
        return ["literal", value]
    if isinstance(value, int):
        return ["int", hex(value)]
    if isinstance(value, float):
        return ["float", float.__repr__(value)]
    if isinstance(value, complex):
        return ["complex", [float.__repr__(value.real), float.__repr__(value.imag)]]
    if isinstance(value, str):
        return ["literal", str.__str__(value)]
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
        return ["int", hex(operator.index(value))]
    if hasattr(type(value), "__float__"):
        return ["float", float.__repr__(float(value))]
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


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "literal": lambda content: content,  # None, a bool or a str
    "int": lambda content: int(content, 16),
    "float": float,
    "complex": lambda content: complex(*map(float, content)),
    "bytes": base64.b64decode,
    "other": lambda _: object(),  # not a literal: equal to nothing
}
_MAKERS: dict[str, Callable[..., Any]] = {
    "list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "iterable": Iterable_
}  # fmt: skip


def decoded(tagged: Any, other: Callable[..., Any] | None = None) -> Any:
    """Decodes a value from tagged JSON. A program may have forged it, so any error about types or
    values is possible.

    `other` decodes the tags of non-literals.
    """
    kind, *content = tagged
    if kind in _MAKERS:
        return _MAKERS[kind](decoded(item, other) for item in content[0])
    if kind == "dict":
        return {decoded(key, other): decoded(value, other) for key, value in content[0]}
    if kind in _DECODERS:
        return _DECODERS[kind](content[0])
    if other is None:
        raise ValueError(f"there is no such kind: {kind}")
    return other(kind, *content)
