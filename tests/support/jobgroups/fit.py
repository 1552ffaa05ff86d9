"""Checks that the tasks of a job group fit each other: settings against GPUs and nodes, spot nodes
against volumes.

SkyPilot checks none of this, so mistakes would show only in a running pod. Part of
`check.py`, which runs in SkyPilot's environment, so this imports nothing that needs the
project's.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath

from common.errors import ConfigError
from common.process.topology import DATA, ENVIRONMENT, REPLAY, REWARD, ROLLOUT, TRAINER
from common.settings.config import Config, load

_SHARED = ("MODEL_NAME", "NUM_EPOCHS", "BATCH_SIZE", "MAX_STEPS", "SEED", "RUN_CONFIG")
_OWN = ("RLHF_STATE_DIR", "RLHF_TRAINER__RUN_DIR")
_KEPT = {TRAINER: ("RUN_DIR", "begins at step 0 again")}
"""Tasks that must not lose their disk: the variable naming its directory, and the other effect of a
preemption."""


@dataclass
class Placed:
    """The placement of one task."""

    name: str
    nodes: int
    gpus: tuple[int, ...]
    """GPUs of a node, in each of the alternatives that SkyPilot chooses from."""
    spot: bool
    env: Mapping[str, str]
    mounts: tuple[str, ...]
    """Paths of volumes and buckets."""
    uploading: tuple[str, ...]
    """Mounts of buckets in the mode MOUNT_CACHED, which upload after a file is closed."""
    run: str

    @cached_property
    def config(self) -> Config | ConfigError:
        """The settings of its processes, or the error in them."""
        try:
            return load([], self.env)
        except ConfigError as error:
            return error


def problems(tasks: Sequence[Placed]) -> Iterator[tuple[str, str]]:
    """Yields what cannot work, as (task, problem)."""
    wrong: dict[str, list[str]] = {}
    for task in tasks:
        if isinstance(task.config, ConfigError):
            wrong.setdefault(str(task.config), []).append(task.name)
        else:
            for problem in _too_few_gpus(task, task.config):
                yield task.name, problem
        if task.uploading and task.run.lstrip().startswith("exec "):
            waiting = f"after run SkyPilot waits until {task.uploading[0]} is uploaded"
            remedy = "but `exec` leaves no shell that could wait: remove `exec`"
            yield task.name, f"{waiting}, {remedy}"
    for problem, names in wrong.items():
        yield ", ".join(names), problem
    yield from _unequal(tasks)


def _too_few_gpus(task: Placed, config: Config) -> Iterator[str]:
    if task.name == ROLLOUT and config.rollout.engine == "sglang":
        yield from _engines_fit(task, config)
    groups = {
        "parallel.shard_size": config.parallel.shard_size or 1,
        "parallel.context_size": config.parallel.context_size,
    }
    experts = config.parallel.expert_size
    of_copy = config.parallel.shard_size
    if of_copy is None:
        groups["parallel.expert_size"] = experts
    elif task.name == TRAINER and of_copy % experts:
        yield (
            f"the {of_copy} processes of a copy (parallel.shard_size) cannot be divided into groups "
            f"of {experts} (parallel.expert_size)"
        )
    for setting, size in groups.items():
        for gpus in task.gpus if task.name == TRAINER else ():
            ranks = task.nodes * max(1, gpus)
            if ranks % size:
                yield f"{ranks} processes cannot be divided into groups of {size} ({setting})"


def _engines_fit(task: Placed, config: Config) -> Iterator[str]:
    """Yields what keeps the engines of SGLang from fitting the nodes."""
    rollout = config.rollout
    size = rollout.nodes_per_engine
    if task.nodes % size:
        yield (
            f"{task.nodes} nodes cannot be divided into engines of {size} "
            f"(rollout.nodes_per_engine): set num_nodes to a multiple of {size}"
        )
    needed = rollout.gpus_per_node
    told = f"an engine needs {needed} GPUs (rollout.tensor_parallel_size)"
    fix = "request more GPUs per node, or set rollout.nodes_per_engine"
    if size > 1:
        told = f"an engine needs {needed} GPUs on each of its {size} nodes"
        fix = "request more GPUs per node, or raise rollout.nodes_per_engine"
    for gpus in task.gpus:
        if needed > gpus > 0:
            yield f"{told}, but a node has {gpus}: {fix}"


def _unequal(tasks: Sequence[Placed]) -> Iterator[tuple[str, str]]:
    """Yields variables that differ between tasks; each task reads the whole configuration."""
    first: dict[str, Placed] = {}
    for task in tasks:
        own = [name for name in task.env if name.startswith("RLHF_") and name not in _OWN]
        for name in (*_SHARED, *own):
            value = task.env.get(name, "")  # empty: as if it were not there
            other = first.setdefault(name, task)
            elsewhere = other.env.get(name, "")
            if elsewhere != value:
                told = f"{name} is {value!r}, but {elsewhere!r} in {other.name}"
                yield task.name, f"{told}: make them equal"


def missing(tasks: Sequence[Placed]) -> Iterator[tuple[str, str]]:
    """Yields missing tasks the trainer would wait for forever, as (task, problem)."""
    there = {task.name: task for task in tasks}
    if TRAINER not in there:
        return
    config = there[TRAINER].config
    needed = {DATA, ROLLOUT, REWARD, REPLAY}
    if isinstance(config, Config) and config.environment.name:
        needed.add(ENVIRONMENT)
    for name in sorted(needed - there.keys()):
        yield TRAINER, f"it needs the task {name}, but the tasks are {', '.join(there)}"


def warnings(tasks: Sequence[Placed]) -> Iterator[tuple[str, str]]:
    """Yields what works, but rarely as intended, as (task, warning)."""
    for task in tasks:
        if task.name == ROLLOUT and isinstance(task.config, Config):
            used = task.config.rollout.gpus_per_node
            fix = "raise rollout.tensor_parallel_size, or use more nodes with fewer GPUs"
            for gpus in task.gpus:
                if used < gpus > 1:
                    yield task.name, f"a node has {gpus} GPUs, and its engine uses {used}: {fix}"
        if task.spot and task.name in _KEPT:
            variable, loss = _KEPT[task.name]
            folder = PurePosixPath(task.env.get(variable) or "/")
            if not any(folder.is_relative_to(mount) for mount in task.mounts):
                place = f"it is on spot nodes and {variable} is not on a volume"
                yield task.name, f"{place}: a preemption loses what it has learnt and {loss}"
