"""Folders that a run writes: can they be written and synced, on what kind of file system, and is there room."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.memory import ModelShape
from common.topology import CRITIC, DATA, REPLAY, ROLLOUT, TRAINER
from jobgroup.doctor.hub import Hub, models
from jobgroup.doctor.plan import Job, Plan
from jobgroup.doctor.result import Result, fail, gb, ok, warn

_MASTER = 4
_STATE = 12
"""Bytes a parameter of a checkpoint: float32 weights and AdamW's two moments."""
_PUBLISHED, _PULLED = 3, 4
"""Weight versions on disk at the trainer (trainer/weights/) and on a rollout node (services/rollout/weights/): two kept,
one of an engine that starts, one that arrives."""
_TOKEN = 8
"""Bytes of a stored token: its id and its log-probability."""
_RECORDED = 12
"""Of a token that the trainer records: the same, and its own log-probability."""
_LOGS = 200 << 20
_SPARE = 1.25
_SPOKEN_OF = 1 << 30
"""Smaller needs of a cluster's disks are not told."""
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "lustre", "glusterfs", "virtiofs")


@dataclass
class Folder:
    """A folder that tasks write."""

    path: Path
    purpose: str
    needs: list[tuple[str, int]] = field(default_factory=list)
    """What comes there, with its bytes."""
    sqlite: bool = False


def folders(plan: Plan, shapes: Mapping[str, Mapping[str, Any]]) -> list[Folder]:
    """What the tasks here write, with an estimate of how much."""
    found: dict[Path, Folder] = {}

    def folder(path: Path, purpose: str) -> Folder:
        folder = found.setdefault(path, Folder(path, purpose))
        if purpose not in folder.purpose:
            folder.purpose += f", {purpose}"
        return folder

    for job in plan.here:
        state = folder(job.path(job.config.state_dir), "STATE_DIR")
        state.sqlite |= job.name in (DATA, REPLAY)
        state.needs += [(f"{job.name}'s logs", _LOGS * job.nodes), *_stored(job, shapes.get(job.config.model.name))]
        if job.name == TRAINER:
            run = folder(job.path(job.config.trainer.run_dir or Path("runs") / plan.group), "RUN_DIR")
            run.needs += _run(job, shapes.get(job.config.model.name))
    for name, job in models(plan).items():
        hub, shape = Hub(job.env), shapes.get(name)
        if shape is not None and not job.path(name).is_dir() and hub.cached("model", name) is None:
            folder(hub.cache, "cache of the hub").needs.append((name, 2 * _parameters(shape)))
    folder(Path(tempfile.gettempdir()), "temporary files").needs.append(("temporary files", _LOGS))
    return list(found.values())


def _parameters(shape: Mapping[str, Any]) -> int:
    try:
        return ModelShape.of(shape).parameters
    except ConfigError:
        return 0  # the line about memory says that this architecture is not known


def _run(job: Job, shape: Mapping[str, Any] | None) -> list[tuple[str, int]]:
    """RUN_DIR of a trainer: checkpoints that stay and the one that is written, weight versions, groups."""
    trainer, lora, sampling = job.config.trainer, job.config.lora, job.config.sampling
    kept = trainer.keep_checkpoints + 2  # the best, and the one that is written
    parameters = trained = _parameters(shape) if shape else 0
    if lora.rank and shape and parameters:
        trained = ModelShape.of(shape).lora_parameters(lora.rank, lora.target_modules)
    with_critic = 2 if job.config.algorithm.needs_critic and job.config.critic.location == "trainer" else 1
    published = trained if lora.publishes_adapter else parameters
    tokens = trainer.batch_size * sampling.group_size * sampling.max_new_tokens
    steps = trainer.max_steps or 1 << 40
    width = 2 if job.config.model.dtype == "bfloat16" and job.gpus else _MASTER
    return [
        (f"{kept} checkpoints", kept * _STATE * trained * with_critic),
        (f"{_PUBLISHED} weight versions", _PUBLISHED * width * published),
        ("recorded groups", min(trainer.keep_groups_mb << 20, steps * tokens * _RECORDED)),
    ]


def _stored(job: Job, shape: Mapping[str, Any] | None) -> list[tuple[str, int]]:
    """STATE_DIR of a service."""
    config = job.config
    if job.name == REPLAY:
        return [("full replay store", config.replay.capacity * config.sampling.max_new_tokens * _TOKEN)]
    if job.name == CRITIC and shape:
        return [("2 checkpoints of the critic", 2 * _STATE * _parameters(shape))]
    if job.name == ROLLOUT and shape and not config.lora.publishes_adapter:
        return [(f"{_PULLED + 1} pulled versions", (_PULLED + 1) * job.nodes * 2 * _parameters(shape))]
    return []


def check_disk(plan: Plan, shapes: Mapping[str, Mapping[str, Any]]) -> Iterable[Result]:
    """Every folder, then a line per disk; for a cluster only what volumes need."""
    found = folders(plan, shapes)
    if plan.assumed is not None:
        for folder in found:
            if sum(size for _, size in folder.needs) > _SPOKEN_OF:
                yield ok(f"disk of {folder.purpose} {folder.path}", f"{_needs([folder])} needed there")
        return
    for folder in found:
        yield from check_folder(folder)
    yield from check_room(found, running=plan.topology is not None)


def check_folder(folder: Folder) -> Iterable[Result]:
    """Writes, syncs and removes a file where the folder is or will be."""
    title, place = f"{folder.purpose} {folder.path}", existing(folder.path)
    other = "name another folder, or mount a volume there" if "cache" not in folder.purpose else "set HF_HOME to another folder"
    try:
        seconds = _written(place)
    except OSError as error:
        yield fail(title, f"cannot be written: {error.strerror or error} ({place})", other)
        return
    kind = file_system(place)
    text = f"written and synced in {1000 * seconds:.0f} ms, {kind}"
    if folder.sqlite and (kind in _NETWORK or kind.startswith("fuse")):
        yield warn(
            title,
            f"{text}: SQLite's locks and log need one machine's own file system",
            "put STATE_DIR of data-server and replay-buffer on a block volume",
        )
    elif folder.sqlite and kind in ("overlay", "tmpfs"):
        yield warn(
            title,
            f"{text}: it is gone with its container",
            "mount a block volume, if prompts' cursor and replay store shall outlive it",
        )
    elif seconds > 1:
        yield warn(title, f"{text}: every stored group waits for a sync", "take a faster disk")
    else:
        yield ok(title, text)


def _written(place: Path) -> float:
    """Seconds that a file of 64 kB takes until it is on the disk. Raises OSError."""
    if not os.access(place, os.W_OK | os.X_OK):
        raise PermissionError(13, "no permission")
    start = time.monotonic()
    with tempfile.NamedTemporaryFile(dir=place, prefix=".doctor-") as file:
        file.write(bytes(1 << 16))
        file.flush()
        os.fsync(file.fileno())
    return time.monotonic() - start


def check_room(wanted: list[Folder], running: bool = False) -> Iterable[Result]:
    """A line per disk: what all folders on it need against what is free. A group that runs has written some of it already."""
    disks: dict[int, list[Folder]] = {}
    for folder in wanted:
        disks.setdefault(existing(folder.path).stat().st_dev, []).append(folder)
    for group in disks.values():
        needed = sum(size for folder in group for _, size in folder.needs)
        place = existing(group[0].path)
        left = shutil.disk_usage(place).free
        text = f"{gb(left)} free, {_needs(group)} needed"
        title = f"disk of {', '.join(dict.fromkeys(each.purpose for each in group))}"
        lower = "trainer.keep_checkpoints, trainer.keep_groups_mb or replay.capacity"
        mend = f"free some, name folders on a larger disk, or lower {lower}"
        if needed > left and not running:
            yield fail(title, text, mend)
        else:
            yield warn(title, text, mend) if needed * _SPARE > left else ok(title, text)


def _needs(group: list[Folder]) -> str:
    """The sum, and the largest parts of it."""
    parts = sorted((part for folder in group for part in folder.needs), key=lambda part: -part[1])
    return f"{gb(sum(size for _, size in parts))} ({', '.join(f'{what} {gb(size)}' for what, size in parts[:4])})"


def existing(path: Path) -> Path:
    """The folder itself, or the nearest above it that is there."""
    path = path.absolute()
    return next(each for each in (path, *path.parents) if each.exists())


def file_system(path: Path, table: Path = Path("/proc/self/mountinfo")) -> str:
    """Kind of the file system that holds `path` (`ext4`, `nfs4`, `fuse.rclone`); "unknown" where the system does not tell."""
    best, kind = -1, "unknown"
    for line in table.read_text().splitlines() if table.is_file() else []:
        before, _, after = line.partition(" - ")
        mount = Path(before.split()[4].encode().decode("unicode_escape"))
        if path.resolve().is_relative_to(mount) and len(mount.parts) >= best:
            best, kind = len(mount.parts), after.split()[0]
    return kind
