"""A run that was really trained."""

import os
from fcntl import LOCK_EX, flock
from pathlib import Path

import pytest
from rich.console import Console

from tests.support.services.apps import tiny
from trainer import train_in_process


@pytest.fixture(scope="session")
def tiny_run(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of four steps on the built-in task, with a critic and evaluations;
    tests only read it.

    The processes of pytest-xdist share it.
    """
    base = tmp_path_factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "tiny"
    directory.mkdir(exist_ok=True)
    complete = directory / "complete"
    with (directory / "lock").open("w") as lock:
        flock(lock, LOCK_EX)  # one process at a time
        if not complete.exists():
            more = (
                "--trainer.max_steps",
                "4",
                "--evaluation.samples",
                "8",
                "--evaluation.every",
                "2",
            )
            ppo = (
                "--algorithm.name",
                "ppo",
                "--optimizer.warmup_steps",
                "0",
            )
            config = tiny(base_model, directory, *more, *ppo)
            train_in_process(config, Console(quiet=True))
            complete.touch()
    return directory / "run"
