"""Builds values of the standard library and of numpy again in the test's process, and compares
arrays strictly. Source for the Python of the sandbox, like `inside`.

numpy stretches an empty array to any shape of one item, and all of its items are then equal: a
program that returns `[]` would pass `np.allclose(f(x), 4)`.
"""

from __future__ import annotations  # its Python may be older than the server's

import datetime
import functools
import importlib
from collections.abc import Callable
from typing import Any

# Types whose values arrive as equal values. Nothing that these make from any arguments can hurt the
# test.
_TYPES = {
    "builtins": ("range",),
    "collections": ("deque", "Counter", "OrderedDict", "defaultdict"),
    "datetime": ("date", "datetime", "time", "timedelta", "timezone"),
    "decimal": ("Decimal",),
    "fractions": ("Fraction",),
    "uuid": ("UUID",),
}
# Arrays of booleans, numbers and texts.
_NUMPY_KINDS = "biufcU"


def recipe(value: Any) -> tuple[str, str, list[Any], list[Any]] | None:
    """Returns how to build an equal value: the module and the name of its type, the arguments of
    the type, and the items with which the value is then filled. None for other types.
    """
    kind = type(value)
    module = kind.__module__
    name = kind.__qualname__
    dtype: Any = getattr(value, "dtype", None)
    if module == "numpy" and getattr(dtype, "kind", "?") in _NUMPY_KINDS:
        return module, "array", [dtype.str, list(value.shape), value.ravel().tolist()], []
    if name not in _TYPES.get(module, ()):
        return None
    if name == "UUID":
        return module, name, [value.hex], []
    if getattr(value, "tzinfo", None) is not None:
        # A zone of a file becomes its offset at that time.
        offset = value.utcoffset()
        value = value.replace(tzinfo=None if offset is None else datetime.timezone(offset))
    # (type, arguments, attributes, items of a list, items of a dictionary), as for `pickle`; what
    # comes last may be left out.
    _, arguments, *rest = value.__reduce_ex__(2)
    items = [item for iterator in rest[1:] if iterator is not None for item in iterator]
    return module, name, list(arguments), items


def made(module: str, name: str, arguments: list[Any], items: list[Any]) -> Any:
    """Builds a value by its `recipe`. Raises ValueError for types that have none."""
    if (module, name) == ("numpy", "array"):
        import numpy

        dtype, shape, content = arguments
        if numpy.dtype(dtype).kind not in _NUMPY_KINDS:
            raise ValueError(dtype)
        array = numpy.array(content, dtype=dtype).reshape(shape)
        return array if shape else array[()]
    if name not in _TYPES.get(module, ()):
        raise ValueError(f"there is no such type: {module}.{name}")
    value = getattr(importlib.import_module(module), name)(*arguments)
    if items:
        (value.extend if name == "deque" else value.update)(items)
    return value


# Arrays

_COMPARISONS = {
    "numpy": ("allclose", "array_equiv", "isclose"),
    "numpy.testing": (
        "assert_allclose", "assert_almost_equal", "assert_array_almost_equal",
        "assert_array_equal", "assert_array_less", "assert_equal",
    ),
}  # fmt: skip


@functools.lru_cache(maxsize=1)
def make_strict() -> None:
    """Replaces numpy's comparisons in this process, where there is numpy."""
    for name, functions in _COMPARISONS.items():
        try:
            module = importlib.import_module(name)
        except ImportError:
            return
        for function in functions:
            setattr(module, function, _strict(getattr(module, function)))


def same(left: Any, right: Any) -> Any:
    """Returns `left == right`."""
    if any(hasattr(type(value), "dtype") for value in (left, right)):
        _refuse_stretched(left, right)
    return left == right


def _strict(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def compare(actual: Any, desired: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_stretched(actual, desired)
        return function(actual, desired, *args, **kwargs)

    return compare


def _refuse_stretched(*values: Any) -> None:
    import numpy

    if len({numpy.size(value) == 0 for value in values}) > 1:
        raise AssertionError("an empty array is compared with one that is not")


def strict_array(array: Any) -> Any:
    """Returns an array of the program; an empty one does not take part in computations with others
    that have items.
    """
    if array.size:
        return array
    import numpy

    def compute(self: Any, function: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method == "__call__":
            _refuse_stretched(*inputs)
        plain = [value.view(numpy.ndarray) if type(value) is empty else value for value in inputs]
        return getattr(function, method)(*plain, **kwargs)

    empty: Any = type("ndarray", (numpy.ndarray,), {"__array_ufunc__": compute})
    return array.view(empty)
