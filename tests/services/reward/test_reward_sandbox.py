"""Hostile programs: what each tries is contained, in bounded time, and harms neither the host nor the next program."""

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from services.reward.functions import CodeRewardFunction
from services.reward.sandbox.cases import CaseResult
from services.reward.sandbox.run import SandboxKind
from tests.support.sandbox import code_function

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def code() -> CodeRewardFunction:
    return code_function(timeout=2, memory_mb=256, slots=2, partial_credit=True)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    left = sandboxes()
    limit = time.monotonic() + 10
    while left and time.monotonic() < limit:
        time.sleep(0.05)
        left = sandboxes()
    assert not left, "a sandbox is still there"


def sandboxes() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.name() in ("bwrap", "python3"):
                found.append(process)
    return found


def run(code: CodeRewardFunction, source: str, expected: str = "contained\n") -> CaseResult:
    start = time.monotonic()
    [result] = code.results(source, [{"input": "", "output": expected}])
    assert time.monotonic() - start < 30, "it is bounded even on a busy machine"
    assert code.results("print(6 * 7)", [{"input": "", "output": "42"}])[0].status == "passed", "the slots work on"
    return result


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
def test_what_never_ends_is_killed(code: CodeRewardFunction, name: str) -> None:
    result = run(code, ENDLESS[name], "")
    assert result.status == "timeout" or name == "at exit", result  # which never comes: its process is gone before


HUNGRY = {
    "a memory bomb": ("x = []\nwhile True: x.append(bytearray(1 << 20))", {"memory"}),
    "one huge allocation": ("bytearray(1 << 40)", {"memory"}),
    "a huge integer": ("1 << (1 << 40)", {"memory", "error"}),
    "anonymous shared memory": ("import mmap\nx = [mmap.mmap(-1, 1 << 26) for _ in range(100)]", {"error", "memory"}),
    "endless output": ("while True: print('x' * 1000)", {"output"}),
    "a gigabyte of output": ("import sys\nsys.stdout.write('x' * (1 << 27))", {"output", "memory"}),
    "endless output to standard error": ("import sys\nwhile True: sys.stderr.write('x' * 1000)", {"timeout"}),
    "deep recursion": (
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(n): return f(n + 1)\nf(0)",
        {"memory", "died", "timeout", "error"},
    ),
    "a source that cannot be compiled": ("(" * 50_000, {"error", "memory", "died"}),
    "no Python at all": ("What a nice day!", {"error"}),
    "writing into the result pipe": ("import os\nwhile True: os.write(3, b'x' * 1000)", {"output"}),
    "a segmentation fault": ("import ctypes; ctypes.string_at(0)", {"died"}),
    "killing everything": ("import os\ntry: os.kill(-1, 9)\nfinally: os.kill(os.getpid(), 9)", {"died"}),
}


@pytest.mark.parametrize("name", HUNGRY)
def test_what_uses_too_much_fails(code: CodeRewardFunction, name: str) -> None:
    source, statuses = HUNGRY[name]
    assert run(code, source).status in statuses


def test_the_memory_of_a_program_is_bounded_in_all(code: CodeRewardFunction) -> None:
    """Address space is limited per process, so there is one process; and what no process owns cannot be had."""
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


def contained(code: CodeRewardFunction, attempts: list[str]) -> list[str]:
    """The attempts that succeeded; each is an expression that must raise OSError."""
    source = "import ctypes, multiprocessing, os, socket, subprocess, fcntl, termios, time\n"
    source += "libc = ctypes.CDLL(None, use_errno=True)\n"
    source += "def denied(result):\n    if result < 0: raise OSError(ctypes.get_errno(), 'denied')\n    return result\n"
    source += f"for attempt in {attempts!r}:\n"
    source += "    try: eval(attempt)\n    except OSError: pass\n    else: print(attempt)\n"
    source += "print('contained')\n"
    result = run(code, source)
    if result.status == "passed":
        return []
    succeeded = []
    for attempt in attempts:
        alone = source.replace(repr(attempts), repr([attempt]))
        if code.results(alone, [{"input": "", "output": "contained"}])[0].status != "passed":
            succeeded.append(attempt)
    return succeeded or [f"{result}"]


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


@pytest.mark.parametrize("kind", ["bubblewrap", "none"])
def test_the_environment_of_the_server_is_hidden(monkeypatch: pytest.MonkeyPatch, kind: SandboxKind) -> None:
    names = ("API_TOKEN", "HF_TOKEN", "JUDGE_API_KEY", "SOME_API_KEY")
    for name in names:
        monkeypatch.setenv(name, "a-very-secret-value")
    code = code_function(timeout=10, memory_mb=256, slots=1, partial_credit=True, sandbox=kind)
    pattern = "/proc/*/environ" if kind == "bubblewrap" else "/proc/self/environ"
    source = (
        "import os, glob\ntext = repr(dict(os.environ))\n"
        f"for path in glob.glob({pattern!r}):\n"
        "    try: text += open(path).read()\n    except OSError: pass\n"
        f"print('contained' if 'secret' not in text and not any(name in text for name in {names}) else text)"
    )
    assert run(code, source).status == "passed"


def test_it_sees_no_process_but_its_own_and_no_descriptor_of_the_server(code: CodeRewardFunction) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        os.set_inheritable(listener.fileno(), True)
        source = (
            "import os\nown = {'1', str(os.getpid())} if os.path.isdir('/proc/self') else set()\n"
            "seen = {name for name in os.listdir('/proc') if name.isdigit()} if own else set()\n"
            "opened = []\n"
            "for fd in range(4, 1024):\n    try: os.fstat(fd)\n    except OSError: continue\n    opened.append(fd)\n"
            "print('contained' if seen <= own and not opened else (seen, opened))"
        )
        assert run(code, source).status == "passed"


def test_links_sockets_clocks_and_limits_cannot_be_made_or_changed(code: CodeRewardFunction) -> None:
    attempts = [
        "os.symlink('/proc/1/environ', '/dev/x')",
        "os.symlink('/etc/shadow', '/tmp/x')",
        "os.link('/usr/bin/python3', '/dev/shm/x')",
        "os.mkfifo('/dev/x')",
        "os.mkdir('/dev/shm/x')",
        "os.rename('/usr', '/usr2')",
        "os.unlink('/usr/bin/env')",
        "os.chmod('/dev/null', 0)",
        "os.truncate('/usr/bin/env', 0)",
        "open('/dev/mem', 'rb')",
        "open('/dev/kmsg', 'rb')",
        "socket.socket(socket.AF_UNIX).bind('/dev/shm/s')",
        "socket.socket(socket.AF_UNIX).connect('/run/docker.sock')",
        "socket.socket(socket.AF_UNIX).connect('/var/run/docker.sock')",
        "time.clock_settime(time.CLOCK_REALTIME, 0)",
        "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))",
        "os.setgroups([0])",
        "os.setgid(0)",
    ]
    assert contained(code, attempts) == []
    source = (
        "import resource\nraised = []\n"
        "for name in dir(resource):\n"
        "    if not name.startswith('RLIMIT_'): continue\n"
        "    kind = getattr(resource, name)\n    hard = resource.getrlimit(kind)[1]\n"
        "    if hard == resource.RLIM_INFINITY: continue\n"
        "    try: resource.setrlimit(kind, (hard + 1, hard + 1))\n    except (OSError, ValueError): continue\n"
        "    raised.append(name)\n"
        "print(raised or 'contained')"
    )
    assert run(code, source).status == "passed"


def test_the_parent_cannot_be_stopped_or_ended(code: CodeRewardFunction) -> None:
    source = (
        "import os, signal\n"
        "for target in (os.getppid(), -os.getppid(), 1):\n"
        "    for s in (signal.SIGSTOP, signal.SIGKILL, signal.SIGTERM, signal.SIGTSTP):\n"
        "        try: os.kill(target, s)\n        except OSError: pass\n"
        "print('contained')"
    )
    assert run(code, source).status == "passed"


def test_nothing_can_be_written_anywhere(code: CodeRewardFunction) -> None:
    """The root and /dev of bubblewrap are memory without a limit: a flood of (empty) files would fill the machine."""
    source = (
        "import os\nwritten = []\n"
        "for folder, folders, _ in os.walk('/'):\n"
        "    if folder.count('/') > 2 or folder.startswith('/proc/'): folders.clear()\n"
        "    try:\n        open(os.path.join(folder, 'flood'), 'w').close()\n        written.append(folder)\n"
        "    except OSError: pass\n"
        "print(written or 'contained')"
    )
    assert run(code, source).status == "passed"


def test_the_files_of_the_host_cannot_be_read(code: CodeRewardFunction, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("here", encoding="utf-8")
    secret.chmod(0o644)
    home = Path.home()
    paths = [str(secret), "/etc/passwd", "/etc/shadow", __file__, str(home), str(home / ".ssh"), "/var/log", "/run"]
    assert contained(code, [f"os.stat({path!r})" for path in paths]) == []


def test_there_is_no_network(code: CodeRewardFunction) -> None:
    abstract = "\\0rlhf-math-test"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0rlhf-math-test")
        listener.listen()
        attempts = [
            "socket.socket(socket.AF_INET)",
            "socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)",
            "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
            "socket.socket(38)",  # AF_ALG
            "socket.socket(40)",  # AF_VSOCK
            "socket.create_connection(('127.0.0.1', 22), 1)",
            f"socket.socket(socket.AF_UNIX).connect('{abstract}')",
        ]
        assert contained(code, attempts) == []


def test_kernel_interfaces_are_closed(code: CodeRewardFunction) -> None:
    calls = {
        "add_key": 248, "request_key": 249, "keyctl": 250, "bpf": 321, "perf_event_open": 298, "io_uring_setup": 425,
        "userfaultfd": 323, "ptrace": 101, "process_vm_readv": 310, "unshare": 272, "setns": 308, "mount": 165, "umount2": 166,
        "pivot_root": 155, "chroot": 161, "open_tree": 428, "fsopen": 430, "personality": 135, "syslog": 103, "iopl": 172,
        "setuid": 105, "sethostname": 170, "reboot": 169, "init_module": 175, "swapon": 167, "memfd_secret": 447,
    }  # fmt: skip
    if os.uname().machine != "x86_64":
        pytest.skip("the numbers of system calls are those of x86-64")
    attempts = [f"denied(libc.syscall({number}, 0, 0, 0, 0, 0))" for number in calls.values()]
    attempts += [
        "denied(libc.syscall(272, 0x10000000))",  # unshare(CLONE_NEWUSER)
        "denied(libc.syscall(56, 0x10000011, 0, 0, 0, 0))",  # clone(CLONE_NEWUSER | SIGCHLD)
        "denied(libc.syscall(272, 0x00020000))",  # unshare(CLONE_NEWNS)
        "fcntl.ioctl(0, termios.TIOCSTI, b'x')",
        "open('/proc/1/mem', 'rb')",
        "os.listdir('/proc/1/fd')",
        "open('/proc/sys/kernel/core_pattern', 'w')",
        "open('/proc/sysrq-trigger', 'w')",
        "os.setpriority(os.PRIO_PROCESS, 0, -20)",
        "os.mknod('/dev/sda', 0o60600, 0x800)",
    ]
    assert contained(code, attempts) == []


def test_process_one_cannot_be_interrupted(code: CodeRewardFunction) -> None:
    source = (
        "import os, signal\nfor s in range(1, 65):\n    try: os.kill(1, s)\n    except OSError: pass\n"
        "    except ValueError: pass\nprint('contained')"
    )
    assert run(code, source).status == "passed"


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
    tests = ["assert f(2) == 4", {"function": "f", "args": [2], "output": 4}, "assert f(2) == 4 and True"]
    for source in fakes:
        results = code.results(source, tests)
        assert "passed" not in {result.status for result in results}, source


def test_a_program_reaches_nothing_of_its_other_cases(code: CodeRewardFunction) -> None:
    counting = "import builtins, sys\nbuiltins.n = getattr(builtins, 'n', 0) + 1\nprint(builtins.n, len(sys.argv))"
    results = code.results(counting, [{"input": "", "output": "1 1"}] * 3)
    assert [result.status for result in results] == ["passed"] * 3


def test_hostile_programs_beside_good_ones_change_no_verdict() -> None:
    code = code_function(timeout=2, memory_mb=256, slots=4)
    bombs = ["while True: pass", "x = []\nwhile True: x.append(bytearray(1 << 20))", "import os\nwhile True: os.fork()",
             "while True: print('x' * 1000)"]  # fmt: skip
    texts, right = [], []
    for i in range(40):
        source = bombs[i // 5 % 4] if i % 5 == 0 else f"print(int(input()) + {i % 2})"
        texts.append([{"role": "assistant", "content": f"```python\n{source}\n```"}])
        right.append(float(i % 5 != 0 and i % 2 == 1))
    assert code(texts, test_cases=[[{"input": "1", "output": "2"}]] * 40) == right


def test_eighty_programs_at_once_share_eight_slots_and_none_fails() -> None:
    """Zombies count against a user's limit of processes: slots that shared one user failed a third of their programs."""
    code = code_function(timeout=20, slots=8)
    chats = [[{"role": "assistant", "content": f"```\nprint({i})\n```"}] for i in range(80)]
    assert code(chats, test_cases=[[{"input": "", "output": str(i)}] for i in range(80)]) == [1.0] * 80


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give every slot a user of its own")
def test_every_slot_has_a_user_of_its_own() -> None:
    """The kernel does not hold root to its limit of processes."""
    code = code_function(timeout=20, slots=3)
    chats = [[{"role": "assistant", "content": "```\nimport time\ntime.sleep(1.5)\n```"}]] * 3
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(code, chats, test_cases=[[{"input": "", "output": ""}]] * 3)
        users: set[int] = set()
        while not running.done():
            for process in sandboxes():
                with contextlib.suppress(psutil.Error):
                    users.add(process.uids().real)
            time.sleep(0.02)
        assert running.result() == [1.0] * 3
    assert len(users - {0}) == 3
