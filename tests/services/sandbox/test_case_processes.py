"""What becomes of a case: its processes are forked as in the sandbox, which is forked from this
process, so nothing here starts a Python."""

import base64
import json
import os
import resource
import signal
import sys
from typing import Any

import psutil
import pytest

from services.sandbox import inside
from services.sandbox.meter import Meter
from tests.support.services.inside_process import job, result, results, started

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        sys.platform != "linux", reason="asks /proc, and sends signals as Linux does"
    ),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


def calls(function: str = "f", *args: Any, **kwargs: Any) -> dict[str, Any]:
    return {"kind": "call", "function": function, "args": list(args), "kwargs": kwargs}


def reads(text: str = "") -> dict[str, Any]:
    return {"kind": "stdin", "input": text}


CODE = {"kind": "code"}


def test_of(text: str) -> dict[str, Any]:
    return {"text": text, "tests": [], "entry_point": ""}


test_of.__test__ = False  # type: ignore[attr-defined]


PRINTED = {
    "its input": ("print(input() + '!')", "a", "a!\n"),
    "bytes that are no text": (
        "import sys\nprint(len(input()), sys.stdin.buffer.read())",
        "\udcff\nb\udcfe",
        "1 b''\n",
    ),
    "bytes again": (
        "import os\nprint(os.fstat(0).st_size, os.pread(0, 9, 1))",
        "a\udcfee",
        "3 b'\\xfee'\n",
    ),
    "what is no text": ("import sys\nsys.stdout.write('\\udcff')", "", "\N{REPLACEMENT CHARACTER}"),
    "its words": ("import sys\nprint(sys.argv, __name__)", "", "['program'] __main__\n"),
    "a long number": ("print(10 ** 5000)", "", "1" + "0" * 5000 + "\n"),
    "before it ends": ("print(1)\nexit()\nprint(2)", "", "1\n"),
    "before it ends with 0": ("print(1)\nquit(0)", "", "1\n"),
    "before it leaves": ("import os\nprint(1, flush=True)\nos._exit(0)", "", "1\n"),
    "before it closes its output": ("import sys\nprint(1)\nsys.stdout.close()", "", "1\n"),
    "in a thread": (
        "import threading, time\ndef late():\n    time.sleep(0.05)\n    print(2)\n"
        "threading.Thread(target=late).start()",
        "",
        "2\n",
    ),
    "and not its errors": ("import sys\nprint(1)\nprint(2, file=sys.stderr)", "", "1\n"),
    "the signals": (
        "import signal\nfor name in ('SIGTERM', 'SIGINT', 'SIGPIPE'):\n"
        "    print(signal.getsignal(getattr(signal, name)) == signal.SIG_DFL)",
        "",
        "True\n" * 3,
    ),
    "the module": ("import __main__\nx = 5\nprint(__main__.x)", "", "5\n"),
}


@pytest.mark.parametrize("what", PRINTED)
def test_what_a_program_prints(what: str) -> None:
    source, given, printed = PRINTED[what]
    assert result(source, reads(given)) == {
        "status": "done",
        "output": printed,
        "value": "null",
        "detail": "",
    }


ENDS: dict[str, tuple[str, str, str]] = {
    "an error": ("raise ValueError('why')", "error", "ValueError: why"),
    "a long error": ("raise ValueError('y' * 300)", "error", "ValueError: " + "y" * 188),
    "an error without a text": (
        "class E(Exception):\n    def __str__(self):\n        raise self\nraise E",
        "error",
        "E",
    ),
    "a status": ("import sys\nsys.exit(3)", "error", "SystemExit: 3"),
    "an interrupt": ("raise KeyboardInterrupt", "error", "KeyboardInterrupt: "),
    "no memory": ("bytearray(1 << 41)", "memory", "MemoryError"),
    "another status": ("import os\nos._exit(4)", "died", "ended with status 4"),
    "a signal": ("import os\nos.kill(os.getpid(), 15)", "died", "ended with status -15"),
    "no syntax": ("x =", "error", "SyntaxError: invalid syntax (<program>, line 1)"),
    "a forged result": (
        'import os\nos.write(3, b\'{"status": "done"\')\nos._exit(5)',
        "died",
        "ended with status 5",
    ),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("case", [reads(), calls()], ids=["reads", "calls"])
def test_how_a_program_ends(end: str, case: Any) -> None:
    source, status, detail = ENDS[end]
    assert result(source, case) == {"status": status, "detail": detail}


def test_only_a_program_that_is_judged_by_its_output_may_leave_without_a_word() -> None:
    left = "import os\ndef f():\n    os._exit(0)\n"
    assert result(left, calls()) == {"status": "died", "detail": "ended with status 0"}
    assert result(f"{left}f()", reads())["status"] == "done"


def test_what_a_function_returns_and_how_it_fails() -> None:
    source = "import sys\ndef f(x, *, y=2):\n    print('heard')\n    return [x, y]\n"
    done = {"status": "done", "output": "", "detail": ""}
    assert result(source, calls("f", 1, y=3)) == {**done, "value": '["list", [1, 3]]'}
    value = {"kind": "value", "expression": "f(5)[0]"}
    assert result(source, value) == {**done, "value": "5"}
    for asks in ("input()", "sys.stdin.read(1)", "next(sys.stdin)"):
        failed = result(f"import sys\ndef f():\n    return {asks}", calls())
        assert failed["status"] == "error"
        assert failed["detail"].startswith("EOFError: ")
    deep = "def f():\n    x = []\n    for _ in range(101): x = [x]\n    return x"
    assert result(deep, calls())["status"] == "error"


def opened(first: int = 0) -> str:
    """An expression of the open descriptors of a process."""
    return (
        f"[fd for fd in range({first}, 250)"
        " if __import__('os').path.exists(f'/proc/self/fd/{fd}')]"
    )


def test_no_process_has_more_than_its_own_descriptors() -> None:
    assert result(f"print({opened()})", reads())["output"] == "[0, 1, 2, 3]\n"
    found = result(f"def f():\n    return {opened()}", calls())
    assert found["value"] == '["list", [0, 1, 2, 3]]'
    both = f"assert f() == [0, 1, 2, 3, 4, 5]\nassert {opened()} == f()"
    tested = result(f"def f():\n    return {opened()}", CODE, test_of(both))
    assert tested["status"] == "done", tested
    # What it hears and says is not the test's, and not the server's.
    quiet = "import os, sys\ndef f():\n    return [os.read(0, 1), os.fstat(3).st_rdev == os.stat('/dev/null').st_rdev]"
    assert result(quiet, CODE, test_of("x = f()\nassert x == [b'', True]"))["status"] == "done"


LIMITS = {
    "AS": 1 << 40,
    "CPU": 1002,
    "FSIZE": 0,
    "CORE": 0,
    "NOFILE": 64,
    "MEMLOCK": 0,
    "MSGQUEUE": 0,
    "SIGPENDING": 64,
}
ASKS = "import resource\ndef f(name):\n    return resource.getrlimit(getattr(resource, 'RLIMIT_' + name))"


def test_every_process_has_its_limits() -> None:
    cases = [calls("f", name) for name in [*LIMITS, "NPROC"]]
    found = results(job(ASKS, *cases, threads=7, timeout_s=1000.5))
    pairs = [json.loads(each["value"])[1] for each in found]
    for name, limit, pair in zip([*LIMITS, "NPROC"], [*LIMITS.values(), 7], pairs, strict=True):
        highest = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[1]
        expected = limit if highest == resource.RLIM_INFINITY else min(limit, highest)
        assert pair == [expected, expected], name

    def bound() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))

    # One that is lower already stays; without a number of threads theirs is that of the user.
    asked = job(ASKS, *(calls("f", name) for name in ("NOFILE", "NPROC")))
    found = results(asked, prepare=bound)
    pairs = [json.loads(each["value"])[1] for each in found]
    assert pairs == [[60, 60], list(resource.getrlimit(resource.RLIMIT_NPROC))]


def test_the_filter_holds_for_program_and_test() -> None:
    pytest.importorskip("pyseccomp")
    from services.sandbox.command import threads_only_filter

    compiled = base64.b64encode(threads_only_filter()).decode()
    source = (
        "import os, threading\n"
        "def forks():\n    try: pid = os.fork()\n    except PermissionError: return False\n"
        "    if not pid: os._exit(0)\n    return True\n"
        "def starts():\n    seen = []\n    thread = threading.Thread(target=seen.append, args=[1])\n"
        "    thread.start()\n    thread.join()\n    return seen\n"
    )
    test = test_of(f"{source}assert f() == [forks(), starts()] == [False, [1]]")
    program = f"{source}def f():\n    return [forks(), starts()]"
    assert result(program, CODE, test, filter=compiled)["status"] == "done"
    assert result(program, calls("forks"), filter=compiled)["value"] == "false"
    assert result(program, calls("forks"))["value"] == "true"


@pytest.mark.parametrize(
    ("size", "status"), [(1 << 16, "done"), ((1 << 16) + 1, "output")], ids=["at", "over"]
)
def test_output_and_values_have_a_limit(size: int, status: str) -> None:
    def ended(source: str, case: Any, *tests: Any) -> Any:
        found = result(source, case, *tests, output_bytes=1 << 16)
        if status == "output":
            assert found["status"] == "output"
        return found

    printed = ended(f"print('x' * {size}, end='')", reads())
    # As JSON a value may take twice as much.
    value = (
        f"def f():\n    return 'x' * {2 * size - len(json.dumps({'status': 'done', 'value': ''}))}"
    )
    returned = ended(value, calls())
    if status == "output":
        assert {printed["detail"], returned["detail"]} == {"more than 64 KB (output_kb)"}
    else:
        assert printed == {"status": "done", "output": "x" * size, "value": "null", "detail": ""}
        assert returned["status"] == "done"
    line = len(json.dumps(["ok", "", []])) + 1
    tested = f"def f():\n    return 'x' * {2 * size - line}"
    found = result(tested, CODE, test_of("assert len(f()) > 5"), output_bytes=1 << 16)
    assert found["status"] == status


TESTED: dict[str, tuple[str, str, str]] = {
    "holds": ("assert f(2) == 4 and f(3) == 6", "done", ""),
    "does not hold": ("x = 5\nassert f(2) == x, 'why'", "error", "AssertionError: why"),
    "calls what is not there": ("assert g(2) == 4", "error", "the program does not define g"),
    "raises": ("f(2)\nassert f('a') == [][0]", "error", "IndexError: list index out of range"),
    "goes on after the program": ("assert f(2) == 4\nleave()", "died", "the program has ended"),
    "goes on after the program, and expects errors": (
        "try:\n    leave()\nexcept BaseException:\n    pass\nassert f(2) == 4",
        "died",
        "the program has ended",
    ),
    "has no memory": ("assert f(2) == 4\nbytearray(1 << 41)", "memory", "MemoryError"),
    "swallows its failure": (
        "try:\n    assert f(2) == 5\nexcept AssertionError:\n    pass",
        "error",
        "AssertionError: ",
    ),
}


@pytest.mark.parametrize("test", TESTED)
def test_how_a_test_ends(test: str) -> None:
    text, status, detail = TESTED[test]
    source = "import os\ndef f(x):\n    print(x)\n    return 2 * x\ndef leave():\n    os._exit(0)"
    found = result(source, CODE, test_of(text))
    assert (found["status"], found["detail"]) == (status, detail)
    if status == "done":
        assert (found["output"], found["value"]) == ("", "null")


def test_the_program_of_a_test_ends_with_it() -> None:
    source = "import threading, time\ndef f():\n    threading.Thread(target=time.sleep, args=[9999]).start()\n    return 5"
    found = results(job(source, CODE, CODE, calls("f")), [test_of("assert f() == 5 != 6")] * 2)
    assert [each["status"] for each in found] == ["done"] * 3


SLEEPS = "import time\ndef f(x=9999):\n    time.sleep(x)\n    return x"
TICKS = {
    "within its function": (SLEEPS, calls(), ()),
    "before its function": (f"{SLEEPS}\nf()", calls(), ()),
    "while it is tested": (SLEEPS, CODE, [test_of("assert f() == 5 != 6")]),
    "while its test waits": (SLEEPS, CODE, [test_of("import time\nx = f\ntime.sleep(9999)")]),
    "with closed descriptors": (f"{SLEEPS}\nimport os\nos.closerange(0, 250)\nf()", reads(), ()),
}


@pytest.mark.parametrize("where", TICKS)
def test_a_program_over_its_time_is_stopped(where: str) -> None:
    source, case, tests = TICKS[where]
    found = results(job(source, case, timeout_s=0.2), tests)
    assert [(each["status"], each["detail"]) for each in found] == [("timeout", "")]


def test_all_cases_share_their_time_and_none_takes_more_than_its_own() -> None:
    """0.2 s are taken from 0.45 s, twice, and what is left ends the third."""
    asked = job(SLEEPS, *[calls()] * 5, timeout_s=0.2, total_s=0.45)
    assert [each["status"] for each in results(asked)] == ["timeout"] * 3


def test_where_there_is_no_time_on_the_clock_a_program_is_no_loser() -> None:
    def hurried() -> None:
        inside.WALL_TIMES = 0  # type: ignore[attr-defined]

    late = results(job(SLEEPS, calls(), calls()), prepare=hurried)
    assert late == [{"status": "starved", "seconds": 0, "detail": ""}] * 2

    def watched() -> None:
        """The clock of a case shows more than its share at once."""
        Meter.wall_s = 1e12  # type: ignore[method-assign, assignment]

    found = results(job(SLEEPS, calls()), prepare=watched)
    assert found == [{"status": "starved", "seconds": 1e12, "detail": ""}]


@pytest.mark.parametrize("where", TICKS)
def test_nothing_is_left_when_the_server_has_gone(where: str) -> None:
    source, case, tests = TICKS[where]
    with started() as process:
        process.send(job(source, case))
        if case == CODE:
            assert process.answers.readline() == b'"test"\n'
            if where == "while it is tested":
                process.send([0, tests[0]])
        process.requests.close()
        assert process.answers.read() == b""
        assert process.ended() == -signal.SIGKILL


def test_no_process_that_a_program_started_sees_the_next_case() -> None:
    """Here the processes of a namespace are the children of its first."""
    source = """
import os, time
def f():
    if not os.fork():
        os.setsid()
        if os.fork():
            os._exit(0)
        os.closerange(0, 250)
        time.sleep(9999)
    os.wait()
    return 5
"""

    def first() -> None:
        inside._prctl(36, 1)  # those whose parents end become its children
        own = os.getpid()
        kill = os.kill

        def kill_all(pid: int, number: int) -> None:
            if pid != -1:
                kill(pid, number)
                return
            for child in psutil.Process(own).children():
                child.send_signal(number)

        os.kill = kill_all
        os.getpid = lambda: 1

    with started(first) as process:
        process.send(job(source, calls(), calls(), reads()))
        found = [json.loads(line)["status"] for line in process.answers]
        assert found == ["done"] * 3
        assert process.ended() == 0

    with started(first) as process:
        process.send(job(SLEEPS, calls()))
        process.requests.close()
        assert process.answers.read() == b""
        # The kernel ends what is left of its namespace.
        _, status = os.waitpid(process.pid, 0)
        process.is_running = False
        os.killpg(process.pid, signal.SIGKILL)
        assert status == 0


def test_an_interrupt_does_not_reach_the_first_process() -> None:
    before = signal.getsignal(signal.SIGINT)
    with started() as process:
        process.send(
            job("import os, signal\nos.kill(os.getppid(), signal.SIGINT)\nprint(1)", reads())
        )
        assert json.loads(process.answers.readline())["output"] == "1\n"
        assert process.ended() == 0
    assert signal.getsignal(signal.SIGINT) == before
