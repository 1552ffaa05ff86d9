"""Runs one program inside the sandbox, with a process for each of its test cases. The server never
imports it.

A bare Python gets its source with `-c`, so it uses only the standard library and reads no files. It
is process 1 of its
PID namespace and not dumpable: a program cannot kill it, trace it or open its descriptors. It
writes `ready`, reads a
job as a line of JSON, and writes a line of JSON for every case. It does not know the expected
outputs: the server compares them. When its standard input ends it exits, and with it everything in
the namespace.
"""

from __future__ import annotations  # its Python may be older than the server's

import base64
import builtins
import contextlib
import ctypes
import gc
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
from services.sandbox.values import encoded

Json = Any
_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 4, 38, 22, 2
_CHUNK = 1 << 16
_CHANNEL = (4, 5)  # descriptors for messages between the processes of a program and its test
_LOOK_S = 0.05


def _prctl(*arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if (
        libc.prctl(
            *(ctypes.c_void_p(value) for value in arguments),
            *([ctypes.c_void_p(0)] * (5 - len(arguments))),
        )
        != 0
    ):
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


def _callee(expression: str, namespace: dict[str, Any]) -> Any:
    """Returns the function that a case names; a method of `Solution` needs no prefix."""
    if expression.isidentifier() and expression not in namespace and "Solution" in namespace:
        return getattr(namespace["Solution"](), expression)
    return eval(expression, namespace)  # noqa: S307


def _outcome(job: Json, case: Json) -> dict[str, Any]:  # noqa: RET503
    """Runs the program of a case, in its own process, and returns a dictionary for the result
    pipe.
    """
    kind, module = case["kind"], types.ModuleType("solution")
    module.__name__ = module.__dict__["__name__"] = "__main__" if kind == "stdin" else "solution"
    sys.modules[module.__name__] = module
    try:
        exec(compile(job["source"], "<program>", "exec"), module.__dict__)  # noqa: S102
    except SystemExit as error:
        if error.code not in (None, 0):
            return {"status": "error", "detail": f"SystemExit: {error.code}"}
    if kind == "stdin":
        if "threading" in sys.modules:  # a thread may do the program's work
            sys.modules["threading"]._shutdown()
        return {"status": "done"}
    if kind == "call":
        function = _callee(case["function"], module.__dict__)
        return {"status": "done", "value": encoded(function(*case["args"], **case["kwargs"]))}
    if kind == "value":
        test = compile(case["expression"], "<test>", "eval")
        return {"status": "done", "value": encoded(eval(test, module.__dict__))}  # noqa: S307
    from services.sandbox.program import serve

    serve(module.__dict__, *_CHANNEL)


def _verdict(job: Json, case: Json) -> dict[str, Any]:
    """Runs the test of a case, in a separate process from the program's."""
    text = None
    while (
        text is None
    ):  # the test of an earlier case may still be there, whole or cut, when its process was killed
        line = b""
        while not line.endswith(b"\n"):
            line += os.read(0, _CHUNK) or sys.exit("the server has ended")
        with contextlib.suppress(ValueError):
            index, content = json.loads(line)
            text = content if index == case["index"] else None
    from services.sandbox.remote import Test

    Test(*_CHANNEL, 8 * job["output_bytes"]).run(text)
    return {"status": "done"}


def _forked(
    job: Json, case: Json, fds: tuple[int, ...], work: Callable[[Json, Json], dict[str, Any]]
) -> int:
    """Starts a process of a case with `fds` as its descriptors 0, 1, 2, …; it writes what `work`
    returns to 3.
    """
    if pid := os.fork():
        return pid
    try:
        _child(job, case, fds, work)
    finally:
        os._exit(2)


def _child(
    job: Json, case: Json, fds: tuple[int, ...], work: Callable[[Json, Json], dict[str, Any]]
) -> NoReturn:
    for target, fd in enumerate(fds):
        os.dup2(fd, target)
    os.closerange(len(fds), 256)
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
        outcome = work(job, case)
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
    """Returns `timeout` for a process that used up its time, `starved` for one that got too little
    CPU, else None.
    """
    return (
        "timeout"
        if meter.read() >= limit_s
        else "starved"
        if meter.wall_s >= WALL_TIMES * job["timeout_s"]
        else None
    )


def _exchange(
    job: Json, case: Json, pipes: tuple[int, ...], meter: Meter, limit_s: float
) -> tuple[str | None, bytes, bytes]:
    """Feeds and drains a case's process until its pipes end, and returns its status or None, its
    output and its result.
    """
    write_in, read_out, read_result = pipes
    given = memoryview(case.get("input", "").encode("utf-8", "surrogateescape"))
    got = {read_out: bytearray(), read_result: bytearray()}
    poll = select.poll()
    poll.register(0, 0)  # its end; the test of the case may wait in it
    for fd in got:
        poll.register(fd, select.POLLIN)
    os.set_blocking(write_in, False)
    poll.register(write_in, select.POLLOUT)
    open_fds, status, looked = set(got), None, time.monotonic()
    while open_fds and (read_result in open_fds or case["kind"] != "code"):
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
    return status, bytes(got[read_out]), bytes(got[read_result])


def _run_case(job: Json, case: Json, left_s: float) -> tuple[dict[str, Any], float]:
    """Runs one case; returns its result and the time that counts towards all cases, at most its own
    limit.
    """
    (read_in, write_in), (read_out, write_out), (read_result, write_result) = (
        os.pipe(),
        os.pipe(),
        os.pipe(),
    )
    null, inside = os.open(os.devnull, os.O_RDWR), [read_in, write_out, write_result]
    if case["kind"] == "code":
        (program_in, test_out), (test_in, program_out) = os.pipe(), os.pipe()
        pids = [
            _forked(job, case, (read_in, write_out, null, null, program_in, program_out), _outcome)
        ]
        print('"test"', flush=True)  # only now: no process that runs the program has ever held it
        pids.append(_forked(job, case, (0, null, null, write_result, test_in, test_out), _verdict))
        inside += [program_in, test_out, test_in, program_out]
    else:
        pids = [_forked(job, case, (read_in, write_out, null, write_result), _outcome)]
    for fd in (null, *inside):
        os.close(fd)
    meter, limit_s = Meter(*pids), min(left_s, job["timeout_s"])
    status, output, raw = _exchange(job, case, (write_in, read_out, read_result), meter, limit_s)
    os.close(read_out)
    os.close(read_result)
    for pid in pids if status else pids[:-1]:
        os.kill(pid, signal.SIGKILL)
    late, ended = _reaped(pids, meter, job, limit_s)
    result = {"seconds": meter.wall_s, "detail": "", "status": status or late}
    if not result["status"]:
        result.update(_finished(case, ended, output, raw))
    return result, min(
        meter.read(), limit_s
    )  # a slow look at the meter must not cost the next cases their time


def _finished(case: Json, ended: int, output: bytes, raw: bytes) -> dict[str, Any]:
    """Returns the result of a case's process that ended by itself."""
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
        return {
            "status": said if said in ("error", "memory") else "died",
            "detail": str(outcome.get("detail", ""))[:200],
        }
    return {"status": "done", "output": output.decode("utf-8", "replace"), "value": value}


def _give_up() -> NoReturn:
    """Ends this process, and as process 1 all others, because the server has closed the
    connection.
    """
    os.killpg(0, signal.SIGKILL) if os.getpid() != 1 else os._exit(0)
    raise AssertionError


def _reaped(pids: list[int], meter: Meter, job: Json, limit_s: float) -> tuple[str | None, int]:
    """Returns why the last of a case's processes was killed late, or None, and its wait status."""
    *others, pid = pids
    for other in others:
        os.waitpid(other, 0)
    late, looked = None, time.monotonic()
    while True:
        found, status = os.waitpid(pid, 0 if late else os.WNOHANG)
        if found:
            break
        if time.monotonic() > looked + _LOOK_S:
            late, looked = _late(meter, job, limit_s), time.monotonic()
        if late:
            os.kill(pid, signal.SIGKILL)
        else:
            ended = select.poll()
            ended.register(0, 0)
            if ended.poll(1):
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
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Python's own handler would let a program interrupt process 1
    out = sys.stdout.buffer
    out.write(b"ready\n")
    out.flush()
    job = json.loads(sys.stdin.buffer.readline())
    gc.freeze()
    left_s, starved_at = job["total_s"], time.monotonic() + WALL_TIMES * job["total_s"]
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
