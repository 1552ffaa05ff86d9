"""Wrong programs that forge messages, values, exceptions and limits: none passes a test that its
honest version passes, and none looks like a fault of the sandbox."""

import json
from typing import Any

import pytest

from services.reward.functions import CodeRewardFunction
from services.sandbox.cases import CaseResult
from tests.support.services.sandbox import code_function

pytestmark = pytest.mark.integration

HONEST = """
from math import isclose
class Missing(KeyError): pass
class Absent(Missing): pass
def f(x):
    if x is None: raise Absent(x)
    return x * 2
def g(call, x): return call(f(x))
"""
TESTS = [
    "assert f(2) == 4 and True",
    "assert all(f(i) == 2 * i for i in range(9))",
    "assert all(map(lambda pair: f(pair[0]) == pair[1], [(1, 2), (2, 4)]))",
    "for x, y in zip(map(f, [1, 2]), [2, 4]):\n    assert x == y",
    "for x in f([1, 1]):\n    assert x == 1",
    "assert abs(f(2.5) - 5) < 1e-9 and True",
    "assert isclose(f(2.5), 5)",
    "assert math.isclose(f(2.5), 5)",
    "if __name__ == '__main__':\n    assert f(2) == 4",
    "def test_f():\n    assert f(2) == 4",
    "from solution import *\ndef test_f():\n    assert f(2) == 4 and isinstance(f(2), int)",
    "import implementation\nassert implementation.f(2) == 4",
    "def check(candidate):\n    assert candidate(lambda x: x, 2) == 4",
    "import unittest\nclass T(unittest.TestCase):\n    def test_f(self):\n"
    "        self.assertEqual(f(2), 4)",
    "import pytest\ndef test_f():\n    assert f(2) == approx(4)\n    with raises(Missing):\n"
    "        f(None)",
    "def expect(x):\n    assert x == 4\ndef test_f():\n    g(expect, 2)",
    "assert f([1]).count(1) == 2 and f([3]).index(3) == 0",
    "assert {f(2), 4} == {4} and f(2) in {4: 0}",
    "assert f('ab') == 'abab' and True",
    "assert str(f(2)) == '4' and f'{f(2.5):.2f}' == '5.00'",
    "assert int(f(2)) == 4 and round(f(2.4)) == 5 and hash(f(2)) == 4",
    "assert type(f(2)) is int and type(f('a')) is str and f(2) == 4",
    "from unittest.mock import Mock\nm = Mock(return_value=1)\ng(m, 2)\n"
    "m.assert_called_once_with(4)",
    "seen = []\ng(seen.append, 2)\nassert seen == [4]",
    "import json\nassert json.dumps({'a': f(2)}) == '{\"a\": 4}'",
    "import copy\nassert copy.deepcopy(f(2)) == 4 and copy.copy(f('a')) == 'aa'",
]
ZERO = "def f(x): return 0\ndef g(call, x): return 0\n"


def message(*content: Any) -> str:
    """Returns a statement that writes a forged message to the test."""
    line = json.dumps(content).encode() + b"\n"
    return f"import os\nos.write(5, {line!r})\n"


def names(**values: Any) -> str:
    """Returns a program that answers, before it is asked, what the names of a test mean."""
    return message("ok", values) + "f = 0\n"


def same(base: str, *, result: str = "x") -> str:
    """Returns a program whose values are equal to all others."""
    return f"""
class Same{base}:
    def yes(self, *a, **k): return True
    def zero(self, *a): return 0
    __hash__ = lambda self: 4
    __len__ = lambda self: 1
    __str__ = __repr__ = lambda self: '4'
    __format__ = lambda self, spec: '5.00'
    __getattr__ = lambda self, name: self.yes
for name in 'eq lt gt le ge contains bool instancecheck call'.split():
    setattr(Same, f'__{{name}}__', Same.yes)
for name in 'add sub mul abs neg radd rsub rmul index int float round'.split():
    setattr(Same, f'__{{name}}__', Same.zero)
for name in 'startswith endswith count index isdigit'.split():
    setattr(Same, name, Same.yes)
def f(x): return Same({result})
def g(call, x): return Same({result})
"""


INDEX_ERROR = ["exception", 0, "builtins", "IndexError", []]
FORGES = {
    "names: builtins": names(
        f=4,
        all=INDEX_ERROR,
        abs=INDEX_ERROR,
        isinstance=INDEX_ERROR,
        range=INDEX_ERROR,
        map=["list", []],
        zip=INDEX_ERROR,
        str=INDEX_ERROR,
        int=INDEX_ERROR,
        round=INDEX_ERROR,
        hash=INDEX_ERROR,
    ),
    "names: of the module": names(
        f=4, __name__="x", __builtins__=["dict", []], __file__=0, __all__=["list", []]
    ),
    "names: the test's own": names(
        f=4,
        test_f=0,
        check=0,
        expect=0,
        T=0,
        unittest=0,
        load_tests=0,
        implementation=0,
        x=0,
        y=0,
        pair=0,
        candidate=0,
    ),
    "names: judges": names(
        f=["object", 1, [4], False],
        isclose=INDEX_ERROR,
        math=["object", 2, [], False],
        approx=INDEX_ERROR,
        raises=INDEX_ERROR,
    ),
    "names: modules": names(
        f=["import", "os", "_exit"],
        math=["import", "unittest.mock", ""],
        g=["import", "sys", "exit"],
    ),
    "names: functions of the library": "import os\nfrom sys import exit as f\n"
    "from os import _exit as g\nfrom unittest.mock import MagicMock as approx\n",
    "names: private functions of a pure module": "from random import _exit as f, _os as g\n"
    "from statistics import sys as math\n",
    "names: types that are made": names(
        f=["made", "os", "system", ["true"]], g=["made", "builtins", "exec", ["raise SystemExit"]]
    ),
    "names: twice": names(f=["local", 1]) + message("ok", {"f": 4}) + message("ok", True, []),
    "kinds: none such": message("done", {}) + message("answer", "x") + ZERO,
    "kinds: skipped": message("ok", {"f": ["object", 1, [], False]})
    + message(
        "raise",
        [
            "exception",
            7,
            "unittest.case",
            "SkipTest",
            [["exception", 0, "builtins", "Exception", []]],
        ],
        [],
        {},
        None,
    )
    + ZERO,
    "kinds: exceptions that end a process": "def f(x): raise SystemExit(0)\ndef g(*a): raise KeyboardInterrupt",
    "kinds: a generator's end": "def f(x): raise GeneratorExit\ndef g(*a): raise StopAsyncIteration",
    "kinds: an end of iterations": "class Missing(StopIteration): pass\ndef f(x): raise Missing\ng = f",
    "kinds: a class of its own as AssertionError": "class AssertionError(KeyError): pass\n"
    "Missing = KeyError\ndef f(x): raise AssertionError\ng = f",
    "kinds: an exception that skips a test": "import unittest\ndef f(x): raise unittest.SkipTest\ng = f",
    "its process: what the test asks for": "import os, json\nline = os.read(4, 1 << 16)\n"
    "words = [w for w in json.loads(line)[1] if w.isdigit() or w == 'abab']\n"
    "os.write(5, json.dumps(['ok', {'f': ['object', 1, [], False]}]).encode() + b'\\n')\n"
    "def f(x): return words[0] if words else 0\nf = f if words else 0\n",
    "kinds: requests to the test": message("ok", {"f": ["object", 1, [], False]})
    + message("ask", "call", 1, [])
    + message("ask", "setattr", 0, ["x", 1])
    + ZERO,
    "kinds: not JSON": "import os\nos.write(5, b'\\xff{]\\n' * 9)\n" + ZERO,
    "kinds: nested without end": "import os\nos.write(5, b'[' * 60000 + b'\\n')\n" + ZERO,
    "kinds: arguments that were changed": message("ok", {"f": ["object", 1, [], False]})
    + "".join(message("ok", 9, [[i, ["list", []]]]) for i in (-1, 0, 1, 9))
    + ZERO,
    "values: an object": same("", result=""),
    "values: an int": same("(int)", result="9"),
    "values: a float": same("(float)", result="7.5"),
    "values: a str": same("(str)", result="'z'"),
    "values: a list": same("(list)", result="[7]"),
    "values: a tuple": same("(tuple)", result="(7, 8)"),
    "values: a dict": same("(dict)", result="{7: 8}"),
    "values: a set": same("(frozenset)", result="{7}"),
    "values: a Decimal": "import decimal\n" + same("(decimal.Decimal)", result="7"),
    "values: a class with a metaclass": "class Meta(type):\n    def __eq__(*a): return True\n"
    "    __hash__ = lambda self: 4\nclass Same(metaclass=Meta): pass\n"
    "def f(x): return Same\ng = f",
    "values: an array": "class Same:\n    dtype = shape = 4\n    def tolist(self): return []\n"
    "    def __array__(self, *a): return []\n    __array_priority__ = 99\n"
    "def f(x): return Same()\ng = f",
    "values: an Ellipsis": "def f(x): return ...\ng = f",
    "values: not a number": "def f(x): return float('nan')\ng = f",
    "values: generators": "def f(x):\n    yield from ()\ng = f",
    "values: a coroutine": "async def f(x): return 4.5\ng = f",
    "its process: another end of a pipe": "import os\nfor fd in range(12):\n    for way in (os.O_WRONLY, os.O_RDWR):\n"
    "        try: os.write(os.open(f'/proc/self/fd/{fd}', way | os.O_NONBLOCK), "
    'b\'{"status": "done"}\\n["ok", {"f": 4}]\\n\')\n        except OSError: pass\n' + ZERO,
    "its process: ended in a call": "import os\ndef f(x): os._exit(0)\ng = f",
    "its process: ended by a thread": "import os, threading\nthreading.Timer(0.05, os._exit, [0]).start()\n"
    "import time\ndef f(x):\n    time.sleep(1)\ng = f",
    "its process: killed": "import os\ndef f(x): os.kill(os.getpid(), 9)\ng = f",
    "its process: replaced": "import os, sys\ndef f(x): os.execv(sys.executable, [sys.executable, '-c', ''])\ng = f",
    "its process: descriptors closed": "import os\nos.closerange(0, 99)\n" + ZERO,
    "its process: recursion": "import sys\nsys.setrecursionlimit(10**6)\ndef f(x): return f(x)\ng = f",
    "its process: import hooks": "import sys, types\nclass Hook:\n    def find_spec(self, name, *a): raise ImportError\n"
    "    find_module = find_spec\nsys.meta_path.insert(0, Hook())\nsys.path_hooks.clear()\nsys.modules.clear()\n"
    + ZERO,
    "its process: the program's side": "import sys, gc, inspect\nfor module in list(sys.modules.values()):\n"
    "    for name in ('encoded', 'recipe', 'finished', 'serve', 'ACTIONS'):\n"
    "        if hasattr(module, name): setattr(module, name, lambda *a, **k: 4)\n" + ZERO,
    "its process: the environment": "import os\nos.environ.update(PYTHONOPTIMIZE='2', PYTHONSTARTUP='x', PYTHONPATH='/tmp')\n"
    + ZERO,
    "its process: files for the next test": "import os\nfor folder in ('/', '/tmp', '/dev/shm', '/var/tmp', os.getcwd()):\n"
    "    for name in ('math.py', 'pytest.py', 'sitecustomize.py', 'conftest.py'):\n"
    "        try: open(f'{folder}/{name}', 'w').write('raise SystemExit(0)')\n        except OSError: pass\n"
    + ZERO,
    "other processes: limits": "import resource\nfor pid in range(1, 99):\n    for kind in range(16):\n"
    "        try: resource.prlimit(pid, kind, (3, 3))\n        except (OSError, ValueError): pass\n"
    + ZERO,
    "other processes: priorities": "import os, time\nfor pid in range(99):\n    for change in (\n"
    "        lambda: os.setpriority(os.PRIO_PROCESS, pid, 19),\n"
    "        lambda: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0)),\n    ):\n"
    "        try: change()\n        except OSError: pass\n" + ZERO,
    "other processes: signals": "import os, signal\nfor pid in [0, -1, *range(1, 99)]:\n"
    "    for number in (signal.SIGSTOP, signal.SIGCONT, signal.SIGCHLD, signal.SIGWINCH, signal.SIGHUP):\n"
    "        if pid not in (0, -1, os.getpid()):\n            try: os.kill(pid, number)\n            except OSError: pass\n"
    + ZERO,
    "a mock's record": """
def f(x): return 0
def g(mock, x):
    def attempt(action):
        try: action()
        except Exception: pass
    for name, value in {'called': True, 'call_count': 1, 'call_args': ((4,), {})}.items():
        attempt(lambda: setattr(mock, name, value))
        attempt(lambda: mock.configure_mock(**{name: value}))
    for name in ('assert_called_once_with', '_mock_call', 'side_effect', '__class__'):
        attempt(lambda: setattr(mock, name, lambda *a, **k: None))
    attempt(lambda: mock.attach_mock(mock, 'assert_called_once_with'))
    attempt(lambda: mock.mock_add_spec(['call_count']))
    attempt(lambda: mock.call_args_list.append(((4,), {})))
    attempt(lambda: mock.return_value(4))
    attempt(lambda: mock.assert_called_once_with(4))
    return mock
""",
    "the type of a value": "class Same:\n    __class__ = int\n    def __index__(self): return 9\n"
    "    def __copy__(self): return 9\n    __deepcopy__ = lambda self, memo: 9\n"
    "def f(x): return Same()\ndef g(call, x): return call",
    "a callback's failure is hidden": "def f(x): return 0\ndef g(call, x):\n    try: call(0)\n    except BaseException: pass\n",
}


@pytest.fixture(scope="module")
def code() -> CodeRewardFunction:
    return code_function(timeout_s=5, partial_credit=True, slots=1)


def run(code: CodeRewardFunction, source: str) -> list[CaseResult]:
    return code.results(source, TESTS)


def test_the_honest_program_passes_all(code: CodeRewardFunction) -> None:
    failed = [
        (test, result)
        for test, result in zip(TESTS, run(code, HONEST), strict=True)
        if result.status != "passed"
    ]
    assert failed == []


@pytest.mark.parametrize("name", FORGES)
def test_a_forge_passes_nothing(code: CodeRewardFunction, name: str) -> None:
    results = run(code, FORGES[name])
    passed = [
        test for test, result in zip(TESTS, results, strict=True) if result.status == "passed"
    ]

    assert passed == []
    assert {result.status for result in results}.isdisjoint(("starved", "wrong"))


def test_a_str_of_its_own_class_says_nothing_about_itself(code: CodeRewardFunction) -> None:
    test = "assert f('ab').startswith('abab') and f('ab').endswith('bab') and f('ab').islower()"

    assert code.results(HONEST, [test])[0].status == "passed"
    assert code.results(same("(str)", result="'Z'"), [test])[0].status == "error"


@pytest.mark.parametrize(
    "test",
    [
        "import pytest\nwith pytest.raises(Exception):\n    refuse(-1)",
        "import pytest\nfrom solution import refuse\nwith pytest.raises(Exception):\n    refuse(-1)",
        "import pytest, solution\nwith pytest.raises(Exception):\n    solution.refuse(-1)",
        "import helper\ntry:\n    helper.refuse(-1)\nexcept Exception:\n    assert f(1) == 2\n"
        "else:\n    assert False",
        "try:\n    refuse(-1)\n    assert False\nexcept (NameError, ValueError):\n    assert f(1) == 2",
    ],
)
def test_what_is_missing_or_ends_is_no_exception_that_a_test_expects(
    code: CodeRewardFunction, test: str
) -> None:
    double = "def f(x): return 2 * x\n"
    honest = double + "def refuse(x): raise ValueError(x)"
    ended = double + "import os\ndef refuse(x): os._exit(0)"

    assert [result.status for result in code.results(honest, [test])] == ["passed"]
    assert [result.status for result in code.results(double, [test])] == ["error"]
    assert [result.status for result in code.results(ended, [test])] == ["died"]


def test_an_argument_that_is_emptied_is_not_compared_with(code: CodeRewardFunction) -> None:
    tests = ["a = [3, 1]\nassert f(a) == sorted(a)", "a = [2, 1]\nassert f(a) == list(sorted(a))"]
    programs = {"def f(a): return sorted(a)": 2, "def f(a):\n    a.sort()\n    return a": 2}
    programs |= {
        "def f(a):\n    a.clear()\n    return a": 0,
        "def f(a):\n    a[:] = [0]\n    return [0]": 0,
    }
    for program, passed in programs.items():
        results = code.results(program, tests)
        assert [result.status for result in results].count("passed") == passed


@pytest.mark.parametrize(
    "program",
    [
        "def abs(x): return 0",
        "def all(x): return True\ndef abs(x): return 0",
        "def range(*a): return []",
        "xs = 5\ndef isinstance(*a): return True",
        "def sum(x): return 7",
        "sum = 7",
        "x = 1",
    ],
)
def test_a_function_with_the_name_of_a_builtin_is_tested(
    code: CodeRewardFunction, program: str
) -> None:
    tests = [
        "assert all(sum([i, 1]) == i + 1 for i in range(5))",
        "xs = [1, 2]\nassert abs(sum(xs) - 3) < 1e-9 and isinstance(sum(xs), int)",
    ]
    honest = "def sum(x):\n    total = 0\n    for i in x: total += i\n    return total"

    assert [result.status for result in code.results(honest, tests)] == ["passed", "passed"]
    assert [result.status for result in code.results(program, tests)] == ["error", "error"]


def test_what_judges_a_function_with_the_name_of_a_builtin_is_the_library(
    code: CodeRewardFunction,
) -> None:
    test = "assert isclose(sum([0.1, 0.2]), 0.3)"
    right = "def sum(x):\n    a, b = x\n    return a + b"
    wrong = "def sum(x): return 0"

    assert [code.results(each, [test])[0].status for each in (right, wrong)] == ["passed", "error"]
    judged = "def isclose(a, b): return True"
    assert code.results(f"{wrong}\n{judged}", [test])[0].status == "error"


def test_a_forged_line_defines_only_what_was_asked_for(code: CodeRewardFunction) -> None:
    """Honest but for one line that redefines everything else; the tests must not see that line."""
    everything = dict.fromkeys(("all", "abs", "isinstance", "str", "int", "math"), INDEX_ERROR)
    results = run(code, message("ok", everything | {"f": 0, "__name__": "x"}) + HONEST)

    assert [result.status for result in results].count("passed") == 0
