"""Checks that the tasks of a job group fit each other: settings against GPUs and nodes, spot nodes against volumes.

SkyPilot checks none of this; it would show in a running pod. Part of `jobgroup/check.py`, which runs in SkyPilot's
environment, so this imports nothing that needs the project's own.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

_SHARED = ("MODEL_NAME", "NUM_EPOCHS", "BATCH_SIZE", "MAX_STEPS", "SEED", "RUN_CONFIG")
_OWN = ("RLHF_STATE_DIR", "RLHF_TRAINER__RUN_DIR")
_KEPT = {"ppo-trainer": ("RUN_DIR", "begins at step 0 again"), "critic-server": ("STATE_DIR", "ends the run")}
"""Tasks that must not lose their disk: the variable of its directory, and what else a preemption does."""


@dataclass(frozen=True)
class Placed:
    """The placement of one task."""

    name: str
    nodes: int
    gpus: int
    """GPUs of a node."""
    spot: bool
    env: Mapping[str, str]
    mounts: tuple[str, ...]
    """Paths of volumes and buckets."""
    uploading: tuple[str, ...]
    """Mounts of buckets in the mode MOUNT_CACHED, which upload after a file is closed."""
    run: str

    def setting(self, section: str, field: str) -> Any:
        """Returns a setting as the process finds it: from the environment, else from the file RUN_CONFIG, else None."""
        value = self.env.get(f"RLHF_{section}__{field}".upper())
        path = Path(self.env.get("RUN_CONFIG") or "/")
        if value is not None or not path.is_file():
            return value
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        return (content.get(section) or {}).get(field) if isinstance(content, dict) else None

    @property
    def engine_gpus(self) -> int:
        """GPUs of one engine."""
        return int(self.setting("rollout", "tensor_parallel_size") or 1)


def problems(tasks: Sequence[Placed]) -> Iterator[tuple[str, str]]:
    """Yields what cannot work, as (task, problem)."""
    for task in tasks:
        if task.name == "rollout-server" and task.setting("rollout", "engine") in (None, "sglang") and task.gpus:
            needed = f"an engine needs {task.engine_gpus} GPUs (rollout.tensor_parallel_size)"
            if task.engine_gpus > task.gpus:
                yield task.name, f"{needed}, and a node has {task.gpus}: raise the latter"
        if task.name == "ppo-trainer" and (size := int(task.setting("trainer", "shard_size") or 1)) > 1:
            ranks = task.nodes * max(1, task.gpus)
            if ranks % size:
                yield task.name, f"{ranks} processes cannot be divided into groups of {size} (trainer.shard_size)"
        if task.uploading and task.run.lstrip().startswith("exec "):
            waiting = f"after run SkyPilot waits until {task.uploading[0]} is uploaded"
            yield task.name, f"{waiting}, but `exec` leaves no shell that could: remove that word"
    first: dict[str, Placed] = {}
    for task in tasks:  # each task reads the whole configuration
        for name, value in task.env.items():
            if name in _SHARED or (name.startswith("RLHF_") and name not in _OWN):
                other = first.setdefault(name, task)
                if other.env[name] != value:
                    yield task.name, f"{name} is {value!r}, but {other.env[name]!r} in {other.name}: make them equal"


def warnings(tasks: Sequence[Placed]) -> Iterator[tuple[str, str]]:
    """Yields what works, but seldom as intended, as (task, warning)."""
    for task in tasks:
        if task.name == "rollout-server" and task.engine_gpus < task.gpus > 1:
            unused = f"a node has {task.gpus} GPUs, and its engine uses {task.engine_gpus}"
            yield task.name, f"{unused}: set rollout.tensor_parallel_size, or more nodes"
        variable, loss = _KEPT.get(task.name, ("", ""))
        folder = PurePosixPath(task.env.get(variable) or "/")
        if task.spot and variable and not any(folder.is_relative_to(mount) for mount in task.mounts):
            place = f"it is on spot nodes and {variable} is on no volume"
            yield task.name, f"{place}: a preemption takes what it has learnt and {loss}"
