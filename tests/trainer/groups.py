"""Groups sampled from nothing in particular."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.algorithm import AlgorithmSection
from common.config import Config
from common.schemas import Completion, Group
from learning.ranks import Ranks
from trainer.algorithms.batch import Batch
from trainer.policy.checkpoint import Checkpoints, TrainerState
from trainer.policy.policy import Policy

VOCABULARY = 300


def make_group(rng: np.random.Generator, rewards: list[float], version: int = 0, position: int = 0) -> Group:
    """A group of random completions of different lengths with the given rewards."""
    completions = []
    for reward in rewards:
        length = int(rng.integers(2, 12))
        completions.append(
            Completion(
                token_ids=rng.integers(3, VOCABULARY, length).astype(np.int32),
                logprobs=np.log(rng.uniform(1e-3, 1e-2, length)).astype(np.float32),
                text="x",
                finish_reason="stop",
                weight_versions=[(version, 0, length)],
                reward=reward,
                correct=reward > 0,
            )
        )
    return Group(
        id=f"group-{position}-{rng.integers(1 << 30)}",
        prompt_id=f"prompt-{position}",
        prompt="How many?",
        ground_truth="1",
        prompt_token_ids=rng.integers(3, VOCABULARY, int(rng.integers(3, 9))).astype(np.int32),
        completions=completions,
        position=position,
    )


def off_policy_groups() -> list[Group]:
    """Four groups of four, one of equal rewards, sampled by another policy than a new one."""
    rng = np.random.default_rng(1)
    rewards = [[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 1.0]]
    groups = [make_group(rng, row, position=i) for i, row in enumerate(rewards)]
    for group in groups:
        for completion in group.completions:
            noise = rng.normal(0, 0.3, len(completion.logprobs)).astype(np.float32)
            completion.logprobs = (np.log(1 / VOCABULARY) + noise).astype(np.float32)
    return groups


def with_algorithm(config: Config, **settings: Any) -> Config:
    """A copy with these settings of the algorithm and defaults for the rest."""
    changed = config.model_copy(deep=True)
    changed.algorithm = AlgorithmSection.model_validate({"rollout_correction": "none", **settings})
    return changed


def weighed(learner: Policy, groups: list[Group], weights: list[float] | None = None) -> Batch:
    """The batch of these groups as the training loop prepares it for `learner`."""
    config = learner.config
    batch = Batch.of(groups, weights or [1.0] * len(groups), config, learner.step)
    learner.score(batch)
    if config.algorithm.needs_critic:
        rng = np.random.default_rng(5)
        batch.values = [rng.normal(0, 0.3, length).astype(np.float32) for length in batch.lengths]
    weigh(batch, config.algorithm, config.sampling.max_new_tokens, learner.kl_coef)
    return batch


def whole(groups: list[Group], config: Config) -> Batch:
    """The batch of these groups for a new learner."""
    return weighed(Policy(config, Ranks()), groups)


def save(learner: Policy, directory: Path, keep: int = 3, accuracy: float | None = None, static: Sequence[Path] = ()) -> Path:
    """A complete checkpoint of the learner. Every rank calls it."""
    checkpoints = Checkpoints(directory, learner.ranks, keep, static=lambda: static)
    state = TrainerState(learner.step, 7, "run", learner.kl_coef, accuracy=accuracy)
    path = checkpoints.save(state if learner.ranks.first else None, learner.snapshots(checkpoints.alone), learner.step)
    checkpoints.wait()
    return path
