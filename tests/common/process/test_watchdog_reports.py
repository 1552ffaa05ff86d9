"""What a process says of itself, with a clock and a log of the test."""

import asyncio
import faulthandler
import logging
import os
import random
import signal
import threading
import time
import types
from collections.abc import AsyncIterator, Generator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from common import VERSION
from common.process import progress, watchdog
from common.process.watchdog import Awaited, RankWhere


class Clock:
    """Stands for the module `time`."""

    def __init__(self) -> None:
        self.now = time.monotonic()  # as the classes have it that keep their own

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 5e8 + self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class _Over(Exception):
    pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watchdog, "time", clock)
    monkeypatch.setattr(watchdog, "_last_deadline", -1e9)
    return clock


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The reasons with which `after_report` was called."""
    found: list[str] = []

    def thread(target: Any, args: Any, name: str, daemon: bool) -> Any:
        return SimpleNamespace(start=lambda: target(*args))

    at_once = SimpleNamespace(**{**vars(threading), "Thread": thread})
    monkeypatch.setattr(watchdog, "threading", at_once)
    watchdog.after_report(found.append)
    yield found
    watchdog.after_report(None)


@pytest.mark.parametrize("seed", range(20))
def test_a_stall_is_reported_at_its_limit_and_at_every_doubling(
    seed: int,
    clock: Clock,
    told: list[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread looks at every half second, and a move of the process begins a new stall."""
    draws = random.Random(seed)
    limit_s = 8.0
    expected: list[float] = []
    begun = clock.now
    moved_at = 0.0
    due_s = limit_s

    def select(read: list[int], *_: object) -> tuple[list[int], list[int], list[int]]:
        nonlocal moved_at, due_s
        assert read == [7]
        if clock.now > begun + 60 * limit_s:
            raise _Over
        clock.now += 0.5
        if not moved_at or draws.random() < 0.02:
            progress.moved()
            moved_at = clock.now
            due_s = limit_s
        elif clock.now - moved_at >= due_s:
            expected.append(clock.now - moved_at)
            due_s *= 2
        return [], [], []

    monkeypatch.setattr(watchdog, "select", SimpleNamespace(select=select))
    with watchdog.stalls(limit_s), caplog.at_level(logging.ERROR):
        watchdog.at("the update of step 7")
        with pytest.raises(_Over):
            watchdog._watch(7)
    found = [record.args for record in caplog.records]
    assert [(args[0], args[1]) for args in found] == [  # type: ignore[index]
        (silent_s, "the update of step 7") for silent_s in expected
    ]
    assert len(told) == len(expected) > 0
    assert watchdog.place() is None


def test_a_signal_writes_a_report_once(
    clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"two signals")
    looks: list[int] = []

    def select(
        read: list[int], written: object, failed: object, wait_s: float
    ) -> tuple[list[int], list[int], list[int]]:
        assert (read, written, failed) == ([reader], [], [])
        looks.append(1)
        if len(looks) == 5:
            raise _Over
        return (read if len(looks) in (1, 2) else []), [], []

    monkeypatch.setattr(watchdog, "select", SimpleNamespace(select=select))
    with caplog.at_level(logging.WARNING), pytest.raises(_Over):
        watchdog._watch(reader)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    os.close(reader)
    os.close(writer)


def test_deadlines_are_reported_once_a_minute(
    clock: Clock, told: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    for number, after_s in enumerate((0.0, 1.0, 58.0, 0.9, 0.2, 59.9, 0.2, 200.0)):
        clock.now += after_s
        watchdog.deadline_passed(str(number))
    assert told == ["0", "4", "6", "7"]
    assert [record.levelname for record in caplog.records] == ["ERROR"] * 4


@pytest.mark.parametrize("seed", range(20))
def test_pending_calls_are_counted_by_kind_the_longest_first(seed: int, clock: Clock) -> None:
    draws = random.Random(seed)
    held: list[tuple[str, str, float, Any]] = []
    for _ in range(12):
        clock.now += draws.choice([1.0, 2.5])
        call = draws.choice(["GET /a", "POST /b"])
        service = draws.choice(["x", "y"])
        wait = watchdog.waiting(call, service)
        wait.__enter__()
        held.append((call, service, clock.now, wait))
        if draws.random() < 0.3:
            held.pop(draws.randrange(len(held)))[3].__exit__()

    ages: dict[tuple[str, str], list[float]] = {}
    for call, service, since, _ in held:
        ages.setdefault((call, service), []).append(clock.now - since)
    expected = [
        Awaited(call=call, service=service, seconds=max(seconds), count=len(seconds))
        for (call, service), seconds in ages.items()
    ]
    found = watchdog.pending()
    assert [each.seconds for each in found] == sorted((e.seconds for e in expected), reverse=True)
    assert sorted(map(str, found)) == sorted(map(str, expected))
    lines = watchdog.awaited()
    assert ["times" in line for line in lines] == [each.count > 1 for each in found]
    assert watchdog.where().awaited == found
    for *_, wait in held:
        wait.__exit__()
    assert watchdog.pending() == []


def test_where_a_process_is(clock: Clock) -> None:
    assert watchdog.place() is None
    watchdog.at("nowhere")
    assert watchdog.place() is None
    assert (watchdog.where().place, watchdog.where().since_s) == ("", 0.0)
    with watchdog.stalls(5):
        moves = progress.total(with_others=True)
        watchdog.at("a step")
        assert progress.total(with_others=True) == moves + 1
        clock.now += 1000
        place = watchdog.place()
        assert place is not None
        assert (place[0], 940 < place[1] < 1060) == ("a step", True)
        found = watchdog.where()
    assert (found.place, found.pid) == ("a step", os.getpid())
    assert found.since_s == pytest.approx(1000, abs=60)
    assert (found.time, found.version) == (clock.time(), VERSION)


def test_other_ranks_are_asked_until_nobody_is_to_be_asked() -> None:
    others = [RankWhere(rank=1, name="rank 1", pid=5)]
    assert watchdog.other_ranks() == []
    watchdog.ask_other_ranks_with(lambda: others)
    assert watchdog.other_ranks() == others
    watchdog.ask_other_ranks_with(None)
    assert watchdog.other_ranks() == []


def test_the_stacks_of_other_threads_and_of_all_tasks() -> None:
    """Two coroutines that wait for an asynchronous generator, and one for a plain one."""
    ended = threading.Event()

    def waits_in_a_thread() -> None:
        ended.wait(60)

    thread = threading.Thread(target=waits_in_a_thread, name="that waits")
    thread.start()

    async def items(event: asyncio.Event) -> AsyncIterator[int]:
        await event.wait()
        yield 1

    async def outer(event: asyncio.Event) -> None:
        async for _ in items(event):
            pass

    @types.coroutine
    def plain(event: asyncio.Event) -> Generator[Any, Any, None]:
        yield from event.wait().__await__()

    async def around(event: asyncio.Event) -> None:
        await plain(event)

    async def main() -> str:
        loop = asyncio.get_running_loop()
        watchdog.follow(loop)
        event = asyncio.Event()
        tasks = [asyncio.create_task(work(event)) for work in (outer, outer, around)]
        await asyncio.sleep(0)
        found = await asyncio.to_thread(watchdog.report)
        event.set()
        await asyncio.gather(*tasks)
        return found

    text = asyncio.run(main())
    ended.set()
    thread.join()
    assert text.index("thread MainThread:") < text.index("thread that waits:")
    assert "waits_in_a_thread" in text
    of_one = text[text.index(".around") :]
    assert of_one.index(".plain") < of_one.index("  awaits a coroutine_wrapper")
    assert "  awaits a " in text[text.index(".outer") :]
    assert "1 task at:" in text
    assert "2 tasks at:" in text
    assert "task at" not in watchdog.report()  # of a loop that is closed


def test_many_places_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_MAX_TASK_STACKS", 1)

    async def one(event: asyncio.Event) -> None:
        await event.wait()

    async def other(event: asyncio.Event) -> None:
        await event.wait()

    async def main() -> list[str]:
        watchdog.follow(asyncio.get_running_loop())
        event = asyncio.Event()
        tasks = [asyncio.create_task(work(event)) for work in (one, one, other)]
        await asyncio.sleep(0)
        found = list(watchdog._tasks())
        event.set()
        await asyncio.gather(*tasks)
        return found

    first, rest = asyncio.run(main())
    assert first.startswith("2 tasks at:")
    assert ".one" in first
    assert rest == "and tasks at 2 other places"


def test_the_handlers_of_signals_are_installed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: dict[int, tuple[Any, bool]] = {}
    threads: list[Any] = []

    def register(number: int, file: Any, all_threads: bool) -> None:
        handlers[number] = (file, all_threads)

    def thread(**given: Any) -> Any:
        threads.append(given)
        return SimpleNamespace(start=lambda: threads.append("started"))

    monkeypatch.setattr(watchdog, "_wakeup", None)
    monkeypatch.setattr(watchdog, "faulthandler", SimpleNamespace(register=register))
    monkeypatch.setattr(watchdog, "threading", SimpleNamespace(Thread=thread))
    watchdog.start()
    watchdog.start()
    made: Any = watchdog._wakeup
    assert made is not None
    reader, writer = made
    assert not os.get_blocking(reader)
    assert not os.get_blocking(writer)
    assert handlers[signal.SIGUSR1] == (writer, False)
    assert handlers[signal.SIGQUIT][1]
    given, started = threads
    assert (given["target"], given["args"], given["daemon"]) == (watchdog._watch, (reader,), True)
    assert started == "started"
    os.close(reader)
    os.close(writer)


def test_a_guard_postpones_the_timer_until_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    timers = SimpleNamespace(
        dump_traceback_later=lambda seconds, file: calls.append(seconds),
        cancel_dump_traceback_later=lambda: calls.append("cancelled"),
    )
    monkeypatch.setattr(watchdog, "faulthandler", timers)
    with watchdog.interpreter_guarded(0.04):
        end = time.monotonic() + 60
        while len(calls) < 3 and time.monotonic() < end:
            time.sleep(0.005)
    assert set(calls[:-1]) == {0.04}
    assert len(calls) > 3
    assert calls[-1] == "cancelled"


def test_a_guard_is_set_before_its_thread_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pattern that is stuck at once would keep the thread from setting it."""
    never = SimpleNamespace(start=lambda: None, join=lambda: None)
    set_for: list[float] = []
    monkeypatch.setattr(threading, "Thread", lambda **_: never)
    monkeypatch.setattr(
        faulthandler, "dump_traceback_later", lambda seconds, file: set_for.append(seconds)
    )
    with watchdog.interpreter_guarded(60):
        assert set_for == [60]
