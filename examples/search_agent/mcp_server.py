"""`uvicorn examples.search_agent.mcp_server:app`: the tool of `search` as an MCP tool, in an
OpenEnv server. Runs in an environment of its own, with the package `openenv`.
"""

# mypy: ignore-errors

from typing import Any

from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State

from examples.search_agent.search import library

SESSIONS = 256
server = FastMCP("library")


@server.tool
def search(query: str) -> str:
    """Searches the library."""
    return library().search(query)


class LibraryEnvironment(MCPEnvironment):
    """Offers the MCP server's tools; the run's reward functions grade the answers."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__(server)
        self._state = State()

    def reset(self, **_: Any) -> Observation:
        return Observation()

    def _step_impl(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        return Observation()

    @property
    def state(self) -> State:
        return self._state


app = create_fastapi_app(
    LibraryEnvironment, CallToolAction, CallToolObservation, max_concurrent_envs=SESSIONS
)
