"""What a connection tells of its client: whether it has left, and whether it took its answers.

A client that ends its connection after it has read everything sends FIN, which acknowledges every
byte. The kernel of a client that leaves bytes unread, or to which bytes come after it closed,
resets the connection instead (RFC 2525, section 2.17), also when the client was killed. So a server
that watches the end of a connection knows what became of the last answer on it. A client that asks
for something else on it has read the answer before.
"""

import fcntl
import socket
import struct
import sys
import termios
from collections.abc import Callable

_ESTABLISHED = 1
_CLOSE_WAIT = 8
"""States of TCP: both sides are open, and the client has closed its side."""


class Delivery:
    """Whether a client took an answer.

    Args:
        look: says what is known while the connection is open.
    """

    def __init__(self, look: Callable[[], bool | None]) -> None:
        self._look = look
        self._taken: bool | None = None

    def end(self, taken: bool) -> None:
        """Records what the end of the connection told."""
        self._taken = taken

    def taken(self) -> bool | None:
        """Returns whether the client took the answer; None when it may still be reading."""
        return self._look() if self._taken is None else self._taken


def was_taken(sock: socket.socket) -> bool | None:
    """Returns whether the client of an open connection took all that was written to it; None when
    that is open.
    """
    if sys.platform != "linux":
        return None
    state = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    if state == _ESTABLISHED:
        return None
    # SIOCOUTQ, which has the same number as TIOCOUTQ: bytes that the client has not acknowledged.
    return state == _CLOSE_WAIT and _count(sock, termios.TIOCOUTQ) == 0


def has_unread(sock: socket.socket) -> bool:
    """Returns whether bytes of the client have arrived that the server has not read yet."""
    return _count(sock, termios.FIONREAD) > 0


def _count(sock: socket.socket, request: int) -> int:
    return int(struct.unpack("i", fcntl.ioctl(sock.fileno(), request, bytes(4)))[0])
