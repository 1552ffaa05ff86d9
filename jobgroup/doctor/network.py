"""Ports."""

import socket
from contextlib import suppress
from operator import attrgetter

import psutil

from common.process.topology import DATA, ENVIRONMENT, REPLAY, REWARD, ROLLOUT, TINKER, TRAINER
from common.settings.sources import variable
from jobgroup.doctor.plan import Plan
from jobgroup.doctor.report import Result, Results

# The settings of the ports on which the nodes of a task listen.
_PORTS = {
    ROLLOUT: (
        "rollout.agent_port",
        "rollout.engine_port",
        "rollout.router_port",
        "rollout.router_metrics_port",
    ),
    DATA: ("data.port",),
    REWARD: ("reward.port",),
    REPLAY: ("replay.port",),
    ENVIRONMENT: ("environment.port",),
    TRAINER: ("trainer.port",),
    TINKER: ("tinker.port",),
}
# Like a node of a local run (`jobgroup/local/placement.py`): on Linux no other server listens on
# this address only.
_NODE = "127.254.251.1" if psutil.LINUX else "127.0.0.1"


def check_ports(plan: Plan) -> Results:
    """Tries to listen as the tasks will; in a running group they already do."""
    if plan.inside:
        return
    free = []
    for job in plan.here:
        for setting in _PORTS.get(job.name, ()):
            port = attrgetter(setting)(job.config)
            try:
                # With SO_REUSEADDR: connections that just ended do not count.
                socket.create_server((_NODE, port)).close()
            except OSError as error:
                users = _listeners(port)
                by = f" by process {', '.join(users)}" if users else f": {error.strerror}"
                yield Result(
                    f"port {port} of {job.name}",
                    "fail",
                    f"already in use{by}",
                    f"end it, or use another port: --env {variable(setting)}={port + 1000}",
                )
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
