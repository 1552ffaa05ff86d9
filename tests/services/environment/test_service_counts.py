"""What the service counts and remembers of requests, sessions and refused calls."""

import asyncio

import pytest

from common.errors import InvalidInput, NotFound
from services.environment import service as module
from services.environment.session import SessionClosed
from tests.support.environments.environments import Calculator, request_for, served


async def test_ended_episodes_run_no_more_and_closing_waits_for_those_that_do() -> None:
    async with served(Calculator, lambda _: "3") as server:
        service = server.service
        name = service.runner.name
        await service.episodes(request_for(name, n=3))
        assert service.stats()["running"] == 0
        other = request_for(name, n=2).model_copy(update={"request_id": "r2"})
        begun = asyncio.create_task(service.episodes(other))
        await asyncio.sleep(0)
        assert service.stats()["running"] == 2
        await service.close()
        assert service.stats()["running"] == 0
        await asyncio.gather(begun, return_exceptions=True)


async def test_the_oldest_ended_session_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_ENDED", 2)
    async with served(Calculator, lambda _: "3") as server:
        service = server.service
        request = request_for(service.runner.name)
        sessions = [service.open_session(request) for _ in range(3)]
        assert [service.session(each.id) for each in sessions] == sessions
        for each in sessions:
            service.close_session(each)
        with pytest.raises(NotFound):
            service.session(sessions[0].id)
        for each in sessions[1:]:
            with pytest.raises(SessionClosed):
                service.session(each.id)


async def test_the_first_refusal_of_a_session_is_kept() -> None:
    async with served(Calculator, lambda _: "3") as server:
        service = server.service
        session = service.open_session(request_for(service.runner.name))
        for field in ("messages[3].role", "tools"):
            error = InvalidInput(f"wrong {field}", field=field, value=1, remedy="leave it out")
            service.refuse(session, error)
        assert session.refused_calls == 2
        assert session.refusal == "messages[3].role: wrong messages[3].role; leave it out"
