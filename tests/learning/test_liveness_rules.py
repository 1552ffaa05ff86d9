"""The rules by which a rank watches the others, without sockets: on a clock of the test, and by a
look at every case."""

import asyncio
import itertools
import json
import logging
import os
import random
import threading
from concurrent.futures import CancelledError
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import ServiceError
from common.process import progress as progress_module
from common.process import watchdog
from common.process.topology import LOST, Topology
from common.process.watchdog import Awaited, Where
from learning import liveness
from learning.liveness import Liveness, _Message

TOKEN = "the token"  # noqa: S105
LOST_S = 18.0
STUCK_S = 90.0
TICK_S = 0.2
BEAT_S = LOST_S / 9


def rank_of(number: int, size: int = 3, address: str = "10.0.0.") -> Liveness:
    ranks: Any = SimpleNamespace(rank=number, world_size=size, is_rank_zero=number == 0)
    nodes = tuple(f"{address}{node}" for node in range(size))
    return Liveness(ranks, Topology(node_ips=nodes), LOST_S, stuck_after_s=STUCK_S)


HOW = ("done", "stopped", "failed", "died", "silent")
GRACE_S = {"stopped": LOST_S, "failed": 5.0}


@pytest.mark.parametrize("seed", range(60))
def test_a_rank_ends_because_of_the_first_that_has_gone_and_not_before_its_grace(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    draw = random.Random(seed)
    number = draw.randint(0, 2)
    rank = rank_of(number)
    now = 1000.0
    monkeypatch.setattr(liveness, "time", SimpleNamespace(monotonic=lambda: now))
    ends: list[tuple[int, str, int]] = []
    told: list[int] = []

    async def end(message: _Message, writer: int) -> None:
        ends.append((message.rank, message.how, writer))

    monkeypatch.setattr(rank, "_end", end)
    monkeypatch.setattr(rank, "_broadcast", lambda message: told.append(message.rank))
    gone = []
    for other in draw.sample([each for each in range(3) if each != number], draw.randint(0, 2)):
        at = now - draw.choice([0.0, 4.9, 5.0, 17.9, 18.0])
        gone.append((other, draw.choice(HOW), at))
    for other, how, at in gone:
        rank._gone[other] = _Message(word="gone", rank=other, how=how), at
    wanted = draw.random() < 0.3
    rank._verdict_wanted = wanted
    for other, known in rank._known.items():
        known.heard = now - draw.choice([0.0, 18.0, 18.1])
        if now - known.heard > LOST_S and other not in [each for each, _, _ in gone]:
            gone.append((other, "silent", now))
    asyncio.run(rank._judge(now))

    causes = [each for each in gone if each[1] != "done"]
    due = [(other, how) for other, how, at in causes if wanted or now - at >= GRACE_S.get(how, 0.0)]
    writers = [int(other == 0 and how in ("died", "silent")) for other, how in due]
    assert ends == [(causes[0][0], causes[0][1], writer) for writer in writers]
    new = [other for other, how, at in gone if how == "silent" and at == now]
    assert set(told) <= set(new)
    assert number == 0 or told == [], "only rank 0 passes it on"


class Watch:
    """The thread of a rank on a clock of the test, with what the other ranks say at each tick."""

    def __init__(self, patch: pytest.MonkeyPatch, until: float, *, number: int = 0) -> None:
        self.now = 1000.0
        self.until = self.now + until
        self.pauses: dict[int, float] = {}
        self.beats: list[tuple[float, _Message]] = []
        self.moves = 0
        self.ticks = 0
        clock = SimpleNamespace(monotonic=lambda: self.now)
        patch.setattr(liveness, "time", clock)
        patch.setattr(progress_module, "time", clock)
        self.rank = rank_of(number)
        self.done: list[str] = []
        server = SimpleNamespace(close=lambda: self.done.append("server"))

        async def start_server(*_: Any, **__: Any) -> Any:
            return server

        names = {name: getattr(asyncio, name) for name in ("get_running_loop", "wait")}
        patch.setattr(
            liveness,
            "asyncio",
            SimpleNamespace(sleep=self.sleep, start_server=start_server, **names),
        )
        patch.setattr(liveness, "progress", SimpleNamespace(total=self._total))
        patch.setattr(watchdog, "place", lambda: None if self.moves < 3 else ("step 3", 1.0))
        patch.setattr(self.rank, "_broadcast", self._broadcast)
        patch.setattr(self.rank, "_judge", self._judge)
        patch.setattr(self.rank, "_end_stuck", self._end_stuck)
        patch.setattr(self.rank, "_close", self._close)
        patch.setattr(progress_module, "moved", self._moved)
        self._thread = threading.current_thread()
        self.judged: list[float] = []
        self.stuck: list[float] = []

    def _total(self, *, with_others: bool) -> int:
        assert with_others
        return self.moves

    def _moved(self) -> None:
        """What this rank counts as progress of its own."""
        self.moves += threading.current_thread() is self._thread

    async def _close(self) -> None:
        self.done.append(self.beats[-1][1].word)

    def _broadcast(self, message: _Message) -> None:
        self.beats.append((self.now, message))

    async def _judge(self, now: float) -> None:
        self.judged.append(now)

    async def _end_stuck(self) -> None:
        self.stuck.append(self.now)
        self.rank._goodbye = _Message(word="gone", how="done")

    async def sleep(self, seconds: float) -> None:
        self.ticks += 1
        self.now += seconds + self.pauses.get(self.ticks, 0.0)
        self.tick()
        if self.now >= self.until:
            self.rank._goodbye = _Message(word="gone", how="done")

    def tick(self) -> None:
        """What happens while the thread sleeps."""

    def run(self) -> None:
        asyncio.run(self.rank._watch(None))  # type: ignore[arg-type]


def test_beats_come_nine_times_within_the_limit_of_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch = Watch(monkeypatch, until=20.0)

    def tick() -> None:
        watch.moves = watch.ticks // 20

    monkeypatch.setattr(watch, "tick", tick)
    watch.run()
    *beats, (_, last) = watch.beats
    assert last.word == "gone"
    assert watch.done == ["server", "gone"], "connections are closed after the last word"
    times = [at for at, _ in beats]
    apart = [after - before for before, after in zip([1000.0, *times], times, strict=False)]
    assert all(BEAT_S - 1e-6 <= each <= BEAT_S + TICK_S + 1e-6 for each in apart)
    assert len(beats) >= 8
    for at, message in beats:
        moves = round((at - 1000.0) / TICK_S) // 20
        assert (message.word, message.moves) == ("beat", moves)
        assert message.place == ("outside the training loop" if moves < 3 else "step 3")
    assert len(watch.judged) == watch.ticks
    assert watch.rank._known[0].heard == pytest.approx(watch.now)
    assert watch.rank._known[0].moves == watch.moves


def test_a_beat_does_not_wait_when_a_verdict_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch, until=1.0)
    watch.rank._verdict_wanted = True
    watch.run()
    assert [message.word for _, message in watch.beats] == ["beat"] * watch.ticks + ["gone"]


@pytest.mark.parametrize("pause_s", [3.0, 3.9, 4.2, 500.0])
def test_silence_while_this_process_was_stopped_does_not_count(
    monkeypatch: pytest.MonkeyPatch, pause_s: float
) -> None:
    """A pause of more than two beats was its own."""
    watch = Watch(monkeypatch, until=pause_s + 2.0)
    watch.pauses = {5: pause_s}
    watch.rank._known[1].heard = 999.0
    watch.rank._known[2].heard = 1001.5
    watch.run()
    is_own = pause_s + TICK_S > 2 * BEAT_S
    shift = pause_s + TICK_S if is_own else 0.0
    assert watch.rank._known[1].heard == pytest.approx(999.0 + shift)
    late = 1000.0 + 5 * TICK_S + pause_s
    expected = min(late, 1001.5 + shift) if is_own else 1001.5
    assert watch.rank._known[2].heard == pytest.approx(expected)


@pytest.mark.parametrize("mover", [None, 0, 1, 2])
def test_all_are_stuck_once_nobody_has_moved_for_the_limit(
    monkeypatch: pytest.MonkeyPatch, mover: int | None
) -> None:
    watch = Watch(monkeypatch, until=400.0)

    def tick() -> None:
        if mover == 0:
            watch.moves = int(min(watch.now, 1200.0))
        elif mover is not None:
            watch.rank._known[mover].beat(int(min(watch.now, 1200.0)), "a step")

    monkeypatch.setattr(watch, "tick", tick)
    watch.run()
    [at] = watch.stuck
    since = 1000.0 if mover is None else 1200.0
    assert since + STUCK_S <= at + 1.0
    assert at <= since + STUCK_S + 2.0
    told = [message for _, message in watch.beats if message.word == "stuck"]
    assert [message.reason for message in told] == [watch.rank._stuck_at]
    where = watch.rank._stuck_at.split("; ")
    assert [each.partition(":")[0] for each in where] == [
        f"rank {n} on ppo-trainer-{n} (10.0.0.{n})" for n in range(3)
    ]
    silent = f"(no progress for {at - (since if mover else 1000.0):.0f} s)"
    if mover:
        assert f"a step {silent}" in where[mover]


class Stopped(ServiceError):
    code = "no_room"


@pytest.mark.parametrize(
    ("error", "how", "reason", "code"),
    [
        (None, "done", "", ""),
        (KeyboardInterrupt(), "stopped", "", ""),
        (SystemExit(3), "failed", "SystemExit: 3", "SystemExit"),
        (ValueError("one\ntwo\nthree"), "failed", "ValueError: one", "ValueError"),
        (Stopped("full"), "failed", "Stopped: full", "no_room"),
    ],
)
@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_leaves_with_the_reason_for_its_end(
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    error: BaseException | None,
    how: str,
    reason: str,
    code: str,
) -> None:
    rank = rank_of(number)
    joins: list[tuple[Any, ...]] = []
    rank._thread = SimpleNamespace(join=lambda *limit: joins.append(limit))  # type: ignore[assignment]
    waits: list[float] = []
    monkeypatch.setattr(rank._all_joined, "wait", waits.append)
    asks: list[Any] = []
    monkeypatch.setattr(watchdog, "ask_other_ranks_with", asks.append)
    rank.__exit__(type(error) if error else None, error, None)
    left = rank._goodbye
    assert left is not None
    assert (left.word, left.rank, left.how) == ("gone", number, how)
    assert left.reason.startswith(reason)
    assert "two" not in left.reason
    assert left.code == code
    assert joins == [()]
    assert waits == ([LOST_S] if number == 0 else [])
    assert asks == ([None] if number == 0 else [])
    assert not rank._verdict_wanted


def test_after_a_failed_collective_a_rank_waits_for_the_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = rank_of(1)
    joins: list[tuple[Any, ...]] = []
    rank._thread = SimpleNamespace(join=lambda *limit: joins.append(limit))  # type: ignore[assignment]
    try:
        raise RuntimeError("connection closed by peer")
    except RuntimeError as error:
        rank.__exit__(RuntimeError, error, error.__traceback__)
    assert joins == [(10.0,), ()]
    assert rank._verdict_wanted
    assert "connection closed by peer" in rank._failed_at
    assert rank._goodbye is not None
    assert rank._goodbye.how == "failed"


@pytest.mark.parametrize("how", ["stopped", "failed", "died", "silent"])
@pytest.mark.parametrize(("number", "writer"), list(itertools.product([0, 1], [0, 1])))
def test_the_end_is_logged_with_its_cause_and_reported_by_one(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
    writer: int,
    how: str,
) -> None:
    rank = rank_of(number)
    reports: list[str] = []
    done: list[Any] = []

    def before_end(*, reason: str) -> str:
        reports.append(reason)
        return "the diagnosis"

    rank.before_end = before_end
    monkeypatch.setattr(watchdog, "stacks", lambda: "the stacks")
    monkeypatch.setattr(os, "_exit", done.append)
    monkeypatch.setattr(logging, "shutdown", lambda: done.append("logs"))
    message = _Message(word="gone", rank=2, how=how, reason="ValueError: no", code="a_code")
    with caplog.at_level(logging.ERROR):
        asyncio.run(rank._end(message, writer))
    assert done == ["logs", LOST]
    lost, ends, place, *more = caplog.records
    name = "rank 2 on ppo-trainer-2 (10.0.0.2)"
    own = f"rank {number} on ppo-trainer-{number} (10.0.0.{number})"
    assert lost.event == {"code": "rank_lost", "number": 2, "how": how, "cause": "a_code"}  # type: ignore[attr-defined]
    assert lost.getMessage().startswith(name)
    assert ends.getMessage().startswith(f"{own} ends too")
    assert ("ValueError: no" in lost.getMessage()) == (how == "failed")
    assert ("18 s" in lost.getMessage()) == (how == "silent")
    assert place.event == {"code": "rank_place", "rank": own}  # type: ignore[attr-defined]
    assert place.getMessage() == f"{own} was here:\nthe stacks"
    assert [record.getMessage() for record in more] == ["the diagnosis"] * (number == writer)
    assert len(reports) == (number == writer)
    assert all(reason.startswith(name) for reason in reports)


@pytest.mark.parametrize("number", [0, 1])
def test_the_end_of_all_who_are_stuck_says_where_they_stand(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    rank = rank_of(number)
    rank._stuck_at = "rank 0: a step"
    rank._failed_at = "in its own function"
    reports: list[str] = []

    def before_end(*, reason: str) -> str:
        reports.append(reason)
        return ""

    rank.before_end = before_end
    monkeypatch.setattr(os, "_exit", lambda _: None)
    monkeypatch.setattr(logging, "shutdown", lambda: None)
    with caplog.at_level(logging.ERROR):
        asyncio.run(rank._end_stuck())
    where, lost, _ends, place = caplog.records
    assert lost.event == {"code": "rank_lost", "how": "stuck"}  # type: ignore[attr-defined]
    assert "90 s (limits.stuck_after_s)" in lost.getMessage()
    assert where.getMessage().endswith("rank 0: a step")
    assert place.getMessage().endswith("was here:\nin its own function")
    assert len(reports) == (number == 0)


def test_a_message_is_a_line_that_comes_back() -> None:
    where = Where(place="a step", stacks="one\ntwo", pid=4)
    for message in (
        _Message(word="beat", moves=3, place="a step"),
        _Message(word="gone", rank=2, how="failed", reason="é\n", code="x"),
        _Message(word="here", where=where),
    ):
        line = message.line()
        assert line.count(b"\n") == 1
        assert line.endswith(b"\n")
        assert _Message.model_validate_json(line) == message
    assert json.loads(_Message(word="where").line()) == {"word": "where"}


class Pipe:
    """A connection whose written lines are kept."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.closed = False

        self.aborted = False
        self.has_ended = False
        self.transport = SimpleNamespace(abort=self._abort)

    def _abort(self) -> None:
        self.aborted = True

    def write(self, line: bytes) -> None:
        self.lines.append(line)

    def write_eof(self) -> None:
        self.has_ended = True

    def close(self) -> None:
        self.closed = True


def listened(rank: Liveness, peer: int, *lines: bytes) -> Pipe:
    """Lets a rank read these lines from another one, and then the end of the connection."""

    async def listen() -> Pipe:
        reader = asyncio.StreamReader(limit=1 << 18)
        for line in lines:
            reader.feed_data(line)
        reader.feed_eof()
        pipe = Pipe()
        rank._connections[peer] = pipe  # type: ignore[assignment]
        await rank._listen(peer, reader, pipe)  # type: ignore[arg-type]
        return pipe

    return asyncio.run(listen())


def test_what_a_rank_says_is_noted_and_a_closed_connection_is_its_death(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(liveness, "time", SimpleNamespace(monotonic=lambda: now))
    rank = rank_of(0)
    now = 1005.0
    beat = _Message(word="beat", moves=7, place="a step").line()
    pipe = listened(rank, 1, beat, _Message(word="gone", rank=1, how="done").line())
    known = rank._known[1]
    assert (known.moves, known.place, known.heard, known.moved) == (7, "a step", now, now)
    assert rank._gone[1][0].how == "done", "the first word counts"
    assert pipe.closed
    assert rank._connections == {}
    now = 1009.0
    listened(rank, 1, beat)
    assert (known.heard, known.moved) == (1009.0, 1005.0)

    for damage in (b"{}\n", b"damaged\n", b"", b'{"word": "beat", "moves": 9}'):
        rank = rank_of(0)
        listened(rank, 2, damage)
        assert rank._gone[2][0].how == "died"
        assert rank._gone[2][1] == now
        assert rank._known[2].moves == -1

    rank = rank_of(1)
    listened(rank, 0, _Message(word="stuck", reason="rank 0: a step").line())
    assert rank._stuck_at == "rank 0: a step"


def test_the_question_where_a_rank_is_has_an_answer_that_fits_into_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = [Awaited(call=f"GET /{n}", service="s", seconds=n, count=1) for n in range(50)]
    stacks = "\u0001" * 200_000
    monkeypatch.setattr(watchdog, "where", lambda: Where(awaited=calls, stacks=stacks, pid=4))
    pipe = listened(rank_of(1), 0, _Message(word="where").line())
    [line] = pipe.lines
    assert len(line) <= 1 << 18
    answer = _Message.model_validate_json(line)
    assert answer.word == "here"
    assert answer.where is not None
    assert [call.call for call in answer.where.awaited] == [f"GET /{n}" for n in range(20)]
    assert 39_000 < len(answer.where.stacks) <= 40_001

    rank = rank_of(0)
    listened(rank, 1, line)
    assert rank._answers == {1: answer.where}
    assert rank._answered.is_set()


def test_an_end_is_passed_on_once_and_to_all() -> None:
    rank = rank_of(0)
    pipes = {peer: Pipe() for peer in (1, 2)}
    rank._connections = dict(pipes)  # type: ignore[arg-type]
    message = _Message(word="gone", rank=1, how="failed")
    rank._depart(message)
    rank._depart(_Message(word="gone", rank=1, how="died"))
    assert [pipe.lines for pipe in pipes.values()] == [[message.line()]] * 2
    assert rank._gone[1][0] is message
    other = rank_of(1)
    other._connections = {0: Pipe()}  # type: ignore[dict-item]
    other._depart(message)
    assert other._connections[0].lines == []  # type: ignore[attr-defined]


@pytest.mark.parametrize(("address", "host"), [("127.0.0.1", "127.0.0.1"), ("10.0.0.5", "")])
def test_rank_0_listens_at_every_address_unless_all_are_on_its_machine(
    monkeypatch: pytest.MonkeyPatch, address: str, host: str
) -> None:
    made: list[tuple[Any, dict[str, Any]]] = []
    shared: list[Any] = []

    def create_server(at: Any, **options: Any) -> Any:
        made.append((at, options))
        return SimpleNamespace(getsockname=lambda: (host, 4567))

    families = [("the family", 0, 0, "", (address, 0))]
    connected: list[Any] = []
    monkeypatch.setattr(
        liveness,
        "socket",
        SimpleNamespace(
            create_server=create_server,
            getaddrinfo=lambda host, port: {(address, None): families}[host, port],
            create_connection=lambda *at, **options: connected.append((at, options)),
        ),
    )
    monkeypatch.setenv("MASTER_ADDR", address)
    rank = rank_of(0)

    def broadcast(value: Any) -> Any:
        shared.append(value)
        return value

    rank._ranks.broadcast = broadcast  # type: ignore[method-assign]
    rank._endpoint()
    [(at, options)] = made
    assert at == (host, 0)
    assert options == {"family": "the family", "backlog": 3}
    assert shared == [(4567, rank._token)]
    assert len(rank._token) == 32

    other = rank_of(1)
    other._ranks.broadcast = lambda value: shared[0]  # type: ignore[method-assign]
    other._endpoint()
    assert other._token == rank._token
    assert connected == [(((address, 4567),), {"timeout": LOST_S})]


def test_a_connection_that_is_reset_is_a_death_too() -> None:
    rank = rank_of(0)

    async def listen() -> None:
        reader = asyncio.StreamReader()
        reader.set_exception(ConnectionResetError("reset by peer"))
        await rank._listen(1, reader, Pipe())  # type: ignore[arg-type]

    asyncio.run(listen())
    assert rank._gone[1][0].how == "died"


@pytest.mark.parametrize("stranger", ["silent", "endless", "reset", "wrong", "ended"])
def test_a_stranger_is_closed_whatever_it_does(
    monkeypatch: pytest.MonkeyPatch, stranger: str
) -> None:
    rank = rank_of(0)
    rank._token = TOKEN
    pipe = Pipe()

    async def accept() -> None:
        reader = asyncio.StreamReader(limit=64)
        match stranger:
            case "silent":
                monkeypatch.setattr(liveness, "_HANDSHAKE_S", 0.01)
            case "endless":
                reader.feed_data(b"x" * 1000)
            case "reset":
                reader.set_exception(ConnectionResetError("reset by peer"))
            case "wrong":
                reader.feed_data(b"hello the other 1\n")
            case "ended":
                reader.feed_eof()
        await rank._accept(reader, pipe)  # type: ignore[arg-type]

    asyncio.run(accept())
    assert pipe.closed
    assert rank._unauthenticated == []
    assert rank._connections == {}
    assert rank._gone == {}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_have_joined_once_every_rank_has_been_there(size: int) -> None:
    """A rank that says that it ends, and still has its connection, is one rank."""
    rank = rank_of(0, size)
    rank._token = TOKEN

    async def join() -> None:
        for number in range(1, size):
            assert not rank._all_joined.is_set()
            reader = asyncio.StreamReader()
            reader.feed_data(f"hello the token {number}\n".encode())
            reader.feed_data(_Message(word="gone", rank=number, how="done").line())
            await rank._accept(reader, Pipe())  # type: ignore[arg-type]
            for _ in range(5):  # until it is read
                await asyncio.sleep(0)
            assert number in rank._gone
        assert rank._all_joined.is_set()
        for each in rank._listeners:
            each.cancel()

    asyncio.run(join())


def test_who_joins_hears_every_end_before() -> None:
    rank = rank_of(0, 4)
    rank._token = TOKEN
    gone = [_Message(word="gone", rank=number, how="failed") for number in (1, 2)]
    for message in gone:
        rank._depart(message)
    pipe = Pipe()

    async def join() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(b"hello the token 3\n")
        await rank._accept(reader, pipe)  # type: ignore[arg-type]
        for each in rank._listeners:
            each.cancel()

    asyncio.run(join())
    assert pipe.lines == [message.line() for message in gone]
    assert rank._connections == {3: pipe}  # type: ignore[comparison-overlap]
    assert rank._all_joined.is_set()


def test_every_question_has_answers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "_ANSWER_S", 600.0)
    rank = rank_of(0)
    pipes = {1: Pipe(), 2: Pipe()}
    rank._connections = dict(pipes)  # type: ignore[arg-type]

    async def ask() -> None:
        asking = asyncio.create_task(rank._ask())
        for peer, pipe in pipes.items():
            await asyncio.sleep(0)
            assert [json.loads(line) for line in pipe.lines] == [{"word": "where"}]
            for _ in range(5):
                await asyncio.sleep(0)
            assert not asking.done(), "it waits for all"
            rank._answers[peer] = Where(place=f"step {peer}")
            rank._answered.set()
        await asking
        monkeypatch.setattr(liveness, "_ANSWER_S", 0.01)
        with pytest.raises(TimeoutError):
            await rank._ask()
        assert rank._answers == {}, "those were of the first question"

    asyncio.run(ask())


def test_a_rank_that_does_not_answer_is_in_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = rank_of(0, 4)
    rank._answers = {2: Where(place="step 3", pid=7)}
    rank._loop = SimpleNamespace(is_closed=lambda: False)  # type: ignore[assignment]
    limits: list[float] = []
    errors = [TimeoutError(), CancelledError()]

    def asked(limit_s: float) -> None:
        limits.append(limit_s)
        assert rank._asking.locked(), "one question at a time"
        raise errors[len(limits) - 1]

    def run(work: Any, loop: Any) -> Any:
        work.close()
        assert loop is rank._loop
        return SimpleNamespace(result=asked)

    monkeypatch.setattr(liveness, "asyncio", SimpleNamespace(run_coroutine_threadsafe=run))
    for _ in errors:
        found = rank.where_others_are()
        assert [(each.rank, each.place, each.pid) for each in found] == [
            (number, "step 3" if number == 2 else Where().place, 7 if number == 2 else Where().pid)
            for number in (1, 2, 3)
        ]
        assert [each.name for each in found] == [rank._name(number) for number in (1, 2, 3)]
    # The question ends by itself before its asker gives up.
    assert all(liveness._ANSWER_S < limit <= 2 * liveness._ANSWER_S for limit in limits)


@pytest.mark.parametrize("reads", [True, False])
def test_the_last_word_is_given_time_to_arrive_and_no_more(
    monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    rank = rank_of(0)
    broken = Pipe()

    def fail() -> None:
        raise BrokenPipeError

    monkeypatch.setattr(broken, "write_eof", fail)
    pipes = {1: broken, 2: Pipe()}
    rank._connections = dict(pipes)  # type: ignore[arg-type]
    stranger = Pipe()
    rank._unauthenticated = [stranger]  # type: ignore[list-item]

    async def close() -> None:
        event = asyncio.Event()
        listening = asyncio.create_task(event.wait())
        rank._listeners.add(listening)  # type: ignore[arg-type]
        monkeypatch.setattr(liveness, "_SHUTDOWN_S", 600.0 if reads else 0.01)
        if reads:
            asyncio.get_running_loop().call_later(0.01, event.set)
        await rank._close()
        assert listening.done() == reads
        listening.cancel()

    asyncio.run(close())
    assert pipes[2].has_ended
    assert stranger.aborted
    rank._broadcast(_Message(word="beat"))
    assert pipes[2].lines == [], "nothing is sent after the end"


def test_a_rank_tells_its_end_before_it_writes_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report may take long; the other ranks need not wait for it."""
    rank = rank_of(0)
    pipe = Pipe()
    rank._connections = {1: pipe}  # type: ignore[dict-item]
    had_ended: list[bool] = []
    monkeypatch.setattr(os, "_exit", lambda _: had_ended.append(pipe.has_ended))
    monkeypatch.setattr(logging, "shutdown", lambda: None)
    message = _Message(word="gone", rank=2, how="died")
    assert rank.before_end(reason="") == "", "nothing to report is the default"

    def before_end(*, reason: str) -> str:
        had_ended.append(pipe.has_ended)
        return ""

    rank.before_end = before_end
    asyncio.run(rank._end(message, writer=0))
    assert had_ended == [True, True]


def test_where_very_many_ranks_stand_fits_into_a_line() -> None:
    rank = rank_of(0, 500)
    for known in rank._known.values():
        known.place = "a step"
    rank._call_all_stuck()
    assert rank._stuck_at.startswith("rank 0 on ppo-trainer-0")
    assert 1900 < len(rank._stuck_at) <= 2000


def test_two_ranks_watch_each_other_in_a_thread_that_ends_with_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asks: list[Any] = []
    watched: list[Any] = []
    monkeypatch.setattr(watchdog, "ask_other_ranks_with", asks.append)
    for number in (0, 1):
        rank = rank_of(number, 2)

        async def watch(endpoint: Any) -> None:
            watched.append(endpoint)

        monkeypatch.setattr(rank, "_endpoint", lambda number=number: f"socket {number}")
        monkeypatch.setattr(rank, "_watch", watch)
        assert rank.__enter__() is rank
        thread = rank._thread
        assert thread is not None
        assert (thread.name, thread.daemon) == ("liveness", True)
        thread.join()
        assert watched[-1] == f"socket {number}"
        assert asks == [rank.where_others_are] * (number == 0)
        asks.clear()
