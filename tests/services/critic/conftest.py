"""A tiny random policy, and settings whose critic starts from it."""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from common.clients.critic import CriticClient
from common.settings.config import Config, load
from services.critic.app import create_critic_app
from tests.support.batches.critic import Start
from tests.support.processes.forks import Forked
from tests.support.processes.ports import free_port


@pytest.fixture
def settings(policy_dir: Path, tmp_path: Path) -> list[str]:
    """Returns the settings of a small critic as command-line arguments."""
    return [
        *(
            "--model.name",
            str(policy_dir),
            "--state_dir",
            str(tmp_path / "state"),
            "--algorithm.name",
            "ppo",
        ),
        *("--critic.learning_rate", "1e-3"),
    ]


@pytest.fixture
def config(settings: list[str]) -> Config:
    return load(settings, {})


@pytest.fixture
async def app(config: Config) -> AsyncIterator[FastAPI]:
    """Runs the service in this process."""
    config.max_body_mb = 1
    app = create_critic_app(config)
    async with app.router.lifespan_context(app):
        yield app


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[CriticClient]:
    """Yields the client that the trainer uses."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with CriticClient(
        "critic-server", "http://critic", transport=transport, deadline_s=60
    ) as client:
        yield client


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def start(port: int, settings: list[str], tmp_path: Path) -> Iterator[Start]:
    """Starts the service as a process; ends every process it started."""
    started: list[Forked] = []
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SKYPILOT_", "RLHF_", "JOBGROUP_"))
    }

    def begin() -> Forked:
        words = (*settings, "--critic.port", str(port))
        started.append(
            Forked("services.critic", *words, log=tmp_path / "output.log", env=environment)
        )
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()
