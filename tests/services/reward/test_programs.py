"""CodeRewardFunction runs harmless programs, compares test cases of every kind and gives the right
scores."""

import os
import subprocess
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.errors import ConfigError, InvalidInput
from common.settings.config import load
from common.settings.rewards import CodeReward
from common.settings.sections import RewardSection
from common.wire.schemas import RewardItem
from services.reward.app import create_reward_app
from services.reward.functions import CodeRewardFunction
from services.reward.functions.programs import extract_program
from services.reward.service import RewardService
from services.sandbox import command, sandbox
from services.sandbox.case_formats import parse_cases
from tests.support.errors import raises
from tests.support.services.sandbox import code_function


@pytest.fixture(scope="module")
def code() -> CodeRewardFunction:
    return code_function(timeout_s=5, partial_credit=True)


F = "```python\ndef f(x):\n    return x\n```"


def block(source: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": f"Here it is:\n```python\n{source}\n```\n"}]


def statuses(code: CodeRewardFunction, source: str, cases: Any) -> list[str]:
    return [result.status for result in code.results(source, cases)]


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\na\n```", "a\n"),
        ("```\na\n```", "a\n"),
        ("```py\na\n```\nor\n```python\nb\n```", "b\n"),
        ("```python\na\n```\n```text\noutput\n```", "a\n"),
        ("<think>```python\na\n```</think>", None),
        ("<think>```python\na\n```</think>```python\nb\n```", "b\n"),
        ("~~~python\na\n~~~", "a\n"),
        ("````python\n```\na\n````", "```\na\n"),
        ("```python\na\n```\n```python\nb", "a\n"),
        ("```python\nb", "b"),
        ("no program", None),
        ("```python\n\n```", None),
        ("```bash\nls\n```", None),
        ("```python\n" + "x" * 100_001 + "\n```", None),
        (f"{F}\nUsage:\n```python\nprint(f(2))\n```", "def f(x):\n    return x\n"),
        (f"{F}\n```python\nresult = f(2)\nassert result == 2\n```", "def f(x):\n    return x\n"),
        (
            f"{F}\n```python\nfor i in range(3):\n    print(f(i))\n```\n```python\nf(3)\n```",
            "def f(x):\n    return x\n",
        ),
        (f"{F}\nOutput:\n```\n[1, 2]\n```", "def f(x):\n    return x\n"),
        (f"{F}\nOutput:\n```python\n2\n```", "def f(x):\n    return x\n"),
        (f"{F}\n```python\n>>> f(2)\n2\n```", "def f(x):\n    return x\n"),
        (f"{F}\n```\n$ python f.py\nf = 2\n```", "def f(x):\n    return x\n"),
        (f"{F}\n```python\ndef test_f():\n    assert f(1) == 1\n```", "def f(x):\n    return x\n"),
        (
            f"{F}\nBetter:\n```python\ndef f(x):\n    return 2 * x\n```",
            "def f(x):\n    return 2 * x\n",
        ),
        (
            f"{F}\n```python\ndef g(x):\n    return f(x) + 1\n```",
            "def f(x):\n    return x\n\ndef g(x):\n    return f(x) + 1\n",
        ),
        (
            f"{F}\n```python\nprint(f(int(input())))\n```",
            "def f(x):\n    return x\n\nprint(f(int(input())))\n",
        ),
        (
            "```python\nimport sys\nprint(sys.stdin.read())\n```\n```\n5\n```",
            "import sys\nprint(sys.stdin.read())\n",
        ),
        ("```\ndef f(): pass\n```\n```\n5 apples\n```", "def f(): pass\n"),
        (
            "1. Try:\n\n    ```python\n    def f(x):\n        return x\n    ```\n",
            "def f(x):\n    return x\n",
        ),
        ("\t```python\n\tdef f(x):\n\t\treturn x\n\t```\n", "def f(x):\n\treturn x\n"),
        ("~~~~ python\na = 1\n~~~\n~~~~\n", "a = 1\n~~~\n"),
        ("~~~\na = 1\n```\n~~~\n", "a = 1\n```\n"),
        (
            '```python\ndef f():\n    """\n        ```\n    """\n```\n',
            'def f():\n    """\n        ```\n    """\n',
        ),
        ("```{.python}\na = 1\n```", "a = 1\n"),
        ("```Python3.11\na = 1\n```", "a = 1\n"),
    ],
)
def test_the_program_is_found_among_code_blocks(response: str, program: str | None) -> None:
    assert extract_program(response) == program


def test_program_that_reads_input_is_not_chosen_for_calls() -> None:
    assert (
        extract_program(f"{F}\n```python\nprint(f(int(input())))\n```", reads_input=False)
        == "def f(x):\n    return x\n"
    )


@pytest.mark.integration
@pytest.mark.parametrize(
    "text",
    [
        "```\n" * 50_000,
        "```python\n" * 50_000,
        " " * 500_000,
        "```python\ndef a(): b()\n```\n" * 15_000,
    ],
)
def test_the_program_is_found_in_bounded_time(text: str) -> None:
    before = time.process_time()
    extract_program(text)
    assert time.process_time() - before < 20


@pytest.mark.integration
def test_standard_input_and_output(code: CodeRewardFunction) -> None:
    cases = [
        {"input": "1 2\n", "output": "3\n"},
        {"input": "1 2", "expected_output": "3"},
        {"input": "1 2", "output": "3  \n\n"},
        {"input": "1 2", "output": "4"},
        {"input": "x", "output": "3"},
        {"output": "3"},
    ]
    assert statuses(code, "a, b = map(int, input().split())\nprint(a + b)", cases) == [
        "passed", "passed", "passed", "wrong", "error", "error"
    ]  # fmt: skip
    assert (
        code.results("raise ValueError('no')", [{"input": "", "output": ""}])[0].detail
        == "ValueError: no"
    )


@pytest.mark.integration
def test_results_of_calls_are_compared(code: CodeRewardFunction) -> None:
    source = "def f(x, y=0): return x + y\nclass Solution:\n    def g(self, x): return (x, {1: 'é', 'k': [None, 1.5]})\n"
    cases = [
        {"function": "f", "args": [1], "kwargs": {"y": 2}, "output": 3},
        {"fn_name": "f", "args": [0.1, 0.2], "output": 0.3},
        {"function": "g", "args": [True], "output": [True, {"1": "é", "k": [None, 1.5]}]},
        {"function": "Solution().g", "args": [1], "output": [True, {"1": "é", "k": [None, 1.5]}]},
        {"function": "f", "args": [1], "output": "1"},
        {"function": "f", "args": [1], "output": True},
        {"function": "h", "args": [1], "output": 1},
        {"function": "f", "args": [], "output": None},
    ]
    assert statuses(code, source, cases) == [
        "passed",
        "passed",
        "passed",
        "wrong",
        "wrong",
        "wrong",
        "error",
        "error",
    ]


@pytest.mark.integration
def test_any_iterable_may_stand_for_a_list(code: CodeRewardFunction) -> None:
    source = (
        "import array, collections\n"
        "def f(kind):\n    a = [1, 2, 3]\n    d = dict.fromkeys(a, 5)\n    return {'range': range(1, 4), 'tuple': (1, 2, 3), "
        "'deque': collections.deque(a), 'generator': (i for i in a), 'map': map(int, a), 'set': {3, 1, 2}, "
        "'frozen': frozenset(a), 'keys': d.keys(), 'values': {i: i for i in a}.values(), 'array': array.array('i', a),"
        " 'zip': [x for x, in zip(a)],"
        " 'reversed': reversed(a[::-1]), 'bytes': b'123', 'text': '123', 'dict': d}[kind]\n"
        "def g():\n    return {(1, 'a'), (2, 'b')}\ndef h(): return [range(2), (i for i in 'ab')]\nexit()"
    )
    right = [
        "range",
        "tuple",
        "deque",
        "generator",
        "map",
        "set",
        "frozen",
        "keys",
        "values",
        "array",
        "zip",
        "reversed",
    ]
    wrong = ["bytes", "text", "dict"]
    cases: list[Any] = [
        {"function": "f", "args": [kind], "output": [1, 2, 3]} for kind in right + wrong
    ]
    assert statuses(code, source, cases) == ["passed"] * len(right) + ["wrong"] * len(wrong)
    others = [
        {"function": "f", "args": ["range"], "output": [1, 2, 4]},
        {"function": "f", "args": ["set"], "output": [1, 2, 3, 3]},
        {"function": "f", "args": ["set"], "output": [3, 2, 1]},
        {"function": "g", "args": [], "output": [[2, "b"], [1, "a"]]},
        {"function": "h", "args": [], "output": [[0, 1], ["a", "b"]]},
        "assert f('range') == [1, 2, 3]",
        "assert f('keys') == {1, 2, 3}",
        "assert list(f('generator')) == [1, 2, 3]",
    ]
    assert statuses(code, source, others) == [
        "wrong",
        "wrong",
        "passed",
        "passed",
        "passed",
        "wrong",
        "passed",
        "passed",
    ]


@pytest.mark.integration
def test_assert_lines(code: CodeRewardFunction) -> None:
    source = "import fractions\ndef f(x): return x * 2\ndef s(): return {1, 2}\ndef o(): return object()\n"
    cases = [
        "assert f(2) == 4",
        "assert 4 == f(2), 'twice'",
        "assert f((1,)) == (1, 1)",
        "assert f([1]) == (1, 1)",
        "assert s() == {2, 1}",
        "assert f(0.5) == 1",
        "assert f(fractions.Fraction(1, 2)) == 1",
        "assert f(2) != 5",
        "assert f(2) != 4",
        "assert o() != 1",
        "assert f(None) is None",
        "assert f(2) > 3 and f(3) == 6",
        "assert f(2) > 5",
        "x = f(3)\nassert x == 6",
        "assert f(10**100) == 2 * 10**100",
    ]
    assert statuses(code, source, cases) == [
        "passed", "passed", "passed", "wrong", "passed", "passed", "passed", "passed", "wrong", "passed", "error", "passed",
        "error", "passed", "passed"
    ]  # fmt: skip


HARMLESS = {
    "asyncio": "import asyncio\nasync def main():\n    await asyncio.sleep(0.01)\n    print('ok')\nasyncio.run(main())",
    "threads": "import threading\nthreading.stack_size(1 << 26)\nt = threading.Thread(target=lambda: print('ok'))\nt.start()",
    "a socket pair": "import socket\na, b = socket.socketpair()\na.send(b'ok')\nprint(b.recv(2).decode())",
    "deep recursion": "import sys\nsys.setrecursionlimit(50000)\ndef f(n): return n and 1 + f(n - 1)\nf(20000)\nprint('ok')",
    "exit": "print('ok')\nexit()",
    "exit with 0": "print('ok')\nexit(0)",
    "quit in a function": "def main():\n    print('ok')\n    quit()\nmain()",
    "sys.exit": "import sys\nprint('ok')\nsys.exit(0)",
    "os._exit": "import os\nprint('ok', flush=True)\nos._exit(0)",
    "closed standard output": "import sys\nprint('ok')\nsys.stdout.close()",
    "main": "if __name__ == '__main__':\n    print('ok')",
    "the standard library": "import json, re, math, heapq, bisect, collections, itertools, functools, decimal, fractions\n"
    "import random, datetime, string, statistics, dataclasses, typing, array, struct, hashlib, copy, uuid\nprint('ok')",
    "a large result": "print('ok' if len(str(sum(range(10**6)))) else '')",
    "all of standard input": "import sys\nprint('ok' if sys.stdin.read() == '' else '')",
    "bytes": "import sys\nsys.stdout.buffer.write(b'ok\\n')",
    "pickled classes": "import pickle\nclass A: pass\nprint('ok' if pickle.loads(pickle.dumps(A())) else '')",
    "100 MB": "x = bytearray(100 << 20)\nprint('ok')",
    "/dev/null": "open('/dev/null', 'w').write('x')\nprint('ok')",
    "os.urandom": "import os\nprint('ok' if os.urandom(8) else '')",
}


@pytest.mark.integration
@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_programs_run(code: CodeRewardFunction, name: str) -> None:
    [result] = code.results(HARMLESS[name], [{"input": "", "output": "ok"}])
    assert result.status == "passed", result


@pytest.mark.integration
def test_large_input_and_much_output_pass_through(code: CodeRewardFunction) -> None:
    text = "\n".join(map(str, range(200_000)))
    assert statuses(
        code,
        "import sys\nprint(len(sys.stdin.read()))",
        [{"input": text, "output": str(len(text))}],
    ) == ["passed"]
    assert statuses(code, "print('x' * 60_000)", [{"input": text, "output": "x" * 60_000}]) == [
        "passed"
    ]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("program", "cases"),
    [
        ("print('x' * 70_000)", [{"output": "x" * 70_000}]),
        (
            "def f(n): return [[i * j for j in range(n)] for i in range(n)]",
            [
                {
                    "function": "f",
                    "args": [80],
                    "output": [[i * j for j in range(80)] for i in range(80)],
                },
                f"assert f(80) == {[[i * j for j in range(80)] for i in range(80)]}",
                "assert f(80) == [[i * j for j in range(80)] for i in range(80)]",
            ],
        ),
        (
            "def f(n): return list(range(n))",
            [
                {"function": "f", "args": [100_000], "output": list(range(100_000))},
                "x = f(100_000)\nassert x == list(range(100_000))",
            ],
        ),
        (
            "def f(x): return x",
            ["x = [0.1] * 50_000\nassert f(x) == x and f({'a': x}) == {'a': x}"],
        ),
        ("def f(n): return 'é' * n", [{"function": "f", "args": [90_000], "output": "é" * 90_000}]),
        ("def f(n): return 2 ** n", ["assert f(100_000) == 1 << 100_000"]),
    ],
)
def test_large_values_pass_through(
    code: CodeRewardFunction, program: str, cases: list[Any]
) -> None:
    assert statuses(code, program, cases) == ["passed"] * len(cases)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("program", "case"),
    [
        ("print('x' * 5000)", {"output": "x"}),
        ("def f(): return [1234] * 5000", {"function": "f", "args": [], "output": 1}),
        ("def f(): return 'x' * 5000", "assert f() == 'x'"),
        ("def f(): return [1234] * 5000", "x = f()\nassert x == 1"),
        (
            "def f(): raise ValueError('x' * 5000)",
            "try:\n    f()\nexcept ValueError:\n    assert f",
        ),
    ],
)
def test_what_is_over_the_limit_of_output_has_a_status_that_says_so(
    program: str, case: Any
) -> None:
    small = code_function(timeout_s=5, slots=1, output_kb=2)
    [result] = small.results(program, [case])

    assert result.status == "output"
    assert result.detail == "more than 2 KB (output_kb)"


@pytest.mark.integration
@pytest.mark.parametrize(
    "case",
    [
        {"output": "x" * 2049},
        {"function": "f", "args": [], "output": list(range(1000))},
        f"assert f() == {list(range(1000))}",
        f"assert f() == {'[' * 150 + ']' * 150}",
    ],
)
def test_a_case_that_expects_more_than_the_limit_is_refused(case: Any) -> None:
    small = code_function(timeout_s=5, slots=1, output_kb=2)
    with pytest.raises(
        InvalidInput, match=r"over the limit of 2048|more than 100 levels"
    ) as caught:
        small.cases(["assert f() == 1", case], "items[0].columns.test_cases")
    assert caught.value.field == "items[0].columns.test_cases"


@pytest.mark.integration
@pytest.mark.parametrize(
    "program",
    [
        "import os\nprint(os.fstat(0).st_size)",
        "import io, os\ndata = io.BytesIO(os.read(0, os.fstat(0).st_size))\nprint(len(data.read()))",
        "import sys\nfirst = sys.stdin.readline()\nsys.stdin.seek(0)\nprint(len(sys.stdin.read()))",
        "import sys\nsys.stdin.buffer.seek(0, 2)\nprint(sys.stdin.buffer.tell())",
        "import mmap\nprint(len(mmap.mmap(0, 0, prot=mmap.PROT_READ)))",
        "print(len(open(0).read()))",
        "print(len(open('/dev/stdin').read()))",
        "import os\nwhile os.read(0, 3): pass\nprint(os.lseek(0, 0, os.SEEK_CUR))",
        "import sys\nsys.stdin = open(0)\nprint(sum(map(len, sys.stdin)))",
    ],
)
def test_standard_input_is_a_file(code: CodeRewardFunction, program: str) -> None:
    assert statuses(code, program, [{"input": "1 2\n3 4\n", "output": "8"}]) == ["passed"]


@pytest.mark.integration
def test_a_program_cannot_change_its_input_or_keep_something_in_it(
    code: CodeRewardFunction,
) -> None:
    program = (
        "import os\n"
        "for change in (lambda: os.write(0, b'xx'), lambda: os.ftruncate(0, 1 << 20),\n"
        "               lambda: os.ftruncate(0, 0), lambda: os.pwrite(0, b'x' * 99, 99)):\n"
        "    try: change()\n"
        "    except OSError: pass\n"
        "    else: print('changed')\n"
        "print(open('/dev/stdin').read())"
    )
    cases = [{"input": str(i), "output": str(i)} for i in range(3)]
    assert statuses(code, program, cases) == ["passed"] * 3


@pytest.mark.integration
def test_partial_credit_and_all_or_nothing(code: CodeRewardFunction) -> None:
    cases = [
        [
            {"input": "1", "output": "1"},
            {"input": "2", "output": "0"},
            {"input": "3", "output": "3"},
        ]
    ] * 3
    chats = [
        block("print(input())"),
        block("print([0, 1, 0, 3][int(input())])"),
        [{"role": "assistant", "content": "no"}],
    ]
    whole = code_function(timeout_s=3, slots=1)
    assert code(chats, test_cases=cases) == [pytest.approx(2 / 3), 1.0, 0.0]
    scores = whole.scores(chats, test_cases=cases)
    assert [(score.value, score.correct, score.status, score.answer) for score in scores] == [
        (0.0, False, "ok", "passed, wrong, skipped"),
        (1.0, True, "ok", "passed, passed, passed"),
        (0.0, False, "unparsable", None),
    ]


@pytest.mark.integration
def test_the_time_of_all_cases_is_bounded_too() -> None:
    code = code_function(timeout_s=0.2, partial_credit=True)
    # One that computed could get too little of a busy machine to be judged.
    waits = "import time\ntime.sleep(1000)"
    results = code.results(waits, [{"input": "", "output": ""}] * 20)
    ran = [result for result in results if result.status != "skipped"]
    assert {result.status for result in ran} == {"timeout"}
    # Five times the limit of one case; on a busy machine, a case may be ended later than at its limit.
    assert sum(result.seconds for result in ran) > 0.9
    assert len(ran) <= 6


@pytest.mark.parametrize(
    ("cases", "field"),
    [
        ([], "test_cases"),
        (None, "test_cases"),
        (5, "test_cases"),
        ([5], "test_cases[0]"),
        (["assert f(1) == 1", {}], "test_cases[1]"),
        ([{"input": {"a": 5}, "output": "5"}], "test_cases[0]"),
        ([{"input": "5", "output": "5", "points": 3}], "test_cases[0]"),
        ([{"fn_name": "f", "inputs": [1, 2], "output": 3}], "test_cases[0]"),
        ([{"func_name": "f", "input": "1\n2", "output": "3"}], "test_cases[0]"),
        ([{"input": "5", "output": "5", "testtype": "functional"}], "test_cases[0]"),
        ([{"input": "5", "output": "5", "type": "interactive"}], "test_cases[0]"),
        ([{"input": "5"}], "test_cases[0]"),
        ([{"inputs": ["5"], "outputs": []}], "test_cases[0]"),
        (["assert ("], "test_cases[0]"),
        ([""], "test_cases[0]"),
    ],
)
def test_a_bad_test_case_is_named(cases: Any, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_cases(cases)
    assert caught.value.field == field
    assert caught.value.remedy


def test_test_cases_may_be_json_text() -> None:
    assert len(parse_cases('[{"input": "1", "output": "1"}, "assert f(1) == 1"]')) == 2
    assert len(parse_cases("assert f(1) == 1")) == 1


@pytest.mark.integration
def test_many_threads_share_the_slots(code: CodeRewardFunction) -> None:
    found: list[float] = []

    def score(i: int) -> None:
        found.extend(code([block(f"print({i})")], test_cases=[[{"input": "", "output": str(i)}]]))

    threads = [threading.Thread(target=score, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [1.0] * 16


@pytest.mark.integration
def test_without_bubblewrap_code_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("pyseccomp")
    monkeypatch.setenv("PATH", "/nowhere")
    for start in (
        CodeRewardFunction,
        lambda: create_reward_app(RewardSection(functions=["code"])),
    ):
        with raises(ConfigError, field="reward.functions", value="code") as caught:
            start()
        assert "install bubblewrap" in str(caught.value.remedy)


@pytest.mark.integration
@pytest.mark.usefixtures("code")
def test_leaky_sandbox_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = command.bwrap_options

    def leaky(*arguments: Any) -> list[str]:
        return ["--ro-bind", "/etc", "/etc", *whole(*arguments)]

    monkeypatch.setattr(sandbox, "bwrap_options", leaky)
    with pytest.raises(ConfigError, match="not contained: host_files") as caught:
        CodeRewardFunction()
    assert "set its `sandbox` to none" in str(caught.value.remedy)


@pytest.mark.integration
@pytest.mark.usefixtures("code")
def test_a_named_interpreter_brings_its_packages_and_must_be_readable() -> None:
    with tempfile.TemporaryDirectory(
        prefix="rlhf-math-test-", ignore_cleanup_errors=True
    ) as folder:
        made = subprocess.run(
            ["/usr/bin/python3", "-m", "venv", "--without-pip", f"{folder}/venv"],
            capture_output=True,
        )
        packages = list(Path(folder).glob("venv/lib/python3*/site-packages"))
        if made.returncode != 0 or not packages:
            pytest.skip("there is no system Python that makes environments")
        (packages[0] / "own_package.py").write_text("value = 5\n", encoding="utf-8")
        Path(folder).chmod(0o755)
        code = CodeRewardFunction(python=f"{folder}/venv/bin/python")
        source = "import own_package\nprint(own_package.value)"
        assert code([block(source)], test_cases=[[{"input": "", "output": "5"}]]) == [1.0]
        bare = CodeRewardFunction()
        assert bare([block(source)], test_cases=[[{"input": "", "output": "5"}]]) == [0.0]
        if os.geteuid() == 0:
            Path(folder).chmod(0o700)
            with pytest.raises(ConfigError, match="Permission denied") as caught:
                CodeRewardFunction(python=f"{folder}/venv/bin/python")
            assert "`python` of the reward function code" in str(caught.value.remedy)
    with raises(ConfigError, field="reward.functions.code.python", value="/nowhere/python"):
        CodeRewardFunction(python="/nowhere/python")


@pytest.mark.integration
@pytest.mark.usefixtures("code")
@pytest.mark.parametrize("variant", command.VARIANTS, ids=str)
def test_sandbox_contains_without_features_that_some_machines_lack(
    variant: command.Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container with a masked /proc cannot mount one; with a read-only /proc/sys, it cannot
    disable namespaces."""
    monkeypatch.setattr(sandbox, "VARIANTS", (variant,))
    CodeRewardFunction()  # the constructor tries to break out of the sandbox


@pytest.mark.integration
def test_sandbox_that_fails_now_and_then_is_retried_and_never_scores_zero(
    code: CodeRewardFunction, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, calls = command.bwrap_options, []

    def failing(*arguments: Any) -> list[str]:
        calls.append(1)
        words = whole(*arguments)
        return words if len(calls) % 2 == 0 else ["--ro-bind", "/nowhere", "/nowhere", *words]

    monkeypatch.setattr(sandbox, "bwrap_options", failing)
    cases = [[{"input": "", "output": "1"}]]
    assert code([block("print(1)")], test_cases=cases) == [1.0]
    monkeypatch.setattr(sandbox, "bwrap_options", lambda *_: ["--version"])
    [score] = code.scores([block("print(1)")], test_cases=cases)
    assert (score.value, score.status) == (None, "error")
    assert score.reason.startswith("it did not start")


@pytest.mark.integration
def test_operator_can_turn_the_sandbox_off_explicitly() -> None:
    code = CodeRewardFunction(timeout_s=0.5, sandbox="none", slots=2)
    cases = [[{"input": "", "output": "1"}]] * 3
    right, endless, wrong = code(
        [block("print(1)"), block("while True: pass"), block("1/0")], test_cases=cases
    )
    assert (right, wrong) == (1.0, 0.0)
    assert endless != 1.0  # 0, or no verdict where it got too little processor time to be judged
    words = ["--reward.functions", '{"name": "code", "sandbox": "none"}']
    assert load(words, {}).reward.functions == [CodeReward(sandbox="none")]


@pytest.fixture
async def http(code: CodeRewardFunction) -> AsyncIterator[httpx.AsyncClient]:
    app = create_reward_app(
        RewardSection(functions=["math", CodeReward(timeout_s=0.5, slots=2, tasks=["code"])])
    )
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://reward") as client,
    ):
        yield client


@pytest.mark.integration
async def test_the_reward_server_scores_code_and_math_in_one_batch(http: httpx.AsyncClient) -> None:
    program = block("print(int(input()) + 1)")[0]["content"]
    cases = [{"input": "1", "output": "2"}, {"input": "5", "output": "6"}]
    item = {
        "response": program,
        "ground_truth": "",
        "task": "code",
        "columns": {"test_cases": cases},
    }
    items = [
        item,
        {"response": "\\boxed{5}", "ground_truth": "5"},
        {**item, "response": block("while True: pass")[0]["content"]},
    ]
    answer = (await http.post("/batch_reward", json={"items": items})).json()
    assert [result["reward"] for result in answer["rewards"]] == [1.0, 1.0, 0.0]
    assert [result["extracted_answer"] for result in answer["rewards"]] == [
        "passed, passed",
        "5",
        "timeout, skipped",
    ]
    assert [sorted(result["components"]) for result in answer["rewards"]] == [
        ["code"],
        ["math"],
        ["code"],
    ]
    refused = await http.post("/batch_reward", json={"items": [item, {**item, "columns": {}}]})
    assert refused.status_code == 422
    assert refused.json()["error"]["field"] == "items[1].columns.test_cases"


@pytest.mark.integration
async def test_a_server_without_code_needs_no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    async with RewardService(RewardSection()) as scorer:
        assert (await scorer.score([RewardItem(response="5", ground_truth="5")]))[0].correct
