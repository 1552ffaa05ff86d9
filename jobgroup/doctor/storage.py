"""Folders that a run writes: whether they can be written and synced, their file system, and free
space.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from common.errors import ConfigError
from common.models.memory import ModelShape, state_bytes
from common.process.topology import DATA, REPLAY, ROLLOUT, TRAINER
from jobgroup.doctor.plan import Plan, PlannedTask
from jobgroup.doctor.report import Result, Results, expect, fits, gb

# Weight versions on disk at the trainer: two kept, one arriving.
_VERSIONS = 3
# Weight versions on disk on a rollout node: two more in use or on their way.
_PULLED = 5
# Bytes of a stored token: id, logprob.
_TOKEN = 8
# Bytes of a token that the trainer records, also with its own logprob.
_RECORDED = 12
_LOGS = 200 << 20
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "lustre", "glusterfs", "virtiofs")


class Need(NamedTuple):
    """Content of a folder, with its bytes."""

    folder: Path
    what: str
    size: int


def needs(plan: Plan) -> Iterator[Need]:
    """Estimates how much the tasks of this machine write to each folder."""
    for job in plan.here:
        folder = job.path(job.config.state_dir)
        yield Need(folder, f"{job.name}'s logs", _LOGS * job.num_nodes)
        shape = None
        # Without a config.json, or for an architecture that the memory check reports as unknown.
        with suppress(KeyError, ConfigError):
            shape = ModelShape.of(plan.shapes[job.config.model.name])
        parameters = shape.parameters if shape else 0

        adapter_only = job.config.lora.publishes_adapter
        if job.name == REPLAY:
            tokens = job.config.replay.capacity * job.config.sampling.max_new_tokens
            yield Need(folder, "full replay store", tokens * _TOKEN)
        elif job.name == ROLLOUT and not adapter_only:
            yield Need(
                folder, f"{_PULLED} pulled versions", _PULLED * job.num_nodes * 2 * parameters
            )
        elif job.name == TRAINER:
            if shape and job.config.trainer.routing_replay:
                # Of all answers that have a slot; a number above 255 takes two bytes.
                of_token = shape.layers * shape.experts_per_token * (1 + shape.experts // 257)
                tokens = (job.config.trainer.max_staleness + 1) * job.config.step_tokens
                yield Need(folder, "experts of the answers", tokens * of_token)
            folder = job.path(job.config.trainer.run_dir or Path("runs") / plan.group)
            for what, size in _trainer_sizes(job, shape).items():
                yield Need(folder, what, size)


def _trainer_sizes(job: PlannedTask, shape: ModelShape | None) -> dict[str, int]:
    """Returns the bytes of what the trainer writes beside logs, by name."""
    config = job.config
    trainer = config.trainer
    parameters = shape.parameters if shape else 0
    trained = parameters
    if shape and config.lora.rank:
        trained = shape.lora_parameters(config.lora.rank, config.lora.target_modules)

    kept = config.checkpoint.keep + 2  # the best one, and the one being written
    if config.algorithm.needs_critic:
        kept *= 2
    width = 2 if config.model.dtype == "bfloat16" and job.gpus else 4
    published = trained if config.lora.publishes_adapter else parameters
    recorded = trainer.keep_groups_mb << 20
    if trainer.max_steps:
        recorded = min(recorded, trainer.max_steps * config.step_tokens * _RECORDED)
    return {
        f"{kept} checkpoints": kept * state_bytes(config) * trained,
        f"{_VERSIONS} weight versions": _VERSIONS * width * published,
        "recorded groups": recorded,
    }


def check_disk(plan: Plan) -> Results:
    """Yields a line per folder, then one per disk."""
    wanted = list(needs(plan))
    databases = [job.path(job.config.state_dir) for job in plan.here if job.name in (DATA, REPLAY)]
    for folder in dict.fromkeys(need.folder for need in wanted):
        yield check_folder(folder, sqlite=folder in databases)
    yield from check_room(wanted, running=plan.inside)


def check_folder(folder: Path, sqlite: bool = False) -> Result:
    """Writes, syncs and removes a file in the folder, or where the folder will be created."""
    title = f"folder {folder}"
    place = _existing(folder)
    start = time.monotonic()
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".doctor-") as file:
            file.write(bytes(1 << 16))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        fix = "name another folder, or mount a volume there"
        return Result(title, "fail", f"cannot be written: {error.strerror or error} ({place})", fix)
    seconds = time.monotonic() - start

    kind = file_system(place)
    found = f"written and synced in {1000 * seconds:.0f} ms, {kind}"
    if sqlite:
        problem = fix = ""
        if kind in _NETWORK or kind.startswith("fuse"):
            problem = "SQLite's locks and log need one machine's own file system"
            fix = "put STATE_DIR of data-server and replay-buffer on a block volume"
        elif kind in ("overlay", "tmpfs"):
            problem = "the prompts' cursor and the replay store are gone with its container"
            fix = "mount a block volume if they must outlive it"
        if problem:
            return Result(title, "warn", f"{found}: {problem}", fix)
    fix = "use a faster disk: every stored group waits for a sync"
    return expect(title, seconds <= 1, found, fix, otherwise="warn")


def check_room(wanted: Sequence[Need], running: bool = False) -> Results:
    """Compares the space needed on each disk with its free space. A running group has already
    written some of it.
    """
    disks: dict[int, list[Need]] = {}
    for need in wanted:
        disks.setdefault(_existing(need.folder).stat().st_dev, []).append(need)
    for group in disks.values():
        left = shutil.disk_usage(_existing(group[0].folder)).free
        needed = sum(need.size for need in group)
        largest = sorted(group, key=lambda need: -need.size)[:4]
        parts = ", ".join(f"{need.what} {gb(need.size)}" for need in largest)
        result = fits(
            f"disk of {group[0].folder}",
            f"{gb(left)} free, {gb(needed)} needed ({parts})",
            needed=needed,
            available=left,
            fix="free space, use a larger disk, or lower checkpoint.keep, "
            "trainer.keep_groups_mb or replay.capacity",
        )
        yield replace(result, state="warn") if running and result.fix else result


def _existing(path: Path) -> Path:
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())


def file_system(path: Path, mounts: Sequence[Any] = ()) -> str:
    """Returns the type of the file system of `path` (`ext4`, `nfs4`, `fuse.rclone`), from `mounts`
    as psutil lists them.
    """
    mounts = mounts or psutil.disk_partitions(all=True)
    holding = [each for each in mounts if path.resolve().is_relative_to(each.mountpoint)]
    # Of two mounts on one folder, the later one hides the earlier.
    nearest = max(reversed(holding), key=lambda each: len(Path(each.mountpoint).parts))
    return str(nearest.fstype)
