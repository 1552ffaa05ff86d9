"""Hostile programs can see, change and reach nothing outside their sandbox."""

import os
import socket
from pathlib import Path

import pytest

from services.reward.functions import CodeRewardFunction
from services.sandbox.sandbox import SandboxKind
from tests.support.services.sandbox import code_function, contained, run

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("nothing_is_left")]


@pytest.mark.parametrize("kind", ["bubblewrap", "none"])
def test_the_environment_of_the_server_is_hidden(
    monkeypatch: pytest.MonkeyPatch, kind: SandboxKind
) -> None:
    names = ("API_TOKEN", "HF_TOKEN", "JUDGE_API_KEY", "SOME_API_KEY")
    for name in names:
        monkeypatch.setenv(name, "a-very-secret-value")
    code = code_function(timeout_s=10, memory_mb=256, slots=1, partial_credit=True, sandbox=kind)
    pattern = "/proc/*/environ" if kind == "bubblewrap" else "/proc/self/environ"
    source = (
        "import os, glob\ntext = repr(dict(os.environ))\n"
        f"for path in glob.glob({pattern!r}):\n"
        "    try: text += open(path).read()\n    except OSError: pass\n"
        f"print('contained' if 'secret' not in text and not any(name in text for name in {names}) else text)"
    )
    assert run(code, source).status == "passed"


def test_program_sees_only_its_own_process_and_no_descriptor_of_the_server(
    code: CodeRewardFunction,
) -> None:
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


def test_links_sockets_clocks_and_limits_cannot_be_made_or_changed(
    code: CodeRewardFunction,
) -> None:
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
    """The root and /dev of bubblewrap are in unlimited memory, so a flood of (empty) files would
    fill the machine."""
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
    paths = [
        str(secret),
        "/etc/passwd",
        "/etc/shadow",
        __file__,
        str(home),
        str(home / ".ssh"),
        "/var/log",
        "/run",
    ]
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
