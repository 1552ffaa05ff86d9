"""The life of a user's server, as its episodes see it: the process and its
HTTP are stand-ins."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from common.errors import ServiceLost
from common.process.topology import WRONG_SETTING
from services.environment import user_server
from services.environment.outcome import EnvironmentLost, EpisodeFailed
from services.environment.programs import RunningProgram
from services.environment.user_server import UserServer
from tests.support.errors import raises


class Program:
    """A process that serves nothing, and ends when the test says so."""

    def __init__(self, words: list[str], env: dict[str, str], home: Path) -> None:
        self.words = words
        self.env = env
        self.home = home
        self.status: int | None = None
        self.closed = 0
        self.grace_s = 0.0

    @property
    def ended(self) -> bool:
        return self.status is not None

    async def finish(self) -> tuple[int, str]:
        assert self.status is not None
        return self.status, "its output"

    async def close(self) -> str:
        self.closed += 1
        self.status = -9
        return ""

    async def end(self, grace_s: float) -> int:
        self.grace_s = grace_s
        return 0


class Lives:
    """The programs that were started, and what answers at their port."""

    port = 7777

    def __init__(self) -> None:
        self.started: list[Program] = []
        self.health: list[int] = []
        """The coming answers of `/health`; then 200."""
        self.asked = 0
        self.statuses: list[int] = []
        """How the coming programs end at once."""

    async def launch(self, words: list[str], env: dict[str, str], *, home: Path) -> Program:
        assert home.is_dir()  # noqa: ASYNC240
        program = Program(words, env, home)
        if self.statuses:
            program.status = self.statuses.pop(0)
        self.started.append(program)
        return program


def living(monkeypatch: pytest.MonkeyPatch) -> tuple[UserServer, Lives]:
    lives = Lives()
    client = httpx.AsyncClient

    def answer(request: httpx.Request) -> httpx.Response:
        assert (request.method, str(request.url)) == (
            "GET",
            f"http://127.0.0.1:{lives.port}/health",
        )
        lives.asked += 1
        status = lives.health.pop(0) if lives.health else 200
        if not status:
            raise httpx.ConnectError("refused")
        return httpx.Response(status)

    def open_client(**settings: Any) -> httpx.AsyncClient:
        assert settings == {"trust_env": False, "timeout": 5.0}
        return client(transport=httpx.MockTransport(answer), **settings)

    monkeypatch.setattr(httpx, "AsyncClient", open_client)
    monkeypatch.setattr(user_server, "words_of", str.split)
    monkeypatch.setattr(user_server, "free_port", lambda: lives.port)
    monkeypatch.setattr(RunningProgram, "launch", lives.launch)
    monkeypatch.setattr(user_server, "_RETRY_S", 0.0)
    return UserServer("agent:it", "prog --at={port} {port}", "/run"), lives


async def test_one_program_serves_all_episodes_once_it_is_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, lives = living(monkeypatch)
    lives.health = [0, 503, 404, 204]
    for episode in range(3):
        async with server.ready(6000.0) as url:
            assert url == f"http://127.0.0.1:{lives.port}/run"
        assert lives.asked == 5, episode
    (program,) = lives.started
    assert program.words == ["prog", f"--at={lives.port}", f"{lives.port}"]
    assert program.env == {"PORT": f"{lives.port}"}
    program.status = 0
    async with server.ready(6000.0):
        assert len(lives.started) == 2, "it had ended"
    assert lives.asked == 6
    homes = [each.home for each in lives.started]
    assert len(set(homes)) == 2
    await server.close()
    assert (lives.started[1].grace_s, program.grace_s) == (10.0, 0.0)
    assert not any(home.exists() for home in homes)
    await UserServer("agent:it", "prog {port}").close()


@pytest.mark.parametrize("status", [0, 1, 77, -9])
async def test_starts_that_fail_too_often_end_the_run(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, lives = living(monkeypatch)
    shown = {0: "ended with status 0", -9: "was killed by SIGKILL"}
    reason = f"prog {shown.get(status, f'ended with status {status}')}"
    for failures in (4, 4, 5):
        lives.statuses = [status] * failures
        for _ in range(4):
            with pytest.raises(EpisodeFailed, match=reason) as caught:
                await server.ready(6000.0).__aenter__()
            assert str(caught.value).endswith("before it answered: its output")
        if failures == 4:
            async with server.ready(6000.0):
                lives.started[-1].status = 0  # it ends after it was ready
    with raises(ServiceLost, field="environment.name", value="agent:it") as lost:
        await server.ready(6000.0).__aenter__()
    assert f"failed starts: 5; {reason}" in str(lost.value)


async def test_a_wrong_setting_ends_the_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    server, lives = living(monkeypatch)
    lives.statuses = [WRONG_SETTING]
    with raises(ServiceLost, field="environment.name", value="agent:it"):
        await server.ready(6000.0).__aenter__()
    assert len(lives.started) == 1


@pytest.mark.parametrize("answers", [200, 500])
@pytest.mark.parametrize("kind", [TimeoutError, EnvironmentLost, EpisodeFailed, ValueError])
async def test_a_server_that_hangs_is_ended_by_the_episode_that_it_failed(
    kind: type[Exception], answers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, lives = living(monkeypatch)

    async def play() -> None:
        async with server.ready(6000.0):
            lives.health = [answers]
            raise kind

    with pytest.raises(kind):
        await play()
    is_lost = kind in (TimeoutError, EnvironmentLost)
    assert lives.asked == 1 + is_lost
    assert lives.started[0].closed == (is_lost and answers != 200)

    async def play_while_another_begins() -> None:
        async with server.ready(6000.0):
            lives.started[-1].status = 1
            async with server.ready(6000.0):
                lives.health = [500]
            raise TimeoutError

    with pytest.raises(TimeoutError):
        await play_while_another_begins()
    old, new = lives.started[-2:]
    assert (old.ended, new.closed) == (True, 0), "another one has taken its place"


@pytest.mark.parametrize("waited_s", [0.0, 60_000.0, 60_001.0])
async def test_a_server_that_is_never_ready_loses_its_episodes(
    waited_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang() -> bool:
        raise TimeoutError  # as the deadline does

    server, lives = living(monkeypatch)
    monkeypatch.setattr(server, "_answers", hang)
    times = [5.0, 5.0 + waited_s]
    monkeypatch.setattr(user_server, "time", SimpleNamespace(monotonic=lambda: times.pop(0)))
    with pytest.raises(EnvironmentLost, match=r"^prog was not ready within 6000 s$"):
        await server.ready(6000.0).__aenter__()
    assert lives.started[0].closed == (waited_s > 60_000), "after ten deadlines it is started again"


async def test_a_url_is_only_passed_on() -> None:
    server = UserServer("agent:it", "https://agents.example/run", "/more")
    async with server.ready(0.0) as url:
        assert url == "https://agents.example/run"
    await server.close()
