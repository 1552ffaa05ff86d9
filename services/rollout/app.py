"""HTTP API of a rollout node: its health, status and metrics."""

from fastapi import FastAPI

from common.process.metrics import Metrics
from services.http.app import create_app
from services.rollout.supervisor import NodeStatus, NodeSupervisor


def create_node_app(node: NodeSupervisor, metrics: Metrics) -> FastAPI:
    """Returns the node's app; the node runs while the app runs.

    `/health` is 200 when the engine is up, serves the newest known weights, and is listed by the
    router.
    """
    app = create_app(
        "rollout-server",
        not_ready=node.problem,
        lifespan=node.running,
        metrics=metrics,
        max_body_bytes=1 << 20,
    )

    @app.get("/status")
    async def status() -> NodeStatus:
        """Returns what the node serves, and its processes."""
        return node.status()

    return app
