"""What tests of a program use of pytest, which a bare Python lacks. Source for the Python of the
sandbox, like `inside`.

`install` makes it importable as `pytest`. Marks and fixtures leave attributes on functions, which
`services.sandbox.suite` reads.
"""

from __future__ import annotations  # its Python may be older than the server's

import re
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any, NoReturn


class _Raises:
    """The block of `with raises(…)`; `value` is the exception that was caught."""

    def __init__(self, expected: Any, match: str | None) -> None:
        self._expected = expected
        self._match = match
        self.value: Any = None

    def __enter__(self) -> _Raises:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        if kind is None:
            raise AssertionError(f"did not raise {self._expected}")
        if not issubclass(kind, self._expected):
            return False
        self.value = error
        if self._match is not None and not re.search(self._match, str(error)):
            raise AssertionError(f"{str(error)!r} does not match {self._match!r}")
        return True


def raises(expected: Any, *call: Any, match: str | None = None, **kwargs: Any) -> _Raises:
    """Returns a block that must raise, or calls a function that must."""
    block = _Raises(expected, match)
    if call:
        function, *arguments = call
        with block:
            function(*arguments, **kwargs)
    return block


class approx:
    """A number, or a sequence or mapping of numbers, that equals what is close to it.

    The tolerances are pytest's: relative 1e-6 and absolute 1e-12.
    """

    __hash__ = None  # type: ignore[assignment]
    __array_ufunc__ = None  # arrays leave the comparison to this class

    def __init__(
        self,
        expected: Any,
        rel: float | None = None,
        abs: float | None = None,
        nan_ok: bool = False,
    ) -> None:
        self._expected = expected
        self._rel = rel
        self._abs = abs
        self._nan_ok = nan_ok

    def __eq__(self, actual: object) -> bool:
        return self._close(_listed(actual), _listed(self._expected))

    def _close(self, actual: Any, expected: Any) -> bool:
        if isinstance(expected, dict):
            same_keys = isinstance(actual, dict) and actual.keys() == expected.keys()
            return same_keys and all(self._close(actual[key], expected[key]) for key in expected)
        if isinstance(expected, (list, tuple)):
            if not isinstance(actual, (list, tuple)) or len(actual) != len(expected):
                return False
            return all(map(self._close, actual, expected))
        if actual == expected:
            return True
        is_number = isinstance(actual, (int, float, complex))
        if not is_number or expected is None or isinstance(expected, (str, bool)):
            return False
        if self._nan_ok and actual != actual and expected != expected:
            return True
        return bool(abs(actual - expected) <= self._tolerance(expected))

    def _tolerance(self, expected: Any) -> float:
        if self._abs is not None and self._rel is None:
            return self._abs
        relative = 1e-6 if self._rel is None else self._rel
        absolute = 1e-12 if self._abs is None else self._abs
        return float(max(relative * abs(expected), absolute))

    def __repr__(self) -> str:
        return f"approx({self._expected!r})"


def _listed(value: Any) -> Any:
    """Returns the items of an array, and any other value as it is."""
    return value.tolist() if hasattr(type(value), "dtype") else value


def fail(reason: str = "", pytrace: bool = True) -> NoReturn:
    """Fails the test."""
    raise AssertionError(reason)


class param(tuple):  # type: ignore[type-arg]
    """One set of parameters."""

    def __new__(cls, *values: Any, **_: Any) -> param:
        return super().__new__(cls, values)


def fixture(
    function: Any = None,
    *,
    name: str = "",
    autouse: bool = False,
    params: Iterable[Any] = (),
    **_: Any,
) -> Any:
    """Marks a function as a fixture; with `params` a test runs for each `request.param`."""

    def marked(function: Any) -> Any:
        function.fixture_name = name or function.__name__
        function.is_automatic = autouse
        function.choices = []
        for value in params:
            choice = value[0] if isinstance(value, param) else value
            function.choices.append(
                {f"{function.fixture_name}.request": types.SimpleNamespace(param=choice)}
            )
        return function

    return marked if function is None else marked(function)


def _parametrize(names: Any, values: Iterable[Any], **_: Any) -> Callable[[Any], Any]:
    keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    choices = []
    for value in values:
        parts = (value,) if len(keys) == 1 and not isinstance(value, param) else value
        choices.append(dict(zip(keys, parts)))  # noqa: B905  (its Python may lack `strict`)

    def marked(function: Any) -> Any:
        function.parameters = [choices, *getattr(function, "parameters", [])]
        return function

    return marked


def _set(name: str, value: bool) -> Callable[[Any], Any]:
    def marked(function: Any) -> Any:
        setattr(function, name, value)
        return function

    return marked


class _Marks:
    """`pytest.mark`; a mark without a meaning here changes nothing."""

    parametrize = staticmethod(_parametrize)

    def skipif(self, condition: Any, **_: Any) -> Callable[[Any], Any]:
        return _set("is_skipped", bool(condition))

    def __getattr__(self, name: str) -> Any:
        # Neither decides anything: any program passes a test that may fail.
        attribute = "is_skipped" if name in ("skip", "xfail") else "is_marked"

        def mark(*args: Any, **_: Any) -> Any:
            if len(args) == 1 and callable(args[0]):
                return _set(attribute, True)(args[0])
            return _set(attribute, True)

        return mark


def install() -> None:
    """Makes this module importable as `pytest`."""
    module: Any = types.ModuleType("pytest")
    for value in (raises, approx, fail, param, fixture):
        setattr(module, value.__name__, value)
    module.mark = _Marks()
    module.main = lambda *_: 0
    sys.modules["pytest"] = module
