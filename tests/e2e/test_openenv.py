"""OpenEnv's own server: text actions, actions with fields, MCP tools, failures, and training."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from common.wire.schemas import Episode
from tests.support.environments.agent_environments import python_of
from tests.support.environments.agent_training import train_on
from tests.support.environments.environments import Served, request_for, served
from tests.support.paths import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def server_of(app: str) -> str:
    served_by = f"tests.support.environments.openenv_servers:{app} --port PORT --log-level error"
    command = f"{python_of('openenv')} -m uvicorn {served_by}"
    return f"agent:{sys.executable} {ROOT}/examples/openenv/server.py '{command}' {{port}}"


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def play(
    server: Served, name: str, request_id: str = "r", n: int = 1, **limits: Any
) -> list[Episode]:
    request = request_for(server.service.runner.name, name, n=n, **limits)
    request.request_id = request_id
    return await server.client.episodes(request)


async def test_an_answer_is_an_action_of_one_text() -> None:
    said = "3"
    async with served(server_of("echo"), lambda _: said) as server:
        for episode in await play(server, "1+2?", n=5):  # the server has room for only two
            assert (episode.status, episode.stop_reason, episode.metrics["turns"]) == (
                "ok",
                "done",
                2,
            )
            assert episode.reward == 2 * (1.0 + 0.375), "the sum of the steps"
            assert "You said 3." in episode.sequences[0].text
        said = "fail"
        (episode,) = await play(server, "1+2?", "fails")
        assert (episode.status, episode.reward) == ("error", None)
        assert "out of order" in episode.detail
        said = "huge"
        (episode,) = await play(server, "1+2?", "huge")
        assert (episode.status, episode.stop_reason) == ("ok", "context")
        said = "hang"
        (episode,) = await play(server, "1+2?", "hangs", deadline_s=3)
        assert (episode.status, episode.reward) == ("timeout", None)
        said = "crash"
        (episode,) = await play(server, "1+2?", "crashes")
        assert (episode.status, episode.reward) == ("died", None)
        said = "3"
        (episode,) = await play(server, "1+2?", "again")
        assert episode.status == "ok", "the server is started again"


async def test_mcp_tools_are_listed_and_called() -> None:
    replies = iter([call("add", a=1), call("add", a=1, b=1), call("add", a=1, b=2), "3"])
    async with served(server_of("tools"), lambda _: next(replies)) as server:
        (episode,) = await play(server, "1+2?")
        assert (episode.status, episode.reward, episode.metrics["tool_calls"]) == ("ok", 1.0, 3)
        assert "<tool_response>\n3\n</tool_response>" in episode.sequences[0].text
        assert "validation error" in episode.sequences[0].text, (
            "what is wrong with a call is told to the model"
        )
        assert '"name": "add"' in server.engine.tokenizer.decode(
            server.engine.asked[0]["input_ids"]
        )


@pytest.mark.parametrize("app", ["echo"])
def test_an_openenv_environment_is_trained(app: str, base_model: Path, tmp_path: Path) -> None:
    train_on(server_of(app), base_model, tmp_path)
