"""`python -m jobgroup.scrape YAML`: prints the Prometheus configuration that scrapes every node of
a job group.

Every service, agent and engine, and the router. Targets are the job group's host names, which its
pods resolve; with `JOBGROUP_HOSTS` they are the addresses of that local run. `jobgroup.local`
writes the same file beside its logs.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path

import yaml

from common import Json
from common.errors import ConfigError
from common.process.cli import CommandParser, fail
from common.process.security import tls
from common.process.topology import (
    CRITIC,
    DATA,
    ENVIRONMENT,
    REPLAY,
    REWARD,
    ROLLOUT,
    TINKER,
    TRAINER,
    Topology,
    parse_hosts,
)
from jobgroup import spec

INTERVAL_S = 10
ROUTER = "router"
PORTS: dict[str, dict[str, str]] = {
    ROLLOUT: {
        "rollout.agent_port": ROLLOUT,
        "rollout.engine_port": "rollout-engine",
        "rollout.router_port": "",
        "rollout.router_metrics_port": ROUTER,
    },
    DATA: {"data.port": DATA},
    REWARD: {"reward.port": REWARD},
    REPLAY: {"replay.port": REPLAY},
    CRITIC: {"critic.port": CRITIC},
    ENVIRONMENT: {"environment.port": ENVIRONMENT},
    TRAINER: {"trainer.port": TRAINER},
    TINKER: {"tinker.port": TINKER},
}
"""The settings of the ports on which the nodes of a task listen. The value is the Prometheus job
that reads `/metrics` there; empty where there is no such page."""
_FIRST_NODE_ONLY = (ROUTER, TRAINER, TINKER)


def configuration(group: spec.JobGroup, hosts: Mapping[str, str], token_file: str | None) -> str:
    """Returns the text of a `prometheus.yml` with a job for every kind of service. Raises
    ConfigError for wrong settings.

    `hosts` is the environment with `JOBGROUP_HOSTS` of a local run, empty on a cluster.
    `token_file` holds the run's API_TOKEN. The router's page requires none, so it gets none.
    """
    local = parse_hosts(hosts.get("JOBGROUP_HOSTS", ""))
    topology = Topology(group=group.name, local_hosts=local)
    nodes_of_job: dict[str, list[Json]] = {}
    for task in group.tasks:
        for rank in range(task.num_nodes):
            for job, port in _ports(task, rank):
                target = topology.url(task.name, port, rank).partition("://")[2]
                node = {"targets": [target], "labels": {"node": f"{task.name}-{rank}"}}
                nodes_of_job.setdefault(job, []).append(node)

    scraped = []
    for job, nodes in nodes_of_job.items():
        access = {} if job == ROUTER else _access(token_file)
        scraped.append({"job_name": job, **access, "static_configs": nodes})
    content = {"global": {"scrape_interval": f"{INTERVAL_S}s"}, "scrape_configs": scraped}
    return str(yaml.safe_dump(content, sort_keys=False))


def _access(token_file: str | None) -> Json:
    """Returns what Prometheus needs to read the pages: the token, and the authority of TLS."""
    files = tls()
    found: Json = {}
    if token_file:
        found["authorization"] = {"credentials_file": token_file}
    if files.certificate:
        found["scheme"] = "https"
        if files.authority:
            found["tls_config"] = {"ca_file": files.authority}
    return found


def _ports(task: spec.Task, rank: int) -> Iterator[tuple[str, int]]:
    """Yields jobs and ports of a node, as the task's own environment sets them."""
    if task.name not in PORTS:
        return
    config = task.settings({**os.environ, **task.env})
    for setting, job in PORTS[task.name].items():
        if job and (rank == 0 or job not in _FIRST_NODE_ONLY):
            yield job, attrgetter(setting)(config)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command. A wrong YAML or setting ends with status 2."""
    parser = CommandParser("jobgroup.scrape", __doc__ or "")
    parser.add_argument("yaml", type=Path, metavar="YAML", help="the job group")
    parser.add_argument(
        "--env", action="append", default=[], metavar="K=V", help="sets a variable in every task"
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="on Prometheus' machine: holds the API_TOKEN of the run",
    )
    options = parser.parse_args(argv)
    try:
        env = spec.assignments(options.env, "--env")
        group = spec.load(options.yaml, env)
        sys.stdout.write(configuration(group, os.environ, options.token_file))
    except ConfigError as error:
        fail(error)


if __name__ == "__main__":
    main()
