"""How the server finds, starts, tries and ends a sandbox; no process is started."""

import io
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import ConfigError
from services.sandbox import command, sandbox
from services.sandbox.command import VARIANTS, Interpreter
from services.sandbox.sandbox import Limits, Sandbox, SandboxFault
from services.sandbox.selftest import PROBE_CASES, PROBES

PYTHON = Interpreter("/own/python", (), ("-I",), frozenset())
OTHER = replace(PYTHON, executable="/other/python")
LIMITS = Limits(timeout_s=2.0, memory_mb=3, output_kb=5)


def answers(failing: set[str]) -> list[bytes]:
    """What a sandbox says in which these probes are not contained."""
    lines = [b"ready\n"]
    for name in PROBES:
        value = "false" if name in failing else "true"
        done = {"status": "done", "output": "", "value": value, "seconds": 0, "detail": ""}
        lines.append(json.dumps(done).encode() + b"\n")
    return lines


class Started:
    """Keeps what was started, and says what it is told to."""

    returncode: int | None = None
    pid = 4_999_999

    def __init__(self, words: list[str], lines: list[bytes], **options: Any) -> None:
        self.words = words
        self.options = options
        [fd] = options["pass_fds"]
        os.set_blocking(fd, False)
        self.filter = os.read(fd, 1 << 16)
        self.stdin = io.BytesIO()
        self.stdout = io.BytesIO(b"".join(lines))
        reader, self._writer = os.pipe()
        os.write(self._writer, b" why\n" + b"x" * 9000)
        self.stderr = os.fdopen(reader, "rb")
        self.waited: list[float | None] = []

    def wait(self, timeout: float | None = None) -> int:
        self.waited.append(timeout)
        return 3

    def __enter__(self) -> "Started":
        return self

    def __exit__(self, *_: object) -> None:
        # Only now: whatever the process left behind may still write.
        os.close(self._writer)
        self.stderr.close()


class Machine:
    """A machine on which some interpreters and variants of the sandbox work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, user: int, release: str) -> None:
        self.started: list[Started] = []
        self.lines: list[list[bytes]] = []
        self.timers: list[tuple[float, bool]] = []
        self.killed: list[tuple[int, int]] = []
        machine = self

        class Timer:
            daemon = False

            def __init__(self, seconds: float, work: Any, arguments: Any) -> None:
                self.seconds = seconds
                self.run = lambda: work(*arguments)

            def start(self) -> None:
                machine.timers.append((self.seconds, self.daemon))
                machine.timer = self

            def cancel(self) -> None:
                machine.timers.append((0.0, self.daemon))

        self.timer: Any = None

        def start(words: list[str], **options: Any) -> Started:
            self.started.append(Started(words, self.lines.pop(0), **options))
            return self.started[-1]

        named = {"Popen": start, "PIPE": -1, "TimeoutExpired": subprocess.TimeoutExpired}
        monkeypatch.setattr(sandbox, "subprocess", SimpleNamespace(**named))
        monkeypatch.setattr(threading, "Timer", Timer)
        monkeypatch.setattr(sandbox, "interpreters", lambda named: [PYTHON, OTHER])
        monkeypatch.setattr(sandbox, "find_bwrap", lambda: "/bin/bwrap")
        monkeypatch.setattr(sandbox, "base_filter", lambda: b"a filter")
        monkeypatch.setattr(sandbox, "threads_only_filter", lambda: b"another")
        monkeypatch.setattr(sandbox, "inside_command", lambda python, tests: [python, tests])
        monkeypatch.setattr(sandbox, "time", SimpleNamespace(sleep=lambda seconds: None))
        monkeypatch.setattr(
            sandbox, "bwrap_options", lambda python, variant, fd: [python, variant, fd]
        )
        monkeypatch.setattr(os, "geteuid", lambda: user)
        monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release=release))
        monkeypatch.setattr(os, "killpg", lambda *each: self.killed.append(each))


@pytest.mark.parametrize("seed", range(12))
def test_the_first_interpreter_and_variant_that_hold_are_chosen(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = random.Random(seed)
    machine = Machine(monkeypatch, user=draws.choice([0, 1000]), release="6.1.0-x")
    pairs = list(itertools.product([PYTHON, OTHER], VARIANTS))
    good = draws.randrange(len(pairs) + 1)
    for number in range(len(pairs)):
        failing = set(draws.sample(PROBES, draws.randrange(1, 4)))
        broken = draws.choice([[b"no\n"], [b"ready\n"], [b"ready\n", b"x\n"], answers(failing)])
        machine.lines.append(answers(set()) if number == good else broken)
    left = list(machine.lines)
    if good == len(pairs):
        with pytest.raises(ConfigError) as refused:
            Sandbox(LIMITS, 2)
        assert (refused.value.field, refused.value.value) == ("reward.functions", "code")
        assert str(refused.value.message).count("/own/python: ") == 1
        assert str(refused.value.message).count("/other/python: ") == 1
    else:
        slots = Sandbox(LIMITS, 2)
        assert (slots._python, slots._variant) == pairs[good]
    assert len(machine.started) == min(good + 1, len(pairs))
    for (python, variant), each, _ in zip(pairs, machine.started, left, strict=False):
        assert each.words[:3] == ["/bin/bwrap", python, variant]
        assert each.words[4:] == [python, False]


def test_a_probe_that_is_not_contained_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, user=1000, release="5.15")
    machine.lines = [answers({"network", "memory"})] * 7 + [answers({"tracing"})]
    with pytest.raises(ConfigError) as refused:
        Sandbox(LIMITS, 1)
    text = refused.value.message
    assert (
        "/own/python: not contained: network, memory; /other/python: not contained: tracing" in text
    )


@pytest.mark.parametrize("user", [0, 1000])
@pytest.mark.parametrize("kind", ["bubblewrap", "none"])
def test_a_sandbox_is_a_group_of_its_own_without_the_environment(
    user: int, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch, user=user, release="5.13")
    machine.lines = [answers(set())] * 3
    slots = Sandbox(LIMITS, 2) if kind == "bubblewrap" else Sandbox(LIMITS, 2, "none")
    machine.killed.clear()
    slot = 1
    with slots._process(slot, 60.0, True) as process:
        assert process.pid == machine.started[-1].pid
        assert machine.timers[-1] == (60.0, True)
        assert machine.killed == []
        machine.timer.run()
        assert machine.killed == [(process.pid, signal.SIGKILL)]
        assert sandbox._stderr(process) == "why\n" + "x" * (4096 - 5)
    started = machine.started[-1]
    assert machine.timers[-1][0] == 0.0
    assert machine.killed == [(started.pid, signal.SIGKILL)] * 2
    assert started.stdin.closed
    assert started.waited == [10.0]
    assert started.options == {
        "stdin": -1,
        "stdout": -1,
        "stderr": -1,
        "pass_fds": started.options["pass_fds"],
        "env": {"PATH": os.defpath, "LANG": "C.UTF-8"},
        "cwd": "/",
        "process_group": 0,
        **dict.fromkeys(["user", "group"], 60_601 if (user, kind) == (0, "bubblewrap") else None),
        "extra_groups": [] if (user, kind) == (0, "bubblewrap") else None,
    }
    assert started.filter == (b"a filter" if kind == "bubblewrap" else b"")
    if kind == "bubblewrap":
        fd = started.options["pass_fds"][0]
        assert started.words == ["/bin/bwrap", PYTHON, VARIANTS[0], fd, PYTHON, True]
        assert machine.started[0].options["user"] == (60_600 if user == 0 else None)
    else:
        assert started.words == [PYTHON, True]
    started.returncode = 0
    sandbox._kill(started)  # type: ignore[arg-type]  # another process may have its number
    assert len(machine.killed) == 2


def test_a_sandbox_without_a_last_word() -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as stderr:
        quiet: Any = SimpleNamespace(stderr=stderr)
        assert sandbox._stderr(quiet) == "no message"  # it may still have a writer
        os.write(writer, b"\xff \n")
        assert sandbox._stderr(quiet) == "\N{REPLACEMENT CHARACTER}"
        os.close(writer)


@pytest.mark.parametrize(
    ("user", "release", "kind", "threads"),
    [
        (0, "4.4", "bubblewrap", 64),
        (1000, "5.13.19", "bubblewrap", None),
        (1000, "5.14.0-1", "bubblewrap", 64),
        (1000, "6.1", "bubblewrap", 64),
        (1000, "10.0", "bubblewrap", 64),
        (1000, "4.20", "bubblewrap", None),
        (0, "6.1", "none", None),
    ],
)
def test_threads_are_limited_where_they_are_counted_alone(
    user: int, release: str, kind: Any, threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch, user=user, release=release)
    machine.lines = [answers(set())]
    job = Sandbox(LIMITS, 1, kind)._job("x", [], 4.0)
    assert job["threads"] == threads
    assert job["filter"] == ("YW5vdGhlcg==" if kind == "bubblewrap" else "")


@pytest.mark.parametrize("cases", [1, 3, 9])
def test_a_sandbox_that_hangs_is_killed_long_after_its_cases_should_have_ended(
    cases: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch, user=0, release="6.1")
    machine.lines = [answers(set())] * 2
    slots = Sandbox(LIMITS, 1)
    slots.run("x", [PROBE_CASES[0]] * cases)
    assert machine.timers[-2] == (20 + 10 * min(5, cases) * 2.0 + 5, True)


def test_a_line_is_as_long_as_the_largest_value_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, user=0, release="6.1")
    good = answers(set())
    room = 8 * 5 * 1024 + 8192
    padded = good[1][:-1] + b" " * (room - len(good[1])) + b"\n"
    assert len(padded) == room
    machine.lines = [good, [b"ready\n", padded], *[[b"ready\n", b" " + padded]] * 3]
    slots = Sandbox(LIMITS, 1)
    assert [each.status for each in slots.run("x", PROBE_CASES[:1])] == ["passed"]
    with pytest.raises(SandboxFault, match="too much"):
        slots.run("x", PROBE_CASES[:1])


# Interpreters


@pytest.mark.parametrize("packages", [True, False])
def test_an_interpreter_says_what_it_is(
    packages: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tmp_path / "real/bin/python"
    real.parent.mkdir(parents=True)
    real.touch()
    link = tmp_path / "link"
    link.symlink_to(real)
    asked: list[Any] = []
    said: list[Any] = [json.dumps([["/usr", "/opt/b", "/opt/a", "/"], True, ["sys", "json"]])]

    def run(words: list[str], **options: Any) -> Any:
        asked.append((words, options["env"]))
        if isinstance(said[0], Exception):
            raise said[0]
        return SimpleNamespace(stdout=said[0])

    named = {"run": run, "TimeoutExpired": subprocess.TimeoutExpired}
    monkeypatch.setattr(command, "subprocess", SimpleNamespace(**named))
    found = command._inspect(str(link), packages)
    options = ("-I", "-B") if packages else ("-I", "-B", "-S")
    folders = ("/opt/a", "/opt/b", str(tmp_path / "real"))
    assert found == Interpreter(str(link), folders, options, frozenset(["sys", "json"]))
    [(words, env)] = asked
    assert words[:-1] == [str(link), *options, "-c"]
    assert env == {"PATH": os.defpath}
    # What it is asked runs in any Python.
    done = io.StringIO()
    monkeypatch.setattr(sys, "stdout", done)
    exec(words[-1], {})  # noqa: S102
    monkeypatch.undo()
    prefixes, supported, modules = json.loads(done.getvalue())
    assert (prefixes, supported) == ([sys.prefix, sys.base_prefix], True)
    assert {"sys", "json", "numpy", "_io"} <= set(modules)

    monkeypatch.setattr(command, "subprocess", SimpleNamespace(**named))
    for other in (
        json.dumps([["/usr"], False, []]),
        "no JSON",
        "[1, 2]",
        OSError("it is missing"),
        subprocess.TimeoutExpired("x", 30),
    ):
        said[0] = other
        assert command._inspect(str(link), packages) is None


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/found/{name}")
    assert command.find_bwrap() == "/found/bwrap"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError) as refused:
        command.find_bwrap()
    assert (refused.value.field, refused.value.value) == ("reward.functions", "code")
    monkeypatch.setitem(sys.modules, "pyseccomp", None)
    with pytest.raises(ConfigError) as refused:
        command._seccomp()
    assert "pyseccomp" in refused.value.message


@pytest.mark.parametrize("lacking", ["bpf", "clone", "socket", "ptrace", "unshare", "fork"])
def test_a_call_that_the_kernel_lacks_need_not_be_forbidden(
    lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules: list[Any] = []

    class Filter:
        def __init__(self, default: str) -> None:
            assert default == "allow"

        def add_rule(self, action: Any, name: str, *conditions: Any) -> None:
            if name == lacking:
                raise ValueError(name)
            rules.append((action, name, conditions))

        def export_bpf(self, target: Any) -> None:
            target.write(b"compiled")

    library = SimpleNamespace(
        SyscallFilter=Filter, ALLOW="allow", ERRNO=lambda number: os.strerror(number)
    )
    monkeypatch.setattr(command, "_seccomp", lambda: library)
    names = ["bpf", "clone", "socket", "ptrace", "unshare", "fork", "clone3"]
    asked = [(name, "where" if name == "clone" else None) for name in names]
    if lacking in ("clone", "socket", "ptrace", "unshare"):
        with pytest.raises(ConfigError, match=lacking):
            command._compile(asked)
        return
    assert command._compile(asked) == b"compiled"
    assert rules == [
        (
            "Function not implemented" if name == "clone3" else "Operation not permitted",
            name,
            ("where",) if name == "clone" else (),
        )
        for name in names
        if name != lacking
    ]
