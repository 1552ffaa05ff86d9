"""Runs one program inside the sandbox, with a process for each of its test cases. The server never
imports it.

A bare Python gets its source with `-c`, so it uses only the standard library and reads no files. It
is process 1 of its PID namespace and not dumpable: a program cannot kill it, trace it or open its
descriptors. It writes `ready`, reads a job as a line of JSON, and writes a line of JSON for every
case. It does not know the expected outputs: the server compares them. When its standard input ends
it exits, and with it everything in the namespace.

Descriptors of a case's processes:

                       0               1            2     3            4             5
    a program          its input       its output   null  its result   -             -
    a tested program   its input       its output   null  null         from the test to the test
    the test           the server's    null         null  its result   from program  to program
"""

from __future__ import annotations  # its Python may be older than the server's

import base64
import builtins
import contextlib
import ctypes
import fcntl
import gc
import io
import json
import os
import resource
import select
import signal
import sys
import time
import types
from collections.abc import Callable
from typing import Any, NoReturn

from services.sandbox.meter import WALL_TIMES, Meter
from services.sandbox.values import encoded, finished

Json = Any
_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2
_CHUNK = 1 << 16
_RESULT_FD = 3
_CHANNEL_IN = 4
_CHANNEL_OUT = 5
# Time between two looks at the processes of a case.
_LOOK_S = 0.05


def _prctl(*arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    words = [ctypes.c_void_p(value) for value in arguments]
    words += [ctypes.c_void_p(0)] * (5 - len(words))
    if libc.prctl(*words) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def _forbid_processes(program: bytes) -> None:
    """Loads a compiled seccomp filter, after which only threads can be started."""

    class Fprog(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    code = ctypes.create_string_buffer(program, len(program))
    fprog = Fprog(len(program) // 8, ctypes.cast(code, ctypes.c_void_p))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(fprog))


def _set_limits(job: Json) -> None:
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


# The work of a case's processes


def _run_program(job: Json, case: Json) -> Any:
    """Runs the program of a case, in its own process, and returns a dictionary for the result
    pipe.
    """
    kind = case["kind"]
    name = "__main__" if kind == "stdin" else "solution"
    module = types.ModuleType(name)
    # `unittest.main()` of the program looks for its tests in `__main__`.
    sys.modules["__main__"] = sys.modules[name] = module
    if kind != "stdin":
        sys.stdin = _NoInput()
    try:
        exec(compile(job["source"], "<program>", "exec"), module.__dict__)  # noqa: S102
    except SystemExit as error:
        if error.code not in (None, 0):
            return {"status": "error", "detail": f"SystemExit: {error.code}"}
    except EOFError:
        # Statements that read input follow the functions that this case calls.
        if kind == "stdin":
            raise

    if kind == "stdin":
        if "threading" in sys.modules:  # a thread may do the program's work
            sys.modules["threading"]._shutdown()
        return {"status": "done"}

    if kind == "call":
        value = _callee(case["function"], module.__dict__)(*case["args"], **case["kwargs"])
    elif kind == "value":
        value = eval(compile(case["expression"], "<test>", "eval"), module.__dict__)  # noqa: S307
    else:
        from services.sandbox.program import Program

        # Until the test has ended.
        return Program(module.__dict__, _CHANNEL_IN, _CHANNEL_OUT).serve()
    return {"status": "done", "value": encoded(finished(value))}


class _NoInput(io.TextIOBase):
    """The standard input of a program that is not tested by its input."""

    def read(self, size: Any = -1, /) -> str:
        raise EOFError("this program is tested by calls, without standard input")

    readline = __next__ = read  # type: ignore[assignment]


def _callee(expression: str, namespace: Json) -> Any:
    """Returns the function that a case names; a method of `Solution` needs no prefix."""
    if expression.isidentifier() and expression not in namespace and "Solution" in namespace:
        return getattr(namespace["Solution"](), expression)
    return eval(expression, namespace)  # noqa: S307


def _run_test(job: Json, case: Json) -> Json:
    """Runs the test of a case, in a separate process from the program's."""
    code = _read_test(case["index"])
    from services.sandbox.remote import Test

    test = Test(_CHANNEL_IN, _CHANNEL_OUT, limit=_max_value_bytes(job), end=_end)
    test.run(code["text"], code["tests"], job["source"], code["entry_point"])
    return {"status": "done"}


def _end(status: str, detail: str) -> NoReturn:
    """Ends the test's process with a result."""
    _write_all(_RESULT_FD, json.dumps({"status": status, "detail": detail}).encode())
    os._exit(0)


def _write_all(fd: int, content: bytes) -> None:
    while content:
        content = content[os.write(fd, content) :]


def _read_test(case_index: int) -> Json:
    """Returns the test of a case from the server.

    The test of an earlier case may still be there, whole or cut, when its process was killed; one
    read may return both.
    """
    rest = b""
    while True:
        line, newline, rest = rest.partition(b"\n")
        if not newline:
            data = os.read(0, _CHUNK)
            if not data:
                sys.exit("the server has ended")
            rest = line + data
            continue
        with contextlib.suppress(ValueError):
            index, code = json.loads(line)
            if index == case_index:
                return code


# Starting them


def _fork(job: Json, case: Json, fds: tuple[int, ...], work: Callable[[Json, Json], Json]) -> int:
    """Starts a process of a case with `fds` as its descriptors 0, 1, 2, …; it writes what `work`
    returns to 3.
    """
    pid = os.fork()
    if pid == 0:
        try:
            _prepare(job, fds)
            _report(job, case, work)
        finally:
            os._exit(2)
    return pid


def _prepare(job: Json, fds: tuple[int, ...]) -> None:
    """Gives a new process its descriptors and limits."""
    for target, fd in enumerate(fds):
        os.dup2(fd, target)
    os.closerange(len(fds), 256)
    text = {"encoding": "utf-8", "errors": "surrogateescape"}
    # Not the server's, which knows that it cannot seek.
    sys.stdin = sys.__stdin__ = open(0, closefd=False, **text)  # type: ignore[call-overload,misc]  # noqa: SIM115
    sys.stdout.reconfigure(**text)  # type: ignore[union-attr]
    sys.argv = ["program"]
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)  # the time of a case bounds it
    # As `site` defines them, which a bare Python lacks.
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    _set_limits(job)
    if job["filter"]:
        _forbid_processes(base64.b64decode(job["filter"]))


def _report(job: Json, case: Json, work: Callable[[Json, Json], Json]) -> NoReturn:
    """Does the work of a case, writes its outcome to the result pipe, and ends the process."""
    # A program may replace them.
    exit_now = os._exit
    write = os.write
    dumps = json.dumps
    try:
        outcome = work(job, case)
        if not sys.stdout.closed:  # by the program: Python then ends without an error
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
        content = content[write(_RESULT_FD, content) :]
    exit_now(0)


def _max_value_bytes(job: Json) -> int:
    """Returns the limit of a value as JSON, which may be longer than the value."""
    return int(2 * job["output_bytes"])


# Watching them


class _Deadline:
    """Tells when the processes of a case have used up their time."""

    def __init__(self, meter: Meter, limit_s: float, max_wall_s: float) -> None:
        self._meter = meter
        self._limit_s = limit_s
        self._max_wall_s = max_wall_s
        self._looked_at = time.monotonic()

    def look(self) -> str | None:
        """Returns `timeout` for processes that used up their time, `starved` for those that got too
        little CPU, else None; looks at most every `_LOOK_S`.
        """
        if time.monotonic() <= self._looked_at + _LOOK_S:
            return None
        status = None
        if self._meter.read() >= self._limit_s:
            status = "timeout"
        elif self._meter.wall_s >= self._max_wall_s:
            status = "starved"
        self._looked_at = time.monotonic()
        return status


def _exchange(
    limits: dict[int, int], last_fd: int | None, deadline: _Deadline
) -> tuple[str | None, dict[int, bytearray]]:
    """Drains a case's pipes until they end; returns a status or None, and what came from each.

    Args:
        limits: how many bytes may come from each pipe.
        last_fd: the pipe whose end ends the case; None: the last one to end does.
        deadline: when the case has used up its time.
    """
    received = {fd: bytearray() for fd in limits}
    open_fds = set(received)
    poll = select.poll()
    poll.register(0, 0)  # its end; the test of the case may wait in it
    for fd in received:
        poll.register(fd, select.POLLIN)

    status = None
    while open_fds and not status and (last_fd is None or last_fd in open_fds):
        for fd, _ in poll.poll(_LOOK_S * 1000):
            if fd == 0:
                _exit_with_all()
            data = os.read(fd, _CHUNK)
            received[fd] += data
            if not data:
                poll.unregister(fd)
                open_fds.discard(fd)
            elif len(received[fd]) > limits[fd]:
                status = "output"
        status = status or deadline.look()
    return status, received


def _input_file(content: bytes) -> int:
    """Returns a descriptor of a file with this content, which nobody can change.

    Judges give a program its input as a file: some ask for its size, or read it twice.
    """
    if not hasattr(os, "memfd_create"):
        import tempfile  # slow to import

        with tempfile.TemporaryFile(buffering=0) as file:
            fd = os.dup(file.fileno())
    else:
        fd = os.memfd_create("input", os.MFD_ALLOW_SEALING)
    _write_all(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    if hasattr(fcntl, "F_ADD_SEALS"):
        seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def _run_case(job: Json, case: Json, left_s: float) -> tuple[Json, float]:
    """Runs one case; returns its result and the time that counts towards all cases, at most its own
    limit.
    """
    # In this order: `_prepare` copies descriptors to lower numbers.
    null = os.open(os.devnull, os.O_RDWR)
    stdin = os.dup(null)
    if case["kind"] == "stdin":
        os.close(stdin)
        stdin = _input_file(case["input"].encode("utf-8", "surrogateescape"))
    read_stdout, stdout = os.pipe()
    read_result, result_fd = os.pipe()
    given_away = [null, stdin, stdout, result_fd]
    if case["kind"] == "code":
        program_in, test_out = os.pipe()
        test_in, program_out = os.pipe()
        given_away += [program_in, test_out, test_in, program_out]
        program_fds = (stdin, stdout, null, null, program_in, program_out)
        pids = [_fork(job, case, program_fds, _run_program)]
        print('"test"', flush=True)  # only now: no process that runs the program has ever held it
        test_fds = (0, null, null, result_fd, test_in, test_out)
        pids.append(_fork(job, case, test_fds, _run_test))
    else:
        pids = [_fork(job, case, (stdin, stdout, null, result_fd), _run_program)]
    for fd in given_away:
        os.close(fd)

    meter = Meter(*pids)
    limit_s = min(left_s, job["timeout_s"])
    deadline = _Deadline(meter, limit_s, max_wall_s=WALL_TIMES * job["timeout_s"])
    limits = {read_stdout: job["output_bytes"], read_result: _max_value_bytes(job)}
    # A tested program may outlive its test, whose result ends the case.
    last_fd = read_result if case["kind"] == "code" else None
    status, received = _exchange(limits, last_fd, deadline)
    os.close(read_stdout)
    os.close(read_result)

    # Without a status the last process, whose result it was, ends by itself.
    for pid in pids if status else pids[:-1]:
        os.kill(pid, signal.SIGKILL)
    late_status, wait_status = _reap(pids, deadline)
    result = {"seconds": meter.wall_s, "detail": "", "status": status or late_status}
    if not result["status"]:
        output = bytes(received[read_stdout])
        result.update(_finished(case, wait_status, output, bytes(received[read_result])))
    if result["status"] == "output":
        result["detail"] = f"more than {job['output_bytes'] >> 10} KB (output_kb)"
    # A slow look at the meter must not cost the next cases their time.
    return result, min(meter.read(), limit_s)


def _finished(case: Json, wait_status: int, output: bytes, raw_result: bytes) -> Json:
    """Returns the result of a case's process that ended by itself."""
    done = {"status": "done", "output": "", "value": "null"}
    if case["kind"] == "stdin":
        done["output"] = output.decode("utf-8", "replace")
    try:
        outcome = json.loads(raw_result)
        status = outcome["status"]
        value = json.dumps(outcome.get("value"))
    except Exception:  # a program can write into this pipe too
        exited = os.WIFEXITED(wait_status)
        code = os.WEXITSTATUS(wait_status) if exited else -os.WTERMSIG(wait_status)
        if code == 0 and case["kind"] == "stdin":  # os._exit(0) after its output
            return done
        return {"status": "died", "detail": f"ended with status {code}"}

    if status == "done":
        return dict(done, value=value)
    return {
        "status": status if status in ("error", "memory", "output") else "died",
        "detail": str(outcome.get("detail", ""))[:200],
    }


def _reap(pids: list[int], deadline: _Deadline) -> tuple[str | None, int]:
    """Returns why the last of a case's processes was killed late, or None, and its wait status."""
    *others, pid = pids
    for other in others:
        os.waitpid(other, 0)

    late_status: str | None = None
    server = select.poll()
    server.register(0, 0)
    while True:
        ended, wait_status = os.waitpid(pid, 0 if late_status else os.WNOHANG)
        if ended:
            break
        late_status = deadline.look()
        if late_status:
            os.kill(pid, signal.SIGKILL)
        elif server.poll(1):
            _exit_with_all()

    if os.getpid() == 1:  # kill everything that the process left behind
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
    return late_status, wait_status


def _exit_with_all() -> NoReturn:
    """Ends this process, and as process 1 all others, because the server has closed the
    connection.
    """
    if os.getpid() == 1:
        os._exit(0)
    os.killpg(0, signal.SIGKILL)
    raise AssertionError


def main() -> None:
    """Writes `ready`, reads a job and runs its cases until its total time is used up."""
    if sys.platform == "linux":
        _prctl(_PR_SET_DUMPABLE, 0)
    # Python's own handler would let a program interrupt process 1.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    out = sys.stdout.buffer
    out.write(b"ready\n")
    out.flush()
    job = json.loads(sys.stdin.buffer.readline())
    gc.freeze()

    left_s = job["total_s"]
    starved_at = time.monotonic() + WALL_TIMES * left_s
    for index, case in enumerate(job["cases"]):
        if left_s <= 0:
            break
        if time.monotonic() < starved_at:
            result, used_s = _run_case(job, dict(case, index=index), left_s)
            left_s -= used_s
        else:
            result = {"status": "starved", "seconds": 0, "detail": ""}
        out.write(json.dumps(result).encode() + b"\n")
        out.flush()


if __name__ == "__main__":
    main()
