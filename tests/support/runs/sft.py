"""Training on examples in this process, and random rows of them, for the random tiny
models."""

from contextlib import ExitStack
from pathlib import Path

import numpy as np
from rich.console import Console

from common.process.run_lock import RunLock
from common.settings.config import Config
from learning.ranks import Ranks
from services.data.sft_examples import Examples
from tests.support.batches.groups import VOCABULARY
from trainer.sft.rows import TrainingSequence
from trainer.sft.run import TASK, SftRun


def fine_tune(config: Config, examples: Examples, console: Console) -> Path:
    """Trains in this process; returns the last checkpoint. Raises ConfigError or another
    ServiceError on failure."""
    assert config.trainer.run_dir is not None
    with RunLock.of_new_run(config.trainer.run_dir, TASK) as lock, ExitStack() as stack:
        ranks = Ranks.alone(config)
        run = SftRun(config, ranks, lock=lock, examples=examples, console=console, stack=stack)
        return run.train()


def random_rows(count: int, seed: int) -> list[TrainingSequence]:
    """Returns rows of different lengths; in some, a passage between two answers is not learned."""
    rng, rows = np.random.default_rng(seed), list[TrainingSequence]()
    for n in range(count):
        length = int(rng.integers(4, 12))
        learned = np.ones(length, np.float32)
        if n % 2:
            learned[1 : int(rng.integers(2, length - 1))] = 0
        prompt = rng.integers(3, VOCABULARY, int(rng.integers(3, 9)))
        rows.append(
            TrainingSequence(
                prompt.astype(np.int32),
                rng.integers(3, VOCABULARY, length).astype(np.int32),
                learned,
            )
        )
    return rows
