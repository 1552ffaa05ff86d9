"""The first program in the sandbox: sets limits, reaches the gateway for the others, runs the
command.

`python -c SOURCE MEMORY_BYTES PROCESSES SOCKET ADDRESS PORT WORD...`: what connects to ADDRESS:PORT
is passed on to the socket file SOCKET, if it is not empty. Needs only the standard library.
"""

import contextlib
import resource
import socket
import subprocess
import sys
import threading


def main(words: list[str]) -> int:
    """Runs the command. Returns its exit status, 128 + n when signal n ended it."""
    memory, processes, path, address, port, *command = words
    if path:
        listener = socket.create_server((address, int(port)), backlog=128)
        threading.Thread(target=_listen, args=(listener, path), daemon=True).start()
    try:
        child = subprocess.Popen(command, preexec_fn=lambda: _limit(int(memory), int(processes)))
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return 127
    status = child.wait()
    return status if status >= 0 else 128 - status


def _limit(memory_bytes: int, processes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _listen(listener: socket.socket, path: str) -> None:
    while True:
        near, _ = listener.accept()
        try:
            far = socket.socket(socket.AF_UNIX)
            far.connect(path)
        except OSError:
            near.close()
            continue
        for source, target in ((near, far), (far, near)):
            threading.Thread(target=_copy, args=(source, target), daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for each in (source, target):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
