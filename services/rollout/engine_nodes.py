"""The nodes of an engine that is larger than one of them, as its first node sees them.

Such an engine has a process on every node. They start, load weights and end together: the agent of
the first node decides, and the agents of the others (`further_node`) ask for its orders and report.

    first node ── order: which start, which weights ──►  other nodes
               ◄── report: prepared, running, ended ──

A start has two steps, because a process waits for its peers without saying so: when all nodes have
the files and no earlier process, all are told to go.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from common.errors import NotFound, ServiceError
from common.process.progress import Progress
from common.wire.schemas import (
    EngineNodeReport,
    EngineOrder,
    EngineStart,
    EngineWeights,
    WeightManifest,
)
from services.rollout.loops import wait_event

log = logging.getLogger(__name__)
_TELL_S = 1.0


class NodeCannotStart(ServiceError):
    """A node of the engine lacks what a start needs."""

    code = "node_cannot_start"


class EngineNodes:
    """What the first node of an engine wants of the others, and their reports.

    `names` are the other nodes. A node that has not reported for `silent_s` seconds is lost;
    `stuck_after_s` limits how long a node may take weights without progress.
    """

    def __init__(self, names: Sequence[str], *, silent_s: float, stuck_after_s: float) -> None:
        self.names = list(names)
        self._silent_s = silent_s
        self._stuck_after_s = stuck_after_s
        self._process_id = secrets.token_hex(4)
        self._changes = 0
        self._order = EngineOrder(revision=self._revision())
        self._reports: dict[str, tuple[EngineNodeReport, float]] = {}
        self._went_at = 0.0
        self._news = asyncio.Event()

    def _revision(self) -> str:
        return f"{self._process_id}-{self._changes}"

    def _give(self, **changes: EngineStart | EngineWeights | None) -> None:
        """Gives the next order."""
        self._changes += 1
        self._order = self._order.model_copy(update={"revision": self._revision(), **changes})
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def news(self, timeout_s: float) -> None:
        """Waits for the next order or report, at most `timeout_s` seconds."""
        await wait_event(self._news, timeout_s)

    async def order_after(self, revision: str, wait_s: float) -> EngineOrder:
        """Returns the order as soon as it is not `revision` any more, or after `wait_s` seconds."""
        ends = time.monotonic() + wait_s
        while self._order.revision == revision and time.monotonic() < ends:
            await self.news(ends - time.monotonic())
        return self._order

    def report(self, report: EngineNodeReport) -> None:
        """Records what a node says. Raises NotFound for a node that is not of this engine."""
        if report.name not in self.names:
            raise NotFound(
                f"it is no node of this engine, whose other nodes are {', '.join(self.names)}",
                field="name",
                value=report.name,
                remedy="give all nodes the same rollout.nodes_per_engine",
            )
        before, _ = self._reports.get(report.name, (None, 0.0))
        if report.ended and (before is None or before.ended != report.ended):
            log.warning("%s: %s", report.name, report.ended)
        self._reports[report.name] = (report, time.monotonic())
        self._wake()

    def _said(self, name: str) -> EngineNodeReport | None:
        """Returns the last report of a node; None when it is silent."""
        report, at = self._reports.get(name, (None, 0.0))
        return None if time.monotonic() - at > self._silent_s else report

    def _missing(self, is_ready: Callable[[EngineNodeReport], bool]) -> list[str]:
        """Returns the nodes that are silent or not ready, with what each says."""
        missing: list[str] = []
        for name in self.names:
            report = self._said(name)
            if report is None:
                missing.append(f"{name} (does not report)")
            elif not is_ready(report):
                missing.append(f"{name} ({report.detail})" if report.detail else name)
        return missing

    async def start(self, start: EngineStart, say: Callable[[str], None]) -> None:
        """Returns when all nodes were told to start their process of the engine.

        Waits until all are prepared, and says for which it waits. Raises NodeCannotStart when one
        cannot get the weights.
        """
        self._give(start=start)
        told: list[str] = []
        while missing := self._missing(lambda report: report.prepared == start.id):
            for name in self.names:
                report = self._said(name)
                if report is not None and report.cannot_start == start.id:
                    raise NodeCannotStart(
                        f"{name} cannot start: {report.detail}", field="node", value=name
                    )
            if missing != told:
                told = missing
                say(f"waits for {', '.join(missing)}")
            await self.news(_TELL_S)

        self._went_at = time.monotonic()
        self._give(start=start.model_copy(update={"go": True}))

    def stop(self) -> None:
        """Tells the nodes to end their process of the engine."""
        self._give(start=None)

    def want(self, manifest: WeightManifest) -> None:
        """Tells the nodes to fetch a version, which this node is fetching as well."""
        self._give(weights=weights_for_nodes(manifest))

    async def hold(self, manifest: WeightManifest, path: Path) -> None:
        """Returns when every node can read this version at `path`.

        Raises Stuck, which names the nodes that lack it, when they make no progress.
        """
        weights = weights_for_nodes(manifest, path)
        self._give(weights=weights)
        waits = Progress(
            f"the other nodes of the engine to fetch weights {manifest.version}",
            self._stuck_after_s,
            field="rollout.stuck_after_s",
            remedy="look at the logs of these nodes",
        )
        while missing := self._missing(lambda report: report.holds == weights.key):
            reports = [self._said(name) for name in self.names]
            waits.saw(sum(each.progress for each in reports if each), ", ".join(missing))
            waits.check()
            await self.news(waits.pause_s)

    def problem(self) -> str | None:
        """Returns why the engine that was told to go must be started again; None when its processes
        run on all nodes.
        """
        start = self._order.start
        if start is None or not start.go:
            return None
        for name in self.names:
            report, at = self._reports.get(name, (None, 0.0))
            # A report from before the start says nothing about the process that was started then.
            silent_s = time.monotonic() - max(at, self._went_at)
            if silent_s > self._silent_s:
                return f"{name} has not reported for {silent_s:.0f} s"
            if report is not None and report.start == start.id and report.ended:
                return f"{name}: {report.ended}"
        return None


def weights_for_nodes(manifest: WeightManifest, path: Path | None = None) -> EngineWeights:
    """Returns an order for weights. A broadcast reaches all nodes through the engine itself."""
    return EngineWeights(
        manifest=manifest.model_copy(update={"broadcast": None}),
        path="" if path is None else str(path),
    )
