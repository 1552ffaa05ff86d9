"""The command line of the sandbox: bubblewrap, with a Python and its libraries as the only part of the host."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError

INSIDE = Path(__file__).with_name("inside.py")
_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin")
_FIRST_UID = 60_600
"""User of the first slot when the server runs as root, in a range that no distribution assigns."""
NOBODY = "65534"


@dataclass(frozen=True)
class Python:
    """An interpreter for programs."""

    executable: str
    folders: tuple[str, ...]
    """Folders outside of `/usr` that it needs to run."""
    packages: bool
    """Whether programs may import its installed packages: only for an interpreter that the operator names."""


@dataclass(frozen=True)
class Variant:
    """Parts of the sandbox that some machines lack."""

    proc: bool
    """Mount a new `/proc`, which a container with a masked `/proc` cannot do."""
    disable_userns: bool
    """The kernel's own switch against nested user namespaces; the seccomp filter forbids them in any case."""


VARIANTS = tuple(Variant(proc, userns) for proc in (True, False) for userns in (True, False))
"""Best first."""


def unavailable(reason: str, remedy: str, field: str = "reward.functions", value: object = "code") -> ConfigError:
    """Returns the error for a machine on which programs cannot run."""
    return ConfigError(f"code cannot be run: {reason}", field=field, value=value, remedy=remedy)


def find_bwrap() -> str:
    """Returns the path of bubblewrap. Raises ConfigError when it is not installed."""
    found = shutil.which("bwrap")
    if found is None:
        raise unavailable("bubblewrap, its sandbox, is not installed", "apt-get install bubblewrap")
    return found


def interpreters(named: str) -> list[Python]:
    """Returns the interpreters to try, in order: the named one, or else this one and the system's.

    Raises ConfigError when none of them runs.
    """
    own = str(Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}")
    candidates = [named] if named else [own, "/usr/bin/python3", "/usr/local/bin/python3"]
    found = [python for path in dict.fromkeys(candidates) if (python := _inspected(path, bool(named))) is not None]
    if not found:
        remedy = "name one, for example /usr/bin/python3 (apt-get install python3)"
        raise unavailable("there is no Python for it", remedy, "reward.code_python", named or candidates)
    return found


def _inspected(path: str, packages: bool) -> Python | None:
    script = "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix, sys.version_info[:2] >= (3, 8)]))"
    try:
        done = subprocess.run([path, "-I", "-c", script], capture_output=True, text=True, timeout=30, env={"PATH": os.defpath})
        prefix, base, modern = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    folders = {folder for folder in (prefix, base, str(Path(path).resolve().parent.parent)) if not _in_system(folder)}
    return Python(path, tuple(sorted(folders)), packages) if modern else None


def _in_system(folder: str) -> bool:
    return folder == "/" or any(folder == system or folder.startswith(f"{system}/") for system in _SYSTEM)


def bwrap_command(bwrap: str, python: Python, variant: Variant, filter_fd: int) -> list[str]:
    """The command line. What each part is for: docs/how-to/rewards.md."""
    words = [bwrap, "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    words += ["--unshare-cgroup-try", "--as-pid-1", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    words += ["--uid", NOBODY, "--gid", NOBODY, "--hostname", "sandbox", "--clearenv"]
    words += ["--setenv", "PATH", "/usr/bin:/bin", "--setenv", "LANG", "C.UTF-8"]
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        words += ["--setenv", name, "1"]
    if variant.disable_userns:
        words.append("--disable-userns")
    for folder in _SYSTEM:
        words += _system_folder(Path(folder))
    words += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for folder in python.folders:
        words += ["--ro-bind", folder, folder]
    if variant.proc:
        words += ["--proc", "/proc"]
    words += ["--dev", "/dev", "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]
    return [*words, "--seccomp", str(filter_fd), "--", *inside_command(python)]


def inside_command(python: Python) -> list[str]:
    """Returns the command line of Python with the program that runs test cases."""
    site = [] if python.packages else ["-S"]
    return [python.executable, "-I", *site, "-B", "-c", INSIDE.read_text(encoding="utf-8")]


def _system_folder(path: Path) -> list[str]:
    if path.is_symlink():
        return ["--symlink", str(path.readlink()), str(path)]
    return ["--ro-bind", str(path), str(path)] if path.is_dir() else []


def slot_user(slot: int) -> int | None:
    """Returns the unprivileged user of a slot when this process is root; else None, for the user of this process.

    The kernel exempts root from its limit of processes and counts processes per user, so each slot has its own user.
    """
    return _FIRST_UID + slot if os.geteuid() == 0 else None


def counts_per_namespace() -> bool:
    """Returns whether the kernel counts a user's processes separately in every user namespace (Linux 5.14)."""
    release = os.uname().release.split(".")
    try:
        return (int(release[0]), int(release[1].split("-")[0])) >= (5, 14)
    except (ValueError, IndexError):
        return False
