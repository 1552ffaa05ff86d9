"""Agents at a URL: what is posted to them, over a real socket, and what is done with their answers."""

import contextlib
import random
from collections.abc import Callable
from typing import Any

import httpx
import orjson
import pytest
from fastapi import Request, Response

from services.environment import program_runner
from services.http.app import create_app, listen, serving
from tests.support.environments.environments import request_for, served

_VALUES: list[Callable[[random.Random], Any]] = [
    lambda draw: draw.randint(-9, 9),
    lambda draw: draw.choice(["", "text", "ä \u2028 ✓"]),
    lambda draw: [draw.random(), None, True],
    lambda draw: {"a": {"b": draw.random()}},
]


def random_task(draw: random.Random) -> dict[str, Any]:
    """Returns the fields of a task that its row decides."""
    users = [{"role": "user", "content": f"say {n}"} for n in range(draw.randint(1, 3))]
    messages = draw.choice([[], [{"role": "system", "content": "be brief"}, *users]])
    return {
        "prompt": draw.choice(["", "a prompt"]) if messages else f"a prompt {draw.random()}",
        "messages": messages,
        "ground_truth": draw.choice(["", "3"]),
        "seed": draw.randrange(2**31),
        "columns": {f"c{n}": draw.choice(_VALUES)(draw) for n in range(draw.randint(0, 3))},
    }


async def test_an_agent_gets_the_whole_task_and_the_address_of_its_own_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Nothing listens there: an agent is called directly, whatever the proxy of this machine.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    draw = random.Random(0)
    posted: list[dict[str, Any]] = []
    agent = create_app("agent")

    @agent.post("/play")
    async def play(request: Request) -> Response:
        task = orjson.loads(await request.body())
        posted.append(task)
        session = task["session"]
        async with httpx.AsyncClient(trust_env=False) as http:
            said = await http.post(
                f"{session['openai_base_url']}/chat/completions",
                json={"messages": task["messages"]},
                headers={"authorization": f"Bearer {session['api_key']}"},
            )
        assert said.json()["choices"][0]["message"]["content"] == "said"
        return Response(orjson.dumps(float(len(posted))))

    async with contextlib.AsyncExitStack() as stack:
        sock = stack.enter_context(listen("127.0.0.1", 0))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}/play"
        await stack.enter_async_context(serving(agent, sock))
        server = await stack.enter_async_context(served(f"agent:{url}", lambda _: "said"))
        for number in range(6):
            row = random_task(draw)
            request = request_for(server.service.runner.name)
            request.request_id = f"r{number}"
            request.task = request.task.model_copy(update=row)
            (episode,) = await server.client.episodes(request)
            assert (episode.status, episode.reward, episode.answer) == ("ok", number + 1.0, "said")

            found = posted[number]
            assert len(posted) == number + 1
            prompt = row["prompt"] or row["messages"][-1]["content"]
            messages = row["messages"] or [{"role": "user", "content": prompt}]
            assert found.pop("session").keys() == {
                "url",
                "openai_base_url",
                "anthropic_base_url",
                "api_key",
            }
            assert found == {**row, "prompt": prompt, "messages": messages}


async def test_an_agent_may_take_as_long_as_its_episode_and_must_have_a_certificate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trusted = object()
    opened: list[dict[str, Any]] = []
    client = httpx.AsyncClient

    def answer(request: httpx.Request) -> httpx.Response:
        assert (request.method, str(request.url)) == ("POST", "https://agents.example/run")
        assert set(request.extensions["timeout"].values()) == {None}
        return httpx.Response(200, content=request.content)

    def open_client(*, verify: object, **settings: Any) -> httpx.AsyncClient:
        opened.append({"verify": verify, "trust_env": settings["trust_env"]})
        return client(transport=httpx.MockTransport(answer), **settings)

    monkeypatch.setattr(httpx, "AsyncClient", open_client)
    monkeypatch.setattr(program_runner, "trusted", lambda: trusted)
    found = await program_runner._post("https://agents.example/run", {"a": [1]})
    assert found.json() == {"a": [1]}
    assert opened == [{"verify": trusted, "trust_env": False}]
