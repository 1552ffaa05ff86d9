"""`rlhf local YAML`: runs a job-group YAML on this machine as SkyPilot runs it on a
cluster.

Every node of every task is a process group with the `SKYPILOT_*` variables of its pod. Its name
(`reward-server-0.rlhf-math`) maps to its own loopback address, through `common.process.topology`
(`JOBGROUP_HOSTS`). Primary tasks decide when the group ends and with which status. No process
survives the group.
"""

import asyncio
import os
import re
import resource
import secrets
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from common.errors import ConfigError, ServiceError
from common.models.hub import check_model, is_path
from common.process.cli import CommandParser, fail
from common.process.exits import SIGNALLED, how_ended
from common.process.run_lock import LOCK, RunLock, refuse_foreign
from common.process.security import TOKEN, token
from common.process.storage import make_directory
from common.process.topology import TRAINER, Topology
from common.settings.config import Config
from common.settings.sources import packaged
from jobgroup import spec
from jobgroup.local.node import Node
from jobgroup.local.output import Screen
from jobgroup.local.placement import Placement, choose_addresses, gpus_of_machine, share_gpus
from jobgroup.local.runner import Runner
from jobgroup.spec import OURS, Env, JobGroup, Task, assignments, seconds

# Interpreter in the YAMLs, made by `jobgroup/setup.sh`; this Python replaces it in a folder that
# lacks it.
_PYTHON = ".venv/bin/python"


_EPILOG = """\
examples:
  # the built-in task on two CPU cores, with another learning rate; the trainer's output is shown
  rlhf local jobgroup/rlhf-math-jobgroup.yaml --follow ppo-trainer \\
    --env RUN_CONFIG=jobgroup/configs/tiny-cpu.yaml --env RLHF_OPTIMIZER__LEARNING_RATE=1e-4

  # three rollout nodes instead of two
  rlhf local jobgroup/rlhf-math-jobgroup.yaml --num-nodes rollout-server=3 \\
    --env RUN_CONFIG=jobgroup/configs/tiny-cpu.yaml

python -m trainer --help lists the settings: section.name is the variable RLHF_SECTION__NAME.
"""
_FILES = 8192
_TOKEN_FILE = "api_token"  # noqa: S105


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status; a wrong option or YAML ends with status 2."""
    options = _parser().parse_args(argv)
    try:
        yaml = packaged(options.yaml, "jobgroup")
        group = spec.load(
            yaml,
            env=assignments(options.env, "--env"),
            secrets=assignments(options.secret, "--secret"),
            num_nodes=dict(map(_node_count, options.num_nodes)),
        )
        group = replace(group, tasks=tuple(task.without_volumes() for task in group.tasks))
        _check_settings(group.tasks)
        follows = options.follow is not None
        followed = f"{group.task(options.follow, '--follow').name}-0" if follows else None
        grace_s = seconds(options.grace, "--grace")
        if options.clear:
            refuse_foreign(options.clear, "--clear")  # before a lock makes it a run's
        log_dir = _log_dir(options.log_dir, group)
        with choose_addresses(group) as placement, _own_directories(group, log_dir):
            if options.clear:
                _clear(options.clear, log_dir)
            screen = Screen([host.partition(".")[0] for host in placement.hosts], followed)
            if yaml != options.yaml:
                screen.say(f"there is no file {options.yaml} here: this is {yaml} of the package")
            return _run(group, placement, screen, log_dir=log_dir, grace_s=grace_s)
    except ServiceError as error:
        fail(error)


def _check_settings(tasks: Sequence[Task]) -> None:
    """Raises ConfigError for settings that the tasks would refuse, and for a model or a reward
    function that is not there, before any process is started.
    """
    for task in tasks:
        if not OURS.search(task.run):
            continue
        env = {**os.environ, **task.env}
        config = task.settings(env)
        token(env)
        if task.workdir == Path.cwd() and "PYTHONPATH" not in task.env:
            _check_paths(config)


def _check_paths(config: Config) -> None:
    """Raises ConfigError for a path that names no model directory, and a module that is not
    there. What is on the hub is left to the tasks.
    """
    if is_path(config.model.name):
        check_model(config.model.name, is_policy=True)
    for function in config.reward.functions:
        module, _, name = function.name.partition(":")
        top = module.partition(".")[0]
        if name and find_spec(top) is None:
            raise ConfigError(
                f"there is no module {top}",
                field="reward.functions",
                value=function.name,
                remedy="correct the path, or add its directory to PYTHONPATH",
            )


@contextmanager
def _own_directories(group: JobGroup, log_dir: Path) -> Iterator[None]:
    """Holds the run directory and that of the logs. Raises ConfigError that names the process which
    has one of them: its services would report a locked database, a while later.
    """
    name = f"of jobgroup.local {group.name}"
    with ExitStack() as stack:
        stack.enter_context(RunLock(log_dir, name, "--log-dir"))
        of_run = (_run_dir(group) / "logs").resolve()
        if log_dir != of_run and any("RUN_DIR" in task.env for task in group.tasks):
            with RunLock(of_run.parent, name, "RUN_DIR"):
                pass  # no other run has it now; the trainer of this one takes it when it starts
            stack.enter_context(RunLock(of_run, name, "RUN_DIR"))
        yield


def _run(
    group: JobGroup, placement: Placement, screen: Screen, *, log_dir: Path, grace_s: float
) -> int:
    group = _with_an_interpreter(group, screen)
    tasks = group.tasks
    made = _make_token(tasks, log_dir)
    for line in [*_notices(tasks, log_dir), *_addresses(group, placement, log_dir, made)]:
        screen.say(line)
    _raise_file_limit()

    runner = Runner(tasks, _environments(group, placement), screen, log_dir, grace_s=grace_s)
    status = asyncio.run(runner.run())

    for line in _summary(runner):
        screen.plain(line)
    for run in runner.runs:
        if run.failed is not None and run is not runner.reason:
            screen.tail(run.failed.name, run.failed.last_lines, run.failed.log)
    if runner.reason is not None and runner.reason.failed is not None:
        _say_reason(runner.reason.failed, screen)  # last
    return status


def _with_an_interpreter(group: JobGroup, screen: Screen) -> JobGroup:
    """Replaces the Python that the YAML names by this one in tasks whose folder lacks it."""
    names = []
    tasks = []
    for task in group.tasks:
        if _PYTHON in task.run and not (task.workdir / _PYTHON).exists():
            names.append(task.name)
            task = replace(task, run=task.run.replace(_PYTHON, shlex.quote(sys.executable)))
        tasks.append(task)
    if names:
        screen.say(f"there is no {_PYTHON} here: {', '.join(names)} run with {sys.executable}")
    return replace(group, tasks=tuple(tasks))


def _raise_file_limit() -> None:
    """Raises the limit on open files: an engine and its router have a connection per request."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, _FILES) if hard != resource.RLIM_INFINITY else _FILES
    if 0 <= soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _say_reason(node: Node, screen: Screen) -> None:
    """Shows a failed node's last lines, and how it ended if they cannot say it."""
    screen.tail(node.name, node.last_lines, node.log)
    status = node.ended.result()
    if status > SIGNALLED or not node.last_lines:
        silent = "" if node.last_lines else " and printed nothing that says why"
        screen.say(f"{node.name} {how_ended(status)}{silent}", loud=True)


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


def _environments(group: JobGroup, placement: Placement) -> Callable[[Task, int], Env]:
    """Returns what makes the environment of a node: this process's, the task's, and SkyPilot's
    variables.
    """
    gpus = gpus_of_machine()
    shares = share_gpus(group.tasks, gpus)
    run = f"local-{time.strftime('%Y-%m-%d-%H-%M-%S')}-{os.getpid()}"

    def environment(task: Task, rank: int) -> Env:
        skypilot = {
            "SKYPILOT_JOBGROUP_NAME": group.name,
            "SKYPILOT_NODE_RANK": str(rank),
            "SKYPILOT_NUM_NODES": str(task.num_nodes),
            "SKYPILOT_NODE_IPS": "\n".join(host.address for host in placement.of(task)),
            "SKYPILOT_NUM_GPUS_PER_NODE": str(len(shares[task.name][rank])),
            "SKYPILOT_TASK_ID": f"{run}_{group.name}_{task.name}",
            "SKYPILOT_MANAGED_JOB_ID": str(os.getpid()),
            "JOBGROUP_HOSTS": placement.text(),
        }
        if gpus:
            skypilot["CUDA_VISIBLE_DEVICES"] = ",".join(shares[task.name][rank])
        # The nodes share the cores, so waiting threads must not spin. Output is shown as it is
        # written.
        defaults = {"OMP_WAIT_POLICY": "passive", "PYTHONUNBUFFERED": "1"}
        own = dict(task.env)
        if not own.get(TOKEN):
            own.pop(TOKEN, None)  # that of this run
        env = {**defaults, **os.environ, **own, **skypilot}
        return env | Topology.from_env(env).proxy_env(env)

    return environment


def _parser() -> CommandParser:
    about = "Runs a SkyPilot job-group YAML on this machine."
    parser = CommandParser("rlhf local", about, epilog=_EPILOG)
    add = parser.add_argument
    add("yaml", type=Path, metavar="YAML", help="the job group")
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
        type=Path,
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
    add(
        "--clear",
        type=Path,
        metavar="DIR",
        help="empties this directory of a run first, unless a run is using it",
    )
    return parser


def _node_count(text: str) -> tuple[str, int]:
    match = re.fullmatch(r"([^=]+)=([1-9][0-9]?|1[0-9][0-9]|2[0-4][0-9]|250)", text)
    if match is None:
        raise ConfigError(
            "nodes are given as TASK=N, N from 1 to 250",
            field="--num-nodes",
            value=text,
            remedy="write it as ppo-trainer=2",
        )
    return match[1], int(match[2])


def _log_dir(option: Path | None, group: JobGroup) -> Path:
    field = "--log-dir"
    if option is None:
        field = "RUN_DIR"
        make_directory(_run_dir(group), field)
        option = _run_dir(group) / "logs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    log_dir = option.resolve()
    make_directory(log_dir, field)
    return log_dir


def _run_dir(group: JobGroup) -> Path:
    run_dirs = filter(None, (task.env.get("RUN_DIR") for task in group.tasks))
    return Path(next(run_dirs, f"runs/{group.name}"))


def _notices(tasks: Sequence[Task], log_dir: Path) -> list[str]:
    nodes = sum(task.num_nodes for task in tasks)
    lines = [f"{nodes} nodes of {len(tasks)} tasks; logs in {log_dir}"]
    if any(task.setup for task in tasks):
        lines.append("the tasks' setup is not run: their environment must already exist")
    names = ", ".join(task.name for task in tasks if task.ignored)
    if names:
        lines.append(
            f"volumes and file_mounts of {names} are only for a cluster: here the default folders "
            "count, or --env"
        )
    return lines


def _make_token(tasks: Sequence[Task], log_dir: Path) -> str:
    """Generates a token for tasks that accept one and got none, so that web pages open here cannot
    call them. Returns it; empty when none was needed.
    """
    wanting = [task for task in tasks if TOKEN in task.env]
    if not wanting or os.environ.get(TOKEN) or any(task.env[TOKEN] for task in wanting):
        return ""
    value = secrets.token_hex(16)
    os.environ[TOKEN] = value
    file = log_dir / _TOKEN_FILE
    file.unlink(missing_ok=True)
    file.touch(0o600, exist_ok=False)
    file.write_text(value, encoding="ascii")
    return value


def _addresses(group: JobGroup, placement: Placement, log_dir: Path, made: str) -> list[str]:
    """Returns the lines about the token that was made, if one was, and the dashboard's address."""
    lines = []
    if made:
        file = shlex.quote(str(log_dir / _TOKEN_FILE))
        lines.append(f"API_TOKEN of this run: {made}, also in {file}; for calls:")
        lines.append(f'  curl -H "Authorization: Bearer $(cat {file})" …')
    for task in group.tasks:
        if task.name == TRAINER and OURS.search(task.run):
            env = {**os.environ, **task.env}
            here = Topology(group=group.name, local_hosts=placement.hosts)
            _, _, place = here.url(TRAINER, task.settings(env).trainer.port).partition("://")
            url = f"https://{place}" if env.get("TLS_CERT") else f"http://{place}"
            given = f"#token={made}" if made else ""
            lines.append(f"dashboard, once the trainer has started: {url}/dashboard/{given}")
    return lines


def _summary(runner: Runner) -> Iterator[str]:
    yield f"{'TASK':<20} NODES STATE     RESTARTS  SECONDS  LOG"
    for run in runner.runs:
        task = run.task
        log = runner.log_dir / f"{task.name}-{'0' if task.num_nodes == 1 else '*'}.log"
        state = f"{task.num_nodes:>5} {run.state:<9} {run.restarts:>8} {run.seconds:>8.1f}"
        yield f"{task.name:<20} {state}  {log}"


if __name__ == "__main__":
    sys.exit(main())
