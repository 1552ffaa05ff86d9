"""Plays an OpenEnv server: `python server.py URL-or-COMMAND PORT [sum|last|max]`, started by the
environment-server. A command is started once, with a free port in place of its word PORT.

    environment-server ── POST /run: a task and its session ──► Episode.play ──► OpenEnv's WebSocket
           ▲                                                        │
           └─ the session's calls ◄── POST …/v1/chat/completions ◄──┘

It needs only aiohttp, and imports nothing from this project. One connection is one episode. An
environment with MCP tools offers them to the model. Without, the model's answer is the action if an
action is a single text; otherwise the model gets a tool `step` with the fields of the action. The
reward joins those of the steps as the last argument says: `sum` for increments (the default),
`last` for a score so far, `max` for the best attempt.
"""

import asyncio
import json
import os
import shlex
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, WSMsgType, web

_MAX_BYTES = 32 << 20
_RETRY_S = 0.1
"""Pause before a full server is asked again whether it has room."""
_RESTRICTED = {"enum", "const", "pattern", "format"}
"""What a text's schema has when not every text is allowed."""
_JOINED = {"sum": sum, "last": lambda rewards: rewards[-1], "max": max}
Json = dict[str, Any]
_NO_ARGUMENTS: Json = {"type": "object", "properties": {}}


class Wrong(Exception):
    """The server answered what it should not have, or its environment failed."""


class Lost(Exception):
    """The server cannot be reached, or has no session: another try may succeed."""


class Told(Exception):
    """What is wrong with an action, for the model to do better."""


class Player:
    """Plays episodes of the OpenEnv server at a URL, or of the one that a command starts, many at
    once.
    """

    def __init__(self, target: str, joined: str) -> None:
        self.url = target.rstrip("/")
        self._words: list[str] = []
        if not target.startswith(("http://", "https://")):
            port = _free_port()
            self.url = f"http://127.0.0.1:{port}"
            self._words = [word.replace("PORT", str(port)) for word in shlex.split(target)]
        self.join = _JOINED[joined]
        self.tools: list[Json] = []
        self.has_mcp_tools = False
        self.answer_field = ""
        """The action's field for the model's answer; without one the model has tools."""
        self.gives_rewards = False
        """Whether a step of any episode had a reward."""
        self._describing = asyncio.Lock()
        self._is_described = False
        self._http: ClientSession | None = None

    @property
    def http(self) -> ClientSession:
        """The HTTP client of all episodes."""
        assert self._http is not None, "the app runs"
        return self._http

    async def serving(self, app: web.Application) -> AsyncIterator[None]:
        """Holds the HTTP client, and the command, while the app runs."""
        connector = TCPConnector(limit=0)
        async with ClientSession(connector=connector, timeout=ClientTimeout(total=None)) as http:
            self._http = http
            if not self._words:
                yield
                return
            process = await asyncio.create_subprocess_exec(*self._words)
            watching = asyncio.create_task(_end_with(process))
            yield
            watching.cancel()
            process.terminate()

    async def health(self, _: web.Request) -> web.Response:
        """Answers 200 once the OpenEnv server does."""
        try:
            async with self.http.get(f"{self.url}/health") as answer:
                return web.Response(status=answer.status)
        except (ClientError, OSError):
            return web.Response(status=503)

    async def run(self, request: web.Request) -> web.Response:
        """Plays an episode; answers with its reward, or null if no step had one."""
        episode = Episode(self)
        try:
            async with self._describing:
                await self._describe()
            reward = await episode.play(await request.json())
        except (Wrong, Told) as error:
            return web.Response(status=422, text=str(error))
        except Lost as error:
            return web.Response(status=503, text=str(error))
        except (ClientError, OSError) as error:
            return web.Response(status=503, text=f"{self.url} does not answer: {error}")
        finally:
            await episode.close()
        return web.json_response(reward)

    async def _describe(self) -> None:
        """Asks the server, once, how the model acts."""
        if self._is_described:
            return
        async with self.http.get(f"{self.url}/schema", raise_for_status=True) as answer:
            schema = await answer.json(content_type=None)
        asking = Episode(self)
        call = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
        try:
            listed = (await asking.ask("mcp", call)).get("result") or {}
        finally:
            await asking.close()

        for tool in listed.get("tools", []):
            schema_of_tool = tool.get("input_schema") or tool.get("inputSchema")
            self.tools.append(_tool(tool["name"], tool.get("description"), schema_of_tool))
        self.has_mcp_tools = bool(self.tools)
        if not self.has_mcp_tools:
            self._read_action(schema.get("action") if isinstance(schema, dict) else None)
        self._is_described = True

    def _read_action(self, schema: Any) -> None:
        if not isinstance(schema, dict):
            raise Wrong(f"the OpenEnv server describes its action with {schema!r:.200}")
        fields = dict(schema.get("properties", {}))
        fields.pop("metadata", None)
        if len(fields) == 1:
            ((name, field),) = fields.items()
            if field.get("type") == "string" and not _RESTRICTED & set(field):
                self.answer_field = name
                return
        parameters = schema | {"properties": fields}
        self.tools = [_tool("step", "Acts in the environment.", parameters)]


class Episode:
    """One episode: a connection of the OpenEnv server, and a chat with the model."""

    def __init__(self, player: Player) -> None:
        self._player = player
        self._socket: Any = None
        self._rewards: list[float] = []
        self._is_done = False

    async def play(self, task: Json) -> float | None:
        """Plays a task; returns its reward."""
        first = await self._observe(
            "reset", task["columns"] | {"ground_truth": task["ground_truth"]}
        )
        messages: list[Json] = [dict(message) for message in task["messages"]]
        if first:
            messages[-1]["content"] += f"\n\n{first}"
        while not self._is_done:
            message = await self._answer(task["session"], messages)
            if message is None:
                break
            messages.append(message)
            calls = message.get("tool_calls") or []
            for call in calls:
                result = await self._call(call["function"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            if not calls and not self._player.answer_field:
                break
            if not calls:
                action = {self._player.answer_field: message["content"]}
                messages.append({"role": "user", "content": await self._told(action)})
        if self._rewards:
            return self._player.join(self._rewards)
        return 0.0 if self._player.gives_rewards else None

    async def _answer(self, session: Json, messages: list[Json]) -> Json | None:
        """Returns the model's answer; None if it was cut, or a limit of the episode is reached."""
        body: Json = {"model": "policy", "messages": messages}
        if self._player.tools:
            body["tools"] = self._player.tools
        url = f"{session['openai_base_url']}/chat/completions"
        headers = {"authorization": f"Bearer {session['api_key']}"}
        async with self._player.http.post(url, json=body, headers=headers) as answer:
            content = await answer.json(content_type=None)
        if answer.status != 200:
            return None
        choice = content["choices"][0]
        return None if choice["finish_reason"] == "length" else choice["message"]

    async def _call(self, function: Json) -> str:
        try:
            arguments = json.loads(function["arguments"])
        except ValueError as error:
            return f"error: {error}"
        if self._player.has_mcp_tools:
            name = function["name"]
            arguments = {"type": "call_tool", "tool_name": name, "arguments": arguments}
        return await self._told(arguments)

    async def _told(self, action: Json) -> str:
        """Takes a step, unless one before was the last; returns what the model reads."""
        if self._is_done:
            return "the episode is over"
        try:
            return await self._observe("step", action) or "(nothing)"
        except Told as error:
            return f"error: {error}"

    async def _observe(self, kind: str, data: Json) -> str:
        answer = await self.ask(kind, data)
        observation = answer.get("observation")
        reward = answer.get("reward")
        if not isinstance(observation, dict) or not isinstance(reward, int | float | None):
            raise Wrong(f"the OpenEnv server answered a {kind} with {answer!r:.200}")
        self._is_done = bool(answer.get("done"))
        if reward is not None and kind == "step":
            self._rewards.append(float(reward))
            self._player.gives_rewards = True
        return _text(observation)

    async def ask(self, kind: str, data: Json) -> Json:
        """Sends a message and returns the answer's data; waits while the server is full."""
        while True:
            if self._socket is None:
                self._socket = await self._player.http.ws_connect(
                    f"{self._player.url}/ws", max_msg_size=_MAX_BYTES, heartbeat=30
                )
            await self._socket.send_json({"type": kind, "data": data})
            answer = await self._socket.receive()
            if answer.type is not WSMsgType.TEXT:
                raise Lost(f"the OpenEnv server ended the connection ({answer.type.name})")
            try:
                content = json.loads(answer.data)
                said: Json = content["data"]
                is_error = content["type"] == "error"
            except (ValueError, TypeError, KeyError):
                raise Wrong(f"the OpenEnv server answered {answer.data:.200}") from None
            if not is_error:
                return said
            if said.get("code") != "CAPACITY_REACHED":
                raise _refusal(said)
            await self.close()
            await asyncio.sleep(_RETRY_S)

    async def close(self) -> None:
        """Ends the episode."""
        if self._socket is not None and not self._socket.closed:
            await self._socket.send_json({"type": "close"})
            await self._socket.close()
        self._socket = None


def _refusal(said: Json) -> Exception:
    code = said.get("code")
    message = str(said.get("message"))
    if code in ("FACTORY_ERROR", "SESSION_ERROR"):
        return Lost(f"the OpenEnv server has no session: {message}")
    if "errors" in said:
        message += f" {json.dumps(said['errors'], default=str)}"
    # The schema refused the action, before the environment saw it.
    is_invalid = "errors" in said or code == "VALIDATION_ERROR"
    return Told(message) if is_invalid else Wrong(message)


def _tool(name: str, description: str | None, parameters: Any) -> Json:
    function: Json = {"name": name, "description": description or ""}
    function["parameters"] = parameters or _NO_ARGUMENTS
    return {"type": "function", "function": function}


def _text(observation: Json) -> str:
    """Returns an observation as the model reads it: a text as it is, the rest as JSON."""
    shown: Any = {
        name: value
        for name, value in observation.items()
        if name != "metadata" and value is not None
    }
    if "tool_name" in shown:  # what an MCP tool returned, which its server may have wrapped
        result = shown.get("result", shown.get("error"))
        if isinstance(result, dict):
            content = result.get("data", result.get("structured_content"))
            result = result if content is None else content
        shown = shown if result is None else result
    elif len(shown) == 1:
        (shown,) = shown.values()
    if shown == {}:
        return ""
    return shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


async def _end_with(process: asyncio.subprocess.Process) -> None:
    """Ends this server with the OpenEnv server: the environment-server starts both again."""
    os._exit(await process.wait() or 1)


def main(target: str, port: int, joined: str = "sum") -> None:
    """Serves until SIGTERM."""
    player = Player(target, joined)
    app = web.Application(client_max_size=_MAX_BYTES)
    app.cleanup_ctx.append(player.serving)
    app.router.add_get("/health", player.health)
    app.router.add_post("/run", player.run)
    web.run_app(
        app,
        host="127.0.0.1",
        port=port,
        print=None,
        access_log=None,
        shutdown_timeout=0.1,
        handler_cancellation=True,
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
