"""A run that was really trained."""

from pathlib import Path

import pytest
from rich.console import Console

from tests.support.apps import tiny
from trainer import train_in_process


@pytest.fixture(scope="session")
def tiny_run(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of four steps on the built-in task, with a critic and evaluations."""
    directory = tmp_path_factory.mktemp("tiny")
    more = ("--trainer.max_steps", "4", "--trainer.eval_samples", "8", "--trainer.eval_every", "2", "--trainer.eval_k", "2")
    config = tiny(base_model, directory, *more, "--algorithm.name", "ppo", "--trainer.warmup_steps", "0")
    train_in_process(config, Console(quiet=True))
    return directory / "run"
