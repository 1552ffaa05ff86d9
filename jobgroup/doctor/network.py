"""Ports, proxies and clocks; and the services of a running job group: names, health, weight
versions.
"""

import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from email.utils import parsedate_to_datetime
from functools import partial
from operator import attrgetter
from typing import Any

import httpx
import psutil

from common.process.security import authorization, trusted
from common.process.topology import ENVIRONMENT, ROLLOUT, TORCHRUN_PORT, TRAINER, Topology
from jobgroup.doctor.plan import Plan, PlannedTask
from jobgroup.doctor.report import Check, Result, State, expect
from jobgroup.scrape import SECTIONS

_TIMEOUT_S = 5.0
_CLOCK_WARN_S = 2.0
_CLOCK_FAIL_S = 60.0
_OLD = 1
"""How many weight versions a node may be behind while it loads the newest."""
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
    free: dict[int, None] = {}
    for job in plan.here:
        for setting, port in _ports(job).items():
            problem = _check_port(f"port {port} of {job.name}", setting, port)
            if problem is not None:
                yield problem
            else:
                free[port] = None
    reason = _taken("", TORCHRUN_PORT) if plan.job(TRAINER) else ""
    if reason:
        fix = "end it; not needed for jobgroup.local, where every run has its own port"
        yield Result(f"port {TORCHRUN_PORT} of torchrun", "fail", reason, fix)
    if free:
        yield Result("ports", "ok", f"free: {', '.join(map(str, free))}")


def _check_port(title: str, setting: str, port: int) -> Result | None:
    """Returns None for a port that is free."""
    reason = _taken(_NODE, port)
    if reason:
        variable = f"RLHF_{setting.replace('.', '__').upper()}"
        fix = f"end it, or use another port: --env {variable}={port + 1000}"
        return Result(title, "fail", reason, fix)
    reason = _taken("127.0.0.1", port)
    if reason:
        fix = (
            "not needed for jobgroup.local (its nodes have other addresses); "
            "for this service alone, end it"
        )
        return Result(title, "warn", f"on 127.0.0.1 {reason}", fix)
    return None


def _taken(address: str, port: int) -> str:
    """Returns why nothing can listen there, and which processes do (if visible to this user); empty
    if it is free.
    """
    try:
        # With SO_REUSEADDR: connections that just ended do not count.
        socket.create_server((address, port)).close()
    except OSError as error:
        users = _listeners(port)
        by = f" by process {', '.join(users)}" if users else f": {error.strerror}"
        return f"already in use{by}"
    return ""


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
    caught = [name for name in names if plan.env.get(name)]
    if not caught:
        secure = " (HTTPS_PROXY is set, which is fine)" if plan.env.get("HTTPS_PROXY") else ""
        yield Result("proxies", "ok", f"no proxy for http{secure}")
        return
    own = "127.0.0.0/8"
    if plan.topology is not None and not plan.topology.local_hosts:
        own = plan.group
    no_proxy = plan.env.get("NO_PROXY") or plan.env.get("no_proxy") or ""
    spared = [host.strip() for host in no_proxy.split(",")]
    good = "*" in spared or own in [host.lstrip(".*") for host in spared]
    found = f"{', '.join(caught)} set, NO_PROXY {'has' if good else 'lacks'} {own}"
    fix = (
        f"unset {' '.join(caught)} (HTTPS_PROXY is enough for hub and package index), "
        f"or add {own} to NO_PROXY"
    )
    yield expect("proxies", good, found, fix, otherwise="warn")


def compare_clocks(name: str, response: httpx.Response, sent: float) -> Result:
    """Compares another machine's clock with ours, which read `sent` when the request left."""
    trip_s = response.elapsed.total_seconds()
    try:
        remote = parsedate_to_datetime(response.headers["date"]).timestamp()
    except (KeyError, ValueError):
        fix = "compare `date -u` there and here"
        return Result(name, "warn", "unknown: the answer has no Date", fix)
    # The header is cut to whole seconds and refreshed once a second: adds one second, also as
    # uncertainty.
    difference = remote + 1 - (sent + trip_s / 2)
    uncertainty = 1 + trip_s / 2
    certain = abs(difference) - uncertainty
    found = f"{difference:+.1f} ± {uncertainty:.1f} s against ours"
    fix = (
        "set the clocks by NTP: timedatectl set-ntp true, or chrony, on the node "
        "(a pod has the clock of its node)"
    )
    otherwise: State = "fail" if certain > _CLOCK_FAIL_S else "warn"
    return expect(name, certain <= _CLOCK_WARN_S, found, fix, otherwise)


def cluster_checks(plan: Plan) -> list[Check]:
    """Returns a check for every service and one for the weights of every rollout node; none outside
    a group.
    """
    topology = plan.topology
    if topology is None:
        return []
    services: list[Check] = []
    weights: list[Check] = []
    for job in plan.jobs:
        for node in range(job.num_nodes):
            for title, port in _listening(job, node).items():
                run = partial(_service, title, topology, job, node=node, port=port)
                services.append(Check(title, run))
            if job.name == ROLLOUT:
                run = partial(_weights, topology, job, node)
                weights.append(Check(f"weights of {job.name}-{node}", run))
    return services + weights


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
    own = list(_ports(job).values())
    return {name: own[0]} if is_called and own else {}


def _get(job: PlannedTask, url: str) -> tuple[httpx.Response, dict[str, Any]]:
    """Sends a request as our clients do (no proxy, the run's token and CA); returns the response
    and its JSON.
    """
    response = httpx.get(
        url,
        headers=authorization(job.env),
        verify=trusted(job.env),
        timeout=_TIMEOUT_S,
        trust_env=False,
    )
    content = None
    with suppress(ValueError):
        content = response.json()
    return response, content if isinstance(content, dict) else {}


def _service(
    title: str, topology: Topology, job: PlannedTask, *, node: int, port: int
) -> Iterator[Result]:
    host = topology.host(job.name, node)
    url = topology.url(job.name, port, node)
    sent = time.time()
    fix = f"is {job.name} up? sky jobs queue, then its log (sky jobs logs ID {job.name})"
    try:
        address = str(socket.getaddrinfo(host, port)[0][4][0])
        response, content = _get(job, f"{url}/health")
    except socket.gaierror as error:
        found = f"the name {host} does not resolve: {error.strerror}"
        fix += (
            f"; the group is {topology.group}: does the YAML have another name, or other num_nodes?"
        )
        yield Result(title, "fail", found, fix)
        return
    except httpx.HTTPError as error:
        found = f"{url} ({address}) does not answer: {str(error) or type(error).__name__}"
        yield Result(title, "fail", found, f"{fix}; a network policy?")
        return

    found = f"{1000 * response.elapsed.total_seconds():.0f} ms, {url}"
    if address not in url:
        found += f" ({address})"
    if response.is_success:
        yield Result(title, "ok", f"healthy, {found}")
    elif response.status_code == 401:
        fix = "the same API_TOKEN in every task, and here"
        yield Result(title, "fail", f"rejects this API_TOKEN, {found}", fix)
    else:
        fix = f"wait, or {fix}"
        if title.startswith("router"):
            fix = "wait for the engines, which register when they have the newest weights"
        reason = content.get("reason", "no reason given")
        yield Result(title, "fail", f"says {response.status_code}: {reason}, {found}", fix)
    yield compare_clocks(f"clock of {title}", response, sent)


def _weights(topology: Topology, job: PlannedTask, node: int) -> Iterator[Result]:
    title = f"weights of {job.name}-{node}"
    agent = topology.url(job.name, job.config.rollout.agent_port, node)
    try:
        _, status = _get(job, f"{agent}/status")
        report = status["report"]
        state = report["state"]
        version = report["version"]
        detail = report["detail"]
        newest = status["wanted"]
        starts = status["engine_starts"]
        registered = status["registered"]
    except (httpx.HTTPError, KeyError, TypeError):
        found = "unknown: its agent does not answer"
        yield Result(title, "fail", found, "see the line of that agent")
        return

    found = f"{state}, version {'base' if version is None else version}"
    found += f", newest {'none yet' if newest is None else newest}"
    if starts > 1:
        found += f", engine started {starts} times"
    if not registered:
        found += ", not in the router"
    if detail:
        found += f": {detail}"

    is_behind = newest is not None and newest - (version or 0) > _OLD
    if state in ("failed", "stale"):
        fix = f"the log of {job.name} and STATE_DIR/logs/{job.name}-{node}.engine.log say why"
        yield Result(title, "fail", found, fix)
    else:
        good = state == "ready" and registered and not is_behind
        fix = "look again in a minute; then at its log"
        yield expect(title, good, found, fix, otherwise="warn")
