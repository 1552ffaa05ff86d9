"""The subject of the doctor: tasks of a job group with the settings of their processes, and their
GPUs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import ConfigError, did_you_mean
from common.process.topology import (
    CRITIC,
    DATA,
    ENVIRONMENT,
    REPLAY,
    REWARD,
    ROLLOUT,
    TRAINER,
    Topology,
)
from common.settings.config import Config
from common.settings.rewards import ModelReward
from common.settings.sources import packaged
from jobgroup import spec
from jobgroup.doctor.report import Result, failed

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "jobgroup" / "rlhf-math-jobgroup.yaml"
_DEMO_ENV = {  # as `make demo` sets it
    "RUN_CONFIG": str(ROOT / "jobgroup/configs/tiny-cpu.yaml"),
    "RUN_DIR": "runs/demo-seed0",
    "STATE_DIR": "runs/demo-seed0/state",
    "OMP_NUM_THREADS": "1",
}
_CALLS = {
    TRAINER: (DATA, ROLLOUT, REWARD, REPLAY, CRITIC, ENVIRONMENT),
    ROLLOUT: (TRAINER,),
    ENVIRONMENT: (ROLLOUT,),
}
"""The tasks that a task calls."""


class Gpu(NamedTuple):
    """A GPU of this machine; sizes in bytes."""

    number: str
    name: str
    uuid: str
    total: int
    used: int
    driver: str


@dataclass(frozen=True)
class PlannedTask(spec.Task):
    """A task with the settings of its processes."""

    config: Config

    def path(self, path: Path | str) -> Path:
        """Resolves a path of the settings, which is relative to the task's folder."""
        return self.workdir / Path(path).expanduser()

    @property
    def uses_sglang(self) -> bool:
        return self.name == ROLLOUT and self.config.rollout.engine == "sglang"

    @property
    def needs_torch(self) -> bool:
        if self.name == REWARD:
            return self.config.reward.function(ModelReward) is not None
        if self.name == ROLLOUT:
            return not self.uses_sglang
        return self.name in (TRAINER, CRITIC)


@dataclass
class Plan:
    """Input of all checks."""

    group: str
    jobs: Sequence[PlannedTask]
    """All tasks that matter, wherever they run."""
    here: Sequence[PlannedTask]
    """The tasks on this machine."""
    topology: Topology | None
    """Set only inside a running job group."""
    demo: bool
    problems: Sequence[Result]
    """Errors of the YAML and the settings."""
    env: Mapping[str, str]
    """Environment of this process and of the first task here."""
    assumed_gb: float | None = None
    """GB of a cluster's GPU, to judge the model for it instead of this machine."""
    assumed_gpus: int | None = None
    """The trainer's GPUs on the cluster; None: as in the YAML."""
    gpus: Sequence[Gpu] = ()
    no_gpus: str = "not looked for"
    """The reason for empty `gpus`."""
    shapes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The config.json of every model that could be read; `availability.check_model` fills it."""

    def job(self, name: str) -> PlannedTask | None:
        return next((job for job in self.here if job.name == name), None)


def make(
    path: Path | None,
    overrides: Mapping[str, str],
    env: Mapping[str, str],
    *,
    task: str | None = None,
    cluster: bool = False,
) -> Plan:
    """Reads YAML (the demo's when `path` is None), environment and settings; their errors become
    the plan's `problems`.

    `overrides` are variables of every task, as `jobgroup.local --env`; `task` limits the plan to
    what this task needs; `cluster` asks about a launch on a cluster, with its volumes, and not
    about this machine. Raises ConfigError when the file or the task does not exist.
    """
    path = path and packaged(path, "jobgroup")
    if path is not None and not path.is_file():
        raise spec.no_job_group(path, "there is no such file")
    group = env.get("SKYPILOT_JOBGROUP_NAME", "")
    inside = bool(group)
    demo = path is None and not inside
    jobs: list[PlannedTask] = []
    topology = None
    errors: dict[str, ConfigError] = {}
    wrong: dict[str, list[str]] = {}
    """The tasks with each error; none for an error of the whole group."""
    try:
        topology = Topology.from_env(env) if inside else None
        found = spec.load(path or DEMO, {**_DEMO_ENV, **overrides} if demo else overrides)
        group = group or found.name
        mounted = cluster or (topology is not None and not topology.local_hosts)
        for each in found.tasks:
            each = each if mounted else each.without_volumes()
            # A pod has the environment that the task was launched with; a local run, the YAML's.
            own = {**each.env, **env, **overrides} if inside else {**env, **each.env}
            try:
                jobs += _planned(each, own, topology)
            except ConfigError as error:
                errors[str(error)] = error
                wrong.setdefault(str(error), []).append(each.name)
    except ConfigError as error:
        errors[str(error)] = error

    names = [job.name for job in jobs]
    if task is not None and not errors and task not in names:
        remedy = did_you_mean(task, names)
        raise ConfigError("there is no such task", field="--task", value=task, remedy=remedy)

    called = _CALLS.get(task or "", ()) if inside else ()
    here = [job for job in jobs if job.name == task or (task is None and not inside)]
    lines = []
    for text, problem in errors.items():
        tasks = ", ".join(wrong.get(text, []))
        lines.append(failed(f"settings of {tasks}" if tasks else "job group", problem))
    return Plan(
        group=group,
        jobs=[job for job in jobs if task in (None, job.name) or job.name in called],
        here=here,
        topology=topology,
        demo=demo,
        problems=lines,
        env={**env, **(here[0].env if here else {})},
    )


def _planned(
    task: spec.Task, env: Mapping[str, str], topology: Topology | None
) -> list[PlannedTask]:
    """Returns the task with its settings, or nothing for one that a local run leaves out. Raises
    ConfigError.
    """
    if topology is not None and topology.local_hosts:
        nodes = [host for host in topology.local_hosts if host.startswith(f"{task.name}-")]
        task = replace(task, num_nodes=len(nodes))
    config = task.settings(env)
    return [PlannedTask(**{**vars(task), "env": env}, config=config)] if task.num_nodes else []
