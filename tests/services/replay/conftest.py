"""Fixtures for the tests of the replay buffer: groups, the service and its client."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from common.clients.replay import ReplayClient
from common.settings.sections import ReplaySection
from services.replay.app import create_replay_app
from tests.support.batches.replay_groups import MakeGroup, make_group


@pytest.fixture(name="make_group")
def _make_group() -> MakeGroup:
    return make_group


@pytest.fixture
def config() -> ReplaySection:
    """Returns the settings of the service under test; a test may override this fixture."""
    return ReplaySection(capacity=1000, lease_s=600)


@pytest.fixture
async def app(config: ReplaySection, tmp_path: Path) -> AsyncIterator[FastAPI]:
    """Runs the service in this process."""
    app = create_replay_app(config, tmp_path, max_body_bytes=1 << 20)
    async with app.router.lifespan_context(app):
        yield app


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[ReplayClient]:
    """Returns the client that the system itself uses."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with ReplayClient(
        "replay-buffer", "http://replay", transport=transport, deadline_s=30
    ) as client:
        yield client
