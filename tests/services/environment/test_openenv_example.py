"""OpenEnv's protocol, spoken by test servers with `examples/openenv/server.py`: an absent, full, lost or
wrong server never gives a reward."""

import asyncio
import json
import sys
from typing import Any

import pytest
from aiohttp import WSMsgType, web

from common.wire.schemas import Episode
from services.http.app import listen
from tests.support.environments.environments import request_for, served
from tests.support.paths import ROOT

pytestmark = pytest.mark.integration
SERVER = f"{sys.executable} {ROOT / 'examples' / 'openenv' / 'server.py'}"

TEXT = {
    "properties": {"message": {"type": "string"}, "metadata": {"type": "object"}},
    "required": ["message"],
}


class Server:
    """Answers each kind of message as its test defines."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.told: list[Any] = []
        self.open = 0
        self.schema = dict(TEXT)
        self.full = 0
        self.tools: list[Any] = []

    async def ws(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.full:
            self.full -= 1
            await socket.send_json(
                {"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "full"}}
            )
            await socket.close()
            return socket
        self.open += 1
        try:
            async for message in socket:
                if message.type is WSMsgType.TEXT and not await self.answer(
                    socket, json.loads(message.data)
                ):
                    break
        finally:
            self.open -= 1
        return socket

    async def answer(self, socket: web.WebSocketResponse, message: Any) -> bool:
        kind = message["type"]
        if kind == "close":
            return False
        if kind == "mcp":
            listed = {"jsonrpc": "2.0", "id": 1, "result": {"tools": self.tools}}
            await socket.send_json({"type": "mcp", "data": listed})
            return True
        self.told.append(message)
        usual = {
            "type": "observation",
            "data": {"observation": {"text": "go on"}, "reward": 0.5, "done": kind == "step"},
        }
        found = self.answers.get(kind, usual)
        if isinstance(found, list):
            found = found.pop(0)
        if found == "end":
            return False
        if found == "hang":
            await socket.receive()  # until the client disconnects
            return False
        await (socket.send_str(found) if isinstance(found, str) else socket.send_json(found))
        return True

    async def page(self, request: web.Request) -> web.Response:
        return web.json_response({"action": self.schema})


async def play(
    server: Server, episodes: tuple[str, ...] = ("3",), joined: str = "sum", **limits: Any
) -> Episode:
    """Plays an episode for each of the model's answers; returns the last."""
    answers = list(episodes)
    app = web.Application()
    app.add_routes(
        [
            web.get("/ws", server.ws),
            web.get("/schema", server.page),
            web.get("/health", server.page),
        ]
    )
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    sock = listen("127.0.0.1", 0)
    await web.SockSite(runner, sock).start()
    name = f"agent:{SERVER} http://127.0.0.1:{sock.getsockname()[1]}/ {{port}} {joined}"
    try:
        async with served(name, lambda _: answers[0]) as here:
            for number in range(len(episodes)):
                request = request_for(name, **limits)
                request.request_id = f"r{number}"
                answers[:] = episodes[number:]
                (episode,) = await here.client.episodes(request)
            while server.open:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            return episode
    finally:
        await runner.cleanup()


def observed(**data: Any) -> Any:
    return {"type": "observation", "data": data}


async def test_an_episode() -> None:
    server = Server()
    server.full = 3
    episode = await play(server)
    assert (episode.status, episode.reward, episode.metrics["turns"]) == ("ok", 0.5, 1)
    assert [message["type"] for message in server.told] == ["reset", "step"]
    assert server.told[0]["data"]["ground_truth"] == "3"
    assert server.told[1]["data"] == {"message": "3"}


async def test_steps_without_a_reward_leave_the_answer_to_the_reward_functions() -> None:
    episode = await play(Server(step=observed(observation={}, reward=None, done=True)))
    assert (episode.status, episode.reward, episode.answer) == ("ok", None, "3")


@pytest.mark.parametrize(("joined", "reward"), [("sum", 1.0), ("last", 0.25), ("max", 1.0)])
async def test_the_rewards_of_steps_are_joined_as_the_argument_says(
    joined: str, reward: float
) -> None:
    steps = [
        observed(observation={}, reward=-0.25, done=False),
        observed(observation={}, reward=1.0, done=False),
        observed(observation={}, reward=0.25, done=False),
        observed(observation={}, reward=None, done=True),
    ]
    episode = await play(Server(step=steps), joined=joined)
    assert (episode.status, episode.metrics["turns"], episode.reward) == ("ok", 4, reward)


async def test_an_action_that_the_schema_refuses_is_told_to_the_model() -> None:
    invalid = {"code": "VALIDATION_ERROR", "message": "wrong", "errors": [{"loc": ["message"]}]}
    episode = await play(Server(step={"type": "error", "data": invalid}), turns=2)
    assert (episode.status, episode.stop_reason) == ("ok", "turns")
    assert 'error: wrong [{"loc": ["message"]}]' in episode.sequences[0].text


async def test_an_answer_without_a_step_is_a_zero_where_steps_have_rewards() -> None:
    server = Server()
    playing = play(server, sampled_tokens=3, episodes=("3", "3" * 9))
    episode = await playing
    assert (episode.status, episode.stop_reason, episode.reward) == ("ok", "sampled_tokens", 0.0)


CALL = '<tool_call>\n{"name": "%s", "arguments": {"move": "left"}}\n</tool_call>'


@pytest.mark.parametrize(
    "fields",
    [
        {"move": {"type": "string", "enum": ["left", "right"]}},
        {"move": {"type": "string"}, "speed": {"type": "integer", "default": 1}},
    ],
)
async def test_an_action_that_is_more_than_any_text_is_a_tool(fields: dict[str, Any]) -> None:
    server = Server()
    server.schema = {"properties": fields, "required": ["move"]}
    episode = await play(server, episodes=(CALL % "step",))
    assert (episode.status, episode.reward, episode.metrics["tool_calls"]) == ("ok", 0.5, 1)
    assert server.told[1]["data"] == {"move": "left"}


async def test_mcp_tools_are_offered_and_called() -> None:
    server = Server()
    server.tools = [{"name": "go", "description": "Goes.", "input_schema": {"type": "object"}}]
    episode = await play(server, episodes=(CALL % "go",))
    assert (episode.status, episode.reward, episode.metrics["tool_calls"]) == ("ok", 0.5, 1)
    asked = {"type": "call_tool", "tool_name": "go", "arguments": {"move": "left"}}
    assert server.told[1]["data"] == asked


FAULTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "lost at reset": ({"reset": "end"}, "died", "ended the connection"),
    "lost at step": ({"step": "end"}, "died", "ended the connection"),
    "no session": (
        {"reset": {"type": "error", "data": {"code": "FACTORY_ERROR", "message": "no image"}}},
        "died",
        "no image",
    ),
    "refused": (
        {"step": {"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "out of order"}}},
        "error",
        "order",
    ),
    "no JSON": ({"reset": "<html>"}, "error", "answered <html>"),
    "no mapping": ({"reset": "[]"}, "error", "answered []"),
    "no observation": ({"step": {"type": "state", "data": {}}}, "error", "answered a step with"),
    "no reward": (
        {"step": observed(observation={}, reward="much", done=True)},
        "error",
        "much",
    ),
    "NaN": (
        {"step": '{"type": "observation", "data": {"observation": {}, "reward": NaN}}'},
        "error",
        "reward is nan",
    ),
    "hangs": ({"step": "hang"}, "timeout", "it took longer"),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_failure_has_a_reason_and_no_reward(fault: str) -> None:
    answers, status, detail = FAULTS[fault]
    episode = await play(Server(**answers), deadline_s=1 if fault == "hangs" else 60)
    assert (episode.status, episode.reward, episode.sequences) == (status, None, [])
    assert detail in episode.detail


async def test_absent_server_gives_no_reward() -> None:
    name = f"agent:{SERVER} http://127.0.0.1:1 {{port}}"
    async with served(name, lambda _: "3") as here:
        (episode,) = await here.client.episodes(request_for(name, deadline_s=3))
        assert (episode.status, episode.reward) == ("died", None)


async def test_a_command_that_ends_says_why() -> None:
    name = f"agent:{SERVER} \"{sys.executable} -I -S -c 'raise SystemExit(7)'\" {{port}}"
    async with served(name, lambda _: "3") as here:
        (episode,) = await here.client.episodes(request_for(name))
        assert (episode.status, episode.reward) == ("error", None)
        assert "ended with status 7 before it answered" in episode.detail
