"""Episodes of an OpenEnv server, over its WebSocket: one connection is one episode.

An environment with MCP tools offers them to the model. Without MCP tools, the model's answer is the
action if an action is a single text; otherwise the model gets a tool `step` with the fields of the
action. The reward is the sum over all steps.
"""

import asyncio
import contextlib
import json
import math
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from common.errors import ConfigError, ServiceLost, shorten
from common.process.security import trusted
from common.wire.schemas import EpisodeLimits, EpisodeTask
from services.environment.environments import FIELD, Environment
from services.environment.outcome import EnvironmentLost, EpisodeFailed, Outcome
from services.environment.programs import RunningProgram, free_port, words_of
from services.environment.runner import EpisodeRun
from services.environment.session import Session
from services.environment.threads import Threads

_MAX_MESSAGE_BYTES = 32 << 20
_LOOK_S = 0.1
_MAX_FAILED_STARTS = 5
"""Starts in a row after which the command ended before it answered: another one would not help."""
_HUNG_S = 5.0
_RESERVED = {"type": "object", "properties": {}}


class OpenEnv:
    """The environment of an OpenEnv server at a URL, or of one that this process starts and keeps
    alive.

    Args:
        name: name of the environment.
        target: the URL, or the command line, in which `{port}` is the port to listen on.
        calls: maximum concurrent episodes.

    Raises:
        ConfigError: the command does not exist here, or has no `{port}`.
    """

    def __init__(self, name: str, target: str, calls: int) -> None:
        self.name, self.tools = name, dict[str, Any]()
        self.has_steps = False
        self.has_reward: bool | None = None
        self.threads: Threads | None = None
        self._slots = asyncio.Semaphore(calls)
        self._url = target.rstrip("/") if re.match(r"(https?|wss?)://\S", target) else ""
        self._words = [] if self._url else words_of(target, FIELD)
        if self._words and not any("{port}" in word for word in self._words):
            remedy = "write openenv:uvicorn package.server.app:app --port {port}"
            raise ConfigError(
                "the command has no {port}, where the server's port belongs",
                field=FIELD,
                value=target,
                remedy=remedy,
            )
        self._url = self._url.replace("ws", "http", 1) if self._url.startswith("ws") else self._url
        self._server: RunningProgram | None = None
        self._ready, self._starting = False, asyncio.Lock()
        self._failed_starts = 0
        self._home: Path | None = None
        self._http: aiohttp.ClientSession | None = None
        self._known: tuple[bool, str] | None = None

    async def run(self, task: EpisodeTask, session: Session, limits: EpisodeLimits) -> Outcome:
        """Plays an episode and returns its outcome.

        Raises ServiceLost when the command never starts a server; otherwise nothing, except when
        cancelled.
        """
        try:
            async with asyncio.timeout(limits.deadline_s), self._starting:
                await self._start()
                mcp, text = self._known = self._known or await self._describe()
        except TimeoutError:
            return Outcome(
                "died", detail=f"the OpenEnv server was not ready within {limits.deadline_s:g} s"
            )
        except EnvironmentLost as error:
            return Outcome("died", detail=str(error))
        except EpisodeFailed as error:
            return Outcome("error", detail=str(error))
        connection = Connection(self._connect, mcp, text)
        environment = Environment(
            self.name,
            lambda: connection,
            None,
            self.tools,
            self.has_steps,
            None,
            tool=Connection.tool,
            is_done=lambda made: bool(made.done),
        )
        server = self._server
        async with self._slots:
            try:
                outcome = await EpisodeRun(environment, task, session, limits).run()
            finally:
                await asyncio.shield(connection.close())
        if outcome.status in ("timeout", "died") and server is not None:
            await self._end_if_lost(server)
        return outcome

    async def close(self) -> None:
        """Stops the server if this process started it."""
        if self._http is not None:
            await self._http.close()
        if self._server is not None:
            await self._server.kill()
        if self._home is not None:
            shutil.rmtree(self._home, ignore_errors=True)

    async def _start(self) -> None:
        """Starts the command unless it is running, and waits until it answers.

        Raises EpisodeFailed when it ends instead, and ServiceLost when it did so several times in a
        row.
        """
        if self._http is None:
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, ssl=trusted())
            )
        if not self._words:
            return
        if self._server is None or self._server.ended:
            port, mark = free_port(), secrets.token_hex(16)
            self._home = self._home or Path(tempfile.mkdtemp(prefix="openenv-"))
            words = [word.replace("{port}", str(port)) for word in self._words]
            self._server = await RunningProgram.start(
                words, {"PROGRAM_ID": mark, "PORT": str(port)}, mark, self._home
            )
            self._url, self._ready = f"http://127.0.0.1:{port}", False
        while not self._ready:
            if self._server.ended:
                status = await self._server.wait()
                said = await self._server.kill()
                reason = f"{self._words[0]} ended with status {status} before it answered: {said}"
                self._failed_starts += 1
                if self._failed_starts >= _MAX_FAILED_STARTS:
                    times = f"{self._failed_starts} times in a row, "
                    raise ServiceLost(
                        times + reason,
                        field=FIELD,
                        value=self.name,
                        remedy="try the command by itself",
                    )
                raise EpisodeFailed(reason)
            try:
                await self._get("/health")
                self._ready = True
                self._failed_starts = 0
            except EnvironmentLost:
                await asyncio.sleep(_LOOK_S)

    async def _end_if_lost(self, server: RunningProgram) -> None:
        """Kills a server that does not answer, so that it is started again.

        It may be shutting down but not have ended.
        """
        if server is not self._server or server.ended:
            return
        try:
            async with asyncio.timeout(_HUNG_S):
                await self._get("/health")
        except (TimeoutError, EnvironmentLost):
            await server.kill()

    async def _get(self, path: str) -> Any:
        """Returns the JSON at a path of the server. Raises EnvironmentLost."""
        assert self._http is not None
        try:
            async with self._http.get(f"{self._url}{path}") as answer:
                if answer.status != 200:
                    raise EnvironmentLost(f"{self._url}{path} answered {answer.status}")
                return await answer.json(content_type=None)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise EnvironmentLost(
                f"the OpenEnv server {self._url} does not answer: {error}"
            ) from error

    async def _describe(self) -> tuple[bool, str]:
        """Returns whether the environment has MCP tools, and the action's field for the model's
        answer, if any.
        """
        schema = await self._get("/schema")
        connection = Connection(self._connect)
        try:
            self.tools, text = await connection.list_tools(), ""
        except Refused as error:
            raise EpisodeFailed(f"the OpenEnv server does not list its tools: {error}") from error
        finally:
            await connection.close()
        mcp = bool(self.tools)
        if not mcp:
            text, self.tools = _action(schema.get("action") if isinstance(schema, dict) else None)
        self.has_steps = bool(text)
        return mcp, text

    async def _connect(self) -> aiohttp.ClientWebSocketResponse:
        """Returns a connection to the server. Raises EnvironmentLost."""
        assert self._http is not None
        try:
            return await self._http.ws_connect(
                f"{self._url}/ws", max_msg_size=_MAX_MESSAGE_BYTES, heartbeat=30
            )
        except (aiohttp.ClientError, OSError) as error:
            raise EnvironmentLost(
                f"the OpenEnv server {self._url} does not answer: {error}"
            ) from error


class Connection:
    """One episode of an OpenEnv server, with the methods that a runner calls.

    Args:
        connect: opens the WebSocket.
        mcp: whether it has MCP tools; otherwise `step` is the only tool.
        text: the action's field for the model's answer; empty if there is none.
    """

    def __init__(self, connect: Callable[[], Any], mcp: bool = False, text: str = "") -> None:
        self._connect, self._mcp, self._text = connect, mcp, text
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._rewards: list[float] = []
        self.done = False

    async def reset(self, **row: Any) -> str:
        """Begins the episode with the columns of the row and the ground truth."""
        data = {name: value for name, value in row.items() if name != "prompt"}
        shown = _shown(await self._observation("reset", data))
        return f"\n\n{shown}" if shown else ""

    async def step(self, messages: list[dict[str, Any]]) -> str | None:
        """Sends the answer as an action; returns None when the episode is over."""
        shown = _shown(await self._observation("step", {self._text: messages[-1]["content"]}))
        return None if self.done else shown or "(nothing)"

    async def get_reward(self) -> float | None:
        """Returns the sum of the steps' rewards; None when no step gave one."""
        return sum(self._rewards) if self._rewards else None

    async def close(self) -> None:
        """Ends the episode."""
        if self._socket is not None:
            socket, self._socket = self._socket, None
            with contextlib.suppress(aiohttp.ClientError, OSError):
                await socket.send_str('{"type": "close"}')
                await socket.close()

    async def list_tools(self) -> dict[str, Any]:
        """Returns the MCP tools in OpenAI's format, by name; empty when the environment has
        none.
        """
        answer = await self._ask(
            {
                "type": "mcp",
                "data": {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}},
            }
        )
        found = answer.get("data", {})
        tools = (found.get("result") or {}).get("tools", []) if isinstance(found, dict) else []
        return {
            tool["name"]: _function(tool)
            for tool in tools
            if isinstance(tool, dict) and isinstance(tool.get("name"), str)
        }

    def tool(self, name: str) -> Callable[..., Any]:
        """Returns the function that calls a tool."""

        async def call(**arguments: Any) -> str:
            data = (
                {"type": "call_tool", "tool_name": name, "arguments": arguments}
                if self._mcp
                else arguments
            )
            return _shown(await self._observation("step", data)) or "(nothing)"

        return call

    async def _observation(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Sends a message and returns the observation in the response."""
        answer = await self._ask({"type": kind, "data": data})
        found = answer.get("data")
        if (
            answer.get("type") != "observation"
            or not isinstance(found, dict)
            or not isinstance(found.get("observation"), dict)
        ):
            raise EpisodeFailed(f"the OpenEnv server answered a {kind} with {shorten(answer)}")
        self.done = found.get("done") is True
        reward = found.get("reward")
        if reward is not None and kind == "step":
            if not isinstance(reward, int | float) or not math.isfinite(reward):
                raise EpisodeFailed(
                    f"the reward of a step is {shorten(reward)}, but must be a finite number"
                )
            self._rewards.append(float(reward))
        observation: dict[str, Any] = found["observation"]
        return observation

    async def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Sends a message and returns the response; waits while the server has no room for another
        session.

        Raises EnvironmentLost, EpisodeFailed, or Refused when the environment rejects the message.
        """
        while True:
            try:
                return await self._exchange(message)
            except _Full:
                await self.close()
                await asyncio.sleep(_LOOK_S)

    async def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            self._socket = self._socket or await self._connect()
            await self._socket.send_str(json.dumps(message))
            answer = await self._socket.receive()
        except (aiohttp.ClientError, OSError) as error:
            raise EnvironmentLost(
                f"the connection to the OpenEnv server was lost: {error}"
            ) from error
        if answer.type is not aiohttp.WSMsgType.TEXT:
            raise EnvironmentLost(f"the OpenEnv server ended the connection ({answer.type.name})")
        try:
            content = json.loads(answer.data)
        except ValueError:
            raise EpisodeFailed(
                f"the OpenEnv server's answer is not JSON: {shorten(answer.data)}"
            ) from None
        if not isinstance(content, dict):
            raise EpisodeFailed(f"the OpenEnv server answered {shorten(content)}")
        if content.get("type") == "error":
            raise _refusal(content.get("data"))
        return content


class _Full(Exception):
    """The server has no room for another session."""


class Refused(Exception):
    """The server refused a message; if it was an action, the model may do better next time."""


def _refusal(data: Any) -> Exception:
    data = data if isinstance(data, dict) else {}
    code, message = data.get("code"), data.get("message")
    if code == "CAPACITY_REACHED":
        return _Full(message)
    if code in ("FACTORY_ERROR", "SESSION_ERROR"):
        return EnvironmentLost(f"the OpenEnv server has no session: {message}")
    return Refused(
        f"{message} {json.dumps(data['errors'], default=str)}" if "errors" in data else str(message)
    )


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    schema = tool.get("input_schema") or tool.get("inputSchema") or _RESERVED
    described = {
        "name": tool["name"],
        "description": tool.get("description") or "",
        "parameters": schema,
    }
    return {"type": "function", "function": described}


def _action(schema: Any) -> tuple[str, dict[str, Any]]:
    """Returns the action's only text field, or otherwise the tool `step` with the action's
    fields.
    """
    if not isinstance(schema, dict):
        raise EpisodeFailed(f"the OpenEnv server describes its action with {shorten(schema)}")
    fields = {
        name: value for name, value in schema.get("properties", {}).items() if name != "metadata"
    }
    required = schema.get("required") or list(fields)
    if len(required) == 1 and fields.get(required[0], {}).get("type") == "string":
        return required[0], {}
    parameters = schema | {"properties": fields}
    described = {
        "name": "step",
        "description": "Acts in the environment.",
        "parameters": parameters,
    }
    return "", {"step": {"type": "function", "function": described}}


def _shown(observation: dict[str, Any]) -> str:
    """Returns the text of an observation as shown to the model."""
    fields = {
        name: value
        for name, value in observation.items()
        if name != "metadata" and value is not None
    }
    if "tool_name" in fields and (result := fields.get("result", fields.get("error"))) is not None:
        content = (
            result.get("data", result.get("structured_content"))
            if isinstance(result, dict)
            else result
        )
        fields = {"result": result if content is None else content}
    if len(fields) == 1:
        (value,) = fields.values()
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return json.dumps(fields, ensure_ascii=False) if fields else ""
