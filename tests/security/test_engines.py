"""Both engines behind the real router, started by an agent with a token and certificates, and
refused strangers."""

import asyncio
import contextlib
import os
import secrets
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from common.clients.base import Client, wait_healthy
from common.clients.rollout import RolloutClient
from common.errors import ServiceError
from common.process.child import Child, ChildOutput
from common.process.security import trusted
from common.process.topology import ROLLOUT, Topology
from common.settings.config import Config
from common.settings.sections import ModelSection, RolloutSection, SamplingSection
from services.rollout.engine_client import EngineClient, engine_command, engine_env
from services.rollout.router import RouterClient, router_command, router_env
from tests.support.engines.engines import SGLANG, sglang_is_installed, write_model
from tests.support.errors import raises
from tests.support.paths import ROOT
from tests.support.processes.certificates import Certificates
from tests.support.processes.ports import free_port

pytestmark = pytest.mark.integration


@dataclass
class Node:
    """A running engine and its router."""

    token: str
    engine: EngineClient
    router: RouterClient
    rollout: RolloutClient
    logs: Path


@pytest.fixture(
    params=[
        "embedded behind sglang-router",
        pytest.param("embedded behind smg", marks=pytest.mark.slow),
        "sglang behind sglang-router",
    ]
)
def node_config(request: pytest.FixtureRequest, tmp_path: Path) -> Config:
    engine, _, router = request.param.split()
    if engine == "sglang" and not sglang_is_installed():
        pytest.skip("SGLang is not installed: `make sglang-cpu` does it")
    rollout = RolloutSection(
        engine=engine,
        router=router,
        device="cpu",
        engine_python=str(SGLANG / "bin" / "python"),
        router_port=free_port(),
        engine_port=free_port(),
        router_metrics_port=free_port(),
        max_running_requests=8,
        max_context_tokens=128,
    )
    model = ModelSection(name=str(write_model(tmp_path / "model", seed=0)))
    return Config(model=model, rollout=rollout, sampling=SamplingSection(max_new_tokens=16))


@pytest.fixture
async def node(
    node_config: Config, certificates: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Node]:
    token = secrets.token_hex(16)
    for name, value in {"API_TOKEN": token, **certificates.env()}.items():
        monkeypatch.setenv(name, value)
    topology, config, logs = Topology(), node_config, tmp_path / "logs"
    plugin = {
        "PYTHONPATH": str(ROOT / "jobgroup" / "sglang-cpu" / "plugin"),
        "OMP_NUM_THREADS": "1",
    }
    if config.rollout.engine == "embedded":
        plugin["PYTHONPATH"] = str(ROOT)
    engine_url = topology.url(ROLLOUT, config.rollout.engine_port)
    router_url = topology.url(ROLLOUT, config.rollout.router_port)
    engine_words = engine_command(config, topology, config.model.name, "7")
    env = engine_env(config) | topology.loopback_env() | plugin
    engine = await started("engine", engine_words, env, logs)
    router = await started("router", router_command(config, topology), router_env(), logs)
    try:
        async with (
            EngineClient("engine", engine_url) as engine_api,
            RouterClient("router", router_url) as router_api,
            RolloutClient("router", router_url) as rollout,
        ):
            for client in (engine_api, router_api):
                async with asyncio.timeout(300):
                    while await client.unhealthy_reason() is not None:  # noqa: ASYNC110
                        await asyncio.sleep(0.2)
            yield Node(token, engine_api, router_api, rollout, logs)
    finally:
        await router.end(5)
        await engine.end(5)


async def started(name: str, words: list[str], env: Mapping[str, str], logs: Path) -> Child:
    """Starts a process as an agent does."""
    output = ChildOutput(logs / f"{name}.log", lambda _: None, on_loss=print, redacted=True)
    return await Child.start(words, output, env={**os.environ, **env})


def command_lines() -> dict[str, bytes]:
    """Returns the command lines of all processes, which anybody may read."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # the process ended meanwhile
            found[path.parent.name] = path.read_bytes()
    return found


@asynccontextmanager
async def stranger(like: Client, key: str | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """Yields a client that knows the certificates but has no token or a wrong one."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    new = httpx.Limits(
        max_keepalive_connections=0
    )  # the router closes a connection after refusing to read a body
    async with httpx.AsyncClient(
        base_url=like.base_url, verify=trusted(), headers=headers, timeout=60, limits=new
    ) as http:
        yield http


async def test_engine_and_router_work_with_the_token_and_refuse_others(node: Node) -> None:
    assert await node.engine.weight_version() == "7"
    async with asyncio.timeout(120):
        while not await node.router.reconcile(node.engine.base_url, lambda: True):  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    completions = await node.rollout.generate(
        [20, 21, 22], n=2, max_new_tokens=4, temperature=1.0, stop_token_ids=[]
    )
    assert [completion.weight_version for completion in completions] == [7, 7]
    assert len(await node.engine.checksums(60)) == 1
    await node.engine.pause()
    await node.engine.resume()

    body = {
        "input_ids": [20],
        "sampling_params": {"max_new_tokens": 2},
        "model_path": "/tmp",  # noqa: S108
        "url": "https://127.0.0.1:9",
    }
    for key in (None, "of-another-run-0123456789"):
        async with stranger(node.engine, key) as http:
            for path in ("/generate", "/pause_generation", "/update_weights_from_disk", "/load_lora_adapter",
                         "/init_weights_update_group", "/abort_request", "/flush_cache", "/v1/completions"):  # fmt: skip
                assert (await http.post(path, json=body)).status_code == 401, path
            for path in ("/model_info", "/server_info", "/v1/models", "/weights_checker"):
                assert (await http.get(path)).status_code == 401, path
        async with stranger(node.router, key) as http:
            for path in ("/generate", "/workers", "/flush_cache", "/v1/completions", "/v1/chat/completions", "/v1/tokenizers",
                         "/wasm", "/parse/reasoning", "/v1/responses", "/v1/conversations", "/v1/rerank"):  # fmt: skip
                assert (await http.post(path, json=body)).status_code == 401, path
            listed = (await node.router.request("GET", "/workers")).json()["workers"]
            assert (await http.get("/workers")).status_code == 401
            assert (await http.delete(f"/workers/{listed[0]['id']}")).status_code == 401
            assert (await http.get("/get_model_info")).status_code in (
                401,
                404,
                503,
            )  # the engine refuses it
    assert await node.router.reconcile(node.engine.base_url, lambda: True), (
        "nobody has removed the engine"
    )
    assert "api_key" not in listed[0]
    while not await node.router.reconcile(node.engine.base_url, lambda: False):  # noqa: ASYNC110
        await asyncio.sleep(0.2)

    assert not [pid for pid, words in command_lines().items() if node.token.encode() in words], (
        "the token can be read with ps"
    )
    for log in node.logs.iterdir():
        assert node.token.encode() not in log.read_bytes(), log
    if "sglang" in (node.logs / "engine.log").read_text():
        assert b"[secret]" in (node.logs / "engine.log").read_bytes(), "SGLang logs its arguments"


async def test_client_refuses_a_foreign_certificate(other_certificates: Certificates, certificates: Certificates,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Over a real socket, the client refuses before sending anything, above all the token."""
    for name, value in {"API_TOKEN": secrets.token_hex(16), **certificates.env()}.items():
        monkeypatch.setenv(name, value)
    heard: list[bytes] = []
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(other_certificates.certificate, other_certificates.key)

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(1))
        writer.close()

    server = await asyncio.start_server(listen, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    async with server, Client("impostor", f"https://127.0.0.1:{port}") as client:
        with pytest.raises((httpx.TransportError, OSError), match=r"(?i)certificate"):
            await client.http.get("/health", timeout=60)
        for call in (
            lambda: client.request("GET", "/health", deadline_s=1000),
            lambda: wait_healthy([client], 1000),
        ):
            with raises(
                ServiceError, code="certificate", field="TLS_CA"
            ):  # at once, not at the deadline
                await asyncio.wait_for(call(), 60)
    assert heard == []
