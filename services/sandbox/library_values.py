"""Values of the standard library and of numpy, which a program sends as what makes an equal value,
and strict comparisons of arrays. Source for the Python of the sandbox, like `inside`.

numpy stretches an empty array to any shape of one item, and all of its items are then equal: a
program that returns `[]` would pass `np.allclose(f(x), 4)`.
"""

from __future__ import annotations  # its Python may be older than the server's

import datetime
import functools
import importlib
from collections.abc import Callable
from typing import Any


def _time_of_day(value: Any) -> list[Any]:
    return [value.hour, value.minute, value.second, value.microsecond]


def _zone(value: Any) -> Any:
    offset = value.utcoffset()
    return None if offset is None else datetime.timezone(offset)


def _factory(value: Any) -> str | None:
    """Returns the name of the type of a defaultdict's new values, if it is one of Python's."""
    name = getattr(value.default_factory, "__name__", None)
    return name if name in _FACTORIES else None


_FACTORIES: dict[Any, Any] = {
    kind.__name__: kind for kind in (bool, bytes, dict, float, int, list, set, str, tuple)
}
_ARGUMENTS: dict[tuple[str, str], Callable[[Any], list[Any]]] = {
    ("builtins", "range"): lambda value: [value.start, value.stop, value.step],
    ("collections", "deque"): lambda value: [list(value), value.maxlen],
    ("collections", "Counter"): lambda value: [dict(value)],
    ("collections", "OrderedDict"): lambda value: [list(value.items())],
    ("collections", "defaultdict"): lambda value: [_factory(value), dict(value)],
    ("datetime", "date"): lambda value: [value.year, value.month, value.day],
    ("datetime", "datetime"): lambda value: [
        value.year, value.month, value.day, *_time_of_day(value), _zone(value)
    ],
    ("datetime", "time"): lambda value: [*_time_of_day(value), _zone(value)],
    ("datetime", "timedelta"): lambda value: [value.days, value.seconds, value.microseconds],
    ("datetime", "timezone"): lambda value: [value.utcoffset(None)],
    ("decimal", "Decimal"): lambda value: [str(value)],
    ("fractions", "Fraction"): lambda value: [value.numerator, value.denominator],
    ("uuid", "UUID"): lambda value: [value.hex],
}  # fmt: skip
_NUMPY_KINDS = "biufcU"
"""Arrays of booleans, numbers and texts."""


def recipe(value: Any) -> tuple[str, str, list[Any]] | None:
    """Returns the module and the name of a value's type, and what makes an equal value; None for
    other types.
    """
    kind = type(value)
    key = (kind.__module__, kind.__qualname__)
    if key in _ARGUMENTS:
        return (*key, _ARGUMENTS[key](value))
    dtype = getattr(value, "dtype", None) if kind.__module__ == "numpy" else None
    if getattr(dtype, "kind", "?") not in _NUMPY_KINDS or dtype is None:
        return None
    return "numpy", "array", [dtype.str, list(value.shape), value.ravel().tolist()]


def made(module: str, name: str, content: list[Any]) -> Any:
    """Returns the value with this `recipe`. Raises ValueError for types that have none."""
    if (module, name) == ("numpy", "array"):
        import numpy

        dtype, shape, items = content
        if numpy.dtype(dtype).kind not in _NUMPY_KINDS:
            raise ValueError(dtype)
        array = numpy.array(items, dtype=dtype).reshape(shape)
        return array if shape else array[()]
    if (module, name) not in _ARGUMENTS:
        raise ValueError(f"there is no such type: {module}.{name}")
    if name == "defaultdict":
        content = [_FACTORIES.get(content[0]), *content[1:]]
    return getattr(importlib.import_module(module), name)(*content)


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
