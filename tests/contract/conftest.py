"""The targets of the contract: the embedded engine, the same behind the real router, and CONTRACT_URL when it is set.

CONTRACT_URL names an engine such as a real SGLang that serves a ChatML model with a numeric --weight-version.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.rollout_engines import answers, end, engine_process, free_port, start, write_model

EXTERNAL = ["external"] if os.environ.get("CONTRACT_URL") else []


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("contract") / "model", seed=0)


@pytest.fixture(scope="session")
def engine_url(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("logs") / "engine.log"
    arguments = ("--weight-version", "7", "--max-running-requests", "64", "--max-context-tokens", "256", "--seed", "0")
    with engine_process(model_dir, log, *arguments) as (url, _):
        yield url


@pytest.fixture(scope="session")
def router_url(engine_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "sglang_router.launch_router", "--worker-urls", engine_url, "--host", "127.0.0.1"]
    command += [
        "--port",
        str(port),
        "--prometheus-port",
        str(free_port()),
        "--policy",
        "round_robin",
        "--disable-circuit-breaker",
    ]
    url = f"http://127.0.0.1:{port}"
    process = start(command, tmp_path_factory.mktemp("logs") / "router.log", lambda: answers(f"{url}/readiness"))
    yield url
    end(process)


def _client(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    external = request.param == "external"
    url = os.environ["CONTRACT_URL"] if external else request.getfixturevalue(f"{request.param}_url")
    with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
        yield client


@pytest.fixture(params=["engine", "router", *EXTERNAL])
def target(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    """A client of one target."""
    yield from _client(request)


@pytest.fixture(params=["engine", *EXTERNAL])
def worker(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    """A client of an engine itself, for the calls the router does not pass on."""
    yield from _client(request)
