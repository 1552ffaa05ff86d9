"""Prepares the output directory of the Python API: an earlier run in it is refused or removed."""

import shutil
from pathlib import Path

from common.errors import ConfigError
from common.process.run_lock import RunLock
from common.process.storage import make_directory

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
)
"""What a run writes, and by which one is recognised."""


def check_output(directory: Path, may_hold_run: bool) -> None:
    """Creates `directory`. Raises ConfigError if that fails, or if it holds a run and
    `may_hold_run` is false.
    """
    if not may_hold_run and any((directory / name).exists() for name in _CONTENT):
        raise ConfigError(
            "the output directory already has a run",
            field="output_dir",
            value=str(directory),
            remedy="continue it (resume_from_checkpoint=True), replace it "
            "(overwrite_output_dir=True), or name another directory",
        )
    make_directory(directory, "output_dir")


def remove_run(directory: Path) -> None:
    """Removes the run in `directory`, together with its curves. Raises ConfigError while it is
    running.
    """
    with RunLock(directory, "that empties it", "output_dir"):
        for name in (*_CONTENT, "curves.png"):
            path = directory / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
