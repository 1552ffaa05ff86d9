"""`python -m jobgroup.local YAML`: runs a job-group YAML on this machine as SkyPilot runs it on a
cluster.

Every node of every task is a process group with the `SKYPILOT_*` variables of its pod. Its name
(`reward-server-0.rlhf-math`) maps to its own loopback address, through `common.process.topology`
(`JOBGROUP_HOSTS`). Primary tasks decide when the group ends and with which status. No process
survives the group.
"""

import asyncio
import os
import secrets
import shlex
import shutil
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from common.errors import ConfigError, ServiceError
from common.process.cli import CommandParser, fail
from common.process.run_lock import LOCK, RunLock
from common.process.security import TOKEN, token
from common.process.storage import make_directory
from common.settings.sources import packaged
from jobgroup import scrape, spec
from jobgroup.local.launcher import SIGNALLED
from jobgroup.local.node import Node
from jobgroup.local.output import Screen
from jobgroup.local.places import Places, choose, gpus_of_machine, share_gpus
from jobgroup.local.runner import Runner
from jobgroup.spec import JobGroup, Task, assignment, seconds

_PYTHON = ".venv/bin/python"
"""Interpreter in the YAMLs, made by `jobgroup/setup.sh`; this Python replaces it in a folder that
lacks it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status; a wrong option or YAML ends with status 2."""
    options = _parser().parse_args(argv)
    try:
        yaml = packaged(Path(options.yaml), "jobgroup")
        group = spec.load(
            yaml,
            dict(assignment(text, "--env") for text in options.env),
            dict(assignment(text, "--secret") for text in options.secret),
            dict(_node_count(text) for text in options.num_nodes),
        )
        group = replace(group, tasks=tuple(task.without_volumes() for task in group.tasks))
        tasks = list(group.tasks)
        follow = (
            f"{group.task(options.follow, '--follow').name}-0"
            if options.follow is not None
            else None
        )
        grace_s = seconds(options.grace, "--grace")
        log_dir = _log_dir(options.log_dir, group)
        with (
            choose(group) as places,
            RunLock(log_dir, f"of jobgroup.local {group.name}", "--log-dir"),
        ):
            if options.clear:
                _clear(Path(options.clear), log_dir)
            return _run(options, yaml, group, tasks, places, log_dir, grace_s, follow)
    except ServiceError as error:
        fail(error)


def _run(
    options: Namespace,
    yaml: Path,
    group: JobGroup,
    tasks: list[Task],
    places: Places,
    log_dir: Path,
    grace_s: float,
    follow: str | None,
) -> int:
    names = [f"{task.name}-{rank}" for task in tasks for rank in range(task.num_nodes)]
    screen = Screen(names, follow)
    if yaml != Path(options.yaml):
        screen.say(
            f"there is no file {options.yaml} here: running {yaml}, which comes with the package"
        )
    lacking = [
        task for task in tasks if _PYTHON in task.run and not (task.workdir / _PYTHON).exists()
    ]
    if lacking:
        screen.say(
            f"there is no {_PYTHON} here: {', '.join(task.name for task in lacking)} run with {sys.executable}"
        )
        python = shlex.quote(sys.executable)
        tasks = [
            replace(task, run=task.run.replace(_PYTHON, python)) if task in lacking else task
            for task in tasks
        ]
    for line in [
        *_notices(tasks, log_dir),
        *_make_token(tasks, log_dir),
        *_scraped(group, tasks, places, log_dir),
    ]:
        screen.say(line)
    environment = _Environment(group, tasks, places)
    runner = Runner(tasks, environment, screen, log_dir, grace_s=grace_s)
    status = asyncio.run(runner.run())
    screen.table(_summary(runner))
    for run in runner.runs:  # the reason comes last
        if run.failed is not None and run is not runner.reason:
            screen.tail(run.failed.name, run.failed.tail, run.failed.log)
    if runner.reason is not None and (node := runner.reason.failed) is not None:
        screen.tail(node.name, node.tail, node.log)
        if unsaid := _not_in_output(node):
            screen.say(unsaid, loud=True)
    return status


def _not_in_output(node: Node) -> str:
    """Returns how a failed node ended if its own last line cannot say it; else nothing."""
    status = node.ended.result()
    if status > SIGNALLED:
        with suppress(ValueError):  # a status of its own
            return f"{node.name} was killed by {signal.Signals(status - SIGNALLED).name} (status {status})"
    return "" if node.tail else f"{node.name} ended with status {status} and printed nothing"


def _clear(directory: Path, log_dir: Path) -> None:
    """Removes everything in `directory` except locks and the log folder. Raises ConfigError when a
    run is using it.
    """
    make_directory(directory, "--clear")
    with RunLock(directory, "that empties it", "--clear"):
        for path in directory.resolve().iterdir():
            if path.name == LOCK or path in (log_dir, *log_dir.parents):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


class _Environment:
    """The environment of every node: this process's, the task's, and SkyPilot's variables."""

    def __init__(self, group: JobGroup, tasks: Sequence[Task], places: Places) -> None:
        self._group, self._places = group, places
        self._gpus = gpus_of_machine()
        self._shares = share_gpus(tasks, self._gpus)
        self._run = f"local-{time.strftime('%Y-%m-%d-%H-%M-%S')}-{os.getpid()}"

    def __call__(self, task: Task, rank: int) -> Mapping[str, str]:
        gpus = self._shares[task.name][rank]
        skypilot = {
            "SKYPILOT_JOBGROUP_NAME": self._group.name,
            "SKYPILOT_NODE_RANK": str(rank),
            "SKYPILOT_NUM_NODES": str(task.num_nodes),
            "SKYPILOT_NODE_IPS": "\n".join(place.address for place in self._places.of(task)),
            "SKYPILOT_NUM_GPUS_PER_NODE": str(len(gpus)),
            "SKYPILOT_TASK_ID": f"{self._run}_{self._group.name}_{task.name}",
            "SKYPILOT_MANAGED_JOB_ID": str(os.getpid()),
            "JOBGROUP_HOSTS": self._places.text(),
        }
        if self._gpus:
            skypilot["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        # The nodes share the cores, so waiting threads must not spin. Output is shown as it is
        # written.
        defaults = {"OMP_WAIT_POLICY": "passive", "PYTHONUNBUFFERED": "1"}
        own = {
            name: value for name, value in task.env.items() if value or name != TOKEN
        }  # empty: this run's
        return {**defaults, **os.environ, **own, **skypilot}


def _parser() -> CommandParser:
    parser = CommandParser("jobgroup.local", "Runs a SkyPilot job-group YAML on this machine.")
    add = parser.add_argument
    add("yaml", metavar="YAML", help="the job group")
    add(
        "--env",
        action="append",
        default=[],
        metavar="K=V",
        help="sets a variable in every task; K alone takes its value from this environment",
    )
    add("--secret", action="append", default=[], metavar="K[=V]", help="the same, for a secret")
    add(
        "--num-nodes",
        action="append",
        default=[],
        metavar="TASK=N",
        help="number of nodes of a task, instead of the YAML's",
    )
    add(
        "--log-dir",
        metavar="DIR",
        help="directory of the log files, one per node (default RUN_DIR/logs/TIME)",
    )
    add(
        "--follow",
        metavar="TASK",
        help="shows the output of node 0 of this task unchanged, and no others",
    )
    add(
        "--grace",
        default="10s",
        metavar="TIME",
        help="time between SIGTERM and SIGKILL (default 10s)",
    )
    add("--clear", metavar="DIR", help="empties this directory first, unless a run is using it")
    return parser


def _node_count(text: str) -> tuple[str, int]:
    name, _, count = text.partition("=")
    if not (name and count.isascii() and count.isdecimal() and 1 <= int(count) <= 250):
        raise ConfigError(
            "nodes are given as TASK=N, N from 1 to 250",
            field="--num-nodes",
            value=text,
            remedy="write it as ppo-trainer=2",
        )
    return name, int(count)


def _log_dir(given: str | None, group: JobGroup) -> Path:
    run_dir = next(
        (task.env["RUN_DIR"] for task in group.tasks if task.env.get("RUN_DIR")),
        f"runs/{group.name}",
    )
    default = Path(run_dir) / "logs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    log_dir = (Path(given) if given else default).resolve()
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the log folder cannot be used: {error.strerror}",
            field="--log-dir",
            value=str(log_dir),
            remedy="name another",
        ) from None
    return log_dir


def _notices(tasks: Sequence[Task], log_dir: Path) -> list[str]:
    lines = [
        f"{sum(task.num_nodes for task in tasks)} nodes of {len(tasks)} tasks; logs in {log_dir}"
    ]
    if any(task.setup for task in tasks):
        lines.append("the tasks' setup is not run: their environment must already exist")
    for field in ("volumes", "file_mounts"):
        names = [task.name for task in tasks if field in task.ignored]
        if names:
            lines.append(
                f"{field} of {', '.join(names)} are only for a cluster and not mounted here"
            )
    unset = sorted({name for task in tasks for name in task.on_volumes})
    if unset:
        lines.append(
            f"{' and '.join(unset)} of the YAML name folders on volumes: here the defaults count, or --env"
        )
    return lines


def _make_token(tasks: Sequence[Task], log_dir: Path) -> list[str]:
    """Generates a token for tasks that accept one and got none, so that web pages open here cannot
    call them.

    Returns the lines for the user, who needs the token for the dashboard and for requests.
    """
    wanting = [task for task in tasks if TOKEN in task.env]
    if not wanting or os.environ.get(TOKEN) or any(task.env[TOKEN] for task in wanting):
        return []
    value = os.environ[TOKEN] = secrets.token_hex(16)
    file = log_dir / "api_token"
    try:
        file.unlink(missing_ok=True)
        file.touch(0o600, exist_ok=False)
        file.write_text(value, encoding="ascii")
    except OSError as error:
        return [f"API_TOKEN of this run: {value} ({file} cannot be written: {error.strerror})"]
    return [
        f"API_TOKEN of this run: {value}, also in {file}; add #token={value} to the address of the dashboard, and to calls:",
        f'  curl -H "Authorization: Bearer $(cat {shlex.quote(str(file))})" …',
    ]


def _scraped(group: JobGroup, tasks: Sequence[Task], places: Places, log_dir: Path) -> list[str]:
    """Writes `prometheus.yml` for the run's tasks; an error is only a notice."""
    try:
        token_file = "api_token" if token() else None  # beside it
        chosen = replace(group, tasks=tuple(tasks))
        text = scrape.configuration(chosen, {"JOBGROUP_HOSTS": places.text()}, token_file)
        (log_dir / "prometheus.yml").write_text(text, encoding="utf-8")
    except (ConfigError, OSError) as error:
        return [f"there is no {log_dir / 'prometheus.yml'}: {error}"]
    return []


def _summary(runner: Runner) -> list[list[str]]:
    rows = [["TASK", "NODES", "STATE", "RESTARTS", "SECONDS", "LOG"]]
    for run in runner.runs:
        task = run.task
        log = runner.log_dir / f"{task.name}-{'0' if task.num_nodes == 1 else '*'}.log"
        rows.append(
            [
                task.name,
                str(task.num_nodes),
                run.state,
                str(run.restarts),
                f"{run.seconds:.1f}",
                str(log),
            ]
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
