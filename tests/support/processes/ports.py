"""Free ports of this machine."""

import itertools
import os
import socket

_FIRST, _BLOCKS, _BLOCK = 20_000, 20, 400
"""20000 to 27999: below the ports that the kernel gives to connections, and without 29000 and
29500, which have owners."""
_worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
_start = _FIRST + (int(_worker) if _worker else os.getpid()) % _BLOCKS * _BLOCK
_count = itertools.count(os.getpid())


def free_port() -> int:
    """Returns a port that was free a moment ago, and that nothing on this machine takes while its
    server is restarted.

    A port chosen by the kernel may become the port of any connection. Every process of pytest-xdist
    has its own block, and gives out all ports of the block before it gives out one again.
    """
    for number in itertools.islice(_count, _BLOCK):
        with socket.socket() as probe:
            try:
                probe.bind(("", port := _start + number % _BLOCK))
            except OSError:
                continue
            return port
    raise RuntimeError(f"all ports from {_start} to {_start + _BLOCK - 1} are taken")
