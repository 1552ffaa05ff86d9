"""Groups, buffers and clients for the tests of the replay buffer."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from common.clients import ReplayClient
from common.schemas import Completion, Group
from common.sections import ReplaySection
from services.replay.app import create_replay_app

MakeGroup = Callable[..., Group]


@pytest.fixture
def make_group() -> MakeGroup:
    """`make_group(id, version=0, position=0, rewards=(0.0, 1.0), tokens=3, prompt_id="p1")`; above 0 is right."""

    def make(
        group_id: str,
        version: int = 0,
        position: int = 0,
        rewards: tuple[float, ...] = (0.0, 1.0),
        tokens: int = 3,
        prompt_id: str = "p1",
    ) -> Group:
        completions = [
            Completion(
                token_ids=np.arange(tokens, dtype=np.int32) + i,
                logprobs=np.linspace(-1.5, -0.25, tokens, dtype=np.float32),
                text=f"answer {i}",
                finish_reason="stop",
                weight_versions=[(version, 0, tokens)],
                reward=reward,
                correct=reward > 0,
            )
            for i, reward in enumerate(rewards)
        ]
        prompt = np.array([1, 2], np.int32)
        return Group(group_id, prompt_id, "1 + 1?", "2", prompt, completions, position=position, created_at=5.0)

    return make


@pytest.fixture
def config() -> ReplaySection:
    """Settings of the service under test; a test may override this fixture."""
    return ReplaySection(capacity=1000, lease_s=600)


@pytest.fixture
async def app(config: ReplaySection, tmp_path: Path) -> AsyncIterator[FastAPI]:
    """The service in this process, its lifespan entered."""
    app = create_replay_app(config, tmp_path, max_body_bytes=1 << 20)
    async with app.router.lifespan_context(app):
        yield app


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[ReplayClient]:
    """The client everything in the system uses."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with ReplayClient("replay-buffer", "http://replay", transport=transport, deadline_s=30) as client:
        yield client
