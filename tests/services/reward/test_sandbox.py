"""Hostile programs: their resources are bounded, none fakes a verdict, and none harms the next
program."""

import contextlib
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from services.reward.functions import CodeRewardFunction
from tests.support.paths import ROOT
from tests.support.services.sandbox import code_function, contained, run, sandboxes

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("nothing_is_left")]


ENDLESS = {
    "a loop": "while True: pass",
    "sleeping": "import time; time.sleep(1000)",
    "a loop in C": "sum(range(10**15))",
    "ignoring signals": "import signal\nfor s in (1, 2, 3, 15, 24): signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
    "catching everything": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "waiting for input that never comes": "import os\nr, w = os.pipe()\nos.read(r, 1)",
    "closing everything and staying": "import os, time\nos.closerange(0, 100)\ntime.sleep(1000)",
    "a thread that never ends": "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()",
    "threads without end": "import threading as t, time\nwhile True:\n  try: t.Thread(target=time.sleep, args=(99,)).start()\n"
    "  except BaseException: pass",
    "a regular expression": "import re; re.match('(a*)*b', 'a' * 40)",
    "stopping itself": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "at exit": "class A:\n    def __del__(self):\n        while True: pass\na = A()\nraise SystemExit(0)",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_program_is_killed(code: CodeRewardFunction, name: str) -> None:
    result = run(code, ENDLESS[name], "")
    assert result.status == "timeout" or name == "at exit", (
        result
    )  # "at exit" never runs: the process is gone


HUNGRY = {
    "a memory bomb": ("x = []\nwhile True: x.append(bytearray(1 << 20))", {"memory"}),
    "one huge allocation": ("bytearray(1 << 40)", {"memory"}),
    "a huge integer": ("1 << (1 << 40)", {"memory", "error"}),
    "anonymous shared memory": (
        "import mmap\nx = [mmap.mmap(-1, 1 << 26) for _ in range(100)]",
        {"error", "memory"},
    ),
    "endless output": ("while True: print('x' * 1000)", {"output"}),
    "a gigabyte of output": ("import sys\nsys.stdout.write('x' * (1 << 27))", {"output", "memory"}),
    "endless output to standard error": (
        "import sys\nwhile True: sys.stderr.write('x' * 1000)",
        {"timeout"},
    ),
    "deep recursion": (
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(n): return f(n + 1)\nf(0)",
        {"memory", "died", "timeout", "error"},
    ),
    "a source that cannot be compiled": ("(" * 50_000, {"error", "memory", "died"}),
    "no Python at all": ("What a nice day!", {"error"}),
    "writing into the result pipe": ("import os\nwhile True: os.write(3, b'x' * 1000)", {"output"}),
    "a segmentation fault": ("import ctypes; ctypes.string_at(0)", {"died"}),
    "killing everything": (
        "import os\ntry: os.kill(-1, 9)\nfinally: os.kill(os.getpid(), 9)",
        {"died"},
    ),
}


@pytest.mark.parametrize("name", HUNGRY)
def test_program_that_uses_too_much_fails(code: CodeRewardFunction, name: str) -> None:
    source, statuses = HUNGRY[name]
    assert run(code, source).status in statuses


def test_the_memory_of_a_program_is_bounded_in_all(code: CodeRewardFunction) -> None:
    """Address space is limited per process: only one process is allowed, and memory that no process
    owns is denied."""
    attempts = [
        "os.fork()",
        "os.forkpty()",
        "os.posix_spawn('/usr/bin/python3', ['python3'], {})",
        "subprocess.run(['/usr/bin/python3', '-c', ''])",
        "multiprocessing.get_context('fork').Process(target=print).start()",
        "denied(libc.syscall(57))",  # fork
        "denied(libc.syscall(56, 17, 0, 0, 0, 0))",  # clone with SIGCHLD
        "denied(libc.syscall(435, 0, 0))",  # clone3
        "os.memfd_create('x')",
        "denied(libc.shmget(0, 1 << 20, 0o1666))",
        "denied(libc.mq_open(b'/x', 0o102, 0o600, None))",
        "denied(libc.vmsplice(1, 0, 0, 0))",
        "socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)",
        "fcntl.fcntl(os.pipe()[1], 1031, 1 << 20)",
        "open('/dev/shm/x', 'w')",
        "open('/tmp/x', 'w')",
    ]
    assert contained(code, attempts) == []


FILLED = """
import array, fcntl, os, socket
total = 0
def fill(write):
    global total
    try:
        while True: total += write(b'x' * 65536) or 1
    except OSError: pass
def pairs(kind, keep):
    try:
        while True:
            pair = socket.socketpair(socket.AF_UNIX, kind)
            for end in pair:
                end.setblocking(False)
                for option in (socket.SO_SNDBUF, socket.SO_RCVBUF, 32, 33):
                    try: end.setsockopt(socket.SOL_SOCKET, option, 1 << 30)
                    except OSError: pass
                fill(end.send)
            if not keep(pair): return
    except OSError: pass
carriers = [socket.socketpair() for _ in range(4)]
def in_flight(pair):
    fds = array.array('i', [end.fileno() for end in pair])
    carriers[0][0].sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
    return True
held = []
pairs(KIND, in_flight)
pairs(KIND, lambda pair: held.append(pair) or len(held) < 15)
try:
    while True:
        reader, writer = os.pipe()
        held.append((reader, writer))
        try: fcntl.fcntl(writer, 1031, 1 << 20)
        except OSError: pass
        os.set_blocking(writer, False)
        fill(lambda data: os.write(writer, data))
except OSError: pass
print('contained' if 1 << 20 < total < 64 << 20 else total)
"""


@pytest.mark.parametrize("kind", ["SOCK_STREAM", "SOCK_DGRAM", "SOCK_SEQPACKET"])
def test_sockets_and_pipes_hold_little_memory(code: CodeRewardFunction, kind: str) -> None:
    assert run(code, FILLED.replace("KIND", f"socket.{kind}")).status == "passed"


def test_a_program_cannot_fake_the_result_of_a_call(code: CodeRewardFunction) -> None:
    fakes = [
        "import os\nos._exit(0)",
        "raise SystemExit(0)",
        'import os\nos.write(3, b\'{"status": "done"}\')\nos._exit(0)',
        'import os\nos.write(3, b\'{"status": "done", "value": ["other", "x"]}\')\nos._exit(0)',
        "class Same:\n    def __eq__(self, other): return True\n    def __hash__(self): return 4\ndef f(x): return Same()",
        "class Same(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\ndef f(x): return Same(5)",
        "def f(x):\n    import os\n    os._exit(0)",
        "def f(x): raise SystemExit(0)",
        "import builtins\nbuiltins.AssertionError = KeyError\ndef f(x): return None",
        "print('passed')",
        "import os\nos.write(3, b'{\"status\": \"done\", \"value\": ' + b'[' * 30000 + b']' * 30000 + b'}')\nos._exit(0)",
        'import os\nos.write(3, b\'{"status": "done", "value": ["int", "4x"]}\')\nos._exit(0)',
        "import os\nos.write(3, b'[]')\nos._exit(0)",
    ]
    tests = [
        "assert f(2) == 4",
        {"function": "f", "args": [2], "output": 4},
        "assert f(2) == 4 and True",
    ]
    for source in fakes:
        results = code.results(source, tests)
        assert "passed" not in {result.status for result in results}, source


def test_a_program_reaches_nothing_of_its_other_cases(code: CodeRewardFunction) -> None:
    counting = "import builtins, sys\nbuiltins.n = getattr(builtins, 'n', 0) + 1\nprint(builtins.n, len(sys.argv))"
    results = code.results(counting, [{"input": "", "output": "1 1"}] * 3)
    assert [result.status for result in results] == ["passed"] * 3


@pytest.mark.slow
def test_hostile_programs_beside_good_ones_change_no_verdict() -> None:
    code = code_function(timeout_s=2, memory_mb=256, slots=4)
    bombs = ["while True: pass", "x = []\nwhile True: x.append(bytearray(1 << 20))", "import os\nwhile True: os.fork()",
             "while True: print('x' * 1000)"]  # fmt: skip
    texts, right = [], []
    for i in range(40):
        source = bombs[i // 5 % 4] if i % 5 == 0 else f"print(int(input()) + {i % 2})"
        texts.append([{"role": "assistant", "content": f"```python\n{source}\n```"}])
        right.append(float(i % 5 != 0 and i % 2 == 1))
    assert code(texts, test_cases=[[{"input": "1", "output": "2"}]] * 40) == right


@pytest.mark.slow
def test_eighty_programs_at_once_share_eight_slots_and_none_fails() -> None:
    """Zombies count against a user's process limit: with one user for all slots, a third of the
    programs failed."""
    code = code_function(timeout_s=20, slots=8)
    chats = [[{"role": "assistant", "content": f"```\nprint({i})\n```"}] for i in range(80)]
    assert (
        code(chats, test_cases=[[{"input": "", "output": str(i)}] for i in range(80)]) == [1.0] * 80
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give every slot a user of its own")
def test_every_slot_has_a_user_of_its_own() -> None:
    """The kernel does not apply the process limit to root."""
    code = code_function(timeout_s=20, slots=3)
    chats = [[{"role": "assistant", "content": "```\nimport time\ntime.sleep(1.5)\n```"}]] * 3
    users: set[int] = set()
    with ThreadPoolExecutor(1) as pool:
        for _ in range(5):  # on a busy machine, a program may end before anybody looks
            running = pool.submit(code, chats, test_cases=[[{"input": "", "output": ""}]] * 3)
            while not running.done():
                for process in sandboxes():
                    with contextlib.suppress(psutil.Error):
                        users.add(process.uids().real)
                time.sleep(0.02)
            assert running.result() == [1.0] * 3
            if len(users - {0}) >= 3:
                break
    assert len(users - {0}) == 3


TWO_MESSAGES = """
import os, sys
from services.sandbox.inside import _read_test
reader, writer = os.pipe()
os.write(writer, sys.argv[1].encode())
os.dup2(reader, 0)
print(_read_test(3))
"""


@pytest.mark.parametrize("left", ["", '[2, "assert False"]\n', 'ert False"]\n', "\n"])
def test_the_test_of_an_earlier_case_does_not_take_the_next_one_along(left: str) -> None:
    """The process that should have read it was killed, and one read now returns both."""
    sent = left + '[3, "assert f() == 1"]\n'
    command = [sys.executable, "-c", TWO_MESSAGES, sent]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "assert f() == 1\n", done.stderr
