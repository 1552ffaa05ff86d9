"""What is judged: the tasks of a job group with the configuration that their processes will read, and where they will run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from common.config import Config, load, packaged
from common.errors import ConfigError
from common.topology import CRITIC, DATA, REPLAY, REWARD, ROLLOUT, TRAINER, Topology
from jobgroup import spec
from jobgroup.doctor.result import Result, failed

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "jobgroup" / "rlhf-math-jobgroup.yaml"
_DEMO_ENV = {
    "RUN_CONFIG": "jobgroup/configs/tiny-cpu.yaml",
    "RUN_DIR": "runs/demo-seed0",
    "STATE_DIR": "runs/demo-seed0/state",
    "OMP_NUM_THREADS": "1",
    **dict.fromkeys(("MODEL_NAME", "NUM_EPOCHS", "BATCH_SIZE"), ""),
}
"""What `make demo` sets."""
_ASKS = {TRAINER: (DATA, ROLLOUT, REWARD, REPLAY, CRITIC, TRAINER), ROLLOUT: (ROLLOUT, TRAINER)}
"""The tasks that a task talks to, beside itself."""


@dataclass(frozen=True)
class Job:
    """One task, as its processes find it."""

    name: str
    config: Config
    env: Mapping[str, str]
    nodes: int = 1
    gpus: int = 0
    """That the YAML asks for on every node."""
    workdir: Path = ROOT
    setup: str = ""
    run: str = ""

    def path(self, path: Path | str) -> Path:
        """A path of the configuration, which is relative to the task's folder."""
        return self.workdir / Path(path).expanduser()

    @property
    def uses_sglang(self) -> bool:
        return self.name == ROLLOUT and self.config.rollout.engine == "sglang"

    @property
    def computes(self) -> bool:
        """Whether its own environment has to have torch."""
        neural = self.name == REWARD and "reward_model" in self.config.reward.function_names()
        return self.name in (TRAINER, CRITIC) or neural or (self.name == ROLLOUT and not self.uses_sglang)


@dataclass(frozen=True)
class Assumed:
    """GPUs that this machine need not have: of the cluster that a YAML is judged for."""

    memory_gb: float
    trainer_gpus: int | None = None


@dataclass(frozen=True)
class Plan:
    """What the checks look at."""

    group: str
    jobs: tuple[Job, ...]
    """All tasks that matter, wherever they run."""
    here: tuple[Job, ...]
    """Those whose processes run on this machine."""
    topology: Topology | None = None
    """Set inside a running job group: its other tasks are looked at."""
    assumed: Assumed | None = None
    demo: bool = False
    problems: tuple[Result, ...] = field(default=())
    """Of the YAML and the settings."""

    def job(self, name: str) -> Job | None:
        """The task of that name among those on this machine."""
        return next((job for job in self.here if job.name == name), None)


class Usage(Exception):
    """The command line names what does not exist."""


def make(
    path: Path | None, overrides: Mapping[str, str], env: Mapping[str, str], task: str | None, assumed: Assumed | None
) -> Plan:
    """Reads YAML, environment and settings. What is wrong in them is among the plan's `problems`, not raised.

    Args:
        path: of a job group; None: the demo, or inside a job group the tasks that the environment configures.
        overrides: variables of every task, as `jobgroup.local --env`.
        env: of this process.
        task: judge what this task needs, instead of all.

    Raises Usage for a file or a task that does not exist.
    """
    path = path and packaged(path, "jobgroup")
    if path is not None and not path.is_file():
        raise Usage(f"there is no file {path}")
    inside = bool(env.get("SKYPILOT_JOBGROUP_NAME"))
    problems: dict[ConfigError, list[str]] = {}
    jobs: list[Job] = []
    topology = None
    group = env.get("SKYPILOT_JOBGROUP_NAME", "")
    try:
        topology = Topology.from_env(env) if inside else None
        if path is None and topology is not None:
            jobs = _from_environment({**env, **overrides}, topology)
        else:
            defaults = {} if path else {**_DEMO_ENV, "RUN_CONFIG": str(ROOT / _DEMO_ENV["RUN_CONFIG"])}
            found = spec.load(path or DEMO, {**defaults, **overrides}, {}, {})
            group = group or found.name
            for each in found.tasks:
                # In a pod the environment is what the task was launched with; in a local run the YAML's wins.
                own = {**each.env, **env, **overrides} if inside else {**env, **each.env}
                try:
                    jobs.append(_job(each, own))
                except ConfigError as error:
                    same = next((known for known in problems if str(known) == str(error)), error)
                    problems.setdefault(same, []).append(each.name)
    except ConfigError as error:
        problems[error] = []
    if task is not None and not problems and task not in (names := [job.name for job in jobs]):
        raise Usage(f"there is no task {task}; there are {', '.join(names)}")
    told = tuple(
        failed(f"settings of {', '.join(names)}" if names else "job group", error) for error, names in problems.items()
    )
    here = [job for job in jobs if (task is None and not inside) or job.name == task]
    wanted = [job for job in jobs if task is None or job.name == task or (inside and job.name in _ASKS.get(task, ()))]
    return Plan(group, tuple(wanted), tuple(here), topology, assumed, path is None and not inside, told)


def _job(task: spec.Task, env: Mapping[str, str]) -> Job:
    """A task with its configuration. Raises ConfigError."""
    file = env.get("RUN_CONFIG")
    if file and (task.workdir / file).exists():
        file = str(task.workdir / file)
    config = load([], {**env, "RUN_CONFIG": file} if file else env)
    return Job(task.name, config, env, task.num_nodes, task.gpus, task.workdir, task.setup or "", task.run)


def _from_environment(env: Mapping[str, str], topology: Topology) -> list[Job]:
    """The tasks of a running group without its YAML; their nodes are known under the local runner only."""
    config = load([], env)
    server = config.algorithm.needs_critic and config.critic.location == "server"
    names = [DATA, ROLLOUT, REWARD, REPLAY, *([CRITIC] if server else []), TRAINER]
    known = {name: sum(host.startswith(f"{name}-") for host in topology.local_hosts) for name in names}
    if topology.local_hosts:
        names = [name for name in names if known[name]]
    return [Job(name, config, env, max(1, known[name]), workdir=Path.cwd()) for name in names]
