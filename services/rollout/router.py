"""The router: the command that starts it and the registration of this node's engine."""

import importlib.util
import math
import sys

from common.clients import Client
from common.config import Config
from common.errors import ConfigError, ServiceError
from common.security import tls, token
from common.topology import ROLLOUT, Topology
from services.rollout.keyed import run_module

_MODULES = {"sglang-router": "sglang_router", "smg": "smg"}
_SMG_WORDS = [
    # By default smg leaves out an engine with 8 waiting requests, and one that has finished nothing for 3 s: a batch of groups
    # is hundreds of requests at once, each as long as its longest completion, and they all stand still in an update.
    "--disable-worker-overload-protection",
    "--worker-wedge-secs=1000000",
    "--disable-tokenizer-autoload",  # it would look on the hub: tokens go in and out
    "--disable-load-monitoring",  # policies that need loads get them all the same
    "--load-monitor-interval=1",
]


def router_command(config: Config, topology: Topology) -> list[str]:
    """Starts the router without workers: agents register their engines.

    Its circuit breaker is off: for a minute sglang-router's would keep traffic from a worker that came back on the same URL.
    Raises ConfigError when the router is not installed.
    """
    name = config.rollout.router
    if importlib.util.find_spec(_MODULES[name]) is None:
        extra = "rollout" if name == "sglang-router" else "rollout,smg"
        remedy = f"install it with .venv/bin/pip install -c constraints.txt -e '.[{extra}]', or set another rollout.router"
        raise ConfigError(f"{name} is not installed", field="rollout.router", value=name, remedy=remedy)
    host, port = topology.bind(ROLLOUT, config.rollout.router_port)
    metrics_host, metrics_port = topology.bind(ROLLOUT, config.rollout.router_metrics_port)
    options: dict[str, object] = {
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
    if (files := tls()).certificate:
        options |= {"tls-cert-path": files.certificate, "tls-key-path": files.key}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    own = _SMG_WORDS if name == "smg" else []
    module = run_module(sys.executable, f"{_MODULES[name]}.launch_router")
    return [*module, *words, "--disable-circuit-breaker", *own]


def router_env() -> dict[str, str]:
    """What is added to the environment of the router.

    Its --ca-cert-paths counts for requests and not for its health checks, which would fail; this counts for all.
    """
    return {"SSL_CERT_FILE": authority} if (authority := tls().authority) else {}


class RouterClient(Client):
    """The router's list of workers."""

    async def reconcile(self, url: str, wanted: bool) -> bool:
        """Adds or removes the engine at `url`; True when the router is, healthy check included, as it should be.

        Registration takes the router a moment: call again until it is. Raises ServiceError when the router does not
        answer as expected.
        """
        try:
            workers = (await self.request("GET", "/workers", deadline_s=3)).json()["workers"]
            own = [worker for worker in workers if str(worker["url"]).rstrip("/") == url.rstrip("/")]
            mine = {str(worker["id"]): bool(worker["is_healthy"]) for worker in own}
        except (ValueError, KeyError, TypeError) as error:
            raise ServiceError(f"{self.service}: unexpected answer to /workers: {error!r}") from None
        if not wanted:
            for worker_id in mine:
                await self._remove(worker_id)
            return not mine
        if not mine:
            key = {"api_key": value} if (value := token()) else {}  # without it the router's health checks go without
            await self._add({"url": url} | key)
        return any(mine.values())

    async def _remove(self, worker_id: str) -> None:
        try:
            await self.request("DELETE", f"/workers/{worker_id}", deadline_s=3)
        except ServiceError as error:
            if error.status != 404:  # an attempt whose answer was lost has removed it
                raise

    async def _add(self, worker: dict[str, str]) -> None:
        try:
            await self.request("POST", "/workers", json=worker, deadline_s=3)
        except ServiceError as error:
            if error.status != 409:  # smg lists a worker when it has answered; until then it says this to a second call
                raise
