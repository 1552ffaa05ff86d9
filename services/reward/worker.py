"""The worker processes. Run as a script by `services.reward.pool`, never imported by the server.

This process loads a module once and then forks a worker for every socket that it receives on its
standard input, so a killed worker is replaced in milliseconds. When its standard input ends,
because the server closed it or was killed, it ends all its workers and itself. A worker sends its
process id, or `error: ` and the reason, then answers line by line: it sends one byte when it has
read a line, and then the answer.
"""

import contextlib
import gc
import importlib
import json
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

# Makes the handler of a worker; called in the worker.
Make = Callable[[], Callable[[str], str]]


def _prepared(spec: dict[str, Any]) -> Make:
    sys.path[:] = spec["path"]
    # A model that a function loads must not draw bars into the log.
    os.environ.setdefault("TQDM_DISABLE", "1")
    importlib.import_module("common.process.logs").to_stderr("reward-server")
    make: Make = importlib.import_module(spec["module"]).prepare(spec["arguments"])
    return make


def _refuse(reason: str) -> NoReturn:
    raise RuntimeError(reason)


def _reason(error: Exception) -> str:
    text = str(error) if isinstance(error, RuntimeError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:1000]


def _work(connection: socket.socket, make: Make, memory_mb: int | None) -> None:
    """Answers until the connection ends."""
    if memory_mb is not None and sys.platform != "darwin":  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with (
        connection,
        connection.makefile("rw", encoding="utf-8", errors="surrogatepass", newline="\n") as stream,
    ):
        try:
            handle = make()
        except Exception as error:
            stream.write(f"error: {_reason(error)}\n")
            stream.flush()
            return
        stream.write(f"{os.getpid()}\n")
        stream.flush()
        for line in stream:
            connection.send(b"b")  # if the worker dies from now on, it died on this line
            stream.write(f"{handle(line)}\n")
            stream.flush()


def _fork_worker(
    control: socket.socket, connection: int, make: Make, memory_mb: int | None
) -> None:
    try:
        if os.fork() != 0:
            return
    except OSError:  # no process left: the server sees the connection end
        logging.exception("cannot fork a worker")
        return
    status = 1  # the server sees the connection end and counts it
    try:
        control.close()
        # A user's reward function may read standard input.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        _work(socket.socket(fileno=connection), make, memory_mb)
        status = 0
    except (MemoryError, RecursionError, OSError):
        pass
    except Exception:
        logging.exception("a worker failed")
    finally:
        os._exit(status)


def _reap(flags: int) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, flags)[0]:
            pass


def serve(spec: dict[str, Any]) -> None:
    """Forks workers until standard input ends, then ends them all."""
    control = socket.socket(fileno=0)
    try:
        make = _prepared(spec)
    except Exception as error:
        logging.exception("the workers cannot be prepared")
        make = partial(_refuse, _reason(error))  # every worker reports it to the server
    gc.freeze()
    while True:
        message, descriptors, *_ = socket.recv_fds(control, 1, 1)
        if not message:
            break
        _reap(os.WNOHANG)
        for descriptor in descriptors:
            _fork_worker(control, descriptor, make, spec["memory_mb"])
            os.close(descriptor)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)  # the pool gave this process a group of its own
    _reap(0)


def check(spec: dict[str, Any]) -> None:
    """Prints the functions that a worker makes; where it cannot, prints the reason and
    exits with status 1.
    """
    try:
        print(_prepared(spec)()('{"functions": true}'))
    except Exception as error:
        print(_reason(error))
        raise SystemExit(1) from None


if __name__ == "__main__":
    specification = json.loads(sys.argv[2])
    if sys.argv[1] == "serve":
        serve(specification)
    else:
        check(specification)
