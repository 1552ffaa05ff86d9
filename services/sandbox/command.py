"""The command line of the sandbox and its filters of system calls (seccomp).

Bubblewrap exposes only a Python and its libraries from the host to programs.
"""

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from itertools import product, starmap
from pathlib import Path
from typing import Any

from common.errors import ConfigError

# Modules for the process inside the sandbox, which cannot read files.
_MODULES = ("meter", "values")
_MODULES_FOR_TESTS = (
    "library_values", "program", "pytest_names", "suite", "program_names", "remote"
)  # fmt: skip
PACKAGES = (
    "aiohttp attr attrs bs4 cv2 dateutil faker flask freezegun gmpy2 hypothesis jax jsonschema "
    "keras lxml matplotlib mpmath nltk networkx numba numpy pandas pexpect PIL polars psutil "
    "pydantic pytz regex requests scipy seaborn shapely skimage sklearn sortedcontainers "
    "sqlalchemy sympy tensorflow torch tqdm transformers xgboost yaml"
)
"""Packages that tests import. Any other module that an interpreter lacks is the program's."""
SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin")
_OPTIONS = (
    "--unshare-user --unshare-ipc --unshare-pid --unshare-net --unshare-uts --unshare-cgroup-try "
    "--as-pid-1 --die-with-parent --new-session --cap-drop ALL "
    "--uid 65534 --gid 65534 --hostname sandbox "
    "--clearenv --setenv PATH /usr/bin:/bin --setenv LANG C.UTF-8 "
    "--setenv OMP_NUM_THREADS 1 --setenv OPENBLAS_NUM_THREADS 1 "
    "--ro-bind-try /etc/ld.so.cache /etc/ld.so.cache"
)
_CLONE_NEW = 0x7E020080  # every CLONE_NEW* namespace flag of clone
_CLONE_THREAD = 0x00010000
_AF_UNIX = 1
_F_SETPIPE_SZ = 1031
_TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX
_SO_SNDBUFFORCE = 32
_SO_RCVBUFFORCE = 33
_BUFFER_SIZES = (socket.SO_SNDBUF, socket.SO_RCVBUF, _SO_SNDBUFFORCE, _SO_RCVBUFFORCE)
_FORBIDDEN = (
    # keys, tracing, kernel interfaces with a history of holes
    "add_key keyctl request_key bpf perf_event_open io_uring_setup io_uring_enter "
    "io_uring_register userfaultfd ptrace process_vm_readv process_vm_writev process_madvise "
    "pidfd_getfd kcmp lookup_dcookie fanotify_init "
    # namespaces and mounts
    "unshare setns mount umount2 pivot_root chroot move_mount open_tree fsopen fsconfig fsmount "
    "fspick mount_setattr name_to_handle_at open_by_handle_at "
    # memory and messages that no limit of a process counts
    "memfd_secret shmget shmat shmctl msgget msgsnd msgrcv msgctl semget semop semctl "
    "semtimedop mq_open mq_unlink vmsplice "
    # the machine itself
    "init_module finit_module delete_module kexec_load kexec_file_load reboot swapon swapoff acct "
    "quotactl syslog personality settimeofday clock_settime clock_adjtime adjtimex sethostname "
    "setdomainname vhangup iopl ioperm"
)
# It takes its flags from memory, which a filter cannot read. If the kernel seems to lack it, the C
# library uses clone.
_MISSING = "clone3"
_FORBIDDEN_TO_PROGRAMS = (
    # further processes, and memory that no limit of a process counts
    "fork vfork memfd_create "
    # priorities: a program that waits for its turn for ever would look like a busy machine
    "setpriority ioprio_set sched_setscheduler sched_setparam sched_setattr"
)
# The program of a bare Python, which makes its modules from text.
_LOADER = """\
import sys, types
for name, source in {sources!r}.items():
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, 'exec'), module.__dict__)"""
_INSPECTION = (
    "import json, pkgutil, sys; "
    "names = {module.name for module in pkgutil.iter_modules()}.union(sys.builtin_module_names); "
    "prefixes = [sys.prefix, sys.base_prefix]; "
    "print(json.dumps([prefixes, sys.version_info[:2] >= (3, 8), sorted(names)]))"
)


# A system call, and the condition on one of its arguments; None: it is denied in any case.
_Rule = tuple[str, Any]


@dataclass(frozen=True)
class Interpreter:
    """A Python for programs."""

    executable: str
    folders: tuple[str, ...]
    """Folders outside `/usr` that the interpreter needs."""
    options: tuple[str, ...]
    """Its options for programs."""
    modules: frozenset[str]
    """Names of the modules that programs may import."""


@dataclass(frozen=True)
class Variant:
    """Parts of the sandbox that some machines lack."""

    proc: bool
    """Mount a new `/proc`, which a container with a masked `/proc` cannot do."""
    disable_userns: bool
    """Use the kernel's switch against nested user namespaces; the seccomp filter forbids them in
    any case."""


VARIANTS = tuple(starmap(Variant, product((True, False), repeat=2)))
"""Best first."""


def unavailable(
    reason: str, remedy: str, field: str = "reward.functions", value: object = "code"
) -> ConfigError:
    """Returns the error for a machine on which programs cannot run."""
    return ConfigError(f"programs cannot run: {reason}", field=field, value=value, remedy=remedy)


def find_bwrap() -> str:
    """Returns the path of bubblewrap. Raises ConfigError when it is not installed."""
    path = shutil.which("bwrap")
    if path is None:
        raise unavailable("the sandbox bubblewrap is not installed", "apt-get install bubblewrap")
    return path


def interpreters(named: str) -> list[Interpreter]:
    """Returns the interpreters to try, in order: the named one, or else this one and the system's.

    Raises ConfigError when none of them runs.
    """
    own = str(Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}")
    candidates = [named] if named else [own, "/usr/bin/python3", "/usr/local/bin/python3"]
    inspected = [_inspect(path, bool(named)) for path in dict.fromkeys(candidates)]
    usable = [interpreter for interpreter in inspected if interpreter is not None]
    if not usable:
        raise unavailable(
            "there is no Python interpreter for them",
            "name an interpreter, for example /usr/bin/python3 (apt-get install python3)",
            field="reward.functions.code.python",
            value=named or candidates,
        )
    return usable


def _inspect(path: str, packages: bool) -> Interpreter | None:
    """Returns the interpreter at a path; None when it does not run or is too old."""
    # Only of an interpreter that the operator named may programs import the installed packages.
    options = ("-I", "-B") if packages else ("-I", "-B", "-S")
    try:
        done = subprocess.run(
            [path, *options, "-c", _INSPECTION],
            capture_output=True,
            text=True,
            timeout=30,
            env={"PATH": os.defpath},
        )
        prefixes, is_supported, modules = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    if not is_supported:
        return None
    needed = {*map(Path, prefixes), Path(path).resolve().parent.parent} - {Path("/")}
    outside = [folder for folder in needed if not any(map(folder.is_relative_to, SYSTEM))]
    folders = tuple(sorted(map(str, outside)))
    return Interpreter(path, folders, options, frozenset(modules))


def bwrap_options(python: Interpreter, variant: Variant, filter_fd: int) -> list[str]:
    """Returns bubblewrap's options, before the command that runs inside; docs/how-to/rewards.md
    explains them.
    """
    words = _OPTIONS.split()
    if variant.disable_userns:
        words.append("--disable-userns")
    for folder in map(Path, SYSTEM):
        if folder.is_symlink():
            words += ["--symlink", str(folder.readlink()), str(folder)]
        else:
            words += ["--ro-bind-try", str(folder), str(folder)]
    for name in python.folders:
        words += ["--ro-bind", name, name]
    if variant.proc:
        words += ["--proc", "/proc"]
    words += ["--dev", "/dev", "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]
    return [*words, "--seccomp", str(filter_fd), "--"]


def inside_command(python: Interpreter, tests: bool) -> list[str]:
    """Returns the command line of Python with the program that runs test cases; `tests`: some are
    written in Python.
    """
    sources: dict[str, str] = {}
    for stem in (*_MODULES, *(_MODULES_FOR_TESTS if tests else ()), "inside"):
        name = "__main__" if stem == "inside" else f"services.sandbox.{stem}"
        sources[name] = Path(__file__).with_name(f"{stem}.py").read_text(encoding="utf-8")
    return [python.executable, *python.options, "-c", _LOADER.format(sources=sources)]


@cache
def base_filter(internet: bool = False) -> bytes:
    """Returns the BPF filter of a whole sandbox, with or without sockets for the internet's
    protocols; with them it has no process that supervises the others. Raises ConfigError when
    pyseccomp or libseccomp is missing.
    """
    seccomp = _seccomp()

    def equals(argument: int, value: int, mask: int = 0xFFFFFFFF) -> Any:
        return seccomp.Arg(argument, seccomp.MASKED_EQ, mask, value)

    sockets: list[_Rule] = [("socket", seccomp.Arg(0, seccomp.NE, _AF_UNIX))]
    if internet:
        allowed = (_AF_UNIX, socket.AF_INET, socket.AF_INET6)
        denied = [family for family in range(max(allowed)) if family not in allowed]
        sockets = [
            *(("socket", equals(0, family)) for family in denied),
            ("socket", seccomp.Arg(0, seccomp.GT, max(allowed))),
            ("memfd_create", None),
        ]
    flags = [1 << bit for bit in range(32) if _CLONE_NEW >> bit & 1]
    return _compile(
        [
            *((name, None) for name in _FORBIDDEN.split()),
            *(("clone", equals(0, flag, mask=flag)) for flag in flags),
            *sockets,
            *(("setsockopt", equals(2, option)) for option in _BUFFER_SIZES),
            ("fcntl", equals(1, _F_SETPIPE_SZ)),
            *(("ioctl", equals(1, request)) for request in _TERMINAL_INPUT),
            (_MISSING, None),
        ]
    )


@cache
def threads_only_filter() -> bytes:
    """Returns a program's filter: it may start threads but no processes, and it cannot change the
    limits of another process. Raises ConfigError like `base_filter`.
    """
    seccomp = _seccomp()
    return _compile(
        [
            *((name, None) for name in _FORBIDDEN_TO_PROGRAMS.split()),
            ("clone", seccomp.Arg(0, seccomp.MASKED_EQ, _CLONE_THREAD, 0)),
            ("prlimit64", seccomp.Arg(0, seccomp.NE, 0)),
        ]
    )


def _seccomp() -> Any:
    try:
        import pyseccomp
    except (ImportError, OSError, RuntimeError) as error:
        raise unavailable(
            f"pyseccomp does not work: {error}",
            "apt-get install libseccomp2 and pip install 'rlhf-math[services]'",
        ) from None
    return pyseccomp


def _compile(rules: list[_Rule]) -> bytes:
    """Returns a filter that denies the calls in `rules`."""
    seccomp = _seccomp()
    syscalls = seccomp.SyscallFilter(seccomp.ALLOW)
    for name, condition in rules:
        action = seccomp.ERRNO(errno.ENOSYS if name == _MISSING else errno.EPERM)
        conditions = () if condition is None else (condition,)
        try:
            syscalls.add_rule(action, name, *conditions)
        except (OSError, ValueError) as error:  # the kernel or libseccomp lacks this call
            if name in ("clone", "socket", "ptrace", "unshare"):
                raise unavailable(
                    f"libseccomp cannot forbid {name}: {error}", "install a newer libseccomp2"
                ) from None

    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as source:
        with os.fdopen(writer, "wb") as target:
            syscalls.export_bpf(target)  # a few kilobytes, which fit into a pipe
        return source.read()
