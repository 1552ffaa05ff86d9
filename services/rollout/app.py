"""HTTP API of a rollout node: its health, status and metrics."""

import logging
from typing import Annotated

from fastapi import FastAPI, Query

from common.errors import InvalidInput
from common.process.metrics import Metrics
from common.wire.schemas import EngineNodeReport, EngineOrder
from services.http.app import create_app
from services.rollout.member import MemberStatus, MemberSupervisor
from services.rollout.nodes import EngineNodes
from services.rollout.supervisor import NodeStatus, NodeSupervisor

_LONGEST_WAIT_S = 60.0


def create_node_app(node: NodeSupervisor, metrics: Metrics) -> FastAPI:
    """Returns the node's app; the node runs while the app runs.

    `/health` is 200 when the engine is up, serves the newest known weights, and is listed by the
    router.
    """
    # The other nodes of an engine report every few seconds.
    app = _create(node, metrics, logging.DEBUG if node.nodes.names else logging.INFO)

    @app.get("/status")
    async def status() -> NodeStatus:
        """Returns what the node serves, and its processes."""
        return node.status()

    if node.nodes.names:
        _add_nodes(app, node.nodes)
    return app


def create_member_app(node: MemberSupervisor, metrics: Metrics) -> FastAPI:
    """Returns the app of a further node of an engine; the node runs while the app runs.

    `/health` is 200 when this node's process of the engine is up.
    """
    app = _create(node, metrics)

    @app.get("/status")
    async def status() -> MemberStatus:
        """Returns the state of this node and of its process."""
        return node.status()

    return app


def _create(
    node: NodeSupervisor | MemberSupervisor, metrics: Metrics, access_level: int = logging.INFO
) -> FastAPI:
    return create_app(
        "rollout-server",
        not_ready=node.problem,
        lifespan=node.running,
        metrics=metrics,
        max_body_bytes=1 << 20,
        access_level=access_level,
    )


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

    @app.post("/engine/nodes/{name}")
    async def report(name: str, report: EngineNodeReport) -> dict[str, str]:
        """Records the state of a node. 404 for a node that is not of this engine."""
        if name != report.name:
            raise InvalidInput(
                "path and body name different nodes",
                field="name",
                value=report.name,
                remedy=f"send {name}",
            )
        nodes.report(report)
        return {"status": "noted"}
