"""Methods that hang: their threads are counted and replaced, and the server reports too many of
them."""

import asyncio
import sys
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from common.wire.schemas import Episode
from services.environment.threads import Threads
from tests.support.environments import request_for, served


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

    def leave(self) -> str:
        """Ends the process."""
        sys.exit("enough")

    def exhaust(self) -> Any:
        """Takes what there is not."""
        return next(iter(()))

    def get_reward(self) -> float:
        """Is the same for all."""
        return 1.0


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
            "Hangs: hang is still running although its episode has ended: 1 such calls"
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
    ("tool", "told"), [("leave", "SystemExit: enough"), ("exhaust", "StopIteration")]
)
async def test_model_is_told_of_an_exception_that_would_end_more_than_the_call(
    tool: str, told: str
) -> None:
    replies = iter([call(tool), "done"])
    async with served(Hangs, lambda _: next(replies)) as server:
        (episode,) = await server.client.episodes(request_for(NAME, deadline_s=60))
        assert (episode.status, episode.metrics["tool_errors"]) == ("ok", 1)
        assert told in episode.sequences[0].text


async def test_threads_are_reused_and_the_number_of_concurrent_calls_is_bounded() -> None:
    threads = Threads(3)
    seen: set[int] = set()
    running = 0
    most = 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            seen.add(threading.get_ident())
        threading.Event().wait(0.001)
        with lock:
            running -= 1

    await asyncio.gather(*(threads.run(work, "work") for _ in range(30)))
    assert most <= 3
    assert len(seen) <= 3
    assert threads.hung == 0
    threads.close()
