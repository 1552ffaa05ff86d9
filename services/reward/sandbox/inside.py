"""Runs one program inside the sandbox, with a process for each of its test cases. The server never imports it.

A bare Python gets its source with `-c`, so it uses only the standard library and reads no file. It is process 1 of its PID
namespace and not dumpable: a program cannot kill it, trace it or open its descriptors. It writes `ready`, reads a line with a
job in JSON, and writes a line of JSON for every case. It knows no expected output: the server compares. When its standard
input ends it exits, and with it everything in the namespace.
"""

from __future__ import annotations  # its Python may be older than the server's

import base64
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
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return [kind.__name__, [_encoded(item, depth + 1) for item in list(value)]]
    if isinstance(value, dict):
        return ["dict", [[_encoded(k, depth + 1), _encoded(v, depth + 1)] for k, v in dict.items(value)]]
    if hasattr(value, "tolist"):  # arrays
        return _encoded(value.tolist(), depth + 1)
    if hasattr(type(value), "__index__"):
        return ["int", hex(operator.index(value))]
    if hasattr(type(value), "__float__"):
        return ["float", float.__repr__(float(value))]
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
        if kind != "stdin" or error.code not in (None, 0):
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


def _exchange(pid: int, case: Json, pipes: tuple[int, ...], limit: int, deadline: float) -> tuple[str | None, bytes, bytes]:
    """Feeds and drains a case's process until its pipes end, and returns its status or None, its output and its result."""
    write_in, read_out, read_result = pipes
    given = memoryview(case.get("input", "").encode("utf-8", "surrogateescape"))
    got = {read_out: bytearray(), read_result: bytearray()}
    poll = select.poll()
    for fd in (0, *got):
        poll.register(fd, select.POLLIN)
    os.set_blocking(write_in, False)
    poll.register(write_in, select.POLLOUT)
    open_fds, status = set(got), None
    while open_fds:
        left = deadline - time.monotonic()
        if left <= 0:
            status = "timeout"
            break
        for fd, _ in poll.poll(left * 1000 + 1):
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
            elif len(got[fd]) > limit:
                status = "output"
        if status:
            break
    if write_in >= 0:
        os.close(write_in)
    if status:
        os.kill(pid, signal.SIGKILL)
    return status, bytes(got[read_out]), bytes(got[read_result])


def _run_case(job: Json, case: Json, deadline: float) -> dict[str, Any]:
    """Runs one case and returns its result."""
    token = base64.b64encode(os.urandom(18)).decode()
    (read_in, write_in), (read_out, write_out), (read_result, write_result) = os.pipe(), os.pipe(), os.pipe()
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        try:
            _child(job, case, (read_in, write_out, write_result), token)
        finally:
            os._exit(2)
    for fd in (read_in, write_out, write_result):
        os.close(fd)
    deadline = min(deadline, started + job["timeout_s"])
    status, output, raw = _exchange(pid, case, (write_in, read_out, read_result), job["output_bytes"], deadline)
    os.close(read_out)
    os.close(read_result)
    ended = _reaped(pid, deadline)
    result = {"seconds": time.monotonic() - started, "detail": ""}
    if status or ended is None:
        return dict(result, status=status or "timeout")
    try:
        outcome = json.loads(raw)
        said, value = outcome.pop("status"), json.dumps(outcome.get("value"))
    except Exception:  # a program can write into this pipe too
        value = "null"
        code = os.WEXITSTATUS(ended) if os.WIFEXITED(ended) else -os.WTERMSIG(ended)
        if code == 0 and case["kind"] == "stdin":  # os._exit(0) after its output
            outcome, said = {}, "done"
        else:
            return dict(result, status="died", detail=f"ended with status {code}")
    result["detail"] = str(outcome.get("detail", ""))[:200]
    if said != "done":
        return dict(result, status=said if said in ("error", "memory") else "died")
    if case["kind"] == "code" and outcome.get("token") != token:
        return dict(result, status="died", detail="the test did not run to its end")
    return dict(result, status="done", output=output.decode("utf-8", "replace"), value=value)


def _give_up() -> NoReturn:
    """Ends this process, and as process 1 all others, since the server has closed the connection."""
    os.killpg(0, signal.SIGKILL) if os.getpid() != 1 else os._exit(0)
    raise AssertionError


def _reaped(pid: int, deadline: float) -> int | None:
    """Returns the wait status of a case's process; None when it was killed at the deadline."""
    timely = True
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            break
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            timely = False
            break
        if select.select([0], [], [], 0.001)[0]:
            _give_up()
    if os.getpid() == 1:  # kill everything that the process left behind
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
    return status if timely else None


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
    deadline = time.monotonic() + job["total_s"]
    for case in job["cases"]:
        if time.monotonic() >= deadline:
            break
        out.write(json.dumps(_run_case(job, case, deadline)).encode() + b"\n")
        out.flush()


if __name__ == "__main__":
    main()
