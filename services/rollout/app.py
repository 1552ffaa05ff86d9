"""HTTP of the agent: health, status and metrics of one rollout node."""

from fastapi import FastAPI

from common.observe import Metrics
from services.http.app import create_app
from services.rollout.agent import Agent, AgentStatus


def create_agent_app(agent: Agent, metrics: Metrics) -> FastAPI:
    """The app of this node's agent; the node lives as long as the app does.

    `/health` says 200 when the engine is up, on the newest weights this node knows, and in the router.
    """
    app = create_app(
        "rollout-server",
        not_ready=agent.problem,
        lifespan=agent.running,
        metrics=metrics,
        max_body_bytes=1 << 20,
    )

    @app.get("/status")
    async def status() -> AgentStatus:
        """What this node serves, and its processes."""
        return agent.status()

    return app
