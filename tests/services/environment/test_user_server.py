"""A server of an agent that the environment-server starts: one for all episodes, killed, hung, and never
started."""

import sys
import tempfile
from pathlib import Path

import httpx
import pytest

from common.errors import ServiceLost
from common.settings.sections import EnvironmentSection, RuntimeSection
from services.environment import user_server
from services.environment.outcome import EnvironmentLost
from services.environment.runners import load_runner
from services.environment.user_server import UserServer
from tests.support.environments.environments import request_for, served
from tests.support.paths import ROOT
from tests.support.processes.processes import alive

SERVER = f"{sys.executable} -I -S {ROOT / 'tests' / 'support' / 'environments' / 'agent_server.py'}"
NAME = f"agent:{SERVER} {{port}}"
pytestmark = pytest.mark.integration


def names_in(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir()}


async def test_one_server_plays_all_episodes_and_ends_with_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    async with served(NAME, lambda _: "3") as server:
        episodes = await server.client.episodes(request_for(NAME, "together", n=3))
        assert {(each.status, each.metrics["turns"]) for each in episodes} == {("ok", 1)}
        (pid,) = {each.reward for each in episodes}
        assert pid is not None
        assert alive(int(pid))
        (folder,) = names_in(tmp_path)
        assert folder.startswith("rlhf-episodes-")
    assert not alive(int(pid))
    assert not names_in(tmp_path), "its folder is removed"


def test_the_folder_of_a_killed_server_is_removed_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "rlhf-episodes-killed" / "episode-1").mkdir(parents=True)
    load_runner(EnvironmentSection(name="agent:sh {port}"), "", RuntimeSection())
    assert not names_in(tmp_path)


async def test_a_killed_server_is_started_again_and_plays_its_episodes(tmp_path: Path) -> None:
    async with served(NAME, lambda _: "3") as server:
        request = request_for(NAME, "dies once", n=3)
        request.task.columns = {"folder": str(tmp_path)}
        episodes = await server.client.episodes(request)
        assert {each.status for each in episodes} == {"ok"}
        pids = {str(int(each.reward or 0)) for each in episodes}
        assert len(pids) == 1
        assert pids < names_in(tmp_path)
        (again,) = server.service._tried_again.collect()
        assert again.samples[0].value >= 3


async def test_a_server_that_hangs_before_it_is_ready_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_server, "_START_DEADLINES", 0)
    mark = tmp_path / "works"
    script = f"test -e {mark} || exec sleep 1000; exec {SERVER} $0"
    server = UserServer("test", f"sh -c '{script}' {{port}}")
    with pytest.raises(EnvironmentLost, match="was not ready within 1 s"):
        async with server.ready(1):
            pass
    mark.touch()
    async with server.ready(400) as url, httpx.AsyncClient() as http:
        assert (await http.get(f"{url}/health")).is_success
    await server.close()


async def test_a_hung_server_costs_a_time_out_and_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_server, "_HUNG_S", 0.3)
    async with served(NAME, lambda _: "3") as server:
        # The next episodes find a server that has started.
        (first,) = await server.client.episodes(request_for(NAME))
        assert first.status == "ok"
        request = request_for(NAME, "stops", deadline_s=3)
        request.request_id = "hung"
        request.task.columns = {"folder": str(tmp_path)}
        (hung,) = await server.client.episodes(request)
        assert (hung.status, hung.reward) == ("timeout", None)
        request.request_id = "again"
        request.limits.deadline_s = 400
        (episode,) = await server.client.episodes(request)
        assert episode.status == "ok"
        assert len(names_in(tmp_path)) == 2


@pytest.mark.parametrize(("status", "starts"), [(1, 5), (78, 1)])
async def test_a_server_that_never_starts_ends_the_run_with_the_reason(
    status: int, starts: int
) -> None:
    """78 says that another start would not help."""
    name = f"agent:{SERVER} port:{{port}} {status}"
    async with served(name, lambda _: "3") as server:
        for number in range(starts - 1):
            request = request_for(name)
            request.request_id = str(number)
            (episode,) = await server.client.episodes(request)
            assert (episode.status, episode.reward) == ("error", None)
            assert "the port is no number" in episode.detail
        with pytest.raises(ServiceLost, match="the port is no number"):
            await server.client.episodes(request_for(name))
