"""The grader processes. Run as a script by `services.reward.pool`, never imported by the server.

This process loads math-verify once and then forks a grader for every socket that comes in on its standard input, so a
killed grader is replaced in milliseconds. When its standard input ends, because the server closed it or was killed, it
ends all its graders and itself. A grader reads `[gold, answer]` lines and writes `right` or `wrong`.
"""

import contextlib
import gc
import itertools
import json
import logging
import os
import re
import resource
import signal
import socket
import sys

import sympy
from math_verify import parse, verify

_HUNDRED = sympy.Integer(100)
_TOLERANCE = 1e-6
_POWER = re.compile(r"\*\*\s*(-?\w+|\([^()]*\))")
_PI = re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])")


def equivalent(gold: str, answer: str) -> bool:
    """Whether two answers mean the same, by math-verify, whose verdict on numbers is checked again.

    Raises MemoryError and RecursionError. Has no time limit: the process that calls it is killed instead.
    """
    expected, given = _parse(gold), _parse(answer)
    if not any(_verify(a, b) for a, b in itertools.product(expected, given)):
        return False
    return not (expected and given) or _close(expected[0], given[0])


def _verify(expected: object, given: object) -> bool:
    try:
        return bool(verify(expected, given, timeout_seconds=None, raise_on_error=True))
    except (MemoryError, RecursionError):  # no verdict: math-verify by itself would make it "wrong"
        raise
    except Exception:  # sympy cannot compare the two
        return False


def _parse(text: str) -> list[object]:
    percent = text.endswith("%")
    bare = text.removesuffix("%").removesuffix("\\").strip() if percent else text
    # LaTeX does not know these, and math-verify would read the 2 of 2**3 and forget the rest.
    latex = _PI.sub(r"\\pi ", _POWER.sub(r"^{\1}", bare))
    try:
        found: list[object] = parse(f"${latex}$", parsing_timeout=None, raise_on_error=True)
    except (MemoryError, RecursionError):
        raise
    except Exception:  # sympy raises anything on text that is no mathematics: then only the text can match
        return [text]
    return [item / _HUNDRED if isinstance(item, sympy.Expr) else text for item in found] if percent else found


def _close(expected: object, given: object) -> bool:
    """False for two numbers that differ: math-verify rounds to 6 decimals, so to it 10^-20 is 10^-30."""
    numbers = [item.doit() for item in (expected, given) if isinstance(item, sympy.Expr) and item.is_number]
    if len(numbers) < 2:
        return True
    a, b = numbers
    if a.is_Rational and b.is_Rational:
        return bool(a == b)
    if not (a.is_finite and b.is_finite):
        return bool(a == b)
    difference, size = abs(sympy.N(a - b, 30, maxn=400)), max(abs(sympy.N(a)), abs(sympy.N(b)))
    return bool(difference <= _TOLERANCE * size)


def _work(connection: socket.socket, memory_bytes: int, alarm_s: int) -> None:
    """Grades until the connection ends."""
    if sys.platform != "darwin":  # which has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with connection, connection.makefile("rw", encoding="ascii", newline="\n") as stream:
        stream.write(f"{os.getpid()}\n")
        stream.flush()
        for line in stream:
            gold, answer = json.loads(line)
            signal.alarm(alarm_s)  # ends a grader that hangs after everything else that could kill it is gone
            verdict = "right" if equivalent(gold, answer) else "wrong"
            signal.alarm(0)
            if verdict == "wrong" and _used_bytes() > memory_bytes // 2:
                raise MemoryError  # math-verify takes running out of memory for "wrong" in many places
            stream.write(f"{verdict}\n")
            stream.flush()


def _used_bytes() -> int:
    """The most memory this process has had at once."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def _fork_worker(control: socket.socket, connection: int, memory_bytes: int, alarm_s: int) -> None:
    try:
        if os.fork() != 0:
            return
    except OSError:  # no process left to give: the server sees the connection end
        logging.exception("cannot fork a grader")
        return
    status = 1  # the server sees the connection end and counts it
    try:
        control.close()
        _work(socket.socket(fileno=connection), memory_bytes, alarm_s)
        status = 0
    except (MemoryError, RecursionError, OSError):
        pass
    except Exception:
        logging.exception("a grader failed")
    finally:
        os._exit(status)


def _reap(flags: int) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, flags)[0]:
            pass


def main(memory_mb: int, alarm_s: int) -> None:
    """Forks graders until standard input ends, then ends them all."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    control = socket.socket(fileno=0)
    equivalent("\\frac{x+1}{2}", "(1+x)/2")  # fills the caches that every grader inherits
    gc.freeze()
    while True:
        message, descriptors, *_ = socket.recv_fds(control, 1, 1)
        if not message:
            break
        _reap(os.WNOHANG)
        for descriptor in descriptors:
            _fork_worker(control, descriptor, memory_mb << 20, alarm_s)
            os.close(descriptor)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)  # the pool gave this process a group of its own
    _reap(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
