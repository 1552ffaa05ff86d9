"""Runs the functions and classes of a test, once its statements have run. Source for the Python of
the sandbox, like `inside`.

`services.sandbox.python_tests` says which ones these are.
"""

from __future__ import annotations  # its Python may be older than the server's

import collections
import inspect
import io
import itertools
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from services.sandbox.values import finished


def run_suite(module: types.ModuleType, tests: list[str], candidate: Callable[[], Any]) -> None:
    """Runs the cases of unittest, and the functions and classes with these names.

    Args:
        module: the test, after its statements have run.
        tests: names in it.
        candidate: returns the function of the program that `check` gets.

    Raises:
        AssertionError: a case of unittest failed, or whatever another test raises.
    """
    _run_unittest(module)
    fixtures = _Fixtures(vars(module))
    if tests:
        _call_if_there(module, "setup_module")
    for name in tests:
        value = vars(module)[name]
        if name == "check":
            finished(value(candidate()))
        elif inspect.isclass(value):
            _run_class(value, fixtures)
        else:
            _call_if_there(module, "setup_function", value)
            _run_function(value, fixtures)
            _call_if_there(module, "teardown_function", value)
    if tests:
        _call_if_there(module, "teardown_module")


# unittest


def _run_unittest(module: types.ModuleType) -> None:
    unittest: Any = sys.modules.get("unittest")
    if unittest is None:
        return
    cases = unittest.defaultTestLoader.loadTestsFromModule(module)
    result = unittest.TextTestRunner(stream=io.StringIO(), failfast=True).run(cases)
    for _, trace in result.failures + result.errors:
        raise AssertionError(trace.strip().splitlines()[-1])
    if result.unexpectedSuccesses:
        raise AssertionError("an expected failure did not happen")


# pytest


class _Fixtures:
    """The fixtures among some definitions; each test function gets new values."""

    def __init__(self, definitions: dict[str, Any]) -> None:
        self._functions: dict[str, Any] = {}
        for value in list(definitions.values()):
            # An object of the program answers for any attribute, so only functions are asked.
            if inspect.isfunction(value) and hasattr(value, "fixture_name"):
                self._functions[value.fixture_name] = value

    def of_class(self, kind: type) -> _Fixtures:
        """Returns these fixtures with those of a class and its bases."""
        inside = _Fixtures({name: inspect.getattr_static(kind, name) for name in dir(kind)})
        inside._functions = {**self._functions, **inside._functions}
        return inside

    def automatic(self) -> list[str]:
        """Returns the names of the fixtures that every test uses."""
        return [name for name, function in self._functions.items() if function.is_automatic]

    def choices(self, names: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
        """Returns the sets of parameters of the fixtures among these, and of those that they
        use.
        """
        found: dict[str, list[dict[str, Any]]] = {}
        for name in names:
            if name in self._functions:
                function = self._functions[name]
                found.update(self.choices(_required(function)))
                found[name] = function.choices or [{}]
        return found

    def value(self, name: str, ready: dict[str, Any], cleanup: list[Iterator[Any]]) -> Any:
        """Returns the value of a fixture; `ready` holds those of this test, and its `self`."""
        if name not in ready:
            function = self._functions[name]
            arguments: dict[str, Any] = {}
            for key in _required(function):
                wanted = f"{name}.request" if key == "request" else key
                arguments[key] = self.value(wanted, ready, cleanup)
            if "self" in inspect.signature(function).parameters:
                arguments["self"] = ready["self"]
            value = function(**arguments)
            if type(value) is types.GeneratorType:  # not one of the program
                cleanup.append(value)
                value = next(value)
            ready[name] = value
        return ready[name]


def _run_class(kind: type, outside: _Fixtures) -> None:
    fixtures = outside.of_class(kind)
    _call_if_there(kind, "setup_class")
    for name in dir(kind):
        if not name.startswith("test"):
            continue
        instance: Any = kind()
        method = getattr(instance, name)
        _call_if_there(instance, "setup_method", method)
        _run_function(method, fixtures, owner=instance)
        _call_if_there(instance, "teardown_method", method)
    _call_if_there(kind, "teardown_class")


def _call_if_there(owner: Any, name: str, about: Any = None) -> None:
    """Calls the function of a module, class or object that prepares or ends tests, if there is one;
    an argument of it gets `about`, by default the owner.
    """
    function = getattr(owner, name, None)
    if inspect.isroutine(function):
        parameters = inspect.signature(function).parameters.values()
        function(*[about or owner for each in parameters if each.default is each.empty])


def _run_function(function: Any, fixtures: _Fixtures, owner: Any = None) -> None:
    """Runs a test function for every set of its parameters."""
    if getattr(function, "is_skipped", False):
        return
    required = _required(function)
    choices = fixtures.choices([*fixtures.automatic(), *required])
    stacked = [*choices.values(), *getattr(function, "parameters", [])]
    for combination in itertools.product(*stacked):
        parameters = dict(collections.ChainMap(*combination))
        ready = dict(parameters, self=owner)
        cleanup: list[Iterator[Any]] = []
        for name in fixtures.automatic():
            fixtures.value(name, ready, cleanup)
        arguments = {name: value for name, value in parameters.items() if name.isidentifier()}
        for name in required:
            arguments[name] = fixtures.value(name, ready, cleanup)
        finished(function(**arguments))
        for generator in reversed(cleanup):
            next(generator, None)


def _required(function: Any) -> list[str]:
    """Returns the names of a function's arguments without a default, but for `self`."""
    names = []
    for name, parameter in inspect.signature(function).parameters.items():
        is_plain = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if is_plain and parameter.default is parameter.empty and name != "self":
            names.append(name)
    return names
