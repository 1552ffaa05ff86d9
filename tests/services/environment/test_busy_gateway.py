"""A program that gives up on a call that the server was too busy for is no failure of the model: its
episode is lost, whatever reward it gives, unless it asked again and was answered."""

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from common.wire.schemas import Episode
from services.http import connections
from tests.support.environments.environments import Served, request_for, served
from tests.support.paths import ROOT
from tests.support.processes.processes import alive

PROGRAM = ROOT / "tests" / "support" / "environments" / "hasty_program.py"
NAME = f"agent:{sys.executable} -I -S {PROGRAM}"
pytestmark = pytest.mark.integration


async def until(path: Path, playing: asyncio.Task[Any]) -> None:
    while not path.exists():  # noqa: ASYNC240
        assert not playing.done(), playing.result()
        await asyncio.sleep(0.01)


@contextmanager
def refusing(server: Served, what: str) -> Iterator[None]:
    """Lets a server refuse all requests, as it does under load, or fail."""
    load = server.app.state.load
    with pytest.MonkeyPatch.context() as patch:
        if what == "requests":
            patch.setattr(load, "request_limit", 0)
        elif what == "bytes":
            patch.setattr(load, "body_bytes_limit", 0)
        elif what == "connections":
            patch.setattr(connections, "max_connections", lambda: 0)
        else:
            (session,) = server.service._sessions.values()
            patch.setattr(session, "_continued", None)
        yield


async def play(
    server: Served, folder: Path, *, how: str, then: str = "", reward: str = "post", why: str = ""
) -> Episode:
    """Plays an episode whose program gives up while the server is busy."""
    folder.mkdir()  # noqa: ASYNC240
    request = request_for(NAME)
    request.request_id = folder.name
    request.task.columns = {"folder": str(folder), "how": how, "then": then, "reward": reward}
    playing = asyncio.create_task(server.client.episodes(request))
    try:
        await until(folder / "ready", playing)
        if why:
            with refusing(server, why):
                (folder / "busy").touch()
                await until(folder / "left", playing)
        else:
            # The event loop does nothing until the program has left, or has ended.
            (folder / "busy").touch()
            pid = int((folder / "pid").read_text())
            while not (folder / "left").exists() and alive(pid):
                time.sleep(0.01)  # noqa: ASYNC251
        (folder / "free").touch()
        (episode,) = await playing
    finally:
        playing.cancel()
    return episode


@pytest.fixture
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets no episode be tried again: its program would find the files of the first try."""
    monkeypatch.setattr("services.environment.service._TRIES", 1)


def assert_lost(episode: Episode, why: str) -> None:
    assert (episode.status, episode.reward, episode.sequences) == ("died", None, [])
    assert why in episode.detail
    assert episode.metrics["turns"] >= 1, "it had something to train on"


@pytest.mark.usefixtures("once")
@pytest.mark.parametrize("reward", ["post", "file"])
@pytest.mark.parametrize("how", ["whole", "half", "resets"])
async def test_a_client_that_left_before_its_call_was_read_has_no_answer(
    how: str, reward: str, tmp_path: Path
) -> None:
    async with served(NAME, lambda _: "3") as server:
        episode = await play(server, tmp_path / "episode", how=how, reward=reward)
        assert_lost(episode, "a call had no answer when the program ended or stopped waiting")


@pytest.mark.usefixtures("once")
@pytest.mark.parametrize(
    ("why", "detail"),
    {
        "requests": "too much at once: 1 requests are in progress, the limit is 0",
        "bytes": "the limit is 0",
        "fault": "internal error: TypeError",
        "connections": "the environment-server refused connections",
    }.items(),
)
async def test_a_call_that_was_refused_under_load_has_no_answer(
    why: str, detail: str, tmp_path: Path
) -> None:
    async with served(NAME, lambda _: "3") as server:
        episode = await play(server, tmp_path / "given-up", how="asks", why=why)
        assert_lost(episode, detail)
        again = await play(server, tmp_path / "again", how="asks", why=why, then="same")
        assert (again.status, again.reward) == ("ok", 0.0)


@pytest.mark.usefixtures("once")
@pytest.mark.parametrize("how", ["whole", "half"])
async def test_only_an_answer_to_the_same_call_makes_up_for_it(how: str, tmp_path: Path) -> None:
    async with served(NAME, lambda _: "3") as server:
        episode = await play(server, tmp_path / "same", how=how, then="same")
        assert (episode.status, episode.reward) == ("ok", 0.0)
        assert_lost(await play(server, tmp_path / "other", how=how, then="other"), "a call had no")
