"""Without a token, no page open in a browser can act on a run, not even under another host name
(DNS rebinding)."""

import re
import socket
from pathlib import Path

import httpx
import pytest

from services.http.app import create_app
from services.http.callers import CallerCheck
from tests.support.services.apps import SERVICES, make, tiny
from trainer.backends.server import BackgroundServer

JSON = {"content-type": "application/json"}
SIMPLE = [
    {},  # `fetch(url, {method: "POST", mode: "no-cors"})`, and a blob without a type
    {"content-type": "text/plain"},
    {"content-type": "text/plain; application/json"},
    {"content-type": "application/x-www-form-urlencoded"},
    {"content-type": "multipart/form-data; boundary=x"},
    {"content-type": "text/plain;charset=UTF-8", "origin": "https://evil.example.com"},
    {"accept": "application/json", "accept-language": "application/json", "range": "bytes=0-"},
    JSON | {"origin": "https://evil.example.com"},
    JSON | {"origin": "null"},
    JSON | {"origin": "http://localhost:9"},
    JSON | {"sec-fetch-site": "cross-site"},
    JSON | {"sec-fetch-site": "same-site"},
    JSON | {"host": "evil.example.com"},
    JSON | {"host": "localhost.evil.example.com"},
    JSON | {"host": "127.0.0.1.evil.example.com:80"},
    JSON | {"host": "reward-server-0.rlhf-math"},  # belongs to no job group
    JSON | {"host": "x@localhost"},
]


@pytest.mark.integration
@pytest.mark.parametrize("name", SERVICES)
async def test_no_request_that_a_page_can_send_changes_anything(
    name: str, base_model: Path, tmp_path: Path
) -> None:
    app = make(name, tiny(base_model, tmp_path, "--algorithm.name", "ppo"))
    tried = 0
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://localhost"
    ) as http:
        for route in app.routes:
            for method in sorted(getattr(route, "methods", set()) - {"GET", "HEAD"}):
                path = re.sub(r"{[^}]+}", "1", getattr(route, "path", ""))
                for headers in SIMPLE:
                    if method != "POST" and not headers.keys() & {
                        "origin",
                        "host",
                        "sec-fetch-site",
                    }:
                        # a browser asks for permission first (CORS), and no service grants it
                        continue
                    answer = await http.request(method, path, content=b"{}", headers=headers)
                    assert answer.status_code in (403, 415), f"{method} {path} with {headers}"
                    assert answer.json()["error"]["remedy"], headers
                    tried += 1
    assert tried
    if name in ("replay", "data"):
        async with app.router.lifespan_context(app):
            pass  # closes its database


async def test_callers_that_are_not_pages_are_served() -> None:
    app = create_app("thing")
    own = socket.gethostname()
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://localhost"
    ) as http:
        for headers in (
            JSON,
            {"content-type": "application/msgpack"},
            {"x-request-id": "a"},
            *(
                JSON | {"host": host}
                for host in (
                    "localhost:80",
                    "127.0.0.1",
                    "127.7.7.7:8002",
                    "[::1]:8000",
                    "10.1.2.3",
                    own,
                )
            ),
            JSON | {"origin": "http://localhost", "sec-fetch-site": "same-origin"},
            JSON | {"sec-fetch-site": "none"},
        ):
            assert (await http.post("/flush", headers=headers)).status_code == 200, headers
        assert (
            await http.get("/health", headers={"sec-fetch-site": "cross-site"})
        ).status_code == 200
        assert (
            await http.get("/absent", headers={"sec-fetch-site": "cross-site"})
        ).status_code == 403
        refused = await http.get("/health", headers={"host": "evil.example.com"})
    assert (refused.status_code, refused.json()["error"]["field"]) == (403, "host")
    assert "access-control-allow-origin" not in refused.headers


def test_names_of_the_job_group_are_its_services(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYPILOT_JOBGROUP_NAME", "rlhf-math")
    check = CallerCheck(frozenset())

    def served(host: str) -> bool:
        scope = {"type": "http", "method": "GET", "path": "/", "server": ("10.0.0.1", 80)}
        return check.refusal(scope | {"headers": [(b"host", host.encode())]}) is None

    assert served("reward-server-0.rlhf-math:8002")
    assert not served("reward-server-0.rlhf-math.evil.com")
    assert not served("a.b.rlhf-math")
    assert not served("rlhf-math.evil.com")


async def test_with_the_token_every_host_name_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page does not have the token, and a proxy in front may have its own name."""
    monkeypatch.setenv("API_TOKEN", "correct-horse-battery-staple")
    headers = {"authorization": "Bearer correct-horse-battery-staple", "host": "train.example.com"}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(create_app("thing")), base_url="http://x"
    ) as http:
        assert (await http.post("/flush", headers=headers)).status_code == 200
        assert (
            await http.post("/flush", headers={"host": "train.example.com"} | JSON)
        ).status_code == 401


def test_a_real_server_refuses_two_hosts() -> None:
    with (
        BackgroundServer(create_app("thing"), "127.0.0.1", 0) as server,
        socket.create_connection(("127.0.0.1", server.port)) as sock,
    ):
        sock.sendall(
            b"POST /flush HTTP/1.1\r\nHost: localhost\r\nHost: evil.example.com\r\nX-Request-Id: a\r\n\r\n"
        )
        assert sock.recv(65536).startswith(b"HTTP/1.1 403 ")
