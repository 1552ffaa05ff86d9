"""HTTP API of a rollout node: its health, status and metrics."""

from fastapi import FastAPI

from common.process.metrics import Metrics
from services.http.app import create_app
from services.rollout.agent import Agent, AgentStatus


def create_agent_app(agent: Agent, metrics: Metrics) -> FastAPI:
    """Returns the app of a node's agent; the node runs while the app runs.

    `/health` is 200 when the engine is up, serves the newest known weights, and is listed by the
    router.
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
        """Returns what the node serves, and its processes."""
        return agent.status()

    return app
