"""Ports and proxies; and the services of a running job group."""

import socket
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from operator import attrgetter

import httpx
import psutil

from common.process.security import authorization, trusted
from common.process.topology import ENVIRONMENT, ROLLOUT, Topology
from common.settings.sources import variable
from jobgroup.doctor.plan import Plan, PlannedTask
from jobgroup.doctor.report import Check, Result, expect
from jobgroup.scrape import SECTIONS

_TIMEOUT_S = 5.0
_ROLLOUT_PORTS: tuple[str, ...] = (
    "rollout.router_port",
    "rollout.engine_port",
    "rollout.agent_port",
    "rollout.router_metrics_port",
)
_NODE = "127.254.251.1" if psutil.LINUX else "127.0.0.1"
"""Like a node of a local run (`jobgroup/local/placement.py`): on Linux no other server listens on
this address only."""


def _ports(job: PlannedTask) -> dict[str, int]:
    """Returns the ports on which a node of the task listens, by setting."""
    if job.name == ROLLOUT:
        settings = _ROLLOUT_PORTS
    elif job.name in SECTIONS:
        settings = (f"{SECTIONS[job.name]}.port",)
    else:
        return {}
    return {setting: attrgetter(setting)(job.config) for setting in settings}


def check_ports(plan: Plan) -> Iterator[Result]:
    """Tries to listen as the tasks will; in a running group they already do."""
    if plan.topology:
        return
    free = []
    for job in plan.here:
        for setting, port in _ports(job).items():
            try:
                # With SO_REUSEADDR: connections that just ended do not count.
                socket.create_server((_NODE, port)).close()
            except OSError as error:
                users = _listeners(port)
                by = f" by process {', '.join(users)}" if users else f": {error.strerror}"
                fix = f"end it, or use another port: --env {variable(setting)}={port + 1000}"
                yield Result(f"port {port} of {job.name}", "fail", f"already in use{by}", fix)
            else:
                free.append(str(port))
    if free:
        yield Result("ports", "ok", f"free: {', '.join(free)}")


def _listeners(port: int) -> set[str]:
    users = set()
    with suppress(psutil.Error):  # macOS shows connections only to root
        for each in psutil.net_connections("tcp"):
            listens = each.status == psutil.CONN_LISTEN
            if listens and each.pid and getattr(each.laddr, "port", 0) == port:
                users.add(f"{each.pid} ({psutil.Process(each.pid).name()})")
    return users


def check_proxies(plan: Plan) -> Iterator[Result]:
    """Checks proxies: our clients ignore them, but the router and SGLang use them even for the
    group's names.
    """
    names = ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
    caught = " ".join(name for name in names if plan.env.get(name))
    own = plan.group if plan.in_pod else "127.0.0.0/8"
    spared = plan.env.get("NO_PROXY") or plan.env.get("no_proxy") or ""
    good = not caught or own in spared or "*" in spared
    fix = f"unset {caught} (HTTPS_PROXY is enough for the hub), or add {own} to NO_PROXY"
    found = f"set for http: {caught}" if caught else "no proxy for http"
    yield expect("proxies", good, found, fix, otherwise="warn")


def cluster_checks(plan: Plan) -> Iterator[Check]:
    """Yields a check for every service of the group around this process; none outside a group."""
    if plan.topology is None:
        return
    for job in plan.jobs:
        for node in range(job.num_nodes):
            for title, port in _listening(job, node).items():
                url = plan.topology.url(job.name, port, node)
                yield Check(title, partial(_service, title, job, url, plan.topology))


def _listening(job: PlannedTask, node: int) -> dict[str, int]:
    """Returns the ports of a node that answer to /health, by title."""
    name = f"{job.name}-{node}"
    rollout = job.config.rollout
    if job.name == ROLLOUT:
        ports = {f"agent of {name}": rollout.agent_port}
        if node == 0:
            ports[f"router on {name}"] = rollout.router_port
        return ports
    # Of the other services, only the first node is called.
    is_called = node == 0 or job.name == ENVIRONMENT
    if job.name not in SECTIONS or not is_called:
        return {}
    return {name: getattr(job.config, SECTIONS[job.name]).port}


def _service(title: str, job: PlannedTask, url: str, topology: Topology) -> Iterator[Result]:
    """Asks for the health as our clients do: no proxy, the run's token and CA."""
    fix = f"is {job.name} up? sky jobs queue, then its log (sky jobs logs ID {job.name})"
    try:
        response = httpx.get(
            f"{url}/health",
            headers=authorization(job.env),
            verify=trusted(job.env),
            timeout=_TIMEOUT_S,
            trust_env=False,
        )
    except httpx.HTTPError as error:
        found = f"{url} does not answer: {str(error) or type(error).__name__}"
        fix += f"; has the YAML another name than {topology.group}, or other num_nodes?"
        yield Result(title, "fail", found, fix)
        return

    took = f"{1000 * response.elapsed.total_seconds():.0f} ms, {url}"
    if response.is_success:
        yield Result(title, "ok", f"healthy, {took}")
    elif response.status_code == 401:
        fix = "the same API_TOKEN in every task, and here"
        yield Result(title, "fail", f"rejects this API_TOKEN, {took}", fix)
    else:
        reason = response.text
        with suppress(ValueError, KeyError, TypeError):
            reason = response.json()["reason"]
        found = f"says {response.status_code}: {reason}, {took}"
        yield Result(title, "fail", found, f"wait, or {fix}")
