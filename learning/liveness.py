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
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal

from pydantic import BaseModel

from common.errors import ServiceError, shorten
from common.process import progress, watchdog
from common.process.logs import event
from common.process.progress import Progress
from common.process.security import is_loopback
from common.process.topology import LOST, TRAINER, Topology
from common.process.watchdog import RankWhere, Where
from learning.ranks import Ranks

log = logging.getLogger(__name__)
# Number of beats within the limit of silence.
_BEATS = 9
_TICK_S = 0.2
# An error often hits all ranks: each gets this many seconds to report its own before it ends
# because of another's.
_OWN_ERROR_S = 5.0
# Seconds to wait, after a failed collective, for the news that a rank is lost.
_VERDICT_S = 10.0
# Seconds that an ending rank waits for others to read why: closing a socket with unread input
# discards sent data.
_SHUTDOWN_S = 5.0
_MAX_LINE_BYTES = 1 << 18
# In JSON a character takes at most 6 bytes, so that the answer of a rank fits into a line.
_MAX_STACKS_CHARS = 40_000
_MAX_AWAITED = 20
_MAX_STUCK_CHARS = 2000
# Seconds in which a rank says where it is; its thread is free unless the process is stopped.
_ANSWER_S = 2.0
# Connections that have not sent a valid token yet: how many may be open, and for how many seconds.
_MAX_UNAUTHENTICATED = 64
_HANDSHAKE_S = 10.0


class _Message(BaseModel):
    """What one rank tells another, a line of JSON."""

    word: Literal["beat", "gone", "stuck", "where", "here"]
    """A sign of life; a rank's end; the end of all, because none makes progress; the question where
    a rank is, and its answer."""
    rank: int = 0
    """The rank that is gone."""
    how: str = ""
    """How it ended: done, stopped, failed, died or silent."""
    reason: str = ""
    """Why it failed, or where all ranks stand that are stuck."""
    code: str = ""
    """The code of the error with which it failed."""
    moves: int = 0
    """The count of progress of the rank that sends a beat."""
    place: str = ""
    """What that rank does."""
    where: Where | None = None
    """The answer."""

    def line(self) -> bytes:
        return self.model_dump_json(exclude_defaults=True).encode() + b"\n"


@dataclass
class _Known:
    """What a rank has last said of itself."""

    heard: float = field(default_factory=time.monotonic)
    moves: int = -1
    moved: float = field(default_factory=time.monotonic)
    place: str = "starting"

    def beat(self, moves: int, place: str) -> None:
        if moves != self.moves:
            self.moves = moves
            self.moved = time.monotonic()
        self.place = place

    def __str__(self) -> str:
        return f"{self.place} (no progress for {time.monotonic() - self.moved:.0f} s)"


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
        self._stuck_after_s = stuck_after_s
        self._token = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._connections: dict[int, asyncio.StreamWriter] = {}
        self._unauthenticated: list[asyncio.StreamWriter] = []
        self._listeners: set[asyncio.Task[None]] = set()
        self._all_joined = threading.Event()
        watched = range(ranks.world_size) if ranks.is_rank_zero else [0]
        # What the watched ranks have said. Rank 0 is among its own: its progress counts too.
        self._known = {rank: _Known() for rank in watched}
        # The ranks that have ended, and when this rank heard of it.
        self._gone: dict[int, tuple[_Message, float]] = {}
        self._stuck_at = ""  # where all ranks stand, once none makes progress any more
        self._verdict_wanted = False  # the main thread waits for a verdict: no grace
        self._failed_at = ""
        self._goodbye: _Message | None = None
        self.before_end: Callable[..., str] = lambda reason: ""
        """Called with `reason` before this rank ends because of another; returns the last line."""
        self._answers: dict[int, Where] = {}
        self._answered = asyncio.Event()
        self._asking = threading.Lock()

    def __enter__(self) -> "Liveness":
        if self._ranks.world_size > 1:
            endpoint = self._endpoint()
            # Made here: what rank 0 asks before its thread has begun waits in the loop.
            loop = asyncio.new_event_loop()
            self._loop = loop
            self._thread = threading.Thread(
                target=self._run, args=(loop, endpoint), name="liveness", daemon=True
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
        goodbye = _Message(word="gone", rank=self._ranks.rank, how="done")
        if isinstance(value, KeyboardInterrupt):
            goodbye.how = "stopped"
        elif value is not None:
            goodbye.how = "failed"
            goodbye.reason = shorten(f"{type(value).__name__}: {value}".partition("\n")[0])
            # Others have a code, too: that of a SystemExit is a number.
            goodbye.code = value.code if isinstance(value, ServiceError) else type(value).__name__
        if self._ranks.is_rank_zero:
            # A rank that joins late would find the connection closed, and take this one for lost.
            self._all_joined.wait(self._lost_after_s)
        self._goodbye = goodbye
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
            with suppress(TimeoutError, CancelledError):
                asked.result(2 * _ANSWER_S)
            found = list[RankWhere]()
            for rank in range(1, self._ranks.world_size):
                where = self._answers.get(rank) or Where()
                found.append(RankWhere(rank=rank, name=self._name(rank), **where.model_dump()))
        return found

    async def _ask(self) -> None:
        self._answers = {}
        asked = len(self._connections)
        self._broadcast(_Message(word="where"))
        async with asyncio.timeout(_ANSWER_S):
            while len(self._answers) < asked:
                self._answered.clear()
                await self._answered.wait()

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
        server = socket.create_server(
            (host, 0),
            family=socket.getaddrinfo(address, None)[0][0],
            backlog=self._ranks.world_size,
        )
        self._token = secrets.token_hex(16)
        self._ranks.broadcast((server.getsockname()[1], self._token))
        return server

    def _run(self, loop: asyncio.AbstractEventLoop, endpoint: socket.socket) -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(self._watch(endpoint))

    async def _watch(self, endpoint: socket.socket) -> None:
        """Runs the thread: listens, beats and judges until this rank ends."""
        server: asyncio.Server | None = None
        if self._ranks.is_rank_zero:
            server = await asyncio.start_server(self._accept, sock=endpoint, limit=_MAX_LINE_BYTES)
        else:
            reader, writer = await asyncio.open_connection(sock=endpoint, limit=_MAX_LINE_BYTES)
            writer.write(f"hello {self._token} {self._ranks.rank}\n".encode())
            self._listen_to(0, reader, writer)
        beat_s = min(self._lost_after_s, self._stuck_after_s) / _BEATS
        all_ranks = Progress("all ranks", self._stuck_after_s, counts=False)
        before = time.monotonic()
        beaten = before
        while self._goodbye is None:
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            pause = now - before
            if pause > 2 * beat_s:
                # This process itself was stopped or starved: the silence proves nothing.
                for known in self._known.values():
                    known.heard = min(now, known.heard + pause)
            before = now

            moves = progress.total(with_others=True)
            at = watchdog.place()
            place = "outside the training loop" if at is None else at[0]
            if now - beaten >= beat_s or self._verdict_wanted:
                self._broadcast(_Message(word="beat", moves=moves, place=place))
                beaten = now
            if self._ranks.is_rank_zero:
                own = self._known[0]
                own.heard = now
                own.beat(moves, place)
                all_ranks.saw(sum(known.moves for known in self._known.values()))
                if all_ranks.is_stuck:
                    self._call_all_stuck()
            if self._stuck_at:  # first, because the others end now too
                await self._end_stuck()
            await self._judge(now)
        self._broadcast(self._goodbye)
        if server is not None:
            server.close()
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
        self._listen_to(int(rank), reader, writer)
        if len(self._connections.keys() | self._gone) >= self._ranks.world_size - 1:
            self._all_joined.set()
        for message, _ in self._gone.values():
            writer.write(message.line())

    def _listen_to(
        self, peer: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._connections[peer] = writer
        self._listeners.add(asyncio.create_task(self._listen(peer, reader, writer)))

    async def _listen(
        self, peer: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Reads messages until the connection ends."""
        known = self._known[peer]
        with suppress(ValueError, OSError):
            while (line := await reader.readline()).endswith(b"\n"):
                known.heard = time.monotonic()
                message = _Message.model_validate_json(line)
                match message.word:
                    case "beat":
                        known.beat(message.moves, message.place)
                    case "gone":
                        self._depart(message)
                    case "stuck":
                        self._stuck_at = message.reason
                    case "where":
                        where = watchdog.where()
                        where.awaited = where.awaited[:_MAX_AWAITED]
                        where.stacks = shorten(where.stacks, _MAX_STACKS_CHARS)
                        writer.write(_Message(word="here", where=where).line())
                    case "here":
                        self._answers[peer] = message.where or Where()
                        self._answered.set()
        self._connections.pop(peer, None)
        writer.close()
        self._depart(_Message(word="gone", rank=peer, how="died"))

    def _depart(self, message: _Message) -> None:
        """Records a rank's end; only the first message about it counts. Rank 0 relays it."""
        if message.rank not in self._gone:
            self._gone[message.rank] = message, time.monotonic()
            if self._ranks.is_rank_zero:
                self._broadcast(message)

    def _broadcast(self, message: _Message) -> None:
        for writer in self._connections.values():
            writer.write(message.line())  # never waits; `_listen` notices a closed connection

    async def _judge(self, now: float) -> None:
        for rank, known in self._known.items():
            if now - known.heard > self._lost_after_s:
                self._depart(_Message(word="gone", rank=rank, how="silent"))
        # Often all ranks were stopped, or have the same error.
        grace = {"stopped": self._lost_after_s, "failed": _OWN_ERROR_S}
        causes = [(message, at) for message, at in self._gone.values() if message.how != "done"]
        for message, at in causes:
            if self._verdict_wanted or now - at >= grace.get(message.how, 0):
                # The first to go is the cause: others end because of it. One rank writes the
                # report: rank 0, or the next one if that is lost and cannot.
                is_lost = message.rank == 0 and message.how in ("died", "silent")
                await self._end(causes[0][0], writer=int(is_lost))

    def _call_all_stuck(self) -> None:
        """Tells the other ranks, from rank 0, that none has made progress for too long."""
        where = "; ".join(f"{self._name(rank)}: {known}" for rank, known in self._known.items())
        self._stuck_at = shorten(where, _MAX_STUCK_CHARS)
        self._broadcast(_Message(word="stuck", reason=self._stuck_at))

    async def _end_stuck(self) -> None:
        """Ends this process, because no rank makes progress and nobody knows when one would."""
        log.error("where all ranks stand: %s", self._stuck_at)
        await self._exit(
            f"no rank has made progress for {self._stuck_after_s:g} s (limits.stuck_after_s)",
            event("rank_lost", how="stuck"),
            reports=self._ranks.is_rank_zero,
        )

    async def _end(self, message: _Message, writer: int) -> None:
        """Ends this process, because nothing else can end the collective in the main thread."""
        what = {
            "stopped": "was stopped (SIGTERM or Ctrl-C) and has left the run",
            "failed": f"has failed: {message.reason}",
            "died": "is lost: its process was killed, or its connection was cut",
            "silent": f"is lost: silent for {self._lost_after_s:g} s (limits.lost_after_s), "
            "node gone or process stuck",
        }[message.how]
        await self._exit(
            f"{self._name(message.rank)} {what}",
            event("rank_lost", number=message.rank, how=message.how, cause=message.code),
            reports=self._ranks.rank == writer,
        )

    async def _exit(self, reason: str, about: dict[str, object], *, reports: bool) -> None:
        # The reason has a line of its own, since `rlhf diagnose` shows it.
        log.error("%s", reason, extra=about)
        own_name = self._name(self._ranks.rank)
        log.error(
            "%s ends too. The job's recovery (max_restarts_on_errors) starts every trainer "
            "node again, and the run continues from its newest checkpoint",
            own_name,
        )
        log.error(
            "%s was here:\n%s",
            own_name,
            self._failed_at or watchdog.stacks(),
            extra=event("rank_place", rank=own_name),
        )
        await self._close()
        if reports:
            said = await asyncio.to_thread(self.before_end, reason=reason)
            if said:
                log.error("%s", said)
        logging.shutdown()
        os._exit(LOST)

    async def _close(self) -> None:
        """Closes every connection once its peer has read the last message, or after a moment."""
        for writer in self._unauthenticated:
            writer.transport.abort()
        for writer in self._connections.values():
            with suppress(OSError):
                writer.write_eof()
        self._connections = {}  # nothing can be sent after the end
        if self._listeners:
            await asyncio.wait(self._listeners, timeout=_SHUTDOWN_S)

    def _name(self, rank: int) -> str:
        """Names a rank as the cluster does: `rank 3 on ppo-trainer-1 (10.0.0.5)`."""
        node = rank // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        addresses = self._topology.node_ips
        address = f" ({addresses[node]})" if node < len(addresses) else ""
        return f"rank {rank} on {TRAINER}-{node}{address}"
