"""Folders that a run writes: whether they can be written and synced, their file system, and free
space.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from common.errors import ConfigError
from common.models.memory import ModelShape
from common.process.topology import CRITIC, DATA, ENVIRONMENT, REPLAY, ROLLOUT, TRAINER
from jobgroup.doctor.availability import Hub, models
from jobgroup.doctor.plan import Plan, PlannedTask
from jobgroup.doctor.report import Result, expect, fits, gb

_STATE = 12
"""Bytes of a parameter in a checkpoint: float32 weights and AdamW's two moments."""
_VERSIONS, _PULLED = 3, 5
"""Weight versions on disk at the trainer (two kept, one arriving) and on a rollout node (two more
in use or on their way)."""
_TOKEN, _RECORDED = 8, 12
"""Bytes of a stored token (id, logprob) and of a token the trainer records (also its own
logprob)."""
_LOGS = 200 << 20
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "lustre", "glusterfs", "virtiofs")


class Need(NamedTuple):
    """Content of a folder, with its bytes."""

    purpose: str
    folder: Path
    what: str
    size: int
    sqlite: bool = False


def needs(plan: Plan) -> Iterator[Need]:
    """Estimates what the tasks here write."""
    for job in plan.here:
        state = job.path(job.config.state_dir)
        yield Need(
            "STATE_DIR",
            state,
            f"{job.name}'s logs",
            _LOGS * job.num_nodes,
            sqlite=job.name in (DATA, REPLAY),
        )
        run = "RUN_DIR", job.path(job.config.trainer.run_dir or Path("runs") / plan.group)
        for what, size in _sizes(job, _shape(plan, job.config.model.name)).items():
            yield Need(*(run if job.name == TRAINER else ("STATE_DIR", state)), what, size)
    for name, job in models(plan).items():
        shape, hub = _shape(plan, name), Hub(job.env)
        whole = job.name != ENVIRONMENT  # which loads only the tokenizer
        if whole and shape and not job.path(name).is_dir() and hub.cached("model", name) is None:
            yield Need("cache of the hub", hub.cache, name, 2 * shape.parameters)
    yield Need("temporary files", Path(tempfile.gettempdir()), "temporary files", _LOGS)


def _shape(plan: Plan, name: str) -> ModelShape | None:
    """Returns None without a config.json, or for an architecture that the memory check reports as
    unknown.
    """
    with suppress(KeyError, ConfigError):
        return ModelShape.of(plan.shapes[name])
    return None


def _sizes(job: PlannedTask, shape: ModelShape | None) -> dict[str, int]:
    trainer, lora, sampling, algorithm = (
        job.config.trainer,
        job.config.lora,
        job.config.sampling,
        job.config.algorithm,
    )
    parameters = trained = shape.parameters if shape else 0
    if job.name == REPLAY:
        return {"full replay store": job.config.replay.capacity * sampling.max_new_tokens * _TOKEN}
    if job.name == CRITIC:
        return {"2 checkpoints of the critic": 2 * _STATE * parameters}
    if job.name == ROLLOUT and not lora.publishes_adapter:
        return {f"{_PULLED} pulled versions": _PULLED * job.num_nodes * 2 * parameters}
    if job.name != TRAINER:
        return {}
    if shape and lora.rank:
        trained = shape.lora_parameters(lora.rank, lora.target_modules)
    kept = trainer.keep_checkpoints + 2  # the best one, and the one being written
    with_critic = 2 if algorithm.needs_critic and job.config.critic.location == "trainer" else 1
    width = 2 if job.config.model.dtype == "bfloat16" and job.gpus else 4
    tokens = (
        trainer.batch_size
        * sampling.group_size
        * sampling.max_new_tokens
        * (trainer.max_steps or 1 << 40)
    )
    return {
        f"{kept} checkpoints": kept * _STATE * trained * with_critic,
        f"{_VERSIONS} weight versions": _VERSIONS
        * width
        * (trained if lora.publishes_adapter else parameters),
        "recorded groups": min(trainer.keep_groups_mb << 20, tokens * _RECORDED),
    }


def check_disk(plan: Plan) -> Iterator[Result]:
    """Yields a line per folder, then one per disk; for a cluster only what volumes need."""
    wanted = list(needs(plan))
    folders = {
        need.folder: [each for each in wanted if each.folder == need.folder] for need in wanted
    }
    for folder, group in folders.items():
        purpose = ", ".join(dict.fromkeys(need.purpose for need in group))
        if plan.assumed_gb is None:
            yield check_folder(folder, purpose, any(need.sqlite for need in group))
        elif sum(need.size for need in group) > 1e9:  # less is not worth a line
            yield Result(f"disk of {purpose} {folder}", "ok", f"{_total(group)} needed there")
    if plan.assumed_gb is None:
        yield from check_room(wanted, running=plan.topology is not None)


def check_folder(folder: Path, purpose: str, sqlite: bool = False) -> Result:
    """Writes, syncs and removes a file in the folder, or where the folder will be created."""
    title, place, start = f"{purpose} {folder}", _existing(folder), time.monotonic()
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".doctor-") as file:
            file.write(bytes(1 << 16))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        fix = (
            "set HF_HOME to another folder"
            if "cache" in purpose
            else "name another folder, or mount a volume there"
        )
        return Result(title, "fail", f"cannot be written: {error.strerror or error} ({place})", fix)
    seconds, kind = time.monotonic() - start, file_system(place)
    problem = fix = ""
    if sqlite and (kind in _NETWORK or kind.startswith("fuse")):
        problem = ": SQLite's locks and log need one machine's own file system"
        fix = "put STATE_DIR of data-server and replay-buffer on a block volume"
    elif sqlite and kind in ("overlay", "tmpfs"):
        problem = ": it is gone with its container"
        fix = "mount a block volume if the prompts' cursor and the replay store must outlive the container"
    elif seconds > 1:
        problem, fix = ": every stored group waits for a sync", "use a faster disk"
    return expect(
        title,
        not problem,
        f"written and synced in {1000 * seconds:.0f} ms, {kind}{problem}",
        fix,
        "warn",
    )


def check_room(wanted: Sequence[Need], running: bool = False) -> Iterator[Result]:
    """Compares the space needed on each disk with its free space. A running group has already
    written some of it.
    """
    disks: dict[int, list[Need]] = {}
    for need in wanted:
        disks.setdefault(_existing(need.folder).stat().st_dev, []).append(need)
    for group in disks.values():
        left, size = (
            shutil.disk_usage(_existing(group[0].folder)).free,
            sum(need.size for need in group),
        )
        title = f"disk of {', '.join(dict.fromkeys(each.purpose for each in group))}"
        fix = "free space, use a larger disk, or lower trainer.keep_checkpoints, trainer.keep_groups_mb or replay.capacity"
        found = f"{gb(left)} free, {_total(group)} needed"
        yield (
            expect(title, size < left, found, fix, "warn")
            if running
            else fits(title, found, size, left, fix)
        )


def _total(group: Sequence[Need]) -> str:
    """Formats the sum with its largest parts."""
    largest = sorted(group, key=lambda need: -need.size)[:4]
    return f"{gb(sum(need.size for need in group))} ({', '.join(f'{need.what} {gb(need.size)}' for need in largest)})"


def _existing(path: Path) -> Path:
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())


def file_system(path: Path, mounts: Sequence[Any] = ()) -> str:
    """Returns the type of the file system of `path` (`ext4`, `nfs4`, `fuse.rclone`), from `mounts`
    as psutil lists them.
    """
    mounts = mounts or psutil.disk_partitions(all=True)
    holding = [each for each in mounts if path.resolve().is_relative_to(each.mountpoint)]
    return (
        max(reversed(holding), key=lambda each: len(Path(each.mountpoint).parts)).fstype
        if holding
        else "unknown"
    )
