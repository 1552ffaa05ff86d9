"""Checkpoints: Hugging Face directories with the trainer's state, written atomically and in the
background.

`checkpoints/step_000050/` loads with `AutoModelForCausalLM.from_pretrained`. Its
`trainer_state.json` holds the position in the prompt stream and the rest of a run's state, `state/`
the optimiser (torch.distributed.checkpoint, for any number of ranks), `critic/` and `reference/`
the other models that the run has changed.

A rename is atomic on a disk, but not on a mounted bucket, which moves or uploads file by file in
any order. So `trainer_state.json` is written last and lists every other file with size and
checksum. A checkpoint with a missing or truncated file is ignored; one with a file that has changed
since is refused.
"""

import json
import logging
import re
import shutil
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch.distributed as dist

from common import Json
from common.errors import ConfigError, ServiceError
from common.process.daemon_threads import in_daemon_thread
from learning.ranks import Ranks
from learning.saving import Files, Snapshot, checksums, damaged

log = logging.getLogger(__name__)
_STATE = "trainer_state.json"
_FORMAT = 4
_BEST = "best"
_LAST_WRITE_S = 30.0


class CheckpointFailed(ServiceError):
    """A checkpoint could not be written."""

    code = "checkpoint_failed"


@dataclass(frozen=True)
class RunState:
    """The state of a run apart from its tensors. Randomness depends on seed, step and rank only,
    and needs no state.
    """

    step: int
    position: int
    """Position in the prompt stream."""
    run_id: str
    kl_coef: float
    finished: list[int] = field(default_factory=list)
    """Later positions that are finished too."""
    accuracy: float | None = None
    """Accuracy of the evaluation at this step, if there was one and the rewards are verdicts."""
    mean_reward: float | None = None
    """Mean reward of that evaluation: without an accuracy it selects the best checkpoint."""
    identity: dict[str, list[str]] = field(default_factory=dict)
    """The settings that all attempts of the run share (`trainer.policy.identity`)."""


class Checkpoints:
    """The checkpoints of a run. Every rank has one, and calls the same methods in the same order.

    A step waits only for the copy to CPU memory; a thread writes the files. A directory gets its
    final name when all ranks' files are complete. One checkpoint is written at a time.

    Args:
        directory: only rank 0's argument counts. If other ranks do not see it, rank 0 writes
            everything.
        keep: how many of the newest to keep; the one with the best accuracy, or else mean reward,
            is kept too.
        static: returns files to copy into every checkpoint, such as the tokenizer's.
    """

    def __init__(
        self, directory: Path, ranks: Ranks, keep: int, static: Callable[[], Sequence[Path]] = tuple
    ) -> None:
        self.directory = ranks.broadcast(directory)
        self._ranks = ranks
        self._keep = keep
        self._static = static
        self.gathered = ranks.world_size > 1 and not _shared(self.directory, ranks)
        """Whether rank 0 gathers and writes everything, as the others do not see the directory."""
        if self.gathered and ranks.is_rank_zero:
            log.info(
                "the other ranks cannot see %s: rank 0 gathers and writes the whole checkpoint",
                self.directory,
            )
        self._group = None if self.gathered else ranks.group()
        self._writing: Future[None] | None = None

    @staticmethod
    def name(step: int) -> str:
        """Returns the directory name of the checkpoint after `step` steps."""
        return f"step_{step:06d}"

    def save(
        self,
        state: RunState,
        snapshots: Mapping[str, Snapshot],
        files: Mapping[str, bytes] = MappingProxyType({}),
    ) -> Path:
        """Starts to write `directory/step_000050` and returns its path. Waits for the previous
        checkpoint first.

        `state` and `files` (by name) count on rank 0 only, `snapshots` (by folder) on every rank.
        Raises CheckpointFailed when the previous one failed.
        """
        self.wait()
        target = self.directory / self.name(state.step)
        if not self.gathered or self._ranks.is_rank_zero:
            write = partial(self._write, target, state, snapshots, files=files)
            self._writing = in_daemon_thread(write, "checkpoint")
        return target

    def newest(self) -> Path | None:
        """Returns the newest complete checkpoint, as rank 0 sees it. A collective."""
        return self._ranks.broadcast(newest(self.directory) if self._ranks.is_rank_zero else None)

    def check(self) -> None:
        """Raises CheckpointFailed when the last one could not be written."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Waits until everything is written. Raises CheckpointFailed."""
        if self._writing is None:
            return
        error = self._writing.exception()
        self._writing = None
        if error is not None:
            reason = f"{type(error).__name__} {error}".splitlines()[0]
            raise CheckpointFailed(
                f"a checkpoint could not be written: {reason}",
                field="trainer.run_dir",
                value=str(self.directory),
                remedy="check the disk, then start again: "
                "the run continues from its newest complete checkpoint",
            )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        """Waits up to half a minute for a checkpoint that is being written, whatever ended the
        run.
        """
        if self._writing is not None:
            wait([self._writing], _LAST_WRITE_S)

    def _write(
        self,
        target: Path,
        state: RunState,
        snapshots: Mapping[str, Snapshot],
        files: Mapping[str, bytes],
    ) -> None:
        rank_zero = self._ranks.is_rank_zero
        written = target.with_suffix(".partial")
        try:
            # Each part in turn on all ranks: the first that fails on one ends it on all.
            self._together(lambda: self._begin(written, files) if rank_zero else None)
            for folder, snapshot in snapshots.items():
                self._together(partial(snapshot.write_files, written / folder))
                self._together(partial(snapshot.write_state, written / folder, self._group))
            self._together(lambda: self._complete(written, target, state) if rank_zero else None)
        except BaseException:
            if rank_zero:  # it would keep a full disk full
                shutil.rmtree(written, ignore_errors=True)
            raise

    def _begin(self, written: Path, files: Mapping[str, bytes]) -> None:
        for left_over in self.directory.glob("*.partial"):
            shutil.rmtree(left_over)
        written.mkdir(parents=True)
        for file in self._static():
            shutil.copyfile(file, written / file.name)
        for name, content in files.items():
            (written / name).write_bytes(content)

    def _complete(self, written: Path, target: Path, state: RunState) -> None:
        """Gives the directory its final name and removes old checkpoints."""
        # Last, because its list of files is what makes a checkpoint complete.
        _write_state(written, {"format": _FORMAT, "files": checksums(written), **asdict(state)})
        shutil.rmtree(target, ignore_errors=True)
        written.rename(target)

        checkpoints = _all(self.directory)
        best = _best(checkpoints)
        if best == target:
            link = self.directory / f"{_BEST}.new"
            try:
                link.unlink(missing_ok=True)
                link.symlink_to(target.name)
                link.rename(self.directory / _BEST)
            except OSError as error:  # a bucket has no links
                log.info("%s is the best so far; no link `%s` is made: %s", target, _BEST, error)
        for old in checkpoints[: -self._keep]:
            if old != best:
                shutil.rmtree(old)

    def _together(self, work: Callable[[], Any]) -> None:
        """Calls `work` on this rank and waits for the others; an error on one rank is raised on
        all.
        """
        error: Exception | None = None
        try:
            work()
        except Exception as problem:
            error = problem
        # In a group of its own: the main thread communicates in the default one meanwhile.
        if self._group is not None:
            own_message = f"{type(error).__name__} {error}" if error else None
            messages: list[str | None] = [None] * self._ranks.world_size
            dist.all_gather_object(messages, own_message, group=self._group)
            for rank, text in enumerate(messages):
                if error is None and text is not None:
                    error = OSError(f"rank {rank}: {text}")
        if error is not None:
            raise error


def tokenizer_files(directory: Path) -> list[Path]:
    """Returns the tokenizer's files in `directory`; the model's configuration is saved
    separately.
    """
    return [
        file
        for file in sorted(directory.iterdir())
        if file.name not in ("config.json", "generation_config.json")
    ]


def newest(directory: Path, at_most: int | None = None) -> Path | None:
    """Returns the newest complete checkpoint in `directory`, of at most the step `at_most` if
    given; or None.
    """
    for path in reversed(_all(directory)):
        if at_most is not None and int(path.name.removeprefix("step_")) > at_most:
            continue
        lacking = _lacking(path)
        if lacking is None:
            return path
        log.warning(
            "ignoring the incomplete checkpoint %s: %s is missing or truncated", path, lacking
        )
    return None


def _lacking(path: Path) -> str | None:
    """Returns a missing or truncated file according to `trainer_state.json`, or that file if
    missing; else None.
    """
    if not (path / _STATE).is_file():
        return _STATE
    try:
        files: Files = _parse((path / _STATE).read_bytes())["files"]
    except ValueError:  # `load_state` reports it
        return None
    for name, (size, _) in files.items():
        file = path / name
        if not file.is_file() or file.stat().st_size < size:
            return name
    return None


def _write_state(directory: Path, content: Json) -> None:
    (directory / _STATE).write_text(json.dumps(content | {"crc": _crc(content)}))


def _crc(content: Json) -> int:
    return zlib.crc32(json.dumps(content).encode())


def _parse(body: bytes) -> Json:
    """Returns the content of `trainer_state.json`. Raises _Changed when it has changed, ValueError
    when it is of another format.
    """
    try:
        content = json.loads(body)
    except ValueError as error:
        raise _Changed(f"{_STATE} has changed since it was written: {error}") from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError(f"{_STATE} has another format")
    if content.pop("crc", None) != _crc(content):
        raise _Changed(f"{_STATE} has changed since it was written: its checksum differs")
    return content


class _Changed(ValueError):
    """A file of a checkpoint is not what was written."""


def changed_file(path: Path, selects: Callable[[str], bool] = lambda _: True) -> str:
    """Reads the files of a checkpoint whose names `selects` accepts; returns the name of one that
    has changed since, or an empty text. Raises ValueError for a checkpoint of another format.
    """
    try:
        files: Files = _parse((path / _STATE).read_bytes())["files"]
    except _Changed:
        return _STATE
    selected = {name: sums for name, sums in files.items() if selects(name)}
    return damaged(path, selected) or ""


def set_aside(directory: Path) -> None:
    """Renames the checkpoints of an earlier run: a run that starts again would mistake them for its
    own.
    """
    if _all(directory):
        now = time.strftime("%Y%m%d-%H%M%S")
        directory.rename(directory.with_name(f"{directory.name}-until-{now}"))


def read_state(path: Path) -> bytes:
    """Returns the trainer's state in a checkpoint as bytes for other ranks; `load_state` checks
    them.
    """
    file = path / _STATE
    return file.read_bytes() if file.exists() else b'{"format": 0}'


def load_state(body: bytes, path: Path) -> RunState:
    """Parses the trainer's state. Raises ConfigError naming `path` when it is damaged or of another
    format.
    """
    try:
        content = _parse(body)
        del content["format"], content["files"]
        return RunState(**content)
    except Exception as error:  # damage can lead to any error
        raise cannot_resume(error, path) from None


def copy_with(path: Path, target: Path, state: Json) -> None:
    """Copies a checkpoint that `load_state` has read, with these fields of its state. A file that
    has changed since it was written is found when the copy is loaded.
    """
    shutil.copytree(path, target)
    _write_state(target, _parse(read_state(path)) | state)


def cannot_resume(error: Exception, path: Path) -> ConfigError:
    """Returns the error for a checkpoint that is damaged or of another format."""
    earlier = "the beginning"
    for other in _all(path.parent):
        if other < path and _lacking(other) is None:
            earlier = other.name
    reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__} {error}"
    return ConfigError(
        f"the checkpoint cannot be used: {reason}".splitlines()[0],
        code="checkpoint_changed" if isinstance(error, _Changed) else None,
        field="trainer.run_dir",
        value=str(path),
        remedy=f"restore it from a copy; or remove it to continue from {earlier}; "
        "or set checkpoint.resume false",
    )


def check_model(path: Path) -> None:
    """Raises ConfigError when `path` is a checkpoint whose model or tokenizer has changed since it
    was written.
    """
    if (path / _STATE).is_file():
        try:
            changed = changed_file(path, lambda name: "/" not in name)
        except ValueError:  # of another version; loading the model will tell
            return
        if changed:
            raise has_changed(changed, path)


def has_changed(name: str, path: Path) -> ConfigError:
    """Returns the error for a checkpoint's file that has changed since it was written."""
    return cannot_resume(
        _Changed(f"{name} has changed since it was written: its checksum differs"), path
    )


def _best(checkpoints: Sequence[Path]) -> Path | None:
    """Returns the checkpoint with the highest accuracy, or mean reward where there is none, the
    newest of equals; None if none was evaluated.
    """
    rated: list[tuple[float, Path]] = []
    for path in checkpoints:
        with suppress(OSError, ValueError, KeyError):
            state = json.loads((path / _STATE).read_text())
            found = state["mean_reward"] if state["accuracy"] is None else state["accuracy"]
            if found is not None:
                rated.append((float(found), path))
    return max(rated)[1] if rated else None


def _shared(directory: Path, ranks: Ranks) -> bool:
    """Returns whether every rank sees a file that rank 0 writes beside `directory`."""
    token = directory.with_name(".shared")
    if ranks.is_rank_zero:
        directory.parent.mkdir(parents=True, exist_ok=True)
        token.write_text(str(time.time_ns()))
    ranks.barrier()
    shared = ranks.all_equal(token.read_bytes() if token.exists() else b"")
    if ranks.is_rank_zero:
        token.unlink()
    return shared


def _all(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return sorted(
        path
        for path in directory.iterdir()
        if re.fullmatch(r"step_\d{6,}", path.name) and path.is_dir()
    )
