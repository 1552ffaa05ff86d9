"""The router: the command that starts it and the registration of this node's engine."""

import math
import sys
from dataclasses import dataclass
from typing import Any

from common.clients import Client
from common.config import Config
from common.errors import ServiceError
from common.topology import ROLLOUT, Topology


def router_command(config: Config, topology: Topology) -> list[str]:
    """Starts `sglang_router` without workers: agents register their engines.

    Its circuit breaker is off: for a minute it would keep traffic from a worker that came back on the same URL.
    """
    host, port = topology.bind(ROLLOUT, config.rollout.router_port)
    metrics_host, metrics_port = topology.bind(ROLLOUT, config.rollout.router_metrics_port)
    options = {
        "host": host,
        "port": port,
        "prometheus-host": metrics_host,
        "prometheus-port": metrics_port,
        "policy": config.rollout.router_policy,
        "request-timeout-secs": math.ceil(config.sampling.request_timeout_s),
        "health-check-interval-secs": 2,
        "health-check-timeout-secs": 5,
        "health-failure-threshold": 3,
        "health-success-threshold": 1,
        "worker-startup-check-interval": 1,
        "retry-max-retries": 5,
        "retry-initial-backoff-ms": 50,
        "retry-max-backoff-ms": 2000,
        "shutdown-grace-period-secs": 5,
        "log-level": "warn",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "sglang_router.launch_router", *words, "--disable-circuit-breaker"]


@dataclass(frozen=True)
class Plan:
    """What to ask of the router."""

    add: bool = False
    remove: tuple[str, ...] = ()
    """Ids of workers."""
    done: bool = False
    """The router is as it should be."""


def plan(workers: list[dict[str, Any]], url: str, wanted: bool) -> Plan:
    """Compares the router's list with what it should say of the engine at `url`."""
    mine = [worker for worker in workers if str(worker["url"]).rstrip("/") == url.rstrip("/")]
    if not wanted:
        return Plan(remove=tuple(str(worker["id"]) for worker in mine), done=not mine)
    return Plan(add=not mine, done=any(worker["is_healthy"] for worker in mine))


class RouterClient(Client):
    """The router's list of workers."""

    async def reconcile(self, url: str, wanted: bool) -> bool:
        """Adds or removes the engine at `url`; True when the router is, healthy check included, as it should be.

        Registration takes the router a moment: call again until it is. Raises ServiceError when the router does not
        answer as expected.
        """
        try:
            workers = (await self.request("GET", "/workers", deadline_s=3)).json()["workers"]
            todo = plan(workers, url, wanted)
        except (ValueError, KeyError, TypeError) as error:
            raise ServiceError(f"{self.service}: unexpected answer to /workers: {error!r}") from None
        if todo.add:
            await self.request("POST", "/workers", json={"url": url}, deadline_s=3)
        for worker_id in todo.remove:
            await self.request("DELETE", f"/workers/{worker_id}", deadline_s=3)
        return todo.done
