"""What the ranks of a run tell one another, over real sockets, in threads of one process.

`test_liveness.py` has the same with processes that are really killed and stopped.
"""

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import ServiceError
from common.process import watchdog
from common.process.topology import LOST, Topology
from learning import liveness
from learning.liveness import Liveness

# A thread that would end its process raises SystemExit.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
ADDRESSES = ("10.0.0.1", "10.0.0.2", "10.0.0.3")


class Run:
    """Three ranks, each of which would end its process."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        lost_after_s: float = 60.0,
        stuck_after_s: float = 60.0,
    ) -> None:
        self.statuses: dict[str, int] = {}
        self.reports: list[int] = []
        shared: list[object] = []

        def broadcast(value: object) -> object:
            if not shared:
                shared.append(value)
            return shared[0]

        self.ranks: list[Liveness] = []
        self.sockets: list[socket.socket] = []
        for rank in range(3):
            ranks: Any = SimpleNamespace(
                rank=rank, world_size=3, is_rank_zero=rank == 0, broadcast=broadcast
            )
            made = Liveness(
                ranks, Topology(node_ips=ADDRESSES), lost_after_s, stuck_after_s=stuck_after_s
            )
            made.before_end = self._reporter(rank)
            monkeypatch.setattr(made, "_endpoint", partial(self._kept, made._endpoint))
            self.ranks.append(made)

    def _kept(self, endpoint: Callable[[], socket.socket]) -> socket.socket:
        self.sockets.append(endpoint())
        return self.sockets[-1]

    def _reporter(self, rank: int) -> Any:
        def report(reason: str) -> str:
            self.reports.append(rank)
            return f"the report of rank {rank}"

        return report

    def __enter__(self) -> "Run":
        for each in self.ranks:
            each.__enter__()
            assert each._thread is not None
            each._thread.name = f"rank {each._ranks.rank}"
        wait(lambda: self.ranks[0]._all_joined.is_set())
        return self

    def __exit__(self, *_: object) -> None:
        for rank in (1, 2, 0):
            self.leave(rank)
        for each in self.sockets:  # a process that ends closes them
            each.close()

    def leave(self, rank: int, error: BaseException | None = None) -> None:
        self.ranks[rank].__exit__(type(error) if error else None, error, None)

    def ended(self, *ranks: int) -> None:
        """Waits until exactly these ranks have ended their processes."""
        for rank in ranks:
            thread = self.ranks[rank]._thread
            assert thread is not None
            thread.join(60)
            assert not thread.is_alive(), rank
        assert self.statuses == {f"rank {rank}": LOST for rank in ranks}

    def cut(self, rank: int) -> None:
        """Closes all connections of a rank at once, as its death would."""
        loop = self.ranks[rank]._loop
        assert loop is not None

        def abort() -> None:
            for writer in self.ranks[rank]._connections.values():
                writer.transport.abort()

        loop.call_soon_threadsafe(abort)


def wait(holds: Any) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def events(
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, Any]:
    """The ends of ranks that were logged, by the thread of the rank that logged them."""
    found: dict[str, Any] = {}

    def emit(record: logging.LogRecord) -> bool:
        about = getattr(record, "event", {})
        if about.get("code") == "rank_lost":
            found[str(record.threadName)] = about
        return True

    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    quick = {"_TICK_S": 0.02, "_OWN_ERROR_S": 0.1, "_VERDICT_S": 60.0, "_SHUTDOWN_S": 0.5}
    for name, value in quick.items():
        monkeypatch.setattr(liveness, name, value)
    monkeypatch.setattr(liveness.log, "filters", [emit])
    monkeypatch.setattr(logging, "shutdown", lambda: None)
    return found


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The count of progress of each rank, which here is a thread."""
    found: dict[str, int] = {}

    def total(*, with_others: bool) -> int:
        assert with_others
        return found.get(threading.current_thread().name, 0)

    monkeypatch.setattr(liveness, "progress", SimpleNamespace(total=total))
    return found


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What the training loop of each rank does."""
    found: dict[str, str] = {}

    def place() -> tuple[str, float] | None:
        text = found.get(threading.current_thread().name)
        return None if text is None else (text, 5.0)

    monkeypatch.setattr(watchdog, "place", place)
    return found


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, events: dict[str, Any]) -> Run:
    return made(monkeypatch)


def made(monkeypatch: pytest.MonkeyPatch, **limits: float) -> Run:
    run = Run(monkeypatch, **limits)

    def end(status: int) -> None:
        run.statuses[threading.current_thread().name] = status
        raise SystemExit(status)

    monkeypatch.setattr(os, "_exit", end)
    return run


def name(rank: int) -> str:
    return f"rank {rank} on ppo-trainer-{rank} ({ADDRESSES[rank]})"


def test_ranks_that_are_done_end_nobody_and_say_before_where_they_are(
    run: Run, events: dict[str, Any]
) -> None:
    with run:
        found = run.ranks[0].where_others_are()
        assert [(each.rank, each.name, each.pid) for each in found] == [
            (rank, name(rank), os.getpid()) for rank in (1, 2)
        ]
        assert all("where_others_are" in each.stacks for each in found)
        again = run.ranks[0].where_others_are()
        assert [each.pid for each in again] == [os.getpid()] * 2
        assert [each.rank for each in watchdog.other_ranks()] == [1, 2]
    assert watchdog.other_ranks() == []
    run.ended()
    assert events == {}
    assert run.reports == []
    assert run.ranks[0].where_others_are() == []


def test_a_rank_asked_before_its_thread_has_begun_names_all_the_same(
    monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    begins = threading.Event()
    first = run.ranks[0]
    watch = first._run

    def begin_late(*arguments: Any) -> None:
        begins.wait(60)
        watch(*arguments)

    monkeypatch.setattr(first, "_run", begin_late)
    monkeypatch.setattr(liveness, "_ANSWER_S", 0.05)
    for each in run.ranks:
        each.__enter__()
    early = watchdog.other_ranks()
    assert [(each.rank, each.name, each.pid) for each in early] == [
        (rank, name(rank), 0) for rank in (1, 2)
    ]
    begins.set()
    wait(first._all_joined.is_set)
    run.__exit__()
    run.ended()


@pytest.mark.parametrize(
    ("error", "how", "cause"),
    [
        (ServiceError("no room", code="no_room"), "failed", "no_room"),
        (ValueError("wrong"), "failed", "ValueError"),
        (SystemExit(3), "failed", "SystemExit"),
        (KeyboardInterrupt(), "stopped", ""),
    ],
)
@pytest.mark.parametrize("left", [0, 2])
def test_a_rank_that_ends_by_itself_is_named_with_the_reason_by_all_others(
    run: Run, events: dict[str, Any], error: BaseException, how: str, cause: str, left: int
) -> None:
    with run:
        run.leave(left, error)
        others = [rank for rank in range(3) if rank != left]
        if how == "stopped":  # the others may have been stopped, too: only a collective tells
            for rank in others:
                run.leave(rank, RuntimeError("connection closed by peer"))
        run.ended(*others)
        assert events == {
            f"rank {rank}": {"code": "rank_lost", "number": left, "how": how, "cause": cause}
            for rank in others
        }
        # If rank 0 ends first, the next one cannot know that it has reported.
        assert sorted(run.reports) in ([[]] if left == 0 else [[0], [0, 1]])


@pytest.mark.parametrize("lost", [0, 2])
def test_a_lost_rank_is_named_and_one_of_the_others_reports_it(
    run: Run, events: dict[str, Any], lost: int
) -> None:
    """Rank 0 cannot report its own end: rank 1 does. Its other connections end with it."""
    with run:
        run.cut(lost)
        others = [rank for rank in range(3) if rank != lost]
        for rank in others:
            wait(lambda rank=rank: f"rank {rank}" in run.statuses)
        for rank in others:
            about = events[f"rank {rank}"]
            assert (about["number"], about["how"]) == (lost, "died")
        assert [rank for rank in run.reports if rank != lost] == [1 if lost == 0 else 0]


def test_when_no_rank_moves_all_end_and_rank_0_reports(
    monkeypatch: pytest.MonkeyPatch, events: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    run = made(monkeypatch, stuck_after_s=1.0)
    with run:
        run.ended(0, 1, 2)
    assert {about["how"] for about in events.values()} == {"stuck"}
    assert len(events) == 3
    assert run.reports == [0]
    assert "the report of rank 0" in caplog.text


def test_one_rank_that_moves_keeps_all_going_and_each_says_where_it_is(
    monkeypatch: pytest.MonkeyPatch,
    events: dict[str, Any],
    moves: dict[str, int],
    places: dict[str, str],
) -> None:
    """Rank 0 hears the progress of the others. When none moves any more, it names all places."""
    run = made(monkeypatch, stuck_after_s=1.0)
    with run:
        places["rank 1"] = "a step"
        end = time.monotonic() + 2.5
        while time.monotonic() < end:
            moves["rank 2"] = moves.get("rank 2", 0) + 1
            time.sleep(0.05)
        assert run.statuses == {}
        known = run.ranks[0]._known
        wait(lambda: known[2].moves == moves["rank 2"])
        assert [known[rank].moves for rank in range(3)] == [0, 0, moves["rank 2"]]
        run.ended(0, 1, 2)
    found = [part.partition(" (no progress")[0] for part in run.ranks[1]._stuck_at.split("; ")]
    assert found == [
        f"{name(0)}: outside the training loop",
        f"{name(1)}: a step",
        f"{name(2)}: outside the training loop",
    ]


def test_a_rank_that_joins_late_hears_who_has_ended(
    monkeypatch: pytest.MonkeyPatch, events: dict[str, Any]
) -> None:
    monkeypatch.setattr(liveness, "_OWN_ERROR_S", 60.0)
    run = made(monkeypatch)
    first, second, late = run.ranks
    for number, each in enumerate((first, second)):
        each.__enter__()
        assert each._thread is not None
        each._thread.name = f"rank {number}"
    run.leave(1, ValueError("wrong"))
    wait(lambda: 1 in first._gone)
    assert not first._all_joined.is_set()
    late.__enter__()
    assert late._thread is not None
    late._thread.name = "rank 2"
    wait(lambda: 1 in late._gone)
    assert late._gone[1][0].reason == "ValueError: wrong"
    assert run.statuses == {}, "each has time for an error of its own"
    assert first._all_joined.is_set()
    monkeypatch.setattr(liveness, "_OWN_ERROR_S", 0.0)
    run.ended(0, 2)
    for endpoint in run.sockets:
        endpoint.close()


def test_a_rank_whose_collective_failed_says_where_it_was(
    run: Run, events: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    def reduce_gradients() -> None:
        raise RuntimeError("connection closed by peer")

    def fail() -> None:
        try:
            reduce_gradients()
        except RuntimeError as error:
            run.ranks[1].__exit__(RuntimeError, error, error.__traceback__)

    with run:
        failing = threading.Thread(target=fail)
        failing.start()
        # On a busy machine, rank 1 could hear of the other before it fails itself.
        wait(lambda: run.ranks[1]._verdict_wanted)
        run.leave(2, ValueError("wrong"))
        failing.join()
        wait(lambda: set(run.statuses) == {"rank 0", "rank 1"})
    of_rank_1 = [r.getMessage() for r in caplog.records if r.threadName == "rank 1"]
    assert any("in reduce_gradients" in text for text in of_rank_1)


def test_strangers_who_say_nothing_do_not_fill_the_room(
    monkeypatch: pytest.MonkeyPatch, run: Run, events: dict[str, Any]
) -> None:
    """The oldest of more than two is cut."""
    monkeypatch.setattr(liveness, "_MAX_UNAUTHENTICATED", 2)
    with run:
        address = ("127.0.0.1", run.sockets[0].getsockname()[1])
        strangers = [socket.create_connection(address) for _ in range(3)]
        wait(lambda: len(run.ranks[0]._unauthenticated) == 2)
        strangers[0].settimeout(60)
        with contextlib.suppress(ConnectionResetError):
            assert strangers[0].recv(1) == b""
        strangers[1].setblocking(False)
        with pytest.raises(BlockingIOError):
            strangers[1].recv(1)
    run.ended()
    for each in strangers[1:]:
        each.settimeout(60)
        with contextlib.suppress(ConnectionResetError):
            assert each.recv(1) == b""
    for each in strangers:
        each.close()


def test_a_process_that_was_stopped_itself_takes_nobody_for_lost(
    monkeypatch: pytest.MonkeyPatch, events: dict[str, Any]
) -> None:
    """All ranks find that an hour has passed since they looked, in which they read nothing."""
    late_s = 0.0

    def monotonic() -> float:
        return time.monotonic() + late_s

    run = made(monkeypatch, lost_after_s=9.0)
    with run, monkeypatch.context() as patch:
        patch.setattr(liveness, "time", SimpleNamespace(monotonic=monotonic))
        known = run.ranks[0]._known[1]
        before = known.heard
        wait(lambda: known.heard > before)
        for each in run.ranks:
            patch.setattr(each, "_broadcast", lambda message: None)
        late_s = 3600.0
        time.sleep(0.3)
        assert events == {}
        for each in run.ranks:
            for known in each._known.values():
                known.heard -= late_s
        late_s = 0.0


def test_a_single_process_has_nobody_to_watch() -> None:
    ranks: Any = SimpleNamespace(rank=0, world_size=1, is_rank_zero=True)
    alone = Liveness(ranks, Topology(), 60.0, stuck_after_s=60.0)
    with alone:
        assert alone._thread is None
        assert alone.where_others_are() == []


@pytest.mark.parametrize(
    ("rank", "named"),
    [
        (0, "rank 0 on ppo-trainer-0 (10.0.0.1)"),
        (5, "rank 5 on ppo-trainer-2 (10.0.0.3)"),
        (6, "rank 6 on ppo-trainer-3"),
    ],
)
def test_a_rank_is_named_by_its_node(
    monkeypatch: pytest.MonkeyPatch, rank: int, named: str
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    ranks: Any = SimpleNamespace(rank=0, world_size=1, is_rank_zero=True)
    alone = Liveness(ranks, Topology(node_ips=ADDRESSES), 60.0, stuck_after_s=60.0)
    assert alone._name(rank) == named


def test_a_rank_that_says_nothing_for_long_is_lost(
    monkeypatch: pytest.MonkeyPatch, run: Run, events: dict[str, Any]
) -> None:
    with run:
        monkeypatch.setattr(run.ranks[2], "_broadcast", lambda message: None)
        run.ranks[0]._known[2].heard -= 1000.0
        run.ended(0, 1, 2)
        assert events["rank 0"] == events["rank 1"]
        assert (events["rank 0"]["number"], events["rank 0"]["how"]) == (2, "silent")


def test_a_long_line_arrives_whole_on_both_ends(run: Run, events: dict[str, Any]) -> None:
    """The stacks of a rank may take 240 KB."""
    long = "é" * 100_000
    with run:
        first = run.ranks[0]
        assert first._loop is not None
        # The end of a rank that is done ends nobody else.
        message = liveness._Message(word="gone", rank=7, how="done", reason=long)
        first._loop.call_soon_threadsafe(first._broadcast, message)
        wait(lambda: all(7 in each._gone for each in run.ranks[1:]))
        second = run.ranks[1]
        assert second._loop is not None
        back = message.model_copy(update={"rank": 8})
        second._loop.call_soon_threadsafe(second._broadcast, back)
        wait(lambda: 8 in first._gone)
        assert first._gone[8][0].reason == run.ranks[1]._gone[7][0].reason == long
    run.ended()


def test_a_connection_without_the_token_is_no_rank(run: Run, events: dict[str, Any]) -> None:
    with run:
        port = run.sockets[0].getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"hello wrong 2\n")
            assert stranger.recv(1) == b""
        assert set(run.ranks[0]._connections) == {1, 2}
    run.ended()
