"""Watches the ranks of a run: when one is lost, the others exit and name it instead of waiting for
it in a collective.

    rank k ──beat, "gone k …"──► rank 0 ──beat, "gone j …", "stuck …"──► every other rank

A thread of every rank holds one TCP connection to rank 0, which relays what it receives. A closed
connection means a killed process and is noticed at once; silence means a node without power or
network, or a stopped process. A rank in a long computation still sends beats, because torch
releases the interpreter lock in kernels and collectives. A rank that ends by itself first sends the
reason. ADR 6 explains why this is not part of rank 0's HTTP server.

A beat also carries the rank's count of progress (`common.process.progress`) and what it is doing.
A collective waits as long as it must for a slow rank that works. Only when no rank makes progress
any more does rank 0 end all of them, and each says where it stands.
"""

import asyncio
import logging
import os
import secrets
import socket
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import suppress
from types import TracebackType
from typing import NamedTuple

from common.errors import ServiceError, shorten
from common.process import progress, watchdog
from common.process.logs import SEPARATOR, event
from common.process.progress import Progress
from common.process.security import is_loopback
from common.process.topology import LOST, TRAINER, Topology
from common.process.watchdog import RankWhere, Where
from learning.ranks import Ranks

log = logging.getLogger(__name__)
_BEATS = 9
"""Number of beats within the limit of silence."""
_TICK_S = 0.2
_OWN_ERROR_S = 5.0
"""An error often hits all ranks: each gets this many seconds to report its own before it ends
because of another's."""
_VERDICT_S = 10.0
"""Seconds to wait, after a failed collective, for the news that a rank is lost."""
_SHUTDOWN_S = 5.0
"""Seconds that an ending rank waits for others to read why: closing a socket with unread input
discards sent data."""
_MAX_LINE_BYTES = 1 << 16
_MAX_STACKS_CHARS = 40_000
_MAX_AWAITED = 20
_CODE = f"{SEPARATOR}code: "
"""Stands between the reason and the code of the error with which a rank failed."""
_MAX_STUCK_CHARS = 2000
_ANSWER_S = 2.0
"""Seconds in which a rank says where it is; its thread is free unless the process is stopped."""
_MAX_UNAUTHENTICATED = 64
_HANDSHAKE_S = 10.0
"""Connections that have not sent a valid token yet: how many may be open, and for how many
seconds."""


class _Departure(NamedTuple):
    how: str
    """done, stopped, failed, died or silent."""
    reason: str
    at: float


class _Doing:
    """What a rank does, and for how long it has made no progress."""

    def __init__(self) -> None:
        self.moves = -1
        self.since = time.monotonic()
        self.place = "starting"

    def heard(self, moves: int, place: str) -> None:
        if moves != self.moves:
            self.moves = moves
            self.since = time.monotonic()
        self.place = place

    def __str__(self) -> str:
        return f"{self.place} (no progress for {time.monotonic() - self.since:.0f} s)"


class Liveness:
    """A context manager that watches the other ranks while inside; does nothing in a single
    process.

    A rank is lost after `lost_after_s` seconds of silence. All ranks end when none has made
    progress for `stuck_after_s` seconds.
    """

    def __init__(
        self, ranks: Ranks, topology: Topology, lost_after_s: float, *, stuck_after_s: float
    ) -> None:
        self._ranks = ranks
        self._topology = topology
        self._lost_after_s = lost_after_s
        self._token = ""
        self._server: asyncio.Server | None = None
        self._connections: dict[int, asyncio.StreamWriter] = {}
        self._unauthenticated: list[asyncio.StreamWriter] = []
        self._listeners: set[asyncio.Task[None]] = set()
        self._all_joined = threading.Event()
        self._heard: dict[int, float] = {}  # the last sign of life of each watched rank
        self._gone: dict[int, _Departure] = {}
        self._doing: dict[int, _Doing] = {}  # what each rank last said of itself
        self._stuck_after_s = stuck_after_s
        self._stuck_at = ""  # where all ranks stand, once none makes progress any more
        self._verdict_wanted = False  # the main thread waits for a verdict: no grace
        self._failed_at = ""
        self._final_message: str | None = None
        self._thread: threading.Thread | None = None
        self.before_end: Callable[..., str] = lambda reason: ""
        """Called with `reason` before this rank ends because of another; returns the last line."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._answers: dict[int, Where] = {}
        self._answered = asyncio.Event()
        self._asking = threading.Lock()

    def __enter__(self) -> "Liveness":
        if self._ranks.world_size > 1:
            others = range(1, self._ranks.world_size) if self._ranks.is_rank_zero else [0]
            self._heard = dict.fromkeys(others, time.monotonic())
            endpoint = self._endpoint()
            self._thread = threading.Thread(
                target=lambda: asyncio.run(self._watch(endpoint)), name="liveness", daemon=True
            )
            self._thread.start()
            if self._ranks.is_rank_zero:
                watchdog.ask_other_ranks_with(self.where_others_are)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._thread is None:
            return
        if self._ranks.is_rank_zero:
            watchdog.ask_other_ranks_with(None)
        # Torch raises RuntimeError, perhaps in a collective with a lost rank.
        if isinstance(value, RuntimeError):
            log.warning(
                "%s; checking whether a rank is lost", shorten(str(value).partition("\n")[0])
            )
            self._failed_at = "".join(traceback.format_tb(trace))
            self._verdict_wanted = True
            self._thread.join(_VERDICT_S)  # ends this process if so
        reason = ""
        if value is None:
            how = "done"
        elif isinstance(value, KeyboardInterrupt):
            how = "stopped"
        else:
            how = "failed"
            code = value.code if isinstance(value, ServiceError) else type(value).__name__
            words = f"{type(value).__name__}: {value}".partition("\n")[0]
            reason = f"{shorten(words)}{_CODE}{code}"
        if self._ranks.is_rank_zero:
            # A rank that joins late would find the connection closed, and take this one for lost.
            self._all_joined.wait(self._lost_after_s)
        self._final_message = f"gone {self._ranks.rank} {how} {reason}"
        self._thread.join()

    def where_others_are(self) -> list[RankWhere]:
        """Asks the other ranks what they are doing; called on rank 0, in any thread but the one of
        this class. A rank that does not answer in `_ANSWER_S` is in the list too.
        """
        loop = self._loop
        if loop is None or loop.is_closed():
            return []
        with self._asking:
            asked = asyncio.run_coroutine_threadsafe(self._ask(), loop)
            try:
                answers = asked.result(2 * _ANSWER_S)
            except (TimeoutError, CancelledError):
                answers = {}
        found = list[RankWhere]()
        for rank in range(1, self._ranks.world_size):
            where = answers.get(rank) or Where()
            found.append(RankWhere(rank=rank, name=self._name(rank), **where.model_dump()))
        return found

    async def _ask(self) -> dict[int, Where]:
        self._answers = {}
        self._answered.clear()
        asked = len(self._connections)
        self._broadcast("where")
        with suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_S):
                while len(self._answers) < asked:
                    await self._answered.wait()
                    self._answered.clear()
        return self._answers

    def _endpoint(self) -> socket.socket:
        """Opens the socket: rank 0 listens at torchrun's rendezvous address, the others connect to
        it.
        """
        address = os.environ["MASTER_ADDR"]
        if not self._ranks.is_rank_zero:
            port, self._token = self._ranks.broadcast((0, ""))
            return socket.create_connection((address, port), timeout=self._lost_after_s)
        # Others may reach this node at another of its addresses.
        host = address if is_loopback(address) else ""
        family = socket.getaddrinfo(address, None)[0][0]
        server = socket.create_server((host, 0), family=family, backlog=self._ranks.world_size)
        self._token = secrets.token_hex(16)
        self._ranks.broadcast((server.getsockname()[1], self._token))
        return server

    async def _watch(self, endpoint: socket.socket) -> None:
        """Runs the thread: listens, beats and judges until this rank ends."""
        self._loop = asyncio.get_running_loop()
        if self._ranks.is_rank_zero:
            self._server = await asyncio.start_server(
                self._accept, sock=endpoint, limit=_MAX_LINE_BYTES
            )
        else:
            reader, writer = await asyncio.open_connection(sock=endpoint, limit=_MAX_LINE_BYTES)
            self._connections[0] = writer
            self._broadcast(f"hello {self._token} {self._ranks.rank}")
            self._listeners.add(asyncio.create_task(self._listen(0, reader, writer)))
        beat_s = min(self._lost_after_s, self._stuck_after_s) / _BEATS
        all_ranks = Progress("all ranks", self._stuck_after_s, counts=False)
        before = time.monotonic()
        beaten = before
        while self._final_message is None:
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            pause = now - before
            if pause > 2 * beat_s:
                # This process itself was stopped or starved: the silence proves nothing.
                for rank, heard in self._heard.items():
                    self._heard[rank] = min(now, heard + pause)
            before = now
            if now - beaten >= beat_s or self._verdict_wanted:
                self._broadcast(f"beat {progress.total(with_others=True)} {_place()}")
                beaten = now
            if self._ranks.is_rank_zero:
                self._judge_progress(all_ranks)
            if self._stuck_at:  # first, because the others end now too
                await self._end_stuck(self._stuck_at)
            await self._judge(now)
        self._broadcast(self._final_message)
        await self._close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Accepts, on rank 0, connections that send `hello TOKEN RANK`; closes all others."""
        self._unauthenticated.append(writer)
        if len(self._unauthenticated) > _MAX_UNAUTHENTICATED:
            self._unauthenticated[0].transport.abort()
        hello = b""
        with suppress(TimeoutError, ValueError, OSError):
            hello = await asyncio.wait_for(reader.readline(), _HANDSHAKE_S)
        self._unauthenticated.remove(writer)
        greeting, _, rank = hello.rpartition(b" ")
        if not secrets.compare_digest(greeting, f"hello {self._token}".encode()):
            writer.close()
            return
        self._connections[int(rank)] = writer
        if len(self._connections) + len(self._gone) >= self._ranks.world_size - 1:
            self._all_joined.set()
        for gone, departure in self._gone.items():
            writer.write(f"gone {gone} {departure.how} {departure.reason}\n".encode())
        self._listeners.add(asyncio.create_task(self._listen(int(rank), reader, writer)))

    async def _listen(
        self, peer: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Reads `beat MOVES PLACE`, `gone RANK HOW REASON`, `stuck WHERE`, the question `where` and
        its answer `here JSON` until the connection ends.
        """
        with suppress(ValueError, OSError):
            while (line := await reader.readline()).endswith(b"\n"):
                self._heard[peer] = time.monotonic()
                word, _, rest = line.decode(errors="replace").rstrip("\n").partition(" ")
                if word == "gone":
                    rank, how, reason = rest.split(" ", 2)
                    self._depart(int(rank), how, reason)
                elif word == "stuck":
                    self._stuck_at = rest
                elif word == "beat":
                    moves, _, place = rest.partition(" ")
                    self._doing.setdefault(peer, _Doing()).heard(int(moves), place)
                elif word == "where":
                    writer.write(_here())
                elif word == "here":
                    self._answers[peer] = Where.model_validate_json(rest)
                    self._answered.set()
        del self._connections[peer]
        writer.close()
        self._depart(peer, "died", "")

    def _depart(self, rank: int, how: str, reason: str) -> None:
        """Records a rank's end; only the first message about it counts. Rank 0 relays it."""
        if rank not in self._gone:
            self._gone[rank] = _Departure(how, reason, time.monotonic())
            if self._ranks.is_rank_zero:
                self._broadcast(f"gone {rank} {how} {reason}")

    def _broadcast(self, text: str) -> None:
        for writer in self._connections.values():
            # It never waits; `_listen` notices a closed connection.
            writer.write(text.encode() + b"\n")

    async def _judge(self, now: float) -> None:
        for rank, heard in self._heard.items():
            if now - heard > self._lost_after_s:
                self._depart(rank, "silent", "")
        # Often all ranks were stopped, or have the same error.
        grace = {"stopped": self._lost_after_s, "failed": _OWN_ERROR_S}
        for rank, (how, reason, at) in self._gone.items():
            if how != "done" and (self._verdict_wanted or now - at >= grace.get(how, 0)):
                await self._end(rank, how, reason)

    def _judge_progress(self, all_ranks: Progress) -> None:
        """Tells the other ranks, from rank 0, when none has made progress for too long."""
        self._doing.setdefault(0, _Doing()).heard(progress.total(with_others=True), _place())
        all_ranks.saw(sum(doing.moves for doing in self._doing.values()))
        if not all_ranks.is_stuck:
            return
        where = "; ".join(
            f"{self._name(rank)}: {doing}" for rank, doing in sorted(self._doing.items())
        )
        self._stuck_at = shorten(where, _MAX_STUCK_CHARS)
        self._broadcast(f"stuck {self._stuck_at}")

    async def _end_stuck(self, where: str) -> None:
        """Ends this process, because no rank makes progress and nobody knows when one would."""
        reason = (
            f"no rank has made progress for {self._stuck_after_s:g} s (limits.stuck_after_s). "
            f"{where}. All ranks end"
        )
        log.error(
            "%s; the job's recovery (max_restarts_on_errors) starts them again, and the run "
            "continues from its newest checkpoint",
            reason,
            extra=event("rank_lost", rank="", how="stuck"),
        )
        await self._exit(reason, reports=self._ranks.is_rank_zero)

    async def _end(self, rank: int, how: str, reason: str) -> None:
        """Ends this process, because nothing else can end the collective in the main thread."""
        reason, _, code = reason.partition(_CODE)
        what = {
            "stopped": "was stopped (SIGTERM or Ctrl-C) and has left the run",
            "failed": f"has failed: {reason}",
            "died": "is lost: its process was killed, or its connection was cut",
            "silent": f"is lost: silent for {self._lost_after_s:g} s (limits.lost_after_s), "
            "node gone or process stuck",
        }[how]
        own_name = self._name(self._ranks.rank)
        reason = f"{self._name(rank)} {what}. {own_name} ends too"
        log.error(
            "%s. The job's recovery (max_restarts_on_errors) starts every trainer "
            "node again, and the run continues from its newest checkpoint",
            reason,
            extra=event("rank_lost", rank=self._name(rank), how=how, cause=code),
        )
        # One rank writes the report: rank 0, or the next one if that is lost and cannot.
        writer = 1 if rank == 0 and how in ("died", "silent") else 0
        await self._exit(reason, reports=self._ranks.rank == writer)

    async def _exit(self, reason: str, *, reports: bool) -> None:
        own_name = self._name(self._ranks.rank)
        place = self._failed_at or watchdog.stacks()
        log.error("%s was here:\n%s", own_name, place, extra=event("rank_place", rank=own_name))
        await self._close()
        if reports:
            said = await asyncio.to_thread(self.before_end, reason=reason)
            if said:
                log.error("%s", said)
        logging.shutdown()
        os._exit(LOST)

    async def _close(self) -> None:
        """Closes every connection once its peer has read the last message, or after a moment."""
        if self._server is not None:
            self._server.close()
        for writer in self._unauthenticated:
            writer.transport.abort()
        for writer in self._connections.values():
            with suppress(OSError):
                writer.write_eof()
        if self._listeners:
            await asyncio.wait(self._listeners, timeout=_SHUTDOWN_S)

    def _name(self, rank: int) -> str:
        """Names a rank as the cluster does: `rank 3 on ppo-trainer-1 (10.0.0.5)`."""
        node = rank // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        addresses = self._topology.node_ips
        address = f" ({addresses[node]})" if node < len(addresses) else ""
        return f"rank {rank} on {TRAINER}-{node}{address}"


def _place() -> str:
    """Returns what the training loop of this process is doing."""
    place = watchdog.place()
    return "outside the training loop" if place is None else place[0]


def _here() -> bytes:
    """Returns the line that says where this process is, shorter than `_MAX_LINE_BYTES`."""
    where = watchdog.where()
    where.awaited = where.awaited[:_MAX_AWAITED]
    stacks = where.stacks
    room = _MAX_STACKS_CHARS
    while True:
        where.stacks = shorten(stacks, room)
        line = f"here {where.model_dump_json()}\n".encode()
        if len(line) < _MAX_LINE_BYTES:
            return line
        room //= 2  # JSON escapes have made it longer
