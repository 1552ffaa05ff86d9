"""With API_TOKEN set, no service answers a call without the token."""

import asyncio
import io
import logging
import re
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from rich.console import Console
from starlette.routing import Route

from common.clients.base import Client, wait_healthy
from common.errors import ConfigError, ServiceError
from common.process.logs import setup_logging
from common.process.security import SecretRedactor, accepts, authorization, is_loopback, token
from services.http.app import Server, create_app
from tests.support.errors import raises
from tests.support.services.apps import APPS, make, tiny
from trainer import train_in_process
from trainer.backends.server import BackgroundServer
from trainer.dashboard.app import PAGES

TOKEN = "correct-horse-battery-staple"  # noqa: S105


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("API_TOKEN", TOKEN)
    return TOKEN


@pytest.fixture
async def apps(secret: str, base_model: Path, tmp_path: Path) -> AsyncIterator[dict[str, FastAPI]]:
    config = tiny(base_model, tmp_path, "--algorithm.name", "ppo")
    made = {name: make(name, config) for name in APPS}
    yield made
    async with (
        made["replay"].router.lifespan_context(made["replay"]),
        made["data"].router.lifespan_context(made["data"]),
        made["tinker"].router.lifespan_context(made["tinker"]),
    ):
        pass  # closes their databases


def calls(app: FastAPI) -> Iterator[tuple[str, str]]:
    """Yields every method and path of an app, and some that it does not have."""
    for route in app.routes:
        assert isinstance(route, APIRoute | Route), "another kind of route: is it guarded?"
        path = re.sub(r"{[^}]+}", "1", route.path)
        for method in sorted(route.methods or ()):
            yield method, path
    yield from [
        ("OPTIONS", "/health"),
        ("POST", "/health"),
        ("GET", "/absent"),
        ("GET", "//health"),
        ("GET", "/health/"),
    ]


@pytest.mark.integration
async def test_every_call_of_every_service_needs_the_token(apps: dict[str, FastAPI]) -> None:
    for name, app in apps.items():
        seen = list(calls(app))
        assert len(seen) > 12, name
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://x"
        ) as http:
            for method, path in seen:
                for header in (None, f"Basic {TOKEN}", f"Bearer {TOKEN}x"):
                    answer = await http.request(
                        method,
                        f"http://x{path}",
                        headers={} if header is None else {"authorization": header},
                    )
                    where = f"{name}: {method} {path} with {header}"
                    if (method, path, header) == ("GET", "/health", None):  # probes need no token
                        assert answer.status_code in (200, 503), where
                        assert set(answer.json()) == {"status"}, where
                        continue
                    if (name, method, header) == (
                        "trainer",
                        "GET",
                        None,
                    ) and path in PAGES:  # no run data
                        assert answer.status_code in (200, 307), where
                        continue
                    assert answer.status_code == 401, where
                    assert answer.headers["www-authenticate"] == "Bearer"
                    if method != "HEAD":
                        told = set(answer.json()["error"])
                        assert told - {"field"} == {"code", "message", "remedy"}
                    assert TOKEN not in answer.text


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore:Duplicate Operation ID")  # SGLang calls with two methods
async def test_calls_with_the_token_succeed(apps: dict[str, FastAPI]) -> None:
    for name, app in apps.items():
        client = Client(name, "http://x", transport=httpx.ASGITransport(app))
        async with client:
            for path in ("/health", "/metrics", "/docs", "/openapi.json"):
                answer = await client.http.get(path)
                assert answer.status_code == 200 or (
                    path == "/health" and answer.json()["reason"]
                ), name
                assert TOKEN not in answer.text


def test_every_credential_must_be_right() -> None:
    right, wrong = (
        (b"authorization", f"Bearer {TOKEN}".encode()),
        (b"authorization", b"Bearer wrong"),
    )
    assert accepts(TOKEN, [right]) is True
    assert accepts(TOKEN, [right, right]) is True
    assert accepts(TOKEN, [(b"authorization", f"bearer  {TOKEN}".encode())]) is True
    assert accepts(TOKEN, [wrong, right]) is False
    assert accepts(TOKEN, [right, wrong]) is False
    assert accepts(TOKEN, [(b"authorization", b"Bearer \xff\xfe")]) is False
    assert accepts(TOKEN, []) is None


def test_a_stranger_is_refused_before_the_body_is_read(secret: str) -> None:
    app = create_app("thing")
    with (
        BackgroundServer(app, "127.0.0.1", 0) as server,
        socket.create_connection(("127.0.0.1", server.port), 30) as sock,
    ):
        sock.sendall(
            b"POST /flush HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000000\r\n\r\n"
        )
        assert sock.recv(65536).startswith(b"HTTP/1.1 401 ")


async def test_a_websocket_is_refused(secret: str) -> None:
    app, said = create_app("thing"), []

    async def receive() -> dict[str, str]:
        return {"type": "websocket.connect"}

    async def send(message: object) -> None:
        said.append(message)

    await app(
        {"type": "websocket", "path": "/health", "headers": [], "subprotocols": []}, receive, send
    )
    assert said == [{"type": "websocket.close", "code": 1008}]


@pytest.mark.parametrize(
    "value",
    [
        "short",
        "fifteen-letters",
        "with a blank in it",
        "line\nbreak-0123456789",
        "ümläut-012345678",
    ],
)
def test_a_token_that_is_short_or_cannot_be_sent_is_refused_without_being_shown(value: str) -> None:
    with raises(ConfigError, field="API_TOKEN") as caught:
        token({"API_TOKEN": value})
    assert value not in str(caught.value)


def test_missing_token_is_none() -> None:
    assert token({}) is token({"API_TOKEN": ""}) is None
    assert authorization({}) == {}


async def test_waiting_ends_at_once_when_the_token_is_wrong(secret: str) -> None:
    app = create_app("thing")
    transport = httpx.ASGITransport(app)
    async with Client("thing", "http://x", transport=transport) as client:
        await wait_healthy([client], 30)
    async with Client(
        "thing", "http://x", transport=transport, headers={"authorization": "Bearer of-another-run"}
    ) as client:
        with pytest.raises(ServiceError) as caught:
            await asyncio.wait_for(wait_healthy([client], 1000), 60)
    assert (caught.value.status, caught.value.code) == (401, "unauthorized")


def test_listening_on_all_addresses_without_a_token_is_logged(
    caplog: pytest.LogCaptureFixture, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    everywhere = ".".join("0000")
    Server(create_app("thing"), everywhere, 0)
    monkeypatch.delenv("API_TOKEN")
    Server(create_app("thing"), "127.3.2.1", 0)
    assert caplog.records == []
    Server(create_app("thing"), everywhere, 0)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "API_TOKEN" in caplog.text


@pytest.mark.parametrize(
    ("host", "own"),
    [
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("10.0.0.5", False),
        ("pod-0", False),
    ],
)
def test_loopback_hosts_are_recognised(host: str, own: bool) -> None:
    assert is_loopback(host) is own


@pytest.mark.integration
def test_training_in_one_process_goes_on_with_a_token(
    secret: str, base_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(base_model, tmp_path)
    said = io.StringIO()
    assert train_in_process(config, Console(file=said)).is_dir()
    left = [
        path
        for path in tmp_path.rglob("*")
        if path.is_file() and TOKEN.encode() in path.read_bytes()
    ]
    assert left == []
    assert TOKEN not in said.getvalue()


def test_secrets_are_taken_out_of_texts_and_bytes() -> None:
    redactor = SecretRedactor(
        {"API_TOKEN": TOKEN, "HF_TOKEN": "hf_0123456789", "JUDGE_API_KEY": ""}
    )
    text = f"\ud800 a={TOKEN} b=hf_0123456789 {TOKEN[:-1]}"
    expected = f"\ud800 a=[secret] b=[secret] {TOKEN[:-1]}"
    assert redactor.redact(text) == expected
    found = redactor.redact_bytes(text.encode("utf-8", "surrogatepass"))
    assert found == expected.encode("utf-8", "surrogatepass")


def test_a_log_never_has_a_secret(secret: str, tmp_path: Path) -> None:
    before = logging.getLogger().handlers[:]
    try:
        log = setup_logging("thing", tmp_path)
        try:
            raise RuntimeError(f"header Bearer {TOKEN}")
        except RuntimeError:
            log.exception("with %s", TOKEN)
        for handler in logging.getLogger().handlers:
            handler.flush()
        text = (tmp_path / "thing.log").read_text()
    finally:
        for handler in logging.getLogger().handlers:
            if handler not in before:
                handler.close()
        logging.getLogger().handlers[:] = before
    assert "RuntimeError: header Bearer [secret]" in text
    assert TOKEN not in text
