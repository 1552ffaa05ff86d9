"""The dashboard's calls and files, and who may read them."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from common.process.topology import Topology
from common.settings.config import Config
from services.environment.service import EpisodeService
from services.http.app import create_app
from tests.support.environments.own_environments import INSISTS
from tests.support.processes.ports import free_port
from tests.support.processes.reward_process import reward_server
from tests.support.runs.run_files import make_run
from tests.support.services.apps import make, tiny
from trainer.backends.server import BackgroundServer
from trainer.cli.diagnose import main as diagnose
from trainer.dashboard.app import PAGES, STATIC, create_dashboard_app
from trainer.dashboard.run_list import RunList
from trainer.diagnosis.health import PATIENCE_S, Health


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    app = create_dashboard_app(
        RunList([make_run(tmp_path / "first", 5), make_run(tmp_path / "second", 7)])
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        yield client


async def test_runs_are_known_by_their_index(http: httpx.AsyncClient) -> None:
    runs = (await http.get("/dashboard/api/runs")).json()
    assert [(run["run"], run["name"], run["live"], run["step"]) for run in runs] == [
        (0, "first", False, 5),
        (1, "second", False, 7),
    ]
    series = (await http.get("/dashboard/api/series", params={"run": 1, "points": 3})).json()
    assert (series["newest"], len(series["steps"]), len(series["low"]["reward"])) == (7, 3, 3)
    assert series["times"][-1] == 1.8e9 + 7
    answer = await http.get("/dashboard/api/steps/2", params={"run": 2})
    assert (answer.status_code, answer.json()["error"]["field"]) == (404, "run")


async def test_the_page_allows_nothing_from_elsewhere(http: httpx.AsyncClient) -> None:
    for path in sorted(PAGES):
        answer = await http.get(path, follow_redirects=True)
        assert answer.status_code == 200, path
        assert answer.headers["content-security-policy"].startswith("default-src 'self';")
    assert (await http.get("/dashboard/static/..%2Fapp.py")).status_code == 404
    own = [
        file for file in STATIC.iterdir() if not file.name.lower().startswith(("uplot", "katex"))
    ]
    assert len(own) > 8
    for file in own:
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in text, file
        assert "https:" not in text, file


async def test_files_are_open_and_data_needs_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_TOKEN", "correct-horse-battery-staple")
    app = create_dashboard_app(RunList([make_run(tmp_path, 2)]))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        for path in sorted(PAGES):
            assert (await client.get(path, follow_redirects=True)).status_code == 200, path
            assert (await client.post(path)).status_code == 401, path
        for call in ("runs", "facts", "series", "steps/1", "csv", "health", "diagnosis"):
            assert (await client.get(f"/dashboard/api/{call}")).status_code == 401, call
            header = {"authorization": "Bearer correct-horse-battery-staple"}
            assert (
                await client.get(f"/dashboard/api/{call}", headers=header)
            ).status_code == 200, call


async def test_the_first_finding_about_a_run_is_that_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", 5)
    log = run / "state" / "logs" / "ppo-trainer-rank0.log"
    log.parent.mkdir(parents=True)
    log.write_text(
        "2030-01-01 00:00:00,000 CRITICAL end: error: metrics.jsonl cannot be written: [Errno 28] "
        "No space left on device · field: trainer.run_dir · remedy: free disk space there\n"
    )
    app = create_dashboard_app(RunList([run]))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        answer = (await client.get("/dashboard/api/diagnosis")).json()
    with pytest.raises(SystemExit) as ended:
        diagnose([str(run)])
    assert ended.value.code == 1
    assert answer["first_line"] == capsys.readouterr().out.splitlines()[0]
    assert answer["first_line"].startswith(
        "A full disk: the trainer's run directory: metrics.jsonl"
    )
    assert [finding["level"] for finding in answer["findings"]] == ["stopped"]


def ports(config: Config, **ports: int) -> Config:
    """Sets these ports; there is no rollout node."""
    for section, port in ports.items():
        getattr(config, section).port = port
    config.rollout.agent_port = config.rollout.router_port = free_port()
    return config


@pytest.mark.integration
@pytest.mark.slow
async def test_a_service_is_healthy_then_hangs_then_is_dead(
    base_model: Path, tmp_path: Path
) -> None:
    config, port = tiny(base_model, tmp_path), free_port()
    with (
        BackgroundServer(make("data", config), "127.0.0.1", 0) as data,
        BackgroundServer(make("replay", config), "127.0.0.1", 0) as replay,
        reward_server(port, tmp_path) as process,
    ):
        health = Health(
            ports(config, data=data.port, replay=replay.port, reward=port),
            Topology(),
            lambda: 1,
            lambda: 12,
        )
        async with health.running():
            states = await until(health, "healthy", "data-server", "reward-server", "replay-buffer")
            well = {name for name, (state, _) in states.items() if state == "healthy"}
            assert well == {"ppo-trainer", "data-server", "reward-server", "replay-buffer"}
            assert states["rollout-server-0"][0] == states["router"][0] == "dead"
            assert states["replay-buffer"][1] == "0 of 100,000 completions"
            process.send_signal(signal.SIGSTOP)
            states = await until(health, "dead", "reward-server")
            assert states["reward-server"][1] == "no answer within 2 s"
            process.send_signal(signal.SIGCONT)
            await until(health, "healthy", "reward-server")
            process.kill()
            states = await until(health, "dead", "reward-server")
            assert "no answer" not in states["reward-server"][1]


async def until(health: Health, state: str, *names: str) -> dict[str, tuple[str, str]]:
    """Returns state and text of all services, once the named ones have this state."""
    limit = time.monotonic() + 400
    while time.monotonic() < limit:
        found: dict[str, tuple[str, str]] = {
            service.name: (service.state, service.text) for service in await health.ask()
        }
        if all(found[name][0] == state for name in names):
            return found
        await asyncio.sleep(0.3)
    raise AssertionError(f"{names} are never {state}: {found}")


@pytest.mark.integration
async def test_a_service_that_wants_another_token_is_dead_and_one_that_drains_is_not_serving(
    base_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(base_model, tmp_path)
    monkeypatch.setenv("API_TOKEN", "another-token-of-20-characters")
    with ExitStack() as stack:
        first = stack.enter_context(BackgroundServer(create_app("data-server"), "127.0.0.1", 0))
        monkeypatch.delenv("API_TOKEN")
        unwell = create_app("reward-server", not_ready=lambda: "its workers are starting")
        second = stack.enter_context(BackgroundServer(unwell, "127.0.0.1", 0))
        health = Health(
            ports(config, data=first.port, reward=second.port), Topology(), lambda: 0, lambda: None
        )
        async with health.running():
            found = {service.name: service for service in await health.ask()}
    assert (found["data-server"].state, found["reward-server"].state) == ("dead", "warning")
    assert found["reward-server"].text == "its workers are starting"
    assert "401" in found["data-server"].text


@pytest.mark.integration
async def test_every_node_of_the_environment_server_is_shown_with_its_calls_that_hang(
    base_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        EpisodeService, "_hung_calls", lambda _: {"hung_calls": 3, "hung_calls_limit": 64}
    )
    monkeypatch.setattr("trainer.diagnosis.health._FRESH_S", 0.0)
    config = tiny(base_model, tmp_path, "--environment.name", INSISTS)
    app = make("environment", config)
    with BackgroundServer(app, "127.0.0.1", 0) as server:
        health = Health(ports(config, environment=server.port), Topology(), lambda: 0, lambda: None)
        async with health.running():
            found = await until(health, "healthy", "environment-server-0")
            assert (
                found["environment-server-0"][1]
                == "episodes: 0; 3 calls are stuck, the limit is 64"
            )
            health._environment(
                {
                    "nodes": 2,
                    "episodes": {"ok": 1200, "died": 2},
                    "running": 1,
                    "hung_calls": 0,
                    "hung_calls_limit": 64,
                }
            )
            assert {"environment-server-0", "environment-server-1"} <= {
                service.name for service in await health.ask()
            }


def test_a_dead_service_is_red_within_five_seconds() -> None:
    """It depends on two times: how long a service may take to answer, and how often the page
    asks."""
    page = (STATIC / "page.js").read_text()
    value = {
        line.split()[1]: int(line.split("=")[1].split(";")[0]) / 1000
        for line in page.splitlines()
        if "_MS = " in line
    }
    assert PATIENCE_S + value["HEALTH_MS"] < 5
    assert value["HEALTH_PATIENCE_MS"] + value["HEALTH_MS"] < 5
    assert value["HEALTH_PATIENCE_MS"] > PATIENCE_S
