"""Prepares the output directory of the Python API: an earlier run in it is refused or removed."""

import shutil
from contextlib import suppress
from pathlib import Path

from common.errors import ConfigError
from common.process.run_lock import RunLock
from common.process.storage import make_directory
from trainer.observe.run_dir import has_step, is_run

AUTO = "auto"
"""Asks for a run to be continued if there is one, and else begun."""
# What a run writes, and by which one is recognised.
_CONTENT = (
    "checkpoints",
    "weights",
    "model",
    "state",
    "trackers",
    "groups",
    "config.json",
    "metrics.jsonl",
    "groups.jsonl",
    "evaluations.jsonl",
    "samples.jsonl",
    "attempts.jsonl",
    "extras.jsonl",
    "audit.jsonl",
    "given_problems.json",
    "regrade.jsonl",
    "why.json",
    "fork.json",
    "ground_truths.json",
)


def check_output(directory: Path, may_hold_run: bool, resume: bool) -> None:
    """Creates `directory`. Raises ConfigError if that fails, if it holds a run and `may_hold_run`
    is false, or if it holds none and `resume` is true. One that ended before its first step may be
    resumed or replaced.
    """
    is_used = any((directory / name).exists() for name in _CONTENT)
    has_checkpoint = _has_checkpoint(directory)
    if resume and not can_continue(directory):
        raise ConfigError(
            "there is no run to continue in this output directory",
            field="resume_from_checkpoint",
            value=str(directory),
            remedy="leave it out to begin a run, set it to auto to begin or continue one, or name "
            "the output directory of the run",
        )
    is_without_step = is_run(directory) and not has_step(directory) and not has_checkpoint
    if is_used and not may_hold_run and not is_without_step:
        raise ConfigError(
            "the output directory already has a run",
            field="output_dir",
            value=str(directory),
            remedy="continue it (resume_from_checkpoint=True), replace it "
            "(overwrite_output_dir=True), or name another directory",
            settings=("resume_from_checkpoint",),
        )
    make_directory(directory, "output_dir")


def can_continue(directory: Path) -> bool:
    """Returns whether `directory` holds a run, if only one that ended before its first step."""
    return is_run(directory) or _has_checkpoint(directory)


def decided(resume: bool | str | Path | None, directory: Path) -> bool | str | Path | None:
    """Returns what a caller asked for, with `auto` decided by whether `directory` holds a run."""
    return can_continue(directory) if resume == AUTO else resume


def _has_checkpoint(directory: Path) -> bool:
    return any(directory.glob("checkpoints/*"))


def check_newest(directory: Path, checkpoint: Path) -> None:
    """Raises ConfigError unless a path is that of the newest checkpoint of the run in
    `directory`.
    """
    # It imports torch, which the commands' help must not wait for.
    from trainer.policy.checkpoint import newest as newest_checkpoint

    newest = newest_checkpoint(directory / "checkpoints")
    if newest is not None and checkpoint.resolve() == newest.resolve():
        return
    message = "there is no such checkpoint"
    remedy = "leave it out: there is no run in output_dir to continue"
    if checkpoint.is_dir():
        message = "a run goes on from its newest checkpoint, in its own output_dir"
        remedy = "name the output_dir of this checkpoint, and remove newer ones there"
    if newest is not None:
        remedy = f"give True or {newest}, or remove what is newer than your checkpoint"
    raise ConfigError(message, field="resume_from_checkpoint", value=str(checkpoint), remedy=remedy)


def link_checkpoint(directory: Path, checkpoint: Path) -> None:
    """Links `checkpoint-STEP`, where transformers looks for checkpoints, to a checkpoint, and
    removes the links to those that are gone.
    """
    step = int(checkpoint.name.removeprefix("step_"))
    remove_dead_links(directory)
    with suppress(OSError):  # a mounted bucket has no links
        link = directory / f"checkpoint-{step}"
        link.unlink(missing_ok=True)
        link.symlink_to(checkpoint.relative_to(directory))


def remove_dead_links(directory: Path) -> None:
    """Removes the links to checkpoints that are gone."""
    for link in directory.glob("checkpoint-*"):
        if link.is_symlink() and not link.exists():
            link.unlink()


def remove_run(directory: Path) -> None:
    """Removes the run in `directory`. Raises ConfigError while it is running."""
    with RunLock(directory, "that empties it", "output_dir"):
        links = [link.name for link in directory.glob("checkpoint-*") if link.is_symlink()]
        for name in (*_CONTENT, *links):
            path = directory / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
