"""Runs one program inside the sandbox, with a process for each of its test cases. The server never imports it.

A bare Python gets its source with `-c`, so it uses only the standard library and reads no file. It is process 1 of its PID
namespace and not dumpable: a program cannot kill it, trace it or open its descriptors. It writes `ready`, reads a line with a
job in JSON, and writes a line of JSON for every case. It knows no expected output: the server compares. When its standard
input ends it exits, and with it everything in the namespace.
"""

from __future__ import annotations  # its Python may be older than the server's

import base64
import builtins
import contextlib
import ctypes
import gc
import json
import operator
import os
import resource
import select
import signal
import sys
import time
import types
from typing import Any, NoReturn

Json = Any
_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 4, 38, 22, 2
_CHUNK = 1 << 16
_MAX_DEPTH = 100
_LOOK_S = 0.05
WALL_TIMES = 10
"""Longest time on the clock, as a multiple of the time that counts (`Meter`)."""


class Meter:
    """Counts the time that a process uses: of processors, and while no thread of it can use one because it waits.

    So neither a busy machine nor other processes take any of its time, and one that waits for something does not wait for
    ever. Where there is no `/proc` all time counts. The pool of workers uses it too.
    """

    def __init__(self, pid: int) -> None:
        self._pid, self._started, self._used_s = pid, time.monotonic(), 0.0
        self._seen, self._processor_s = self._started, self._look()[0]

    @property
    def wall_s(self) -> float:
        """Seconds on the clock since the start."""
        return time.monotonic() - self._started

    def read(self) -> float:
        """Returns the seconds that count since the start."""
        now, (processor_s, waits) = time.monotonic(), self._look()
        self._used_s += max(processor_s - self._processor_s, now - self._seen if waits else 0.0)
        self._seen, self._processor_s = now, processor_s
        return self._used_s

    def _look(self) -> tuple[float, bool]:
        """Returns the seconds of processors so far, and whether all threads wait."""
        try:
            state, *numbers = self._stat(f"/proc/{self._pid}/stat")
            waits = state not in "RD" and all(
                self._stat(f"/proc/{self._pid}/task/{thread}/stat")[0] not in "RD"
                for thread in os.listdir(f"/proc/{self._pid}/task")  # noqa: PTH208 - pathlib would slow every start
            )
            return (int(numbers[10]) + int(numbers[11])) / os.sysconf("SC_CLK_TCK"), waits
        except (OSError, ValueError, IndexError):
            return getattr(self, "_processor_s", 0.0), True

    @staticmethod
    def _stat(path: str) -> list[str]:
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - as above
            return file.read().rpartition(")")[2].split()


def _prctl(*arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(*(ctypes.c_void_p(value) for value in arguments), *([ctypes.c_void_p(0)] * (5 - len(arguments)))) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def _forbid_processes(program: bytes) -> None:
    """Loads a compiled seccomp filter, after which only threads can be started."""

    class Fprog(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    code = ctypes.create_string_buffer(program, len(program))
    fprog = Fprog(len(program) // 8, ctypes.cast(code, ctypes.c_void_p))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(fprog))


def _limit(job: Json) -> None:
    for name, value in (
        ("RLIMIT_AS", job["memory_bytes"]),
        ("RLIMIT_CPU", int(job["timeout_s"]) + 2),
        ("RLIMIT_FSIZE", 0),
        ("RLIMIT_CORE", 0),
        ("RLIMIT_NOFILE", 64),
        ("RLIMIT_NPROC", job["threads"]),
        ("RLIMIT_MEMLOCK", 0),
        ("RLIMIT_MSGQUEUE", 0),
        ("RLIMIT_SIGPENDING", 64),
    ):
        kind = getattr(resource, name, None)
        if kind is None or value is None:
            continue
        hard = resource.getrlimit(kind)[1]
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(kind, (value, value))


_COLLECTIONS: tuple[tuple[str, Any], ...] = (
    ("list", list),
    ("tuple", tuple),
    ("frozenset", frozenset),
    ("set", (set, type({}.keys()), type({}.items()))),
)


def _encoded(value: Any, depth: int = 0) -> list[Any]:
    """Converts a value to tagged JSON; a value that is not made of Python's literals becomes the name of its type."""
    if depth > _MAX_DEPTH:
        raise RecursionError("the result is nested too deeply")
    if value is None or value is Ellipsis:
        return ["literal", None]
    if isinstance(value, bool):
        return ["literal", value]
    if isinstance(value, int):
        return ["int", hex(value)]
    if isinstance(value, float):
        return ["float", float.__repr__(value)]
    if isinstance(value, complex):
        return ["complex", [float.__repr__(value.real), float.__repr__(value.imag)]]
    if isinstance(value, str):
        return ["literal", str.__str__(value)]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", base64.b64encode(value).decode()]
    for kind, types_ in _COLLECTIONS:
        if isinstance(value, types_):
            return [kind, [_encoded(item, depth + 1) for item in list(value)]]
    if isinstance(value, dict):
        return ["dict", [[_encoded(k, depth + 1), _encoded(v, depth + 1)] for k, v in dict.items(value)]]
    if hasattr(value, "tolist"):  # arrays
        return _encoded(value.tolist(), depth + 1)
    if hasattr(type(value), "__index__"):
        return ["int", hex(operator.index(value))]
    if hasattr(type(value), "__float__"):
        return ["float", float.__repr__(float(value))]
    if hasattr(type(value), "__iter__"):  # a range, a deque, a generator, the values of a dictionary
        return ["iterable", [_encoded(item, depth + 1) for item in value]]
    return ["other", type(value).__name__]


def _callee(expression: str, namespace: dict[str, Any]) -> Any:
    """Returns the function that a case names; a method of `Solution` needs no prefix."""
    if expression.isidentifier() and expression not in namespace and "Solution" in namespace:
        return getattr(namespace["Solution"](), expression)
    return eval(expression, namespace)  # noqa: S307 - this is the sandbox


def _outcome(job: Json, case: Json, module: types.ModuleType, token: str) -> dict[str, Any]:
    """Runs a case, in its own process, and returns a dictionary for the result pipe."""
    kind = case["kind"]
    module.__name__ = module.__dict__["__name__"] = "__main__" if kind == "stdin" else "solution"
    sys.modules[module.__name__] = module
    try:
        exec(compile(job["source"], "<program>", "exec"), module.__dict__)  # noqa: S102 - this is the sandbox
    except SystemExit as error:
        if error.code not in (None, 0):
            return {"status": "error", "detail": f"SystemExit: {error.code}"}
    if kind == "stdin":
        if "threading" in sys.modules:  # a thread may do the program's work
            sys.modules["threading"]._shutdown()
        return {"status": "done"}
    if kind == "call":
        function = _callee(case["function"], module.__dict__)
        return {"status": "done", "value": _encoded(function(*case["args"], **case["kwargs"]))}
    if kind == "value":
        test = compile(case["expression"], "<test>", "eval")
        return {"status": "done", "value": _encoded(eval(test, module.__dict__))}  # noqa: S307 - as above
    exec(compile(case["code"], "<test>", "exec"), module.__dict__)  # noqa: S102 - as above
    return {"status": "done", "token": token}


def _child(job: Json, case: Json, pipes: tuple[int, int, int], token: str) -> NoReturn:
    """Turns into the process of one case; never returns."""
    read_in, write_out, write_result = pipes
    os.dup2(read_in, 0)
    os.dup2(write_out, 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.dup2(write_result, 3)
    os.closerange(4, 256)
    for stream in (sys.stdin, sys.stdout):
        stream.reconfigure(encoding="utf-8", errors="surrogateescape")  # type: ignore[union-attr]
    sys.argv = ["program"]
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # as `site` defines them, which a bare Python lacks
    for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGPIPE):
        signal.signal(sig, signal.SIG_DFL)
    _limit(job)
    if job["filter"]:
        _forbid_processes(base64.b64decode(job["filter"]))
    exit_now, write, dumps = os._exit, os.write, json.dumps  # a program may replace them
    try:
        outcome = _outcome(job, case, types.ModuleType("solution"), token)
        sys.stdout.flush()
    except MemoryError:
        outcome = {"status": "memory", "detail": "MemoryError"}
    except BaseException as error:
        outcome = {"status": "error", "detail": type(error).__name__}
        with contextlib.suppress(BaseException):  # the program defines its text
            outcome["detail"] = f"{type(error).__name__}: {error}"[:200]
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
    try:
        content = dumps(outcome).encode()
    except BaseException:
        content = b'{"status": "memory", "detail": "MemoryError"}'
    while content:
        content = content[write(3, content) :]
    exit_now(0)


def _late(meter: Meter, job: Json, limit_s: float) -> str | None:
    """Returns `timeout` for a process that has used up its time, `starved` for one that had too little of a processor."""
    return "timeout" if meter.read() >= limit_s else "starved" if meter.wall_s >= WALL_TIMES * job["timeout_s"] else None


def _exchange(
    pid: int, job: Json, case: Json, pipes: tuple[int, ...], meter: Meter, limit_s: float
) -> tuple[str | None, bytes, bytes]:
    """Feeds and drains a case's process until its pipes end, and returns its status or None, its output and its result."""
    write_in, read_out, read_result = pipes
    given = memoryview(case.get("input", "").encode("utf-8", "surrogateescape"))
    got = {read_out: bytearray(), read_result: bytearray()}
    poll = select.poll()
    for fd in (0, *got):
        poll.register(fd, select.POLLIN)
    os.set_blocking(write_in, False)
    poll.register(write_in, select.POLLOUT)
    open_fds, status, looked = set(got), None, time.monotonic()
    while open_fds:
        for fd, _ in poll.poll(_LOOK_S * 1000):
            if fd == 0:
                _give_up()
            if fd == write_in:
                try:
                    given = given[os.write(fd, given[:_CHUNK]) :] if given else given
                except BlockingIOError:
                    continue
                except BrokenPipeError:
                    given = given[len(given) :]
                if not given:
                    poll.unregister(fd)
                    os.close(fd)
                    write_in = -1
                continue
            data = os.read(fd, _CHUNK)
            got[fd] += data
            if not data:
                poll.unregister(fd)
                open_fds.discard(fd)
            elif len(got[fd]) > job["output_bytes"]:
                status = "output"
        if not status and time.monotonic() > looked + _LOOK_S:
            status, looked = _late(meter, job, limit_s), time.monotonic()
        if status:
            break
    if write_in >= 0:
        os.close(write_in)
    if status:
        os.kill(pid, signal.SIGKILL)
    return status, bytes(got[read_out]), bytes(got[read_result])


def _run_case(job: Json, case: Json, left_s: float) -> tuple[dict[str, Any], float]:
    """Runs one case; returns its result and the time that counts."""
    token = base64.b64encode(os.urandom(18)).decode()
    (read_in, write_in), (read_out, write_out), (read_result, write_result) = os.pipe(), os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _child(job, case, (read_in, write_out, write_result), token)
        finally:
            os._exit(2)
    for fd in (read_in, write_out, write_result):
        os.close(fd)
    meter, limit_s = Meter(pid), min(left_s, job["timeout_s"])
    status, output, raw = _exchange(pid, job, case, (write_in, read_out, read_result), meter, limit_s)
    os.close(read_out)
    os.close(read_result)
    late, ended = _reaped(pid, meter, job, limit_s)
    result = {"seconds": meter.wall_s, "detail": "", "status": status or late}
    if not result["status"]:
        result |= _finished(case, ended, output, raw, token)
    return result, meter.read()


def _finished(case: Json, ended: int, output: bytes, raw: bytes, token: str) -> dict[str, Any]:
    """Returns what a case's process did before it ended by itself."""
    try:
        outcome = json.loads(raw)
        said, value = outcome.pop("status"), json.dumps(outcome.get("value"))
    except Exception:  # a program can write into this pipe too
        value = "null"
        code = os.WEXITSTATUS(ended) if os.WIFEXITED(ended) else -os.WTERMSIG(ended)
        if code == 0 and case["kind"] == "stdin":  # os._exit(0) after its output
            outcome, said = {}, "done"
        else:
            return {"status": "died", "detail": f"ended with status {code}"}
    if said != "done":
        return {"status": said if said in ("error", "memory") else "died", "detail": str(outcome.get("detail", ""))[:200]}
    if case["kind"] == "code" and outcome.get("token") != token:
        return {"status": "died", "detail": "the test did not run to its end"}
    return {"status": "done", "output": output.decode("utf-8", "replace"), "value": value}


def _give_up() -> NoReturn:
    """Ends this process, and as process 1 all others, since the server has closed the connection."""
    os.killpg(0, signal.SIGKILL) if os.getpid() != 1 else os._exit(0)
    raise AssertionError


def _reaped(pid: int, meter: Meter, job: Json, limit_s: float) -> tuple[str | None, int]:
    """Returns why a case's process was killed late, or None, and its wait status."""
    late, looked = None, time.monotonic()
    while True:
        found, status = os.waitpid(pid, 0 if late else os.WNOHANG)
        if found:
            break
        if time.monotonic() > looked + _LOOK_S:
            late, looked = _late(meter, job, limit_s), time.monotonic()
        if late:
            os.kill(pid, signal.SIGKILL)
        elif select.select([0], [], [], 0.001)[0]:
            _give_up()
    if os.getpid() == 1:  # kill everything that the process left behind
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
    return late, status


def main() -> None:
    """Writes `ready`, reads a job and runs its cases until its total time is used up."""
    if sys.platform == "linux":
        _prctl(_PR_SET_DUMPABLE, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Python's own handler would let a program interrupt process 1
    out = sys.stdout.buffer
    out.write(b"ready\n")
    out.flush()
    job = json.loads(sys.stdin.buffer.readline())
    gc.freeze()
    left_s, starved_at = job["total_s"], time.monotonic() + WALL_TIMES * job["total_s"]
    for case in job["cases"]:
        if left_s <= 0:
            break
        if time.monotonic() < starved_at:
            result, used_s = _run_case(job, case, left_s)
            left_s -= used_s
        else:
            result = {"status": "starved", "seconds": 0, "detail": ""}
        out.write(json.dumps(result).encode() + b"\n")
        out.flush()


if __name__ == "__main__":
    main()
