"""Finds the processes of a run and acts on them from outside (Linux)."""

import contextlib
import ctypes
import os
import signal
import socket
import urllib.request
from dataclasses import dataclass, replace
from pathlib import Path

_PIDFD_GETFD = 438  # the same on every architecture
_ESTABLISHED = "01"
_PROBE_S = 2.0
_START = 17
"""Index of `starttime` in /proc/PID/stat, counted from the field after state and parent."""
_ROUTERS = ("smg::router", "sglang::router")
"""The titles that the routers give themselves."""
_MODULES = {
    "data-server": ("-m", "services.data"),
    "reward-server": ("-m", "services.reward"),
    "replay-buffer": ("-m", "services.replay"),
    "engine": ("-m", "services.engine"),
    "agent": ("-m", "services.rollout"),
    "environment": ("-m", "services.environment"),
    "trainer": ("-u", "-m", "trainer"),
}
"""The command line after the interpreter."""


@dataclass(frozen=True)
class Process:
    """A live process of the run."""

    pid: int
    started: int
    """Ticks since boot; together with the id, they identify a process uniquely."""
    parent: int
    state: str
    """The state letter of `ps`; T is stopped."""
    argv: tuple[str, ...]
    env: dict[str, str]

    @property
    def node(self) -> str:
        """The node, such as `rollout-server-1`; empty for the runner itself."""
        task = self.env.get("SKYPILOT_TASK_ID", "").rpartition("_")[2]
        return f"{task}-{self.env['SKYPILOT_NODE_RANK']}" if task else ""

    @property
    def is_launcher(self) -> bool:
        """Whether this process runs a node, as init runs a pod: its end is the end of the whole
        node."""
        is_launcher = any(word.endswith("common/process/launcher.py") for word in self.argv)
        return is_launcher and "bash" in self.argv

    @property
    def is_grader(self) -> bool:
        return any(word.endswith("services/reward/worker.py") for word in self.argv)


def processes(mark: str) -> list[Process]:
    """Returns the live processes that inherited CHAOS_MARK=`mark`, and all their descendants.

    A process that changes its title (the router) overwrites its environment. It is found through
    its parent, whose inherited values it gets.
    """
    found: list[Process] = []
    others: list[Process] = []
    wanted = f"CHAOS_MARK={mark}".encode()
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # the process ended meanwhile
            state, parent, *more = (
                (directory / "stat").read_text(errors="replace").rpartition(")")[2].split()
            )
            environ = (directory / "environ").read_bytes().split(b"\0")
            argv = (
                (directory / "cmdline")
                .read_bytes()
                .decode(errors="replace")
                .rstrip("\0")
                .split("\0")
            )
            if state == "Z" or not argv[0]:
                continue
            pairs = (item.decode(errors="replace").partition("=") for item in environ)
            env = {name: value for name, _, value in pairs} if wanted in environ else {}
            process = Process(
                int(directory.name), int(more[_START]), int(parent), state, tuple(argv), env
            )
            (found if env else others).append(process)
    by_pid = {process.pid: process for process in found}
    for process in sorted(others, key=lambda process: process.started):  # parents before children
        if process.parent in by_pid:
            by_pid[process.pid] = replace(process, env=by_pid[process.parent].env)
    return list(by_pid.values())


def start_of(pid: int) -> int | None:
    """Returns the start of this process as `Process.started`, or None if it has ended."""
    try:
        state, _, *more = (
            Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        )
    except OSError:
        return None
    return None if state == "Z" else int(more[_START])


def find(target: str, running: list[Process]) -> Process | None:
    """Finds the process for a name such as `engine-0`, `trainer-1` or `replay-buffer`, or the
    launcher of a node such as `rollout-server-1`."""
    if target == "grader":
        servers = {process.pid for process in running if process.is_grader}
        return next(
            (process for process in running if process.is_grader and process.parent in servers),
            None,
        )
    if target == "router":
        return next((process for process in running if process.argv[0] in _ROUTERS), None)
    name, _, rank = target.rpartition("-")
    if (words := _MODULES.get(target) or _MODULES.get(name)) is None:
        return next(
            (process for process in running if process.is_launcher and process.node == target), None
        )
    fitting = [process for process in running if process.argv[1 : 1 + len(words)] == words]
    if (
        target not in _MODULES
    ):  # one of several; trainer ranks have the node's number, with one process per node
        fitting = [process for process in fitting if process.node.endswith(f"-{rank}")]
    if name == "environment":  # not the process that keeps it alive
        fitting = [process for process in fitting if "ENVIRONMENT_SUPERVISED" in process.env]
    return next(iter(fitting), None)


def healthy(url: str) -> bool:
    """Returns whether the URL answers 200 within two seconds."""
    try:
        with urllib.request.urlopen(url, timeout=_PROBE_S) as answer:  # noqa: S310
            return bool(answer.status == 200)
    except (OSError, ValueError):
        return False


def cut_connections(pid: int) -> int:
    """Shuts down every TCP connection of a process from outside and returns their number.

    Each end sees the other one disconnect. Raises OSError if the kernel forbids it.
    """
    established = _established()
    call = ctypes.CDLL(None, use_errno=True).syscall
    handle, number = os.pidfd_open(pid), 0
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if link.readlink().name not in established:
                    continue
                copy = call(_PIDFD_GETFD, handle, int(link.name), 0)
                if copy < 0:
                    raise OSError(
                        ctypes.get_errno(), os.strerror(ctypes.get_errno()), "pidfd_getfd"
                    )
                with (
                    socket.socket(fileno=copy) as connection,
                    contextlib.suppress(OSError),
                ):  # it may have just ended
                    connection.shutdown(socket.SHUT_RDWR)
                    number += 1
    finally:
        os.close(handle)
    return number


def _established() -> set[str]:
    """Returns `socket:[INODE]` for every established TCP connection of this network namespace."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in Path(table).read_text().splitlines()[1:]:
                columns = line.split()
                if columns[3] == _ESTABLISHED:
                    found.add(f"socket:[{columns[9]}]")
    return found


def send(pid: int, number: signal.Signals) -> bool:
    """Sends a signal; returns False if the process has ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
