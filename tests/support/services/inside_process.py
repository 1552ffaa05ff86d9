"""The process inside the sandbox, forked from this one instead of started."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

from services.sandbox import inside

Json = Any
# Beyond the descriptors that the process of a case closes.
_LIFELINE = 300
PATIENCE = 1_000_000
"""What `WALL_TIMES` is in it: a busy machine gives a program as little time as it likes."""
_FORBIDDEN = 99
"""Its status after it tried to kill what is not its own."""


@dataclass
class Inside:
    """A running process, and what is connected to it."""

    pid: int
    requests: IO[bytes]
    answers: IO[bytes]
    lifeline: int
    """A pipe that ends when the process and all that it started have ended."""
    is_running: bool = True

    def send(self, content: Json) -> None:
        self.requests.write(json.dumps(content).encode() + b"\n")
        self.requests.flush()

    def ended(self) -> int:
        """Returns its exit status, or minus its signal, once nothing of it is left."""
        assert os.read(self.lifeline, 1) == b""
        _, status = os.waitpid(self.pid, 0)
        self.is_running = False
        return os.waitstatus_to_exitcode(status)


def job(source: str, *cases: Json, **more: Json) -> Json:
    """A job without limits but for those given."""
    return {
        "source": source,
        "cases": list(cases),
        "timeout_s": 1000.0,
        "total_s": 5000.0,
        "memory_bytes": 1 << 40,
        "output_bytes": 1 << 20,
        "threads": None,
        "filter": "",
        **more,
    }


@contextmanager
def started(prepare: Callable[[], None] = lambda: None) -> Iterator[Inside]:
    """Yields the process, which has run `prepare` before, and has said that it is ready."""
    read_requests, write_requests = os.pipe()
    read_answers, write_answers = os.pipe()
    read_life, write_life = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            _become(read_requests, write_answers, write_life, prepare)
        finally:
            os._exit(70)
    for fd in (read_requests, write_answers, write_life):
        os.close(fd)
    with os.fdopen(write_requests, "wb") as requests, os.fdopen(read_answers, "rb") as answers:
        process = Inside(pid, requests, answers, read_life)
        try:
            assert answers.readline() == b"ready\n"
            yield process
        finally:
            os.close(read_life)
            if process.is_running:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _become(requests: int, answers: int, life: int, prepare: Callable[[], None]) -> None:
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for number, fd in enumerate((requests, answers, null)):
        os.dup2(fd, number)
    os.dup2(life, _LIFELINE)
    # Among them is the other end of `requests`, whose end this process waits for.
    os.closerange(3, _LIFELINE)
    os.closerange(_LIFELINE + 1, os.sysconf("SC_OPEN_MAX"))
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    kill = os.kill
    kill_group = os.killpg

    def kill_own(pid: int, number: int) -> None:
        if pid <= 1:
            os._exit(_FORBIDDEN)
        kill(pid, number)

    def kill_own_group(group: int, number: int) -> None:
        if group:
            os._exit(_FORBIDDEN)
        kill_group(group, number)

    os.kill = kill_own
    os.killpg = kill_own_group
    inside.WALL_TIMES = PATIENCE  # type: ignore[attr-defined]
    prepare()
    inside.main()
    os._exit(0)


def results(
    asked: Json, tests: Sequence[Json] = (), prepare: Callable[[], None] = lambda: None
) -> list[Json]:
    """Returns what the process says of a job's cases; `tests` are those of its cases in Python."""
    found: list[Json] = []
    left = list(tests)
    with started(prepare) as process:
        process.send(asked)
        for line in process.answers:
            if line == b'"test"\n':
                process.send([len(found), left.pop(0)])
            else:
                found.append(json.loads(line))
        assert process.ended() == 0
    return found


def result(source: str, case: Json, *tests: Json, **more: Json) -> Json:
    """Returns what the process says of one case, without its seconds."""
    [found] = results(job(source, case, **more), tests)
    assert found.pop("seconds") >= 0
    return found
