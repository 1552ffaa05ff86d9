"""The engines of a run in one process: which server gets an attempt, what engines load and when, and
how a server that this process starts comes up and ends; with stand-ins for the servers.
"""

import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from common.clients.network import Reply
from common.clients.rollout import BASE_VERSION
from common.errors import ServiceError, ServiceLost
from common.settings.config import Config
from common.wire.schemas import WeightManifest
from tests.simulation.virtual_time import simulated
from tests.support.errors import raises
from trainer.backends import engines
from trainer.backends.engines import DirectPublisher, OwnEngineClient, OwnSGLang, ServersClient
from trainer.weights.versions import version_name

# ---------------------------------------------------------------- several servers


@pytest.mark.parametrize("seed", range(25))
def test_an_attempt_goes_to_the_least_busy_server_that_has_not_just_failed(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(1, 4)
    urls = [f"http://server-{number}/" for number in range(count)]
    checks: list[str] = []

    async def play() -> None:
        client = ServersClient(urls, lambda: checks.append("checked"), deadline_s=9.0)
        assert client.repeats_prompt
        assert (client.service, client.deadline_s, client.base_url) == (
            "rollout-server",
            9.0,
            urls[0],
        )
        assert client.engines._urls == [url.rstrip("/") for url in urls]
        open_calls: list[tuple[int, asyncio.Future[Any], asyncio.Task[Any]]] = []
        running = [0] * count
        rests_until = [0.0] * count
        chosen: list[int] = []
        for number, server in enumerate(client._servers):

            async def exchange(*given: Any, number: int = number, **options: Any) -> Any:
                assert (given, options) == (("POST", "/generate"), {"patience": 1})
                chosen.append(number)
                outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                answers.append(outcome)
                return await outcome

            server.client._exchange = exchange  # type: ignore[method-assign]
        answers: list[asyncio.Future[Any]] = []
        for turn in range(60):
            if draw.random() < 0.55 or not open_calls:
                now = time.monotonic()
                call = asyncio.create_task(client._exchange("POST", "/generate", patience=1))
                await asyncio.sleep(0)
                number = chosen[-1]
                rested = [each for each in range(count) if rests_until[each] <= now]
                among = rested or range(count)
                assert number in among, "it rests"
                assert running[number] == min(running[each] for each in among)
                running[number] += 1
                open_calls.append((number, answers[-1], call))
            else:
                number, outcome, call = open_calls.pop(draw.randrange(len(open_calls)))
                # 0: there is no answer
                status = draw.choice([200, 200, 400, 503, 429, 0])
                if status == 0:
                    outcome.set_exception(httpx.ReadError("broken"))
                    with pytest.raises(httpx.ReadError):
                        await call
                else:
                    outcome.set_result(Reply(status, {}))
                    assert (await call).status_code == status
                running[number] -= 1
                failed = status in (503, 429, 0)
                rests_until[number] = time.monotonic() + 5.0 if failed else 0.0
            assert [server.running for server in client._servers] == running
            await asyncio.sleep(draw.choice([0.0, 1.0, 3.0]))
            assert len(checks) == len(chosen), turn
        for _, outcome, call in open_calls:
            outcome.cancel()
            call.cancel()
        await asyncio.gather(*(call for *_, call in open_calls), return_exceptions=True)
        await client.close()
        assert all(server.client.http.is_closed for server in client._servers)
        assert client.http.is_closed

    with simulated(seed) as loop:
        loop.run_until_complete(play())


async def test_a_check_that_fails_reaches_no_server() -> None:
    def check() -> None:
        raise ServiceLost("gone")

    async with ServersClient(["http://one"], check) as client:
        with pytest.raises(ServiceLost):
            await client._exchange("GET", "/")
        assert client._servers[0].running == 0


async def test_every_server_has_to_be_healthy() -> None:
    reasons: dict[str, str | None] = {"http://a": None, "http://b": "loads", "http://c": "starts"}
    async with ServersClient(list(reasons)) as client:
        for server in client._servers:

            async def reason(url: str = server.client.base_url) -> str | None:
                return reasons[url]

            server.client.unhealthy_reason = reason  # type: ignore[method-assign]
        assert await client.unhealthy_reason() == "http://b: loads; http://c: starts"
        reasons |= {"http://b": None, "http://c": ""}
        assert await client.unhealthy_reason() is None


# ---------------------------------------------------------------- what engines load


def manifest_of(version: int) -> WeightManifest:
    return WeightManifest.model_construct(run_id="run", version=version, kind="model")


class AnEngine:
    def __init__(self, wrong: bool = False) -> None:
        self.calls: list[Any] = []
        self.wrong = wrong
        self.is_paused = False

    async def load_version(self, manifest: WeightManifest, path: Path, **options: Any) -> None:
        self.calls.append((manifest.version, path.name, options))
        if self.wrong:
            raise ServiceError("cannot load")
        for _ in range(20):  # long after the other one has failed
            await asyncio.sleep(0)
        self.calls.append("loaded")

    async def sleep(self, memory: Any, limit_s: float) -> None:
        self.calls.append(("sleep", limit_s))
        await asyncio.sleep(0)
        self.calls.append("asleep")


@contextmanager
def publisher_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, adapter: bool = False
) -> Iterator[tuple[DirectPublisher, list[Any]]]:
    config = Config()
    if adapter:
        config.lora.rank = 4
    written: list[Any] = []

    def write(
        weights: Any, static: Any, directory: Path, *, run_id: str, version: int
    ) -> WeightManifest:
        written.append((weights, static, run_id, version))
        (directory / version_name(version)).mkdir(parents=True)
        return manifest_of(version)

    monkeypatch.setattr(engines, "write_version", write)
    base = SimpleNamespace(files=lambda ranks: folder / "base")
    monkeypatch.setattr(engines, "Pretrained", lambda kind, name: base)
    with asyncio.Runner() as runner:
        policy = SimpleNamespace(weights=lambda: "first", step=3, ranks=None)
        context: Any = SimpleNamespace(
            config=config,
            policy=policy,
            run_dir=folder,
            run_id="run-1",
            static_files=["config.json"],
            loop=SimpleNamespace(call=runner.run),
        )
        yield DirectPublisher(context), written


def test_engines_start_with_the_newest_weights_and_get_each_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with publisher_of(tmp_path, monkeypatch) as (publisher, written):
        assert written == [("first", ["config.json"], "run-1", 3)]
        folder = tmp_path / "weights"
        assert publisher.starts_with() == (folder / version_name(3), "3")
        publisher.engines = [AnEngine(), AnEngine()]  # type: ignore[list-item]
        publisher.publish("second", 4)  # type: ignore[arg-type]
        assert [path.name for path in folder.iterdir()] == [version_name(4)]
        assert publisher.starts_with() == (folder / version_name(4), "4")
        limit_s = Config().rollout.stuck_after_s
        for engine in publisher.engines:
            (version, name, options), end = engine.calls  # type: ignore[attr-defined]
            assert (version, name, end) == (4, version_name(4), "loaded")
            assert options["timeout_s"] == limit_s
            assert options["keep"] >= 1
            engine.calls.clear()  # type: ignore[attr-defined]
        publisher.sleep()
        for engine in publisher.engines:
            assert engine.calls == [("sleep", limit_s), "asleep"]  # type: ignore[attr-defined]
            assert not publisher.is_paused()
        publisher.engines[1].is_paused = True
        assert publisher.is_paused()


def test_an_engine_that_cannot_load_is_told_after_the_others_have_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with publisher_of(tmp_path, monkeypatch) as (publisher, _):
        others = [AnEngine(wrong=True), AnEngine(), AnEngine()]
        publisher.engines = others  # type: ignore[assignment]
        with pytest.raises(ServiceError, match="cannot load"):
            publisher.wake()
        assert [engine.calls[-1] == "loaded" for engine in others] == [False, True, True]


@pytest.mark.parametrize("gets_on", [True, False])
def test_an_engine_may_load_as_long_as_it_gets_on(
    gets_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes three times the limit, on a clock that jumps."""
    limit_s = Config().rollout.stuck_after_s

    class Slow(AnEngine):
        async def load_version(self, manifest: Any, path: Path, **options: Any) -> None:
            await asyncio.sleep(3 * limit_s)
            self.calls.append("loaded")

    with publisher_of(tmp_path, monkeypatch) as (publisher, _):
        engine = Slow()
        publisher.engines = [engine]  # type: ignore[list-item]
        publisher.work = lambda: time.monotonic() if gets_on else 5.0
        with simulated(0) as loop:
            if gets_on:
                loop.run_until_complete(publisher.reload())
            else:
                with raises(ServiceError, field="rollout.stuck_after_s"):
                    loop.run_until_complete(publisher.reload())
            for _ in range(5):  # what was cancelled ends
                loop.run_until_complete(asyncio.sleep(0))
        assert engine.calls == (["loaded"] if gets_on else [])


def test_engines_of_adapters_keep_the_model_of_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with publisher_of(tmp_path, monkeypatch, adapter=True) as (publisher, written):
        assert written == []
        publisher.engines = [AnEngine()]  # type: ignore[list-item]
        publisher.wake()
        assert publisher.engines[0].calls == [], "there is nothing yet"  # type: ignore[attr-defined]
        assert publisher.starts_with() == (tmp_path / "base", BASE_VERSION)
        publisher.write("adapter", 1)  # type: ignore[arg-type]
        assert publisher.starts_with() == (tmp_path / "base", BASE_VERSION)


# ---------------------------------------------------------------- a server of our own


class Process:
    """Stands for the supervised process of a server."""

    def __init__(self, name: str, launch: Any, probe: Any, **options: Any) -> None:
        self.launch = launch
        self.options = options
        self.up = False
        self.over = asyncio.Event()
        self.error: Exception | None = None

    async def run(self) -> None:
        await self.over.wait()
        assert self.error is not None
        raise self.error

    def work(self) -> int:
        return 17

    async def comes_up(self) -> None:
        self.up = True
        await self.options["on_up"]()


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(engines, "SupervisedProcess", Process)
    monkeypatch.setattr(engines, "free_port", lambda: 4567)
    monkeypatch.setattr(engines, "engine_command", lambda *given: list(given))
    reloads: list[str] = []

    async def reload() -> None:
        reloads.append("reloaded")

    publisher: Any = SimpleNamespace(
        starts_with=lambda: (tmp_path, "5"), is_paused=lambda: False, reload=reload
    )
    config = Config(state_dir=tmp_path)
    made = OwnSGLang(config, publisher)
    return SimpleNamespace(server=made, process=made._child, reloads=reloads, config=config)


async def test_a_server_is_used_once_it_is_up_and_loads_again_after_a_restart(
    own: Any, tmp_path: Path
) -> None:
    server, process = own.server, own.process
    assert server.url == "http://127.0.0.1:4567"
    assert server.log_file == tmp_path / "logs/engine.log"
    assert process.options["log_file"] == server.log_file
    timing = process.options["timing"]
    rollout = own.config.rollout
    assert (timing.stuck_s, timing.hang_s) == (rollout.stuck_after_s, rollout.hang_timeout_s)
    assert timing.max_failed_starts == 1, "the first failure ends the run"
    config, _, model, label = await process.launch()
    assert (config.rollout.engine_port, model, label) == (4567, str(tmp_path), "5")
    assert own.config.rollout.engine_port != 4567
    assert server.work() == 17
    server.check_alive()
    with pytest.raises(httpx.ConnectError):
        server.check()
    async with AsyncExitStack() as stack:
        starting = asyncio.create_task(server.start(stack))
        await asyncio.sleep(0)
        assert not starting.done()
        with pytest.raises(httpx.ConnectError):
            server.check()
        await process.comes_up()
        await starting
        server.check()
        assert own.reloads == [], "it has started with these weights"
        process.up = False
        with pytest.raises(httpx.ConnectError):
            server.check()
        await process.comes_up()
        assert own.reloads == ["reloaded"]
        running = server._run
    assert running.cancelled()
    server.check_alive()


@pytest.mark.parametrize("when", ["at its start", "later"])
async def test_a_server_that_will_not_return_is_waited_for_by_nobody(own: Any, when: str) -> None:
    server, process = own.server, own.process
    process.error = ServiceError("SGLang ended")
    async with AsyncExitStack() as stack:
        if when == "at its start":
            process.over.set()
            with pytest.raises(ServiceError, match="SGLang ended"):
                await server.start(stack)
        else:
            starting = asyncio.create_task(server.start(stack))
            await asyncio.sleep(0)
            await process.comes_up()
            await starting
            process.over.set()
            await asyncio.wait({server._run})
        client = OwnEngineClient(server)
        stack.push_async_callback(client.close)
        for call in (server.check, server.check_alive):
            with raises(ServiceLost, field="engine", value=server.url) as error:
                call()
            assert "SGLang ended" in error.value.message
            assert error.value.about == {"cause": "engine_failed"}
            assert str(server.log_file) in str(error.value.remedy)
        with pytest.raises(ServiceLost):
            await client.request("GET", "/health")
