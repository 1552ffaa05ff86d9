"""What a test sees of a program in another process, against Python itself: the same statements run
where the program's names are plain objects."""

import random
from typing import Any

import numpy as np
import pytest

from services.sandbox.case_formats import parse_cases
from tests.support.services.one_process import outcome

PROGRAM = '''
import collections
import datetime
import decimal
import fractions
import uuid
import numpy as np

class Vector:
    """Numbers."""
    kind = "a vector"
    def __init__(self, *items):
        self.items = list(items)
        self.notes = {}
    def __repr__(self): return f"Vector{tuple(self.items)}"
    def __str__(self): return "<" + " ".join(map(str, self.items)) + ">"
    def __format__(self, how): return f"{how}:{len(self.items)}"
    def _with(self, name, other):
        found = other.items if isinstance(other, Vector) else other
        return Vector(name, *self.items, found)
    def __len__(self): return len(self.items)
    def __bool__(self): return len(self.items) > 1
    def __iter__(self): return iter(self.items)
    def __contains__(self, item): return item in self.items
    def __getitem__(self, at): return self.items[at]
    def __setitem__(self, at, item): self.items[at] = item
    def __delitem__(self, at): del self.items[at]
    def __hash__(self): return 77
    def __call__(self, *args, **named): return [self.items, args, named]
    def __enter__(self):
        self.items.append("in")
        return self
    def __exit__(self, kind, error, trace):
        self.items.append(f"out {kind} {error} {trace}")
    def __neg__(self): return Vector("neg", *self.items)
    def __pos__(self): return Vector("pos", *self.items)
    def __invert__(self): return Vector("invert", *self.items)
    def __abs__(self): return Vector("abs", *self.items)
    def __lt__(self, other): return len(self.items) < len(other.items)
    def __le__(self, other): return len(self.items) <= len(other.items)
    def __gt__(self, other): return len(self.items) > len(other.items)
    def __ge__(self, other): return len(self.items) >= len(other.items)
    def __copy__(self): return Vector("copy", *self.items)
    def total(self, start=0): return sum(self.items, start)
    @property
    def first(self): return self.items[0]
    @first.setter
    def first(self, item): self.items[0] = item
    @classmethod
    def made(cls, *items): return cls(*items)
    async def later(self): return len(self.items)

for _name in ("add sub mul truediv floordiv mod pow matmul and or xor lshift rshift").split():
    def _operator(self, other, name=_name): return self._with(name, other)
    def _reflected(self, other, name=_name): return self._with("r" + name, other)
    setattr(Vector, f"__{_name}__", _operator)
    setattr(Vector, f"__r{_name}__", _reflected)

class Index:
    def __index__(self): return 6
class Floating:
    def __float__(self): return 2.5
class Whole(int): pass
class Text(str): pass
class Rows(list):
    def size(self): return len(self)
class Table(dict): pass
class Grid:
    def tolist(self): return [[1, 2], [3]]

class Failure(Exception):
    def __init__(self, code, *more):
        super().__init__(code, *more)
        self.code = code
        self.made = Vector(1)
        self.counts = {"a": 1}
    def __str__(self): return f"code {self.code}"
class Smaller(Failure, ValueError): pass
def fail(kind, *args): raise kind(*args)
def raised(error): raise error
def unicode(): return b"\\xff".decode("utf-8")
def missing(): return {}["key"]

def grow(x):
    kind = type(x).__name__
    if kind in ("list", "deque", "bytearray"): x.append(7)
    elif kind in ("set", "Counter"): x.update([7])
    elif kind == "ndarray": x[...] = x + 1
    else: x[7] = 8
    return len(x)
def keeps(x): return x
def swap(x, y):
    x.append(y.pop())
    return x, y
state = [1]
table = {"a": [1]}
def push(x):
    state.append(x)
    table["a"].append(x)
    return state
def up(n):
    for i in range(n):
        yield i
def apply(function, *args, **named): return function(*args, **named)
def apply_all(functions, x): return [each(x) for each in functions]
def describe(thing): return [thing.name, thing.double(4)]
def rename(thing):
    thing.name = "renamed"
    return thing.name
def method_of(thing): return thing.double
def traced(function):
    def inner(*args): return ["traced", function(*args)]
    inner.__name__ = function.__name__
    inner.__doc__ = function.__doc__
    return inner
def caught(function):
    try: return function()
    except ValueError as error: return ["caught", str(error), error.args]
def library():
    zone = datetime.timezone(datetime.timedelta(hours=2))
    return [
        range(1, 9, 2), collections.deque([1, 2], maxlen=2), collections.Counter("aab"),
        collections.OrderedDict(b=1, a=2), datetime.date(2024, 2, 29), decimal.Decimal("1.50"),
        datetime.datetime(2024, 2, 29, 1, tzinfo=zone), datetime.timedelta(days=2),
        datetime.time(1, 2), fractions.Fraction(1, 3), uuid.UUID(int=5), b"a", 1j, {1}, frozenset([2]),
        (1, [2]), {"a": None}, 2 ** 70, -(2 ** 70), "x", True, None, 0.5,
    ]
def array(*shape): return np.arange(6).reshape(shape) if shape else np.float32(0.5)
def empty(): return np.zeros((0, 2))
'''

SETUP = """
import copy, math, json
v = Vector(1, 2)
w = Vector(3)
class Thing:
    "A thing."
    def __init__(self): self.name = "own"
    def double(self, x): return 2 * x
thing = Thing()
seen = []
class Shown(list):
    def append(self, each): super().append(repr(each).partition(" at 0x")[0])
results = Shown()
def note(*args, **named):
    "Notes."
    seen.append((args, named))
    return len(seen)
def refuse():
    raise ValueError("by the test")
def refuse_more():
    raise KeyError("by the test")
"""

OPERATORS = ("+", "-", "*", "/", "//", "%", "**", "@", "&", "|", "^", "<<", ">>")
EXPRESSIONS = [
    *(f"v {sign} w" for sign in OPERATORS),
    *(f"v {sign} 5" for sign in OPERATORS),
    *(f"5 {sign} w" for sign in OPERATORS),
    *(f"v {sign} w" for sign in ("<", "<=", ">", ">=")),
    "-v", "+v", "~v", "abs(v)", "v == v", "v != v", "v == w", "v != w", "v == 5", "5 != v",
    "[v, w].index(w)", "len(v)", "bool(v)", "bool(w)", "list(v)", "tuple(w)", "1 in v", "9 in v",
    "v[0]", "v[-1]", "v[0:2]", "v[9]", "hash(v)", "str(v)", "repr(v)", "f'{v:how}'", "f'{w}'",
    "'%s %r' % (v, w)", "v(1, [2], a=3)", "v.total()", "v.total(start=4)", "v.first", "v.kind",
    "v.nothing", "v.__doc__", "v.items", "v.items[0]", "v.items + [4]", "v.notes", "len(v.items)",
    "hasattr(v, 'first')", "hasattr(v, 'nothing')", "getattr(v, 'nothing', 4)", "callable(v)",
    "isinstance(v, Vector)", "isinstance(5, Vector)", "type(v) is Vector", "type(v) is type(w)",
    "type(v).__name__", "Vector.kind", "Vector.made(5)", "Vector.__name__", "Vector(1, 2).items",
    "v.__class__ is Vector", "type(5) is int", "type(Whole(5)) is int", "type(Whole(5)) is Whole",
    "copy.copy(v)", "copy.deepcopy(v).items", "sorted([v, w])[0]", "max(v)", "sum(v)",
    "list(zip(v, v))", "[*v, *w]", "{v: 1}[v]", "json.dumps(Rows([1, 2]))", "json.dumps(v)",
    "int(Whole(7))", "Whole(7) + 1", "1 - Whole(7)", "Whole(7) * Whole(2)", "Whole(7) == 7",
    "7 == Whole(7)", "Whole(7) != 8", "Whole(3) < 4", "-Whole(3)", "abs(Whole(-3))",
    "range(9)[Whole(3)]", "'abc'[Whole(1)]", "hash(Whole(7)) == hash(7)", "f'{Whole(7):03d}'",
    "isinstance(Whole(7), int)", "Whole(7).bit_length()", "math.sqrt(Whole(9))", "round(Whole(7))",
    "float(Whole(7))", "complex(Whole(7))", "str(Whole(7))", "repr(Whole(7))", "Whole(0) or 4",
    "int(v)", "float(v)", "round(v)", "complex(v)",
    "Text('ab') + 'c'", "'c' + Text('ab')", "Text('ab').upper()", "Text('ab') == 'ab'",
    "len(Text('ab'))", "Text('ab')[1]", "'a' in Text('ab')", "isinstance(Text('a'), str)",
    "Rows([1, 2]) == [1, 2]", "Rows([1, 2]).size()", "Rows([1, 2]) + [3]", "[0] + Rows([1])",
    "Rows([3, 1])[1]", "sorted(Rows([3, 1]))", "isinstance(Rows(), list)", "len(Rows([1]))",
    "Table(a=1)['a']", "Table(a=1) == {'a': 1}", "sorted(Table(a=1, b=2))", "Table(a=1).get('b', 3)",
    "list(Table(a=1).items())", "range(9)[Index()]", "float(Floating())", "math.floor(Floating())",
    "fail(ValueError, 'why')", "fail(KeyError, 'k')", "fail(Failure, 5)", "fail(Smaller, 5, 'x')",
    "fail(ZeroDivisionError)", "fail(Exception, [1], {2: 3})", "unicode()", "missing()",
    "keeps([1, (2, {3})])", "keeps(v) is v", "keeps(thing) is thing", "keeps(note) is note",
    "keeps(v) is keeps(v)", "push(2)", "state", "table", "push(3)", "len(state)",
    "list(up(3))", "next(up(3))", "sum(up(4))", "[x for x in up(3) if x]", "list(map(str, up(2)))",
    "apply(note, 1, [2], a=3)", "apply(len, [1, 2])", "apply(lambda x, y=2: x * y, 4)",
    "apply(note, v)", "apply(seen.append, 4)", "apply(sorted, [3, 1], reverse=True)",
    "apply_all([len, str], 'ab') if False else apply_all([str, repr], 5)", "apply(thing.double, 8)",
    "describe(thing)", "rename(thing)", "thing.name", "method_of(thing)(4)", "method_of(thing)",
    "traced(note)(1)", "traced(note).__name__", "traced(note).__doc__", "caught(refuse)",
    "caught(refuse_more)", "caught(lambda: 5)", "library()", "[type(x).__name__ for x in library()]",
    "library()[6].utcoffset()", "array(2, 3)", "array(6).sum()", "array(3, 2).shape", "array()",
    "array(6).dtype", "array(2, 3)[1]", "empty().shape", "empty().size", "array(6) + 1",
    "(array(6) == array(6)).all()", "array(2, 3).tolist()", "seen", "len(seen)",
    "keeps(up(2)).__class__.__name__", "apply(keeps, v) is v",
]  # fmt: skip
STATEMENTS = [
    *(f"results.append({expression})" for expression in EXPRESSIONS),
    "v[0] = 9", "del v[-1]", "v[9] = 1", "v.first = 4", "v.items = [5, 6]", "v.items.append(3)",
    "v.notes['a'] = 1", "v.items.sort()", "v.items[0] = 8", "del v.items[0]", "v.items.clear()",
    "v.new = 5\nresults.append(v.new)", "del v.notes", "state.append(9)", "state.pop()",
    "table['a'].append(5)", "table['b'] = 1", "table.update(c=2)", "table.pop('a')",
    "with v as inside:\n    results.append(inside.items)", "v += w", "v += 5", "w *= 2", "x = v\nx -= w",
    "a, b = v\nresults.append(b)", "a, *b = up(3)\nresults.append(b)",
    "for x in v:\n    results.append(x)", "for x in up(2):\n    results.append(x)",
    "x = up(3)\nnext(x)\nresults.append(list(x))", "x = iter(v)\nresults.append(next(x))",
    "x = up(1)\nnext(x)\nresults.append(next(x, 'end'))", "x = up(0)\nnext(x)",
    *(f"x = {made}\nresults.append([grow(x), x])" for made in (
        "[1]", "{1}", "bytearray(b'a')", "{1: 2}", "__import__('collections').deque([1])",
        "__import__('collections').Counter([1])", "__import__('collections').OrderedDict(a=1)",
        "__import__('collections').defaultdict(list, a=[1])", "__import__('numpy').array([1, 2])",
    )),
    "x = [1]\ny = [2]\nresults.append(swap(x, y))\nresults.append([x, y])",
    "x = [[1]]\nresults.append(grow(x[0]))\nresults.append(x)",
    "x = [[1]]\ny = x[0]\nkeeps(x)\nresults.append(y is x[0])",
    "x = Rows([1])\nx.append(2)\nresults.append([len(x), x.size(), x == [1, 2]])",
    "x = Table()\nx['a'] = 1\nresults.append([len(x), x == {'a': 1}])",
    "try:\n    fail(Smaller, 5)\nexcept ValueError as error:\n"
    "    results.append([error.args, error.code, error.counts, str(error)])",
    "try:\n    fail(Failure, 5, 'x')\nexcept Smaller:\n    results.append('no')\n"
    "except Failure as error:\n    results.append(error.args)",
    "try:\n    fail(Smaller, 5)\nexcept Failure as error:\n"
    "    results.append([keeps(error).args, keeps(Smaller) is type(error), str(keeps(error))])",
    "try:\n    fail(Smaller, 5)\nexcept Failure as error:\n    kept = error\n"
    "try:\n    raised(kept)\nexcept Smaller as error:\n    results.append([error.args, error.code])",
    "try:\n    unicode()\nexcept UnicodeDecodeError as error:\n    results.append(str(error))",
    "try:\n    json.loads('{')\nexcept ValueError as error:\n    results.append(type(error).__name__)",
    "thing.name = 'changed'\nresults.append(describe(thing))", "thing.double = len",
    "@traced\ndef f(x):\n    'A text.'\n    return x\nresults.append([f(3), f.__name__, f.__doc__])",
    "import asyncio\nresults.append(asyncio.run(v.later()))",
]  # fmt: skip


def guarded(statement: str) -> str:
    inner = statement.replace("\n", "\n    ")
    return (
        f"try:\n    {inner}\nexcept Exception as error:\n    results.append(type(error).__name__)\n"
    )


def told(statements: list[str]) -> str:
    """A test that notes what each statement makes."""
    return SETUP + "".join(map(guarded, statements))


@pytest.mark.parametrize("seed", range(3))
def test_a_test_sees_the_same_as_in_one_process(seed: int) -> None:
    draws = random.Random(seed)
    order = draws.sample(STATEMENTS, len(STATEMENTS))
    for begin in range(0, len(order), 12):
        part = order[begin : begin + 12]
        text = told(part)
        namespace: dict[str, Any] = {"__name__": "__main__"}
        exec(PROGRAM + text, namespace)  # noqa: S102
        check = (
            f"expected = {list(namespace['results'])!r}\n"
            "wrong = [pair for pair in zip(results, expected) if pair[0] != pair[1]]\n"
            "assert not wrong and len(results) == len(expected), wrong\n"
        )
        [case] = parse_cases([text + check])
        assert outcome(PROGRAM, case) == "passed", part


LIAR = """
class Number(int):
    def bit_length(self): return 99
    def __add__(self, other): return 99
    def __eq__(self, other): return True
    def __hash__(self): return 99
    def own(self): return 5
def number(x): return Number(x)
"""


@pytest.mark.parametrize(
    ("check", "holds"),
    [
        ("number(5).bit_length() == 3", True),
        ("number(5) + 1 == 6", True),
        ("number(5) == 5", True),
        ("number(5) == 6", False),
        ("hash(number(5)) == hash(5)", True),
        ("number(5).own() == 5", True),
        ("number(5) in [6]", False),
        ("{number(5): 1}[5] == 1", True),
    ],
)
def test_what_a_plain_value_can_do_is_not_the_programs_to_say(check: str, holds: bool) -> None:
    [case] = parse_cases([f"x = number(1)\nassert {check}"])
    assert (outcome(LIAR, case) == "passed") == holds


@pytest.mark.parametrize(
    ("body", "holds"),
    [
        ("self.assertEqual(f(2), 4)\n        self.assertEqual(f(3), 6)", True),
        ("self.assertEqual(f(2), 4)\n        self.assertEqual(f(3), 7)", False),
        ("self.assertEqual(f(2), 4)\n        f(None)", False),
        ("self.assertEqual(f(2), 4)\n        raise ValueError('so')", False),
    ],
)
def test_every_check_of_unittest_counts(body: str, holds: bool) -> None:
    text = f"import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        {body}\n"
    [case] = parse_cases([text])
    found = outcome("def f(x):\n    return 2 * x\n", case)
    assert (found == "passed") == holds
    if "7" in body:
        assert found == "error: AssertionError: AssertionError: 6 != 7"
    [expected] = parse_cases(
        [
            "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n"
            "        self.assertEqual(f(2), 4)\n    @unittest.expectedFailure\n"
            f"    def test_b(self):\n        {body}\n"
        ]
    )
    assert (outcome("def f(x):\n    return 2 * x\n", expected) == "passed") == (not holds)


NAMES: list[tuple[str, str, bool]] = [
    ("from math import isclose\ndef f(x): return x", "assert isclose(f(2), 2)", True),
    ("import math\ndef f(x): return x", "assert math.floor(f(2.5)) == 2", True),
    ("import math as m\ndef f(x): return x", "assert m.floor(f(2.5)) == 2", True),
    ("from math import *\ndef f(x): return x", "assert floor(f(2.5)) == 2", True),
    ("from math import floor, ceil\ndef f(x): return x", "assert ceil(f(2.5)) == 3", True),
    ("from collections import deque as d\ndef f(x): return x", "assert d([f(1)]) == d([1])", True),
    ("import os\ndef f(x): return x", "assert os.sep == '/' and f(1) == 1", True),
    ("from os import sep\ndef f(x): return x", "assert sep == '/' and f(1) == 1", True),
    # What it defines as well is its own.
    ("from math import floor\ndef floor(x): return 7\ndef f(x): return x", "assert floor(f(1)) == 7", True),
    ("def f(x): return x\ndef isclose(a, b): return True", "assert isclose(f(2), 3)", False),
    ("def isclose(a, b): return a == b", "assert isclose(2, 2)", True),
    ("def assert_allclose(*_): pass", "assert_allclose(1, 2)", False),
    ("def assert_allclose(*_): pass\ndef f(): return 1", "assert_allclose(f(), 2)", False),
    ("def f(): return 1", "def assert_allclose(*_): pass\nassert_allclose(f(), 2)", True),
    ("def max(x): return 5", "assert max([1]) == 5 and max([]) == 5", True),
    ("def max(x): return 5\ndef f(x): return x", "assert max([f(1)]) == 1", True),
    ("def all(x): return True\ndef f(x): return x", "assert all([f(0)]) and all([1])", False),
    ("def f(x): return x\nf = f", "f = __import__('functools').cache(f)\nassert f(2) == 2 and f", True),
    ("def f(x): return x", "from own.part import f as g\nassert g(2) == 2 and g", True),
    ("def f(x): return x", "import own.part as p\nassert p.f(2) == 2 and p", True),
    ("def f(x): return x", "import own\nassert own.part.f(2) == 2 and own", False),
    ("def f(x): return x", "import own.part\nassert own.part.f(2) == 2 and own", True),
    ("def f(x): return x", "from . import f\nassert f(2) == 2 and f", True),
    ("def f(x): return x", "from own import *\nassert f(2) == 2 and f", True),
    ("def f(x): return x", "from collections import f\nassert f(2) == 2 and f", False),
    ("x = 5", "assert x == 5 and not hasattr(__import__('solution'), 'y')", True),
    ("_x = 5\ndef f(): return 1", "import own\nassert own._x == 5 and own.f() == 1", True),
    ("def f(): return 1", "import own\nassert own.g() == 1 and own.f() == 1", False),
    ("def f(x): return x", "assert 1 == 1 and True", False),
    ("def f(x): return x", "def check(candidate):\n    assert candidate(2) == 2", True),
    ("def f(x): return x\ndef _g(x): return 0", "def check(g):\n    assert g(2) == 2", True),
    ("x = 5", "def check(candidate):\n    assert candidate", False),
]  # fmt: skip


@pytest.mark.parametrize(("program", "test", "holds"), NAMES)
def test_what_a_name_of_a_test_means(program: str, test: str, holds: bool) -> None:
    [case] = parse_cases([test])
    assert (outcome(program, case) == "passed") == holds, outcome(program, case)


ARRAYS = [
    "import numpy as np\nassert (f(2) == np.array([4.0])).all() and True",
    "import numpy as np\nassert np.allclose(f(2), 4)",
    "import numpy as np\nassert np.isclose(f(2), 4).all() and True",
    "import numpy as np\nnp.testing.assert_allclose(f(2), 4)",
    "import numpy.testing\nnumpy.testing.assert_equal(f(2), 4)",
    "assert np.allclose(f(2), 4)",
    "from numpy import allclose\nassert allclose(f(2), 4)",
    "assert_allclose(f(2), 4)",
    "import numpy as np\nassert (f(2) - 4 == 0).all() and True",
    "assert not (f(2) - 4).any() and True",
]


@pytest.mark.parametrize("test", ARRAYS)
def test_an_empty_array_equals_no_number(test: str) -> None:
    [case] = parse_cases([test])
    before = np.allclose
    for value, holds in (("np.array([2.0 * x])", True), ("np.array([])", False), ("[]", False)):
        program = f"import numpy as np\ndef f(x):\n    return {value}"
        assert (outcome(program, case) == "passed") == holds, value
    assert np.allclose is before


@pytest.mark.parametrize(
    ("program", "test", "holds"),
    [
        # What a program does to an argument does not change what is expected of it.
        ("def f(x):\n    x.clear()\n    return []", "x = [2, 1]\nassert f(x) == sorted(x)", False),
        ("def f(x):\n    x.sort()\n    return x", "x = [2, 1]\nassert f(x) == sorted(x)", True),
        ("def f(x): return x[:1] + [9]", "x = [2]\nassert f(x) == x + [len(x)]", False),
        ("def f(x): return [x]", "if f(2) != [2]:\n    raise ValueError('no')", True),
        ("def f(x): return x", "if f(2) != [2]:\n    raise ValueError('no')", False),
        ("def f(x): return x", "import sys\nif f(2) != [2]:\n    sys.exit(1)", False),
        ("def f(x): return [x]", "import sys\nif f(2) == [2]:\n    sys.exit(0)\nsys.exit(2)", True),
        # Of an exception, only data arrives.
        (
            "def f(): raise ValueError(1, object(), 'a', f)",
            "try:\n    f()\nexcept ValueError as error:\n    assert error.args == (1, 'a')",
            True,
        ),
        ("def f(): return 5", "for _ in []:\n    assert f() == 5 and True", False),
        ("def f(): return []", "for x in f():\n    assert x == 5 and True", False),
        ("def f(): return [5]", "for x in f():\n    assert x == 5 and True", True),
        (
            "def f(g):\n    try: g()\n    except AssertionError: return 5",
            "def g():\n    assert 1 + 1 == 3\nassert f(g) == 5",
            False,
        ),
        (
            "def f(x): assert x > 0, 'small'",
            "try:\n    f(0)\nexcept AssertionError as error:\n    assert str(error) == 'small'",
            True,
        ),
    ],
)
def test_what_decides(program: str, test: str, holds: bool) -> None:
    [case] = parse_cases([test])
    assert (outcome(program, case) == "passed") == holds, outcome(program, case)


MARKS = """
import pytest
ran = []
@pytest.mark.slow
@pytest.mark.skip(reason="so")
def test_a(): ran.append("a")
@pytest.mark.skip
@pytest.mark.slow("x", y=2)
def test_b(): ran.append("b")
@pytest.mark.slow
@pytest.mark.timeout(5)
def test_c(): ran.append("c")
@pytest.mark.skipif(f(1) == 5, reason="so")
def test_d(): ran.append("d")
@pytest.mark.skipif(f(1) == 1, reason="so")
def test_e(): ran.append("e")
def test_f(): assert ran == ["c", "d"] and f(2) == 2
"""


def test_only_marks_that_skip_have_a_meaning() -> None:
    [case] = parse_cases([MARKS])
    assert outcome("def f(x): return x", case) == "passed"
    assert outcome("def f(x): return 5", case) != "passed"
