"""A running job group from within: names, ports, health, clocks and weight versions of its tasks."""

import socket
import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import httpx

from common.security import authorization, trusted
from common.topology import ROLLOUT, Topology
from jobgroup.doctor import clock
from jobgroup.doctor.plan import Job, Plan
from jobgroup.doctor.ports import ports
from jobgroup.doctor.result import Check, Result, fail, ok, warn

_TIMEOUT_S = 5.0
_OLD = 1
"""Weight versions that a node may be behind while it loads the newest."""


def checks(plan: Plan) -> list[Check]:
    """One for every node of every task, and one for the weights."""
    topology = plan.topology
    if topology is None:
        return []
    found = []
    for job in plan.jobs:
        for node in range(job.nodes):
            for title, port in _endpoints(job, node):
                found.append(Check(title, partial(_service, title, topology, job, node, port)))
    rollout = next((job for job in plan.jobs if job.name == ROLLOUT), None)
    if rollout is not None:
        found.append(Check("weights", partial(_weights, topology, rollout)))
    return found


def _endpoints(job: Job, node: int) -> list[tuple[str, int]]:
    """What listens on a node of a task, with its port. Of the trainer only node 0 does."""
    config, name = job.config, f"{job.name}-{node}"
    if job.name == ROLLOUT:
        router = [(f"router on {name}", config.rollout.router_port)] if node == 0 else []
        return [(f"agent of {name}", config.rollout.agent_port), *router]
    return [(name, port) for port in ports(job).values()] if node == 0 else []


def _client(env: Mapping[str, str], url: str) -> httpx.Client:
    """As the project's own clients: no proxy, the token of the run, and its authority."""
    return httpx.Client(base_url=url, headers=authorization(env), verify=trusted(env), timeout=_TIMEOUT_S, trust_env=False)


def _service(title: str, topology: Topology, job: Job, node: int, port: int) -> Iterable[Result]:
    """Its name, its port, its health, its clock: up to the first that fails."""
    host, url = topology.host(job.name, node), topology.url(job.name, port, node)
    look = f"is {job.name} up? sky jobs queue, then its log (sky jobs logs ID {job.name})"
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        mend = f"{look}; the group is {topology.group}: does the YAML have another name, or other num_nodes?"
        return [fail(title, f"the name {host} does not resolve: {error.strerror or error}", mend)]
    where = f"{url} ({address})" if str(address) not in url else url
    with _client(job.env, url) as client:
        sent = time.time()
        try:
            response = client.get("/health")
        except httpx.HTTPError as error:
            return [fail(title, f"{where} does not answer: {str(error) or type(error).__name__}", f"{look}; a network policy?")]
    measured = clock.judged(f"clock of {title}", clock.offset(response, sent))
    if response.is_success:
        return [ok(title, f"healthy, {1000 * response.elapsed.total_seconds():.0f} ms, {where}"), measured]
    if response.status_code == 401:
        return [
            fail(title, f"{where} does not take the API_TOKEN here", "the same API_TOKEN in every task, and here"),
            measured,
        ]
    return [fail(title, f"{where} says {response.status_code}: {_reason(response)}", _cure(title, look)), measured]


def _reason(response: httpx.Response) -> str:
    content = _json(response)
    return str(content.get("reason", "no reason given")) if isinstance(content, dict) else "no reason given"


def _cure(title: str, look: str) -> str:
    return (
        "wait for the engines, which register when they have the newest weights"
        if title.startswith("router")
        else f"wait, or {look}"
    )


def _json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return None


def _weights(topology: Topology, job: Job) -> Iterable[Result]:
    """What every node of rollout-server serves against the newest version of the trainer."""
    for node in range(job.nodes):
        title = f"weights of {job.name}-{node}"
        with _client(job.env, topology.url(job.name, job.config.rollout.agent_port, node)) as client:
            try:
                status = _json(client.get("/status"))
                report = status["report"]
                state, version, wanted = report["state"], report["version"], status["wanted"]
                starts, registered, detail = status["engine_starts"], status["registered"], report["detail"]
            except (httpx.HTTPError, KeyError, TypeError):
                yield fail(title, "unknown: its agent does not answer", "see the line of that agent")
                continue
        text = f"{state}, version {'base' if version is None else version}, newest {'none yet' if wanted is None else wanted}"
        text += f", engine started {starts} times" if starts > 1 else ""
        text += "" if registered else ", not in the router"
        text += f": {detail}" if detail else ""
        if state in ("failed", "stale"):
            yield fail(title, text, f"the log of {job.name} and STATE_DIR/logs/{job.name}-{node}.engine.log say why")
        elif state != "ready" or not registered or (wanted is not None and wanted - (version or 0) > _OLD):
            yield warn(title, text, "look again in a minute; then at its log")
        else:
            yield ok(title, text)
