"""The parts of the process inside the sandbox that need no process of their own."""

import itertools
import json
import os
import random
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from services.sandbox import inside, meter
from services.sandbox.meter import Meter
from services.sandbox.values import decoded


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A program replaces modules and ends threads, since its process ends with it."""
    found: list[str] = []
    monkeypatch.setattr(threading, "_shutdown", lambda: found.append("for all threads"))
    for name in ("__main__", "solution"):
        monkeypatch.setitem(sys.modules, name, sys.modules.get(name))
    monkeypatch.setattr(sys, "stdin", sys.stdin)
    return found


def ran(source: str, **case: Any) -> Any:
    return inside._run_program({"source": source}, case)


def value_of(source: str, **case: Any) -> Any:
    outcome = ran(source, **case)
    assert outcome["status"] == "done"
    return decoded(outcome["value"])


def called(source: str, function: str = "f", *args: Any, **kwargs: Any) -> Any:
    return value_of(source, kind="call", function=function, args=list(args), kwargs=kwargs)


def test_a_program_is_called_or_reads_its_input(waited: list[str]) -> None:
    assert called("def f(x, y=1):\n    return x, y", "f", 5, y=7) == (5, 7)
    assert called("async def f():\n    return 3") == 3
    method = "class Solution:\n    def f(self, x):\n        return {x}"
    assert called(method, "f", 5) == {5}
    assert called(method, "Solution().f", 5) == {5}
    assert called(f"{method}\ndef f(x):\n    return 'own'", "f", 5) == "own"
    assert value_of("def f(x):\n    return 2 * x", kind="value", expression="f(f(2))") == 8
    # Statements that read input follow the function.
    assert called("def f():\n    return 3\nprint(f(int(input())))") == 3
    for reading in ("sys.stdin.read()", "next(sys.stdin)", "sys.stdin.readline()"):
        assert called(f"import sys\ndef f():\n    return 3\n{reading}\nundefined") == 3
    assert called("import sys\ndef f():\n    return __name__\nsys.exit()") == "solution"
    assert called("import sys\ndef f():\n    return 4\nsys.exit(0)") == 4
    failed = ran("import sys\nsys.exit(5)", kind="call", function="f", args=[], kwargs={})
    assert failed == {"status": "error", "detail": "SystemExit: 5"}
    with pytest.raises(NameError):
        called("x = 1")

    assert waited == []
    shown = "assert __name__ == '__main__'"
    assert ran(shown, kind="stdin", input="") == {"status": "done"}
    assert waited == ["for all threads"]
    with pytest.raises(EOFError):
        ran("raise EOFError", kind="stdin", input="")


OUTCOMES: list[tuple[Any, int, Any]] = [
    ({"status": "done", "value": [1]}, 0, ("done", "", "[1]")),
    ({"status": "done"}, 0, ("done", "", "null")),
    ({"status": "error", "detail": "x" * 300}, 0, ("error", "x" * 200, None)),
    ({"status": "memory", "detail": "MemoryError"}, 0, ("memory", "MemoryError", None)),
    ({"status": "output"}, 0, ("output", "", None)),
    ({"status": "passed"}, 0, ("died", "", None)),
    ({}, 0, ("died", "ended with status 0", None)),
    ([], 3 << 8, ("died", "ended with status 3", None)),
    (None, 9, ("died", "ended with status -9", None)),
]


@pytest.mark.parametrize("number", range(len(OUTCOMES)))
@pytest.mark.parametrize("kind", ["call", "stdin"])
def test_a_result_is_only_what_a_program_may_say(number: int, kind: str) -> None:
    outcome, wait_status, (status, detail, value) = OUTCOMES[number]
    raw = b"" if outcome is None else json.dumps(outcome).encode()
    found = inside._finished({"kind": kind}, wait_status, b"out\xff", raw)
    if kind == "stdin" and detail == "ended with status 0":  # os._exit(0) after its output
        status, detail, value = "done", "", "null"
    assert found["status"] == status
    assert found.get("detail", "") == detail
    if status == "done":
        assert found["value"] == value
        assert found["output"] == ("out\N{REPLACEMENT CHARACTER}" if kind == "stdin" else "")


@pytest.mark.parametrize("seed", range(20))
def test_a_case_is_over_its_time_or_got_too_little(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look every 50 ms at what the processes used; as much wall time as ten times the limit."""
    draws = random.Random(seed)
    share = draws.choice([0.02, 0.5, 1.0])
    now = 0.0
    reads: list[float] = []

    def read() -> float:
        reads.append(now)
        return share * now

    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(inside, "time", clock)
    used: Any = SimpleNamespace(read=read, wall_s=0.0)
    deadline = inside._Deadline(used, 1.0, 10.0)
    while True:
        now += 0.01
        used.wall_s = now
        status = deadline.look()
        if status:
            break
        assert share * now < 1.0 + share * 0.07
        assert now < 10.1
    assert status == ("starved" if share == 0.02 else "timeout")
    gaps = [after - before for before, after in itertools.pairwise(reads)]
    assert all(0.05 < gap < 0.08 for gap in gaps)


@pytest.mark.parametrize("left", [b"", b'[2, "no"]\n', b'ert "no"]\n', b"\n", b"5\n"])
@pytest.mark.parametrize("size", [1, 7, 1 << 16])
def test_only_the_test_of_this_case_is_read(
    left: bytes, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = left + b'[3, {"text": "yes"}]\n[4, "no"]\n'
    rest = [content[at : at + size] for at in range(0, len(content), size)]
    given = SimpleNamespace(read=lambda fd, count: rest.pop(0) if rest else b"")
    monkeypatch.setattr(inside, "os", given)
    if left == b"5\n":  # forged: not two values
        with pytest.raises(TypeError):
            inside._read_test(3)
        return
    assert inside._read_test(3) == {"text": "yes"}
    with pytest.raises(SystemExit):
        inside._read_test(9)


def test_the_input_is_a_file_that_nobody_can_change() -> None:
    fd = inside._input_file(b"two\nlines")
    assert os.read(fd, 100) == b"two\nlines"
    assert os.fstat(fd).st_size == 9
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    os.close(fd)


@pytest.mark.parametrize(
    ("limit", "status", "received"), [(10, None, b"0123456789"), (9, "output", b"0123456789")]
)
def test_pipes_are_read_until_their_end_or_their_limit(
    limit: int, status: str | None, received: bytes
) -> None:
    reader, writer = os.pipe()
    other, other_writer = os.pipe()
    os.write(writer, b"0123456789")
    os.close(writer)
    os.write(other_writer, b"kept open")
    deadline: Any = SimpleNamespace(look=lambda: None)
    found, content = inside._exchange({reader: limit, other: 100}, reader, deadline)
    assert (found, bytes(content[reader])) == (status, received)
    os.close(other_writer)
    late: Any = SimpleNamespace(look=lambda: "timeout")
    assert inside._exchange({other: 100}, None, late)[0] == "timeout"
    os.close(reader)
    os.close(other)


class Scripted(Meter):
    """Reads the states and ticks of threads from `table`: (state, user, system) by thread."""

    table: dict[int, list[tuple[str, int, int]]] = {}  # noqa: RUF012

    @staticmethod
    def _stat(path: str) -> list[str]:
        parts = path.split("/")
        threads = Scripted.table[int(parts[2])]
        state, user, system = threads[int(parts[4]) if parts[3] == "task" else 0]
        return [state, *["0"] * 10, str(user), str(system)]


@pytest.mark.parametrize("seed", range(30))
def test_cpu_time_counts_and_waiting_where_all_threads_wait(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = random.Random(seed)
    now = 100.0
    monkeypatch.setattr(meter, "time", SimpleNamespace(monotonic=lambda: now))
    listed = SimpleNamespace(
        listdir=lambda path: [str(n) for n in range(len(Scripted.table[int(path.split("/")[2])]))],
        sysconf=lambda name: 100,
    )
    monkeypatch.setattr(meter, "os", listed)
    ticks = {1: 10, 2: 20}

    def drawn() -> bool:
        all_wait = True
        for pid in ticks:
            states = [draws.choice("SSSSRDZ") for _ in range(draws.randrange(1, 4))]
            all_wait = all_wait and not {"R", "D"} & set(states)
            ticks[pid] += draws.choice([0, 3, 40])
            used = draws.randrange(ticks[pid] + 1)
            Scripted.table[pid] = [(state, used, ticks[pid] - used) for state in states]
        return all_wait

    drawn()
    before = sum(ticks.values())
    used = Scripted(1, 2)
    expected = 0.0
    for _ in range(20):
        passed_s = draws.choice([0.05, 0.3])
        now += passed_s
        waits = drawn()
        cpu_s = (sum(ticks.values()) - before) / 100
        before = sum(ticks.values())
        expected += max(cpu_s, passed_s if waits else 0.0)
        assert used.read() == pytest.approx(expected)
    assert used.wall_s == pytest.approx(now - 100.0)
    Scripted.table = {}
    now += 5  # without /proc all time counts
    monkeypatch.setattr(used, "_stat", lambda path: [])
    assert used.read() == pytest.approx(expected + 5)
