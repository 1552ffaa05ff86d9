"""What tests in the sandbox have of pytest, against pytest itself."""

import random
import sys
import types
from typing import Any

import numpy as np
import pytest

from services.sandbox import pytest_names
from services.sandbox.program_names import public_functions
from services.sandbox.suite import run_suite


def drawn(draws: random.Random, depth: int = 2) -> tuple[Any, Any]:
    """Returns an expected value and one that may be close to it."""
    match draws.randrange(4 if depth == 0 else 7):
        case 0:
            value: Any = draws.choice([0, 0.0, 1, -2.5, 1e6, 1e-7, float("inf"), float("nan")])
            factor = draws.choice([0, 0.5e-6, 0.99e-6, 1.01e-6, 2e-3])
            offset = draws.choice([0, 0.9e-12, 1.1e-12, 0.5])
            return value, value * (1 + draws.choice([1, -1]) * factor) + offset
        case 1:
            return 1 + 2j, 1 + 2j + draws.choice([0, 1e-6, 1e-5j])
        case 2:
            return draws.choice(["a", None]), draws.choice(["a", "b", None, 1])
        case 3:
            return 3.0, draws.choice([3, True, "3", None, [3.0]])
        case 4 | 5:
            pairs = [drawn(draws, 0) for _ in range(draws.randrange(3))]
            expected = [pair[0] for pair in pairs]
            actual = [pair[1] for pair in pairs] + [1.0] * (draws.random() < 0.2)
            return expected, actual
    pairs = [drawn(draws, 0) for _ in range(2)]
    names = ["a", draws.choice(["b", "b", "c"])]
    return dict(zip("ab", [p[0] for p in pairs], strict=True)), dict(
        zip(names, [p[1] for p in pairs], strict=True)
    )


@pytest.mark.filterwarnings("ignore:invalid value")
def test_what_is_approximately_equal_is_so_for_pytest() -> None:
    draws = random.Random(0)
    for _ in range(3000):
        expected, actual = drawn(draws)
        options: dict[str, Any] = draws.choice(
            [{}, {"rel": 1e-2}, {"abs": 1e-3}, {"rel": 1e-9, "abs": 1e-9}, {"nan_ok": True}]
        )
        own = pytest_names.approx(expected, **options)
        try:
            is_equal = actual == pytest.approx(expected, **options)
        except TypeError:  # it refuses a tolerance for texts
            continue
        assert (actual == own) == is_equal, (expected, actual, options)
        assert (actual != own) != is_equal
    array = np.array([1.0, 2.0])
    assert array == pytest_names.approx([1.0, 2.0 + 1e-7])
    assert pytest_names.approx(array) == [1.0, 2.0 + 1e-7]
    assert array != pytest_names.approx([1.0, 2.1])


def test_a_block_must_raise_what_is_expected() -> None:
    with pytest_names.raises(ValueError, match="b") as caught:
        raise ValueError("abc")
    assert caught.value.args == ("abc",)
    with pytest_names.raises((KeyError, ValueError)):
        raise KeyError
    with pytest.raises(AssertionError), pytest_names.raises(ValueError):
        pass
    with pytest.raises(AssertionError), pytest_names.raises(ValueError, match="^b"):
        raise ValueError("abc")
    with pytest.raises(KeyError), pytest_names.raises(ValueError):
        raise KeyError
    assert pytest_names.raises(ValueError, int, "x", base=5).value is not None
    with pytest.raises(AssertionError):
        pytest_names.raises(ValueError, int, "4", base=5)
    with pytest.raises(AssertionError, match="why"):
        pytest_names.fail("why")


SUITE = """
import pytest

events = []

def setup_module(module): events.append("setup " + module.__name__)
def teardown_module(): events.append("teardown module")
def setup_function(function): events.append("setup " + function.__name__)
def teardown_function(function): events.append("teardown " + function.__name__)

@pytest.fixture(autouse=True)
def always():
    events.append("always")
    yield
    events.append("always ends")

@pytest.fixture
def base():
    events.append("base")
    yield 10
    events.append("base ends")

@pytest.fixture(name="named", params=[1, pytest.param(2)])
def other(request, base):
    return base + request.param

def test_plain(base):
    events.append(base)

@pytest.mark.parametrize("x, y", [(1, 2), pytest.param(3, 4)])
@pytest.mark.parametrize("z", ["a", "b"])
def test_many(x, z, y):
    events.append((x, y, z))

def test_named(named):
    events.append(named)

@pytest.mark.skip
def test_skipped():
    events.append("skipped")

@pytest.mark.skipif(True, reason="so")
def test_skipped_if():
    events.append("skipped")

@pytest.mark.skipif(False, reason="so")
@pytest.mark.anything
def test_not_skipped(default=5):
    events.append(default)

class TestOf:
    @classmethod
    def setup_class(cls): events.append("setup " + cls.__name__)
    @classmethod
    def teardown_class(cls): events.append("teardown class")
    def setup_method(self, method): events.append("setup " + method.__name__)
    def teardown_method(self): events.append("teardown method")

    @pytest.fixture
    def own(self, base):
        return [self, base]

    def test_b(self, own):
        events.append((own[0] is self, own[1]))

    def test_a(self):
        events.append("a")
"""


def test_tests_run_in_the_order_of_pytest(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest runs the methods of a class as they are written, the sandbox by name; it decides
    nothing, and both are compared sorted within a class."""
    module = types.ModuleType("test_events")
    monkeypatch.setitem(sys.modules, "pytest", pytest)
    pytest_names.install()
    exec(compile(SUITE, "suite.py", "exec"), module.__dict__)  # noqa: S102
    tests = [name for name in vars(module) if name.startswith(("test", "Test"))]
    run_suite(module, tests, lambda: None)
    monkeypatch.undo()
    base = ["base", "base ends"]
    around = ["always", "always ends"]

    def once(name: str, *inner: Any) -> list[Any]:
        return [f"setup {name}", around[0], *inner, around[1], f"teardown {name}"]

    def repeated(name: str, *inners: list[Any]) -> list[Any]:
        runs = [event for inner in inners for event in (around[0], *inner, around[1])]
        return [f"setup {name}", *runs, f"teardown {name}"]

    many = [[(x, y, z)] for z in ("a", "b") for x, y in ((1, 2), (3, 4))]
    events: Any = module.events
    found = sorted(map(str, events))
    expected = [
        "setup test_events",
        "setup test_plain", around[0], base[0], 10, base[1], around[1], "teardown test_plain",
        *repeated("test_many", *many),
        *repeated("test_named", [base[0], 11, base[1]], [base[0], 12, base[1]]),
        "setup test_skipped", "teardown test_skipped",
        "setup test_skipped_if", "teardown test_skipped_if",
        *once("test_not_skipped", 5),
        "setup TestOf",
        "setup test_a", around[0], "a", around[1], "teardown method",
        "setup test_b", around[0], base[0], (True, 10), base[1], around[1], "teardown method",
        "teardown class",
        "teardown module",
    ]  # fmt: skip
    assert found == sorted(map(str, expected))
    assert [events[0], events[-1]] == [expected[0], expected[-1]]
    plain = events.index("setup test_plain")
    assert events[plain : plain + 7] == expected[1:8]


def test_a_failing_test_ends_a_suite() -> None:
    module = types.ModuleType("test_failing")
    source = "def test_f():\n    assert 1 == 2\ndef check(candidate):\n    assert candidate == 5"
    exec(source, vars(module))  # noqa: S102
    with pytest.raises(AssertionError):
        run_suite(module, ["test_f"], lambda: None)
    run_suite(module, ["check"], lambda: 5)
    with pytest.raises(AssertionError):
        run_suite(module, ["check"], lambda: 6)


def test_the_functions_of_a_program() -> None:
    source = (
        "def a(): pass\nasync def b(): pass\ndef _c(): pass\ndef test_d(): pass\nx = 1\n"
        "class Other:\n    def e(self): pass\n"
        "class Solution:\n    y = 2\n    def f(self): pass\n    def _g(self): pass\n"
    )
    assert public_functions(source) == ["a", "b", "Solution().f"]
