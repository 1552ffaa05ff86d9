"""Unmodified client libraries and agent frameworks as agents: every conversation is one sequence
and is trained on."""

import os
from pathlib import Path

import pytest

from tests.support.environments.agent_environments import python_of
from tests.support.environments.agent_training import train_on
from tests.support.environments.environments import request_for, served
from tests.support.models.trap_models import letters
from tests.support.paths import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.slow]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
FINAL = '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "3"}}\n</tool_call>'
CALLS = {
    "agents": [CALL, "it is 3", "3"],
    "smol": [CALL, FINAL],
    "chat": ["2", "3"],
    "responses": ["2", "3"],
    "messages": ["2", "3"],
}


def agent(kind: str) -> str:
    program = ROOT / "tests" / "support" / "environments" / "library_agents.py"
    return f"agent:env OPENAI_AGENTS_DISABLE_TRACING=1 {python_of('agents')} {program} {kind}"


@pytest.mark.parametrize("kind", CALLS)
async def test_every_sampled_token_is_recorded_once(kind: str) -> None:
    said = iter(CALLS[kind])
    name = agent(kind)
    async with served(name, lambda _: next(said)) as server:
        request = request_for(name)
        request.task.columns = {"tools": "1"}
        (episode,) = await server.client.episodes(request)
        assert (episode.status, episode.detail) == ("ok", "")
        assert episode.components["right"] == 1.0
        tokenizer = server.engine.tokenizer
        sampled = [
            token
            for sequence in episode.sequences
            for token in sequence.token_ids[sequence.mask == 1].tolist()
        ]
        assert sampled == [token for answer in CALLS[kind] for token in letters(tokenizer, answer)]
        assert len(episode.sequences) == (2 if kind == "smol" else 1), (
            "smolagents writes tool calls anew, as text"
        )


async def test_libraries_get_what_they_ask_for_or_the_reason() -> None:
    name = agent("fields")

    def reply(text: str) -> str:
        return "3! sure" if "Found" in text else "look Observation: 9"

    async with served(name, reply) as server:
        (episode,) = await server.client.episodes(request_for(name))
        assert episode.status == "ok", episode.detail
        assert episode.components["right"] == 1.0
        assert episode.metrics["refused_calls"] == 1.0
        (sequence,) = episode.sequences
        tokenizer = server.engine.tokenizer
        sampled = sequence.token_ids[sequence.mask == 1].tolist()
        assert sampled == [
            *letters(tokenizer, "look Observation:", end=False),
            *letters(tokenizer, "3!", end=False),
        ]


@pytest.mark.parametrize("kind", ["chat", "responses", "messages", "agents"])
def test_a_library_is_trained(kind: str, base_model: Path, tmp_path: Path) -> None:
    assert os.environ.get("OPENAI_BASE_URL") is None
    train_on(agent(kind), base_model, tmp_path)
