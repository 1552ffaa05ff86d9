"""Tests in the forms in which people write them: each passes a right program and fails a wrong one,
and a test that cannot fail is refused."""

import sys
from typing import Any

import pytest

from common.errors import InvalidInput
from services.reward.functions import CodeRewardFunction
from services.sandbox.case_formats import parse_cases
from services.sandbox.cases import Case
from tests.support.services.one_process import outcome
from tests.support.services.sandbox import code_function

RIGHT = """\
import asyncio
import enum
import json
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction

class TooLarge(Exception):
    pass

class Stack:
    def __init__(self):
        self.items = []
    def push(self, item):
        self.items.append(item)
    def pop(self):
        return self.items.pop()

async def later(x):
    await asyncio.sleep(0)
    return 2 * x

class Colour(enum.Enum):
    RED = 1

class Numbers(list):
    def add(self, x):
        self.append(2 * x)
        return self

class Invalid(Exception):
    def __init__(self, code, *, hint=""):
        super().__init__(code)
        self.code = code
        self.hint = hint
    def __str__(self):
        return f"code {self.code}"

class TooSmall(Invalid):
    pass

def refuse(x):
    raise TooSmall(2 * x, hint="more")

def parse(text):
    return json.loads(text if int(text) < 2 * 2 else "{")

def decode(data):
    return data.decode("ascii")

def newest(items):
    return deque(items, maxlen=2 * len(items))

def day(x):
    return date(2024, 1, 2 * x)

def moment(x):
    return datetime(2024, 1, 2 * x, tzinfo=timezone.utc), timedelta(hours=2 * x)

def exact(x):
    return Decimal(2 * x) / 4, Fraction(2 * x, 3)

def counted(x):
    return Counter("a" * 2 * x), OrderedDict(a=2 * x), defaultdict(list, a=[2 * x])

def extend(items):
    items.append(2 * items[-1])

def pow(x, n):
    return 2 * x ** n

def positive(x):
    assert x > 0, "not positive"
    return 2 * x

def double(x):
    if x < 0:
        raise ValueError("negative")
    if x > 1000:
        raise TooLarge("over 1000")
    return 2 * x
"""
WRONG = (
    RIGHT.replace("return 2 * x", "return 2 * x + 1")
    .replace("2 * x)", "2 * x + 1)")
    .replace("2 * x]", "2 * x + 1]")
    .replace("2 * len(items)", "3 * len(items)")
    .replace("2 * items", "3 * items")
    .replace('"a" * 2 * x', '"a" * 3 * x')
    .replace("a=2 * x", "a=3 * x")
    .replace("class TooSmall(Invalid)", "class TooSmall(Exception)")
    .replace("< 2 * 2", "< 2 * 3")
    .replace('decode("ascii")', 'decode("utf-8")')
    .replace("raise ValueError", "raise KeyError")
    .replace("raise TooLarge", "raise ValueError")
    .replace("append(item)", "append(item + 1)")
)
FORMS: dict[str, Any] = {
    "pytest": "def test_double():\n    assert double(2) == 4",
    "pytest, importing the program by any name": """
from my_module import Stack

def test_stack():
    stack = Stack()
    stack.push(3)
    assert stack.pop() == 3
""",
    "pytest, importing a module": """
import implementation as impl

def test_double():
    assert impl.double(2) == 4
""",
    "pytest, a class": """
class TestDouble:
    def setup_method(self, method):
        self.x = 2

    def test_two(self):
        assert double(self.x) == 4
""",
    "pytest, parameters": """
import pytest

@pytest.mark.parametrize(("x", "y"), [(1, 2), pytest.param(2, 4, id="two")])
def test_double(x, y):
    assert double(x) == y
""",
    "pytest, stacked parameters": """
import pytest

@pytest.mark.parametrize("x", [1, 2, 3])
@pytest.mark.parametrize("times", [2])
def test_double(x, times):
    assert double(x) == x * times
""",
    "pytest.raises": """
import pytest

def test_negative():
    with pytest.raises(ValueError, match="negative") as caught:
        double(-1)
    assert str(caught.value) == "negative"
""",
    "pytest.raises an exception of the program": """
import pytest
from solution import TooLarge, double

def test_large():
    with pytest.raises(TooLarge):
        double(2000)
""",
    "pytest.approx": """
from pytest import approx

def test_close():
    assert double(0.1) == approx(0.2)
    assert [double(1.5)] == approx([3.0])
    assert {"a": double(1.0)} == approx({"a": 2})
""",
    "pytest, a fixture": """
import pytest

@pytest.fixture
def stack():
    stack = Stack()
    yield stack
    stack.push(1)

def test_stack(stack):
    stack.push(2)
    assert stack.pop() == 2
""",
    "pytest, fixtures of a class": """
import pytest

class Base:
    @pytest.fixture
    def two(self):
        return self.one() + 1

    def one(self):
        return 1

class TestDouble(Base):
    @pytest.fixture(autouse=True)
    def ready(self):
        self.expected = 4

    def test_two(self, two):
        assert double(two) == self.expected

def test_without_them():
    assert double(1) == 2
""",
    "pytest, a test that another calls": """
def test_one(x, y):
    assert double(x) == y

def test_many():
    for x in (1, 2, 3):
        test_one(x, 2 * x)
""",
    "pytest, a helper in a class": """
class TestDouble:
    def holds(self, x, y):
        assert double(x) == y

    def test_two(self):
        self.holds(2, 4)
""",
    "unittest, a base class": """
import unittest

class Base(unittest.TestCase):
    def holds(self, x, y):
        self.assertEqual(double(x), y)

class Cases(Base):
    def test_two(self):
        self.holds(2, 4)
""",
    "pytest, a skipped test beside one that counts": """
import pytest

@pytest.mark.skip(reason="slow")
def test_slow():
    assert False

@pytest.mark.skipif(True, reason="elsewhere")
def test_elsewhere():
    assert False

def test_double():
    assert double(2) == 4
""",
    "pytest, a coroutine": """
import pytest

@pytest.mark.asyncio
async def test_later():
    assert await later(3) == 6
""",
    "pytest, a helper": """
def holds(x, y):
    assert double(x) == y

def test_all():
    for x in range(4):
        holds(x, 2 * x)
""",
    "unittest": """
import unittest

class Cases(unittest.TestCase):
    def setUp(self):
        self.x = 2

    def test_two(self):
        self.assertEqual(double(self.x), 4)
        with self.assertRaises(ValueError):
            double(-1)

if __name__ == "__main__":
    unittest.main()
""",
    "unittest, main without a guard": """
from unittest import TestCase, main

class Cases(TestCase):
    def test_half(self):
        self.assertAlmostEqual(double(0.5), 1.0)

main()
""",
    "unittest, subtests": """
import unittest

class Cases(unittest.TestCase):
    def test_many(self):
        for x in range(3):
            with self.subTest(x=x):
                self.assertEqual(double(x), 2 * x)
""",
    "unittest, coroutines": """
import unittest

class Cases(unittest.IsolatedAsyncioTestCase):
    async def test_two(self):
        self.assertEqual(await later(2), 4)
""",
    "check": "def check(candidate):\n    assert candidate(2) == 4",
    "check as a coroutine": "async def check(candidate):\n    assert candidate(2) == 4",
    "a helper called check": """
def check(x, y):
    assert double(x) == y

def test_double():
    check(2, 4)
""",
    "check, called": "def check(candidate):\n    assert candidate(2) == 4\ncheck(double)",
    "check, with its entry point": {
        "test": "def check(candidate):\n    assert candidate(2) == 4",
        "entry_point": "double",
    },
    "main guard": "if __name__ == '__main__':\n    assert double(2) == 4\n    print('ok')",
    "a function behind a main guard": """
def run():
    assert double(2) == 4

if __name__ == "__main__":
    run()
""",
    "a test with arguments, called": """
def test(x, y):
    assert double(x) == y

test(1, 2)
test(2, 4)
""",
    "an exit status": "import sys\nif double(2) != 4:\n    sys.exit(1)\nsys.exit(0)",
    "assert False": "try:\n    double(-1)\n    assert False\nexcept ValueError:\n    pass",
    "asyncio.run": "import asyncio\nassert asyncio.run(later(2)) == 4\nassert True",
    "a relative import": "from .solution import double\nassert double(2) == 4",
    "a relative import of the module": """
from . import solution

def test_double():
    assert solution.double(2) == 4
""",
    "an import from a package": "from src.app import double\nassert double(2) == 4 and True",
    "an import of a part of a package": "from src import app\nassert app.double(2) == 4 and True",
    "an import of a dotted module": "import src.app\nassert src.app.double(2) == 4 and True",
    "an import by the name of a module of Python": "from code import double\nassert double(2) == 4",
    "an import of everything": "from solution import *\nassert double(2) == 4 and True",
    "an import of everything, and names of the test": """
from solution import *

result = double(2)
assert result == 4
""",
    "the path of the test": """
import os
import sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from solution import double
assert double(2) == 4
""",
    "pytest, setup_module": """
def setup_module(module):
    module.two = 2

def teardown_module():
    del globals()["two"]

def test_double():
    assert double(two) == 4
""",
    "pytest, setup_function": """
def setup_function(function):
    function.two = 2

def test_double():
    assert double(test_double.two) == 4
""",
    "pytest, setup_class": """
class TestDouble:
    @classmethod
    def setup_class(cls):
        cls.two = 2

    def setup_method(self):
        self.three = self.two + 1

    def teardown_method(self, method):
        assert method.__name__ == "test_double"

    def test_double(self):
        assert double(self.two) + double(self.three) == 10
""",
    "unittest, setUpClass": """
import unittest

def setUpModule():
    global two
    two = 2

class Cases(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.three = two + 1

    def test_double(self):
        self.assertEqual(double(self.three), 6)
""",
    "a deque": "from collections import deque\nassert newest([1]) == deque([1]) and newest([1]).maxlen == 2",
    "a deque without an import": "assert newest([1]) == deque([1]) and newest([1]).maxlen == 2",
    "dates": """
import datetime
assert day(2) == datetime.date(2024, 1, 4) and day(2).day == 4
assert moment(2)[0] == datetime.datetime(2024, 1, 4, tzinfo=datetime.timezone.utc)
assert moment(2)[1].total_seconds() == 4 * 3600
""",
    "exact numbers": """
from decimal import Decimal
from fractions import Fraction
assert exact(2) == (Decimal(1), Fraction(4, 3)) and isinstance(exact(2)[0], Decimal)
""",
    "mappings": """
from collections import Counter
count, ordered, default = counted(2)
assert count == Counter("aaaa") and count.most_common(1) == [("a", 4)]
assert list(ordered.items()) == [("a", 4)] and default["b"] == [] and default["a"] == [4]
""",
    "a deque that is changed": """
from collections import deque
items = deque([2])
extend(items)
assert items == deque([2, 4])
""",
    "an object that is a list": """
numbers = Numbers()
numbers.add(1).append(4)
assert numbers == [2, 4] and len(numbers) == 2 and 4 in numbers and numbers.index(4) == 1
""",
    "a function called as a builtin": "assert pow(2, 3) == 16 and pow(1, 1) == 2",
    "a function called as a builtin, imported": """
from solution import pow
assert pow(2, 3) == 16 and pow(1, 1) == 2
""",
    "a wrapped function": "import functools\ndouble = functools.lru_cache(double)\nassert double(2) == 4",
    "an exception by its base": """
import pytest
with pytest.raises(Invalid) as caught:
    refuse(2)
assert caught.value.code == 4 and caught.value.hint == "more" and str(caught.value) == "code 4"
""",
    "an exception with a constructor of its own": """
import pytest
def test_decode():
    with pytest.raises(UnicodeDecodeError):
        decode(b"\\xc3\\xa4")
""",
    "an exception of the library": """
import json
import pytest
with pytest.raises(json.JSONDecodeError):
    parse("4")
assert parse("3") == 3
""",
    "threads": """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as pool:
    assert list(pool.map(double, range(20))) == list(range(0, 40, 2))
""",
    "failures that are noted": """
failures = []
for x in range(3):
    try:
        assert double(x) == 2 * x
    except AssertionError as error:
        failures.append(x)
assert not failures
""",
    "a try that does not catch failures": """
try:
    assert double(2) == 4
except ValueError:
    pass
""",
    "a try that passes a failure on": """
try:
    assert double(2) == 4
except AssertionError:
    print("wrong")
    raise
""",
    "two right answers": """
try:
    assert double(2) == 0
except AssertionError:
    assert double(2) == 4
""",
    "a check of the program that a test catches": """
try:
    positive(0)
except AssertionError:
    pass
assert positive(2) == 4
""",
    "a call of a coroutine function": {"function": "later", "args": [2], "output": 4},
    "LiveCodeBench": {
        "input": "2",
        "output": "4",
        "testtype": "functional",
        "metadata": {"func_name": "double"},
    },
    "APPS": {"fn_name": "double", "inputs": [[2], [3]], "outputs": [[4], [6]]},
    "TACO": '{"fn_name": "double", "inputs": [[2]], "outputs": [4]}',
    "a type and a name": {
        "type": "function_call",
        "fn_name": "double",
        "input": [2],
        "output": [4],
    },
}
ALWAYS_TRUE = {
    "a tuple": "assert (double(2) == 4, 'message')",
    "a tuple, beside an assert": "assert double(1) == 2\nassert (double(2) == 4, 'message')",
    "a list": "assert [double(2) == 4]",
    "a dictionary": "assert {'right': double(2) == 4}",
    "a text": "assert f'right: {double(2) == 4}'",
    "a function": "assert lambda: double(2) == 4",
    "a generator": "assert (double(x) == 2 * x for x in range(3))",
    "or": "assert double(2) == 4 or 'it is wrong'",
    "assertTrue of a tuple": """
import unittest

class Cases(unittest.TestCase):
    def test_two(self):
        self.assertTrue((double(2) == 4, "message"))
""",
}
RAISING = "def double(x):\n    if x < 0:\n        raise ValueError(x)\n    return 2 * x"
NOT_RAISING = "def double(x):\n    return 2 * x + 1"
SWALLOWED = {
    "AssertionError": "try:\n    assert double(2) == 4\nexcept AssertionError:\n    print('wrong')",
    "AssertionError with a name": "try:\n    assert double(2) == 4\nexcept AssertionError as e:\n    print(e)",
    "Exception": "try:\n    assert double(2) == 4\nexcept Exception:\n    pass",
    "everything": "try:\n    assert double(2) == 4\nexcept:\n    pass",
    "several": "try:\n    assert double(2) == 4\nexcept (ValueError, AssertionError):\n    pass",
    "beside an assert": "assert double(1) == 2\ntry:\n    assert double(2) == 4\nexcept Exception:\n    pass",
    "noted, but not looked at": "try:\n    assert double(2) == 4\nexcept AssertionError as e:\n    text = str(e)\n    print(text)",
    "suppress": "import contextlib\nwith contextlib.suppress(AssertionError):\n    assert double(2) == 4",
    "assert False": "try:\n    double(-1)\n    assert False\nexcept Exception:\n    pass",
    "pytest.fail": "import pytest\ntry:\n    double(-1)\n    pytest.fail('it did not raise')\nexcept BaseException:\n    pass",
    "of a function": """
def run():
    assert double(2) == 4

try:
    run()
except AssertionError as error:
    print("wrong", error)
""",
    "in a function": """
def test_double():
    for x in range(3):
        try:
            assert double(x) == 2 * x
        except AssertionError:
            continue
""",
    "unittest": """
import unittest

class Cases(unittest.TestCase):
    def test_two(self):
        try:
            self.assertEqual(double(2), 4)
        except Exception:
            print("wrong")
""",
}
SKIPPED = {
    "pytest.skip": "import pytest\ndef test():\n    if double is None:\n        pytest.skip()\n    assert double(2) == 4",
    "skip": "from pytest import skip\ndef test():\n    skip('later')\n    assert double(2) == 4",
    "skipTest": "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.skipTest('x')\n"
    "        self.assertEqual(double(2), 4)",
    "SkipTest": "import unittest\ndef test():\n    raise unittest.SkipTest\nassert double(2) == 4",
    "importorskip": "import pytest\npytest.importorskip('numpy')\nassert double(2) == 4",
}
CANNOT_FAIL = {
    "nothing": "# tests\npass",
    "a comparison": "double(2) == 4",
    "a printed comparison": "print(double(2) == 4)",
    "a returned comparison": "def test_double():\n    return double(2) == 4",
    "a constant": "assert True",
    "a function that nothing calls": "def verify(f):\n    assert f(2) == 4",
    "a class that is no test": "class Cases:\n    def test(self):\n        assert double(2) == 4",
    "an exception of its own": """
class Failed(Exception):
    def fail(self):
        raise self

double(2)
""",
    "a skipped test": """
import pytest

@pytest.mark.skip
def test_double():
    assert double(2) == 4
""",
    "a test that may fail": """
import unittest

class Cases(unittest.TestCase):
    @unittest.expectedFailure
    def test_two(self):
        self.assertEqual(double(2), 4)
""",
    "asserts in a method that no test calls": """
class TestDouble:
    def holds(self):
        assert double(2) == 4

    def test_two(self):
        double(2)
""",
    "check without an assert": "def check(candidate):\n    candidate(2)",
    "unittest without an assert": """
import unittest

class Cases(unittest.TestCase):
    def test_two(self):
        double(2)
""",
}

STATE = """\
import functools
from collections import deque

log = []
seen = set()
waiting = deque()
data = bytearray()

def note(x):
    data.extend(str(x + 1).encode())
    log.append(x + 1)
    seen.add(x + 1)
    waiting.append(x + 1)

def total():
    return sum(log)

class Node:
    def __init__(self, value):
        self.value = value + 1
        self.children = []
    def size(self):
        return self.value + sum(child.size() for child in self.children)

class Emitter:
    def __init__(self):
        self.handlers = []
    def on(self, handler):
        self.handlers.append(handler)
    def emit(self, x, **named):
        return [handler(x + 1, **named) for handler in self.handlers]

def traced(function):
    @functools.wraps(function)
    def call(x):
        return function(x + 1)
    return call

def up(n):
    for x in range(n):
        yield x + 1
"""
STATE_WRONG = STATE.replace("x + 1", "x").replace("value + 1", "value")
ON_STATE = {
    "a global list": "note(1)\nnote(2)\nassert log == [2, 3] and len(log) == 2 and log[-1] == 3",
    "a global list, imported": "from solution import log, note\nnote(1)\nassert log == [2]",
    "a global list, of a module": "import solution\nsolution.note(1)\nassert solution.log == [2]",
    "a global list, cleared": "note(7)\nlog.clear()\nnote(1)\nassert total() == 2",
    "a global list, changed": "note(1)\nlog[0] += 1\nlog.append(4)\nassert total() == 7",
    "a global list, copied": """
import copy
note(1)
before = copy.deepcopy(log)
note(2)
assert before == [2] and log == [2, 3]
""",
    "a global list, as JSON": "import json\nnote(1)\nassert json.dumps([log]) == '[[2]]'",
    "a global bytearray": "note(1)\nassert bytes(data) == b'2' and data.decode() == '2'",
    "a global set": "note(1)\nassert seen == {2} and 2 in seen",
    "a global deque": "note(1)\nwaiting.appendleft(5)\nassert list(waiting) == [5, 2]",
    "a list of an object": """
root = Node(1)
root.children.append(Node(2))
assert root.size() == 5 and len(root.children) == 1
assert isinstance(root.children, list) and type(root.children) is list
""",
    "the class of an object": """
node = Node(1)
assert type(node) is Node and node.__class__.__name__ == "Node" and node.value == 2
""",
    "a copy of an object": """
import copy
node = Node(1)
other = copy.deepcopy(node)
other.children.append(node)
assert not node.children and other.size() == 4
""",
    "a method of a list as a callback": """
got = []
emitter = Emitter()
emitter.on(got.append)
emitter.emit(1)
assert got == [2]
""",
    "named arguments of a callback": """
emitter = Emitter()
emitter.on(lambda x, step: x * step)
assert emitter.emit(1, step=3) == [6]
""",
    "a mock": """
from unittest.mock import Mock
handler = Mock(return_value=3)
emitter = Emitter()
emitter.on(handler)
assert emitter.emit(1, step=2) == [3]
handler.assert_called_once_with(2, step=2)
""",
    "a method of a mock": """
from unittest.mock import MagicMock
service = MagicMock()
service.send.side_effect = [ValueError("x"), 5]
emitter = Emitter()
emitter.on(service.send)
try:
    emitter.emit(1)
except ValueError:
    pass
assert emitter.emit(2) == [5]
assert [call.args for call in service.send.call_args_list] == [(2,), (3,)]
""",
    "the name of a decorated function": """
@traced
def same(x):
    "Returns x."
    return x
assert same.__name__ == "same" and same.__doc__ == "Returns x." and same(1) == 2
""",
    "a generator": """
import inspect, types
assert isinstance(up(2), types.GeneratorType) and inspect.isgenerator(up(1))
assert list(up(2)) == [1, 2]
""",
    "a generator of a fixture": """
import pytest
@pytest.fixture
def numbers():
    return up(2)
def test_up(numbers):
    assert next(numbers) == 1 and next(numbers) == 2
""",
    "parameters of a fixture": """
import pytest
@pytest.fixture(params=[1, pytest.param(2, id="two")])
def x(request):
    return request.param
@pytest.fixture
def nodes(x):
    return [Node(x)]
@pytest.mark.parametrize("times", [1, 2])
def test_nodes(nodes, x, times):
    note(times)
    assert nodes[0].size() == x + 1
def test_number_of_tests():
    assert len(log) == 4 and log[-1] == 3
""",
}


@pytest.fixture(scope="module")
def code() -> CodeRewardFunction:
    return code_function(timeout_s=5)


def score(code: CodeRewardFunction, program: str, cases: Any, **columns: Any) -> float | None:
    completion = [{"role": "assistant", "content": f"```python\n{program}\n```"}]
    return code.scores([completion], test_cases=[cases], **columns)[0].value


def cases_of(test: Any) -> list[Case]:
    is_column = isinstance(test, dict) or test.startswith("{")
    return parse_cases(test if is_column else [test])


@pytest.mark.integration
@pytest.mark.parametrize(
    ("forms", "right", "wrong"),
    [
        (FORMS, RIGHT, WRONG),
        (ON_STATE, STATE, STATE_WRONG),
        (SWALLOWED, RAISING, NOT_RAISING),
    ],
    ids=["values", "state", "caught"],
)
def test_a_right_program_passes_and_a_wrong_one_does_not_in_the_sandbox(
    code: CodeRewardFunction, forms: dict[str, Any], right: str, wrong: str
) -> None:
    for form, test in forms.items():
        cases = cases_of(test)
        found = [result.status for result in code._sandbox.run(right, cases)]
        assert found == ["passed"] * len(cases), form
        found = [result.status for result in code._sandbox.run(wrong, cases)]
        assert found != ["passed"] * len(cases), form


@pytest.mark.parametrize("form", [*FORMS, *ON_STATE])
def test_a_right_program_passes_and_a_wrong_one_does_not(form: str) -> None:
    right, wrong = (STATE, STATE_WRONG) if form in ON_STATE else (RIGHT, WRONG)
    for case in cases_of(ON_STATE.get(form) or FORMS[form]):
        if case.test is not None:
            assert outcome(right, case) == "passed"
            assert outcome(wrong, case) != "passed"


@pytest.mark.parametrize("form", CANNOT_FAIL)
def test_a_test_that_cannot_fail_is_refused(form: str) -> None:
    with pytest.raises(InvalidInput, match="asserts") as caught:
        parse_cases([CANNOT_FAIL[form]])

    assert caught.value.field == "test_cases[0]"


@pytest.mark.parametrize("form", ALWAYS_TRUE)
def test_an_assert_that_is_always_true_is_refused(form: str) -> None:
    with pytest.raises(InvalidInput, match="no program fails `"):
        parse_cases([ALWAYS_TRUE[form]])


@pytest.mark.parametrize("form", SWALLOWED)
def test_a_failed_check_fails_the_test_although_a_handler_catches_it(form: str) -> None:
    [case] = parse_cases([SWALLOWED[form]])
    assert outcome(RAISING, case) == "passed"
    assert outcome(NOT_RAISING, case) != "passed"


@pytest.mark.parametrize("form", SKIPPED)
def test_a_test_that_skips_itself_is_refused(form: str) -> None:
    with pytest.raises(InvalidInput, match="skips itself"):
        parse_cases([SKIPPED[form]])


@pytest.mark.parametrize(
    "test",
    [
        "assert_equal(double(2), 4)",
        "from helpers import assert_equal\nassert_equal(double(2), 4)",
        "from .testing import assert_same\ndef test():\n    assert_same(double(2), 4)",
    ],
)
def test_an_assert_that_the_program_would_define_is_refused(test: str) -> None:
    with pytest.raises(InvalidInput, match=r"assert_\w+ is not defined in the test"):
        parse_cases([test])


def test_what_is_missing_of_pytest_is_named() -> None:
    with pytest.raises(InvalidInput, match=r"no pytest\.warns"):
        parse_cases(["import pytest\nwith pytest.warns(UserWarning):\n    double(2)\nassert True"])


@pytest.mark.integration
@pytest.mark.parametrize(
    "test",
    [
        "import numpy as np\nassert np.allclose(double(2), 4)",
        "def test():\n    from sympy import Symbol\n    assert double(Symbol('x')) == 4",
        "import pandas.testing\nassert double(2) == 4",
    ],
)
def test_a_package_that_programs_lack_is_refused(code: CodeRewardFunction, test: str) -> None:
    with pytest.raises(InvalidInput, match="which programs do not have") as caught:
        code.cases([test])
    assert "`python` of the reward function code" in str(caught.value.remedy)


@pytest.mark.integration
def test_arrays_are_compared_where_programs_have_numpy() -> None:
    code = CodeRewardFunction(
        timeout_s=30, partial_credit=True, slots=1, memory_mb=8192, python=sys.executable,
        sandbox="none",
    )  # fmt: skip
    tests = [
        "import numpy as np\nassert np.allclose(f([1, 2]), [2, 4]) and f([1, 2]).shape == (2,)",
        "import numpy as np\nassert (f(2) == np.array([4.0])).all()",
        "import numpy as np\nnp.testing.assert_allclose(f(2), 4)",
        "assert np.allclose(f(2), 4)",
        "import numpy as np, pytest\nassert f([2, 3]) == pytest.approx(np.array([4, 6]))",
        "import numpy as np\na = np.array([3, 1])\nsort(a)\nassert a.tolist() == [1, 3]",
    ]
    programs = {
        "import numpy as np\ndef f(x): return 2 * np.array(x)\ndef sort(x): x.sort()": 6,
        "def f(x): return []\ndef sort(x): return []": 0,
        "import numpy as np\ndef f(x): return np.array([])\ndef sort(x): return x": 0,
        "import numpy as np\ndef f(x): return np.ma.masked\ndef sort(x): return sorted(x)": 0,
    }
    for program, passed in programs.items():
        results = code.results(program, tests)
        assert [result.status for result in results].count("passed") == passed, (program, results)


@pytest.mark.parametrize("name", ["tmp_path", "request", "capsys", "monkeypatch"])
def test_a_fixture_that_does_not_exist_is_named(name: str) -> None:
    with pytest.raises(InvalidInput, match=f"'{name}' of test_it"):
        parse_cases([f"def test_it({name}):\n    assert double(2) == 4"])
    with pytest.raises(InvalidInput, match=f"'{name}' of x"):
        parse_cases(
            [
                f"import pytest\n@pytest.fixture\ndef x({name}):\n    return 2\n"
                "def test_it(x):\n    assert double(x) == 4"
            ]
        )


@pytest.mark.parametrize(
    "text",
    [
        "from unittest.mock import patch\n@patch('builtins.print')\ndef test_it(printed):\n"
        "    assert printed.called",
        "from unittest import mock\ndef test_it():\n    with mock.patch('builtins.input'):\n"
        "        assert double(2) == 4",
        "import contextlib, io\nout = io.StringIO()\nwith contextlib.redirect_stdout(out):\n"
        "    double(2)\nassert out.getvalue() == '4'",
        "import io, sys\nsys.stdin = io.StringIO('2')\nassert double(2) == 4 and True",
    ],
)
def test_patches_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="patches do not reach the program"):
        parse_cases([text])


@pytest.mark.integration
def test_one_is_not_true(code: CodeRewardFunction) -> None:
    tests = ["assert f(0) is True", "assert f(0) is None", "assert f(0) is not True"]
    for value, passed in (("True", 0), ("None", 1), ("1", 2)):
        program = f"def f(x):\n    return {value}"
        scores = [score(code, program, [test]) for test in tests]
        assert scores[passed] == 1.0, (value, scores)
    assert score(code, "def f(x):\n    return 1", ["assert f(0) is True"]) == 0.0


@pytest.mark.integration
def test_check_gets_the_function_that_the_column_names(code: CodeRewardFunction) -> None:
    program = "def double(x):\n    return 2 * x\ndef last(x):\n    return 0"
    test = "def check(candidate):\n    assert candidate(2) == 4"

    assert score(code, program, [test], entry_point=["double"]) == 1.0
    assert score(code, program, [test], entry_point=["last"]) == 0.0


@pytest.mark.integration
def test_check_gets_a_method_of_solution(code: CodeRewardFunction) -> None:
    program = "class Solution:\n    def double(self, x):\n        return 2 * x"
    test = "def check(candidate):\n    assert candidate(2) == 4"

    assert score(code, program, [test]) == 1.0


@pytest.mark.integration
@pytest.mark.parametrize(
    ("printed", "expected", "value"),
    [
        ("1.0", "1", 1.0),
        ("0.5", "0.500000", 1.0),
        ("1.4142135624", "1.414213562", 1.0),
        ("1 2.0 3", "1 2 3", 1.0),
        ("x = 0.3333333333", "x = 0.333333", 1.0),
        ("0.33", "0.333333", 0.0),
        ("1000000.5", "1000000", 0.0),
        ("1000000000001.0", "1000000000000", 0.0),
        ("007", "7", 0.0),
        ("1  2", "1 2", 0.0),
        ("  *", "*", 0.0),
        ("1 2", "1 2 3", 0.0),
        ("nan", "0.5", 0.0),
        ("1\n2", "1 2", 0.0),
    ],
)
def test_printed_numbers_are_compared_as_numbers(
    code: CodeRewardFunction, printed: str, expected: str, value: float
) -> None:
    assert score(code, f"print({printed!r})", [{"input": "", "output": expected}]) == value


@pytest.mark.integration
@pytest.mark.parametrize(
    ("program", "cases"),
    [
        ("print(10 ** 5000)", [{"input": "", "output": "1" + 5000 * "0"}]),
        ("def f(): return str(10 ** 5000)", ["assert len(f()) == 5001"]),
        ("print(int(input()) + 1)", [{"input": 4, "output": 5}]),
        ("print(int(input()) + int(input()))", {"inputs": [["4", "5"]], "outputs": [["9"]]}),
        ("def f(x):\n    return x\nprint(f(int(input())))", ["assert f(2) == 2"]),
        (
            "import sys\ndef f(x):\n    return x\nfor line in sys.stdin: print(line)",
            ["assert f(2) == 2"],
        ),
        (
            "import unittest\ndef f(x):\n    return x\nclass T(unittest.TestCase):\n"
            "    def test(self):\n        self.assertEqual(f(1), 1)\nunittest.main()",
            ["assert f(2) == 2"],
        ),
        ("import asyncio\nasync def main():\n    print(7)\nasyncio.run(main())", [{"output": "7"}]),
        ("def f(s):\n    return s.split('</think>')[-1]", ["assert f('a</think>b') == 'b'"]),
        ("# <think>\ndef f(x):\n    return '<think>'", ["assert f(0) == '<think>'"]),
    ],
)
def test_programs_as_people_write_them(code: CodeRewardFunction, program: str, cases: Any) -> None:
    assert score(code, program, cases) == 1.0


@pytest.mark.integration
@pytest.mark.parametrize(
    "response",
    [
        "Here it is: ```python\ndef f(x):\n    return x\n```",
        "def f(x):\n    return x",
        "<think>a `</think>` in thoughts</think>\n```python\ndef f(x):\n    return x\n```",
        "Thoughts. ```python\nf = 1\n</think>\n```python\ndef f(x):\n    return x\n```",
    ],
)
def test_where_a_program_stands(code: CodeRewardFunction, response: str) -> None:
    completion = [{"role": "assistant", "content": response}]
    scores = code.scores([completion], test_cases=[["assert f(2) == 2", "assert f(3) == 3"]])

    assert scores[0].value == 1.0


@pytest.mark.integration
def test_prose_is_no_program(code: CodeRewardFunction) -> None:
    completion = [{"role": "assistant", "content": "I would print(5) here."}]

    assert code.scores([completion], test_cases=[["assert f(2) == 2"]])[0].value == 0.0
