"""Do the tasks of a job group fit each other? Settings against GPUs and nodes, spot nodes and buckets against what is kept.

SkyPilot knows nothing of this; it would show in a running pod. Part of `jobgroup/check.py`, which runs in SkyPilot's
environment: it imports nothing that needs the project's own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

_SHARED = ("MODEL_NAME", "NUM_EPOCHS", "BATCH_SIZE", "MAX_STEPS", "SEED", "RUN_CONFIG")
_OWN = ("RLHF_STATE_DIR", "RLHF_TRAINER__RUN_DIR")
_KEPT = {"ppo-trainer": ("RUN_DIR", "begins at step 0 again"), "critic-server": ("STATE_DIR", "ends the run")}
"""Tasks that must not lose their disk: where it is, and what else a preemption does."""


@dataclass(frozen=True)
class Placed:
    """One task, as far as it matters here."""

    name: str
    nodes: int
    gpus: int
    """Of a node."""
    spot: bool
    env: Mapping[str, str]
    mounts: tuple[str, ...]
    """Paths of volumes and buckets."""
    uploading: tuple[str, ...]
    """Those of buckets in the mode MOUNT_CACHED, which upload after a file is closed."""
    run: str

    def setting(self, section: str, field: str) -> Any:
        """As the process would find it: in the environment, else in the file RUN_CONFIG; None when it is in neither."""
        value = self.env.get(f"RLHF_{section}__{field}".upper())
        path = Path(self.env.get("RUN_CONFIG") or "/")
        if value is not None or not path.is_file():
            return value
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        return (content.get(section) or {}).get(field) if isinstance(content, dict) else None


def problems(tasks: Sequence[Placed]) -> list[tuple[str, str]]:
    """What cannot work, as (task, problem)."""
    found = []
    for task in tasks:
        if task.name == "rollout-server" and task.setting("rollout", "engine") in (None, "sglang") and task.gpus:
            size = int(task.setting("rollout", "tensor_parallel_size") or 1)
            if size > task.gpus:
                told = (
                    f"an engine needs {size} GPUs (rollout.tensor_parallel_size), and a node has {task.gpus}: raise the latter"
                )
                found.append((task.name, told))
        if task.name == "ppo-trainer" and (size := int(task.setting("trainer", "shard_size") or 1)) > 1:
            ranks = task.nodes * max(1, task.gpus)
            if ranks % size:
                found.append((task.name, f"{ranks} processes cannot be divided into groups of {size} (trainer.shard_size)"))
        if task.uploading and task.run.lstrip().startswith("exec "):
            path = task.uploading[0]
            told = f"after run SkyPilot waits until {path} is uploaded, but `exec` leaves no shell that could: remove that word"
            found.append((task.name, told))
    return found + _differing(tasks)


def _differing(tasks: Sequence[Placed]) -> list[tuple[str, str]]:
    """Settings that two tasks have differently: each task reads the whole configuration."""
    first: dict[str, Placed] = {}
    found = []
    for task in tasks:
        for name, value in task.env.items():
            if name in _SHARED or (name.startswith("RLHF_") and name not in _OWN):
                other = first.setdefault(name, task)
                if other.env[name] != value:
                    found.append((task.name, f"{name} is {value!r}, but {other.env[name]!r} in {other.name}: make them equal"))
    return found


def warnings(tasks: Sequence[Placed]) -> list[tuple[str, str]]:
    """What works, but seldom as it was meant, as (task, warning)."""
    found = []
    for task in tasks:
        if task.name == "rollout-server" and task.gpus > 1:
            size = int(task.setting("rollout", "tensor_parallel_size") or 1)
            if size < task.gpus:
                told = (
                    f"a node has {task.gpus} GPUs, and its engine uses {size}: set rollout.tensor_parallel_size, or more nodes"
                )
                found.append((task.name, told))
        variable, loss = _KEPT.get(task.name, ("", ""))
        folder = PurePosixPath(task.env.get(variable) or "/")
        if task.spot and variable and not any(folder.is_relative_to(mount) for mount in task.mounts):
            told = f"it is on spot nodes and {variable} is on no volume: a preemption takes what it has learnt and {loss}"
            found.append((task.name, told))
    return found
