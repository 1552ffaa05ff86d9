"""HTTP API of a rollout node: its health, status and metrics."""

import logging
from typing import Annotated

from fastapi import FastAPI, Query

from common.process.metrics import Metrics
from common.wire.schemas import EngineNodeReport, EngineOrder
from services.http.app import create_app
from services.rollout.engine_nodes import EngineNodes
from services.rollout.first_node import FirstNodeAgent, FirstNodeStatus
from services.rollout.further_node import FurtherNodeAgent, FurtherNodeStatus

_LONGEST_WAIT_S = 60.0


def create_agent_app(agent: FirstNodeAgent | FurtherNodeAgent, metrics: Metrics) -> FastAPI:
    """Returns the app of a node's agent; the node runs while the app runs.

    `/health` is 200 when the engine is up, serves the newest known weights, and is listed by the
    router; on a further node of an engine, when this node's process of it is up.
    """
    nodes = agent.nodes if isinstance(agent, FirstNodeAgent) else None
    is_asked_often = nodes is not None and bool(nodes.names)
    app = create_app(
        "rollout-server",
        not_ready=agent.problem,
        lifespan=agent.running,
        metrics=metrics,
        max_body_bytes=1 << 20,
        # The other nodes of an engine report every few seconds.
        access_level=logging.DEBUG if is_asked_often else logging.INFO,
    )

    @app.get("/status")
    async def status() -> FirstNodeStatus | FurtherNodeStatus:
        """Returns what the node serves, and its processes."""
        return agent.status()

    if nodes is not None and nodes.names:
        _add_nodes(app, nodes)
    return app


def _add_nodes(app: FastAPI, nodes: EngineNodes) -> None:
    """Adds the calls of the other nodes of an engine that is larger than one."""

    @app.get("/engine")
    async def order(
        after: str = "", wait_s: Annotated[float, Query(ge=0, le=_LONGEST_WAIT_S)] = 0.0
    ) -> EngineOrder:
        """Returns what the other nodes must do, as soon as it is another order than `after`, or
        after `wait_s` seconds.
        """
        return await nodes.order_after(after, wait_s)

    @app.post("/engine/nodes")
    async def report(report: EngineNodeReport) -> dict[str, str]:
        """Records the state of a node. 404 for a node that is not of this engine."""
        nodes.report(report)
        return {"status": "noted"}
