"""The subject of the doctor: tasks of a job group with the settings of their processes, and their
GPUs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from common import Json
from common.errors import ConfigError, did_you_mean
from common.process.topology import REWARD, ROLLOUT, TINKER, TRAINER
from common.settings.config import Config
from common.settings.rewards import ModelReward
from common.settings.sources import packaged
from jobgroup import spec
from jobgroup.doctor.report import Result, failed
from jobgroup.spec import Env

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "jobgroup" / "rlhf-math-jobgroup.yaml"
_DEMO_ENV = {  # as `make demo` sets it
    "RUN_CONFIG": str(ROOT / "jobgroup/configs/tiny-cpu.yaml"),
    "RUN_DIR": "runs/demo-seed0",
    "STATE_DIR": "runs/demo-seed0/state",
    "OMP_NUM_THREADS": "1",
}


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
        return self.name in (TRAINER, TINKER)


# The setup of a task that makes the built-in model has this word.
_MAKE_TINY = "trainer.tiny_model"


@dataclass
class Plan:
    """Input of all checks."""

    group: str
    here: Sequence[PlannedTask]
    """The tasks on this machine."""
    inside: bool
    """Whether this is a pod or a process of a running job group."""
    demo: bool
    problems: Sequence[Result]
    """Errors of the YAML and the settings."""
    gpus: Sequence[Gpu] = ()
    no_gpus: str = "not looked for"
    """The reason for empty `gpus`."""
    shapes: dict[str, Json] = field(default_factory=dict)
    """The config.json of every model that could be read; `availability.check_model` fills it."""

    def job(self, name: str) -> PlannedTask | None:
        return next((job for job in self.here if job.name == name), None)

    def makes_model(self, job: PlannedTask) -> bool:
        """Whether `make demo` or the task's setup makes the model, so that it need not be there."""
        return self.demo or _MAKE_TINY in (job.setup or "")


def make(
    path: Path | None,
    overrides: Env,
    env: Env,
    *,
    task: str | None = None,
) -> Plan:
    """Reads YAML (the demo's when `path` is None), environment and settings; their errors become
    the plan's `problems`.

    `overrides` are variables of every task, as `jobgroup.local --env`; `task` limits the plan to
    what this task needs. Raises ConfigError when the file or the task does not exist.
    """
    path = path and packaged(path, "jobgroup")
    if path is not None and not path.is_file():
        raise spec.no_job_group(path, "there is no such file")
    group = env.get("SKYPILOT_JOBGROUP_NAME", "")
    inside = bool(group)
    in_pod = inside and not env.get("JOBGROUP_HOSTS")
    demo = path is None and not inside
    jobs: list[PlannedTask] = []
    problems: dict[str, Result] = {}
    """By the text of an error, which several tasks may have."""
    try:
        found = spec.load(path or DEMO, {**_DEMO_ENV, **overrides} if demo else overrides)
        group = group or found.name
        for each in found.tasks:
            each = each if in_pod else each.without_volumes()
            # A pod has the environment that the task was launched with; a local run, the YAML's and
            # the name of its group, which is in the default folders.
            local = {**env, "SKYPILOT_JOBGROUP_NAME": group, **each.env}
            own = {**each.env, **env, **overrides} if inside else local
            try:
                task_of_pod = {**vars(each), "env": own}
                jobs.append(PlannedTask(**task_of_pod, config=each.settings(own)))
            except ConfigError as error:
                problems.setdefault(str(error), failed(f"settings of {each.name}", error))
    except ConfigError as error:
        problems[str(error)] = failed("job group", error)

    names = [job.name for job in jobs]
    if task is not None and not problems and task not in names:
        raise ConfigError(
            "there is no such task", field="--task", value=task, remedy=did_you_mean(task, names)
        )
    return Plan(
        group=group,
        here=[job for job in jobs if job.name == task or (task is None and not inside)],
        inside=inside,
        demo=demo,
        problems=list(problems.values()),
    )
