"""Watches the ranks of a run: when one is lost the others end with its name, instead of waiting for it in a collective.

    rank k ──beat, "I leave: …"──► rank 0 ──beat, "rank k is gone: …"──► every other rank

Every rank has a thread and one TCP connection, to rank 0, which watches all others and tells everybody what it learns. A
closed connection is a killed process and known at once; silence is a node without power or network, or a stopped process.
A rank that computes for long is neither: torch frees the interpreter lock in its kernels and collectives, so the thread
beats on. A rank that ends by itself says why before it goes.
"""

import logging
import os
import secrets
import selectors
import socket
import threading
import time
import traceback
from contextlib import suppress
from types import TracebackType
from typing import NamedTuple

from common import watchdog
from common.errors import shorten
from common.security import is_loopback
from common.topology import TRAINER, Topology
from learning.ranks import Ranks

log = logging.getLogger(__name__)
LOST = 75
"""Exit status of a rank that ends because another one is lost: EX_TEMPFAIL of sysexits.h, starting again helps."""
_BEATS = 9
"""Beats within the limit."""
_TICK_S = 0.2
_OWN_ERROR_S = 5.0
"""An error of one rank is often one of all: each may say its own before it ends because of another's."""
_VERDICT_S = 10.0
"""What an error of a collective may be due to is known by then."""
_HANG_UP_S = 1.0
_LONGEST = 4096
"""Bytes of a line; only a stranger would send more."""
_STRANGERS, _HELLO_S = 64, 10.0
"""So many connections may be open that have not said who they are, each so long."""


class _Departure(NamedTuple):
    how: str
    """done, stopped, failed, died or silent."""
    reason: str
    at: float


class _Line:
    """One connection, of lines of text."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket, self._unread = connection, b""
        self.rank: int | None = None
        self.since = time.monotonic()
        connection.setblocking(False)

    def send(self, text: str) -> None:
        """Never waits; that the other end is gone shows in `read`, or in its silence."""
        with suppress(OSError):
            self.socket.send(text.encode() + b"\n")

    def read(self) -> list[str] | None:
        """The lines that came; None when the connection has ended."""
        try:
            data = self.socket.recv(65536)
        except BlockingIOError:
            return []
        except OSError:
            return None
        *lines, self._unread = (self._unread + data).split(b"\n")
        ended = not data or len(self._unread) > _LONGEST
        return None if ended else [line.decode(errors="replace") for line in lines]


class Liveness:
    """Runs beside a rank while inside; a single process has nobody to watch.

    Args:
        ranks: whose process group is up.
        topology: names the nodes.
        lost_after_s: seconds of silence until a rank is lost.
    """

    def __init__(self, ranks: Ranks, topology: Topology, lost_after_s: float) -> None:
        self._ranks, self._topology, self._lost_after_s = ranks, topology, lost_after_s
        self._selector = selectors.DefaultSelector()
        self._server: socket.socket | None = None
        self._token = ""
        self._lines: set[_Line] = set()
        self._heard: dict[int, float] = {}  # when each rank that this one watches gave its last sign of life
        self._gone: dict[int, _Departure] = {}
        self._asked = False  # the main thread waits for a verdict: no grace
        self._failed_at = ""
        self._goodbye: str | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Liveness":
        if self._ranks.world_size > 1:
            self._connect()
            others = range(1, self._ranks.world_size) if self._ranks.first else [0]
            self._heard = dict.fromkeys(others, time.monotonic())
            self._thread = threading.Thread(target=self._watch, name="liveness", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._thread is None:
            return
        if isinstance(value, RuntimeError):  # torch's own: perhaps a collective whose other end is lost
            log.warning("%s; finding out whether a rank is lost", shorten(str(value).partition("\n")[0]))
            self._failed_at = "".join(traceback.format_tb(trace))
            self._asked = True
            self._thread.join(_VERDICT_S)  # ends this process if so
        how = "done" if value is None else "stopped" if isinstance(value, KeyboardInterrupt) else "failed"
        reason = f"{type(value).__name__}: {value}".partition("\n")[0] if how == "failed" else ""
        self._goodbye = f"gone {self._ranks.rank} {how} {shorten(reason)}"
        self._thread.join()

    def _connect(self) -> None:
        """Rank 0 listens at the address where torchrun's ranks met; only those who know the token are listened to."""
        address = os.environ["MASTER_ADDR"]
        if self._ranks.first:
            family = socket.getaddrinfo(address, None)[0][0]
            host = address if is_loopback(address) else ""  # the others may reach this node by another address of it
            self._server = socket.create_server((host, 0), family=family, backlog=self._ranks.world_size)
            self._server.setblocking(False)
            self._token = secrets.token_hex(16)
            self._selector.register(self._server, selectors.EVENT_READ)
            self._ranks.broadcast(f"{self._server.getsockname()[1]} {self._token}".encode())
        else:
            port, token = self._ranks.broadcast(b"").decode().split()
            connection = socket.create_connection((address, int(port)), timeout=self._lost_after_s)
            line = self._listen_to(connection)
            line.rank = 0
            line.send(f"hello {token} {self._ranks.rank}")

    def _listen_to(self, connection: socket.socket) -> _Line:
        line = _Line(connection)
        self._lines.add(line)
        self._selector.register(connection, selectors.EVENT_READ, line)
        return line

    def _watch(self) -> None:
        """The thread: listens, beats and judges until this rank leaves."""
        beat_s = self._lost_after_s / _BEATS
        before = beaten = time.monotonic()
        while self._goodbye is None:
            self._receive(_TICK_S)
            now = time.monotonic()
            if now - before > 2 * beat_s:  # this process itself was stopped or starved: that time proves nothing
                self._heard = {rank: min(now, heard + now - before) for rank, heard in self._heard.items()}
            before = now
            if now - beaten >= beat_s or self._asked:
                self._tell("beat")
                beaten = now
            self._judge(now)
        self._tell(self._goodbye)
        self._hang_up()

    def _receive(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                self._accept()
                continue
            line: _Line = key.data
            texts = line.read()
            for text in texts or ():
                self._understand(line, text)
            if texts is None:
                self._drop(line)
                if line.rank is not None:
                    self._depart(line.rank, "died", "")

    def _accept(self) -> None:
        """Makes room by hanging up on whoever has not said who it is for longest, or for too long."""
        assert self._server is not None
        with suppress(OSError):
            self._listen_to(self._server.accept()[0])
        strangers = sorted((line for line in self._lines if line.rank is None), key=lambda line: line.since)
        for index, line in enumerate(reversed(strangers)):
            if index >= _STRANGERS or time.monotonic() - line.since > _HELLO_S:
                self._drop(line)

    def _understand(self, line: _Line, text: str) -> None:
        """`hello TOKEN RANK`, `beat` or `gone RANK HOW REASON`."""
        word, _, rest = text.partition(" ")
        if line.rank is None:
            token, _, rank = rest.partition(" ")
            if word != "hello" or not secrets.compare_digest(token.encode(), self._token.encode()):
                self._drop(line)  # a stranger
                return
            line.rank = int(rank)
            for gone, departure in self._gone.items():
                line.send(f"gone {gone} {departure.how} {departure.reason}")
        elif word == "gone":
            rank, how, reason = rest.split(" ", 2)
            self._depart(int(rank), how, reason)
        self._heard[line.rank] = time.monotonic()

    def _depart(self, rank: int, how: str, reason: str) -> None:
        """The first word about a rank counts; rank 0 passes it on."""
        if rank not in self._gone:
            self._gone[rank] = _Departure(how, reason, time.monotonic())
            if self._ranks.first:
                self._tell(f"gone {rank} {how} {reason}")

    def _judge(self, now: float) -> None:
        for rank, heard in self._heard.items():
            if now - heard > self._lost_after_s:
                self._depart(rank, "silent", "")
        grace = {"stopped": self._lost_after_s, "failed": _OWN_ERROR_S}  # a rank that was stopped is often one of all
        for rank, (how, reason, at) in self._gone.items():
            if how != "done" and (self._asked or now - at >= grace.get(how, 0)):
                self._end(rank, how, reason)

    def _end(self, rank: int, how: str, reason: str) -> None:
        """Ends this process: the main thread is in a collective that nothing else ends."""
        what = {
            "stopped": "was stopped (SIGTERM or Ctrl-C) and has left the run",
            "failed": f"has failed: {reason}",
            "died": "is lost: its process was killed, or its connection was cut",
            "silent": f"is lost: silent for {self._lost_after_s:g} s (trainer.lost_after_s), node gone or process stuck",
        }[how]
        log.error(
            "%s %s. %s ends too. The job's recovery (max_restarts_on_errors) starts every trainer node again, and the run goes "
            "on from its newest checkpoint",
            *(self._name(rank), what, self._name(self._ranks.rank)),
        )
        log.error("%s was here:\n%s", self._name(self._ranks.rank), self._failed_at or watchdog.stacks())
        self._hang_up()
        logging.shutdown()
        os._exit(LOST)

    def _name(self, rank: int) -> str:
        """As the cluster names it: `rank 3 on ppo-trainer-1 (10.0.0.5)`."""
        node = rank // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        addresses = self._topology.node_ips
        return f"rank {rank} on {TRAINER}-{node}" + (f" ({addresses[node]})" if node < len(addresses) else "")

    def _tell(self, text: str) -> None:
        for line in self._lines:
            if line.rank is not None:
                line.send(text)

    def _drop(self, line: _Line) -> None:
        self._lines.discard(line)
        with suppress(KeyError, ValueError):
            self._selector.unregister(line.socket)
        line.socket.close()

    def _hang_up(self) -> None:
        """Waits a moment until the others have read the last words: closing a socket with unread input discards them."""
        if self._server is not None:
            self._selector.unregister(self._server)
            self._server.close()
        for line in self._lines:
            with suppress(OSError):
                line.socket.shutdown(socket.SHUT_WR)
        limit = time.monotonic() + _HANG_UP_S
        while self._lines and time.monotonic() < limit:
            for key, _ in self._selector.select(_TICK_S):
                if key.data.read() is None:
                    self._drop(key.data)
        for line in list(self._lines):
            self._drop(line)
        self._selector.close()
