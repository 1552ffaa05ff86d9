"""OpenEnv servers, written as in OpenEnv's documentation: `uvicorn
tests.support.environments.openenv_servers:echo`."""

# mypy: ignore-errors

import os
import time
import zlib
from typing import Any
from uuid import uuid4

from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class EchoAction(Action):
    message: str


class MoveAction(Action):
    right: int
    fast: bool = False


class Heard(Observation):
    heard: str = ""


class Echo(Environment):
    """Ends after two messages, each with a reward."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, ground_truth: str = ""
    ) -> Heard:
        self.wanted = ground_truth
        self._state = State(episode_id=episode_id or str(uuid4()))
        return Heard(heard="Say a number.")

    def step(self, action: Any) -> Heard:
        self._state.step_count += 1
        said = getattr(action, "message", None) or str(getattr(action, "right", ""))
        if said == "crash":
            os._exit(3)
        if said == "fail":
            raise RuntimeError("out of order")
        if said == "slow":
            time.sleep(3)
        if said == "hang":
            time.sleep(1000)
        if said == "huge":
            said = "x" * 10_000_000
        reward = zlib.crc32(said.encode()) % 8 / 8 + (said == self.wanted)
        return Heard(heard=f"You said {said}.", reward=reward, done=self._state.step_count == 2)

    @property
    def state(self) -> State:
        return self._state


class Tools(MCPEnvironment):
    """Has MCP tools, and a reward for the sum."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("tools")

        @server.tool
        def add(a: int, b: int) -> int:
            """Adds two numbers."""
            self.found = a + b
            return self.found

        super().__init__(server)
        self._state, self.found = State(), 0

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, ground_truth: str = "0"
    ) -> Observation:
        self.wanted = int(ground_truth)
        return Observation()

    async def step_async(
        self, action: Any, timeout_s: float | None = None, **rest: Any
    ) -> Observation:
        observation = await super().step_async(action, timeout_s, **rest)
        if isinstance(action, CallToolAction):
            observation.reward = float(self.found == self.wanted)
        return observation

    def _step_impl(
        self, action: Action, timeout_s: float | None = None, **rest: Any
    ) -> Observation:
        return Observation()

    @property
    def state(self) -> State:
        return self._state


echo = create_fastapi_app(Echo, EchoAction, Heard, max_concurrent_envs=2)
moves = create_fastapi_app(Echo, MoveAction, Heard, max_concurrent_envs=2)
tools = create_fastapi_app(Tools, CallToolAction, CallToolObservation, max_concurrent_envs=4)
