"""Free-form tests run outside the program's process, so a program that manipulates its own process
passes none."""

from typing import Any

import pytest

from services.reward.functions import CodeRewardFunction
from tests.support.services.sandbox import code_function

pytestmark = pytest.mark.integration

TESTS = [
    "assert f(2) == 4 and True",
    "x = f(3)\nassert x == 6",
    "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(5) == 10\ncheck(f)",
    "import math\nassert math.isclose(f(2.5), 5) and isclose(f(2.5), 5)",
    "assert abs(f(2.5) - 5) < 1e-6 and True",
    "assert isinstance(f(2), int) and f(2) > 3 and f(2) < 5",
    "assert f(2) in (4,) and True",
    "assert {f(2): 1}[4] == 1",
    "assert sorted([f(2), f(1)]) == [2, 4]",
    "assert f(2) - 4 == 0 and not f(0)",
    "assert str(f(2)) == '4'",
    "assert all(f(i) == 2 * i for i in range(50))",
    "try:\n    raise_if = f(2) != 4\nexcept Exception:\n    raise_if = True\nassert not raise_if",
    "from solution import f\nassert f(2) == 4",
    "def test_f():\n    assert f(2) == 4",
    "import pytest\n@pytest.mark.parametrize('x', [2, 3])\ndef test_f(x):\n"
    "    assert f(x) == pytest.approx(2 * x)",
    "def check(candidate):\n    assert candidate(2) == 4",
    "import unittest\nclass T(unittest.TestCase):\n    def test_f(self):\n"
    "        self.assertEqual(f(2), 4)",
    "import unittest\nclass T(unittest.TestCase):\n    def test_f(self):\n"
    "        self.assertIn(f(2), [4])",
]
HONEST = "from math import isclose\ndef f(x):\n    return 2 * x\n"
ZERO = "def f(x): return 0\n"
CHEATS = {
    "exec does nothing": "import builtins\nbuiltins.exec = lambda *a: None\n" + ZERO,
    "eval and compile": "import builtins\nbuiltins.compile = lambda *a, **k: None\nbuiltins.eval = lambda *a: True\n"
    + ZERO,
    "AssertionError is another": "import builtins\nbuiltins.AssertionError = KeyError\n" + ZERO,
    "all builtins say yes": "import builtins\nfor n in ('all', 'any', 'isinstance', 'abs', 'sorted', 'bool', 'str'):\n"
    "    setattr(builtins, n, lambda *a: True)\n" + ZERO,
    "its own abs, isclose and sorted": ZERO
    + "def abs(x): return 0\ndef isclose(*a): return True\ndef sorted(x): return [2, 4]\n"
    "def isinstance(*a): return True\ndef all(x): return True\ndef str(x): return '4'",
    "check does nothing": ZERO + "def check(f): pass",
    "modules are replaced": "import sys, math, types\nm = types.ModuleType('math')\nm.isclose = lambda *a: True\n"
    "sys.modules['math'] = math = m\n" + ZERO,
    "an object equal to all": "class Same:\n    def yes(self, *a): return True\n    __hash__ = lambda self: hash(4)\n"
    "for n in 'eq lt le gt ge contains bool'.split(): setattr(Same, f'__{n}__', Same.yes)\n"
    "for n in 'add sub mul radd rsub abs neg'.split(): setattr(Same, f'__{n}__', lambda self, *a: 0)\ndef f(x): return Same()",
    "an int equal to all": "class Same(int):\n    def yes(self, *a): return True\n    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = yes\n"
    "    __sub__ = __rsub__ = __abs__ = lambda self, *a: 0\n    __ne__ = lambda *a: False\n    __hash__ = lambda self: hash(4)\n"
    "    __str__ = lambda self: '4'\ndef f(x): return Same(9)",
    "a float equal to all": "class Same(float):\n    def yes(self, *a): return True\n    __eq__ = __lt__ = __gt__ = yes\n"
    "    __sub__ = __abs__ = lambda self, *a: 0.0\n    __hash__ = lambda self: hash(4)\ndef f(x): return Same(7)",
    "mock.ANY": "from unittest import mock\ndef f(x): return mock.ANY",
    "a mock": "from unittest import mock\nf = mock.MagicMock()\nf.return_value = mock.ANY",
    "a lookalike of the standard library": "import unittest.mock as math\nfrom unittest.mock import MagicMock as f",
    "leaving": "import os\ndef f(x): os._exit(0)",
    "leaving at once": "import os\nos._exit(0)",
    "SystemExit": "def f(x): raise SystemExit(0)",
    "raising what ends iterations": "def f(x): raise StopIteration",
    "frames": "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n        for v in list(frame.f_locals.values()):\n"
    "            if ''.join(['ass', 'ert f']) in str(v): return 2 * x\n        frame = frame.f_back\n    return 0",
    "gc": "import gc\ndef f(x):\n    return 2 * x if any(''.join(['ass', 'ert f']) in str(o) for o in gc.get_objects()) else 0",
    "memory": "import ctypes\ndef f(x):\n    try: text = open('/proc/self/mem', 'rb')\n    except OSError: return 0\n"
    "    for line in open('/proc/self/maps'):\n        if 'rw' not in line or 'stack' in line: continue\n"
    "        a, b = (int(n, 16) for n in line.split()[0].split('-'))\n"
    "        try:\n            text.seek(a)\n            found = text.read(b - a)\n        except (OSError, OverflowError, ValueError): continue\n"
    "        if b''.join([b'ass', b'ert all(f(i)']) in found: return 2 * x\n    return 0",
    "atexit": 'import atexit, os\natexit.register(lambda: os.write(3, b\'{"status": "done"}\'))\n'
    + ZERO,
    "a result of its own": 'import os\nfor fd in (3, 4, 5):\n    try: os.write(fd, b\'{"status": "done"}\\n\')\n'
    "    except OSError: pass\n" + ZERO,
    "answers of its own": 'import os\ntry:\n    for i in range(99): os.write(5, b\'["ok", {"f": true}]\\n\')\n'
    "except OSError: pass\nos._exit(0)",
    "an import of its own": 'import os\nos.write(5, b\'["ok", {"f": ["import", "os", "_exit"]}]\\n\')\n'
    + ZERO,
    "a reference that is none": 'import os\nos.write(5, b\'["ok", {"f": ["local", 1]}]\\n["ok", {}]\\n\')\n'
    + ZERO,
    "stopping the test": "import os, signal\nfor pid in range(2, 60):\n    if pid != os.getpid():\n"
    "        for s in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGALRM):\n"
    "            try: os.kill(pid, s)\n            except OSError: pass\n" + ZERO,
    "the pipes of others": "import os, glob\nfor path in glob.glob('/proc/[0-9]*/fd/3'):\n"
    '    try: os.write(os.open(path, os.O_WRONLY), b\'{"status": "done"}\')\n    except OSError: pass\n'
    + ZERO,
    "json and pickle": "import json, pickle\njson.loads = lambda *a: ['ok']\npickle.loads = None\n"
    + ZERO,
    "settrace": "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)\n"
    + ZERO,
    "signal handlers": "import os, signal\nsignal.signal(signal.SIGALRM, lambda *a: os._exit(0))\nsignal.setitimer(0, 0.01)\n"
    "import time\ndef f(x):\n    time.sleep(0.1)\n    return 0",
}


@pytest.fixture(scope="module")
def code() -> CodeRewardFunction:
    return code_function(timeout_s=5, partial_credit=True, slots=1)


def passed(code: CodeRewardFunction, source: str, tests: list[Any]) -> list[Any]:
    """Returns the tests that a program passes."""
    results = code.results(source, tests)
    return [test for test, result in zip(tests, results, strict=True) if result.status == "passed"]


def test_an_honest_program_passes_all(code: CodeRewardFunction) -> None:
    assert passed(code, HONEST, TESTS) == TESTS


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_passes_nothing(code: CodeRewardFunction, name: str) -> None:
    assert passed(code, CHEATS[name], TESTS) == []


PROGRAM = """
import collections, enum, math, fractions, contextlib
from typing import List
LIMIT = 5
class Stack:
    size = 3
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x); return self
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __contains__(self, x): return x in self.items
    def __getitem__(self, i): return self.items[i]
    def __setitem__(self, i, x): self.items[i] = x
    def __eq__(self, other): return isinstance(other, Stack) and self.items == other.items
    def __add__(self, other): return Stack().push(sum(self.items) + sum(other.items))
    def __repr__(self): return f'Stack({self.items})'
    def __enter__(self): return self
    def __exit__(self, *a): self.items.clear()
    def key(self): return 'key'
class Empty(ValueError): pass
class Node:
    def __init__(self, val, next=None): self.val, self.next = val, next
class Colour(enum.IntEnum):
    RED = 1
Point = collections.namedtuple('Point', 'x y')
def point(): return Point(1, 2)
def pop(stack):
    if not stack.items: raise Empty('nothing', 5)
    return stack.items.pop()
def negative(x):
    if x < 0: raise ValueError('negative')
    return x
def sort(items): items.sort()
def fill(d, k): d[k] = [k]; d['n'] = d.get('n', 0) + 1
def apply(g, items): return [g(i) for i in items]
def key(items, by): return sorted(items, key=by)
def compose(g, h): return lambda x: g(h(x))
def count():
    for i in range(3): yield i
def reverse(head):
    last = None
    while head: head.next, last, head = last, head, head.next
    return last
def total(items): return sum(items)
def ratio(a, b): return fractions.Fraction(a, b)
def counts(text): return collections.Counter(text)
def hello(): print('hello')
"""
RIGHT = [
    "s = Stack()\ns.push(1).push(2)\nassert len(s) == 2 and list(s) == [1, 2] and 2 in s and 3 not in s and s[0] == 1",
    "s = Stack()\ns.push(1)\ns[0] = 9\nassert s.items == [9] and s.key() == 'key' and Stack.size == 3 and repr(s) == 'Stack([9])'",
    "a, b = Stack().push(1), Stack().push(1)\nassert a == b and a is not b and a + b == Stack().push(2) and a != Stack()",
    "assert isinstance(Stack(), Stack) and not isinstance(5, Stack)",
    "with Stack().push(1) as s:\n    assert len(s) == 1\nassert len(s) == 0",
    "try:\n    pop(Stack())\nexcept Empty as e:\n    assert e.args == ('nothing', 5)\nelse:\n    assert False",
    "try:\n    negative(-1)\n    assert False\nexcept ValueError as e:\n    assert str(e) == 'negative'",
    "items = [3, 1, 2]\nsort(items)\nassert items == [1, 2, 3]",
    "d = {}\nfill(d, 1)\nfill(d, 2)\nassert d == {1: [1], 2: [2], 'n': 2}",
    "assert apply(lambda x: x + 1, [1, 2]) == [2, 3] and apply(str, (1,)) == ['1']",
    "def by(x):\n    return -x\nassert key([1, 3, 2], by) == [3, 2, 1]",
    "assert compose(lambda x: x + 1, negative)(4) == 5 and compose(negative, negative)(3) == 3",
    "assert list(count()) == [0, 1, 2] and sum(count()) == 3 and next(count()) == 0 and [i for i in count()] == [0, 1, 2]",
    "class Item:\n    def __init__(self, v, n=None):\n        self.val, self.next = v, n\n"
    "h = reverse(Item(1, Item(2, Item(3))))\nfound = []\nwhile h:\n    found.append(h.val)\n    h = h.next\nassert found == [3, 2, 1]",
    "h = reverse(Node(1, Node(2)))\nassert h.val == 2 and h.next.val == 1 and h.next.next is None",
    "p = point()\nassert p == (1, 2) and p.x == 1 and isinstance(p, tuple) and len(p) == 2 and p[1] == 2 and tuple(p) == (1, 2)",
    "assert Colour.RED == 1 and Colour.RED + 1 == 2 and Colour(1) == Colour.RED and LIMIT == 5",
    "import random\nfor _ in range(5):\n    a = [random.randint(0, 9) for _ in range(5)]\n    assert total(a) == sum(a)",
    "assert math.floor(2.5) == 2 and total(x for x in range(4)) == 6 and total(iter([1])) == 1 and total(range(3)) == 3",
    "assert abs(ratio(1, 2) - 0.5) < 1e-9 and ratio(1, 2) == 0.5 and counts('aab')['a'] == 2 and counts('ab') == {'a': 1, 'b': 1}",
    "from solution import Stack as S\nimport solution\nassert S() == Stack() and solution.total([1]) == 1",
    "def test_one():\n    assert total([1]) == 1\ntest_one()\nhello()",
    "import collections, datetime\nassert total(collections.deque([1, 2])) == 3\nassert negative(datetime.timedelta(1).days) == 1",
    "x = {'a': [Stack(), Stack()]}\nfill(x, 'b')\nassert x['a'][0] == Stack() and x['b'] == ['b']",
]


def test_honest_tests_of_many_kinds_pass(code: CodeRewardFunction) -> None:
    assert passed(code, PROGRAM, RIGHT) == RIGHT


HIDING = """
class Store:
    def __enter__(self): return self
    def __exit__(self, *error): raise ValueError("closed")
    def close(self): raise ValueError("closed")
    def get(self, x): return 2 * x
    def refuse(self): raise ValueError("refused")
"""


@pytest.mark.parametrize(
    "test",
    [
        "with pytest.raises(ValueError):\n    with Store() as store:\n"
        "        assert store.get(2) == 4\n        store.refuse()",
        "try:\n    with Store() as store:\n        assert store.get(2) == 4\n"
        "except ValueError:\n    pass",
        "with pytest.raises(ValueError), contextlib.ExitStack() as stack:\n"
        "    store = stack.enter_context(Store())\n    assert store.get(2) == 4\n"
        "    store.refuse()",
        "store = Store()\nwith pytest.raises(ValueError):\n    try:\n"
        "        assert store.get(2) == 4\n    finally:\n        store.close()",
        "class Case(unittest.TestCase):\n    def test_it(self):\n"
        "        with self.assertRaises(ValueError), Store() as store:\n"
        "            self.assertEqual(store.get(2), 4)\n            store.refuse()",
    ],
)
def test_an_exception_of_the_program_does_not_hide_a_failed_check(
    code: CodeRewardFunction, test: str
) -> None:
    test = f"import contextlib, pytest, unittest\n{test}"
    assert passed(code, HIDING, [test]) == [test]
    assert passed(code, HIDING.replace("2 * x", "0"), [test]) == []
