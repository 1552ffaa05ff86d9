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
from jobgroup.doctor.report import Check, Result, expect
from jobgroup.scrape import SECTIONS

_TIMEOUT_S = 5.0
_CLOCK_WARN_S, _CLOCK_FAIL_S = 2.0, 60.0
_OLD = 1
"""How many weight versions a node may be behind while it loads the newest."""
_ROLLOUT_PORTS = (
    "rollout.router_port",
    "rollout.engine_port",
    "rollout.agent_port",
    "rollout.router_metrics_port",
)
_NODE = "127.254.251.1" if psutil.LINUX else "127.0.0.1"
"""Like a node of a local run (`jobgroup/local/places.py`): on Linux no other server listens on this
address only."""


def _ports(job: PlannedTask) -> dict[str, int]:
    settings = (
        _ROLLOUT_PORTS
        if job.name == ROLLOUT
        else [f"{SECTIONS[job.name]}.port"]
        if job.name in SECTIONS
        else []
    )
    return {setting: attrgetter(setting)(job.config) for setting in settings}


def check_ports(plan: Plan) -> Iterator[Result]:
    """Tries to listen as the tasks will; in a running group they already do."""
    if plan.topology:
        return
    free = []
    for job, (setting, port) in [
        (task, each) for task in plan.here for each in _ports(task).items()
    ]:
        title, other = (
            f"port {port} of {job.name}",
            f"use another port: --env RLHF_{setting.replace('.', '__').upper()}=",
        )
        if problem := _taken(_NODE, port):
            yield Result(title, "fail", problem, f"end it, or {other}{port + 1000}")
        elif problem := _taken("127.0.0.1", port):
            fix = "not needed for jobgroup.local (its nodes have other addresses); for this service alone, end it"
            yield Result(title, "warn", f"on 127.0.0.1 {problem}", fix)
        else:
            free.append(str(port))
    trainer = any(task.name == TRAINER for task in plan.here)
    if trainer and (problem := _taken("", TORCHRUN_PORT)):
        fix = "end it; not needed for jobgroup.local, where every run has its own port"
        yield Result(f"port {TORCHRUN_PORT} of torchrun", "fail", problem, fix)
    if free:
        yield Result("ports", "ok", f"free: {', '.join(dict.fromkeys(free))}")


def _taken(address: str, port: int) -> str:
    """Returns why nothing can listen there, and which processes do (if visible to this user); empty
    if it is free.
    """
    try:
        socket.create_server(
            (address, port)
        ).close()  # with SO_REUSEADDR: connections that just ended do not count
    except OSError as error:
        users = set()
        with suppress(psutil.Error):  # macOS shows connections only to root
            for each in psutil.net_connections("tcp"):
                if (
                    each.status == psutil.CONN_LISTEN
                    and getattr(each.laddr, "port", 0) == port
                    and each.pid
                ):
                    users.add(f"{each.pid} ({psutil.Process(each.pid).name()})")
        return "already in use" + (
            f" by process {', '.join(users)}" if users else f": {error.strerror}"
        )
    return ""


def check_proxies(plan: Plan) -> Iterator[Result]:
    """Checks proxies: our clients ignore them, but the router and SGLang use them even for the
    group's names.
    """
    caught = [
        name
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
        if plan.env.get(name)
    ]
    if not caught:
        secure = " (HTTPS_PROXY is set, which is fine)" if plan.env.get("HTTPS_PROXY") else ""
        yield Result("proxies", "ok", f"no proxy for http{secure}")
        return
    spared = [
        each.strip()
        for each in (plan.env.get("NO_PROXY") or plan.env.get("no_proxy") or "").split(",")
    ]
    own = (
        plan.group if plan.topology is not None and not plan.topology.local_hosts else "127.0.0.0/8"
    )
    good = "*" in spared or own in [each.lstrip(".*") for each in spared]
    found = f"{', '.join(caught)} set, NO_PROXY {'has' if good else 'lacks'} {own}"
    fix = f"unset {' '.join(caught)} (HTTPS_PROXY is enough for hub and package index), or add {own} to NO_PROXY"
    yield expect("proxies", good, found, fix, "warn")


def compare_clocks(name: str, response: httpx.Response, sent: float) -> Result:
    """Compares another machine's clock with ours, which read `sent` when the request left."""
    trip = response.elapsed.total_seconds()
    try:
        theirs = parsedate_to_datetime(response.headers["date"]).timestamp()
    except (KeyError, ValueError):
        return Result(
            name, "warn", "unknown: the answer has no Date", "compare `date -u` there and here"
        )
    # The header is cut to whole seconds and refreshed once a second: adds one second, also as
    # uncertainty.
    difference, uncertainty = theirs + 1 - (sent + trip / 2), 1 + trip / 2
    certain = abs(difference) - uncertainty
    fix = "set the clocks by NTP: timedatectl set-ntp true, or chrony, on the node (a pod has the clock of its node)"
    found = f"{difference:+.1f} ± {uncertainty:.1f} s against ours"
    return expect(
        name, certain <= _CLOCK_WARN_S, found, fix, "fail" if certain > _CLOCK_FAIL_S else "warn"
    )


def cluster_checks(plan: Plan) -> list[Check]:
    """Returns a check for every service and one for the weights of every rollout node; none outside
    a group.
    """
    services, weights, topology = list[Check](), list[Check](), plan.topology
    if topology is None:
        return []
    for job, node in [(each, node) for each in plan.jobs for node in range(each.num_nodes)]:
        name, ports = f"{job.name}-{node}", list(_ports(job).values())
        called = (
            node == 0 or job.name == ENVIRONMENT
        )  # of the other services, only the first node is called
        listening = {name: ports[0]} if called and ports else {}
        if job.name == ROLLOUT:
            router = {f"router on {name}": job.config.rollout.router_port} if node == 0 else {}
            listening = {f"agent of {name}": job.config.rollout.agent_port, **router}
            weights.append(Check(f"weights of {name}", partial(_weights, topology, job, node)))
        services += [
            Check(title, partial(_service, title, topology, job, node, port))
            for title, port in listening.items()
        ]
    return services + weights


def _get(job: PlannedTask, url: str) -> tuple[httpx.Response, dict[str, Any]]:
    """Sends a request as our clients do (no proxy, the run's token and CA); returns the response
    and its JSON.
    """
    headers = authorization(job.env)
    response = httpx.get(
        url, headers=headers, verify=trusted(job.env), timeout=_TIMEOUT_S, trust_env=False
    )
    with suppress(ValueError):
        if isinstance(content := response.json(), dict):
            return response, content
    return response, {}


def _service(
    title: str, topology: Topology, job: PlannedTask, node: int, port: int
) -> Iterator[Result]:
    host, url, sent = topology.host(job.name, node), topology.url(job.name, port, node), time.time()
    fix = f"is {job.name} up? sky jobs queue, then its log (sky jobs logs ID {job.name})"
    try:
        address = str(socket.getaddrinfo(host, port)[0][4][0])
        response, content = _get(job, f"{url}/health")
    except socket.gaierror as error:
        mismatch = (
            f"the group is {topology.group}: does the YAML have another name, or other num_nodes?"
        )
        yield Result(
            title,
            "fail",
            f"the name {host} does not resolve: {error.strerror}",
            f"{fix}; {mismatch}",
        )
        return
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        yield Result(
            title,
            "fail",
            f"{url} ({address}) does not answer: {reason}",
            f"{fix}; a network policy?",
        )
        return
    found = f"{1000 * response.elapsed.total_seconds():.0f} ms, {url}{'' if address in url else f' ({address})'}"
    if response.status_code == 401:
        yield Result(
            title,
            "fail",
            f"rejects this API_TOKEN, {found}",
            "the same API_TOKEN in every task, and here",
        )
    else:
        waiting = "wait for the engines, which register when they have the newest weights"
        fix = waiting if title.startswith("router") else f"wait, or {fix}"
        state = (
            "healthy"
            if response.is_success
            else f"says {response.status_code}: {content.get('reason', 'no reason given')}"
        )
        yield expect(title, response.is_success, f"{state}, {found}", fix)
    yield compare_clocks(f"clock of {title}", response, sent)


def _weights(topology: Topology, job: PlannedTask, node: int) -> Iterator[Result]:
    title = f"weights of {job.name}-{node}"
    try:
        _, status = _get(
            job, f"{topology.url(job.name, job.config.rollout.agent_port, node)}/status"
        )
        report, wanted = status["report"], status["wanted"]
        state, version, detail = report["state"], report["version"], report["detail"]
        starts, registered = status["engine_starts"], status["registered"]
    except (httpx.HTTPError, KeyError, TypeError):
        yield Result(
            title, "fail", "unknown: its agent does not answer", "see the line of that agent"
        )
        return
    found = f"{state}, version {'base' if version is None else version}, newest {'none yet' if wanted is None else wanted}"
    found += f", engine started {starts} times" * (starts > 1) + ", not in the router" * (
        not registered
    )
    found += f": {detail}" * bool(detail)
    broken, behind = (
        state in ("failed", "stale"),
        wanted is not None and wanted - (version or 0) > _OLD,
    )
    logs = f"the log of {job.name} and STATE_DIR/logs/{job.name}-{node}.engine.log say why"
    fix = logs if broken else "look again in a minute; then at its log"
    yield expect(
        title,
        state == "ready" and registered and not behind,
        found,
        fix,
        "fail" if broken else "warn",
    )
