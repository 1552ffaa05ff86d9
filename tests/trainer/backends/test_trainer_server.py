"""The trainer's own HTTP: what agents are told and may report, the experts of a group, and a server
whose thread ends; the clients of a job group's tasks.
"""

import asyncio
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import httpx
import pytest

from common.clients.environment import EnvironmentClient
from common.errors import ConfigError
from common.process.metrics import Metrics
from common.process.topology import Topology
from common.settings.config import Config
from common.wire.schemas import WeightManifest, WorkerReport, WorkerState
from services.http.app import create_app
from tests.support.errors import raises
from trainer.backends import job_group, server
from trainer.backends.job_group import JobGroupBackend
from trainer.backends.server import BackgroundServer, add_experts, create_trainer_app


class Board:
    """Stands for the board of weights."""

    def __init__(self, folder: Path) -> None:
        self.directory = folder / "weights"
        self.asked: list[Any] = []
        self.manifest = WeightManifest(run_id="run", version=4, files=[])

    async def latest_after(self, *given: Any) -> WeightManifest:
        self.asked.append(given)
        return self.manifest

    async def with_files(self, latest: WeightManifest, wait_s: float) -> WeightManifest:
        self.asked.append(("files", latest.version, wait_s))
        return latest

    def file(self, version: int, name: str) -> Path:
        self.asked.append((version, name))
        return self.directory / name

    def report(self, report: WorkerReport) -> bool:
        self.asked.append(report.name)
        return report.state == "ready"

    def workers(self) -> list[WorkerReport]:
        return []

    def count(self, state: WorkerState) -> int:
        return len(state)


def report_of(name: str, **fields: Any) -> WorkerReport:
    usual: dict[str, Any] = {
        "name": name,
        "url": "http://engine",
        "num_nodes": 1,
        "state": "ready",
        "version": 3,
    }
    return WorkerReport(**(usual | fields))


async def test_agents_ask_and_report(tmp_path: Path) -> None:
    board: Any = Board(tmp_path)
    board.directory.mkdir()
    (board.directory / "small").write_bytes(b"small")
    large = bytes(range(256)) * 5000
    (board.directory / "large").write_bytes(large)
    metrics = Metrics("ppo-trainer")
    app = create_trainer_app(board, metrics)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        answer = await http.get("/weights/latest")
        assert answer.json()["version"] == 4
        asked: dict[str, Any] = {"after_run": "r", "after_version": 2, "wait_s": 3, "asleep": True}
        await http.get("/weights/latest", params=asked)
        await http.get("/weights/latest", params=asked | {"files": True})
        await http.get("/weights/latest", params={"files": True})
        assert board.asked == [
            ("", -1, 0.0, False),
            ("r", 2, 3.0, True),
            ("r", 2, 3.0, True),
            ("files", 4, 3.0),
            ("", -1, 0.0, False),
            ("files", 4, 10.0),
        ]
        for wait_s in (-0.1, 60.1):
            answer = await http.get("/weights/latest", params={"wait_s": wait_s})
            assert answer.status_code == 422
        for name, content in (("small", b"small"), ("large", large)):
            answer = await http.get(f"/weights/7/files/{name}")
            assert (answer.content, board.asked[-1]) == (content, (7, name))
            assert answer.headers["content-type"] == "application/octet-stream"
        assert (await http.get("/weights/-1/files/small")).status_code == 422

        headers = {"x-request-id": "1"}
        for state, may in (("ready", True), ("failed", False)):
            body = report_of("node-1", state=state).model_dump(mode="json")
            answer = await http.post("/workers/node-1", json=body, headers=headers)
            assert (answer.json()["may_serve"], board.asked[-1]) == (may, "node-1")
        count = len(board.asked)
        answer = await http.post("/workers/node-2", json=body, headers=headers)
        error = answer.json()["error"]
        assert (answer.status_code, error["field"], error["value"]) == (422, "name", "node-1")
        assert len(board.asked) == count, "nobody reports for another"
        assert (await http.get("/workers")).json() == []
        ranks = (await http.get("/ranks")).json()
        assert (ranks[0]["rank"], ranks[0]["name"]) == (0, "rank 0")
    found = {
        sample.labels["state"]: sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "rlhf_trainer_rollout_nodes"
    }
    assert found == {state: len(state) for state in get_args(WorkerState)}


async def test_only_files_of_experts_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Any] = []

    def part(path: Path, start: int, size: int) -> Any:
        read.append((path, start, size))
        return SimpleNamespace(tobytes=lambda: b"experts")

    monkeypatch.setattr(server, "read_part", part)
    app = create_app("ppo-trainer")
    add_experts(app, tmp_path)
    name = "0123456789abcdef" * 2 + ".experts"
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        answer = await http.get(f"/experts/{name}", params={"start": 0, "size": 5})
        assert answer.content == b"experts"
        assert read == [(tmp_path / name, 0, 5)]
        for wrong in (name.upper(), name[1:], f"0{name}", f"{name}x", "..%2Fsecret.experts"):
            answer = await http.get(f"/experts/{wrong}", params={"start": 0, "size": 5})
            assert answer.status_code in (404, 422), wrong
        for start, size in ((-1, 5), (0, -1)):
            answer = await http.get(f"/experts/{name}", params={"start": start, "size": size})
            assert answer.status_code == 422
    assert len(read) == 1


@pytest.mark.parametrize("how", ["served", "dies", "never starts"])
def test_a_server_in_a_thread_tells_that_it_died(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    died: list[str] = []
    background = BackgroundServer(
        create_app("ppo-trainer"), "127.0.0.1", 0, lambda: died.append("died")
    )
    assert background.port == background._socket.getsockname()[1]
    if how == "never starts":

        async def fails(**_: Any) -> None:
            raise SystemExit(1)

        monkeypatch.setattr(background._server, "serve", fails)
        with raises(ConfigError, field="trainer.port", value=str(background.port)):
            background.__enter__()
        background.__exit__()
    else:
        with background:
            url = f"http://127.0.0.1:{background.port}/health"
            assert httpx.get(url, trust_env=False).status_code == 200
            if how == "dies":

                async def dies() -> None:
                    raise RuntimeError("broken")

                monkeypatch.setattr(background._server, "on_tick", lambda counter: dies())
                background._loop.call(asyncio.wait({background._task}))
    assert bool(died) is (how != "served")
    assert background._socket.fileno() == -1


# ---------------------------------------------------------------- a job group


def topology() -> Topology:
    return Topology(group="demo")


@pytest.mark.parametrize("engine", ["embedded", "sglang"])
@pytest.mark.parametrize("plays", [False, True])
@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("tokens", [(1 << 20) - 1, 1 << 20])
def test_every_task_has_a_client_with_the_patience_of_the_run(
    engine: str,
    plays: bool,
    reproducible: bool,
    tokens: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = Config(state_dir=tmp_path)
    config.limits.service_timeout_s = 77.0
    config.rollout.engine = engine  # type: ignore[assignment]
    config.environment.name = "calculator" if plays else ""
    config.reproducible = reproducible
    monkeypatch.setattr(Config, "step_tokens", tokens)
    readers: Any = ExitStack()
    made: list[int] = []

    def processes(count: int) -> Any:
        made.append(count)
        return readers

    monkeypatch.setattr(job_group, "helper_processes", processes)
    with asyncio.Runner() as runner, ExitStack() as stack:
        context: Any = SimpleNamespace(stack=stack, loop=SimpleNamespace(call=runner.run))
        services = job_group._clients(config, topology(), context)
        here = topology()
        places = {
            "data-server": config.data.port,
            "rollout-server": config.rollout.router_port,
            "reward-server": config.reward.port,
            "replay-buffer": config.replay.port,
        }
        if plays:
            places["environment-server"] = config.environment.port
        assert {each.service: each.base_url for each in services.all()} == {
            task: here.url(task, port) for task, port in places.items()
        }
        assert {each.deadline_s for each in services.all()} == {77.0}
        rollout = services.rollout
        assert rollout.repeats_prompt is (engine == "sglang")
        assert rollout.seeds_apart is (engine == "sglang" and reproducible)
        is_large = tokens >= 1 << 20
        assert made == ([4] if is_large else [])
        assert rollout.readers is (readers if is_large else None)
        assert (rollout.directory is not None) is is_large
        if plays:
            assert isinstance(services.environment, EnvironmentClient)
    assert all(each.http.is_closed for each in services.all()), "with the run"


def test_every_node_of_every_engine_is_flushed_and_its_gpus_counted() -> None:
    backend = JobGroupBackend(topology(), rewards_tried=False)
    config = Config()
    backend._config = config
    reports = [
        report_of("rollout-server-4", nodes_per_engine=2, gpus=16),
        report_of("rollout-server-0", nodes_per_engine=3, gpus=24),
        report_of("rollout-server-10", gpus=1),
    ]
    board: Any = SimpleNamespace(workers=lambda: reports)
    backend._board = board
    agents = backend.agents()
    numbers = [0, 1, 2, 4, 5, 10]
    assert [each.service for each in agents] == [f"rollout-server-{n}" for n in numbers]
    port = config.rollout.agent_port
    assert [each.base_url for each in agents] == [
        topology().url("rollout-server", port, n) for n in numbers
    ]
    assert backend.engine_gpus == 41
    config.rollout.colocate = True
    assert backend.engine_gpus == 0
    assert backend.engine_kind == config.rollout.engine
