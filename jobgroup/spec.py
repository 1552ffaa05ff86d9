"""Reads a job-group YAML as SkyPilot does, but refuses what SkyPilot would ignore or notice
late.
"""

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from common import Json
from common.errors import ConfigError, did_you_mean
from common.settings import config
from common.settings.explain import explained
from common.settings.sources import read_yaml_documents, yaml_problem

Env = Mapping[str, str]
"""Variables of an environment."""
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_M = TypeVar("_M", bound=BaseModel)
_NOTHING: Mapping[str, Any] = {}
OURS = re.compile(r"-m (trainer|services)\b")
"""Matches the command of a task whose process reads our settings."""
# Matches the command of a task whose callers know only its first node.
_ONE_NODE = re.compile(r"-m services\.(data|reward|replay)\b")


@dataclass(frozen=True)
class Task:
    """One task, which runs on each of its nodes."""

    name: str
    num_nodes: int
    workdir: Path
    setup: str | None
    run: str
    env: Env
    """`envs` and `secrets` with their overrides."""
    gpus: int
    """GPUs that one node requests."""
    max_restarts: int
    restart_codes: frozenset[int]
    """Exit statuses after which a restart is not counted."""
    primary: bool
    termination_delay_s: float
    ignored: tuple[str, ...]
    """Fields that only a cluster can provide (volumes, file mounts)."""
    on_volumes: tuple[str, ...]
    """Variables of the YAML that name a folder on a volume."""

    def without_volumes(self) -> "Task":
        """Returns the task for a machine that mounts no volumes: what would be on them goes to the
        default folders.
        """
        return replace(
            self,
            env={name: value for name, value in self.env.items() if name not in self.on_volumes},
        )

    def settings(self, env: Env) -> config.Config:
        """Returns the settings of the task's processes in the environment `env`. Raises
        ConfigError.

        RUN_CONFIG is relative to the task's folder, or else comes with the installed package.
        """
        file = self.workdir / env.get("RUN_CONFIG", "")
        return config.load([], {**env, "RUN_CONFIG": str(file)} if file.is_file() else env)


@dataclass(frozen=True)
class JobGroup:
    """A job group: tasks that run at once."""

    name: str
    tasks: tuple[Task, ...]

    def task(self, name: str, option: str) -> Task:
        """Returns the task of that name. Raises ConfigError that names `option` when there is
        none.
        """
        tasks = {task.name: task for task in self.tasks}
        if name in tasks:
            return tasks[name]
        raise ConfigError(
            f"there is no task {name} in {self.name}",
            field=option,
            value=name,
            remedy=f"{did_you_mean(name, [], tasks)} the tasks are {', '.join(tasks)}".strip(),
        )


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Header(_Document):
    name: str = Field(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", max_length=63)
    execution: Literal["parallel"]
    primary_tasks: list[str] = []
    termination_delay: str | int | dict[str, str | int] = 0
    inter_connection: bool = True


class _Recovery(_Document):
    strategy: Any = None
    max_restarts_on_errors: int = Field(0, ge=0)
    recover_on_exit_codes: list[int] = []

    @field_validator("recover_on_exit_codes", mode="before")
    @classmethod
    def _as_list(cls, codes: Any) -> Any:
        return codes if isinstance(codes, list) else [codes]


class _TaskDocument(_Document):
    name: str = Field(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", max_length=63)
    run: str = Field(min_length=1)
    setup: str | None = None
    num_nodes: int = Field(1, ge=1, le=250)
    workdir: str | None = None
    resources: Json = {}
    envs: dict[str | int, Any] = {}
    secrets: Json | list[str] = {}
    volumes: Json = {}
    file_mounts: Json = {}
    config: Json = {}


def load(
    path: Path,
    env: Env = _NOTHING,
    secrets: Env = _NOTHING,
    num_nodes: Mapping[str, int] = _NOTHING,
) -> JobGroup:
    """Reads a job group; `env`, `secrets` (both for every task) and `num_nodes` (by task) override
    the file.

    Raises ConfigError naming the field, its value and the remedy.
    """
    header, *documents = _documents(path)
    if "execution" not in header:
        raise ConfigError(
            "the header lacks `execution: parallel`: "
            "SkyPilot would run the tasks one after the other",
            field="execution",
            remedy="add it beside `name`",
        )
    # SkyPilot would set a misspelt variable, and the run would go on with the default.
    for name in env:
        known_variable(name, documents, "--env")
    head = _validated(_Header, header, "header")
    found = []
    for number, content in enumerate(documents, start=1):
        where = str(content.get("name", f"task {number}"))
        found.append(_validated(_TaskDocument, content, where))
    names = [task.name for task in found]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ConfigError(
                "two tasks have the same name", field="name", value=name, remedy="rename one"
            )

    tasks = []
    for document in found:
        own_env = _environment(document, env, secrets)
        nodes = num_nodes.get(document.name, document.num_nodes)
        if nodes > 1 and _ONE_NODE.search(document.run):
            raise ConfigError(
                "this task can only have one node: the others would never call a second one",
                field="--num-nodes" if document.name in num_nodes else "num_nodes",
                value=f"{document.name}={nodes}",
                remedy="leave it at 1; tasks of engines, episodes and training may have more",
            )
        tasks.append(_task(document, head, own_env, num_nodes=nodes, overrides=env))
    group = JobGroup(head.name, tuple(tasks))
    delays = head.termination_delay if isinstance(head.termination_delay, dict) else {}
    mentioned = {
        "--num-nodes": num_nodes,
        "primary_tasks": head.primary_tasks,
        "termination_delay": [name for name in delays if name != "default"],
    }
    for option, tasks_named in mentioned.items():
        for name in tasks_named:
            group.task(name, option)
    return group


def seconds(text: str | int, field: str) -> float:
    """Parses `10s`, `1m`, `2h`, `1d`, `1w` or a number of seconds, as SkyPilot does. Raises
    ConfigError.
    """
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)([smhdw]?)", str(text).lower())
    if match is None:
        raise ConfigError(
            "this is not a duration", field=field, value=text, remedy="write 10s, 1m or 2h"
        )
    return math.ceil(float(match[1]) * _SECONDS[match[2] or "s"])


def variable(name: str, field: str) -> str:
    """Returns `name` if it can name an environment variable, else raises ConfigError."""
    if not _VARIABLE.fullmatch(name):
        raise ConfigError(
            "this is not the name of a variable",
            field=field,
            value=name,
            remedy="use letters, digits and _, but no digit first",
        )
    return name


def known_variable(name: str, documents: Iterable[Mapping[str, Any]], option: str) -> None:
    """Raises ConfigError for a variable that no task declares and that looks like a misspelt
    setting.
    """
    hint = config.misspelt(name)
    if hint and not any(name in (document.get("envs") or ()) for document in documents):
        raise ConfigError(
            "there is no such variable", field=option, value=name, remedy=f"did you mean {hint}?"
        )


def assignments(texts: Iterable[str], option: str) -> dict[str, str]:
    """Parses every `K=V`, or `K` for a variable of this environment, of an option that may be
    repeated; the last one of a name counts. Raises ConfigError.
    """
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        variable(name, option)
        if not equals and name not in os.environ:
            raise ConfigError(
                f"{name} is not set here",
                field=option,
                value=text,
                remedy=f"write {option} {name}=VALUE",
            )
        found[name] = value if equals else os.environ[name]
    return found


def no_job_group(path: Path, message: str) -> ConfigError:
    """Returns the error for a file that is no YAML of a job group."""
    return ConfigError(
        message,
        field="YAML",
        value=str(path),
        remedy="name the YAML of a job group, such as jobgroup/rlhf-math-jobgroup.yaml",
    )


def _documents(path: Path) -> list[Json]:
    try:
        documents = read_yaml_documents(path.read_text(encoding="utf-8"))
    # ValueError: an invalid date
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise no_job_group(path, f"the job group cannot be read: {yaml_problem(error)}") from None
    documents = [document for document in documents if document is not None]
    if not all(isinstance(document, dict) for document in documents):
        raise no_job_group(path, "every document of a job group must be a mapping")
    if len(documents) < 2:
        raise no_job_group(
            path, "a job group needs a header and at least one task, separated by ---"
        )
    return documents


def _validated(model: type[_M], content: Any, where: str) -> _M:
    """Returns a part of a YAML as an object of `model`; `where` names that part in errors. Raises
    ConfigError.
    """
    if isinstance(content, dict):
        content = {key: value for key, value in content.items() if value is not None}
    try:
        return model.model_validate(content)
    except ValidationError as error:
        # A misspelt field comes before the field that it leaves missing.
        first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")

    field = ".".join([where, *map(str, first["loc"])])
    value = None if first["type"] == "missing" else first["input"]
    if first["type"] == "extra_forbidden":
        message = "there is no such field here"
        hint = did_you_mean(str(first["loc"][-1]), [], model.model_fields)
        remedy = f"{hint} the known fields are {', '.join(model.model_fields)}".strip()
    else:
        wrong = explained(first)
        message = wrong.reason
        remedy = wrong.remedy
    raise ConfigError(message, field=field, value=value, remedy=remedy)


def _task(
    task: _TaskDocument,
    head: _Header,
    env: Env,
    *,
    num_nodes: int,
    overrides: Env,
) -> Task:
    delay = head.termination_delay
    if isinstance(delay, dict):
        delay = delay.get(task.name, delay.get("default", 0))
    recovery = task.resources.get("job_recovery")
    if not isinstance(recovery, dict):  # only a strategy's name
        recovery = {}
    restarts = _validated(_Recovery, recovery, f"{task.name}.job_recovery")
    return Task(
        name=task.name,
        num_nodes=num_nodes,
        workdir=_workdir(task),
        setup=task.setup,
        run=task.run,
        env=env,
        gpus=_gpus(task),
        max_restarts=restarts.max_restarts_on_errors,
        restart_codes=frozenset(restarts.recover_on_exit_codes),
        primary=not head.primary_tasks or task.name in head.primary_tasks,
        termination_delay_s=seconds(delay, "termination_delay"),
        ignored=tuple(key for key in ("volumes", "file_mounts") if getattr(task, key)),
        on_volumes=_on_volumes(task, overrides),
    )


def _on_volumes(task: _TaskDocument, overrides: Env) -> tuple[str, ...]:
    """Returns the variables whose value in the YAML is a folder on one of the task's volumes."""
    names = []
    for key, value in task.envs.items():
        folder = PurePosixPath(str(value))
        if str(key) not in overrides and any(map(folder.is_relative_to, task.volumes)):
            names.append(str(key))
    return tuple(names)


def _environment(task: _TaskDocument, env: Env, secrets: Env) -> dict[str, str]:
    """Returns the variables of a task, literally. An empty secret comes from `--secret`, `--env` or
    this environment. Raises ConfigError, also for a misspelt setting of a task of ours.
    """
    # A misspelt one would be set, and the default used.
    for key in task.envs if OURS.search(task.run) else ():
        known_variable(str(key), [], f"{task.name}.envs")
    values: Json = {str(key): value for key, value in task.envs.items()} | dict(env)
    declared = task.secrets if isinstance(task.secrets, dict) else dict.fromkeys(task.secrets)
    given = {**env, **secrets}
    for key, default in declared.items():
        name = key.removeprefix("secrets:")
        values[name] = given.get(name, default or os.environ.get(name, default))
    # `--secret` may also name a variable that the task does not declare.
    values |= secrets
    for name, value in values.items():
        variable(name, f"{task.name}.envs")
        if value is None:
            raise ConfigError(
                f"{name} has no value",
                field=f"{task.name}.envs",
                value=name,
                remedy=f"give it with --env {name}=… or --secret",
            )
    return {name: str(value) for name, value in values.items()}


def _workdir(task: _TaskDocument) -> Path:
    workdir = Path(task.workdir or ".")
    try:
        workdir = workdir.expanduser().resolve()
        found = workdir.is_dir()
    except (OSError, ValueError, RuntimeError):  # an invalid path, or the home of an unknown user
        found = False
    if not found:
        raise ConfigError(
            "this folder does not exist",
            field=f"{task.name}.workdir",
            value=str(workdir),
            remedy="it is relative to the current directory: "
            "run the command in the root of the project",
        )
    return workdir


def _gpus(task: _TaskDocument) -> int:
    """Returns the GPUs that a node requests: `H100:2` or `{H100: 2}`.

    Of several alternatives (`any_of`, `ordered`, a list, a mapping of several) the first one
    counts.
    """
    wanted = task.resources.get("accelerators")
    alternatives = task.resources.get("any_of") or task.resources.get("ordered")
    if isinstance(alternatives, list) and alternatives and isinstance(alternatives[0], dict):
        wanted = alternatives[0].get("accelerators", wanted)
    if isinstance(wanted, list) and wanted:
        wanted = wanted[0]
    if isinstance(wanted, dict) and wanted:
        name, count = next(iter(wanted.items()))
        wanted = f"{name}:{count}"
    if not wanted:
        return 0
    match = re.fullmatch(r"[^:]+(?::([0-9]{1,6}(?:\.[0-9]{1,6})?|None))?", str(wanted))
    if match is None:
        raise ConfigError(
            "these accelerators cannot be read",
            field=f"{task.name}.accelerators",
            value=wanted,
            remedy="write, for example, H100:1",
        )
    return 1 if match[1] in (None, "None") else math.ceil(float(match[1]))
