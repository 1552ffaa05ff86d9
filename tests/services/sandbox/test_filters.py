"""The filters of system calls, executed by an interpreter of BPF that is written here, and the
options of bubblewrap."""

import errno
import platform
import socket
import struct
import sys
from pathlib import Path

import pytest

from common.errors import ConfigError
from services.sandbox import command
from services.sandbox.command import VARIANTS, Interpreter, bwrap_options, inside_command

seccomp = pytest.importorskip("pyseccomp")
pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the filters here are of x86-64"
)
_ARCH = 0xC000003E
_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000


def decides(program: bytes, name: str, *arguments: int) -> int:
    """Returns the error number of a system call under a filter; 0 if it is allowed."""
    number: int = seccomp.resolve_syscall(seccomp.Arch.X86_64, name)
    given = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("<IIQ6Q", number, _ARCH, 0, *given)
    code = list(struct.iter_unpack("<HBBI", program))
    at = 0
    value: int = 0
    operand: int
    while True:
        operation, if_true, if_false, operand = code[at]
        at += 1
        match operation:
            case 0x20:  # load a word
                [value] = struct.unpack_from("<I", data, operand)
            case 0x54:
                value &= operand
            case 0x05:
                at += operand
            case 0x15:
                at += if_true if value == operand else if_false
            case 0x25:
                at += if_true if value > operand else if_false
            case 0x35:
                at += if_true if value >= operand else if_false
            case 0x45:
                at += if_true if value & operand else if_false
            case 0x06:
                if operand == _ALLOW:
                    return 0
                assert operand & 0xFFFF0000 == _ERRNO, hex(operand)
                return operand & 0xFFFF
            case _:
                raise AssertionError(hex(operation))


HARMLESS = ("read", "write", "openat", "mmap", "futex", "exit_group", "getpid", "clock_gettime")
DENIED = (
    "ptrace", "unshare", "mount", "bpf", "keyctl", "io_uring_setup", "shmget", "mq_open", "setns",
    "process_vm_readv", "reboot", "vmsplice", "userfaultfd", "pivot_root", "settimeofday",
)  # fmt: skip


@pytest.mark.parametrize("internet", [False, True])
def test_the_filter_of_a_sandbox(internet: bool) -> None:
    program = command.base_filter(internet)
    for name in HARMLESS:
        assert decides(program, name) == 0, name
    for name in DENIED:
        assert decides(program, name) == errno.EPERM, name
    assert decides(program, "clone3") == errno.ENOSYS
    assert decides(program, "fork") == 0
    assert decides(program, "memfd_create") == (errno.EPERM if internet else 0)

    namespaces = (
        0x80,
        0x20000,
        0x2000000,
        0x4000000,
        0x8000000,
        0x10000000,
        0x20000000,
        0x40000000,
    )
    thread = 0x3D0F00
    assert decides(program, "clone", thread) == 0
    assert decides(program, "clone", 17) == 0
    for flag in namespaces:
        assert decides(program, "clone", flag | 17) == errno.EPERM, hex(flag)

    allowed = {socket.AF_UNIX, *((socket.AF_INET, socket.AF_INET6) if internet else ())}
    for family in range(50):
        expected = 0 if family in allowed else errno.EPERM
        assert decides(program, "socket", family, 1, 0) == expected, family
    for option in range(50):
        is_buffer = option in (socket.SO_SNDBUF, socket.SO_RCVBUF, 32, 33)
        assert decides(program, "setsockopt", 3, 1, option) == (errno.EPERM if is_buffer else 0)
    assert decides(program, "fcntl", 3, 1031) == errno.EPERM
    assert decides(program, "fcntl", 3, 1030) == decides(program, "fcntl", 1031, 3) == 0
    for request in range(0x5400, 0x5420):
        is_input = request in (0x5412, 0x541C)
        assert decides(program, "ioctl", 0, request) == (errno.EPERM if is_input else 0)


def test_the_filter_of_a_program_lets_it_start_threads_only() -> None:
    program = command.threads_only_filter()
    for name in HARMLESS:
        assert decides(program, name) == 0, name
    for name in ("fork", "vfork", "memfd_create", "setpriority", "sched_setscheduler"):
        assert decides(program, name) == errno.EPERM, name
    assert decides(program, "clone", 0x3D0F00) == 0
    assert decides(program, "clone", 17) == errno.EPERM
    assert decides(program, "prlimit64", 0) == 0
    assert decides(program, "prlimit64", 5) == errno.EPERM


def pairs(words: list[str], option: str) -> list[tuple[str, str]]:
    return [(words[at + 1], words[at + 2]) for at, word in enumerate(words) if word == option]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_the_options_of_bubblewrap(
    variant: command.Variant, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "usr").mkdir()
    (tmp_path / "bin").symlink_to("usr/bin")
    system = (f"{tmp_path}/usr", f"{tmp_path}/bin", f"{tmp_path}/lib32")
    monkeypatch.setattr(command, "SYSTEM", system)
    python = Interpreter("/opt/py/bin/python", ("/opt/py", "/opt/lib"), ("-I",), frozenset())
    words = bwrap_options(python, variant, 7)
    assert words[-3:] == ["--seccomp", "7", "--"]
    assert pairs(words, "--symlink") == [("usr/bin", system[1])]
    shared = [(source, target) for source, target in pairs(words, "--ro-bind-try")]
    assert shared == [
        ("/etc/ld.so.cache", "/etc/ld.so.cache"),
        (system[0], system[0]),
        (system[2], system[2]),
    ]
    assert pairs(words, "--ro-bind") == [("/opt/py", "/opt/py"), ("/opt/lib", "/opt/lib")]
    assert ("--proc" in words) == variant.proc
    assert ("--disable-userns" in words) == variant.disable_userns
    for word in ("--unshare-net", "--unshare-pid", "--die-with-parent", "--clearenv"):
        assert word in words
    # What is mounted stays as it is.
    assert words.index("--dev") < words.index("--remount-ro")


@pytest.mark.parametrize("tests", [False, True])
def test_the_command_has_the_source_of_what_runs_inside(tests: bool) -> None:
    python = Interpreter("/opt/python", (), ("-I", "-S"), frozenset())
    *start, source = inside_command(python, tests)
    assert start == ["/opt/python", "-I", "-S", "-c"]
    loaded = source.partition("in {")[2]
    names = [f"services.sandbox.{name}" for name in ("meter", "values")]
    if tests:
        for name in (
            "library_values",
            "program",
            "pytest_names",
            "suite",
            "program_names",
            "remote",
        ):
            names.append(f"services.sandbox.{name}")
    places = [loaded.index(f"{name!r}: ") for name in (*names, "__main__")]
    assert places == sorted(places)
    assert ("class Test:" in source) == tests


def test_interpreters_are_named_or_found(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, bool]] = []

    def inspect(path: str, packages: bool) -> Interpreter | None:
        asked.append((path, packages))
        return (
            None
            if path in ("/usr/bin/python3", "/missing")
            else Interpreter(path, (), (), frozenset())
        )

    monkeypatch.setattr(command, "_inspect", inspect)
    own = f"{sys.base_prefix}/bin/python{sys.version_info[0]}.{sys.version_info[1]}"
    found = [each.executable for each in command.interpreters("")]
    assert found == [own, "/usr/local/bin/python3"]
    assert asked[0] == (own, False)
    assert [each.executable for each in command.interpreters("/mine")] == ["/mine"]
    assert asked[-1] == ("/mine", True)
    with pytest.raises(ConfigError) as refused:
        command.interpreters("/missing")
    assert (refused.value.field, refused.value.value) == (
        "reward.functions.code.python",
        "/missing",
    )
