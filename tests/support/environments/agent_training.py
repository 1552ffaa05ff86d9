"""Trains the tiny model for a few steps on an environment, in this process."""

from pathlib import Path
from typing import Any

from rich.console import Console

from common.wire.schemas import Prompt
from services.reward.functions.text import LengthPenaltyFunction
from tests.support.runs.small_run import small_run
from trainer.observe.problems import Problems
from trainer.observe.run_dir import read_lines
from trainer.start.in_process import train_in_process


def train_on(
    environment: str, base_model: Path, directory: Path, **columns: str
) -> list[dict[str, Any]]:
    """Trains two steps and returns their metrics; checks that each trained only sampled tokens and
    lost no episode."""
    config = small_run(base_model, directory)
    config.environment.name, config.environment.turns = environment, 6
    config.sampling.max_new_tokens, config.sampling.group_size = 64, 4
    config.trainer.batch_size, config.trainer.max_steps, config.evaluation.samples = 1, 2, 0
    config.evaluation.pass_samples, config.rollout.max_context_tokens = 0, 512
    prompts = [
        Prompt(
            id=str(i),
            prompt=f"How many apples are {i} and 1?",
            ground_truth=str(i + 1),
            columns=columns | {"index": i},
        )
        for i in range(4)
    ]
    train_in_process(
        config,
        Console(quiet=True),
        problems=Problems(prompts, []),
        rewards=[LengthPenaltyFunction()],
    )
    assert config.trainer.run_dir is not None
    records = read_lines(config.trainer.run_dir / "metrics.jsonl")
    assert len(records) == 2
    for record in records:
        assert record["update"]["trained_tokens"] > 0
        assert record["update"]["delta_logprob"] < 1e-6, (
            "the trainer reads other tokens than the engine sampled"
        )
        assert record["dropped"] == {}
    return records
