"""The targets of the contract: the embedded engine and real SGLang, each called directly and
through the real router.

On a GPU, the embedded engine is an additional target in float32. Real SGLang is a target if `make
sglang-cpu` has installed it. CONTRACT_URL names one more engine, such as SGLang on a GPU, that
serves the model of `tests.support.engines.engines.write_model` with --weight-version 7.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from common.process.topology import Topology
from tests.support.engines.engines import (
    engine_process,
    router_process,
    sglang_is_installed,
    sglang_process,
    write_model,
)

EXTERNAL = ["external"] if os.environ.get("CONTRACT_URL") else []
WORKERS = ["engine", "gpu_engine", "sglang"]
ROUTERS = ["router", "sglang_router"]
ARGUMENTS = (
    "--weight-version",
    "7",
    "--max-running-requests",
    "64",
    "--max-context-tokens",
    "256",
    "--seed",
    "0",
)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("contract") / "model", seed=0)


@pytest.fixture(scope="session")
def other_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a model with other weights of the same architecture."""
    return write_model(tmp_path_factory.mktemp("contract") / "other", seed=1)


@pytest.fixture(scope="session")
def engine_url(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with engine_process(model_dir, tmp_path_factory.mktemp("logs") / "engine.log", *ARGUMENTS) as (
        url,
        _,
    ):
        yield url


@pytest.fixture(scope="session")
def gpu_engine_url(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    on_gpu = ("--device", "cuda", "--dtype", "float32")
    with engine_process(
        model_dir, tmp_path_factory.mktemp("logs") / "gpu.log", *ARGUMENTS, *on_gpu
    ) as (url, _):
        yield url


@pytest.fixture(scope="session")
def sglang_url(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if not sglang_is_installed():
        pytest.skip("SGLang is not installed: `make sglang-cpu` does it")
    with sglang_process(model_dir, tmp_path_factory.mktemp("logs") / "sglang.log", "7") as url:
        yield url


@pytest.fixture(scope="session")
def router_url(engine_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with router_process(engine_url, tmp_path_factory.mktemp("logs") / "router.log") as url:
        yield url


@pytest.fixture(scope="session")
def sglang_router_url(sglang_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("logs") / "sglang_router.log"
    with router_process(sglang_url, log, router="smg") as url:  # which passes on all fields
        yield url


@pytest.fixture
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the groups of weights meet on the loopback interface."""
    for name, value in Topology().loopback_env().items():
        monkeypatch.setenv(name, value)


def _url(request: pytest.FixtureRequest) -> str:
    return (
        os.environ["CONTRACT_URL"]
        if request.param == "external"
        else str(request.getfixturevalue(f"{request.param}_url"))
    )


@pytest.fixture(params=[*WORKERS, *ROUTERS, *EXTERNAL])
def target_url(request: pytest.FixtureRequest) -> str:
    """Returns the URL of a target."""
    return _url(request)


@pytest.fixture(params=[*WORKERS, *EXTERNAL])
def worker_url(request: pytest.FixtureRequest) -> str:
    """Returns the URL of an engine itself, for calls that the router does not forward."""
    return _url(request)


@pytest.fixture(params=["sglang", "sglang_router", *EXTERNAL])
def chat_url(request: pytest.FixtureRequest) -> str:
    """Returns the URL of a target with OpenAI's calls, which the embedded engine does not have."""
    return _url(request)


REACHED = {
    "engine": ("engine", "engine"),
    "router": ("engine", "router"),
    "sglang": ("sglang", "sglang"),
}
REACHED |= {
    "sglang_router": ("sglang", "sglang_router"),
    "gpu_engine": ("gpu_engine", "gpu_engine"),
}


@pytest.fixture(params=REACHED)
def reached(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Returns an engine's URL for control calls, and the URL for requests: the engine's own or the
    router's."""
    worker, asked = (str(request.getfixturevalue(f"{name}_url")) for name in REACHED[request.param])
    return worker, asked


@pytest.fixture(params=ROUTERS)
def router(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=_url(request), timeout=120, trust_env=False) as client:
        yield client


@pytest.fixture
def target(target_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=target_url, timeout=120, trust_env=False) as client:
        yield client


@pytest.fixture
def worker(worker_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=worker_url, timeout=120, trust_env=False) as client:
        yield client
