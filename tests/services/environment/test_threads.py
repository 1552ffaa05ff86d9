"""Methods that hang: their threads are counted and replaced, and the server reports too many of
them."""

import asyncio
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

from common.process.daemon_threads import in_daemon_thread
from common.process.loop_thread import LoopThread
from common.wire.schemas import Episode
from services.environment import threads as threads_module
from services.environment.clock import EpisodeClock
from services.environment.outcome import EnvironmentLost
from services.environment.threads import Threads
from tests.support.environments.environments import request_for, served
from tests.support.processes.clocks import leap

CALL = '<tool_call>\n{"name": "NAME", "arguments": {}}\n</tool_call>'


class Hangs:
    """Has tools that misbehave."""

    release = threading.Event()
    hanging: ClassVar[list[int]] = []

    def reset(self) -> None:
        """Begins."""

    def hang(self) -> str:
        """Does not return."""
        self.hanging.append(threading.get_ident())
        self.release.wait(60)
        return "late"

    async def waits(self) -> str:
        """Does not return, as a coroutine."""
        try:
            await asyncio.sleep(60)
        finally:
            self.hanging.append(0)
        return "late"

    async def blocks(self) -> str:
        """Does not return, and stops its event loop."""
        self.release.wait(60)
        return "late"

    def later(self) -> Any:
        """Makes a coroutine that does not return."""
        return self.waits()

    def own(self) -> str:
        """Gives up by itself."""
        raise TimeoutError("nobody answered")

    def leave(self) -> str:
        """Ends the process."""
        sys.exit("enough")

    def exhaust(self) -> Any:
        """Takes what there is not."""
        return next(iter(()))

    async def cancels(self) -> str:
        """Lets a cancelled call out."""
        raise asyncio.CancelledError

    def surrogate(self) -> str:
        """Returns half a character."""
        return "half \ud800"

    def bad_text(self) -> str:
        """Raises what cannot be shown."""
        raise Unshown

    def tuples(self) -> Any:
        """Returns what JSON cannot hold."""
        return {("a", 1): 2}

    def unshown(self) -> Any:
        """Returns what cannot be written at all."""
        return {"x": Unshown()}

    def get_reward(self) -> Any:
        """Is the same for all."""
        return {"half \ud800": 1.0}


class Unshown(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


NAME = f"python:{__name__}:Hangs"


def call(name: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    Hangs.release.clear()
    Hangs.hanging.clear()
    yield
    Hangs.release.set()


async def test_hung_call_keeps_its_thread_but_frees_its_place(
    caplog: pytest.LogCaptureFixture,
) -> None:
    answer_text = "done"
    numbers = iter(range(9))

    async with served(Hangs, lambda _: answer_text, workers=2) as server:

        async def play() -> Episode:
            request = request_for(NAME)
            request.request_id = f"r{next(numbers)}"
            (episode,) = await server.client.episodes(request)
            return episode

        for hung in (1, 2):
            assert (await server.http.get("/health")).status_code == 200
            episode = await play()
            assert (episode.status, episode.reward) == ("ok", 1.0), "others go on"
            answer_text = call("hang")
            playing = asyncio.create_task(play())
            while len(Hangs.hanging) < hung:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            answer_text = "done"
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)
            while server.service.stats()["hung_calls"] < hung:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        stats = (await server.http.get("/stats")).json()
        assert (stats["hung_calls"], stats["hung_calls_limit"]) == (2, 2)
        assert (
            "Hangs: hang is still running although nobody waits for it any more: 1 such calls"
            in caplog.text
        )
        health = await server.http.get("/health")
        assert (
            health.status_code,
            "2 calls of the environment are stuck" in health.json()["reason"],
        ) == (503, True)
        episode = await play()
        assert (episode.status, episode.reward) == ("died", None)
        assert "environment.workers" in episode.detail
        Hangs.release.set()
        while server.service.stats()["hung_calls"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert (await server.http.get("/health")).status_code == 200, "they ended after all"


@pytest.mark.parametrize(
    ("tool", "told", "errors"),
    [
        ("leave", "SystemExit: enough", 1),
        ("exhaust", "StopIteration", 1),
        ("cancels", "error: RuntimeError: CancelledError", 1),
        ("bad_text", "error: Unshown", 1),
        ("surrogate", "half ?", 0),
        ("tuples", "{('a', 1): 2}", 0),
        ("unshown", "a dict that cannot be shown: ValueError: no text", 0),
    ],
)
async def test_whatever_a_tool_does_is_told_to_the_model(tool: str, told: str, errors: int) -> None:
    def reply(text: str) -> str:
        return "done" if "<tool_response>" in text else call(tool)

    async with served(Hangs, reply) as server:
        episodes = await server.client.episodes(request_for(NAME, n=2, deadline_s=60))
        for episode in episodes:
            assert (episode.status, episode.metrics["tool_errors"]) == ("ok", errors)
            assert told in episode.sequences[0].text
            assert episode.components == {"half ?": 1.0}
        assert len(server.engine.asked) == 4, "no call is repeated"


@pytest.mark.parametrize(
    ("tool", "told", "hung"),
    [
        ("hang", "error: it took longer than 0.2 s", 1),
        ("waits", "error: it took longer than 0.2 s", 0),
        ("later", "error: it took longer than 0.2 s", 0),
        ("blocks", "error: it took longer than 0.2 s", 1),
        ("own", "error: TimeoutError: nobody answered", 0),
    ],
)
async def test_the_model_is_told_of_a_tool_that_takes_too_long(
    tool: str, told: str, hung: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The episode goes on, and a call that cannot be ended counts as hung."""
    limit_s = 60.0 if tool == "own" else 0.2
    if tool == "blocks":
        monkeypatch.setattr(threads_module, "_BEAT_S", 0.02)
        monkeypatch.setattr(threads_module, "BLOCKED_S", 0.02)

    def reply(text: str) -> str:
        return "done" if "<tool_response>" in text else call(tool)

    async with served(Hangs, reply) as server:
        (episode,) = await server.client.episodes(request_for(NAME, tool_timeout_s=limit_s))
        assert (episode.status, episode.reward, episode.stop_reason) == ("ok", 1.0, "done")
        assert (episode.metrics["tool_calls"], episode.metrics["tool_errors"]) == (1, 1)
        assert told in episode.sequences[0].text
        while server.service.stats()["hung_calls"] < hung:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert server.service.stats()["hung_calls"] == hung
        if tool in ("waits", "later"):
            while not Hangs.hanging:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        Hangs.release.set()
        while server.service.stats()["hung_calls"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_waiting_for_a_place_is_no_time_of_the_tool_or_the_episode() -> None:
    threads = Threads(1)
    began = threading.Event()
    release = threading.Event()

    def long() -> None:
        began.set()
        release.wait(60)

    first = asyncio.create_task(threads.run(long, "long"))
    while not began.is_set():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    clock = EpisodeClock()

    async def play() -> str:
        async with clock.limit(400):
            answer: str = await threads.run(lambda: "short", "short", timeout_s=400, clock=clock)
            return answer

    second = asyncio.create_task(play())
    while not clock._stops:  # noqa: ASYNC110
        await asyncio.sleep(0)
    leap(1000)
    release.set()
    await first
    assert await second == "short"
    threads.close()


async def test_the_time_of_a_coroutine_in_a_loop_that_another_blocks_is_no_fault_of_its_own() -> (
    None
):
    threads = Threads(2)
    release = threading.Event()
    began = threading.Event()

    async def block() -> str:
        began.set()
        release.wait(60)
        return "late"

    async def innocent() -> str:
        return "early"

    blocking = asyncio.create_task(threads.run_coroutine(block, "block"))
    while not began.is_set():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    with pytest.raises(EnvironmentLost, match="another coroutine"):
        await threads.run_coroutine(innocent, "innocent", timeout_s=0.05)
    release.set()
    assert await blocking == "late"
    threads.close()


async def test_the_end_cancels_what_runs_in_the_users_loop() -> None:
    threads = Threads(2)
    began = threading.Event()

    async def stays() -> None:
        began.set()
        await asyncio.Event().wait()

    async def add() -> int:
        return 3

    running = asyncio.create_task(threads.run_coroutine(stays, "stays"))
    await asyncio.to_thread(began.wait)
    watches = set(threads._watches)
    assert len(watches) == 1
    threads.close()
    await asyncio.wait((running, *watches))
    assert isinstance(running.exception(), RuntimeError), "its own episode was not cancelled"
    assert all(watch.cancelled() for watch in watches)

    assert await threads.run_coroutine(add, "add") == 3, "a later call has another loop"
    threads.close()
    threads.close()


async def test_a_loop_that_was_blocked_ends_once_its_calls_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blocked: list[asyncio.AbstractEventLoop] = []
    found: list[asyncio.AbstractEventLoop] = []
    release = threading.Event()

    async def responds(user_loop: Any, within_s: float) -> bool:
        assert within_s == threads_module.BLOCKED_S
        await asyncio.sleep(0)
        return user_loop.loop not in blocked

    async def waits() -> None:
        await asyncio.Event().wait()

    async def blocks() -> str:
        found.append(asyncio.get_running_loop())
        release.wait(60)
        await asyncio.sleep(0)
        return "late"

    async def where() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    monkeypatch.setattr(threads_module._UserLoop, "responds", responds)
    monkeypatch.setattr(threads_module, "_BEAT_S", 0.001)
    threads = Threads(3)
    lost = asyncio.create_task(threads.run_coroutine(waits, "waits"))
    blocking = asyncio.create_task(threads.run_coroutine(blocks, "blocks"))
    while not found:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    (old,) = found
    blocked.append(old)
    with pytest.raises(EnvironmentLost):
        await lost
    assert threads.hung == 1
    new = await threads.run_coroutine(where, "where")
    assert new is not old
    assert await threads.run_coroutine(where, "where") is new

    release.set()
    assert await blocking == "late", "it goes on, in the old loop"
    assert threads.hung == 1
    blocked.clear()
    while not old.is_closed():  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert threads.hung == 0
    assert await threads.run_coroutine(where, "where") is new
    threads.close()


class Blocks:
    """Has a coroutine that blocks its event loop."""

    release = threading.Event()

    async def reset(self, prompt: str) -> None:
        """Shows that it does not run beside the server."""
        self.blocks = prompt == "block"
        assert threading.current_thread() is not threading.main_thread()

    async def get_reward(self) -> float:
        """Blocks, or takes longer than the loop may be blocked."""
        if self.blocks:
            self.release.wait(60)
        else:
            await asyncio.sleep(0.5)
        return 1.0


async def test_a_coroutine_that_blocks_stops_neither_the_server_nor_other_episodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads_module, "_BEAT_S", 0.05)
    monkeypatch.setattr(threads_module, "BLOCKED_S", 0.2)
    Blocks.release.clear()
    async with served(Blocks, lambda _: "done") as server:
        name = server.service.runner.name
        requests = [request_for(name, prompt) for prompt in ("other", "block")]
        requests[1].request_id = "r2"
        other, blocks = [
            asyncio.create_task(server.client.episodes(request)) for request in requests
        ]
        (episode,) = await other
        assert (episode.status, episode.reward) == ("ok", 1.0), "it was played again"
        stats = (await server.http.get("/stats")).json()
        assert stats["hung_calls"] == 1
        assert not blocks.done()
        Blocks.release.set()
        (episode,) = await blocks
        assert (episode.status, episode.reward) == ("ok", 1.0)
        while server.service.stats()["hung_calls"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_crash_of_one_episode_leaves_the_others() -> None:
    async with served(Hangs, lambda _: "done") as server:
        runner: Any = server.service.runner
        numbers = iter(range(2))
        play = runner._play

        async def fails_once(*given: Any, **others: Any) -> None:
            if next(numbers) == 0:
                raise KeyError("a defect")
            await play(*given, **others)

        runner._play = fails_once
        episodes = await server.client.episodes(request_for(NAME, n=2))
        assert [episode.status for episode in episodes] == ["error", "ok"]
        assert "KeyError: 'a defect'" in episodes[0].detail


async def test_the_number_of_concurrent_calls_is_bounded() -> None:
    threads = Threads(3)
    running = 0
    most = 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.001)
        with lock:
            running -= 1

    await asyncio.gather(*(threads.run(work, "work") for _ in range(30)))
    assert most <= 3
    assert threads.hung == 0
    threads.close()


class Alarmed:
    """Limits its own time, as tools do that were written for the main thread."""

    def reset(self) -> None:
        """Begins."""

    def query(self) -> str:
        """Answers in time."""
        before = signal.signal(signal.SIGVTALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_VIRTUAL, 60)
        try:
            return f"in the main thread: {threading.current_thread() is threading.main_thread()}"
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)


def test_a_tool_that_sets_an_alarm_is_called_in_the_main_thread() -> None:
    def reply(text: str) -> str:
        return "done" if "<tool_response>" in text else CALL.replace("NAME", "query")

    async def play() -> Episode:
        async with served(Alarmed, reply) as server:
            (episode,) = await server.client.episodes(request_for(server.service.runner.name))
            return episode

    with LoopThread("episodes") as loop:
        episode = loop.call(play())
    assert "in the main thread: True" in episode.sequences[0].text
    assert episode.metrics["tool_errors"] == 0


def test_a_loop_of_users_runs_when_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose thread begins late would count as blocked."""
    begins = threading.Event()

    def start_late(function: Callable[[], None], name: str) -> object:
        def begin() -> None:
            begins.wait()
            function()

        return in_daemon_thread(begin, name)

    monkeypatch.setattr(threads_module, "in_daemon_thread", start_late)
    threading.Timer(0.1, begins.set).start()
    made = threads_module._UserLoop()
    assert made.loop.is_running()
    made.end()
