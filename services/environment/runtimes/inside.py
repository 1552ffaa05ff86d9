"""The first program in the sandbox: sets limits, lets the gateway in, runs the command.

`python -c SOURCE MEMORY_BYTES PROCESSES SOCKET ADDRESS PORT WORD...`: it listens at ADDRESS:PORT
and sends that socket to the server, through the socket file SOCKET, if it is not empty. Needs only
the standard library.
"""

import resource
import socket
import subprocess
import sys


def main(words: list[str]) -> int:
    """Runs the command. Returns its exit status, 128 + n when signal n ended it."""
    memory, processes, path, address, port, *command = words
    to_server = socket.socket(socket.AF_UNIX)  # open until this program ends
    if path:
        to_server.connect(path)
        with socket.create_server((address, int(port)), backlog=128) as listener:
            socket.send_fds(to_server, [b"1"], [listener.fileno()])
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
