"""Episodes of an OpenEnv server, over its WebSocket: one connection is one episode.

An environment with MCP tools offers them to the model. Without MCP tools, the model's answer is the
action if an action is a single text; otherwise the model gets a tool `step` with the fields of the
action. The reward is the sum over all steps, or what `environment.step_rewards` says.
"""

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import msgspec

from common import Json
from common.errors import shorten
from common.process.security import trusted
from common.wire.schemas import EpisodeLimits, EpisodeTask
from services.environment.class_runner import EpisodeRun
from services.environment.environments import Environment
from services.environment.messages import made_tool
from services.environment.outcome import (
    EnvironmentLost,
    EpisodeFailed,
    EpisodeRunner,
    Outcome,
    ToolFailed,
    timed_out,
)
from services.environment.session import Session
from services.environment.user_server import UserServer

_MAX_MESSAGE_BYTES = 32 << 20
_RETRY_S = 0.1
"""Pause before the server is asked again whether it has room."""
_RESTRICTED = {"enum", "const", "pattern", "format"}
"""What a text's schema has when not every text is allowed."""
_JOINED: dict[str, Callable[[list[float]], float]] = {
    "sum": sum,
    "last": lambda rewards: rewards[-1],
    "max": max,
}
"""The reward of an episode from those of its steps, by `environment.step_rewards`."""


class OpenEnvRunner(EpisodeRunner):
    """Plays episodes of an OpenEnv server at a URL, or of one that this process starts and keeps
    alive.

    Args:
        name: name of the environment.
        target: the URL, or the command line, in which `{port}` is the port to listen on.
        slots: maximum concurrent episodes.
        step_rewards: `environment.step_rewards`.

    Raises:
        ConfigError: the command does not exist here, or has no `{port}`.
    """

    def __init__(self, name: str, target: str, slots: int, step_rewards: str = "sum") -> None:
        self.name = name
        self.tools = {}
        self.joined = _JOINED[step_rewards]
        self.has_mcp_tools = False
        self.answer_field = ""
        """The action's field for the model's answer. Without one and without MCP tools, the only
        tool is `step`."""
        self._server = UserServer(name, target)
        self._slots = asyncio.Semaphore(slots)
        self._http: aiohttp.ClientSession | None = None
        self._is_described = False
        self._describing = asyncio.Lock()

    async def _play(
        self, task: EpisodeTask, session: Session, limits: EpisodeLimits, *, outcome: Outcome
    ) -> None:
        async with self._server.ready(limits.deadline_s) as address:
            url = address.rstrip("/")
            try:
                async with asyncio.timeout(limits.deadline_s), self._describing:
                    await self._describe(url)
            except TimeoutError:
                raise EnvironmentLost(
                    f"the OpenEnv server did not describe itself within {limits.deadline_s:g} s"
                ) from None

            connection = Connection(self, url, limits.tool_timeout_s)
            environment = Environment(
                name=self.name,
                make=lambda: connection,
                columns=None,
                tools=self.tools,
                has_steps=self.has_steps,
                has_reward=None,
                tool=Connection.tool,
                is_done=lambda instance: bool(instance.done),
            )
            run = EpisodeRun(environment, task, session, limits=limits, outcome=outcome)
            # The deadline starts in `play`, so not while the episode waits for a slot.
            async with self._slots:
                try:
                    await run.play()
                finally:
                    await asyncio.shield(connection.close())

    async def close(self) -> None:
        """Stops the server if this process started it."""
        if self._http is not None:
            await self._http.close()
        await self._server.close()

    def client(self) -> aiohttp.ClientSession:
        """Returns the HTTP client of all episodes, which is made in the event loop."""
        if self._http is None:
            connector = aiohttp.TCPConnector(limit=0, ssl=trusted())
            self._http = aiohttp.ClientSession(connector=connector)
        return self._http

    async def _describe(self, url: str) -> None:
        """Asks the server, the first time, how the model acts; sets `tools`, `has_mcp_tools`,
        `answer_field` and `has_steps`. Raises EnvironmentLost or EpisodeFailed.
        """
        if self._is_described:
            return
        with _reaching(url):
            async with self.client().get(f"{url}/schema", raise_for_status=True) as answer:
                schema = await answer.json(content_type=None)
        connection = Connection(self, url)
        try:
            self.tools = await connection.list_tools()
        except (Refused, ToolFailed) as error:
            raise EpisodeFailed(f"the OpenEnv server does not list its tools: {error}") from error
        finally:
            await connection.close()

        self.has_mcp_tools = bool(self.tools)
        if not self.has_mcp_tools:
            action = schema.get("action") if isinstance(schema, dict) else None
            self.answer_field, self.tools = _action(action)
            self.has_steps = bool(self.answer_field)
        self._is_described = True


class _Message(msgspec.Struct):
    """What the server sends."""

    type: str
    data: Json = {}


class _Observed(msgspec.Struct):
    """The server's answer to a reset or a step."""

    observation: Json
    reward: float | None = None
    done: bool | None = False


class Connection:
    """One episode of an OpenEnv server, with the methods that a runner calls.

    Args:
        runner: knows how the model acts.
        url: URL of the server.
        tool_timeout_s: seconds that a step may take; None for no limit.
    """

    def __init__(
        self, runner: OpenEnvRunner, url: str, tool_timeout_s: float | None = None
    ) -> None:
        self._runner = runner
        self._url = url
        self._tool_timeout_s = tool_timeout_s
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._is_behind = False
        """Whether a step took too long and its answer has not come yet."""
        self._rewards: list[float] = []
        self.done = False

    async def reset(self, **row: Any) -> str:
        """Begins the episode with the columns of the row and the ground truth."""
        data = {name: value for name, value in row.items() if name != "prompt"}
        text = _text(await self._observation("reset", data))
        return f"\n\n{text}" if text else ""

    async def step(self, messages: list[Json]) -> str | None:
        """Sends the answer as an action; returns None when the episode is over."""
        action = {self._runner.answer_field: messages[-1]["content"]}
        try:
            text = _text(await self._act(action))
        except ToolFailed as error:  # the model may do better next time
            return f"error: {error}"
        return None if self.done else text or "(nothing)"

    async def get_reward(self) -> float | None:
        """Returns the reward of the episode; None when no step gave one."""
        await self._catch_up()
        return self._runner.joined(self._rewards) if self._rewards else None

    async def close(self) -> None:
        """Ends the episode."""
        socket = self._socket
        self._socket = None  # first: `_ask` connects again after this
        if socket is not None:
            with contextlib.suppress(aiohttp.ClientError, OSError):
                await socket.send_json({"type": "close"})
                await socket.close()

    async def list_tools(self) -> dict[str, Any]:
        """Returns the MCP tools in OpenAI's format, by name; empty when the environment has
        none.
        """
        call = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
        answer = await self._ask({"type": "mcp", "data": call})
        listed = (answer.data.get("result") or {}).get("tools", [])
        return {
            tool["name"]: made_tool(
                tool["name"],
                tool.get("description"),
                tool.get("input_schema") or tool.get("inputSchema"),
            )
            for tool in listed
            if isinstance(tool, dict) and isinstance(tool.get("name"), str)
        }

    def tool(self, name: str) -> Callable[..., Any]:
        """Returns the function that calls a tool."""

        async def call(**arguments: Any) -> str:
            action = arguments
            if self._runner.has_mcp_tools:
                action = {"type": "call_tool", "tool_name": name, "arguments": arguments}
            return _text(await self._act(action)) or "(nothing)"

        return call

    async def _act(self, action: Json) -> Json:
        """Takes a step and returns its observation; an empty one if an earlier step, whose answer
        came late, ended the episode.

        Raises ToolFailed; the server may still be at it.
        """
        try:
            async with asyncio.timeout(self._tool_timeout_s):
                await self._catch_up()
                return {} if self.done else await self._observation("step", action)
        except TimeoutError:
            raise timed_out(self._tool_timeout_s) from None

    async def _catch_up(self) -> None:
        """Waits for the answer to a step that took too long: its reward and its end count."""
        if self._is_behind:
            with contextlib.suppress(Refused, ToolFailed):  # the model was told an error already
                self._observed("step", await self._exchange(None))

    async def _observation(self, kind: str, data: Json) -> Json:
        """Sends a message and returns the observation in the response."""
        return self._observed(kind, await self._ask({"type": kind, "data": data}))

    def _observed(self, kind: str, answer: _Message) -> Json:
        """Returns the observation in an answer, and notes its reward and whether it is the last."""
        try:
            seen = msgspec.convert(answer.data, _Observed)
        except msgspec.ValidationError as error:
            raise EpisodeFailed(
                f"the OpenEnv server answered a {kind} with {shorten(answer)}: {error}"
            ) from None
        self.done = bool(seen.done)
        if seen.reward is not None and kind == "step":
            self._rewards.append(seen.reward)
        return seen.observation

    async def _ask(self, message: Json) -> _Message:
        """Sends a message and returns the response; waits while the server has no room for another
        session.

        Raises EnvironmentLost, EpisodeFailed, or Refused or ToolFailed when the environment rejects
        the message.
        """
        while True:
            try:
                return await self._exchange(message)
            except _Full:
                await self.close()
                await asyncio.sleep(_RETRY_S)

    async def _exchange(self, message: Json | None) -> _Message:
        """Sends a message, if there is one, and returns the next answer."""
        with _reaching("of this episode"):
            self._socket = self._socket or await self._runner.client().ws_connect(
                f"{self._url}/ws", max_msg_size=_MAX_MESSAGE_BYTES, heartbeat=30
            )
            self._is_behind = True  # until the answer comes, in case this is cancelled
            if message is not None:
                await self._socket.send_json(message)
            answer = await self._socket.receive()
        self._is_behind = False
        if answer.type is not aiohttp.WSMsgType.TEXT:
            raise EnvironmentLost(f"the OpenEnv server ended the connection ({answer.type.name})")

        try:
            content = msgspec.json.decode(answer.data, type=_Message)
        except msgspec.DecodeError as error:
            raise EpisodeFailed(
                f"the OpenEnv server answered {shorten(answer.data)}: {error}"
            ) from None
        if content.type == "error":
            raise _refusal(content.data)
        return content


@contextlib.contextmanager
def _reaching(server: str) -> Iterator[None]:
    """Raises EnvironmentLost when the connection to the server fails."""
    try:
        yield
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise EnvironmentLost(f"the OpenEnv server {server} does not answer: {error}") from error


class _Full(Exception):
    """The server has no room for another session."""


class Refused(Exception):
    """The environment refused a message."""


def _refusal(data: Json) -> Exception:
    """Returns the error for what the server sent instead of an answer."""
    code = data.get("code")
    message = str(data.get("message"))
    if code == "CAPACITY_REACHED":
        return _Full(message)
    if code in ("FACTORY_ERROR", "SESSION_ERROR"):
        return EnvironmentLost(f"the OpenEnv server has no session: {message}")
    if "errors" in data:
        message += f" {json.dumps(data['errors'], default=str)}"
    # The schema refused the action, before the environment saw it: the model may do better.
    is_invalid = "errors" in data or code == "VALIDATION_ERROR"
    return ToolFailed(message) if is_invalid else Refused(message)


def _action(schema: Any) -> tuple[str, dict[str, Any]]:
    """Returns the action's only field if it holds any text, or otherwise the tool `step` with the
    action's fields.
    """
    if not isinstance(schema, dict):
        raise EpisodeFailed(f"the OpenEnv server describes its action with {shorten(schema)}")
    fields = dict(schema.get("properties", {}))
    fields.pop("metadata", None)
    if len(fields) == 1:
        ((name, field),) = fields.items()
        is_free_text = field.get("type") == "string" and not _RESTRICTED & set(field)
        if is_free_text:
            return name, {}

    parameters = schema | {"properties": fields}
    return "", {"step": made_tool("step", "Acts in the environment.", parameters)}


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
