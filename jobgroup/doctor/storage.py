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
from common.settings.config import Config
from jobgroup.doctor.availability import Hub, models
from jobgroup.doctor.plan import Plan, PlannedTask
from jobgroup.doctor.report import Result, expect, fits, gb

_STATE = 12
"""Bytes of a parameter in a checkpoint: float32 weights and AdamW's two moments."""
_VERSIONS = 3
"""Weight versions on disk at the trainer: two kept, one arriving."""
_PULLED = 5
"""Weight versions on disk on a rollout node: two more in use or on their way."""
_TOKEN = 8
"""Bytes of a stored token: id, logprob."""
_RECORDED = 12
"""Bytes of a token that the trainer records, also with its own logprob."""
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
        has_database = job.name in (DATA, REPLAY)
        logs = _LOGS * job.num_nodes
        yield Need("STATE_DIR", state, f"{job.name}'s logs", size=logs, sqlite=has_database)

        purpose = "STATE_DIR"
        folder = state
        if job.name == TRAINER:
            purpose = "RUN_DIR"
            folder = job.path(job.config.trainer.run_dir or Path("runs") / plan.group)
        for what, size in _sizes(job, _shape(plan, job.config.model.name)).items():
            yield Need(purpose, folder, what, size=size)

    for name, job in models(plan).items():
        shape = _shape(plan, name)
        hub = Hub(job.env)
        is_here = job.path(name).is_dir() or hub.cached("model", name) is not None
        only_tokenizer = job.name == ENVIRONMENT
        if shape and not is_here and not only_tokenizer:
            yield Need("cache of the hub", hub.cache, name, size=2 * shape.parameters)
    yield Need("temporary files", Path(tempfile.gettempdir()), "temporary files", size=_LOGS)


def _shape(plan: Plan, name: str) -> ModelShape | None:
    """Returns None without a config.json, or for an architecture that the memory check reports as
    unknown.
    """
    with suppress(KeyError, ConfigError):
        return ModelShape.of(plan.shapes[name])
    return None


def _sizes(job: PlannedTask, shape: ModelShape | None) -> dict[str, int]:
    """Returns the bytes of what the task writes beside logs, by name."""
    config = job.config
    parameters = shape.parameters if shape else 0
    if job.name == REPLAY:
        tokens = config.replay.capacity * config.sampling.max_new_tokens
        return {"full replay store": tokens * _TOKEN}
    if job.name == CRITIC:
        return {"2 checkpoints of the critic": 2 * _STATE * parameters}
    if job.name == ROLLOUT and not config.lora.publishes_adapter:
        return {f"{_PULLED} pulled versions": _PULLED * job.num_nodes * 2 * parameters}
    if job.name == TRAINER:
        return _trainer_sizes(config, shape, on_gpu=job.gpus > 0)
    return {}


def _trainer_sizes(config: Config, shape: ModelShape | None, *, on_gpu: bool) -> dict[str, int]:
    trainer = config.trainer
    lora = config.lora
    parameters = shape.parameters if shape else 0
    trained = parameters
    if shape and lora.rank:
        trained = shape.lora_parameters(lora.rank, lora.target_modules)

    kept = trainer.keep_checkpoints + 2  # the best one, and the one being written
    has_critic = config.algorithm.needs_critic and config.critic.location == "trainer"
    models = 2 if has_critic else 1
    width = 2 if config.model.dtype == "bfloat16" and on_gpu else 4
    published = trained if lora.publishes_adapter else parameters
    steps = trainer.max_steps or 1 << 40
    completions = steps * trainer.batch_size * config.sampling.group_size
    recorded = completions * config.sampling.max_new_tokens * _RECORDED
    return {
        f"{kept} checkpoints": kept * _STATE * trained * models,
        f"{_VERSIONS} weight versions": _VERSIONS * width * published,
        "recorded groups": min(trainer.keep_groups_mb << 20, recorded),
    }


def check_disk(plan: Plan) -> Iterator[Result]:
    """Yields a line per folder, then one per disk; for a cluster only what volumes need."""
    wanted = list(needs(plan))
    by_folder: dict[Path, list[Need]] = {}
    for need in wanted:
        by_folder.setdefault(need.folder, []).append(need)
    for folder, group in by_folder.items():
        purpose = _purposes(group)
        if plan.assumed_gb is None:
            has_database = any(need.sqlite for need in group)
            yield check_folder(folder, purpose, sqlite=has_database)
        elif sum(need.size for need in group) > 1e9:  # less is not worth a line
            yield Result(f"disk of {purpose} {folder}", "ok", f"{_total(group)} needed there")
    if plan.assumed_gb is None:
        yield from check_room(wanted, running=plan.topology is not None)


def check_folder(folder: Path, purpose: str, sqlite: bool = False) -> Result:
    """Writes, syncs and removes a file in the folder, or where the folder will be created."""
    title = f"{purpose} {folder}"
    place = _existing(folder)
    start = time.monotonic()
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".doctor-") as file:
            file.write(bytes(1 << 16))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        fix = "name another folder, or mount a volume there"
        if "cache" in purpose:
            fix = "set HF_HOME to another folder"
        return Result(title, "fail", f"cannot be written: {error.strerror or error} ({place})", fix)
    seconds = time.monotonic() - start

    kind = file_system(place)
    found = f"written and synced in {1000 * seconds:.0f} ms, {kind}"
    if sqlite and (kind in _NETWORK or kind.startswith("fuse")):
        found += ": SQLite's locks and log need one machine's own file system"
        fix = "put STATE_DIR of data-server and replay-buffer on a block volume"
    elif sqlite and kind in ("overlay", "tmpfs"):
        found += ": it is gone with its container"
        fix = (
            "mount a block volume if the prompts' cursor and the replay store "
            "must outlive the container"
        )
    elif seconds > 1:
        found += ": every stored group waits for a sync"
        fix = "use a faster disk"
    else:
        return Result(title, "ok", found)
    return Result(title, "warn", found, fix)


def check_room(wanted: Sequence[Need], running: bool = False) -> Iterator[Result]:
    """Compares the space needed on each disk with its free space. A running group has already
    written some of it.
    """
    disks: dict[int, list[Need]] = {}
    for need in wanted:
        disks.setdefault(_existing(need.folder).stat().st_dev, []).append(need)
    for group in disks.values():
        left = shutil.disk_usage(_existing(group[0].folder)).free
        size = sum(need.size for need in group)
        title = f"disk of {_purposes(group)}"
        found = f"{gb(left)} free, {_total(group)} needed"
        fix = (
            "free space, use a larger disk, or lower trainer.keep_checkpoints, "
            "trainer.keep_groups_mb or replay.capacity"
        )
        if running:
            yield expect(title, size < left, found, fix, otherwise="warn")
        else:
            yield fits(title, found, needed=size, available=left, fix=fix)


def _purposes(group: Sequence[Need]) -> str:
    return ", ".join(dict.fromkeys(need.purpose for need in group))


def _total(group: Sequence[Need]) -> str:
    """Formats the sum with its largest parts."""
    total = gb(sum(need.size for need in group))
    largest = sorted(group, key=lambda need: -need.size)[:4]
    return f"{total} ({', '.join(f'{need.what} {gb(need.size)}' for need in largest)})"


def _existing(path: Path) -> Path:
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())


def file_system(path: Path, mounts: Sequence[Any] = ()) -> str:
    """Returns the type of the file system of `path` (`ext4`, `nfs4`, `fuse.rclone`), from `mounts`
    as psutil lists them.
    """
    mounts = mounts or psutil.disk_partitions(all=True)
    holding = [each for each in mounts if path.resolve().is_relative_to(each.mountpoint)]
    if not holding:
        return "unknown"
    # Of two mounts on one folder, the later one hides the earlier.
    nearest = max(reversed(holding), key=lambda each: len(Path(each.mountpoint).parts))
    return str(nearest.fstype)
