"""The router: its command line and the registration of the node's engine."""

import importlib.util
import sys
from collections.abc import Callable

from pydantic import BaseModel

from common.clients.base import Client
from common.errors import ConfigError, ServiceError
from common.process.security import tls, token
from common.process.topology import ROLLOUT, Topology
from common.settings.config import Config
from services.rollout.api_key_launcher import run_module
from services.rollout.engine_client import to_options

# A request lasts as long as its answer and the queue before it. The agents end engines that hang,
# and clients give up on engines that do not get on (`common.clients.engines`).
_NO_TIMEOUT_S = 365 * 86_400
_MODULES = {"smg": "smg", "sglang-router": "sglang_router"}
_SMG_OPTIONS: dict[str, object] = {
    # By default smg skips an engine with 8 waiting requests, or with none finished for 3 s. A batch
    # of groups is hundreds of requests at once, each as long as its longest completion, and weight
    # updates pause all of them.
    "disable-worker-overload-protection": True,
    "worker-wedge-secs": 1_000_000,
    "disable-tokenizer-autoload": True,  # it would query the hub; requests contain token ids anyway
    "disable-load-monitoring": True,  # policies that need load data still get it
    "load-monitor-interval": 1,
}


def chosen_router(config: Config) -> tuple[str, str]:
    """Returns the router of a run, and why it is not the usual one (else empty)."""
    if config.rollout.router != "auto":
        return config.rollout.router, ""

    needs = [f"sampling.{name}" for name in config.sampling.truncation()]
    if config.trainer.routing_replay:
        needs.append("trainer.routing_replay")
    if needs:
        return "smg", f"{needs[0]} needs a field that sglang-router drops from requests"
    return "sglang-router", ""


def router_command(config: Config, topology: Topology) -> list[str]:
    """Returns the command line of a router without workers: nodes register their engines.

    The circuit breaker is off: sglang-router's would withhold traffic for a minute from a worker
    that is back on its URL. Raises ConfigError when the router is not installed.
    """
    name, _ = chosen_router(config)
    if importlib.util.find_spec(_MODULES[name]) is None:
        raise ConfigError(
            f"{name} is not installed",
            field="rollout.router",
            value=name,
            remedy="install it with .venv/bin/pip install -c constraints.txt -e '.[rollout]', "
            "or set another rollout.router",
        )

    host, port = topology.bind(ROLLOUT, config.rollout.router_port)
    metrics_host, metrics_port = topology.bind(ROLLOUT, config.rollout.router_metrics_port)
    files = tls()
    options: dict[str, object] = {
        "host": host,
        "port": port,
        "prometheus-host": metrics_host,
        "prometheus-port": metrics_port,
        "policy": config.rollout.router_policy,
        "request-timeout-secs": _NO_TIMEOUT_S,
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
        "disable-circuit-breaker": True,
        "tls-cert-path": files.certificate or None,
        "tls-key-path": files.key or None,
    }
    if name == "smg":
        options |= _SMG_OPTIONS
    return [*run_module(sys.executable, f"{_MODULES[name]}.launch_router"), *to_options(options)]


def router_env() -> dict[str, str]:
    """Returns the variables to add to the router's environment.

    SSL_CERT_FILE applies to its health checks too, unlike its option --ca-cert-paths.
    """
    authority = tls().authority
    return {"SSL_CERT_FILE": authority} if authority else {}


class _Worker(BaseModel):
    id: str
    url: str
    is_healthy: bool


class _Workers(BaseModel):
    workers: list[_Worker]


class RouterClient(Client):
    """Client for the router's list of workers."""

    start_s = 60.0

    async def reconcile(
        self, url: str, is_wanted: Callable[[], bool], *, deadline_s: float = 3.0
    ) -> bool:
        """Adds or removes the engine at `url`. Returns True once it is listed as healthy, or
        removed.

        The router needs a moment, so call it again until then. Raises ServiceError for an
        unexpected response.
        """
        listed = await self.json("GET", "/workers", _Workers, deadline_s=deadline_s)
        # Whether the engine is healthy, by the ids that it is listed under.
        own = {
            worker.id: worker.is_healthy
            for worker in listed.workers
            if worker.url.rstrip("/") == url.rstrip("/")
        }

        # Asked only now: this process may have been stopped since it asked for the list.
        if not is_wanted():
            for worker_id in own:
                # 404: already removed by an attempt whose response was lost
                await self._send("DELETE", f"/workers/{worker_id}", accepted=404)
            return not own

        if not own:
            body = {"url": url}
            key = token()
            if key:
                body["api_key"] = key  # for the router's health checks
            # 409: smg's response to a repeated call until the worker has answered
            await self._send("POST", "/workers", accepted=409, json=body)
        return any(own.values())

    async def _send(
        self, method: str, path: str, accepted: int, json: dict[str, str] | None = None
    ) -> None:
        try:
            await self.request(method, path, json=json, deadline_s=3)
        except ServiceError as error:
            if error.status != accepted:
                raise
