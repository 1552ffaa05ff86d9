"""Logs: JSON on request, request ids across clients and services, and the access log."""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from common import VERSION
from common.clients.base import Client, Unreachable
from common.errors import ConfigError, NotFound, NotReady, Overloaded, ServiceError
from common.process import logs
from common.process.logs import setup_logging
from services.http.app import create_app
from tests.support.errors import raises
from tests.support.paths import ROOT
from tests.support.processes.ports import free_port
from trainer.diagnosis.logs import read_log


@pytest.fixture
def own_logging() -> Iterator[None]:
    """Restores the logging setup after the test."""
    root, hooks = logging.getLogger(), (sys.excepthook, threading.excepthook)
    before, level = root.handlers[:], root.level
    yield
    for handler in root.handlers:
        if handler not in before:
            handler.close()
    root.handlers[:] = before
    root.setLevel(level)
    sys.excepthook, threading.excepthook = hooks
    logging.captureWarnings(False)
    logs.set_run("")


# ------------------------------------------------------------ JSON


def test_a_line_has_everything_and_no_secret(
    monkeypatch: pytest.MonkeyPatch,
    own_logging: None,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("LOG_FORMAT", "json")
    monkeypatch.setenv("HF_TOKEN", 'secret"with\\quotes')
    log = setup_logging("thing-3", tmp_path, service="thing", rank=2)
    logs.set_run("run-1")
    with logs.request("r-1"):
        try:
            raise ValueError('first secret"with\\quotes\nsecond line')
        except ValueError:
            log.exception("it failed: %s", "ä\nö\ud800")
    log.debug("not shown")
    logs.log_exit_reason("error: the end", code="config")
    written = (tmp_path / "thing-3.log").read_text()
    assert written == capfd.readouterr().err
    failed, ended = (json.loads(line) for line in written.splitlines())
    assert datetime.fromisoformat(failed.pop("time")).utcoffset() is not None
    assert failed.pop("exception").splitlines()[-2:] == [
        "ValueError: first [secret]",
        "second line",
    ]
    expected = {
        "level": "ERROR",
        "logger": "thing-3",
        "message": "it failed: ä\nö?",
        "service": "thing",
    }
    assert failed == expected | {"node": 0, "rank": 2, "run": "run-1", "request": "r-1"}
    assert (ended["level"], ended["message"]) == ("CRITICAL", "error: the end")
    assert (ended["code"], ended["fields"]) == ("config", {})
    assert "request" not in ended


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_a_line_about_an_error_has_its_code_and_fields(
    monkeypatch: pytest.MonkeyPatch, own_logging: None, tmp_path: Path, log_format: str
) -> None:
    """The diagnosis reads both forms; a text line stays one line."""
    monkeypatch.setenv("LOG_FORMAT", log_format)
    monkeypatch.setenv("HF_TOKEN", "a-secret-of-the-run")
    log = setup_logging("thing", tmp_path)
    about = {"service": "router", "why": "a-secret-of-the-run · code: forged\nnext"}
    error = ServiceError("no", code="unreachable", field="url", value="http://x", about=about)
    log.warning("serving continues: %s", error)
    log.error("lost\nstack", extra=logs.event("rank_lost", seconds=3))
    try:
        raise error
    except ServiceError:
        log.exception("it failed")
    log.warning("of no error")

    found = [line for line in read_log(tmp_path / "thing.log", 0.0) if line.logger]
    known = [(line.code, {**line.fields}) for line in found]
    fields = {"field": "url", "value": "http://x", "service": "router"}
    assert [code for code, _ in known] == ["unreachable", "rank_lost", "unreachable", ""]
    assert fields.items() <= known[0][1].items()
    assert known[1][1] == {"seconds": "3"}
    assert known[2][1]["service"] == "router"
    assert known[3] == ("", {})
    assert found[0].text == f"serving continues: {error}"
    assert found[1].text == "lost\nstack"
    written = (tmp_path / "thing.log").read_text()
    assert "a-secret" not in written
    if log_format == "text":
        assert " · code: rank_lost · seconds: 3\nstack\n" in written


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("GET /prompts · code: served · status: 200 · ms: 3", "served"),
        ("GET /x: no · value: a · code: served · b · code: not_served · status: 422", "not_served"),
        ('{"time": "now", "message": "GET /x", "code": "served"}', "served"),
        ('{"time": half a line', ""),
        ("step 3 of 40", ""),
    ],
)
def test_a_line_tells_its_code(line: str, code: str) -> None:
    """Not the one that a client wrote into what it sent."""
    assert logs.code_of(line.encode()) == code


def test_text_already_shown_goes_only_to_the_file(
    monkeypatch: pytest.MonkeyPatch,
    own_logging: None,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("LOG_FORMAT", raising=False)
    log = setup_logging("thing", tmp_path)
    with logs.request("r-1"):
        log.info("to both")
    log.info("step 1", extra=logs.SHOWN)
    logs.log_exit_reason("error: the end", code="config")
    both, step, ended = (tmp_path / "thing.log").read_text().splitlines()
    assert both.endswith("INFO thing [r-1]: to both")
    assert step.endswith("INFO thing: step 1")
    assert ended.endswith("CRITICAL end: error: the end · code: config")
    assert capfd.readouterr().err == f"{both}\nerror: the end\n"


@pytest.mark.parametrize(("name", "value"), [("LOG_FORMAT", "yaml"), ("LOG_LEVEL", "loud")])
def test_a_wrong_log_setting_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with raises(ConfigError, field=name, value=value):
        setup_logging("thing")


def run_data_server(tmp_path: Path, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "services.data", "--state_dir", str(tmp_path), *arguments]
    env = {**os.environ, "LOG_FORMAT": "json", **environment}
    return subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.integration
def test_a_real_service_logs_its_start_and_its_requests_in_json(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with run_data_server(tmp_path, "--data.source", "tiny", "--data.port", str(port)) as process:
        assert process.stderr is not None
        lines: list[dict[str, Any]] = []

        def logged(*phrases: str) -> dict[str, Any]:
            """Returns the next line with all the phrases; without one the test runs into its time
            limit."""
            for line in process.stderr or ():
                lines.append(json.loads(line))
                if all(phrase in lines[-1]["message"] for phrase in phrases):
                    return lines[-1]
            raise AssertionError(f"{phrases} are not in {lines}")

        logged("loading tiny")
        logged("loaded tiny", "training")
        logged(
            f"data-server {VERSION} listens on {url}: source=tiny",
            "curriculum=none",
            f"state_dir={tmp_path}",
        )
        headers = {"x-request-id": "call-1", "x-run-id": "run-7"}
        with httpx.Client(base_url=url, trust_env=False, headers=headers, timeout=60) as client:
            for path in ("/health", "/metrics", "/stats"):
                assert client.get(path).status_code == 200
            answer = client.get("/prompts", params={"batch_size": 3})
            assert answer.headers["x-request-id"] == "call-1"
            refused = client.get("/prompts", params={"batch_size": 0})
        line = logged("GET /prompts")
        assert line["code"] == "served"
        assert line["fields"].keys() == {"status", "ms"}
        assert (line["request"], line["run"], line["level"]) == ("call-1", "run-7", "INFO")
        line = logged("GET /prompts", "batch_size")
        assert (line["code"], line["fields"]["status"]) == ("not_served", "422")
        assert refused.status_code == 422
        process.send_signal(signal.SIGTERM)
        lines += map(json.loads, process.stderr)
        assert all((line["service"], line["node"]) == ("data-server", 0) for line in lines)
        assert not any(
            path in line["message"] for line in lines for path in ("/health", "/metrics", "/stats")
        )
        assert process.stdout is not None
        assert process.stdout.read() == ""


@pytest.mark.integration
def test_a_failed_start_is_logged_as_json(tmp_path: Path) -> None:
    for argument, phrase in (
        ("--data.source=/absent", "/absent"),
        ("--data.no_such", "there is no setting"),
    ):
        with run_data_server(tmp_path, argument) as process:
            _, errors = process.communicate()
        last = json.loads(errors.splitlines()[-1])
        assert process.returncode == 2
        assert last["level"] == "CRITICAL"
        assert phrase in last["message"] or "no_such" in last["message"]


# ------------------------------------------------------------ request ids


class Chain:
    """Two services, the first of which calls the second; keeps the ids that arrive."""

    def __init__(self) -> None:
        self.refusals = 0
        self.arrived: list[tuple[str, str]] = []
        self.back = create_app("back")
        self.front = create_app("front")
        self.back.get("/things/{name}")(self.thing)
        self.front.get("/through/{name}")(self.through)
        self.to_back = Client(
            "back", "http://back", transport=self.transport(self.back), deadline_s=20
        )
        self.to_front = Client(
            "front", "http://front", transport=self.transport(self.front), deadline_s=20
        )

    def transport(self, app: FastAPI) -> httpx.ASGITransport:
        return httpx.ASGITransport(app, raise_app_exceptions=False)

    async def thing(self, name: str) -> dict[str, str]:
        self.arrived.append((logs.request_id(), logs.run_id()))
        if self.refusals > 0:
            self.refusals -= 1
            raise NotReady("not yet")
        if name == "crash":
            raise RuntimeError("boom")
        if name == "absent":
            raise NotFound("there is none", field="name", value=name)
        if name == "busy":
            raise Overloaded("too much")
        await asyncio.to_thread(logging.getLogger("back").info, "work in a thread")
        return {}

    async def through(self, name: str) -> dict[str, str]:
        await self.to_back.request("GET", f"/things/{name}")
        return {}


@pytest.fixture
async def chain() -> AsyncIterator[Chain]:
    chain = Chain()
    yield chain
    await chain.to_back.close()
    await chain.to_front.close()


class Caught(logging.Handler):
    """Keeps every log line as JSON, together with the request being handled."""

    def __init__(self) -> None:
        super().__init__()
        self.formatter = logs.JsonFormatter()
        self.lines: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(json.loads(self.format(record)))

    def of(self, identifier: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line.get("request") == identifier]

    def statuses_of(self, identifier: str) -> set[str]:
        """The statuses of the access lines of requests that failed."""
        lines = (line for line in self.of(identifier) if line.get("code") == "not_served")
        return {line["fields"]["status"] for line in lines}


@pytest.fixture
def caught(own_logging: None) -> Caught:
    handler = Caught()
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.DEBUG)
    return handler


async def test_an_id_survives_retries_threads_and_services(chain: Chain, caught: Caught) -> None:
    chain.refusals = 2
    logs.set_run("run-1")
    with logs.request("story"):
        answer = await chain.to_front.request("GET", "/through/x")
    assert chain.arrived == [("story", "run-1")] * 3
    assert answer.headers["x-request-id"] == "story"
    told = caught.of("story")
    for logger, message, fields in (
        ("services.http.tracing", "GET /things/x: not yet", {"status": "503"}),
        ("back", "work in a thread", {}),
        ("services.http.tracing", "GET /things/x", {"status": "200"}),
        ("services.http.tracing", "GET /through/x", {"status": "200"}),
        ("common.clients.base", "GET /through/x: 200 of front", {}),
    ):
        assert any(
            (line["logger"], line["message"]) == (logger, message)
            and fields.items() <= line.get("fields", {}).items()
            for line in told
        )
    assert logs.request_id() == ""


async def test_every_call_outside_a_request_has_its_own_id(chain: Chain) -> None:
    chain.refusals = 1
    await chain.to_back.request("GET", "/things/x")
    await chain.to_back.http.get("/things/x")
    first, again, other = (identifier for identifier, _ in chain.arrived)
    assert first == again != other
    assert all(logs.usable_id(identifier) for identifier in (first, other))


async def test_an_error_names_the_id_found_in_both_logs(chain: Chain, caught: Caught) -> None:
    with pytest.raises(ServiceError) as raised:
        await chain.to_back.request("GET", "/things/absent")
    assert raised.value.request
    assert f"request: {raised.value.request}" in str(raised.value)
    assert caught.statuses_of(raised.value.request) == {"404"}
    with pytest.raises(Unreachable) as lost:
        await chain.to_back.request("GET", "/things/busy", deadline_s=0.2)
    assert lost.value.request
    assert caught.statuses_of(lost.value.request) == {"503"}


async def test_a_crash_is_logged_and_answered_with_its_id(chain: Chain, caught: Caught) -> None:
    with logs.request("crashed"), raises(ServiceError, code="internal", request="crashed"):
        await chain.to_back.request("GET", "/things/crash")
    (line,) = [line for line in caught.lines if "exception" in line]
    assert (line["request"], line["message"]) == ("crashed", "GET /things/crash failed")
    assert "RuntimeError: boom" in line["exception"]


@pytest.mark.parametrize("given", ["", "with space", 'q"uote', "x" * 129, "line\tend", "ü"])
async def test_an_invalid_id_is_replaced(chain: Chain, given: str) -> None:
    async with httpx.AsyncClient(
        transport=chain.transport(chain.back), base_url="http://back"
    ) as plain:
        answer = await plain.get("/things/x", headers=[(b"X-Request-Id", given.encode())])
        twice = await plain.get(
            "/things/x", headers=[("x-request-id", "one"), ("x-request-id", "two")]
        )
    for each, (arrived, _) in zip((answer, twice), chain.arrived, strict=True):
        assert each.headers["x-request-id"] == arrived
        assert logs.usable_id(arrived)
        assert arrived not in (given, "one", "two")


async def test_errors_do_not_flood_the_log(chain: Chain, caught: Caught) -> None:
    async with httpx.AsyncClient(
        transport=chain.transport(chain.back), base_url="http://back"
    ) as plain:
        for _ in range(50):
            await plain.post("/things/x%0aforged", headers={"Content-Type": "application/json"})
            await plain.get("/things/busy")
    said = [
        line
        for line in caught.lines
        if line["logger"] == "services.http.tracing" and line["level"] != "DEBUG"
    ]
    assert Counter(line["fields"]["status"] for line in said) == {"405": 10, "503": 10}
    assert not any("\n" in line["message"] for line in said)


def test_the_version_is_that_of_the_package() -> None:
    assert f'version = "{VERSION}"' in (ROOT / "pyproject.toml").read_text()
